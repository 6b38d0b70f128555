"""The report: one HTML file that opens anywhere, the same first screen as Markdown, and one JUnit file for other tools.

No script, no network, below 1 MiB, light and dark, printable. The templates hold the looks; this file decides what is
shown: the verdict, what changed, what is not green, then everything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from hilgate import escape as safe
from hilgate import rules, shown
from hilgate.model import Check, Outcome, Plan, StepVerdict, Verdict
from hilgate.tables import StepTable, step_tables
from hilgate.timeline import timeline

if TYPE_CHECKING:
    from pathlib import Path

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


@dataclass(frozen=True)
class Problem:
    """A step that is not green, with the checks that say so."""

    step: StepVerdict
    checks: tuple[Check, ...]
    more: int
    """Checks that failed or were inconclusive and are not shown."""
    skips: tuple[tuple[str, int], ...]
    """(reason, how many checks), of the checks that did not run."""


def render(plan: Plan, recorded: Recorded, verdict: Verdict, logs: dict[str, str] | None = None) -> str:
    """The report as HTML, below `LIMIT_BYTES`; `logs` is step key -> address of its log relative to the report."""
    template = _environment().get_template("report.html.j2")
    html = ""
    for detail in DETAILS:
        html = template.render(**_context(plan, recorded, verdict, detail), logs=logs or {})
        if len(html.encode()) < LIMIT_BYTES:
            return html
    raise AssertionError(f"a report of {len(html)} characters at the least detail")


def write_report(plan: Plan, recorded: Recorded, verdict: Verdict, folder: Path, *, logs: dict[str, str]) -> Path:
    """Write `report.html` into the results folder and return its path."""
    path = folder / REPORT_FILE
    path.write_text(render(plan, recorded, verdict, logs), encoding="utf-8")
    return path


def problems(recorded: Recorded, verdict: Verdict, *, limit: int) -> tuple[Problem, ...]:
    """Every step that is not green, worst first; a step that passed with skips is green and not here."""
    found = []
    for step in shown.not_green(verdict):
        attempt = recorded.last(step.key)
        checks = attempt.checks if attempt else ()
        found_wrong = [check for check in checks if check.outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE}]
        found_wrong.sort(key=lambda check: -rules.SEVERITY[check.outcome])
        skipped = [check for check in checks if check.outcome is Outcome.DID_NOT_RUN]
        reasons = Counter(shorten(rules.first_line(check.message), 300) for check in skipped)
        more = max(0, len(found_wrong) - limit)
        found.append(Problem(step, tuple(found_wrong[:limit]), more, tuple(reasons.most_common(limit))))
    return tuple(found)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, saying how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters in results.jsonl)"


def _context(plan: Plan, recorded: Recorded, verdict: Verdict, detail: Detail) -> dict[str, object]:
    reasons = {step.key: step.reason for step in plan.steps}
    tables: tuple[StepTable, ...] = step_tables(plan, recorded, detail.table_rows)
    return {
        "plan": plan,
        "verdict": verdict,
        "headline": shown.headline(verdict, recorded),
        "step_counts": shown.step_counts(verdict),
        "problems": problems(recorded, verdict, limit=detail.failures_per_step),
        "reasons": reasons,
        "peaks": {s.key: a.record.peak_memory_mib for s in plan.steps if (a := recorded.last(s.key))},
        "tables": tables,
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


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hilgate"),
        autoescape=True,
        finalize=safe.finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "mark": lambda outcome: shown.MARKS[outcome],
        "slug": lambda outcome: outcome.value.replace(" ", "-"),
        "duration": shown.duration,
        "shorten": shorten,
    }
    return environment
