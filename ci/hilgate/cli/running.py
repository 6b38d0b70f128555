"""The commands that run and judge: gate, run, judge, report, selftest. They import what they need when they run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilgate.cli.cells import PART, Part, TakesPart
from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from hilgate.cli.app import Settings
    from hilgate.cli.gating import Judged

Results = Annotated[Path | None, typer.Option("--results", metavar="DIR", help="By default results/.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Cores to fill; by default all.")]
JobsFolder = Annotated[
    Path | None, typer.Option("--jobs", metavar="DIR", help="Results of agents, one folder per job, instead.")
]
Against = Annotated[
    Path | None, typer.Option("--against", metavar="DIR", help="Results of the merge base; by default the history.")
]
Json = Annotated[bool, typer.Option("--json", help="The same as JSON.")]
ApprovedBy = Annotated[
    str, typer.Option("--approved-by", metavar="NAME", help="Who approves what the change loosens of its gate.")
]
Approved = Annotated[
    str,
    typer.Option(
        "--approved-by", metavar="NAME", envvar="HILGATE_APPROVED_BY", help="Run with what the change loosens."
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="By default plan.json of the results.")]


def register(app: typer.Typer) -> None:
    """Add the running commands to the program."""
    app.command("gate")(gate)
    app.command("run", cls=TakesPart)(run)
    app.command("judge")(judge)
    app.command("report")(report)
    app.command("selftest")(selftest)


def gate(
    ctx: typer.Context,
    *,
    base: Annotated[
        str | None,
        typer.Option(metavar="REF", envvar="HILGATE_BASE", help="Run what differs from it; else everything."),
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option("--steps", metavar="NAME", help="Only this step or area; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue: repeat only what has not passed.")] = False,
    approved_by: ApprovedBy = "",
    jobs: Jobs = None,
    results: Results = None,
) -> None:
    """Plan, run, judge and report on this machine; the exit status is the verdict."""
    from hilgate import quarantine
    from hilgate.cli import gating, matrix, notes, printing
    from hilgate.declare import load
    from hilgate.lock import Folder
    from hilgate.plan import make_plan, plan_digest, read_plan, write_plan

    root = _root(ctx)
    folder = results or root / "results"
    plan_file = folder / gating.PLAN_FILE
    quarantine.load(root, load(root))  # a mistake in it is told before anything runs
    with Folder(folder):
        plan = make_plan(root, base=base, profile="gate", select=tuple(steps or ()))
        resuming = resume and plan_file.exists()
        if resuming:
            if plan_digest(read_plan(plan_file)) != plan_digest(plan):
                raise MisuseError(
                    "--resume continues the same plan, and this is another (commit, changed files or options)",
                    where=str(plan_file),
                    remedy="start afresh without --resume; the old results go to previous/",
                )
        else:
            gating.set_previous_aside(folder)
            write_plan(plan, plan_file)
        printing.print_plan(plan)
        gating.run_plan(plan, gating.Request(root, folder, jobs), resume=resuming)
        judged = gating.decide(folder, plan, root=root, approved_by=approved_by)
    printing.print_verdict(judged, judged.facts)
    matrix.print_tables(judged)
    notes.print_notes(judged.verdict)
    raise typer.Exit(gating.status_of(judged))


def run(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="STEP...", help="Steps or areas; with --plan its keys.")],
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Run these steps of this plan and nothing they need.")
    ] = None,
    approved_by: Approved = "",
    jobs: Jobs = None,
    results: Results = None,
) -> None:
    """Run steps by name. What follows -- is added to their commands: hilgate run kernels-cache -- -k hnd.

    Steps with a table take its labels as options, and run that part of it alone: hilgate run models --family jamba.
    """
    from hilgate.cli import cells, gating, matrix, notes, printing
    from hilgate.declare import load
    from hilgate.lock import Folder
    from hilgate.plan import make_plan, read_plan, write_plan

    part: Part = ctx.meta[PART]
    chosen = tuple(names)
    root = _root(ctx)
    folder = results or root / "results" / "run"
    only = None
    if plan_file is not None:
        if part.labels or part.extra:
            raise MisuseError(
                "a part of a step is something else than the plan says",
                where=str(plan_file),
                remedy="leave out --plan to run a part of a step",
            )
        plan = read_plan(plan_file)
        gating.require_known(chosen, frozenset(step.key for step in plan.steps), str(plan_file))
        only = frozenset(chosen)
    else:
        plan = make_plan(root, base=None, profile="gate", select=chosen)
        plan, keys = cells.with_tables(plan, chosen, part, load(root)) if part.labels else (plan, None)
        plan = gating.narrowed(plan, chosen, part.arguments, keys)
    with Folder(folder):
        gating.set_previous_aside(folder)
        write_plan(plan, folder / gating.PLAN_FILE)
        gating.run_plan(plan, gating.Request(root, folder, jobs, only, approved_by))
        judged = gating.decide(folder, plan, only=only, root=root)
    printing.print_verdict(judged, judged.facts)
    matrix.print_tables(judged, every=True)
    notes.print_notes(judged.verdict)
    raise typer.Exit(gating.status_of(judged))


def judge(
    ctx: typer.Context,
    plan_file: PlanFile = None,
    jobs: JobsFolder = None,
    results: Results = None,
    approved_by: ApprovedBy = "",
    against: Against = None,
    as_json: Json = False,
) -> None:
    """Decide on recorded results and write the reports; the exit status is the verdict."""
    from hilgate.cli import gating, matrix, notes, printing

    judged = _decided(ctx, plan_file, jobs, results, approved_by, against)
    if as_json:
        sys.stdout.write(judged.verdict.model_dump_json(indent=1) + "\n")
    else:
        printing.print_verdict(judged, judged.facts)
        matrix.print_tables(judged)
        notes.print_notes(judged.verdict)
    for where, why in judged.recorded.damaged.items():
        sys.stderr.write(f"damaged: {where}: {why}\n")
    if judged.refused:
        sys.stderr.write(f"error: {judged.refused}\n")
    raise typer.Exit(gating.status_of(judged))


def report(
    ctx: typer.Context,
    plan_file: PlanFile = None,
    jobs: JobsFolder = None,
    results: Results = None,
    approved_by: ApprovedBy = "",
    against: Against = None,
) -> None:
    """Write verdict.json, report.html, annotation.md and junit.xml again; prints the path of the report."""
    sys.stdout.write(f"{_decided(ctx, plan_file, jobs, results, approved_by, against).report}\n")


def _decided(
    ctx: typer.Context,
    plan_file: Path | None,
    jobs: Path | None,
    results: Path | None,
    approved_by: str,
    against: Path | None,
) -> Judged:
    from hilgate.cli import gating

    root = _root(ctx)
    folder = results or root / "results"
    plan = gating.read_plan_or_say_so(plan_file or folder / gating.PLAN_FILE, folder)
    return gating.decide(folder, plan, jobs=jobs, root=root, approved_by=approved_by, against=against)


def selftest(
    ctx: typer.Context,
    bugs: Annotated[list[str] | None, typer.Argument(metavar="[BUG]...", help="Planted bugs; by default all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the bugs and stop.")] = False,
    as_json: Json = False,
    results: Results = None,
) -> None:
    """Plant known bugs in a copy of the kernels and demand that the gate turns red for each."""
    from hilgate import selftest as zoo
    from hilgate.cli import printing
    from hilgate.evidence import write_findings
    from hilgate.lock import Folder

    root = _root(ctx)
    chosen = zoo.load_bugs(root, tuple(bugs or ()))
    if listed:
        rows = [bug.model_dump(mode="json") for bug in chosen]
        text = json.dumps(rows, indent=1) if as_json else "\n".join(f"{b.id}  {b.title}  ({b.source})" for b in chosen)
        sys.stdout.write(text + "\n")
        return
    out = os.environ.get("HILGATE_OUT")  # set when the self-test is itself a step of a gate
    folder = results or (Path(out) / "zoo" if out else root / "results" / "selftest")
    with Folder(folder):
        checks = zoo.run_bugs(root, chosen, folder)
    if out:
        write_findings(Path(out), checks)
    if as_json:
        sys.stdout.write(json.dumps([check.model_dump(mode="json") for check in checks], indent=1) + "\n")
    else:
        printing.print_checks(checks)
    raise typer.Exit(zoo.status_of(checks))


def _root(ctx: typer.Context) -> Path:
    """The repository; --no-color holds for this process and for the steps it starts."""
    settings: Settings = ctx.obj
    if settings.no_color:
        os.environ["NO_COLOR"] = "1"
    return settings.repository()
