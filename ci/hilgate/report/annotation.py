# SPDX-License-Identifier: Apache-2.0
"""The first screen for other readers: `annotation.md` for Buildkite and pull requests, `junit.xml` for test tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate.model.record import Outcome
from hilgate.report.reservations import TITLE
from hilgate.report.view import (
    EVIDENCE_LINES,
    LIMIT_BYTES,
    NAMED_IDS,
    RULINGS,
    at_most,
    beside,
    fit,
    more,
    ruled,
)
from hilgate.text import MARKS, duration, fenced, markdown, marked, shorten, xml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from junitparser import TestCase

    from hilgate.model.record import Check
    from hilgate.model.verdict import Verdict
    from hilgate.report.tables import Table
    from hilgate.report.view import CheckFinding, Detail, ReportView, StepProblem
    from hilgate.run.results import Recorded

ANNOTATION_FILE = "annotation.md"
COMMENT_FILE = "comment.md"
COMMENT_BYTES = 60_000
"""GitHub refuses a comment of more than 65,536 characters."""
JUNIT_FILE = "junit.xml"


def render(view: ReportView, limit: int = LIMIT_BYTES) -> str:
    """The first screen as CommonMark, by default below Buildkite's limit of 1 MiB; in any case what it all comes to."""
    least = f"## {marked(view.verdict.outcome)}\n\nThe rest is too long to be shown here: see the files of the build.\n"
    return fit(lambda detail: _render(view, detail), limit, least=least)


def comment(view: ReportView) -> str:
    """The first screen, short enough for a comment."""
    return render(view, COMMENT_BYTES)


def _render(view: ReportView, detail: Detail) -> str:
    """The annotation in Markdown, as long as `detail` allows."""
    plan, verdict = view.plan, view.verdict
    files = ", ".join(markdown(file) for file in plan.changed_files[:8])
    more = f" and {len(plan.changed_files) - 8} more" if len(plan.changed_files) > 8 else ""
    commit = f"`{markdown(plan.commit[:12])}`" if plan.commit else "(not a git checkout)"
    dirty = " with uncommitted changes" if plan.dirty else ""
    against = f" against {markdown(plan.base)}" if plan.base else ", compared with nothing"
    parts = [
        f"## {marked(verdict.outcome)}: {markdown(view.whose or view.headline)}",
        *([markdown(view.headline)] if view.whose else []),
        f"{markdown(view.step_counts)}; {commit}{dirty}{against}{': ' + files + more if files else ''}",
        *(markdown(words) for words in (*verdict.doubts, *verdict.notes, *verdict.before)),
        *_loosened(view, detail),
    ]
    for problem in view.problems(detail.failures_per_step):
        parts += _problem(problem, detail)
    parts += filter(None, map(_first_failing_cell, view.tables))
    parts += [f"### {TITLE}"] if view.reservations else []
    for reservation in view.reservations:
        title = f"**{markdown(reservation.title)}** ({markdown(reservation.what)})"
        parts.append(f"{title}\n\n{_bullets(at_most(reservation.ids, NAMED_IDS), 300)}")
    passed = [step for step in verdict.steps if step.outcome is Outcome.PASS]
    if passed:
        rows = [f"| {markdown(s.key)} | {s.counts.passed} | {duration(s.seconds)} |" for s in passed]
        parts.append("\n".join(["| passed | checks | time |", "|---|---:|---:|", *rows]))
    if verdict.omissions:
        words = {"queue out": "not started", "only reported": "only reported, not started"}
        parts.append(
            "\n".join(
                f"- {words.get(o.cause, 'not selected')}: {markdown(o.key)}: {markdown(o.reason)}"
                for o in verdict.omissions
            )
        )
    return "\n\n".join(parts) + "\n"


def _first_failing_cell(table: Table) -> str:
    failed = [(", ".join(place), cell) for place, cell in table.grid.items() if cell.outcome is Outcome.FAIL]
    if not failed:
        return ""
    place, cell = failed[0]
    more = f" (and {len(failed) - 1} more of its cells failed)" if len(failed) > 1 else ""
    return f"{MARKS[cell.outcome]} {markdown(shorten(f'{table.step.key}: {place}: {cell.reason}{more}', 400))}"


def _bullets(lines: Iterable[str], limit: int) -> str:
    return "\n".join(f"- {markdown(shorten(line, limit))}" for line in lines)


def _loosened(view: ReportView, detail: Detail) -> list[str]:
    approved = view.approval
    if not approved:
        return []
    changes = [
        f"{markdown(change.path)}: {markdown(change.what)}"
        + (f"\n\n{fenced(shorten(change.hunk, detail.message_characters))}" if change.hunk else "")
        for change in view.verdict.protected_changes
    ]
    return [f"**Changes its own gate: {markdown(approved)}**", *at_most(changes, NAMED_IDS)]


def _problem(problem: StepProblem, detail: Detail) -> list[str]:
    step = problem.step
    parts = [
        f"### {ruled(step)}: {markdown(step.key)}, {markdown(step.label)}",
        markdown(RULINGS[step.ruling]),
    ]
    about = _about(problem)
    for finding in problem.findings:
        parts += _finding(finding, detail, about if finding is problem.findings[0] else [])
    if not problem.findings:
        parts.append(fenced(shorten(step.why, detail.message_characters)))
        parts += [f"merge base: {markdown(problem.merge_base)}"] if problem.merge_base else []
        parts += about
    parts += [f"{MARKS[Outcome.DID_NOT_RUN]} {n} not run: {markdown(why)}" for why, n in problem.skips]
    parts += [f"{name}: {markdown(', '.join(keys))}" for name, keys in beside(problem) if keys]
    if problem.more:
        parts.append(markdown(more(problem)))
    return parts


def _about(problem: StepProblem) -> list[str]:
    step = problem.step
    lines = [*([f"node {step.node}"] if step.node else []), *at_most(step.evidence, EVIDENCE_LINES)]
    again = [step.reproduce, *([problem.container] if problem.container else [])]
    return [*([_bullets(lines, 300)] if lines else []), "reproduce:\n" + fenced("\n".join(again))]


def _finding(finding: CheckFinding, detail: Detail, about: list[str]) -> list[str]:
    """What is asked first, then what the message says beyond its first line. No HTML: some viewers show it as text."""
    check = finding.check
    facts = {
        "error": finding.error,
        "case": finding.case,
        "merge base": finding.merge_base,
        "where": finding.place,
        **{name: ", ".join(keys) for name, keys in beside(finding)},
    }
    parts = [
        f"{MARKS[check.outcome]} {markdown(shorten(check.id, 300))}",
        *([f"**{markdown(finding.alike)}**"] if finding.alike else []),
        fenced(shorten(finding.assertion, 400)),
        _bullets((f"{name}: {words}" for name, words in facts.items() if words), 310),
        *about,
    ]
    if finding.others:
        listed = at_most(finding.others, detail.failures_per_step)
        parts += [f"the others:\n\n{_bullets(listed, 300)}"]
    rest = "\n".join(check.message.strip().splitlines()[1:])
    if rest:
        parts += ["it also says:", fenced(shorten(rest, detail.message_characters))]
    return parts


def write_junit(recorded: Recorded, verdict: Verdict, folder: Path) -> Path:
    """Write all checks as one `junit.xml`.

    Tools that read JUnit take a skipped test for green. So a step that is not a pass and has no failing check gets a
    test case of its own that is an error and says why.
    """
    from junitparser import Error, JUnitXml, TestCase, TestSuite

    document = JUnitXml()
    for step in verdict.steps:
        suite = TestSuite(xml(f"{step.key}: {step.label}"))
        attempt = recorded.last(step.key)
        cases = []
        for check in attempt.checks if attempt else ():
            case = TestCase(xml(check.id), step.key, check.seconds)
            _set_result(case, check)
            cases.append(case)
        if step.outcome is not Outcome.PASS and not step.counts.failed:
            case = TestCase("the step itself", step.key, step.seconds or 0.0)
            case.result = [Error(xml(f"{step.outcome.value}: {step.why}"), step.outcome.value)]
            cases.append(case)
        suite.add_testcases(cases)  # one by one, each would count all before it again
        document.add_testsuite(suite)
    path = folder / JUNIT_FILE
    document.write(str(path))
    return path


def _set_result(case: TestCase, check: Check) -> None:
    from junitparser import Error, Failure, Skipped

    kinds = {Outcome.FAIL: Failure, Outcome.INCONCLUSIVE: Error, Outcome.DID_NOT_RUN: Skipped}
    if check.outcome in kinds:
        case.result = [kinds[check.outcome](xml(check.message), check.outcome.value)]
