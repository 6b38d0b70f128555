"""Docker as a job needs it: is it there, has it the image, run this and end it whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hilgate.agent.container import STOP_SECONDS
from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_SECONDS = 60
PULL_SECONDS = 3600
"""A ROCm image is about 30 GiB; a pull that is slower than an hour is a sick network."""

POLL_SECONDS = 0.1
DAEMON_ERROR, CANNOT_INVOKE, NOT_FOUND = 125, 126, 127
"""`docker run` itself (Docker reference, "Exit status"); `hilgate` uses none of them."""


class SickDockerError(HilgateError):
    """Docker on this node does not do what it should: another node may."""

    exit_status = Exit.SICK_NODE


def require() -> None:
    """Docker is installed and its daemon answers.

    Raises:
        CannotRunHereError: It is not installed.
        SickDockerError: The daemon is dead or hangs.
    """
    status, words = _quietly("version", "--format", "{{.Server.Version}}", seconds=ANSWER_SECONDS)
    if status:
        raise SickDockerError(f"the Docker daemon does not answer: {words}", remedy="see its service on this node")


def obtain(image: str) -> None:
    """Have this image in the host's store: pulled by digest, or already there where it is known by its digest alone.

    Raises:
        SickDockerError: It cannot be pulled, or is not there.
    """
    if "@" in image:
        status, words = _quietly("pull", "--quiet", image, seconds=PULL_SECONDS)
        what = "cannot be pulled"
    else:
        status, words = _quietly("image", "inspect", "--format", "{{.Id}}", image, seconds=ANSWER_SECONDS)
        what = "is not in this host's store, and HILGATE_REGISTRY names no repository to pull it from"
    if status:
        raise SickDockerError(f"the image {what}: {words}", where=image, remedy="see the registry and this node")


def attend(command: list[str], *, env: dict[str, str], stop: str | None, seconds: float, decode: bool = False) -> int:
    """Run a command to its end, or end it: on SIGTERM or SIGINT, or after `seconds`.

    Args:
        command: An argument list.
        env: Its whole environment.
        stop: The container to stop and remove; None ends the process group instead.
        seconds: The longest it may take.
        decode: Whether 125, 126 and 127 are Docker's own.

    Returns:
        Its exit status as a shell gives it (128 and the signal's number for a signal); 130 when interrupted, 75 when it
        outlived `seconds`.
    """
    with _requests() as asked:
        try:
            child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise CannotRunHereError(f"{command[0]} cannot be started: {error.strerror}") from error
        deadline = time.monotonic() + seconds
        try:
            while child.poll() is None and not asked and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            late = child.poll() is None
        finally:
            _end(child, stop)
    if asked:
        sys.stderr.write(f"ended: {signal.Signals(asked[0]).name}\n")
        return int(Exit.INTERRUPTED)
    if late:
        sys.stderr.write(f"ended after {seconds:.0f} s: what runs inside ends sooner, so it or this node hangs\n")
        return int(Exit.SICK_NODE)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    if decode and status == DAEMON_ERROR:
        sys.stderr.write("error: Docker could not run the container; its words are above\n")
        return int(Exit.SICK_NODE)
    if decode and status in {CANNOT_INVOKE, NOT_FOUND}:
        sys.stderr.write("error: the image has no python3 that can be run\n")
        return int(Exit.CANNOT_RUN_HERE)
    return status


def _end(child: subprocess.Popen[bytes], stop: str | None) -> None:
    """Nothing of it is left: the container by its name, which is this job's alone, and the process group."""
    if child.poll() is None and stop is not None:
        _quietly("stop", f"--time={STOP_SECONDS}", stop, seconds=STOP_SECONDS + ANSWER_SECONDS)
    elif child.poll() is None:
        _signal_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    if stop is not None:
        _quietly("rm", "--force", "--volumes", stop, seconds=ANSWER_SECONDS)
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _quietly(*arguments: str, seconds: float) -> tuple[int, str]:
    """(exit status, the last line it said) of a docker command; 124 for one that hangs.

    Raises:
        CannotRunHereError: Docker is not installed.
    """
    try:
        done = subprocess.run(
            ("docker", *arguments), capture_output=True, check=False, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer to docker {arguments[0]} within {seconds:g} s"
    except OSError as error:
        raise CannotRunHereError(
            f"docker cannot be started: {error.strerror}", remedy="install Docker on this agent"
        ) from error
    return done.returncode, (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]


@contextlib.contextmanager
def _requests() -> Iterator[list[int]]:
    """The signals that asked this job to end, in order, instead of ending it at once."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
