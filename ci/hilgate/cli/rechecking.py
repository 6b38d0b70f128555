"""`hilgate recheck`: failing tests of a job once more, on a node they did not fail on."""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from hilgate.cli.running import Approved  # noqa: TC001 - as above
from hilgate.errors import Exit, HilgateError, NothingSelectedError, RecordsError, RunInterruptedError

if TYPE_CHECKING:
    from hilgate import process
    from hilgate.cli.app import Settings
    from hilgate.model import RerunRecord
    from hilgate.recheck import Rerun


class SameNodeError(HilgateError):
    """A rerun elsewhere landed on the node that the tests failed on; an agent's retry takes it to another."""

    exit_status: ClassVar[Exit] = Exit.SICK_NODE


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("recheck")(recheck)


def recheck(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(metavar="STEP", help="A key of the plan.")],
    *,
    plan_file: Annotated[Path, typer.Option("--plan", metavar="FILE", help="The plan it failed in.")],
    jobs: Annotated[Path, typer.Option("--jobs", metavar="DIR", help="Results of agents, one folder per job.")],
    results: Annotated[Path, typer.Option("--results", metavar="DIR", help="Where the reruns are recorded.")],
    approved_by: Approved = "",
) -> None:
    """Run the failing tests of a step once more, on another node; 0 when all pass, and never a pass of the step."""
    from hilgate import hardware, process, tree
    from hilgate import recheck as again
    from hilgate.cli import gating
    from hilgate.deadline import inner_timeout
    from hilgate.launch import Site
    from hilgate.lock import Folder
    from hilgate.model import BuildRecord
    from hilgate.plan import plan_digest, read_plan
    from hilgate.records import append
    from hilgate.restored import put_back
    from hilgate.results import RESULTS_FILE, read_all
    from hilgate.run import SECONDS_PER_MINUTE

    settings: Settings = ctx.obj
    root, plan = settings.repository(), read_plan(plan_file)
    gating.require_known((key,), frozenset(step.key for step in plan.steps), str(plan_file))
    gating.require_commit(plan, root)
    step = next(one for one in plan.steps if one.key == key)
    recorded = read_all(jobs.parent, jobs, plan, plan_digest(plan))
    if key in recorded.damaged:
        raise RecordsError(recorded.damaged[key], where=str(jobs / key), remedy="run the step again")
    ids = again.pending(plan, recorded).get(key, ())
    attempt = recorded.last(key)
    if not ids or attempt is None:
        raise NothingSelectedError(
            f"no test of {key} has to be run again elsewhere", where=str(jobs / key), remedy="see its verdict"
        )
    machine = hardware.detect()
    environment = hardware.environment(machine)
    failed_on = attempt.record.environment.host
    if environment.host == failed_on:
        raise SameNodeError(
            f"the tests of {key} failed on this node, {failed_on}: another must run them", remedy="run it on another"
        )
    with Folder(results):
        gating.set_previous_aside(results)
        request = gating.Request(root, results, approved_by=approved_by)
        with put_back(root, plan.merge_base, gating.files_to_put_back(plan, request), results):
            fingerprint = tree.fingerprint(root)
            if fingerprint != recorded.builds[0].tree:
                raise RecordsError(
                    "the files here differ from those that the tests failed over",
                    where=str(root),
                    remedy="check out the plan's commit, without other changes",
                )
            rerun = again.start(
                step,
                ids,
                results / "steps" / key / again.FOLDER,
                Site(root, machine.cores, plan.profile),
                inner_timeout(step.timeout_minutes * SECONDS_PER_MINUTE, os.environ, time.time()),
            )
            if rerun is None:
                raise NothingSelectedError(
                    f"the command of {key} cannot be narrowed to single tests", where=step.command, remedy="none needed"
                )
            build = BuildRecord(
                started=dt.datetime.now(dt.UTC),
                plan_digest=plan_digest(plan),
                commit=plan.commit,
                tree=fingerprint,
                environment=environment,
            )
            records = _wait(rerun, environment.host, process.Interrupts())
            append(results / RESULTS_FILE, [build, *records])
    for record in records:
        sys.stdout.write(f"{record.outcome.value}: {record.check}\n")
    raise typer.Exit(_status(records))


def _wait(rerun: Rerun, host: str, interrupts: process.Interrupts) -> list[RerunRecord]:
    from hilgate.run import POLL_SECONDS

    with interrupts:
        while (records := rerun.poll(host, elsewhere=True)) is None:
            if interrupts.number:
                rerun.child.stop("interrupted")
            time.sleep(POLL_SECONDS)
    if interrupts.number:
        raise RunInterruptedError(
            f"interrupted by {interrupts.name}; nothing was recorded", remedy="run the same command again"
        )
    return records


def _status(records: list[RerunRecord]) -> Exit:
    from hilgate.model import Outcome
    from hilgate.rules import worst

    worst_outcome = worst(record.outcome for record in records)
    return {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.FAIL}.get(worst_outcome, Exit.NOTHING_RAN)
