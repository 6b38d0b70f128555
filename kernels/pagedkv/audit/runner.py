# SPDX-License-Identifier: Apache-2.0
"""Run the audit: ask what each case would compile, compile every distinct kernel once, judge the figures."""

from __future__ import annotations

import functools
import gc
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError

from .budgets import load_budgets, load_declared
from .cases import cases_of
from .compile import Figures, Specialisation, specialisations, start_compiler
from .isolation import Crash, run_isolated
from .judge import Row, judge
from .objects import ObjectStore, find_or_compile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .cases import Case
    from .findings import Finding


@dataclass
class AuditPlan:
    """What will be compiled, and which row reads which figures."""

    kernels: dict[Specialisation, str] = field(default_factory=dict)
    """Each with the id of the first row that wants it."""
    rows: list[tuple[Case, Specialisation]] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    """Cases whose launcher raised, or launched other kernels than the case says."""


def run(
    cases: Sequence[tuple[str, Case]], *, version: str, jobs: int, timeout: float, objects: Path | None = None
) -> tuple[list[Finding], int, int]:
    """Compile and judge.

    Args:
        cases: From `cases.select`.
        version: Of Triton.
        jobs: Compilers at a time.
        timeout: Seconds for one kernel.
        objects: Folder where code objects are kept; None compiles all of them.

    Returns:
        The findings, how many code objects were read, and how many of them an earlier run had compiled.

    Raises:
        CannotRunHereError: The AMD compiler does not work here, or a package with kernels cannot be imported.
        InvalidFileError: See `load_budgets` and `load_declared`.
    """
    budgets, declared = load_budgets(), load_declared()
    if any(case.configuration for _, case in cases):
        declared.check_names((*cases_of("mamba"), *cases_of("delta")))
    start_compiler()
    gc.freeze()  # else each collection in the compilers goes through torch and vLLM
    store = ObjectStore(objects) if objects else None
    rows = compile_all(make_plan(cases), jobs=jobs, timeout=timeout, store=store)
    if store:
        store.prune()
    read = [row.result for row in rows if isinstance(row.result, Figures) and not row.twin]
    return judge(rows, budgets, declared, triton=version), len(read), sum(figures.kept for figures in read)


def make_plan(cases: Sequence[tuple[str, Case]]) -> AuditPlan:
    """Ask Triton what each case would compile on its arch, and drop what would be compiled twice."""
    plan = AuditPlan()
    for arch, case in cases:
        wanted: list[Specialisation] = []
        try:
            wanted = specialisations(arch, case.launch)
            names = tuple(each.kernel for each in wanted)
            expected, launched = ", ".join(case.kernels), ", ".join(names) or "nothing"
            problem = "" if case.launches(names) else f"expected to launch {expected}; it launched {launched}"
        except CannotRunHereError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a launcher raises is a finding about that launcher
            problem = f"the launcher raised {type(error).__name__}: {error}"
        if problem:
            plan.refused.append(Row(case, arch, "launch", (), Crash(problem)))
            continue
        for each in wanted:
            plan.kernels.setdefault(each, case.id(arch, each.kernel))
            plan.rows.append((case, each))
    return plan


def compile_all(plan: AuditPlan, *, jobs: int, timeout: float, store: ObjectStore | None = None) -> list[Row]:
    """Compile the kernels, each once, and read every row's figures.

    Args:
        plan: From `make_plan`.
        jobs: Compilers at a time.
        timeout: Seconds for one kernel.
        store: Where code objects are kept; None compiles all of them.
    """
    results: dict[Specialisation, tuple[Figures | Exception | Crash, float]] = {}
    # A worker compiles for one arch alone, as a server does: Triton 3.6.0 keeps a process's first arch's conversions.
    for arch in dict.fromkeys(kernel.arch for kernel in plan.kernels):
        kernels = [kernel for kernel in plan.kernels if kernel.arch == arch]
        calls = [functools.partial(find_or_compile, kernel, store) for kernel in kernels]
        for index, result, seconds in run_isolated(calls, jobs=jobs, timeout=timeout):
            results[kernels[index]] = result, seconds
            if sys.stderr.isatty():
                end = "\n" if len(results) == len(plan.kernels) else ""
                sys.stderr.write(f"\rcompiled {len(results)} of {len(plan.kernels)}{end}")
                sys.stderr.flush()
    rows = list(plan.refused)
    for case, wanted in plan.rows:
        result, seconds = results[wanted]
        if isinstance(result, Figures) and result.kernel != wanted.kernel:
            result = Crash(f"compiled {result.kernel}, planned {wanted.kernel}")
        first = plan.kernels[wanted]
        shared = {"twin": first} if first != case.id(wanted.arch, wanted.kernel) else {"seconds": seconds}
        rows.append(Row(case, wanted.arch, wanted.kernel, wanted.constants, result, **shared))
    return rows
