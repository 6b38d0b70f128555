"""Running buildah and docker: their lists of words are made elsewhere, here they are started, heard and ended.

They stay in this process's group, so that whoever ends the group (Ctrl-C, a runner's timeout) ends them as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Final

from hilgate.errors import CannotRunHereError, Exit, HilgateError

TAIL_LINES: Final = 12
"""Of a failed build, in its message; the whole is in its log."""

NETWORK: Final = (
    "could not resolve",
    "temporary failure in name resolution",
    "temporary failure resolving",
    "network is unreachable",
    "connection timed out",
    "connection refused",
    "connection reset",
    "read timed out",
    "couldn't download",
    "tls handshake timeout",
    "no space left on device",
)
"""What a build says in the end when the machine is to blame and not the change."""


class BuildFailedError(HilgateError):
    """The recipe does not build: the change is to blame until somebody shows otherwise."""

    exit_status: ClassVar[Exit] = Exit.FAIL


def build(words: list[str], log: Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Run a build; what it says goes to standard error and to `log`.

    Raises:
        CannotRunHereError: The program is missing, or the network or the disk stopped it.
        BuildFailedError: It failed for any other reason.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, _started(words, cwd, env, subprocess.STDOUT) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                sys.stderr.write(line)
                file.write(line)
            status = child.wait()
        except BaseException:  # an interrupt too: what was started must not go on building
            child.terminate()
            raise
    if status:
        tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line][-TAIL_LINES:]
        what, where = f"{Path(words[0]).name} ended with {status}", f"{log}\n  " + "\n  ".join(tail)
        if any(sign in line.lower() for sign in NETWORK for line in tail):
            raise CannotRunHereError(what, where=where, remedy="mend the network or the disk of this machine")
        raise BuildFailedError(what, where=where, remedy="mend the recipe; the next build goes on from the last layer")


def ask(words: list[str], env: dict[str, str] | None = None) -> str:
    """Standard output of a short command.

    Raises:
        CannotRunHereError: It is missing or fails.
    """
    with _started(words, None, env, subprocess.PIPE) as child:
        out, errors = child.communicate()
    if child.returncode:
        last = " ".join(errors.strip().splitlines()[-2:])
        raise CannotRunHereError(
            f"{Path(words[0]).name} ended with {child.returncode}: {last}",
            where=" ".join(words),
            remedy="run it to see",
        )
    return out


def heard(words: list[str]) -> tuple[int, str]:
    """Exit status of a command and all it said."""
    with _started(words, None, None, subprocess.STDOUT) as child:
        out, _ = child.communicate()
    return child.returncode, out


def _started(words: list[str], cwd: Path | None, env: dict[str, str] | None, errors: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=None if env is None else os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise CannotRunHereError(
            f"{words[0]} is not installed", remedy=f"install {words[0]}, e.g. apt-get install {words[0]}"
        ) from error
