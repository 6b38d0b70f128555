# SPDX-License-Identifier: Apache-2.0
"""Planted bugs of reader and judge: for each of them the simulator must report false passes, and none without it."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from unittest import mock

from support.planted import must_be_noticed, planted
from support.simulate import job
from support.simulate.buildkite import NEVER, Build
from support.simulate.campaign import Campaign, Wrong
from support.simulate.job import EPOCH, write_health
from support.simulate.scenarios import FaultKind

from agent_host import collect
from hilgate.judge import verdict
from hilgate.judge import verdict as judge_verdict
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.plan.make import plan_digest
from hilgate.run import results, rules
from hilgate.run.results import with_digest

ROOT = Path(__file__).parents[3]
TODAY, WEEK = EPOCH.date(), dt.timedelta(days=7)
read_all, judge, download = results.read_all, verdict.judge, Build.download


def records_of(path):
    """Its records, without the line of its digest."""
    return [record for line in path.read_bytes().splitlines() if (record := json.loads(line))["kind"] != "end"]


def write(path, records):
    """Write a file anew, with a digest that holds; what was downloaded is linked to what the job left."""
    path.unlink()
    path.write_bytes(with_digest(b"".join(json.dumps(record).encode() + b"\n" for record in records)))


def before_reading(change):
    """A reader that sees the jobs' folders as `change(folder, plan)` leaves them."""

    def mutant(folder, jobs, plan, *rest):
        change(jobs, plan)
        return read_all(folder, jobs, plan, *rest)

    return results, "read_all", mutant


def reading(kind, **changes):
    """A reader that sees each record of this kind with other fields, each `change(record, plan, jobs)`."""

    def changed(jobs, plan):
        for path in jobs.glob("*/results.jsonl"):
            records = records_of(path)
            for record in records:
                if record["kind"] == kind:
                    record |= {name: change(record, plan, jobs) for name, change in changes.items()}
            write(path, records)

    return before_reading(changed)


def planned_command(record, plan, _):
    return next(step.step.command for step in plan.steps if step.key == record["key"])


def built_image(record, plan, jobs):
    """Where a record was made, had it been in the image that the build made."""
    files = [jobs / step.key / "results.jsonl" for step in plan.steps if step.step.provides]
    built = [one["digest"] for path in files for one in records_of(path) if one["kind"] == "image"]
    here = record["environment"]
    return here | {"image": built[0]} if here["image"] else here


def counts_no_lines(jobs, _):
    for path in jobs.glob("*/results.jsonl"):
        records, checks = records_of(path), 0
        for record in records:
            checks += record["kind"] == "check"
            if record["kind"] == "step":
                record["checks"] = checks
        write(path, records)


def believes_every_node_is_well(jobs, plan):
    for step in plan.steps:
        job = jobs / step.key
        lines = (job / "results.jsonl").read_bytes().splitlines() if (job / "results.jsonl").exists() else []
        if not lines:
            continue
        opening = json.loads(lines[0])
        for moment in ("before", "after"):
            (job / results.health_file(moment)).unlink(missing_ok=True)
            write_health(job, step, opening["environment"]["host"], moment, opening["started"])


def forgiving(forgiven):
    """A judge that passes a step which `forgiven(step verdict, attempt)` excuses."""

    def mutant(plan, recorded, digest, **more):
        given = judge(plan, recorded, digest, **more)
        steps = [
            step.model_copy(update={"outcome": Outcome.PASS}) if forgiven(step, recorded.last(step.key)) else step
            for step in given.steps
        ]
        if {step.outcome for step in steps} != {Outcome.PASS}:
            return given
        return given.model_copy(update={"outcome": Outcome.PASS, "steps": tuple(steps)})

    return verdict, "judge", mutant


def with_quarantine(**changes):
    """A judge that reads each quarantine entry with these changes."""

    def mutant(plan, recorded, digest, *, quarantine, **more):
        tests = tuple(entry.model_copy(update=changes) for entry in quarantine.tests)
        return judge(plan, recorded, digest, quarantine=quarantine.model_copy(update={"tests": tests}), **more)

    return verdict, "judge", mutant


def approved_by_anybody(plan, recorded, digest, **more):
    return judge(plan, recorded, digest, **more | {"approved_by": "anybody"})


def without_rule(name):
    """The table that decides, without one of its rules."""
    fewer = tuple(rule for rule in rules.RULES if rule.name != name)
    assert len(fewer) == len(rules.RULES) - 1
    return rules, "RULES", fewer


def ended_well(_, attempt):
    return attempt is not None and attempt.record.exit_status == 0


def linked(source, target, inner, _):
    """Take a file whatever it claims to hold; by its name alone, as nobody has a terabyte."""
    (target / inner).hardlink_to(source / inner)


def believed(source, target, **_):
    """Take everything."""
    for path in source.iterdir():
        linked(source, target, path.name, None)


def waits_for_nobody(build, _):
    return download(build, NEVER)


MUTANTS = {
    "another plan is as good": (
        reading("build", plan_digest=lambda _, plan, __: plan_digest(plan)),
        {FaultKind.OTHER_PLAN},
    ),
    "another commit is as good": (reading("build", commit=lambda _, plan, __: plan.commit), {FaultKind.OTHER_COMMIT}),
    "another tree is as good": (reading("build", tree=lambda *_: "t" * 64), {FaultKind.OTHER_TREE}),
    "packages of another tree are as good": (
        reading("step", imported=lambda _, plan, __: plan.packages),
        {FaultKind.OTHER_PACKAGES},
    ),
    "another command is as good": (reading("step", command=planned_command), {FaultKind.OTHER_COMMAND}),
    "another image is as good": (reading("step", environment=built_image), {FaultKind.OTHER_IMAGE}),
    "an image of anything is as good": (
        reading("image", content=lambda record, plan, _: plan.images[record["image"]]),
        {FaultKind.IMAGE_OTHER_CONTENT},
    ),
    "lost lines are not counted": (before_reading(counts_no_lines), {FaultKind.LINE_REMOVED}),
    "every node is well": (before_reading(believes_every_node_is_well), {FaultKind.SICK_AFTERWARDS}),
    "no preflight is well": (before_reading(believes_every_node_is_well), {FaultKind.PREFLIGHT_MISSING}),
    "a missing step is forgotten": (forgiving(lambda _, attempt: attempt is None), {FaultKind.SKIPPED}),
    "a network loss is forgotten": (forgiving(lambda _, attempt: attempt is None), {FaultKind.NETWORK_LOSS}),
    "the record is trusted": (
        forgiving(lambda _, attempt: attempt and attempt.record.outcome is Outcome.PASS),
        {FaultKind.FALSE_CLAIM},
    ),
    "exit 0 is enough": (forgiving(ended_well), {FaultKind.NO_EVIDENCE}),
    "exit 0 is enough, skips or not": (forgiving(ended_well), {FaultKind.ALL_SKIPPED}),
    "flaky is a pass": (forgiving(lambda step, _: step.ruling is Ruling.FLAKY), {FaultKind.FLAKY}),
    "quarantine never ends": (with_quarantine(added=TODAY, expires=TODAY + WEEK), {FaultKind.QUARANTINE_EXPIRED}),
    "quarantine holds everywhere": (with_quarantine(devices=()), {FaultKind.QUARANTINED_ELSEWHERE}),
    "nobody need approve": ((verdict, "judge", approved_by_anybody), {FaultKind.LOOSENED}),
    "any name of a result is taken": (
        (collect, "_misnamed", lambda _: ""),
        {FaultKind.NAMES_OF_OTHERS, FaultKind.REGRESSION},
    ),
    "no minimum holds": (without_rule("fewer checks than the step promises"), {FaultKind.BELOW_MINIMUM}),
    "every excuse is true": (without_rule("a check did not run, without a true excuse"), {FaultKind.SKIPPED_TEST}),
    "what needs nothing may say so": (
        without_rule("a check ran without what it is declared to need"),
        {FaultKind.RAN_WITHOUT},
    ),
    "a record is believed about its device": (
        (judge_verdict, "not_lacking", lambda _: frozenset()),
        {FaultKind.SKIPPED_TEST},
    ),
    "a flow waits for nobody": ((Build, "download", waits_for_nobody), {FaultKind.LATE}),
    "a container leaves a terabyte": ((collect, "_take", linked), {FaultKind.HOLES}),
    "a container leaves files without end": ((job, "collect", believed), {FaultKind.MANY_FILES}),
}
"""What is planted instead of what, and the faults of builds that it hides."""

NEVER_ARRIVES = {FaultKind.HOLES, FaultKind.MANY_FILES}
"""What is uploaded without end is lost; the others earn a false pass."""


@planted(
    {
        name: (row, "", Wrong.LOST_RESULT if row[1] <= NEVER_ARRIVES else Wrong.FALSE_PASS)
        for name, row in MUTANTS.items()
    }
)
def test_a_planted_bug_of_the_gate_is_seen(fault):
    place, kinds = fault.change
    campaign = Campaign(ROOT, 16, "tests", rate=1.0, kinds=frozenset(kinds))
    look = lambda _: {fault.fails: str(campaign.run().problems[fault.fails] or "")}  # noqa: E731
    must_be_noticed(fault, look, mock.patch.object(*place))


def test_what_a_machine_cannot_run_holds_nothing_up():
    campaign = Campaign(ROOT, 16, "tests", rate=1.0, kinds=frozenset({FaultKind.CANNOT_RUN})).run()
    assert not any(campaign.problems.values())
