# SPDX-License-Identifier: Apache-2.0
"""Run steps and judge them: gate, run, judge, recheck, selftest. What they need is imported when they run."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from hilgate.cli import Base, Everything, JobsFolder, Json, Results, declared, program, repository
from hilgate.cli.verdict import judge_and_report, read_plan_or_report_none
from hilgate.errors import Exit, HilgateError, MisuseError, NothingSelectedError, RecordsError
from hilgate.text import count, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.judge.build import Judged
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.plan.estimate import Estimate
    from hilgate.report.terminal import Printed
    from hilgate.report.write import Report
    from hilgate.run.results import Recorded
    from hilgate.run.runner import Options, Reruns


Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Number of cores to use (default: all).")
]
FailFast = Annotated[
    bool, typer.Option("--fail-fast", help="Start no further step after the first one that does not pass.")
]


ApprovedBy = Annotated[
    str, typer.Option("--approved-by", metavar="NAME", help="Person who approves the protected changes.")
]
Approved = Annotated[
    str,
    typer.Option(
        "--approved-by",
        metavar="NAME",
        envvar="HILGATE_APPROVED_BY",
        help="Person who approves the protected changes; the steps then run with them.",
    ),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="Plan to judge by (default: plan.json in the results).")
]


ARGUMENTS = "hilgate.arguments"


class TakesArguments(TyperCommand):
    """Keeps what follows `--` apart, which the parser would take for names of steps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave it in `ctx.meta`, as words of a command, and parse the rest."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGUMENTS] = shlex.join(args[cut + 1 :])
        own = [name for one in self.get_params(ctx) for name in one.opts]
        for word in (word.partition("=")[0] for word in args[:cut]):
            if word.startswith("--") and word not in own and not ctx.resilient_parsing:  # which completion is
                raise MisuseError(
                    f"there is no option {word}",
                    where="hilgate run",
                    remedy=f"put what a step's own command takes after --; of hilgate's options, {suggest(word, own)}",
                )
        return super().parse_args(ctx, args[:cut])


@program.command()
def gate(
    ctx: typer.Context,
    *,
    base: Base = None,
    everything: Everything = False,
    steps: Annotated[
        list[str] | None,
        typer.Option(
            "--steps",
            metavar="NAME",
            autocompletion=declared("areas", "steps"),
            help="Run only this step or area; may be repeated.",
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            "--except",
            metavar="NAME",
            autocompletion=declared("areas", "steps"),
            help="Leave out this step or area, which passed elsewhere; may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the last run: run only what has not passed yet.")
    ] = False,
    fail_fast: FailFast = False,
    approved_by: ApprovedBy = "",
    jobs: Jobs = None,
    results: Results = None,
) -> None:
    """Plan, run, judge and report on this machine.

    Runs the steps that the change against the default branch selects. Without a change it runs the quick steps of
    ci/project.yaml, which decide no merge. The exit status is the verdict.
    """
    began = time.monotonic()
    from hilgate.cli.choice import choice_of, first_line
    from hilgate.declare import quarantine
    from hilgate.declare.load import load
    from hilgate.model import PLAN_FILE
    from hilgate.plan.estimate import estimate, last_minutes
    from hilgate.plan.limits import within_limits
    from hilgate.plan.machine import detect
    from hilgate.plan.make import make_plan
    from hilgate.report import terminal
    from hilgate.run.runner import Options, locked

    root = repository(ctx)
    folder = results or root / "results"
    with locked(folder):
        choice = choice_of(ctx, root, base=base, everything=everything, named=tuple(steps or ()))
        declarations = load(root)
        quarantine.load_quarantine(root, declarations)  # a mistake in it is reported before anything runs
        plan = within_limits(
            make_plan,
            root,
            base=choice.base,
            profile=choice.profile,
            select=tuple(steps or ()),
            leave_out=tuple(leave_out or ()),
            whole=choice.whole,
        )
        terminal.say(terminal.stderr(), first_line(plan, root, choice.why))
        earlier = _earlier(folder, plan) if resume else None
        if earlier is None:
            set_previous_aside(folder)
            plan.save(folder / PLAN_FILE)

        def announce(keys: frozenset[str]) -> Estimate:
            size = estimate(plan, last_minutes(root), cores=jobs or detect().cores, keys=keys)
            terminal.print_plan(terminal.stderr(), plan, size)
            return size

        def decide() -> tuple[Judged, Report]:
            return judge_and_report(folder, plan, root=root, approved_by=approved_by)

        options = Options(cores=jobs, fail_fast=fail_fast)
        judged, report, printed, size = _run_and_judge(
            plan, root, folder, options, decide, recorded=earlier, announce=announce
        )
    terminal.print_verdict(report, printed=printed)
    if size:
        terminal.print_time(terminal.stderr(), time.monotonic() - began, size)
    raise typer.Exit(judged.exit_status)


@program.command(cls=TakesArguments)
def run(
    ctx: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="STEP",
            autocompletion=declared("areas", "steps"),
            help="Steps or areas to run; with --plan, keys of that plan.",
        ),
    ],
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Run the named steps of this plan, without the steps they need."),
    ] = None,
    fail_fast: FailFast = False,
    approved_by: Approved = "",
    jobs: Jobs = None,
    slowest: Annotated[int, typer.Option(metavar="N", min=0, help="Print the N slowest checks.")] = 0,
    results: Results = None,
) -> None:
    """Run steps by name. Arguments after -- go to their commands: hilgate run kernels-cache -- -k hnd.

    A step that fills a table has options for a part of it: hilgate run models-families -- --family jamba. The steps
    that a named step needs run before it.
    """
    from hilgate.git import default_base
    from hilgate.model import PLAN_FILE
    from hilgate.plan.limits import within_limits
    from hilgate.plan.make import make_plan, read_plan
    from hilgate.report.terminal import print_slowest, print_verdict
    from hilgate.run.runner import Options, keep_untracked, locked

    arguments: str = ctx.meta[ARGUMENTS]
    chosen = tuple(names)
    root = repository(ctx)
    folder = results or root / "results" / "run"
    only = None
    if plan_file is not None:
        if arguments:
            raise MisuseError(
                "a part of a step is something else than the plan says",
                where=str(plan_file),
                remedy="leave out --plan to run a part of a step",
            )
        plan = read_plan(plan_file)
        require_known(chosen, frozenset(step.key for step in plan.steps), str(plan_file))
        only = frozenset(chosen)
    else:
        plan = within_limits(make_plan, root, base=default_base(root)[0] or None, profile="gate", select=chosen)
        plan = narrowed(plan, chosen, arguments)
    if results is None:
        keep_untracked(root / "results")  # minutes of steps and the history lie there, too
    with locked(folder):
        set_previous_aside(folder)
        plan.save(folder / PLAN_FILE)
        job = names[0] if only and len(only) == 1 else ""

        @functools.cache
        def selected() -> frozenset[str] | None:
            return _selected(plan, folder) if arguments else only

        def decide() -> tuple[Judged, Report]:
            return judge_and_report(folder, plan, only=selected(), job=job, root=root)

        options = Options(cores=jobs, only=only, job=job, fail_fast=fail_fast)
        judged, report, printed, _ = _run_and_judge(plan, root, folder, options, decide, approved_by=approved_by)
    print_verdict(report, every=True, printed=printed)
    print_slowest(judged.recorded, slowest)
    raise typer.Exit(judged.exit_status)


def _run_and_judge(
    plan: Plan,
    root: Path,
    folder: Path,
    options: Options,
    decide: Callable[[], tuple[Judged, Report]],
    **more: Any,
) -> tuple[Judged, Report, Printed | None, Estimate | None]:
    """Run a plan (`run_plan`, which takes `more`) and decide; steps that passed leave their minutes.

    The causes of a red run are printed once its steps have ended, while their failing tests still run.

    Returns:
        What was decided, its report, the causes that were printed, and the forecast.
    """
    from hilgate.plan.estimate import keep_minutes
    from hilgate.report import terminal

    printed: list[Printed] = []

    def print_causes(meanwhile: str) -> None:
        _, report = decide()
        printed.append(terminal.print_causes(report, meanwhile))

    size = run_plan(plan, root, folder, replace(options, ended=print_causes), **more)
    judged, report = decide()
    keep_minutes(root, plan, (one[-1].record for one in judged.recorded.attempts.values()))
    return judged, report, printed[-1] if printed else None, size


@program.command()
def judge(
    ctx: typer.Context,
    plan_file: PlanFile = None,
    jobs: JobsFolder = None,
    results: Results = None,
    approved_by: ApprovedBy = "",
    as_json: Json = False,
) -> None:
    """Judge recorded results and write the reports.

    The exit status is the verdict.
    """
    from hilgate.judge.build import judge_nothing
    from hilgate.model import PLAN_FILE
    from hilgate.plan.limits import judged_within_limits
    from hilgate.report.terminal import print_verdict
    from hilgate.report.write import report_nothing
    from hilgate.run.outcome import first_line
    from hilgate.text import log

    root = repository(ctx)
    folder = results or root / "results"
    plan = read_plan_or_report_none(plan_file or folder / PLAN_FILE, folder, whole=jobs is not None)

    def decide() -> str:
        judged, report = judge_and_report(folder, plan, jobs=jobs, root=root, approved_by=approved_by)
        if as_json:
            sys.stdout.write(judged.verdict.model_dump_json(indent=1, ensure_ascii=True) + "\n")
        else:
            print_verdict(report)
        for where, why in judged.recorded.damaged.items():
            sys.stderr.write(log(f"damaged: {where}: {why}\n"))
        if judged.refused:
            sys.stderr.write(f"error: {judged.refused}\n")
        return str(int(judged.exit_status))

    try:
        status = judged_within_limits(decide, jobs or folder)
    except Exception as error:  # whatever it was, no older or half-written verdict may stand
        report_nothing(folder, judge_nothing(folder, first_line(str(error))), first_line(str(error)))
        raise
    raise typer.Exit(int(status))


@program.command()
def selftest(
    ctx: typer.Context,
    bugs: Annotated[
        list[str] | None,
        typer.Argument(metavar="BUG", autocompletion=declared("bugs"), help="Known bugs to inject (default: all)."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the bugs and inject none.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write what a caught bug's step recorded beside its patch (findings.jsonl).")
    ] = False,
    as_json: Json = False,
    results: Results = None,
) -> None:
    """Inject known bugs; each must turn a step red."""
    from hilgate.cli import planted_bugs
    from hilgate.model.record import Check
    from hilgate.report import terminal
    from hilgate.run.runner import locked

    root = repository(ctx)
    chosen = planted_bugs.load_bugs(root, tuple(bugs or ()))
    if listed:
        rows = [bug.model_dump(mode="json") for bug in chosen]
        text = json.dumps(rows, indent=1) if as_json else "\n".join(f"{b.id}  {b.title}  ({b.source})" for b in chosen)
        sys.stdout.write(text + "\n")
        return
    out = os.environ.get("HILGATE_OUT")  # set when the self-test is itself a step of a gate
    folder = results or (Path(out) / "selftest" if out else root / "results" / "selftest")
    with locked(folder):
        checks = planted_bugs.run_bugs(root, chosen, folder, keep=keep)
    if out:
        Check.write_all(Path(out), checks)
    if as_json:
        sys.stdout.write(json.dumps([check.model_dump(mode="json") for check in checks], indent=1) + "\n")
    else:
        terminal.print_checks(checks)
    raise typer.Exit(planted_bugs.status_of(checks))


def _earlier(folder: Path, plan: Plan) -> Recorded | None:
    """What an interrupted run of this plan left in a folder; None where nothing was begun.

    Raises:
        MisuseError: It was another plan.
    """
    from hilgate.model import PLAN_FILE
    from hilgate.model.plan import plan_digest
    from hilgate.plan.make import read_plan
    from hilgate.run.results import read_all

    if not (folder / PLAN_FILE).exists():
        return None
    old = read_plan(folder / PLAN_FILE)
    if plan_digest(old) != plan_digest(plan):
        raise MisuseError(
            "--resume continues the same plan, and this is another (commit, changed files or options)",
            where=f"{folder / PLAN_FILE}, of profile {old.profile}; now it would be {plan.profile}",
            remedy="start afresh without --resume; the old results go to previous/",
        )
    return read_all(folder, None, plan, plan_digest(plan))


OURS = (
    "plan.json",
    "results.jsonl",
    "verdict.json",
    "report.html",
    "annotation.md",
    "comment.md",
    "junit.xml",
    "quarantine.json",
    "restored.json",
    "steps",
)
"""What one build leaves in a results folder; the previous build's are kept in `previous/`."""


def set_previous_aside(folder: Path) -> None:
    """Keep the last build under `previous/` (one generation) and leave the folder empty for the next."""
    from hilgate.model.table import tables_in

    present = [folder / name for name in OURS if (folder / name).exists()] + list(tables_in(folder))
    if not present:
        return
    previous = folder / "previous"
    shutil.rmtree(previous, ignore_errors=True)
    previous.mkdir()
    for path in present:
        path.rename(previous / path.name)


def run_plan(
    plan: Plan,
    root: Path,
    folder: Path,
    options: Options,
    *,
    recorded: Recorded | None = None,
    approved_by: str = "",
    announce: Callable[[frozenset[str]], Estimate] | None = None,
) -> Estimate | None:
    """Run a plan whose results folder is already locked; returns the forecast of it, if one was announced.

    Args:
        plan: What to run.
        root: The repository, at the plan's commit.
        folder: The results folder.
        options: Which steps are run, and how.
        recorded: What was left by an earlier run, or by the job whose tests are run once more: of the same files.
        approved_by: Who approved the protected changes, so that the change is measured with its own values.
        announce: Called with the keys that will run; returns their forecast, so that what is left is shown.

    Raises:
        RunInterruptedError: Ctrl-C or SIGTERM.
        RecordsError: The files under test are not those of `recorded` or not of the plan's commit.
        CannotRunHereError: This machine lacks what the repository needs, or a protected change cannot be put back
            to the merge base.
    """
    from hilgate import git
    from hilgate.report import terminal
    from hilgate.run import leftovers, progress
    from hilgate.run.results import Recorded, restored_files
    from hilgate.run.runner import Runner, new_build

    chosen = options.chosen(plan)
    _demand_what_is_needed(plan, root, chosen)
    foreign = _unapproved_files(plan, root, approved_by)
    with restored_files(root, plan.merge_base, foreign, folder):
        fingerprint = git.fingerprint(root)
        if plan.commit:  # without git it is unknown which files are the tree's
            leftovers.remove_stale(root, git.tracked_files(root))
        build = new_build(plan, fingerprint, _surroundings(plan, root, fingerprint, options))
        if recorded:
            _require_same_state(recorded, root, folder, fingerprint, None if options.only_ids else build.surroundings)
        earlier = recorded if recorded and not options.only_ids else Recorded((), {})
        keys = frozenset(step.key for step in chosen) - earlier.passed()
        size = announce(keys) if announce else None
        reruns = _reruns(plan, root, options)
        in_buildkite = os.environ.get("BUILDKITE") == "true"
        shown = progress.Lines(terminal.stderr(), buildkite=in_buildkite, size=size)
        Runner(plan, root, folder, build, shown, options, earlier=earlier, reruns=reruns).run()
    return size


def _demand_what_is_needed(plan: Plan, root: Path, chosen: list[PlannedStep]) -> None:
    """Refuse another commit and a machine that lacks what the repository needs; name variables that steps do not get.

    Raises:
        RecordsError: The plan is of another commit.
        CannotRunHereError: This machine lacks something.
    """
    from hilgate.declare.load import load_project
    from hilgate.plan import prerequisites
    from hilgate.report import terminal
    from hilgate.run.process import not_passed_on

    require_commit(plan, root)
    if plan.local:
        prerequisites.demand(root, load_project(root))
    names = not_passed_on(chosen, plan, root)
    if names:
        what = f"steps do not get this shell's {', '.join(names)}: each has what its own `env` declares"
        terminal.say(terminal.stderr(), what, whole=True)


def _surroundings(plan: Plan, root: Path, fingerprint: str, options: Options) -> str:
    """Digest of what --resume compares beside the files; empty where a run cannot be resumed."""
    from hilgate.plan.machine import detect
    from hilgate.run.surroundings import surroundings

    resumable = plan.local and fingerprint and os.environ.get("BUILDKITE") != "true" and not options.only_ids
    return surroundings(root, detect()) if resumable else ""


def _reruns(plan: Plan, root: Path, options: Options) -> Reruns:
    """How failing tests run once more: over the merge base's files too, where the change has another tree."""
    from hilgate.report.merge_base import known_on_base
    from hilgate.run.runner import Reruns

    same = plan.merge_base == plan.commit and not plan.dirty
    if same or options.only_ids or not plan.merge_base:
        return Reruns()
    return Reruns(plan.merge_base, known_on_base(plan, root))


def _unapproved_files(plan: Plan, root: Path, approved_by: str) -> tuple[str, ...]:
    """The files that an agent takes from the merge base, as nobody approved their change; a local run keeps its own."""
    from hilgate.declare.protected import files_to_restore
    from hilgate.report import terminal

    files = () if plan.local or approved_by else files_to_restore(root, plan)
    for name in files:
        terminal.say(terminal.stderr(), f"as at the merge base, because its change is not approved: {name}", whole=True)
    return files


def _require_same_state(recorded: Recorded, root: Path, folder: Path, tree: str, around: str | None) -> None:
    """Refuse results of other files, or of other surroundings; None where another machine may have made them."""
    from hilgate import git

    afresh = "start afresh without --resume; the old results go to previous/"
    if any(build.tree != tree or not tree for build in recorded.builds):
        raise RecordsError(
            "the files under test changed since these results were recorded"
            if tree
            else f"it is unknown whether files changed since then: {git.no_checkout(root)}",
            where=str(folder),
            remedy="check out the plan's commit, without other changes" if around is None else afresh,
        )
    if around is not None and any(build.surroundings != around for build in recorded.builds):
        raise RecordsError(
            "the environment changed since these results were recorded: packages, variables, limits or the machine",
            where=str(folder),
            remedy=afresh,
        )


def require_commit(plan: Plan, root: Path) -> None:
    """Refuse a plan of another commit than the one that is checked out.

    Raises:
        RecordsError: It is.
    """
    from hilgate.git import inspect

    commit = inspect(root, None).commit
    if commit != plan.commit:
        raise RecordsError(
            f"the plan is of commit {plan.commit[:12] or '(none)'} and {commit[:12] or '(none)'} is checked out",
            where=str(root),
            remedy="check that commit out, or plan again",
        )


def _is_named(step: PlannedStep, names: tuple[str, ...]) -> bool:
    return not {step.key, step.step.key, step.area}.isdisjoint(names)


def narrowed(plan: Plan, names: tuple[str, ...], arguments: str) -> Plan:
    """The plan of named steps: with arguments added to their commands, and without omissions nobody asked about.

    A part of a step cannot keep the whole step's promise of a minimum of checks, so one check is enough there. Such a
    plan has another digest than the gate's, and its results can never stand in for the gate's.
    """
    from hilgate.report import terminal

    steps = []
    for step in plan.steps:
        named = _is_named(step, names)
        if arguments and named:
            words = f"a part of {step.key}, not the whole step: {arguments}"
            terminal.say(terminal.stderr(), words, whole=True)
        steps.append(step.part(arguments) if arguments and named else step)
    omissions = tuple(one for one in plan.omissions if not {one.key, one.area}.isdisjoint(names))
    return plan.model_copy(update={"steps": tuple(steps), "omissions": omissions})


def _selected(plan: Plan, folder: Path) -> frozenset[str]:
    """The steps to decide on after parts of some were run: a part without any test says nothing about its step.

    Raises:
        MisuseError: No part has any.
    """
    from hilgate.evidence import kind_of
    from hilgate.model.plan import plan_digest
    from hilgate.report import terminal
    from hilgate.run.results import read_all

    recorded, asked, empty = read_all(folder, None, plan, plan_digest(plan)), [], dict[str, int]()
    for step in plan.steps:
        asked += [step] if step.arguments else []
        attempt = recorded.last(step.key) if step.arguments else None
        if attempt and (attempt.record.exit_status, attempt.checks) == (kind_of(step).no_checks, ()):
            of = re.search(r"(\d+) deselected", attempt.record.message)  # pytest's last line
            empty[step.key] = int(of[1]) if of else 0
    if len(empty) == len(asked):
        tests = count(sum(empty.values()), "test") if any(empty.values()) else "its tests"
        raise MisuseError(
            f"{asked[0].arguments} selects none of {tests}",
            where=", ".join(empty),
            remedy=f"see their names: {asked[0].step.command.removesuffix(asked[0].arguments)}--collect-only -q",
        )
    for key in empty:
        terminal.say(terminal.stderr(), f"nothing is said of {key}: {asked[0].arguments} selects no test of it")
    return frozenset(step.key for step in plan.steps) - empty.keys()


def require_known(names: tuple[str, ...], known: frozenset[str], where: str) -> None:
    """Refuse names that are not there, with the closest that are.

    Raises:
        MisuseError: With a did-you-mean.
    """
    for name in names:
        if name not in known:
            raise MisuseError(f"no step is called {name!r}", where=where, remedy=suggest(name, known))


class SameNodeError(HilgateError):
    """A rerun elsewhere landed on the node that the tests failed on; an agent's retry takes it to another."""

    exit_status: ClassVar[Exit] = Exit.SICK_NODE


@program.command()
def recheck(
    ctx: typer.Context,
    key: Annotated[
        str, typer.Argument(metavar="STEP", autocompletion=declared("steps"), help="Key of the step in the plan.")
    ],
    *,
    plan_file: Annotated[Path, typer.Option("--plan", metavar="FILE", help="Plan in which the step failed.")],
    jobs: Annotated[
        Path, typer.Option("--jobs", metavar="DIR", help="Folder with the results of CI jobs, one folder per job.")
    ],
    results: Annotated[Path, typer.Option("--results", metavar="DIR", help="Folder for the results of the rerun.")],
    approved_by: Approved = "",
) -> None:
    """Run the failed tests of a step once more, on another node.

    Exit status 0 when all of them pass. A passed recheck does not make the step pass.
    """
    from hilgate.model.plan import plan_digest
    from hilgate.model.record import Outcome, worst
    from hilgate.plan.machine import detect, environment
    from hilgate.plan.make import read_plan
    from hilgate.run.recheck import pending
    from hilgate.run.results import RESULTS_FILE, read, read_all
    from hilgate.run.runner import Options, locked

    root, plan = repository(ctx), read_plan(plan_file)
    require_known((key,), frozenset(step.key for step in plan.steps), str(plan_file))
    if not jobs.is_dir():
        raise MisuseError("there is no such folder", where=f"--jobs {jobs}", remedy="name the folder of the jobs")
    digest = plan_digest(plan)
    recorded = read_all(jobs.parent, jobs, plan, digest)
    if key in recorded.damaged:
        raise RecordsError(recorded.damaged[key], where=str(jobs / key), remedy="run the step again")
    ids = pending(plan, recorded).get(key, ())
    attempt = recorded.last(key)
    if not ids or attempt is None:
        raise NothingSelectedError(
            f"no test of {key} has to be run again elsewhere", where=str(jobs / key), remedy="see its verdict"
        )
    failed_on = attempt.record.environment.host
    if environment(detect()).host == failed_on:
        raise SameNodeError(
            f"the tests of {key} failed on this node, {failed_on}: another must run them", remedy="run it on another"
        )
    with locked(results):
        set_previous_aside(results)
        options = Options(only=frozenset({key}), job=key, only_ids=ids)
        run_plan(plan, root, results, options, recorded=recorded, approved_by=approved_by)
    reruns = read(results / RESULTS_FILE, plan, digest, key, elsewhere=True).reruns
    for rerun in reruns:
        sys.stdout.write(f"{rerun.outcome.value}: {rerun.check}\n")
    outcome = worst(rerun.outcome for rerun in reruns)
    raise typer.Exit({Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.FAIL}.get(outcome, Exit.NOTHING_RAN))
