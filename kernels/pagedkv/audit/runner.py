# SPDX-License-Identifier: Apache-2.0
"""Run the audit: ask what each case would compile, compile every distinct kernel once, judge the figures."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.errors import CannotRunHereError

from .budgets import load_budgets, load_declared
from .cases import cases_of
from .compile import Figures, LdsExceededError, Specialisation, compile_launches, specialisations, start_compiler
from .isolation import Crash, run_isolated
from .judge import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case
    from .findings import Finding


@dataclass(frozen=True)
class Row:
    """One kernel of one case on one arch."""

    case: Case
    arch: str
    kernel: str
    """Triton function; `launch` where the launch could not be planned."""
    constants: tuple[tuple[str, str], ...]
    """Its compile-time arguments by name."""
    result: Figures | Exception | Crash
    seconds: float = 0.0
    """Of the child that compiled it; 0 for a row that shares another row's machine code."""
    twin: str = ""
    """`id` of the row that compiled the same machine code; empty if it is this one."""

    @property
    def id(self) -> str:
        """Stable name of the row."""
        return self.case.id(self.arch, self.kernel)


@dataclass
class Unit:
    """A case that is compiled because something in it is not compiled by another."""

    arch: str
    case: Case
    specialisations: list[Specialisation]
    result: list[Figures] | Exception | Crash = field(default_factory=lambda: Crash("never compiled"))
    seconds: float = 0.0


@dataclass
class Plan:
    """What will be compiled, and which row reads which figures."""

    units: list[Unit] = field(default_factory=list)
    rows: list[tuple[Case, str, Specialisation, Unit]] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    """Cases whose launcher raised, or launched other kernels than the case says."""


def run(cases: Sequence[tuple[str, Case]], *, version: str, jobs: int, timeout: float) -> tuple[list[Finding], int]:
    """Compile and judge.

    Args:
        cases: From `cases.select`.
        version: Of Triton.
        jobs: Compilers at a time.
        timeout: Seconds for one launch.

    Returns:
        The findings, and how many code objects were read.

    Raises:
        CannotRunHereError: The AMD compiler does not work here, or a package with kernels cannot be imported.
        InvalidFileError: See `load_budgets` and `load_declared`.
    """
    budgets, declared = load_budgets(), load_declared()
    if any(case.source == "mamba" for _, case in cases):
        declared.check_names(cases_of("mamba"))
    start_compiler()
    rows = compile_all(make_plan(cases), jobs=jobs, timeout=timeout)
    compiled = sum(isinstance(row.result, Figures) and not row.twin for row in rows)
    return judge(rows, budgets, declared, triton=version), compiled


def make_plan(cases: Sequence[tuple[str, Case]]) -> Plan:
    """Ask Triton what each case would compile on its arch, and drop what would be compiled twice."""
    plan = Plan()
    compiled_by: dict[tuple[str, str], Unit] = {}
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
        if any((arch, each.key) not in compiled_by for each in wanted):
            unit = Unit(arch, case, wanted)
            plan.units.append(unit)
            for each in wanted:
                compiled_by.setdefault((arch, each.key), unit)
        plan.rows += [(case, arch, each, compiled_by[arch, each.key]) for each in wanted]
    return plan


def compile_all(plan: Plan, *, jobs: int, timeout: float) -> list[Row]:
    """Compile the units and read every row's figures.

    Args:
        plan: From `make_plan`.
        jobs: Compilers at a time.
        timeout: Seconds for one unit.
    """
    calls = [functools.partial(compile_launches, unit.arch, unit.case.launch) for unit in plan.units]
    for done, (index, result, seconds) in enumerate(run_isolated(calls, jobs=jobs, timeout=timeout), start=1):
        plan.units[index].result, plan.units[index].seconds = result, seconds
        if sys.stderr.isatty():
            sys.stderr.write(f"\rcompiled {done} of {len(calls)}" + ("\n" if done == len(calls) else ""))
            sys.stderr.flush()
    return [*plan.refused, *(_row(*row) for row in plan.rows)]


def _row(case: Case, arch: str, wanted: Specialisation, unit: Unit) -> Row:
    """A kernel with its figures, or with the unit's failure, if that came before this kernel was through."""
    result = unit.result
    planned, keys = [each.kernel for each in unit.specialisations], [each.key for each in unit.specialisations]
    if isinstance(result, LdsExceededError) and result.kernel != wanted.kernel:
        result = Crash(f"not compiled: {result.kernel} of the same launch was stopped, {result}")
    elif isinstance(result, list) and [each.kernel for each in result] != planned:
        result = Crash(f"compiled {[each.kernel for each in result]}, planned {list(unit.case.kernels)}")
    elif isinstance(result, list):
        result = result[keys.index(wanted.key)]
    twin = "" if unit.case is case else unit.case.id(arch, wanted.kernel)
    return Row(case, arch, wanted.kernel, wanted.constants, result, 0.0 if twin else unit.seconds, twin)
