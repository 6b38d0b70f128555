"""The report: one HTML file that opens anywhere, the same first screen as Markdown, and one JUnit file for other tools.

No script, no network, below 1 MiB, light and dark, printable. The templates hold the looks; this file decides what is
shown: the verdict, what broke, what changed, then everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import headlines, matrix, matrix_reasons
from hilgate.merge_base import NOTHING, Facts
from hilgate.pages import environment
from hilgate.problems import approval, named, problems
from hilgate.tables import step_tables
from hilgate.timeline import timeline

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Plan, Verdict
    from hilgate.results import Recorded

REPORT_FILE = "report.html"
LIMIT_BYTES = 1024 * 1024
"""Buildkite refuses larger annotations; a report of that size is still a mailable file."""


@dataclass(frozen=True)
class Detail:
    """How much is shown, so that a build with thousands of failures still fits."""

    failures_per_step: int
    message_characters: int
    table_rows: int


DETAILS = (Detail(20, 4000, 500), Detail(8, 1500, 150), Detail(3, 500, 30), Detail(1, 200, 0))
"""Tried in order until the report fits; what is left out is counted and stays in results.jsonl."""

MATRIX_COLUMNS = 60
"""Of a table; more would not fit a page, and the others are counted."""

NAMED_IDS = 20
"""Of flaky and quarantined checks of one step; the others are counted."""


def render(
    plan: Plan, recorded: Recorded, verdict: Verdict, logs: dict[str, str] | None = None, *, facts: Facts = NOTHING
) -> str:
    """The report as HTML, below `LIMIT_BYTES`.

    Args:
        plan: What was expected.
        recorded: What arrived.
        verdict: What was decided.
        logs: Step key -> address of its log, relative to the report.
        facts: What is known of the merge base.
    """
    template = environment().get_template("report.html.j2")
    html = ""
    for detail in DETAILS:
        html = template.render(**_context(plan, recorded, verdict, detail, facts), logs=logs or {})
        if len(html.encode()) < LIMIT_BYTES:
            return html
    raise AssertionError(f"a report of {len(html)} characters at the least detail")


def write_report(
    plan: Plan,
    recorded: Recorded,
    verdict: Verdict,
    folder: Path,
    *,
    logs: dict[str, str],
    facts: Facts = NOTHING,
) -> Path:
    """Write `report.html` into the results folder and return its path."""
    path = folder / REPORT_FILE
    path.write_text(render(plan, recorded, verdict, logs, facts=facts), encoding="utf-8")
    return path


def _context(plan: Plan, recorded: Recorded, verdict: Verdict, detail: Detail, facts: Facts) -> dict[str, object]:
    reasons = {step.key: step.reason for step in plan.steps}
    return {
        "plan": plan,
        "verdict": verdict,
        "headline": headlines.headline(verdict, recorded),
        "step_counts": headlines.step_counts(verdict),
        "problems": problems(plan, recorded, verdict, limit=detail.failures_per_step, facts=facts),
        "rulings": headlines.RULINGS,
        "named": named(verdict),
        "named_limit": NAMED_IDS,
        "approval": approval(verdict),
        "reasons": reasons,
        "peaks": {s.key: a.record.peak_memory_mib for s in plan.steps if (a := recorded.last(s.key))},
        "tables": step_tables(plan, recorded, detail.table_rows),
        "matrices": matrix.tables(plan, recorded, verdict),
        "matrix_rows": detail.table_rows,
        "matrix_columns": MATRIX_COLUMNS,
        "notes": matrix_reasons.notes,
        "timeline": timeline(plan, recorded, verdict),
        "environments": environments(recorded),
        "characters": detail.message_characters,
    }


def environments(recorded: Recorded) -> tuple[tuple[str, str], ...]:
    """(where, what) of every distinct environment that a build record names."""
    distinct = dict.fromkeys(build.environment.model_dump_json() for build in recorded.builds)
    found = []
    for build in recorded.builds:
        text = build.environment.model_dump_json()
        if text in distinct:
            del distinct[text]
            where = build.environment
            versions = ", ".join(f"{name} {version}" for name, version in sorted(where.versions.items()))
            image = f", image {where.image}" if where.image else ""
            machine = f"{where.device}, {where.cores} cores, {where.memory_gib:g} GiB"
            found.append((where.host, f"{machine}; Python {where.python}, {versions}{image}"))
    return tuple(found)
