"""The first screen for other readers: `annotation.md` for Buildkite and pull requests, `junit.xml` for test tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import text as safe
from hilgate.model import Check, Outcome, Plan, StepVerdict, Verdict
from hilgate.report import problems as headlines
from hilgate.report import tables
from hilgate.report.html import DETAILS, LIMIT_BYTES, NAMED_IDS, Detail
from hilgate.report.merge_base import NOTHING, Facts
from hilgate.report.problems import Finding, Problem, approval, named, problems
from hilgate.text import shorten

if TYPE_CHECKING:
    from pathlib import Path

    from junitparser import TestCase

    from hilgate.run.results import Recorded

ANNOTATION_FILE = "annotation.md"
JUNIT_FILE = "junit.xml"


def render(plan: Plan, recorded: Recorded, verdict: Verdict, *, facts: Facts = NOTHING) -> str:
    """The first screen as CommonMark, below Buildkite's limit of 1 MiB."""
    text = ""
    for detail in DETAILS:
        text = _render(plan, recorded, verdict, detail, facts)
        if len(text.encode()) < LIMIT_BYTES:
            return text
    raise AssertionError(f"an annotation of {len(text)} characters at the least detail")


def write_annotation(plan: Plan, recorded: Recorded, verdict: Verdict, folder: Path, *, facts: Facts = NOTHING) -> Path:
    """Write `annotation.md` into the results folder and return its path."""
    path = folder / ANNOTATION_FILE
    path.write_text(render(plan, recorded, verdict, facts=facts), encoding="utf-8")
    return path


def escape(text: str) -> str:
    """Text on one line that Markdown and HTML show as it is."""
    return safe.markdown(text)


def fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    return safe.fenced(text)


def _render(plan: Plan, recorded: Recorded, verdict: Verdict, detail: Detail, facts: Facts) -> str:
    files = ", ".join(escape(file) for file in plan.changed_files[:8])
    more = f" and {len(plan.changed_files) - 8} more" if len(plan.changed_files) > 8 else ""
    commit = f"`{escape(plan.commit[:12])}`" if plan.commit else "(not a git checkout)"
    dirty = " with uncommitted changes" if plan.dirty else ""
    against = f" against {escape(plan.base)}" if plan.base else ", compared with nothing"
    parts = [
        f"## {safe.marked(verdict.outcome)}: {escape(headlines.headline(verdict, recorded))}",
        f"{escape(headlines.step_counts(verdict))}; {commit}{dirty}{against}{': ' + files + more if files else ''}",
        *_loosened(verdict, detail),
    ]
    for problem in problems(plan, recorded, verdict, limit=detail.failures_per_step, facts=facts):
        parts += _problem(problem, detail)
    parts += [line for table in tables.tables(plan, recorded, verdict) if (line := _first_failing_cell(table))]
    for one in named(verdict):
        ids = [f"- {escape(shorten(name, 300))}" for name in one.ids[:NAMED_IDS]]
        left = len(one.ids) - len(ids)
        ids += [f"- and {left} more in verdict.json"] if left else []
        parts.append("\n".join([f"**{one.kind}** in {escape(one.step)} ({escape(one.what)})", "", *ids]))
    passed = [step for step in verdict.steps if step.outcome is Outcome.PASS]
    if passed:
        rows = [f"| {escape(s.key)} | {s.counts.passed} | {safe.duration(s.seconds)} |" for s in passed]
        parts.append("\n".join(["| passed | checks | time |", "|---|---:|---:|", *rows]))
    if verdict.omissions:
        parts.append("\n".join(f"- not selected: {escape(o.key)}: {escape(o.reason)}" for o in verdict.omissions))
    return "\n\n".join(parts) + "\n"


def _first_failing_cell(table: tables.Table) -> str:
    failed = [cell for cell in table.grid.values() if cell.outcome is Outcome.FAIL]
    if not failed:
        return ""
    cell = failed[0]
    more = f" (and {len(failed) - 1} more of its cells failed)" if len(failed) > 1 else ""
    words = f"{table.step.key}: {cell.row}, {cell.column}: {cell.first_line}{more}"
    return f"{safe.MARKS[cell.outcome]} {escape(shorten(words, 400))}"


def _loosened(verdict: Verdict, detail: Detail) -> list[str]:
    approved = approval(verdict)
    if not approved:
        return []
    parts = [f"**Changes its own gate: {escape(approved)}**"]
    for one in verdict.loosened[:NAMED_IDS]:
        hunk = fenced(shorten(one.hunk, detail.message_characters)) if one.hunk else ""
        parts.append(f"{escape(one.path)}: {escape(one.what)}" + (f"\n\n{hunk}" if hunk else ""))
    more = len(verdict.loosened) - NAMED_IDS
    return [*parts, f"and {more} more in verdict.json"] if more > 0 else parts


def _problem(problem: Problem, detail: Detail) -> list[str]:
    step = problem.step
    parts = [
        f"### {headlines.ruled(step)}: {escape(step.key)}, {escape(step.label)}",
        escape(headlines.RULINGS[step.ruling]),
    ]
    if not problem.findings:
        parts += [fenced(shorten(step.why, detail.message_characters)), f"merge base: {escape(problem.merge_base)}"]
    about = [*_evidence(problem.step), *_repeat(problem)]
    for number, finding in enumerate(problem.findings):
        parts += _finding(finding, detail, about if number == 0 else [])
    if not problem.findings:
        parts += about
    parts += [f"{safe.MARKS[Outcome.DID_NOT_RUN]} {n} not run: {escape(why)}" for why, n in problem.skips]
    if problem.more:
        parts.append(f"and {problem.more} more that are not green")
    return parts


def _evidence(step: StepVerdict) -> list[str]:
    lines = ([f"node {step.node}"] if step.node else []) + list(step.evidence[:12])
    left = len(step.evidence) - 12
    lines += [f"and {left} lines more in verdict.json"] if left > 0 else []
    return ["\n".join(f"- {escape(shorten(line, 300))}" for line in lines)] if lines else []


def _repeat(problem: Problem) -> list[str]:
    lines = [problem.step.reproduce] + ([problem.container] if problem.container else [])
    return ["reproduce:\n" + fenced("\n".join(lines))]


def _finding(finding: Finding, detail: Detail, about: list[str]) -> list[str]:
    """What is asked first, then what the message says beyond its first line. No HTML: some viewers show it as text."""
    check, size = finding.check, finding.size
    facts = (("error", size.error), ("case", size.case), ("merge base", finding.merge_base), ("where", size.place))
    parts = [
        f"{safe.MARKS[check.outcome]} {escape(shorten(check.id, 300))}",
        fenced(shorten(size.assertion, 400)),
        "\n".join(f"- {name}: {escape(shorten(words, 300))}" for name, words in facts if words),
        *about,
    ]
    rest = "\n".join(check.message.strip().splitlines()[1:])
    if rest:
        parts += ["it also says:", fenced(shorten(rest, detail.message_characters))]
    return parts


def write_junit(plan: Plan, recorded: Recorded, verdict: Verdict, folder: Path) -> Path:
    """Write all checks as one `junit.xml`.

    Tools that read JUnit take a skipped test for green. So a step that is not a pass and has no failing check gets a
    test case of its own that is an error and says why.
    """
    from junitparser import Error, JUnitXml, TestCase, TestSuite

    document = JUnitXml()
    labels = {step.key: step.label for step in plan.steps}
    for step in verdict.steps:
        suite = TestSuite(_xml(f"{step.key}: {labels[step.key]}"))
        attempt = recorded.last(step.key)
        for check in attempt.checks if attempt else ():
            case = TestCase(_xml(check.id), step.key, check.seconds)
            _set_result(case, check)
            suite.add_testcase(case)
        if step.outcome is not Outcome.PASS and not step.counts.failed:
            case = TestCase("the step itself", step.key, step.seconds or 0.0)
            case.result = [Error(_xml(f"{step.outcome.value}: {step.why}"), step.outcome.value)]
            suite.add_testcase(case)
        document.add_testsuite(suite)
    path = folder / JUNIT_FILE
    document.write(str(path), pretty=True)
    return path


def _set_result(case: TestCase, check: Check) -> None:
    from junitparser import Error, Failure, Skipped

    message = _xml(check.message)
    if check.outcome is Outcome.FAIL:
        case.result = [Failure(message, "fail")]
    elif check.outcome is Outcome.INCONCLUSIVE:
        case.result = [Error(message, "inconclusive")]
    elif check.outcome is Outcome.DID_NOT_RUN:
        case.result = [Skipped(message, "did not run")]


def _xml(text: str) -> str:
    return safe.xml(text)
