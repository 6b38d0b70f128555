# SPDX-License-Identifier: Apache-2.0
"""Our kernels beside vLLM's own, in one run: `python -m benchmarks.run` from the root of the repository, on a GPU.

Each side replays a captured graph over inputs larger than the last-level cache; the sides take turns. The outputs are
NaN before the timed replays and are compared with a float64 reference after them: a wrong side has no time. Of cases of
the host's time the host is timed, as it launches without a graph.

Exit status: 0 all ran and are right (a missed goal is a figure, not a failure), 1 one of our results is wrong,
2 misuse, 5 no GPU here, or a peer that did not run or was wrong.
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from pagedkv.errors import Parser

from . import cases as data
from .record import BenchmarkRecordError, Measured, Record, build, environment, read, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import BenchmarkCase
    from .operations import MeasuredSide

ROOT = Path(__file__).resolve().parents[1]


def _guard(step: Callable[[], Measured]) -> Measured:
    try:
        return step()
    except Exception as error:  # noqa: BLE001  whatever stops one side is its record, not the end of the run
        return Measured(trouble=f"did not run: {type(error).__name__}: {error}".replace("\n", " ")[:300])


def measure(case: BenchmarkCase) -> tuple[Measured, Measured, Measured | None]:
    """Return our side, the peer's and, where its library has the operation, the vendor's, measured on the GPU."""
    import torch

    from . import operations, timing

    work = operations.prepare(case, "cuda", torch.bfloat16, 1 if case.host else timing.CACHE_BYTES)
    makers = [lambda: work.ours, work.peer, *([work.vendor] if work.vendor else [])]
    sides: list[MeasuredSide | None] = [None] * len(makers)
    graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(makers)

    def capture(index: int) -> Measured:
        side = sides[index] = makers[index]()
        side.poison()
        if case.host:
            side.run()
        else:
            graphs[index] = timing.capture(side.run)
        side.poison()
        return Measured()

    troubles = [_guard(lambda i=i: capture(i)).trouble for i in range(len(makers))]
    ready = [i for i in range(len(makers)) if not troubles[i]]
    times: dict[int, list[float]] = {}

    def replay() -> Measured:
        if case.host:
            times.update(zip(ready, timing.host([sides[i].run for i in ready]), strict=True))
        elif ready:
            times.update(zip(ready, timing.alternate([graphs[i] for i in ready]), strict=True))
        return Measured()

    stopped = _guard(replay).trouble

    def judge(index: int) -> Measured:
        return Measured(tuple(t / work.sets for t in times[index]), sides[index].error(), work.bound)

    ours, peer, *vendor = (
        _guard(lambda i=i: judge(i)) if i in times else Measured(trouble=troubles[i] or stopped)
        for i in range(len(makers))
    )
    return ours, peer, vendor[0] if vendor else None


def smoke(names: list[BenchmarkCase]) -> int:
    """Run both sides of shrunken cases under Triton's interpreter and print their errors; no time is taken."""
    import torch

    from . import operations

    wrong = 0
    for case in map(data.smoke, names):
        work = operations.prepare(case, "cpu", torch.float16, 1)

        def check(make: Callable[[], MeasuredSide], bound: float = work.bound) -> Measured:
            side = make()
            side.poison()
            side.run()
            return Measured(error=side.error(), bound=bound)

        # vLLM's cache write asks the device's compute capability before it launches.
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
            sides = [_guard(lambda m=m: check(m)) for m in (lambda w=work: w.ours, work.peer)]
        wrong += not all(side.right for side in sides)
        texts = [side.trouble or f"{'right' if side.right else 'WRONG'} {side.error:.1e}" for side in sides]
        print(f"{case.name:<30} ours {texts[0]}   peer {texts[1]}")
    return 1 if wrong else 0


def facts(commit: str, *, gpu: bool = True) -> dict[str, Any]:
    """Return what every record says of this machine: hardware, versions and commit."""
    import torch

    versions = {"torch": torch.__version__, "triton": _version("triton"), "vllm": _version("vllm")}
    toolkits = {name: getattr(torch.version, name, None) for name in ("hip", "cuda")}
    toolkit = {name: version for name, version in toolkits.items() if version}
    hardware = torch.cuda.get_device_name() if gpu else "CPU, interpreted"
    return {"hardware": hardware, "versions": versions | toolkit, "commit": commit}


def _version(package: str) -> str:
    """Return the version of an installed package or of its CPU build, or "missing"."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "missing"


def commit_of(given: str | None) -> str:
    """Return the commit that is measured: as given, else of this checkout; ends the program where there is none."""
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run([*git, "status", "--porcelain", "kernels"], capture_output=True, text=True, check=False)
    if head.returncode:
        raise SystemExit("error: not a git checkout: which commit is this?\n  to do: name it with --commit")
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def _run(chosen: list[BenchmarkCase], out: Path, commit: str, before: list[Record]) -> int:
    import torch

    from . import timing

    context = facts(commit) | {"session": 1 + max((record.session for record in before), default=0)}
    for record in before[:1]:
        if any(getattr(record, name) != context[name] for name in ("hardware", "versions", "commit")):
            print(
                f"error: {out} is of another GPU, other versions or another commit\n  to do: name another --out",
                file=sys.stderr,
            )
            return 2
    there = {record.case for record in before}
    chosen = [case for case in chosen if case.name not in there]
    if not chosen:
        print(
            f"error: {out} has every case already\n  to do: leave out --resume, or choose others with --only",
            file=sys.stderr,
        )
        return 2
    rates = timing.yardsticks()
    records: list[Record] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a" if before else "w", encoding="utf-8") as file:
        for case in chosen:
            records.append(build(case, *measure(case), rates=rates, earlier=[*before, *records], **context))
            file.write(records[-1].line() + "\n")
            file.flush()
            print(table(records[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    print(environment(records), table(records), sep="\n\n")
    for what, why in data.NOT_MEASURED:
        print(f"not measured: {what}: {why}")
    if any("ours:" in record.trouble for record in records):
        return 1
    return 5 if any(record.trouble for record in records) else 0


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, run, return the exit status."""
    parser = Parser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="run only cases whose name contains TEXT")
    parser.add_argument(
        "--case", metavar="NAME", action="append", help="run only the case of this name; may be repeated"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "benchmarks.jsonl", help="file for the results (JSON lines)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="measure the cases that OUT lacks, as a further session of its run"
    )
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument(
        "--smoke", action="store_true", help="run tiny cases without a GPU; check correctness, measure no times"
    )
    given = parser.parse_args(arguments)
    unknown = set(given.case or ()) - {case.name for case in data.CASES}
    if unknown:
        parser.error(f"--case {min(unknown)!r} is not the name of a case; --only takes a part of one")
    chosen = [case for case in data.CASES if given.only in case.name and case.name in (given.case or [case.name])]
    if not chosen:
        parser.error(f"--only {given.only!r} matches none of: {', '.join(case.name for case in data.CASES)}")
    if given.smoke:
        # Without a visible device vLLM keeps Triton instead of replacing it.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return smoke(chosen)
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        print(
            "error: times need a GPU, and TRITON_INTERPRET unset\n  to do: run it on one, or --smoke here",
            file=sys.stderr,
        )
        return 5
    try:
        before = [row.record for row in read(given.out)] if given.resume and given.out.exists() else []
    except BenchmarkRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _run(chosen, given.out, commit_of(given.commit), before)


if __name__ == "__main__":
    sys.exit(main())
