# SPDX-License-Identifier: Apache-2.0
"""The end of every run: judge what was recorded, then report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.errors import MisuseError, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.judge.build import Judged
    from hilgate.model.plan import Plan
    from hilgate.report.write import Report


def judge_and_report(
    folder: Path,
    plan: Plan,
    *,
    jobs: Path | None = None,
    only: frozenset[str] | None = None,
    job: str = "",
    root: Path | None = None,
    approved_by: str = "",
) -> tuple[Judged, Report]:
    """Judge a results folder and write its reports; arguments are those of `judge_folder`."""
    from hilgate.judge.build import judge_folder
    from hilgate.model.plan import plan_digest
    from hilgate.report.history import path_of
    from hilgate.report.merge_base import NOTHING, find
    from hilgate.report.write import write_reports

    digest = plan_digest(plan)
    judged = judge_folder(folder, plan, digest, jobs=jobs, only=only, job=job, root=root, approved_by=approved_by)
    facts = find(judged.plan, path_of(root)) if root else NOTHING
    return judged, write_reports(folder, judged.plan, digest, judged.recorded, judged.verdict, facts=facts, jobs=jobs)


def read_plan_or_report_none(path: Path, folder: Path, *, whole: bool = False) -> Plan:
    """Read the plan that results answer; with `whole` one that may decide about a merge.

    A verdict and an annotation that say so are written before an error: no old verdict may outlive that.

    Raises:
        RecordsError: There is none, or it is damaged.
        MisuseError: It is of a quick run or of a part of a step, and must be whole.
    """
    from hilgate.judge.build import judge_nothing
    from hilgate.plan.make import read_plan
    from hilgate.report.write import report_nothing

    try:
        plan = read_plan(path)
        if whole:
            plan.require_whole(str(path))
    except (RecordsError, MisuseError) as error:
        report_nothing(folder, judge_nothing(folder, error.what), str(error))
        raise
    return plan
