# SPDX-License-Identifier: Apache-2.0
"""Note what a Python process reads, by an audit hook: its text is the `sitecustomize` of the processes of a step.

One file for each process, each note once, ended by a NUL:

    r <size>:<mtime>:<ctime> <name>   a file opened for reading, or loaded; `r - <name>` for one that is not there
    l <folder>                        a folder below the root that is listed
    m <folder>                        one that is searched for modules
    p <program>                       a program other than Python that is started in the root, or is told of it
    n <host>                          a host that is called

A compiled module counts as its source. Not seen: what other programs read, and libraries without Python's help.
`<folder>/whole` goes when a note could not be written. Processes end without notice, so nothing is kept for their end.
Imports os and sys alone.
"""

import os
import sys

QUIET = {"lscpu", "uname", "ldconfig", "nvidia-smi", "rocm-smi", "amd-smi", "gcc", "g++", "cc", "c++", "clang", "ld"}
"""Programs that read nothing of a repository but what Python has written for them."""

LOADS = {"ctypes.dlopen": 0, "sqlite3.connect": 0, "os.link": 0, "import": 1}
"""Event -> which of its arguments names the file; an import names one for an extension module alone."""

IMPORTER = "<frozen importlib._bootstrap_external>"
_seen: set[str] = set()
_folder = _root = ""


def watch(folder: str, root: str) -> None:
    """Begin: notes go to `<folder>/lists/<pid>`, and `root` has no link in its path."""
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
            _read(_path(path))
    elif event in LOADS:
        _load(arguments[LOADS[event]])
    elif event in {"os.listdir", "os.scandir"}:
        name = _path(arguments[0])
        if f"{name}/".startswith(f"{_root}/"):
            importer = sys._getframe(1).f_code.co_filename == IMPORTER  # noqa: SLF001 - there is no other way
            _note(f"{'m' if importer else 'l'} {name}")
    elif event == "subprocess.Popen":
        _start(*arguments)
    elif event in {"os.exec", "os.posix_spawn"}:
        _start(arguments[0], arguments[1], None, arguments[2])
    elif event == "os.system":
        _start("sh", arguments[0], None, None)
    elif event == "socket.connect" and (host := _host(*arguments)):
        _note(f"n {host}")


def _host(socket: object, address: object) -> str:
    """The other host that a stream leads to; a datagram socket is connected to learn an address of one's own."""
    host = str(address[0]) if isinstance(address, tuple) and getattr(socket, "type", 0) == 1 else ""
    return "" if host.startswith(("127.", "::1", "localhost")) else host


def _note(words: str) -> None:
    if words in _seen:
        return
    _seen.add(words)
    try:
        # Opened anew each time: a forked child must not share a position in the file.
        descriptor = os.open(f"{_folder}/lists/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, os.fsencode(words) + b"\0")
        finally:
            os.close(descriptor)
    except OSError:  # no room, no more open files: the step goes on, and nobody will know all that it reads
        try:  # noqa: SIM105 - contextlib would be another import in every process
            os.unlink(f"{_folder}/whole")
        except OSError:
            pass


def _path(place: object) -> str:
    """An absolute name; empty in a folder that is gone, where the call itself will say so."""
    try:
        if isinstance(place, int):
            return os.readlink(f"/proc/self/fd/{place}")
        return os.path.abspath(os.fsdecode(place) if place else ".")  # type: ignore[arg-type]
    except OSError:
        return ""


def _read(name: str) -> None:
    if not name or name in _seen or name.startswith(("/proc/", "/sys/", "/dev/")):
        return
    _seen.add(name)
    for path in {name, os.path.realpath(name)}:
        folder, _, file = path.rpartition("/")
        compiled = file.endswith(".pyc") and folder.endswith("/__pycache__")  # <module>.<whoever compiled it>.pyc
        source = f"{folder[:-12]}/{file.partition('.')[0]}.py" if compiled else path
        try:
            found = os.lstat(source)  # of a link, its own; what it leads to is another name
        except OSError:
            _note(f"r - {source}")
        else:
            if found.st_mode & 0o170000 in {0o100000, 0o120000}:  # no folder, no pipe
                _note(f"r {found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns} {source}")


def _load(place: object) -> None:
    if place and isinstance(place, str):
        _read(_path(place))


def _start(program: object, arguments: object, where: object, env: object) -> None:
    name = os.path.basename(os.fsdecode(program))  # type: ignore[arg-type]
    listed = [arguments] if isinstance(arguments, str | bytes) else arguments or ()
    words = [os.fsdecode(word) for word in listed]  # type: ignore[attr-defined]
    if name.startswith("python"):
        if not _is_watched(words[1:], os.environ if env is None else env):
            _note(f"p {name}")
    elif name not in QUIET and any(_root in word for word in (*words, _path(where))):
        _note(f"p {name}")


def _is_watched(words: list[str], env: object) -> bool:
    """Whether a Python that is started so has this hook: its path leads here, and no option turns that off."""
    return _folder in str(env.get("PYTHONPATH", "")) and not is_isolated(words)  # type: ignore[attr-defined]


def is_isolated(words: list[str]) -> bool:
    """Whether Python's own options (-I, -E, -S) keep it from importing `sitecustomize` from its path."""
    for word in words:
        if not word.startswith("-") or word in {"-c", "-m"}:
            return False
        if not {"I", "E", "S"}.isdisjoint(word):
            return True
    return False
