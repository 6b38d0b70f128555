"""The one place where the simulator meets what it tests: results are read, reruns asked for, and the verdict given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import judge, recheck, results
from hilgate.errors import Exit, RecordsError
from hilgate.plan import plan_digest, read_plan

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from hilgate.model import Plan, Quarantine, Verdict
    from hilgate.results import Recorded

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Gathered:
    """What a step of the flow finds after its downloads."""

    plan: Plan
    digest: str
    recorded: Recorded


def gather(folder: Path) -> Gathered | None:
    """Read the plan and the job folders below `folder`; None when there is no plan that can be read."""
    try:
        plan = read_plan(folder / PLAN_FILE)
    except RecordsError:
        return None
    digest = plan_digest(plan)
    return Gathered(plan, digest, results.read_all(folder, folder / "jobs", plan, digest))


def pending(gathered: Gathered) -> dict[str, tuple[str, ...]]:
    """Planned key -> its failing tests that still need a run on another node."""
    return recheck.pending(gathered.plan, gathered.recorded)


def decide(gathered: Gathered, decided: dt.datetime, quarantine: Quarantine, approved_by: str) -> tuple[Verdict, Exit]:
    """The verdict, and the exit status of the command that gives it."""
    verdict = judge.judge(
        gathered.plan,
        gathered.recorded,
        gathered.digest,
        decided=decided,
        quarantine=quarantine,
        approved_by=approved_by,
    )
    return verdict, judge.exit_status(verdict, gathered.plan)
