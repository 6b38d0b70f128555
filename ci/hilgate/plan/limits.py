# SPDX-License-Identifier: Apache-2.0
"""Plan or judge a change in a process of its own, which is ended when it takes too long or too much memory.

What is planned was written by whoever sent the change: globs, YAML, and Python that is parsed for its imports; what is
judged was written by code of the change. Some of that is read by compiled code, which no timer inside the process
interrupts.

The process is a fork, so the caller must have no threads: the fork would lack them and wait for them until it is ended
(status 3, never a plan and never a pass).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec

from hilgate.errors import (
    CannotRunHereError,
    DeclarationError,
    HilgateError,
    MisuseError,
    NothingSelectedError,
    RecordsError,
    of_system,
)
from hilgate.model.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

Asked = ParamSpec("Asked")

SECONDS, JUDGE_SECONDS = 60.0, 300.0
"""How long planning may take, for which an honest change needs 2 to 5 on an idle machine, and judging with reports."""

MEMORY_BYTES = 4 * 2**30
"""Beyond what this process has; an honest change takes a tenth of it."""

LIMIT_REMEDY = "look at the globs in ci/areas, at large declarations and at deeply nested Python files of the change"
JUDGE_REMEDY = "look at the sizes of the results: thousands of failing checks, long messages, many labels"


class PlanLimitError(DeclarationError):
    """A change cannot be planned with the time and the memory that any change gets."""


_KINDS = {kind.exit_status: kind for kind in (MisuseError, DeclarationError, NothingSelectedError, CannotRunHereError)}
"""Exit status -> the error that the first process raises for it."""


def within_limits(
    planner: Callable[Concatenate[Path, Asked], Plan], root: Path, *args: Asked.args, **asked: Asked.kwargs
) -> Plan:
    """The plan that `planner` (`plan.make.make_plan`) makes of these arguments within SECONDS and MEMORY_BYTES.

    Raises as `limited` does.
    """

    def make() -> str:
        return planner(root, *args, **asked).model_dump_json()

    error = PlanLimitError("planning took", where=str(root), remedy=LIMIT_REMEDY)  # `limited` adds: more than 60 s
    return Plan.model_validate_json(limited(make, SECONDS, error))


def judged_within_limits(work: Callable[[], str], results: Path) -> str:
    """What `work` answers about results within JUDGE_SECONDS and MEMORY_BYTES; what it prints is printed.

    Raises as `limited` does.
    """
    error = RecordsError("reading and judging took", where=str(results), remedy=JUDGE_REMEDY)
    return limited(work, JUDGE_SECONDS, error)


def limited(work: Callable[[], str], seconds: float, error: HilgateError) -> str:
    """Return what `work` answers, in a process of its own, within `seconds` and MEMORY_BYTES.

    Raises:
        HilgateError: `error`, whose sentence ends with the limit that was passed; or what `work` raised, by its text
            and its exit status.
        CannotRunHereError: This machine cannot start another process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as cause:
        os.close(reading)
        os.close(writing)
        raise CannotRunHereError(
            f"no other process can be started: {cause.strerror}", remedy="end other programs or raise the limit"
        ) from cause
    if child == 0:
        os.close(reading)
        _work(writing, work, seconds)
    os.close(writing)
    with contextlib.suppress(OSError):  # here too: either process may be first
        os.setpgid(child, child)
    status = None
    try:
        answer = _read(reading, time.monotonic() + seconds)
        if answer is not None:
            status = os.waitpid(child, 0)[1]
    finally:
        os.close(reading)
        if status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # what it has started too: git
            os.waitpid(child, 0)
    if answer is None:
        raise _more(error, f"more than {seconds:g} s")
    return _answer(answer, os.waitstatus_to_exitcode(status or 0), error)


def _more(error: HilgateError, than: str) -> HilgateError:
    """The error, with the limit that was passed at the end of its sentence."""
    return type(error)(f"{error.what} {than}", where=error.where, remedy=error.remedy)


def _read(descriptor: int, deadline: float) -> bytes | None:
    """All that the other process writes; None when it has not ended by then."""
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            part = os.read(descriptor, 2**20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _answer(answer: bytes, status: int, error: HilgateError) -> str:
    """What the other process answered.

    Raises:
        HilgateError: The error that it answered; or `error`, where there is no whole answer.
    """
    kind, _, text = answer.partition(b"\n")
    if kind == b"done" and status == 0:
        return text.decode()
    if kind == b"error" and status == 0:
        fields = json.loads(text)
        kind_of = _KINDS.get(fields.pop("status"), HilgateError)
        raise kind_of(**fields)
    if kind == b"bug" and status == 0:
        raise RuntimeError(text.decode())
    gibibytes = MEMORY_BYTES / 2**30
    why = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
    what = f"more than {gibibytes:g} GiB" if kind == b"memory" or not answer else "an answer that is cut off"
    raise _more(error, f"{what}: {why}")


def _work(descriptor: int, work: Callable[[], str], seconds: float) -> NoReturn:
    """Run in the other process: work, write the answer, and end at once, without exit handlers."""
    answer = b"memory\n"
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears of it, and ends this one
        used = _data_bytes()
        _lower(resource.RLIMIT_DATA, used + MEMORY_BYTES)
        _lower(resource.RLIMIT_CPU, int(resource.getrusage(resource.RUSAGE_SELF).ru_utime + 4 * seconds))
        answer = b"done\n" + work().encode()
        sys.stdout.flush()
        sys.stderr.flush()
    except MemoryError:
        pass
    except HilgateError as error:
        answer = _encoded(error)
    except OSError as error:
        trouble = of_system(error)
        answer = _encoded(trouble) if trouble else b"bug\n" + traceback.format_exc().encode(errors="replace")
    except BaseException:  # noqa: BLE001 - this process ends here, and the first one must hear of it
        answer = b"bug\n" + traceback.format_exc().encode(errors="replace")
    with contextlib.suppress(OSError), open(descriptor, "wb") as out:
        out.write(answer)
    os._exit(0)


def _encoded(error: HilgateError) -> bytes:
    facts = {"status": int(error.exit_status), "what": error.what, "where": error.where, "remedy": error.remedy}
    return b"error\n" + json.dumps(facts).encode()


def _lower(kind: int, soft: int) -> None:
    """Set a limit, where it is lower than the one there is."""
    now, hard = resource.getrlimit(kind)
    if now == resource.RLIM_INFINITY or soft < now:
        resource.setrlimit(kind, (soft, hard))


def _data_bytes() -> int:
    """What Linux counts against RLIMIT_DATA of this process."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("VmData:"))
        return int(line.split()[1]) * 1024
    return 0
