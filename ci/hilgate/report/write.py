# SPDX-License-Identifier: Apache-2.0
"""Judge recorded results and write the reports. However little was recorded, there is a verdict."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import Exit, HilgateError, MisuseError, RecordsError, writing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hilgate.model.declaration import Quarantine
    from hilgate.model.plan import Plan
    from hilgate.model.verdict import Verdict
    from hilgate.report.merge_base import MergeBase
    from hilgate.report.view import ReportView
    from hilgate.run.results import Recorded

REPORT_FILE = "report.html"
TABLE_COLUMNS = 60
"""Of a table; more would not fit a page, and the others are counted."""

FOLDED_ROWS = 30
"""A longer table would push what follows off the reader's screen."""


@dataclass(frozen=True)
class Judged:
    """A decision with all that led to it, and where its report is.

    Attributes:
        facts: What is known of the merge base.
        refused: Why the quarantine that should count cannot be read; the verdict is red then.
    """

    plan: Plan
    recorded: Recorded
    verdict: Verdict
    report: Path
    facts: MergeBase | None = None
    refused: HilgateError | None = None

    @property
    def view(self) -> ReportView:
        """The verdict as every report shows it."""
        from hilgate.report.merge_base import NOTHING
        from hilgate.report.view import ReportView

        return ReportView(self.plan, self.recorded, self.verdict, self.facts or NOTHING)


def judge_and_report(
    folder: Path,
    plan: Plan,
    *,
    jobs: Path | None = None,
    only: frozenset[str] | None = None,
    job: str = "",
    root: Path | None = None,
    approved_by: str = "",
    against: Path | None = None,
    decided: dt.datetime | None = None,
    quarantine: Callable[[], Quarantine] | None = None,
) -> Judged:
    """Judge a results folder, or what agents left in `jobs`; write `verdict.json`, cells of matrices and reports.

    Args:
        folder: Where the verdict and the reports are written.
        plan: What was expected.
        jobs: A folder with one results folder per agent's job; None locally.
        only: Decide on these steps of the plan alone, as an agent's own job does. The node's health, images and
            approvals are left to the verdict of the whole build, which alone can know them.
        job: The one step of `only`, where `folder` is the folder of its job.
        root: The repository that has the quarantine; None judges without one.
        approved_by: Who approved the protected changes.
        against: Results of the merge base, to set failures beside; None looks into the history.
        decided: The time to write into the verdict; None takes the present.
        quarantine: The quarantine that counts; None takes the merge base's, by `root`.
    """
    from hilgate.declare.load import load
    from hilgate.declare.quarantine import USED_FILE, effective, load_quarantine
    from hilgate.judge.verdict import judge
    from hilgate.model import VERDICT_FILE
    from hilgate.model.declaration import Quarantine
    from hilgate.model.record import Outcome
    from hilgate.plan.make import plan_digest
    from hilgate.report import annotation, tables
    from hilgate.report.history import path_of
    from hilgate.report.merge_base import find
    from hilgate.report.view import ReportView
    from hilgate.run import results

    digest = plan_digest(plan)
    folder.mkdir(parents=True, exist_ok=True)
    judged = plan
    if only is not None:
        steps = tuple(step for step in plan.steps if step.key in only)
        # An agent's job leaves approvals to the verdict of the build; locally there is no other one.
        left_out = {} if plan.local else {"profile": "gate"}
        judged = plan.model_copy(update={"steps": steps, **left_out})
    recorded = results.read_all(folder, jobs, plan, digest, job)
    excused, refused = Quarantine(), None
    try:
        if quarantine:
            excused = quarantine()
        elif root:  # the merge base's, or the change's own where somebody approved it
            base = "" if approved_by else plan.merge_base
            excused = effective(root, base, load_quarantine(root, load(root)))
    except HilgateError as error:
        refused = error
    doubts = (OTHER_FILES,) if root and plan.local and jobs is None and _moved(recorded, root) else ()
    verdict = judge(
        judged,
        recorded,
        digest,
        decided=decided or dt.datetime.now(dt.UTC),
        quarantine=excused,
        approved_by=approved_by,
        doubts=doubts,
        approvals=only is None or plan.local,
    )
    if refused:
        verdict = verdict.model_copy(update={"outcome": Outcome.FAIL, "why": f"the quarantine: {refused.what}"})
    with writing(folder):
        verdict.save(folder / VERDICT_FILE)
        excused.save(folder / USED_FILE)
        tables.write(folder, judged, digest, recorded, tables.tables(judged, recorded, verdict))
    history = path_of(root) if root else None
    facts = find(judged, history=history if history and history.exists() else None, against=against)
    view = ReportView(judged, recorded, verdict, facts)
    path = folder / REPORT_FILE
    with writing(folder):
        annotation.write_junit(recorded, verdict, folder)
        (folder / annotation.ANNOTATION_FILE).write_text(annotation.render(view), encoding="utf-8")
        (folder / annotation.COMMENT_FILE).write_text(annotation.comment(view), encoding="utf-8")
        path.write_text(report_page(view, find_logs(folder, jobs, judged)), encoding="utf-8")
    return Judged(judged, recorded, verdict, path, facts, refused)


def report_page(view: ReportView, logs: dict[str, str] | None = None) -> str:
    """The report: one HTML file without script or network, below 1 MiB, light and dark, printable.

    `logs` has the address of a step's log, relative to the report.
    """
    from hilgate.report import view as shown
    from hilgate.report.reservations import TITLE
    from hilgate.report.tables import notes
    from hilgate.report.templating import pages

    template = pages().get_template("report.html.j2")
    return shown.fit(
        lambda detail: template.render(
            view=view,
            plan=view.plan,
            verdict=view.verdict,
            detail=detail,
            logs=logs or {},
            rulings=shown.RULINGS,
            beside=shown.beside,
            more=shown.more,
            notes=notes,
            reservations_title=TITLE,
            named_limit=shown.NAMED_IDS,
            evidence_limit=shown.EVIDENCE_LINES,
            table_columns=TABLE_COLUMNS,
            folded_rows=FOLDED_ROWS,
        )
    )


OTHER_FILES = "the files are not those that its steps ran over: they changed since, or while they ran; run it again"


def _moved(recorded: Recorded, root: Path) -> bool:
    """Whether a step ran over other files than those that are here now."""
    from hilgate import git

    trees = {build.tree for build in recorded.builds if build.tree}
    return bool(trees) and trees != {git.fingerprint(root)}


def read_plan_or_say_so(path: Path, folder: Path, *, whole: bool = False) -> Plan:
    """Read the plan that results answer; with `whole` one that may decide about a merge.

    Raises:
        RecordsError: There is none, or it is damaged.
        MisuseError: It is of a quick run or of a part of a step, and must be whole.

    A verdict and an annotation that say so are written before: no old verdict may outlive that.
    """
    from hilgate.model import VERDICT_FILE
    from hilgate.model.record import Outcome
    from hilgate.model.verdict import Verdict
    from hilgate.plan.make import read_plan
    from hilgate.report import tables
    from hilgate.report.annotation import ANNOTATION_FILE
    from hilgate.text import fenced, markdown

    try:
        plan = read_plan(path)
        if whole:
            plan.require_whole(str(path))
    except (RecordsError, MisuseError) as error:
        folder.mkdir(parents=True, exist_ok=True)
        tables.clear(folder)
        verdict = Verdict(
            decided=dt.datetime.now(dt.UTC),
            profile=None,
            commit="",
            plan_digest="",
            outcome=Outcome.DID_NOT_RUN,
            why=error.what,
            steps=(),
            omissions=(),
        )
        verdict.save(folder / VERDICT_FILE)
        title = f"## ○ {verdict.outcome.value}: {markdown(error.what)}"
        text = f"{title}\n\nNothing was judged.\n\n{fenced(str(error))}\n"
        (folder / ANNOTATION_FILE).write_text(text, encoding="utf-8")
        raise
    return plan


def find_logs(folder: Path, jobs: Path | None, plan: Plan) -> dict[str, str]:
    """Step key -> its log, relative to the results folder, for the steps that have one there."""
    from hilgate.evidence import LOG_FILE
    from hilgate.run.results import step_folder

    found = {}
    for step in plan.steps:
        log = step_folder(jobs / step.key if jobs else folder, step.key) / LOG_FILE
        if log.is_relative_to(folder) and log.exists():
            found[step.key] = log.relative_to(folder).as_posix()
    return found


def status_of(judged: Judged) -> Exit:
    """The exit status of a command that ends with this verdict."""
    from hilgate.judge.verdict import exit_status

    return judged.refused.exit_status if judged.refused else exit_status(judged.verdict, judged.plan)
