"""What the running commands print: results on stdout, narration on stderr, readable at 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hilgate import escape, headlines, rules, shown

if TYPE_CHECKING:
    from hilgate.cli.gating import Judged
    from hilgate.merge_base import Facts
    from hilgate.model import Check, Plan
    from hilgate.problems import Problem


def stdout() -> Console:
    """Results go here."""
    return Console()


def stderr() -> Console:
    """Narration goes here."""
    return Console(stderr=True)


def print_plan(plan: Plan) -> None:
    """What will run and why, on stderr, before anything runs."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("step", no_wrap=True, max_width=36, overflow="ellipsis")
    table.add_column("~min", justify="right")
    table.add_column("because", overflow="fold")
    for step in plan.steps:
        table.add_row(step.key, f"{step.minutes:g}", Text(escape.line(step.reason)))
    console = stderr()
    console.print(table)
    omitted = f", {len(plan.omissions)} not planned here" if plan.omissions else ""
    minutes = sum(step.minutes for step in plan.steps)
    console.print(f"{len(plan.steps)} steps, about {minutes:.0f} CPU-minutes{omitted}\n", style="dim", highlight=False)


def print_verdict(judged: Judged, facts: Facts | None = None) -> None:
    """The four outcomes, what broke in each step that is not green, and where the report is."""
    from hilgate.merge_base import NOTHING
    from hilgate.problems import approval, named, problems

    recorded, verdict = judged.recorded, judged.verdict
    console = stdout()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("outcome", no_wrap=True)
    table.add_column("step", no_wrap=True, max_width=34, overflow="ellipsis")
    for name in ("passed", "failed", "other", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in verdict.steps:
        counts, style = step.counts, shown.STYLES[step.outcome]
        other = str(counts.inconclusive + counts.did_not_run)
        words = (str(counts.passed), str(counts.failed), other, shown.duration(step.seconds))
        table.add_row(Text(shown.marked(step.outcome), style), step.key, *words)
    console.print(table)
    for problem in problems(judged.plan, recorded, verdict, limit=1, facts=facts or NOTHING):
        _print_problem(console, problem, with_merge_base=facts is not None)
    for one in named(verdict):
        console.print(Text(f"\n{one.kind} in {one.step}: {escape.line(', '.join(one.ids))}"), soft_wrap=True)
    console.print()
    style = shown.STYLES[verdict.outcome]
    console.print(
        Text.assemble((shown.marked(verdict.outcome), style), f": {escape.line(headlines.headline(verdict, recorded))}")
    )
    console.print(Text(headlines.step_counts(verdict), "dim"))
    if approved := approval(verdict):
        console.print(Text(escape.line(f"loosens its own gate: {approved}"), "bold"), soft_wrap=True)
    console.print(Text(f"report: {short(judged.report)}", "dim"), soft_wrap=True)


def _print_problem(console: Console, problem: Problem, *, with_merge_base: bool) -> None:
    step = problem.step
    console.print(Text(f"\n{headlines.ruled(step)}: {step.key}", shown.STYLES[step.outcome]))
    lines, merge_base = [step.why], problem.merge_base
    facts: list[tuple[str, str]] = []
    if problem.findings:
        finding = problem.findings[0]
        merge_base = finding.merge_base
        lines = [finding.check.id, *finding.check.message.splitlines()[:12]]
        facts = [("error", finding.size.error), ("case", finding.size.case)]
    facts += [("merge base", merge_base)] if with_merge_base else []
    facts += [("node", step.node), *(("evidence", line) for line in step.evidence[:6])]
    for line in lines + [f"{name}: {words}" for name, words in facts if words]:
        console.print(Text(f"  {escape.line(line)}"), soft_wrap=True)
    console.print(Text(f"  reproduce: {escape.line(step.reproduce)}", "bold"), soft_wrap=True)


def print_checks(checks: tuple[Check, ...]) -> None:
    """One line per check and its message below, readable at 80 columns."""
    console = stdout()
    for check in checks:
        console.print(
            Text.assemble((shown.marked(check.outcome), shown.STYLES[check.outcome]), f" {escape.line(check.id)}"),
            soft_wrap=True,
        )
        console.print(Text(escape.log(f"  {check.message}"), "dim"), soft_wrap=True)
    console.print(Text(f"\n{rules.summary(rules.count(checks))}"))


def short(path: Path) -> Path:
    """Relative to the current folder where that is shorter to read."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
