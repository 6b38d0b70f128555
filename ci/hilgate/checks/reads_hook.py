"""Records which files of a repository a Python process opens for reading. Copied as `sitecustomize.py`: stdlib only.

It is active where `HILGATE_READS` (a folder for the lists) and `HILGATE_READS_ROOT` (the repository) are set, and child
processes inherit both. A file is written down when it is first opened, because a process may end without notice.
"""

import os
import sys


def _watch(folder: str, root: str) -> None:
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, mode, flags = arguments
        # builtins.open gives a mode, os.open flags alone; both give flags.
        if isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY:
            return
        if isinstance(mode, str) and mode[:1] in {"w", "a", "x"}:
            return
        name = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if name in seen or not name.startswith(root):
            return
        seen.add(name)
        # Opened anew each time: a forked child must not share a position in the file.
        descriptor = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, os.fsencode(name) + b"\0")
        finally:
            os.close(descriptor)

    sys.addaudithook(hook)


if "HILGATE_READS" in os.environ and "HILGATE_READS_ROOT" in os.environ:
    _watch(os.environ["HILGATE_READS"], os.path.realpath(os.environ["HILGATE_READS_ROOT"]) + "/")
