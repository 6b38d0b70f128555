# SPDX-License-Identifier: Apache-2.0
"""Write the reports of a verdict. Nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate.errors import writing
from hilgate.evidence import LOG_FILE
from hilgate.report import annotation, tables
from hilgate.report import view as shown
from hilgate.report.merge_base import NOTHING, MergeBase
from hilgate.report.reservations import TITLE
from hilgate.report.templating import pages
from hilgate.report.view import ReportView
from hilgate.run.results import step_folder
from hilgate.text import fenced, markdown, marked

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model.plan import Plan
    from hilgate.model.verdict import Verdict
    from hilgate.run.results import Recorded

REPORT_FILE = "report.html"
TABLE_COLUMNS = 60
"""Most columns of a table; more would not fit a page, and the others are counted."""

FOLDED_ROWS = 30
"""A longer table would push what follows off the reader's screen."""


@dataclass(frozen=True)
class Report:
    """A verdict with all that led to it, and where its page is.

    Attributes:
        facts: What is known of the merge base.
    """

    plan: Plan
    recorded: Recorded
    verdict: Verdict
    path: Path
    facts: MergeBase = NOTHING

    @cached_property
    def view(self) -> ReportView:
        """The verdict as every report shows it, worked out once for all of them."""
        return ReportView(self.plan, self.recorded, self.verdict, self.facts)


def write_reports(
    folder: Path,
    plan: Plan,
    digest: str,
    recorded: Recorded,
    verdict: Verdict,
    *,
    facts: MergeBase = NOTHING,
    jobs: Path | None = None,
) -> Report:
    """Write tables, `junit.xml`, annotation, comment and page of a verdict.

    `digest` is `plan_digest` of the whole plan where `plan` is a part of it. `jobs` has the folders of agents' jobs.
    """
    report = Report(plan, recorded, verdict, folder / REPORT_FILE, facts)
    view = report.view
    with writing(folder):
        tables.write(folder, plan, digest, recorded, view.tables)
        annotation.write_junit(recorded, verdict, folder)
        (folder / annotation.ANNOTATION_FILE).write_text(annotation.render(view), encoding="utf-8")
        (folder / annotation.COMMENT_FILE).write_text(annotation.comment(view), encoding="utf-8")
        report.path.write_text(report_page(view, find_logs(folder, jobs, plan)), encoding="utf-8")
    return report


def report_nothing(folder: Path, verdict: Verdict, error: str) -> None:
    """Write the annotation of a verdict over which there is no report, and remove what is there of an older one."""
    tables.clear(folder)
    for name in (annotation.COMMENT_FILE, annotation.JUNIT_FILE, REPORT_FILE):
        (folder / name).unlink(missing_ok=True)
    title = f"## ○ {verdict.outcome.value}: {markdown(verdict.why)}"
    text = f"{title}\n\nNothing was judged.\n\n{fenced(error)}\n"
    (folder / annotation.ANNOTATION_FILE).write_text(text, encoding="utf-8")


def report_page(view: ReportView, logs: dict[str, str] | None = None) -> str:
    """The report: one HTML file without script or network, below 1 MiB, light and dark, printable.

    `logs` has the address of a step's log, relative to the report.
    """
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
            notes=tables.notes,
            reservations_title=TITLE,
            named_limit=shown.NAMED_IDS,
            evidence_limit=shown.EVIDENCE_LINES,
            table_columns=TABLE_COLUMNS,
            folded_rows=FOLDED_ROWS,
        ),
        least="<!doctype html>\n<title>hilgate</title>\n"
        f"<p>{marked(view.verdict.outcome)}: too long for a page, see the other files of the build\n",
    )


def find_logs(folder: Path, jobs: Path | None, plan: Plan) -> dict[str, str]:
    """Step key -> its log, relative to the results folder, for the steps that have one there."""
    found = {}
    for step in plan.steps:
        log = step_folder(jobs / step.key if jobs else folder, step.key) / LOG_FILE
        if log.is_relative_to(folder) and log.exists():
            found[step.key] = log.relative_to(folder).as_posix()
    return found
