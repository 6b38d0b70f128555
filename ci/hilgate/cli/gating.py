"""What the running commands share: the results folder, the run itself, and the verdict."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.cli import printing
from hilgate.errors import Exit, MisuseError, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Plan, Verdict
    from hilgate.results import Recorded

PLAN_FILE = "plan.json"
OURS = ("plan.json", "results.jsonl", "results.jsonl.damaged", "verdict.json", "report.html", "annotation.md",
        "junit.xml", "steps")  # fmt: skip
"""What one build leaves in a results folder; the previous build's are kept in `previous/`."""


def set_previous_aside(folder: Path) -> None:
    """Keep the last build under `previous/` (one generation) and leave the folder empty for the next."""
    present = [folder / name for name in OURS if (folder / name).exists()]
    if not present:
        return
    previous = folder / "previous"
    shutil.rmtree(previous, ignore_errors=True)
    previous.mkdir()
    for path in present:
        path.rename(previous / path.name)


@dataclass(frozen=True)
class Request:
    """What a command asks of the runner.

    Attributes:
        only: Planned keys to run of the plan; None runs all.
        jobs: Cores to fill; None takes the machine's.
    """

    root: Path
    folder: Path
    jobs: int | None = None
    only: frozenset[str] | None = None


@dataclass(frozen=True)
class Judged:
    """A decision with all that led to it, and where its report is."""

    plan: Plan
    recorded: Recorded
    verdict: Verdict
    report: Path


def run_plan(plan: Plan, request: Request, *, resume: bool = False) -> None:
    """Run a plan whose results folder is already locked.

    Raises:
        RunInterruptedError: Ctrl-C or SIGTERM.
        RecordsError: `resume` over results of another plan, commit or state of the files.
    """
    from hilgate import hardware, progress, results, tree
    from hilgate.changes import inspect
    from hilgate.plan import plan_digest
    from hilgate.run import Runner, passed_keys

    commit = inspect(request.root, None).commit
    if commit != plan.commit:
        raise RecordsError(
            f"the plan is of commit {plan.commit[:12] or '(none)'} and {commit[:12] or '(none)'} is checked out",
            where=str(request.root),
            remedy="check that commit out, or plan again",
        )
    digest, fingerprint = plan_digest(plan), tree.fingerprint(request.root)
    done: frozenset[str] = frozenset()
    if resume:
        recorded = results.repair(request.folder / results.RESULTS_FILE, plan, digest)
        if recorded is not None and (recorded.builds[0].tree != fingerprint or not fingerprint):
            raise RecordsError(
                "the files under test changed since these results were recorded",
                where=str(request.folder),
                remedy="start afresh without --resume; the old results go to previous/",
            )
        done = passed_keys(recorded) if recorded else frozenset()
    machine = hardware.detect()
    keys = frozenset(step.key for step in plan.steps if request.only is None or step.key in request.only) - done
    with progress.choose(plan, keys, printing.stderr()) as shown_progress:
        Runner(
            plan=plan,
            digest=digest,
            root=request.root,
            results_folder=request.folder,
            environment=hardware.environment(machine),
            commit=commit,
            tree=fingerprint,
            cores=request.jobs or machine.cores,
            progress=shown_progress,
            only=request.only,
            done=done,
        ).run()
    if tree.fingerprint(request.root) != fingerprint:
        printing.stderr().print("note: files changed while it ran; the verdict may be of neither state", style="yellow")


def decide(folder: Path, plan: Plan, *, jobs: Path | None = None, only: frozenset[str] | None = None) -> Judged:
    """Judge what is in a results folder (or what agents left in `jobs`) and write `verdict.json` and the reports.

    Args:
        folder: Where the verdict and the reports are written.
        plan: What was expected.
        jobs: A folder with one results folder per agent's job.
        only: Decide on these steps of the plan alone (an agent's own job); the others are judged elsewhere.
    """
    import datetime as dt

    from hilgate import results
    from hilgate.annotate import write_annotation, write_junit
    from hilgate.judge import VERDICT_FILE, judge, write_verdict
    from hilgate.plan import plan_digest
    from hilgate.report import write_report

    folder.mkdir(parents=True, exist_ok=True)
    digest = plan_digest(plan)
    (folder / VERDICT_FILE).unlink(missing_ok=True)  # no old verdict may outlive results that cannot be read
    recorded = results.read_all(folder, jobs, plan, digest)
    judged = plan.model_copy(update={"steps": tuple(s for s in plan.steps if only is None or s.key in only)})
    verdict = judge(judged, recorded, digest, decided=dt.datetime.now(dt.UTC))
    write_verdict(verdict, folder / VERDICT_FILE)
    write_annotation(judged, recorded, verdict, folder)
    write_junit(judged, recorded, verdict, folder)
    path = write_report(judged, recorded, verdict, folder, logs=find_logs(folder, jobs, judged))
    return Judged(judged, recorded, verdict, path)


def find_logs(folder: Path, jobs: Path | None, plan: Plan) -> dict[str, str]:
    """Step key -> its log, relative to the results folder, for the steps that have one there."""
    found = {}
    for step in plan.steps:
        log = (jobs / step.key if jobs else folder) / "steps" / step.key / "log.txt"
        if log.is_relative_to(folder) and log.exists():
            found[step.key] = log.relative_to(folder).as_posix()
    return found


def narrowed(plan: Plan, names: tuple[str, ...], arguments: str) -> Plan:
    """The plan of named steps: with arguments added to their commands, and without omissions nobody asked about.

    A part of a step cannot keep the whole step's promise of a minimum of checks, so one check is enough there. Such a
    plan has another digest than the gate's, and its results can never stand in for the gate's.
    """
    steps = []
    for step in plan.steps:
        changes: dict[str, object] = {}
        if arguments and not {step.key, step.step, step.area}.isdisjoint(names):
            changes = {"command": f"{step.command} {arguments}", "minimum": 1}
        steps.append(step.model_copy(update=changes))
    omissions = tuple(one for one in plan.omissions if not {one.key, one.area}.isdisjoint(names))
    return plan.model_copy(update={"steps": tuple(steps), "omissions": omissions})


def require_known(names: tuple[str, ...], known: frozenset[str], where: str) -> None:
    """Refuse names that are not there, with the closest that are.

    Raises:
        MisuseError: With a did-you-mean.
    """
    from hilgate.suggest import suggest

    for name in names:
        if name not in known:
            raise MisuseError(f"no step is called {name!r}", where=where, remedy=suggest(name, known))


def status_of(judged: Judged) -> Exit:
    """The exit status of a command that ends with this verdict."""
    from hilgate.judge import exit_status

    return exit_status(judged.verdict, judged.plan)
