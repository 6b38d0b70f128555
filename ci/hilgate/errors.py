# SPDX-License-Identifier: Apache-2.0
"""Exit statuses and the errors that carry them: one class per mistake, each saying what, where and what to do."""

from __future__ import annotations

import argparse
import difflib
import enum
import errno
import functools
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Exit(enum.IntEnum):
    """What a finished `hilgate` command tells its caller (also printed by `hilgate --help`)."""

    PASS = 0
    FAIL = 1
    MISUSE = 2
    INVALID_DECLARATION = 3
    NOTHING_RAN = 4
    CANNOT_RUN_HERE = 5
    INCONCLUSIVE = 6
    BUG = 70
    SICK_NODE = 75
    INTERRUPTED = 130


EXIT_MEANINGS: dict[Exit, str] = {
    Exit.PASS: "pass",
    Exit.FAIL: "fail",
    Exit.MISUSE: "misuse of the command line",
    Exit.INVALID_DECLARATION: "a declaration (areas, agents, gates) or a record is invalid",
    Exit.NOTHING_RAN: "nothing selected, or something required did not run",
    Exit.CANNOT_RUN_HERE: "this environment cannot run it (no GPU, no image, missing package)",
    Exit.INCONCLUSIVE: "inconclusive",
    Exit.BUG: "a bug in hilgate",
    Exit.SICK_NODE: "this node is unfit: another may do (EX_TEMPFAIL of sysexits.h)",
    Exit.INTERRUPTED: "interrupted (`hilgate gate --resume` goes on with what finished)",
}
"""One line per status, in the words of the design."""


class HilgateError(Exception):
    """A mistake with a place and a remedy. Subclasses fix the exit status and the headline.

    Attributes:
        what: One sentence: what is wrong.
        where: File with line, key, or command; empty when there is no place.
        remedy: One sentence: what to do next.
    """

    exit_status: ClassVar[Exit] = Exit.BUG

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.remedy:
            parts.append(f"  to do: {self.remedy}")
        return "\n".join(parts)


def run_typer(command: Callable[..., Any], **options: Any) -> NoReturn:
    """Run a program made with typer, and exit with its status once its output has arrived.

    Raises:
        MisuseError: typer does not understand the arguments.
        KeyboardInterrupt: Ctrl-C, on which typer ends without a word.
        BrokenPipeError: Nobody reads its output, which typer and rich take for a failure (1).
    """
    try:
        status = command(standalone_mode=False, **options)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        status = ended.code
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(Exit.MISUSE)
        if not hasattr(error, "format_message"):
            raise
        raise _misuse(error) from None
    if status == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    sys.stdout.flush()  # what does not arrive must not end as a pass
    sys.exit(status or Exit.PASS)


def _misuse(error: Any) -> MisuseError:
    place = error.ctx.command_path if getattr(error, "ctx", None) else ""
    what = error.message if hasattr(error, "option_name") else error.format_message()
    # Words of the libraries behind typer: pydantic's prefix and its second half, click's guess at a command.
    what = what.replace("Value error, ", "").replace(", unable to parse string as an integer", "")
    what, _, guess = what.partition(" Did you mean ")
    # Without the dashes, which all options share: --nope is not near --pr.
    options = {option.lstrip("-"): option for option in getattr(error, "possibilities", None) or ()}
    near = difflib.get_close_matches(getattr(error, "option_name", "").lstrip("-"), options)
    if near or guess:
        remedy = f"did you mean {options[near[0]] if near else guess}".rstrip("?") + "?"
    else:
        remedy = f"{place} --help lists what it takes"
    return MisuseError(what[:1].lower() + what[1:].rstrip("."), where=place, remedy=remedy)


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told as every other error is, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with the status of misuse."""
        self.exit(Exit.MISUSE, f"error: {MisuseError(message, where=self.prog, remedy=f'{self.prog} --help')}\n")


def ending(main: Callable[..., int]) -> Callable[..., int]:
    """Let a program end with the message and the status of its error, as `hilgate` does, and with no traceback."""

    @functools.wraps(main)
    def run(*arguments: object) -> int:
        try:
            return int(main(*arguments))
        except HilgateError as error:
            sys.stderr.write(f"error: {error}\n")
            return int(error.exit_status)

    return run


def bug(program: str, error: BaseException) -> HilgateError:
    """What a user reads of a bug in a program: one line, and the file that has its traceback.

    The file is in the folder of a step's output, which agents upload, or else where temporary files are.
    """
    what = (str(error).splitlines() or [""])[0]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    lines = [f"{sys.argv}\n", *traceback.format_exception(error)]
    where = ""
    for folder in filter(None, (os.environ.get("HILGATE_OUT"), tempfile.gettempdir())):
        try:
            log, where = tempfile.mkstemp(".log", f"{program}-{stamp}-", folder)
            with os.fdopen(log, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(lines)
            break
        except OSError as problem:
            where = f"(no log: {problem})"
    remedy = "report it with that file"
    return HilgateError(f"a bug in {program}: {type(error).__name__}: {what}", where=where, remedy=remedy)


def drop_what_cannot_be_written() -> None:
    """Let what stdout holds go nowhere where its file takes no more: Python's last flush would end with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class MisuseError(HilgateError):
    """An option or argument that names something that does not exist or contradicts another."""

    exit_status = Exit.MISUSE


class DeclarationError(HilgateError):
    """A YAML file under ci/ or evals/ is unreadable, has an unknown key or contradicts another."""

    exit_status = Exit.INVALID_DECLARATION


class RecordsError(HilgateError):
    """A plan, a results file or a step's evidence is missing, truncated or not what its schema says."""

    exit_status = Exit.INVALID_DECLARATION


class NothingSelectedError(HilgateError):
    """The selection is empty: a gate over nothing is not a pass."""

    exit_status = Exit.NOTHING_RAN


class CannotRunHereError(HilgateError):
    """This machine lacks what the step needs."""

    exit_status = Exit.CANNOT_RUN_HERE


class RunInterruptedError(HilgateError):
    """Ctrl-C or SIGTERM while steps were running."""

    exit_status = Exit.INTERRUPTED


_SYSTEM: tuple[tuple[type[HilgateError], str, str, str], ...] = (
    (CannotRunHereError, "ENOSPC EDQUOT EFBIG", "there is no room", "free disk space, or lift the limit (ulimit -f)"),
    (CannotRunHereError, "EACCES EPERM EROFS", "not permitted", "name a place where it is (--results, TMPDIR)"),
    (CannotRunHereError, "EMFILE ENFILE", "too many files are open", "raise the limit (ulimit -n)"),
    (CannotRunHereError, "ENOMEM EAGAIN", "memory or processes ran out", "end other programs or raise the limit"),
    (CannotRunHereError, "EIO ESTALE ENXIO ENODEV", "the disk does not answer", "look at the disk or its server"),
    (CannotRunHereError, "EPIPE", "nobody reads the output any more", "let its reader read on, or write to a file"),
    (MisuseError, "EEXIST ENOTDIR EISDIR ENOTEMPTY", "a file where a folder belongs, or the reverse", "name another"),
    (MisuseError, "ENAMETOOLONG ELOOP", "no such path can be made", "name another"),
)
"""Errors of the operating system that are no bug of ours: what they mean and what to do, by their names in `errno`."""


def of_system(error: OSError) -> HilgateError | None:
    """What an error of the operating system means to a user (a full disk, a closed pipe); None for a bug of ours.

    A missing file is a bug: who reads a file that a user names or that may be missing says so where it is read.
    """
    name, what = errno.errorcode.get(error.errno or 0, ""), error.strerror or str(error)
    where = ", ".join(str(name) for name in (error.filename, error.filename2) if name)
    for kind, names, meaning, remedy in _SYSTEM:
        if name in names.split():
            return kind(f"{meaning}: {what}", where=where or "standard output, or a file of the results", remedy=remedy)
    if name == "ENOENT" and not where:  # from os.getcwd and the module tempfile
        where, remedy = "the current folder, or TMPDIR", "change to a folder that exists and can be written"
        return CannotRunHereError(f"a folder is missing: {what}", where=where, remedy=remedy)
    return None


def place_for(path: Path) -> Path:
    """Where a file that a user names is written whole and then renamed to: its folder is made, and no link replaced.

    Raises:
        OSError: The folder cannot be made, or the file is a folder, as an empty name is.
        MisuseError: It is a device or a pipe, which a rename would replace by a file.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise MisuseError("this is a device or a pipe, and no file", where=str(path), remedy="name a file")
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in what the operating system raises: a write to a full disk does not say where."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
