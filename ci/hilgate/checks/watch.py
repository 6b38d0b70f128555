# SPDX-License-Identifier: Apache-2.0
"""Note which files below a folder a Python process opens, by an audit hook: the `sitecustomize` of a watched step.

One file for each process: each name once, ended by a NUL. A compiled module counts as its source. Not seen: what other
programs read, and what libraries read without Python's help. Processes end without notice, so nothing is kept for their
end. Imports os and sys alone.
"""

import os
import sys

LOADS = {"ctypes.dlopen": 0, "sqlite3.connect": 0, "os.link": 0, "import": 1}
"""Event -> which of its arguments names the file; an import names one for an extension module alone."""

_seen: set[str] = set()
_folder = _root = ""


def watch(folder: str, root: str) -> None:
    """Begin: names go to `<folder>/lists/<pid>`, and `root` has no link in its path."""
    global _folder, _root
    _folder, _root = folder, root
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        # builtins.open gives a mode, os.open flags alone; both give flags.
        written = isinstance(mode, str) and mode[:1] in {"w", "a", "x"}
        written = written or (isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY)
        if not written and not isinstance(path, int):
            _read(path)
    elif event in LOADS:
        _read(arguments[LOADS[event]])


def _read(place: object) -> None:
    if not place or not isinstance(place, str | bytes | os.PathLike):
        return
    name = os.path.abspath(os.fsdecode(place))
    if name in _seen:
        return
    _seen.add(name)
    for path in {name, os.path.realpath(name)}:
        folder, _, file = path.rpartition("/")
        compiled = file.endswith(".pyc") and folder.endswith("/__pycache__")  # <module>.<whoever compiled it>.pyc
        source = f"{folder[:-12]}/{file.partition('.')[0]}.py" if compiled else path
        if source.startswith(f"{_root}/") and os.path.isfile(source):
            _note(source[len(_root) + 1 :])


def _note(name: str) -> None:
    try:
        # Opened anew each time: a forked child must not share a position in the file.
        descriptor = os.open(f"{_folder}/lists/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, os.fsencode(name) + b"\0")
        finally:
            os.close(descriptor)
    except OSError:  # no room, no more open files: the step goes on, and nobody will know all that it reads
        try:  # noqa: SIM105 - contextlib would be another import in every process
            os.unlink(f"{_folder}/whole")
        except OSError:
            pass
