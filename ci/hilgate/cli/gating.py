"""What the running commands share: the results folder, the run itself, and the verdict."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.cli import printing
from hilgate.cli.deciding import Judged, decide, read_plan_or_say_so, status_of
from hilgate.errors import MisuseError, RecordsError

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Plan

__all__ = ["OURS", "PLAN_FILE", "Judged", "Request", "decide", "files_to_put_back", "narrowed", "read_plan_or_say_so",
           "require_commit", "require_known", "run_plan", "set_previous_aside", "status_of"]  # fmt: skip

PLAN_FILE = "plan.json"
OURS = ("plan.json", "results.jsonl", "results.jsonl.damaged", "verdict.json", "report.html", "annotation.md",
        "junit.xml", "quarantine.json", "restored.json", "steps")  # fmt: skip
"""What one build leaves in a results folder; the previous build's are kept in `previous/`."""


def set_previous_aside(folder: Path) -> None:
    """Keep the last build under `previous/` (one generation) and leave the folder empty for the next."""
    from hilgate import matrix_file

    present = [folder / name for name in OURS if (folder / name).exists()] + list(matrix_file.found(folder))
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
        jobs: Cores to fill; None takes the machine's.
        only: Planned keys to run of the plan; None runs all.
        approved_by: Who approved what the change loosens, so that it is measured with its own values.
    """

    root: Path
    folder: Path
    jobs: int | None = None
    only: frozenset[str] | None = None
    approved_by: str = ""


def run_plan(plan: Plan, request: Request, *, resume: bool = False) -> None:
    """Run a plan whose results folder is already locked.

    Raises:
        RunInterruptedError: Ctrl-C or SIGTERM.
        RecordsError: `resume` over results of another plan, commit or state of the files.
        CannotRunHereError: What the change loosens cannot be put back to the merge base.
    """
    from hilgate import hardware, progress, results, tree
    from hilgate.plan import plan_digest
    from hilgate.restored import put_back
    from hilgate.run import Runner

    require_commit(plan, request.root)
    digest = plan_digest(plan)
    with put_back(request.root, plan.merge_base, files_to_put_back(plan, request), request.folder):
        fingerprint = tree.fingerprint(request.root)
        done: frozenset[str] = frozenset()
        if resume:
            recorded = results.repair(request.folder / results.RESULTS_FILE, plan, digest)
            if recorded is not None and (recorded.builds[0].tree != fingerprint or not fingerprint):
                raise RecordsError(
                    "the files under test changed since these results were recorded",
                    where=str(request.folder),
                    remedy="start afresh without --resume; the old results go to previous/",
                )
            done = results.passed_keys(recorded) if recorded else frozenset()
        machine = hardware.detect()
        keys = frozenset(step.key for step in plan.steps if request.only is None or step.key in request.only) - done
        with progress.choose(plan, keys, printing.stderr()) as shown_progress:
            Runner(
                plan=plan,
                digest=digest,
                root=request.root,
                results_folder=request.folder,
                environment=hardware.environment(machine),
                commit=plan.commit,
                tree=fingerprint,
                cores=request.jobs or machine.cores,
                progress=shown_progress,
                only=request.only,
                done=done,
                reruns=True,
            ).run()
        if tree.fingerprint(request.root) != fingerprint:
            words = "note: files changed while it ran; the verdict may be of neither state"
            printing.stderr().print(words, style="yellow")


def require_commit(plan: Plan, root: Path) -> None:
    """The plan is of what is checked out.

    Raises:
        RecordsError: It is of another commit.
    """
    from hilgate.changes import inspect

    commit = inspect(root, None).commit
    if commit != plan.commit:
        raise RecordsError(
            f"the plan is of commit {plan.commit[:12] or '(none)'} and {commit[:12] or '(none)'} is checked out",
            where=str(root),
            remedy="check that commit out, or plan again",
        )


def files_to_put_back(plan: Plan, request: Request) -> tuple[str, ...]:
    """What an agent takes from the merge base because the change loosens it and nobody approved. A desk keeps its own.

    Raises:
        CannotRunHereError: The plan names no merge base, or one that is not in this checkout.
    """
    from hilgate.loosening import to_put_back

    if plan.profile == "gate" or request.approved_by:
        return ()
    files = to_put_back(request.root, plan)
    for name in files:
        printing.stderr().print(f"as at the merge base, because the change loosens it: {name}", soft_wrap=True)
    return files


def narrowed(plan: Plan, names: tuple[str, ...], arguments: str, keys: frozenset[str] | None = None) -> Plan:
    """The plan of named steps: with arguments added to their commands, and without omissions nobody asked about.

    A part of a step cannot keep the whole step's promise of a minimum of checks, so one check is enough there. Such a
    plan has another digest than the gate's, and its results can never stand in for the gate's. With `keys`, these
    planned steps alone get the arguments.
    """
    steps = []
    for step in plan.steps:
        changes: dict[str, object] = {}
        named = step.key in keys if keys is not None else not {step.key, step.step, step.area}.isdisjoint(names)
        if arguments and named:
            printing.stderr().print(f"a part of {step.key}, not the whole step: {arguments}", soft_wrap=True)
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
