"""From cases to figures: what would each case compile? Compile every distinct kernel once, hand the figures back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .compilation import Figures, Specialisation, compile_launches, specialisations
from .errors import LdsExceededError
from .isolation import Crash, run_isolated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .case import Case


@dataclass(frozen=True)
class Row:
    """One kernel of one case on one arch."""

    case: Case
    arch: str
    specialisation: Specialisation
    result: Figures | Exception | Crash
    seconds: float
    """Of the child that compiled it; 0 for a row that shares another row's machine code."""
    twin: str = ""
    """`id` of the row that compiled the same machine code; empty if it is this one."""

    @property
    def id(self) -> str:
        """Stable name of the row."""
        return row_id(self.arch, self.case, self.specialisation.kernel)


@dataclass(frozen=True)
class Refusal:
    """A case whose launcher raised, or launched other kernels than the case says."""

    case: Case
    arch: str
    message: str

    @property
    def id(self) -> str:
        """Stable name of the refused launch."""
        return row_id(self.arch, self.case, "launch")


@dataclass
class _Unit:
    """A case that is compiled because something in it is not compiled by another."""

    arch: str
    case: Case
    specialisations: list[Specialisation]
    result: list[Figures] | Exception | Crash | None = None
    seconds: float = 0.0


@dataclass
class Plan:
    """What will be compiled, and which row reads which figures."""

    units: list[_Unit] = field(default_factory=list)
    rows: list[tuple[Case, str, Specialisation, _Unit]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def row_id(arch: str, case: Case, kernel: str) -> str:
    """`<arch>/<side>/<case>/<kernel>`."""
    return f"{arch}/{case.side}/{case.name}/{kernel}"


def plan_work(cases: Sequence[tuple[str, Case]]) -> Plan:
    """Ask Triton what each case would compile on its arch, and drop what would be compiled twice."""
    plan = Plan()
    compiled_by: dict[tuple[str, str], _Unit] = {}
    for arch, case in cases:
        try:
            wanted = specialisations(arch, case.launch)
        except Exception as error:  # noqa: BLE001 - whatever a launcher raises is a finding about that launcher
            plan.refusals.append(Refusal(case, arch, f"the launcher raised {type(error).__name__}: {error}"))
            continue
        names = tuple(each.kernel for each in wanted)
        if not case.launches(names):
            launched = ", ".join(names) or "nothing"
            plan.refusals.append(
                Refusal(case, arch, f"expected to launch {', '.join(case.kernels)}; it launched {launched}")
            )
            continue
        if any((arch, each.key) not in compiled_by for each in wanted):
            unit = _Unit(arch, case, wanted)
            plan.units.append(unit)
            for each in wanted:
                compiled_by.setdefault((arch, each.key), unit)
        plan.rows += [(case, arch, each, compiled_by[arch, each.key]) for each in wanted]
    return plan


def compile_all(plan: Plan, *, jobs: int, timeout: float, progress: Callable[[int, int], None]) -> list[Row]:
    """Compile the units and read every row's figures.

    Args:
        plan: From `plan_work`.
        jobs: Compilers at a time.
        timeout: Seconds for one unit.
        progress: Called with (units done, units in all).
    """
    calls = [functools.partial(compile_launches, unit.arch, unit.case.launch) for unit in plan.units]
    for done, (index, result, seconds) in enumerate(run_isolated(calls, jobs=jobs, timeout=timeout), start=1):
        plan.units[index].result, plan.units[index].seconds = result, seconds
        progress(done, len(calls))
    return [_row(*row) for row in plan.rows]


def _row(case: Case, arch: str, wanted: Specialisation, unit: _Unit) -> Row:
    twin = "" if unit.case is case else row_id(arch, unit.case, wanted.kernel)
    result = _figures(unit, wanted)
    return Row(case, arch, wanted, result, 0.0 if twin else unit.seconds, twin)


def _figures(unit: _Unit, wanted: Specialisation) -> Figures | Exception | Crash:
    """Figures of one of a unit's kernels; its failure, if it failed before that kernel was through."""
    result = unit.result
    if isinstance(result, LdsExceededError) and result.kernel != wanted.kernel:
        return Crash(f"not compiled: {result.kernel} of the same launch was stopped, {result}")
    if not isinstance(result, list):
        return result if result is not None else Crash("never compiled")
    keys = [each.key for each in unit.specialisations]
    if [each.kernel for each in result] != [each.kernel for each in unit.specialisations]:
        return Crash(f"compiled {[each.kernel for each in result]}, planned {list(unit.case.kernels)}")
    return result[keys.index(wanted.key)]
