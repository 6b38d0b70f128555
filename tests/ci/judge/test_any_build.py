# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong with a build: no false pass, nothing lost, and a build with nothing against it passes.

Hypothesis draws a plan and faults. Each fault strikes one job, or the build, and `KINDS` says what the build then
deserves. That table is written by hand and shares no code with the judge. The folders are as jobs leave them, from
the evidence of pytest to the health of the node, and the real code reads and judges them. A failure is printed as
`Build(...)`; paste it into `wrong(...)` to repeat it.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support import job_files as files
from support.job_files import FAILS, OPEN, OUTCOMES, PASSES, SKIPPED, XFAIL, Job
from support.jobs import CONTENT, ELSEWHERE, IMAGE_STEP, NODE, NOW, PACKAGES, environment, image
from support.plans import plan, step

from hilgate.errors import Exit, RecordsError
from hilgate.judge import verdict as judging
from hilgate.model.declaration import Excuse, Quarantine, Quarantined
from hilgate.model.plan import ProtectedChange, plan_digest
from hilgate.model.record import Check, CheckRecord, ImageRecord, ListingRecord, Outcome, RerunRecord
from hilgate.plan.make import read_plan
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.model.verdict import Verdict

    Change = Callable[["Site", "Job"], None]

FALSE_PASS, LOST, BLOCKED = "false pass", "lost", "blocked without a reason"
"""How a verdict can be wrong."""

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
AMX, NOBODYS = "cpu:amx_tile", "variable:NOBODY_DECLARES_THIS"
MAY_LACK = {
    AMX: Excuse(why="tiles need AMX", most=1),
    "device:gfx942": Excuse(why="one needs gfx942", most=9),
    "device:cpu": Excuse(why="one needs a cpu", most=9),
}
SOUND = dict.fromkeys(("plain", "other", "more"), PASSES)
"""Tests that no fault strikes alone; every other test is named after the fault that it is for."""
MINIMUM = 2

# What a build deserves when a fault has struck it.
FORBIDS, ALLOWS, DOUBTFUL, NEEDS_APPROVAL = "must not pass", "passes", "may pass", "passes with a named approval"


@dataclass(frozen=True)
class Shape:
    """A planned step: its device, the kind of its evidence, and whether it runs in the image that the build makes."""

    device: str = "cpu"
    evidence: str = "junit"
    image: bool = False


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, at one of the jobs that it can strike; `number` picks the variant."""

    kind: str
    at: int = 0
    number: int = 0


@dataclass(frozen=True)
class Build:
    """A build to be judged; `local` is a run on one machine, `listed` one whose change may have removed tests."""

    shapes: tuple[Shape, ...]
    faults: tuple[Fault, ...] = ()
    local: bool = False
    listed: bool = False
    approved: bool = False


@dataclass
class Site:
    """All of a build, and what it deserves."""

    build: Build
    plan: Plan
    jobs: list[Job]
    quarantine: list[Quarantined] = field(default_factory=list)
    deserves: set[str] = field(default_factory=set)
    doubts: tuple[str, ...] = ()
    alter_plan: Callable[[Path], None] | None = None


# --- faults that are more than other values
def again(_site: Site, job: Job, *, test: str, ended: str, elsewhere: bool = False, host: str = "") -> None:
    """A test fails and is run once more; a run on one machine has no other node."""
    job.tests[test], job.status = FAILS, 1
    there = elsewhere and job.step.queue is not None
    values = {"outcome": OUTCOMES[ended], "seconds": 1.0, "message": "" if ended == PASSES else "max_abs_err 0.5"}
    place = {"host": host or (ELSEWHERE if there else NODE), "elsewhere": there}
    record = RerunRecord(step=job.step.key, check=job.id(test), **place, **values)
    (job.recheck if there else job.more).append(record)


def quarantined(site: Site, job: Job, *, test: str, ended: str, days: int = 1, **more: Any) -> None:
    """A test is in quarantine since `days`, for ten."""
    job.tests[test] = ended
    job.status = 1 if ended == FAILS else job.status
    added = NOW.date() - dt.timedelta(days=days)
    values = {"test": job.id(test), "step": job.step.step.key, "reason": "known", "owner": "kernels"}
    dates = {"added": added, "expires": added + dt.timedelta(days=10)}
    site.quarantine.append(Quarantined.model_validate(values | dates | more))


def skipped_here(_site: Site, job: Job) -> None:
    """A test needs what its device has, and the record says that it is lacking."""
    job.tests["skipped"], job.needs["skipped"] = SKIPPED, f"device:{job.step.device}"
    job.lacked.append(job.needs["skipped"])


def few(_site: Site, job: Job) -> None:
    """Fewer checks than the step promises."""
    job.tests = dict(list(job.tests.items())[: MINIMUM - 1])


def of_another_step(site: Site, job: Job) -> None:
    """Its records name another step."""
    job.record["key"] = next(one for one in site.jobs if one is not job).step.key


def with_a_test_of_another(site: Site, job: Job) -> None:
    """It ran a test of another step."""
    other = next(one for one in site.jobs if one is not job and one.step.step.evidence == "junit")
    job.tests[other.id("plain")] = PASSES


def impostor(_site: Site, job: Job) -> None:
    """It ran in another image, and records that as built."""
    job.record["environment"] = environment(image=OTHER_IMAGE)
    job.more.append(image(step=job.step.key, digest=OTHER_IMAGE))


def not_recorded(_site: Site, job: Job) -> None:
    """What a job leaves beside its results, image or list, is missing."""
    job.more = [one for one in job.more if not isinstance(one, ImageRecord | ListingRecord)]


def late_check(_site: Site, job: Job) -> None:
    """A check follows the end of its step."""
    job.more.append(CheckRecord(step=job.step.key, check=Check(id="late", outcome=Outcome.PASS)))


def vanished(site: Site, job: Job, **more: Any) -> None:
    """A test of the merge base is gone, or nobody knows."""
    not_recorded(site, job)
    values = {"here": (job.id("plain"),), "at_base": (job.id("plain"), job.id("gone"))} | more
    job.more.append(ListingRecord(step=job.step.key, **values))


def altered(site: Site, _job: Job, *, how: Callable[[Path], None]) -> None:
    """The plan that the judge reads is another than the jobs'."""
    site.alter_plan = how


def cut_off_plan(path: Path) -> None:
    """A plan without its end."""
    path.write_bytes(path.read_bytes()[:-2])


def easier_plan(path: Path) -> None:
    """A plan that promises less."""
    whole = read_plan(path)
    changed = [one.redeclared(label="easier") for one in whole.steps[-1:]]
    whole.model_copy(update={"profile": "gate", "steps": (*whole.steps[:-1], *changed)}).save(path)


def protected(site: Site, _job: Job) -> None:
    """A protected file changes."""
    change = ProtectedChange(path="tests/support/tolerances.py", what="fp16: 1e-3 -> 1e-1")
    site.plan = site.plan.model_copy(update={"protected_changes": (change,)})


def doubtful(site: Site, _job: Job) -> None:
    """Files changed while the steps ran."""
    site.doubts = ("files have changed since",)


def unplanned(site: Site, _job: Job) -> None:
    """A folder of a job that no plan knows lies beside the others."""
    for job in site.jobs[:1]:
        job.files["../nowhere-cpu/results.jsonl"] = "{}"


def evidence(old: bytes, new: bytes) -> dict[str, Any]:
    """The evidence has other words."""
    return {"evidence": [partial(files.replaced, old, new)]}


class Kind:
    """A row of the truth table: the variants of a fault, and what a build deserves that one of them has struck.

    `on` says which jobs it can strike; `hides` whether afterwards nothing of the `job`, or of the `build`, is believed.
    """

    def __init__(self, *variants: Any, deserves: str = FORBIDS, on: str = "any", hides: str = "") -> None:
        self.variants, self.deserves, self.on, self.hides = variants, deserves, on, hides


OTHER_IMAGE = "sha256:" + "1" * 64
SICK = {"healthy": False, "problems": ("ECC: 3",)}
UNEXPLAINED = {"healthy": False}
RESET = {"dmesg": ("amdgpu: GPU reset begin!",)}
END = b"</testsuite>"
AGAIN = b'<testcase classname="tests.%s" name="test_plain"><failure message="wrong"/></testcase>'

KINDS = {
    # The change's own doing.
    "a test fails": Kind({"fails": "regression"}),
    "exit 1 and no test fails": Kind({"status": 1}),
    "a status that is no finding": Kind(*({"status": one} for one in (2, 3, 4, 5, 70, 75, 137, 255))),
    "a test is undecided": Kind({"tests": {"undecided": OPEN}}, on="findings"),
    "exit 6": Kind({"status": 6}),
    "exit 0 without evidence": Kind({"evidence": [files.gone]}, {"evidence": [files.emptied]}, hides="job"),
    "no test was collected": Kind({"tests": None}, {"tests": None, "status": 5}, hides="job"),
    "everything is skipped": Kind({"tests": dict.fromkeys(SOUND, SKIPPED)}),
    "fewer checks than promised": Kind(few, on="findings"),
    "a test is skipped without a true excuse": Kind(
        {"tests": {"skipped": SKIPPED}},
        {"tests": {"skipped": SKIPPED}, "needs": {"skipped": NOBODYS}, "lacked": [NOBODYS]},
        {"tests": {"skipped": SKIPPED}, "needs": {"skipped": AMX}},
        skipped_here,
    ),
    "a test is expected to fail": Kind({"tests": {"xfail": XFAIL}}, on="junit"),
    "more tests are excused than may be": Kind(
        {"tests": {"x": SKIPPED, "y": SKIPPED}, "needs": {"x": AMX, "y": AMX}, "lacked": [AMX]}
    ),
    "a test ran without what it needs": Kind(
        {"tests": {"without": PASSES}, "needs": {"without": AMX}, "lacked": [AMX]}
    ),
    "its machine cannot run a test": Kind(
        {"tests": {"amx": SKIPPED}, "needs": {"amx": AMX}, "lacked": [AMX]}, deserves=ALLOWS
    ),
    "flaky": Kind(
        partial(again, test="flaky", ended=PASSES), partial(again, test="flaky", ended=PASSES, elsewhere=True)
    ),
    "fails again": Kind(
        partial(again, test="lasting", ended=FAILS), partial(again, test="lasting", ended=FAILS, elsewhere=True)
    ),
    "a rerun here that claims another node": Kind(
        partial(again, test="near", ended=PASSES, elsewhere=True, host=NODE),
        partial(again, test="near", ended=FAILS, elsewhere=True, host=NODE),
        on="agents",
    ),
    "an earlier attempt failed": Kind(
        {"earlier": [(SOUND | {"plain": FAILS}, 1, "")]},
        {"earlier": [(SOUND, 6, "")]},
        {"earlier": [(SOUND, -11, "")]},
        {"earlier": [(SOUND, None, "timed out after 60 s")]},
    ),
    "an earlier attempt did not run": Kind({"earlier": [({}, 75, "")]}, {"earlier": [({}, -9, "")]}, deserves=ALLOWS),
    # Quarantine.
    "a quarantined test fails": Kind(partial(quarantined, test="quarantined", ended=FAILS), deserves=ALLOWS),
    "a quarantined test passes": Kind(partial(quarantined, test="mended", ended=PASSES), deserves=ALLOWS),
    "a test fails that is quarantined elsewhere": Kind(
        partial(quarantined, test="there", ended=FAILS, devices=("gfx950",)),
        partial(quarantined, test="there", ended=FAILS, step="another"),
    ),
    "a quarantine has expired": Kind(
        partial(quarantined, test="expired", ended=FAILS, days=20),
        partial(quarantined, test="expired", ended=PASSES, days=20),
        partial(quarantined, test="expired", ended=PASSES, days=10, step="unplanned"),
    ),
    # What the records say.
    "a record claims more than it shows": Kind(
        {"fails": "claimed", "claims": Outcome.PASS},
        {"status": 1, "claims": Outcome.PASS},
        {"status": None, "claims": Outcome.PASS},
        {"tests": None, "claims": Outcome.PASS},
    ),
    "a record claims less than it shows": Kind(*({"claims": one} for one in list(Outcome)[1:])),
    "results of another commit": Kind({"opening": {"commit": "d" * 40}}, {"opening": {"commit": ""}}, hides="job"),
    "results of another plan": Kind({"opening": {"plan_digest": "0" * 64}}, hides="job"),
    "results of another tree": Kind({"opening": {"tree": "u" * 64}}, on="beside another", hides="build"),
    "packages of another tree": Kind(
        {"record": {"imported": {"samples": "/other/samples"}}}, {"record": {"imported": {}}}
    ),
    "another command": Kind({"record": {"command": "true"}}),
    "another image": Kind(
        {"record": {"environment": environment(image=OTHER_IMAGE)}},
        {"record": {"environment": environment(image="")}},
        on="in the image",
    ),
    "results of another step": Kind(of_another_step, on="beside another", hides="job"),
    "it holds a test of another step": Kind(with_a_test_of_another, on="beside a junit"),
    "the image is of other contents": Kind({"more": [image(content="0" * 64)]}, on="builder", hides="build"),
    "the image is not recorded": Kind(not_recorded, on="builder", hides="build"),
    "the image is recorded by its user": Kind(impostor, on="in the image", hides="job"),
    # How a job ends. What nobody uploads, what comes after the verdict and what a person cancels looks the same.
    "hung, ended by its timeout": Kind(
        {"status": None, "stopped": "timed out after 60 s", "evidence": [files.gone]}, hides="job"
    ),
    "killed or crashed": Kind(*({"status": one} for one in (-9, -15, -11, -6))),
    "nothing arrives": Kind({"arrives": False}, {"arrives": False, "health": None}, hides="job"),
    "a test ended the session": Kind({"log": "!!! _pytest.outcomes.Exit: enough !!!\n"}, on="junit", hides="job"),
    # Evidence.
    "junit without `collected`": Kind(evidence(b'"collected"', b'"x"'), on="junit", hides="job"),
    "junit with a nameless testcase": Kind(evidence(END, b'<testcase name=""/>' + END), on="junit", hides="job"),
    "junit reports fewer tests than were collected": Kind(
        evidence(b'"collected" value="', b'"collected" value="9'), on="junit", hides="job"
    ),
    "junit announces more than it holds": Kind(
        evidence(b'tests="', b'tests="9'), evidence(b'failures="', b'failures="9'), on="junit", hides="job"
    ),
    "junit holds a strange element": Kind(evidence(END, b"<rerunFailure/>" + END), on="junit", hides="job"),
    "a test is in the evidence twice": Kind(
        evidence(END, b"".join(AGAIN % name for name in (b"a", b"b", b"c")) + END), on="junit", hides="job"
    ),
    "findings with a key twice": Kind(
        evidence(b'"outcome"', b'"outcome":"fail","outcome"'), on="findings", hides="job"
    ),
    "evidence is cut off": Kind(*({"evidence": [partial(files.cut_off, one)]} for one in (0.3, 0.9, 1.0)), hides="job"),
    # The file of records.
    "a flipped bit": Kind(*({"whole": [partial(files.flipped, one / 8, one)]} for one in range(8)), hides="job"),
    "records are cut off": Kind(
        *({"whole": [partial(files.cut_off, one)]} for one in (0.0, 0.3, 0.9, 1.0)), hides="job"
    ),
    "a line is removed": Kind({"lines": [files.without_a_line]}, hides="job"),
    "lines are in another order": Kind({"whole": [files.reordered]}, hides="job"),
    "a number is none": Kind(
        *({"lines": [partial(files.with_number, one)]} for one in ("NaN", "Infinity", "[1]", "null", '"one"', "-1")),
        hides="job",
    ),
    "the file is there twice over": Kind({"whole": [files.twice_over]}, hides="job", deserves=DOUBTFUL),
    "records of two builds": Kind({"lines": [files.of_two_builds]}, hides="job"),
    "a check follows the end of its step": Kind(late_check, hides="job"),
    "a note of restored files that is none": Kind(
        *({"files": {"restored.json": one}} for one in ("", "{}", '{"files": 1}', "[]")), hides="job"
    ),
    # Nodes.
    "the node is sick by the end": Kind(
        *({"health": {"after": one}} for one in (SICK, UNEXPLAINED, RESET)), on="agents"
    ),
    "unfit by preflight, and ran": Kind({"health": {"before": SICK}}, {"health": {"before": UNEXPLAINED}}, on="agents"),
    "a GPU is gone by the end": Kind({"health": {"after": {"gpus": ()}}}, on="gpu"),
    "health of another node": Kind(
        *({"health": {one: {"host": ELSEWHERE}}} for one in ("before", "after")), on="agents"
    ),
    "no health of a GPU's node": Kind(
        *({"health": dict.fromkeys(one)} for one in (["before"], ["after"], ["before", "after"])), on="gpu"
    ),
    "no health of a node without GPUs": Kind({"health": None}, on="cpu", deserves=ALLOWS),
    "a health file that is none": Kind(
        *({"files": {"health-after.json": one}} for one in ("", "{", '{"healthy": true}', "null")),
        on="agents",
        hides="job",
    ),
    # Tests that a change may have removed.
    "a test of the merge base is gone": Kind(
        vanished, partial(vanished, at_base=(), problem="exit 2"), on="listed", deserves=NEEDS_APPROVAL
    ),
    "nobody listed the merge base's tests": Kind(not_recorded, on="listed"),
    # The build as a whole.
    "a protected change": Kind(protected, on="build", deserves=NEEDS_APPROVAL),
    "files changed since the steps ran": Kind(doubtful, on="build"),
    "the plan is missing or another": Kind(
        partial(altered, how=Path.unlink),
        partial(altered, how=cut_off_plan),
        partial(altered, how=easier_plan),
        on="build",
        hides="build",
    ),
    "a folder of a job that is not planned": Kind(unplanned, on="build", deserves=ALLOWS),
}


def fits(on: str, site: Site, job: Job) -> bool:
    """Whether a job is one that a kind can strike."""
    one, local = job.step, site.build.local
    alike = [other for other in site.jobs if other.step.step.evidence == "junit"]
    return {
        "any": one.step.provides is None,
        "agents": not local,
        "gpu": not local and one.device != "cpu",
        "cpu": not local and one.device == "cpu",
        "junit": one.step.evidence == "junit",
        "findings": one.step.evidence == "findings" and one.step.provides is None,
        "beside another": len(site.jobs) > 1 and one.step.provides is None,
        "beside a junit": one.step.evidence == "junit" and len(alike) > 1,
        "in the image": one.image is not None,
        "builder": one.step.provides is not None,
        "listed": site.build.listed and one.step.evidence == "junit",
    }[on]


def strike(site: Site, fault: Fault) -> None:
    """Let a fault strike; one that fits nowhere does nothing."""
    row = KINDS[fault.kind]
    jobs = [job for job in site.jobs if row.on != "build" and fits(row.on, site, job)]
    if not jobs and row.on != "build":
        return
    job = jobs[fault.at % len(jobs)] if jobs else None
    change = row.variants[fault.number % len(row.variants)]
    if callable(change):
        change(site, job)
    else:
        apply(job, change)
    approval = ALLOWS if site.build.approved else FORBIDS
    site.deserves.add(approval if row.deserves == NEEDS_APPROVAL else row.deserves)
    for other in site.jobs if row.hides == "build" else [job] if row.hides == "job" else []:
        other.hidden = True


def apply(job: Job, change: dict[str, Any]) -> None:
    """Change values of a job: None empties one, what is a dict or a list is added to."""
    for name, value in change.items():
        if name == "fails":
            job.tests[value], job.status = FAILS, 1
        elif name == "health" and value:
            for moment, seen in value.items():
                job.health[moment] = seen and job.health.get(moment, {}) | seen
        elif isinstance(getattr(job, name), dict):
            setattr(job, name, {} if value is None else getattr(job, name) | value)
        elif isinstance(value, list):
            getattr(job, name).extend(value)
        else:
            setattr(job, name, value)


def laid_out(build: Build) -> Site:
    """The plan and the sound jobs of a build, with every fault that fits struck."""
    steps = [planned(build, number, shape) for number, shape in enumerate(build.shapes)]
    imaged = any(shape.image for shape in build.shapes)
    if imaged:
        steps.insert(0, IMAGE_STEP)
    a_plan = plan(
        *steps,
        profile="gate" if build.local else "pr",
        images={"rocm": CONTENT} if imaged else {},
        merge_base="b" * 40,
        packages=PACKAGES,
        changed_files=("samples/layout.py", *(("tests/conftest.py",) if build.listed else ())),
    )
    site = Site(build, a_plan, [sound_job(build, one) for one in steps])
    site.deserves |= set() if steps else {FORBIDS}  # a gate over nothing
    for name in KINDS:  # in the order of the table, whatever was drawn first
        for fault in build.faults:
            if fault.kind == name:
                strike(site, fault)
    return site


def planned(build: Build, number: int, shape: Shape) -> PlannedStep:
    """A step of a plan."""
    name, junit = "abc"[number], shape.evidence == "junit"
    return step(
        name,
        f"python -m pytest tests/{name}.py" if junit else "python -c pass",
        key=f"{name}-{shape.device}",
        device=shape.device,
        queue=None if build.local else f"amd-{shape.device}",
        image="rocm" if shape.image and not build.local else None,
        evidence=shape.evidence,
        may_lack=MAY_LACK,
        **({} if junit else {"minimum": MINIMUM}),
    )


def sound_job(build: Build, one: PlannedStep) -> Job:
    """A job that went well."""
    job = Job(one, dict(SOUND))
    if not build.local:
        gpus = {"gpus": ()} if one.device == "cpu" else {}
        job.health = {"before": dict(gpus), "after": dict(gpus)}
    if one.step.provides:
        job.more.append(image())
    if build.listed and one.step.evidence == "junit":
        job.more.append(ListingRecord(step=one.key, here=(job.id("plain"),), at_base=(job.id("plain"),)))
    return job


def verdict_of(site: Site, folder: Path) -> Verdict | None:
    """The verdict; None where there is no plan to judge by."""
    path, local = folder / "plan.json", site.build.local
    site.plan.save(path)
    for job in site.jobs:
        files.write(site.plan, job, folder / ("steps" if local else "jobs") / job.step.key)
    if site.alter_plan:
        site.alter_plan(path)
    try:
        a_plan = read_plan(path)
    except RecordsError:
        return None
    digest = plan_digest(a_plan)
    recorded = results.read_all(folder, None if local else folder / "jobs", a_plan, digest)
    found = judging.judge(
        a_plan,
        recorded,
        digest,
        decided=NOW,
        quarantine=Quarantine(tests=tuple(site.quarantine)),
        approved_by="A. Owner" if site.build.approved else "",
        doubts=site.doubts,
    )
    assert (judging.exit_status(found, a_plan) == Exit.PASS) == (found.outcome is Outcome.PASS)
    return found


def wrong(build: Build) -> str:
    """What is wrong with the verdict of a build; empty for nothing."""
    site = laid_out(build)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        found = verdict_of(site, Path(folder))
    if found is not None and found.outcome is Outcome.PASS:
        if FORBIDS in site.deserves:
            return f"{FALSE_PASS}: {found.why}"
    elif not {FORBIDS, DOUBTFUL} & site.deserves:
        return f"{BLOCKED}: {found.why if found else 'no plan'}"
    for job in site.jobs if found is not None else ():
        if why := lost(site, job, found):
            return f"{LOST}: {why}"
    return ""


def lost(site: Site, job: Job, found: Verdict) -> str:
    """What a job found, and its verdict does not say."""
    judged = next((one for one in found.steps if one.key == job.step.key), None)
    if job.hidden:
        return ""
    if judged is None:
        return f"{job.step.key} is not in the verdict"
    ends = list(job.tests.values())
    expected = (ends.count(PASSES), ends.count(FAILS), ends.count(OPEN), ends.count(SKIPPED) + ends.count(XFAIL))
    counts = judged.counts
    said = (counts.passed, counts.failed, counts.inconclusive, counts.did_not_run)
    if said != expected:
        return f"{job.step.key}: {expected} passed, failed, undecided, skipped; the verdict counts {said}"
    listed = {*judged.quarantined, *judged.unexpected_passes}
    excused = {one.test for one in site.quarantine if "quarantined" in one.test or "mended" in one.test}
    ours = {job.id(test) for test in job.tests}
    believed = job.step.image is None and not {"command", "imported"} & job.record.keys()
    if believed and (missing := (excused & ours) - listed):
        return f"{min(missing)} is in quarantine and not listed"
    return ""


PLANS = (
    Build((Shape("gfx942", "junit", image=True), Shape("cpu", "findings"), Shape("cpu", "junit")), listed=True),
    Build((Shape("gfx942", "findings"), Shape("cpu", "junit", image=True)), local=True),
)
SHAPES = st.builds(
    Shape,
    device=st.sampled_from(["cpu", "gfx942"]),
    evidence=st.sampled_from(["junit", "findings"]),
    image=st.booleans(),
)
FAULTS = st.builds(Fault, kind=st.sampled_from(list(KINDS)), at=st.integers(0, 3), number=st.integers(0, 7))
BUILDS = st.builds(
    Build,
    shapes=st.lists(SHAPES, max_size=3).map(tuple),
    faults=st.lists(FAULTS, max_size=4, unique_by=lambda fault: fault.kind).map(tuple),
    local=st.booleans(),
    listed=st.booleans(),
    approved=st.booleans(),
)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_alone_gets_the_verdict_that_it_deserves(kind):
    """Every variant, at two places of two plans."""
    for build in PLANS:
        for number in range(len(KINDS[kind].variants)):
            for at in range(2):
                assert wrong(replace(build, faults=(Fault(kind, at, number),))) == ""


@seed(20261121)
@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(BUILDS)
def test_no_false_pass_nothing_lost_and_honest_builds_pass(build):
    assert wrong(build) == ""


@pytest.mark.parametrize("build", PLANS, ids=["agents", "local"])
def test_a_build_without_a_fault_passes(build):
    assert wrong(build) == ""
