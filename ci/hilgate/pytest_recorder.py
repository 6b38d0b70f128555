# SPDX-License-Identifier: Apache-2.0
"""Note what a Python process rests on, by an audit hook: the `sitecustomize` of a watched step.

Noted are the files below a folder that it opens, what it opens or lists elsewhere that was there before it began,
where it connects to, and what it asks git about that folder. One file for each process: each note once, ended by a NUL.
A compiled module counts as its source. Not seen: what other programs read, and what libraries read without Python's
help. Processes end without notice, so nothing is kept for their end. Imports os and sys alone.
"""

import os
import sys

LOADS = {"ctypes.dlopen": 0, "sqlite3.connect": 0, "os.link": 0, "import": 1}
"""Event -> which of its arguments names the file; an import names one for an extension module alone."""

FOLDERS = frozenset({"os.listdir", "os.scandir"})
GIT = "git://"
"""How the note of a git command begins that was asked of the repository."""
STREAM = 1
"""`socket.SOCK_STREAM`."""
CONNECTION = "tcp://"
"""How the note of a connection begins; `/` follows at the end of a folder that was listed."""

_looked: set[str] = set()
_noted: set[str] = set()
_folder = _root = ""
_held: tuple[str, ...] = ()
_began = 0


def watch(folder: str, root: str, held: tuple[str, ...] = (), began: int = 0) -> None:
    """Begin: notes go to `<folder>/lists/<pid>`, and `root` has no link in its path.

    Nothing below the folders `held` is noted unless it is below `root`, and elsewhere nothing that was made or changed
    since `began`, in ns: the step's own files.
    """
    global _folder, _root, _held, _began
    _folder, _root, _held, _began = folder, root, held, began
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
    elif event in FOLDERS:
        _read(arguments[0] if arguments[0] is not None else ".", folder=True)
    elif event == "socket.connect":
        _connect(*arguments)
    elif event == "subprocess.Popen":
        _git(arguments[1], arguments[2])


def _connect(own: object, address: object) -> None:
    """Note where a stream goes to; a datagram that is connected sends nothing."""
    if isinstance(address, str | bytes):
        _read(address)
    elif isinstance(address, tuple) and len(address) > 1 and getattr(own, "type", STREAM) == STREAM:
        _once(f"{CONNECTION}{address[0]}:{address[1]}")


def _git(command: object, place: object) -> None:
    """Note a git command over the repository: its answer rests on refs, the index or the configuration."""
    if not isinstance(command, list | tuple) or not command:
        return
    words = [os.fsdecode(word) for word in command if isinstance(word, str | bytes | os.PathLike)]
    if os.path.basename(words[0]) != "git":
        return
    where = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else os.getcwd()
    at = 1
    while at < len(words) and words[at].startswith("-"):  # options of git itself, some with a value
        if words[at] == "-C" and at + 1 < len(words):
            where = os.path.join(where, words[at + 1])
        at += 2 if words[at] in {"-C", "-c"} else 1
    if f"{os.path.realpath(where)}/".startswith(f"{_root}/") and at < len(words):
        _once(f"{GIT}{words[at]}")


def _read(place: object, *, folder: bool = False) -> None:
    if not place or not isinstance(place, str | bytes | os.PathLike):
        return
    name, end = os.path.abspath(os.fsdecode(place)), "/" * folder
    if name + end in _looked:
        return
    _looked.add(name + end)
    real = os.path.realpath(name)
    for path in {name, real}:
        above, _, file = path.rpartition("/")
        compiled = file.endswith(".pyc") and above.endswith("/__pycache__")  # <module>.<whoever compiled it>.pyc
        source = f"{above[:-12]}/{file.partition('.')[0]}.py" if compiled else path
        if source.startswith(f"{_root}/"):
            if folder or os.path.isfile(source):
                _once(source[len(_root) + 1 :] + end)
        elif path == real and source != _root and not f"{source}{end}".startswith(_held) and _is_older(source):
            _once(source + end)


def _is_older(path: str) -> bool:
    """Whether it was there, as it is, before the step began."""
    try:
        return os.lstat(path).st_ctime_ns < _began
    except OSError:
        return False


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
