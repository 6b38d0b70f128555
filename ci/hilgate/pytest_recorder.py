# SPDX-License-Identifier: Apache-2.0
"""Note which files of a checkout a Python process reads, by an audit hook: the `sitecustomize` of a step's processes.

Noted are files that it opens, imports or loads, files that the command line of a program names that it starts, and,
with a `/` at the end, folders that it lists. One file for each process: each note once, ended by a NUL. A compiled
module counts as its source. Not seen: what other programs read beside what their command line names, and what
libraries read without Python's help. Processes end without notice, so nothing is kept for their end. Imports os and
sys alone.
"""

import os
import sys

LOADS = {"ctypes.dlopen": 0, "sqlite3.connect": 0, "os.link": 0, "import": 1}
"""Event -> which of its arguments names the file; an import names one for an extension module alone."""

FOLDERS = frozenset({"os.listdir", "os.scandir"})
STARTS = {"subprocess.Popen": 1, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2, "os.system": 0}
"""Event -> which of its arguments is the command that it starts."""
BETWEEN = str.maketrans(dict.fromkeys("'\"`:=,;|<>(){}&", " "))
"""What stands around the name of a file in a word of a command: `HEAD:docs/notes.md`, `sh -c "cat notes.md; ls"`."""
LIST = ("importlib.", "_frozen_importlib", "_pytest.")
"""Modules that list a folder only to find what they import or collect, and then open that."""
COMPARES = "bytes_to_compare"
"""Name of the function that opens a file only for a digest, to tell whether it changed: that is no read."""
EVENTS = frozenset({"open", *LOADS, *FOLDERS, *STARTS})

_looked: set[str] = set()
_noted: set[str] = set()
_folder = _root = ""


def watch(folder: str, root: str) -> None:
    """Begin: notes go to `<folder>/lists/<pid>`, an empty one first; `root`, the checkout, has no link in its path."""
    global _folder, _root
    _folder, _root = folder, root
    _note("")
    sys.addaudithook(_hook)


def bytes_to_compare(path: "str | bytes | os.PathLike[str]") -> bytes:
    """The bytes of a file, of which the caller makes nothing but a digest."""
    with open(path, "rb") as file:
        return file.read()


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event not in EVENTS:  # most are none
        return
    try:
        caller = sys._getframe(1)  # noqa: SLF001 - Python has no other way
    except ValueError:  # the interpreter itself opens the program
        caller = sys._getframe()  # noqa: SLF001
    try:
        if event == "open":
            path, mode, flags = arguments
            # builtins.open gives a mode, os.open flags alone; both give flags.
            written = isinstance(mode, str) and mode[:1] in {"w", "a", "x"}
            written = written or (isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY)
            if not written and not isinstance(path, int) and caller.f_code.co_name != COMPARES:
                _read(path)
        elif event in LOADS:
            _read(arguments[LOADS[event]])
        elif event in FOLDERS:
            if not str(caller.f_globals.get("__name__", "")).startswith(LIST):
                _read(arguments[0] if arguments[0] is not None else ".", folder=True)
        elif event in STARTS:
            _start(arguments[STARTS[event]], arguments[2] if event == "subprocess.Popen" else None)
    except (OSError, ValueError):  # no name of a file, or the working directory is gone: the call itself says so
        pass


def _start(command: object, place: object) -> None:
    """Note the files that a command line names; git's `-C` says where, and names in its commits begin at the root."""
    given = command if isinstance(command, list | tuple) else [command]
    words = [os.fsdecode(word) for word in given if isinstance(word, str | bytes | os.PathLike)]
    where = os.path.abspath(os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ".")
    if words and os.path.basename(words[0]) == "git":
        if "-C" in words[:-1]:
            where = os.path.join(where, words[words.index("-C") + 1])
        words = [word for word in words if not word.startswith("-")]  # --exclude-per-directory=.gitignore
    places = {where, _root} if f"{os.path.realpath(where)}/".startswith(f"{_root}/") else {where}
    for word in words:
        for name in {word, *word.translate(BETWEEN).split()}:
            for folder in places:
                _read(os.path.join(folder, name), known=False)


def _read(place: object, *, folder: bool = False, known: bool = True) -> None:
    """Note a file, or a folder that is listed; unless `known`, it is only a word, and may be the name of none."""
    if not place or not isinstance(place, str | bytes | os.PathLike):
        return
    name, end = os.path.abspath(os.fsdecode(place)), "/" * folder
    if name + end in _looked:
        return
    if known:
        _looked.add(name + end)
    elif not os.path.isfile(name):
        return
    for path in {name, os.path.realpath(name)}:
        above, _, file = path.rpartition("/")
        compiled = file.endswith(".pyc") and above.endswith("/__pycache__")  # <module>.<whoever compiled it>.pyc
        source = f"{above[:-12]}/{file.partition('.')[0]}.py" if compiled else path
        if source.startswith(f"{_root}/") and (folder or os.path.isfile(source)):
            _once(source[len(_root) + 1 :] + end)


def _once(name: str) -> None:
    if name not in _noted:
        _noted.add(name)
        _note(name)


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
