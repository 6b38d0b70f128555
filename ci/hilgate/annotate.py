"""The first screen for other readers: `annotation.md` for Buildkite and pull requests, `junit.xml` for test tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hilgate import escape as safe
from hilgate import shown
from hilgate.model import Check, Outcome, Plan, Verdict
from hilgate.report import DETAILS, LIMIT_BYTES, Detail, problems, shorten

if TYPE_CHECKING:
    from pathlib import Path

    from junitparser import TestCase

    from hilgate.results import Recorded

ANNOTATION_FILE = "annotation.md"
JUNIT_FILE = "junit.xml"


def render(plan: Plan, recorded: Recorded, verdict: Verdict) -> str:
    """The first screen as CommonMark, below Buildkite's limit of 1 MiB."""
    text = ""
    for detail in DETAILS:
        text = _render(plan, recorded, verdict, detail)
        if len(text.encode()) < LIMIT_BYTES:
            return text
    raise AssertionError(f"an annotation of {len(text)} characters at the least detail")


def write_annotation(plan: Plan, recorded: Recorded, verdict: Verdict, folder: Path) -> Path:
    """Write `annotation.md` into the results folder and return its path."""
    path = folder / ANNOTATION_FILE
    path.write_text(render(plan, recorded, verdict), encoding="utf-8")
    return path


def escape(text: str) -> str:
    """Text on one line that Markdown and HTML show as it is."""
    return safe.markdown(text)


def fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    return safe.fenced(text)


def _render(plan: Plan, recorded: Recorded, verdict: Verdict, detail: Detail) -> str:
    files = ", ".join(escape(file) for file in plan.changed_files[:8])
    more = f" and {len(plan.changed_files) - 8} more" if len(plan.changed_files) > 8 else ""
    commit = f"`{escape(plan.commit[:12])}`" if plan.commit else "(not a git checkout)"
    dirty = " with uncommitted changes" if plan.dirty else ""
    against = f" against {escape(plan.base)}" if plan.base else ", compared with nothing"
    parts = [
        f"## {shown.marked(verdict.outcome)}: {escape(shown.headline(verdict, recorded))}",
        f"{commit}{dirty}{against}{': ' + files + more if files else ''}",
    ]
    for problem in problems(recorded, verdict, limit=detail.failures_per_step):
        step = problem.step
        parts.append(f"### {shown.marked(step.outcome)} {escape(step.key)}: {escape(step.label)}")
        if not problem.checks:
            parts.append(fenced(shorten(step.why, detail.message_characters)))
        for check in problem.checks:
            parts += _check(check, detail)
        parts += [f"{shown.MARKS[Outcome.DID_NOT_RUN]} {n} not run: {escape(why)}" for why, n in problem.skips]
        if problem.more:
            parts.append(f"and {problem.more} more that are not green")
        parts.append(f"reproduce:\n{fenced(step.reproduce)}")
    passed = [step for step in verdict.steps if step.outcome is Outcome.PASS]
    if passed:
        rows = [f"| {escape(s.key)} | {s.counts.passed} | {shown.duration(s.seconds)} |" for s in passed]
        parts.append("\n".join(["| passed | checks | time |", "|---|---:|---:|", *rows]))
    if verdict.omissions:
        parts.append("\n".join(f"- not planned: {escape(o.key)}: {escape(o.reason)}" for o in verdict.omissions))
    return "\n\n".join(parts) + "\n"


def _check(check: Check, detail: Detail) -> list[str]:
    numbers = ", ".join(f"{escape(name)} {value:.6g}" for name, value in check.numbers.items())
    parts = [f"{shown.MARKS[check.outcome]} {escape(shorten(check.id, 300))}"]
    parts.append(fenced(shorten(check.message, detail.message_characters)))
    return [*parts, numbers] if numbers else parts


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
