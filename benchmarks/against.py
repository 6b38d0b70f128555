# SPDX-License-Identifier: Apache-2.0
"""Times of our kernels beside those of the merge base, on one GPU in turns: `python -m benchmarks.against --base main`.

Each case runs in two processes, one with the merge base's kernels and its own benchmarks. Where both launch the same
machine code nothing is timed. Else they take turns, with captured graphs over inputs larger than the last-level cache,
and NaN in the outputs before; `paired.py` judges the times, and results are held against a float64 reference.

Exit status: 0 nothing is slower than the margin, 1 something is or a result is wrong, 2 misuse, 3 against.toml is
wrong, 4 nothing selected, 5 no GPU or no such base here, 6 inconclusive.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import pagedkv
from pagedkv.audit.changed import (
    BaseUnreadableError,
    Checkout,
    answers_alone,
    asked_with_ours,
    kernels_at,
    merge_base,
)
from pagedkv.audit.findings import Finding, write_findings
from pagedkv.errors import CannotRunHereError, Exit, Parser, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .paired import Rules

ROOT = Path(__file__).resolve().parents[1]
ASKING = "against.py"
"""The module that the merge base's benchmarks are asked with: ours."""


class CaseProcess(Protocol):
    """A process that runs cases (`serve`)."""

    def ask(self, request: Mapping[str, object]) -> Any:
        """Answer to a request; raises BaseUnreadableError where the process has ended."""


@dataclass
class Timed:
    """One case."""

    case: str
    changed: bool | None = None
    """Whether both launch other machine code; None until both have said so."""
    wrong: str = ""
    """Why the change's result or run fails."""
    open: str = ""
    """Why it cannot be judged."""
    new: str = ""
    """Why there is nothing to compare with."""
    sessions: list[list[list[float]]] = field(default_factory=list)
    """Quads of seconds, by session."""


class _TroubleError(Exception):
    """A case stopped, or its result is wrong, on one side."""


class _BaseTroubleError(_TroubleError):
    """That side is the merge base's: the change is not to blame, and nothing is known of its speed."""


@dataclass(frozen=True)
class _Asked:
    """A side whose troubles are exceptions."""

    side: CaseProcess
    trouble: type[_TroubleError]

    def ask(self, request: Mapping[str, object]) -> Any:
        try:
            reply = self.side.ask(request)
        except BaseUnreadableError as error:
            raise self.trouble(f"did not finish: {error}") from error
        if isinstance(reply, dict) and "trouble" in reply:
            raise self.trouble(f"did not run: {reply['trouble']}")
        return reply

    def seconds(self, rules: Rules) -> float:
        found = statistics.median(self.ask({"time": rules.replays}))
        if not 0 < found < math.inf:
            raise self.trouble(f"did not run: it took {found} s")
        return found

    def check(self) -> None:
        reply = self.ask({"error": True})
        if not reply["error"] <= reply["bound"]:  # nor is NaN right
            raise self.trouble(f"wrong: off by {reply['error']:.1e} where {reply['bound']:.1e} is right")


def time_case(case: str, base: CaseProcess, change: CaseProcess, rules: Rules) -> Timed:
    """Run a case in both processes, and time it where the machine code differs.

    Args:
        case: Its name in `cases.py`.
        base: Of the merge base.
        change: Of the change.
        rules: How often.
    """
    timed = Timed(case)
    before, after = _Asked(base, _BaseTroubleError), _Asked(change, _TroubleError)
    try:
        for _ in range(rules.sessions):
            now, was = after.ask({"prepare": case}), before.ask({"prepare": case})
            if was["case"] != now["case"]:
                timed.new = "the merge base has no such case" if was["case"] is None else "the case itself changed"
                break
            timed.changed = was["code"] != now["code"]
            if not timed.changed:
                break
            turns = (before, after, after, before)
            quads = [[side.seconds(rules) for side in turns] for _ in range(rules.quads)]
            if not timed.sessions:
                after.check()
                before.check()
            timed.sessions.append(quads)
            for side in (before, after):
                side.ask({"drop": True})
    except _BaseTroubleError as error:
        timed.open = f"the merge base's {error}"
    except _TroubleError as error:
        timed.wrong = str(error)
    return timed


def judged(everything: Sequence[Timed], rules: Rules, labels: Mapping[str, str]) -> list[Finding]:
    """Findings: one for the run, and one for each case whose machine code changed or cannot be compared.

    Args:
        everything: Of all cases of the run.
        rules: With the margin.
        labels: What every finding says of this machine.
    """
    from .paired import slowdown

    shown = [each for each in everything if each.changed is not False]
    count = sum(bool(each.sessions) and not (each.wrong or each.open) for each in shown)
    found = []
    for each in shown:
        finding = {"id": f"time/{each.case}", "labels": dict(labels)}
        if each.wrong:
            found.append(Finding(**finding, outcome="fail", message=each.wrong))
        elif each.open:
            found.append(Finding(**finding, outcome="inconclusive", message=each.open))
        elif each.new:
            finding["labels"]["passed_but"] = f"nothing to compare with: {each.new}"
            found.append(Finding(**finding, outcome="pass", message=each.new))
        else:
            slower = slowdown(each.sessions, cases=count, false_alarms=rules.false_alarms)
            outcome = slower.outcome(rules.margin)
            message = f"{slower.ratio - 1:+.1%} of the base's time, {slower.low - 1:+.1%} to {slower.high - 1:+.1%}"
            message += f"; margin {rules.margin:.0%}"
            quads = [quad for session in each.sessions for quad in session]
            numbers = {
                "base_us": 1e6 * statistics.median(time for quad in quads for time in (quad[0], quad[3])),
                "change_us": 1e6 * statistics.median(time for quad in quads for time in (quad[1], quad[2])),
                "ratio": slower.ratio,
                "ci_low": slower.low,
                "ci_high": slower.high,
                "margin": rules.margin,
            }
            found.append(Finding(**finding, outcome=outcome, message=message, numbers=numbers))
    new = sum(bool(each.new) for each in shown)
    stopped = sum(each.changed is None and not each.new for each in shown)
    changed = sum(each.changed is True for each in shown)
    text = f"{changed} of {len(everything)} cases launch other machine code than the merge base"
    text += f", {new} cannot be compared" * bool(new) + f", {stopped} did not run" * bool(stopped)
    text += f"; {count} timed" if count else "; nothing was timed"
    numbers = {"cases": len(everything), "timed": count, "new": new}
    return [Finding("time", "pass", message=text, labels=dict(labels), numbers=numbers), *found]


def status_of(findings: Sequence[Finding]) -> Exit:
    """Exit status of a run."""
    outcomes = {finding.outcome for finding in findings}
    if "fail" in outcomes:
        return Exit.FAIL
    return Exit.PASS if outcomes == {"pass"} else Exit.INCONCLUSIVE


# A process that runs the cases of one checkout.


def serve(requests: IO[str], answers: IO[str]) -> Exit:
    """Answer requests, a JSON document a line: {"prepare": case}, {"time": replays}, {"error": true}, {"drop": ...}."""
    runner = _Runner()

    def answer(reply: object) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    answer(pagedkv.__file__)
    for line in requests:
        request = json.loads(line)
        try:
            answer(runner.do(request))
        except Exception as error:  # noqa: BLE001 - whatever stops a case is said of it
            answer({"trouble": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]})
    return Exit.PASS


class _Runner:
    """One case at a time on this GPU."""

    def __init__(self) -> None:
        self._work: Any = None
        self._graph: Any = None

    def do(self, request: Mapping[str, Any]) -> Any:
        import torch

        from . import cases, operations, timing

        if "prepare" in request:
            case = {each.name: each for each in cases.CASES}.get(request["prepare"])
            if case is None:
                return {"case": None}
            self._work = operations.prepare(case, "cuda", torch.bfloat16, timing.CACHE_BYTES)
            self._graph = timing.capture(self._work.ours.run)
            self._work.ours.poison()
            return {"case": repr(case), "code": launched()}
        if "time" in request:
            return [each / self._work.sets for each in timing.alternate([self._graph], request["time"])[0]]
        if "error" in request:
            return {"error": self._work.ours.error(), "bound": self._work.bound}
        self._work = self._graph = None
        gc.collect()
        torch.cuda.empty_cache()
        return {}


def launched() -> list[str]:
    """Machine code of all our kernels that this process has launched: a process runs one case.

    Raises:
        RuntimeError: There is none, so nothing could be compared.
    """
    from triton.runtime.jit import JITFunction

    from pagedkv.audit.code_object import machine_code

    functions = [each for each in gc.get_objects() if isinstance(each, JITFunction)]
    kernels = [
        kernel
        for function in functions
        if function.module.partition(".")[0] == "pagedkv"
        for caches in function.device_caches.values()
        for kernel in caches[0].values()
    ]
    if not kernels:
        raise RuntimeError("it launched no Triton kernel of pagedkv")
    found = set()
    for kernel in kernels:
        code = kernel.asm["hsaco" if "hsaco" in kernel.asm else "cubin"]
        found.add(f"{kernel.metadata.name} {machine_code(code)} {kernel.metadata.shared} {kernel.metadata.num_warps}")
    return sorted(found)


# The command.


@contextlib.contextmanager
def pair(base: Path) -> Iterator[tuple[CaseProcess, CaseProcess]]:
    """Two fresh processes: with the kernels below `base`, and with ours."""
    with contextlib.ExitStack() as stack:
        sides = [Checkout(kernels, [], "benchmarks.against") for kernels in (base, ROOT / "kernels")]
        for side in sides:
            stack.enter_context(contextlib.closing(side))
        yield sides[0], sides[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, return the exit status."""
    parser = Parser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    base = os.environ.get("HILGATE_BASE", "")
    parser.add_argument("--base", default=base, metavar="REV", help="what to compare with; default: the default branch")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name contains TEXT")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where findings.jsonl goes; default: $HILGATE_OUT")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        answers = answers_alone()
        return run_command(lambda: serve(sys.stdin, answers))
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> Exit:
    # Not above: a merge base reads this file beside an errors.py of its own, which may lack it.
    from pagedkv.errors import NothingSelectedError

    from . import cases

    _require_packages()
    from .paired import load_rules

    rules = load_rules()
    names = [case.name for case in cases.CASES if options.only in case.name and not case.host]
    if not names:
        raise NothingSelectedError(f"no case matches --only {options.only!r}\n  to do: see benchmarks/cases.py")
    commit = merge_base(ROOT, options.base)
    labels = {"compared_with": commit[:12], "hardware": _gpu()}
    try:
        with kernels_at(ROOT, commit, "benchmarks") as base:
            asked_with_ours(base)
            (base.parent / "benchmarks" / ASKING).write_bytes(Path(__file__).read_bytes())
            findings = judged([_timed(name, base, rules) for name in names], rules, labels)
    except BaseUnreadableError as error:
        findings = [Finding("time", "inconclusive", message=f"merge base {commit[:12]}: {error}", labels=labels)]
    for finding in findings:
        sys.stdout.write(f"{finding.outcome:<13}{finding.id}: {finding.message}\n")
    if out := options.out or os.environ.get("HILGATE_OUT"):
        write_findings(Path(out) / "findings.jsonl", findings)
    return status_of(findings)


def _timed(name: str, base: Path, rules: Rules) -> Timed:
    with pair(base) as (before, after):
        return time_case(name, before, after, rules)


def _require_packages() -> None:
    """Raise CannotRunHereError where a package is missing: no case could run, and the change is not to blame."""
    for name in ("torch", "triton", "scipy", "pydantic", "elftools", "msgpack"):
        if importlib.util.find_spec(name) is None:
            package = {"elftools": "pyelftools"}.get(name, name)
            raise CannotRunHereError(
                f"the package {package} is not installed\n  to do: python -m pip install {package}"
            )


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        raise CannotRunHereError(
            "times need a GPU, and TRITON_INTERPRET unset\n"
            "  to do: run it on one; here python -m pagedkv.audit.changed says which kernels changed"
        )
    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
