# SPDX-License-Identifier: Apache-2.0
"""The judgement of a step, rule by rule, over real job folders of agents: nodes, images, reruns, quarantine."""

from __future__ import annotations

import shutil

import pytest
from support.jobs import (
    DIGEST,
    ELSEWHERE,
    GATHER,
    IMAGE_STEP,
    NODE,
    OTHER,
    TEST,
    Jobs,
    again,
    agents_plan,
    entry,
    environment,
    failed,
    finished,
    gpu_step,
    health,
    image,
    passed,
    skipped,
    undecided,
)
from support.plans import plan

from hilgate.evidence import EVIDENCE_CHECK
from hilgate.judge import health as nodes
from hilgate.model.declaration import Excuse, Quarantine
from hilgate.model.record import ListingRecord, Outcome
from hilgate.model.verdict import Ruling
from hilgate.plan.jobs import lay_out
from hilgate.run import results

ECC = {"healthy": False, "problems": ("uncorrectable ECC: 3",)}
HUNG = {"status": None, "stopped": "timed out after 1740 s"}
RECHECK = f"{GATHER.key}.recheck"


def gathered(*checks, **changes):
    return lambda jobs: jobs.job(GATHER.key, *finished(GATHER, *checks, **changes))


def fails(*reruns):
    """One check of two fails, and these runs of it on the same node follow."""
    return lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1), *reruns)


def elsewhere(outcome="pass", **changes):
    """Its failing check ran again on another node."""
    return lambda jobs: jobs.job(RECHECK, again(outcome, host=ELSEWHERE).model_copy(update=changes))


def health_elsewhere(**changes):
    return lambda jobs: [
        jobs.path(RECHECK, f"health-{moment}.json").write_text(
            health(moment, RECHECK, host=ELSEWHERE, **changes).model_dump_json()
        )
        for moment in ("before", "after")
    ]


def after(**changes):
    return lambda jobs: jobs.healthy(**changes)


def without(*names):
    return lambda jobs: [jobs.path(name=name).unlink() for name in names]


FAILS, SICK = fails(), after(**ECC)
F, D, P, Q = Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.PASS, Outcome.INCONCLUSIVE
R = Ruling
NODES_DOING = "it may be the node's doing"
OUTCOMES = {R.PASS: P, R.REGRESSION: F, R.UNFINISHED: D, R.INFRA: D, R.FLAKY: Q}

CASES = {
    "everything is sound": (R.PASS, "2 passed"),
    # The change's doing: a regression where the step did its work, unfinished where it did not.
    "a check fails": (R.REGRESSION, "max_abs_err 0.5", FAILS),
    "fails again on the same node": (R.REGRESSION, "max_abs_err 0.5", fails(again("fail"))),
    "fails everywhere": (R.REGRESSION, "max_abs_err 0.5", fails(again("fail")), elsewhere("fail")),
    "a rerun that did not run clears nothing": (R.REGRESSION, "max_abs_err 0.5", fails(again("did not run"))),
    "one of two failures passes again": (
        R.REGRESSION,
        "max_abs_err 0.5",
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), failed(OTHER), status=1), again()),
    ),
    "hung on a healthy node": (R.UNFINISHED, "timed out", gathered(**HUNG)),
    "crashed on a healthy node": (R.UNFINISHED, "SIGSEGV", gathered(status=-11)),
    "another command": (R.UNFINISHED, "another command was run: true", gathered(passed(), command="true")),
    # Infrastructure: nothing was learned about the change.
    "no record": (R.INFRA, "no record of it arrived", without("results.jsonl")),
    "the job left nothing": (
        R.INFRA,
        "no record of it arrived; no agent of amd_mi300_1 noted that it began: look at the queue",
        without("results.jsonl", "health-before.json", "health-after.json"),
    ),
    "refused by preflight": (
        R.INFRA,
        "unfit before: uncorrectable ECC: 3",
        without("results.jsonl", "health-after.json"),
        lambda jobs: jobs.path(name="health-before.json").write_text(health("before", **ECC).model_dump_json()),
    ),
    "crashed on a sick node": (R.INFRA, "its node is in doubt", gathered(status=-11), SICK),
    "hung on a sick node": (R.INFRA, "unfit after: uncorrectable ECC: 3", gathered(**HUNG), SICK),
    "passes on a node that is sick afterwards": (R.INFRA, "unfit after", SICK),
    "the first trouble is named": (R.INFRA, "(unfit after: first)", after(healthy=False, problems=("first", "second"))),
    "no health after": (R.INFRA, "nothing is known of its node's health after", without("health-after.json")),
    "no health before": (R.INFRA, "nothing is known of its node's health before", without("health-before.json")),
    "fails on a sick node": (R.INFRA, NODES_DOING, FAILS, SICK),
    "fails on a sick node and on a fit one": (R.REGRESSION, "max_abs_err", FAILS, SICK, elsewhere("fail")),
    "fails again on the sick node itself": (R.INFRA, NODES_DOING, FAILS, SICK, elsewhere("fail", host=NODE)),
    "fails on two sick nodes": (R.INFRA, NODES_DOING, FAILS, SICK, elsewhere("fail"), health_elsewhere(**ECC)),
    "the fit node has no GPU": (R.REGRESSION, "max_abs_err", FAILS, SICK, elsewhere("fail"), health_elsewhere(gpus=())),
    "does not run on a fit node": (R.INFRA, "node is in doubt", FAILS, SICK, elsewhere("did not run")),
    "passes on a fit node": (R.INFRA, "node is in doubt", FAILS, SICK, elsewhere()),
    "another check fails on a fit node": (R.INFRA, NODES_DOING, FAILS, SICK, elsewhere("fail", check=OTHER)),
    "another image": (R.INFRA, "it ran in image", gathered(passed(), environment=environment(image="sha256:00"))),
    "no image": (R.INFRA, "it ran in image (none)", gathered(passed(), environment=environment(image=""))),
    "packages of another tree": (
        R.INFRA,
        "it imports samples from /other/samples, not from kernels/samples",
        gathered(passed(), imported={"samples": "/other/samples"}),
    ),
    "packages of an unknown place": (R.INFRA, "samples from (unknown place)", gathered(passed(), imported={})),
    "its image was never recorded": (
        R.INFRA,
        "no record says which image 'rocm'",
        lambda jobs: jobs.path(IMAGE_STEP.key).unlink(),
    ),
    "its image is of other contents": (
        R.INFRA,
        "from other contents",
        lambda jobs: jobs.job(IMAGE_STEP.key, image(content="0" * 64), *finished(IMAGE_STEP, passed("built"))),
    ),
    # Flakes: failed and then passed over the same files. Never a pass.
    "passes again on the same node": (R.FLAKY, f"{TEST} failed and passed when run again", fails(again())),
    "passes again elsewhere": (R.FLAKY, f"{TEST} failed and passed", fails(again("fail")), elsewhere()),
    "flaky and killed": (
        R.INFRA,
        "SIGKILL",
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=-9), again()),
    ),
}
"""What is ruled, what is said, and what has happened."""


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_ruling(name, tmp_path):
    ruling, why, *events = CASES[name]
    jobs = Jobs(tmp_path)
    for event in events:
        event(jobs)
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (OUTCOMES[ruling], ruling), ruled.why
    assert why in ruled.why
    assert (jobs.verdict().outcome is Outcome.PASS) == (ruled.outcome is Outcome.PASS)


IN_QUARANTINE = {
    "only its failures": (P, R.QUARANTINED, "1 passed; 1 failed in quarantine", [FAILS], entry()),
    "another failure": (F, R.REGRESSION, OTHER, [gathered(failed(), failed(OTHER), status=1)], entry()),
    "nothing left": (D, R.QUARANTINED, "it recorded no checks", [gathered(failed(), status=1)], entry()),
    "on this device": (P, R.QUARANTINED, "1 failed in quarantine", [FAILS], entry(devices=("gfx942",))),
    "another status": (D, R.UNFINISHED, "exit 3", [gathered(failed(), passed(), status=3)], entry()),
    "a timeout": (D, R.INFRA, "it was ended before", [gathered(failed(), passed(), **HUNG)], entry()),
    "lost evidence": (F, R.REGRESSION, "whole", [gathered(failed(), failed(EVIDENCE_CHECK), status=1)], entry()),
    "a sick node": (D, R.INFRA, "its node is in doubt", [FAILS, SICK], entry()),
    "an open question": (Q, R.QUARANTINED, "n=50", [gathered(failed(), undecided(), status=1)], entry()),
    "two that expired": (F, R.QUARANTINED, f"{TEST} expired", [], entry(days=0), entry(OTHER, days=0)),
    "on its last day": (P, R.QUARANTINED, "1 failed in quarantine", [FAILS], entry(days=1)),
}


@pytest.mark.parametrize("name", IN_QUARANTINE)
def test_a_quarantine_excuses_only_its_own_failures(name, tmp_path):
    outcome, ruling, why, events, *entries = IN_QUARANTINE[name]
    jobs = Jobs(tmp_path)
    for event in events:
        event(jobs)
    ruled = jobs.ruled(quarantine=Quarantine(tests=entries))
    assert (ruled.outcome, ruled.ruling) == (outcome, ruling), ruled.why
    assert why in ruled.why


def test_a_verdict_names_twenty_failing_checks(tmp_path):
    many = [failed(f"tests/t.py::test_{number}") for number in range(21)]
    jobs = Jobs(tmp_path)
    gathered(*many, status=1)(jobs)
    assert jobs.ruled().failed == tuple(check.id for check in many[:20])


@pytest.mark.parametrize(
    "changes",
    [{"command": "true"}, {"environment": environment(image="")}, {"imported": {}}, None],
    ids=["command", "image", "packages", "damaged"],
)
def test_failures_not_believed_are_counted_and_not_listed(tmp_path, changes):
    jobs = Jobs(tmp_path)
    FAILS(jobs)
    assert (jobs.ruled().failed, jobs.ruled().counts.failed) == ((TEST,), 1)
    if changes is None:
        jobs.path().write_text(f"{jobs.path().read_text()}{{\n")
    else:
        gathered(failed(), passed(), status=1, **changes)(jobs)
    assert jobs.ruled().failed == ()


def test_a_pass_that_holds_a_test_of_another_step_does_not_count(tmp_path):
    scan = gpu_step("scan").redeclared(command="python -m pytest tests/mamba --ignore=tests/mamba/slow")
    jobs = Jobs(tmp_path, agents_plan(GATHER, scan))
    for name, ruling in [
        ("tests/mamba/test_scan.py", Ruling.UNFINISHED),
        ("tests/mamba/slow/test_x.py", Ruling.PASS),
        ("tests/t.py", Ruling.PASS),
    ]:
        jobs.job(GATHER.key, *finished(GATHER, passed(f"{name}::test_a")))
        ruled = jobs.ruled()
        assert ruled.ruling is ruling, name
        assert (f"it holds {name}::test_a, a test of scan-gfx942" in ruled.why) == (ruling is not Ruling.PASS)


def test_all_shards_together_may_excuse_no_more_than_their_step(tmp_path):
    lacking = "device:gfx950"
    whole = gpu_step("split", minutes=2.0, shard_minutes=1.0, timeout_minutes=9)
    whole = whole.redeclared(may_lack={lacking: Excuse(why="it needs gfx950", most=1)})
    shards = lay_out([whole])
    jobs = Jobs(tmp_path, agents_plan(GATHER, *shards))
    ids = [(f"tests/t.py::test_{shard.key}_ran", f"tests/t.py::test_{shard.key}_not") for shard in shards]
    everything = tuple(name for each in ids for name in each)

    def leave(shard, excused):
        ran, not_run = ids[shards.index(shard)]
        other = skipped(not_run).model_copy(update={"labels": {"needs": lacking}}) if excused else passed(not_run)
        listing = ListingRecord(step=shard.key, here=(ran, not_run), at_base=(), of_all_shards=everything)
        jobs.job(shard.key, *finished(shard, passed(ran), other, lacked=(lacking,)), listing)
        jobs.healthy(shard.key)

    leave(shards[0], excused=True)
    leave(shards[1], excused=False)
    assert jobs.ruled(shards[0].key).outcome is Outcome.PASS
    leave(shards[1], excused=True)
    for shard in shards:
        ruled = jobs.ruled(shard.key)
        assert ruled.outcome is Outcome.DID_NOT_RUN
        assert ruled.why == f"2 checks of its shards did not run for lack of {lacking}, and at most 1 may"


SCATTER = gpu_step("scatter", job=GATHER.key)


def of_a_shared_job(tmp_path, *spoil):
    """What is said of both steps of a job: its hooks have left their notes in the folder of the first."""
    jobs = Jobs(tmp_path, agents_plan(GATHER.model_copy(update={"job": GATHER.key}), SCATTER))
    jobs.job(SCATTER.key, *finished(SCATTER, passed(TEST)))
    for one in spoil:
        one(jobs)
    return [jobs.ruled(key) for key in (GATHER.key, SCATTER.key)]


def test_steps_of_a_shared_job_are_judged_alone(tmp_path):
    first, second = of_a_shared_job(tmp_path, gathered(failed(), status=1))
    assert (first.outcome, second.outcome) == (Outcome.FAIL, Outcome.PASS)
    assert f"log: job {GATHER.key}, group `{SCATTER.key}`" in second.evidence


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda jobs: shutil.rmtree(jobs.path(SCATTER.key).parent), f"its job, {GATHER.key}, ended before it"),
        (lambda jobs: jobs.path(SCATTER.key).unlink(), f"its job, {GATHER.key}, ended before it"),
        (without("health-after.json"), "nothing is known of its node's health after"),
        (after(healthy=False, problems=("GPU hang",)), "its node is in doubt (unfit after: GPU hang)"),
        (after(host="mi300-8"), "the health after is of mi300-8"),
        (lambda jobs: jobs.path(name="health-after.json").write_text("{"), "health-after.json: not a health record"),
        (lambda jobs: jobs.healthy(SCATTER.key) or without("health-after.json")(jobs), "health after"),
        (lambda jobs: shutil.copy(jobs.path(), jobs.path(SCATTER.key)), f"hold records of '{GATHER.key}'"),
    ],
    ids=["ended early", "no record", "half watched", "sick", "another node", "damaged", "its own notes", "a copy"],
)
def test_a_shared_jobs_step_without_evidence_did_not_run(tmp_path, spoil, why):
    *_, second = of_a_shared_job(tmp_path, spoil)
    assert second.outcome is Outcome.DID_NOT_RUN
    assert why in second.why


def test_the_evidence_names_node_memory_and_reruns(tmp_path):
    jobs = Jobs(tmp_path)
    fails(again("fail"))(jobs)
    elsewhere()(jobs)
    ruled = jobs.ruled()
    assert ruled.evidence == (
        f"node {NODE}: AMD Instinct MI300X",
        "GPU 0000:05:00.0 MI300X: 285 MiB before, 285 MiB after, of 196,592 MiB",
        f"again on the same node, {NODE}: {TEST}: fail",  # with the words of the first time
        f"again elsewhere, {ELSEWHERE}: {TEST}: pass",
    )
    assert (ruled.node, ruled.flaky) == (NODE, (TEST,))
    assert ruled.reproduce.endswith(f"# in image {ruled.image}")


@pytest.mark.parametrize(
    ("first", "outcome", "ruling"),
    [
        ([failed(), passed()], Outcome.INCONCLUSIVE, Ruling.FLAKY),
        ([failed("tests/t.py::test_gone")], Outcome.INCONCLUSIVE, Ruling.FLAKY),
        ([undecided()], Outcome.INCONCLUSIVE, Ruling.INCONCLUSIVE),
        ([skipped()], Outcome.PASS, Ruling.PASS),
    ],
    ids=["failed", "failed-and-gone", "inconclusive", "did-not-run"],
)
def test_only_an_attempt_that_did_not_run_is_made_good(tmp_path, first, outcome, ruling):
    jobs = Jobs(tmp_path)
    status = int(any(check.outcome is Outcome.FAIL for check in first))
    jobs.job(GATHER.key, *finished(GATHER, *first, status=status), *finished(GATHER, passed(TEST), passed()))
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (outcome, ruling)
    assert "attempt 2; before:" in ruled.why
    assert ruled.flaky == ((TEST,) if failed() in first else ())


def test_what_a_verdict_says_of_a_step(tmp_path):
    jobs = Jobs(tmp_path)
    jobs.job(GATHER.key, *finished(GATHER, passed(TEST), passed(), status=0))
    ruled = jobs.ruled()
    assert (ruled.node, ruled.image, ruled.seconds, ruled.attempts, ruled.exit_status) == (NODE, DIGEST, 60.0, 1, 0)
    assert (ruled.counts.passed, ruled.flaky, ruled.quarantined, ruled.unexpected_passes) == (2, (), (), ())
    assert ruled.reproduce == f"hilgate run {GATHER.key}  # in image {DIGEST}"
    without("results.jsonl")(jobs)
    ruled = jobs.ruled()
    assert (ruled.node, ruled.image, ruled.seconds, ruled.attempts, ruled.exit_status) == ("", "", None, 0, None)
    assert (ruled.counts.passed, ruled.reproduce) == (0, f"hilgate run {GATHER.key}")
    assert ruled.evidence[0] == f"node {NODE}"
    assert ruled.why == "no record of it arrived"  # an agent took it: it left the health of its node


def test_no_agent_can_take_a_step_without_a_queue(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(gpu_step(queue=None)))
    without("results.jsonl", "health-before.json", "health-after.json")(jobs)
    assert jobs.ruled().why == "no record of it arrived"


def test_a_step_in_an_earlier_builds_image_needs_no_record_of_it(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(digests={"rocm": DIGEST}))
    without("results.jsonl")(jobs)
    jobs.path(IMAGE_STEP.key).unlink()
    jobs.job(GATHER.key, *finished(GATHER, passed()))
    assert jobs.ruled().outcome is Outcome.PASS
    jobs.job(GATHER.key, *finished(GATHER, passed(), environment=environment(image="")))
    assert jobs.ruled().why == f"it ran in image (none), built was {DIGEST}"


def test_a_test_named_by_a_step_of_other_evidence_is_no_stray(tmp_path):
    scan = gpu_step("scan", evidence="findings").redeclared(command="python -m pytest tests/mamba")
    jobs = Jobs(tmp_path, agents_plan(GATHER, scan))
    jobs.job(GATHER.key, *finished(GATHER, passed("tests/mamba/test_scan.py::test_a")))
    assert jobs.ruled().outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("a_step", "profile", "said"),
    [
        (gpu_step(image=None), "pr", True),
        (gpu_step(), "pr", False),
        (gpu_step(image=None), "gate", False),
    ],
    ids=["on-the-host", "in-an-image", "local"],
)
def test_a_step_of_a_fork_that_nobody_starts_says_why(tmp_path, a_step, profile, said):
    jobs = Jobs(tmp_path, agents_plan(a_step, fork=True, profile=profile))
    without("results.jsonl", "health-before.json", "health-after.json")(jobs)
    assert jobs.ruled().why.endswith(f"; {a_step.reason}") is said


def test_a_local_verdict_names_no_node(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(profile="gate"))
    assert [line for line in jobs.ruled().evidence if line.startswith("node ")] == []


def test_several_reruns_of_one_place_are_one_line(tmp_path):
    jobs = Jobs(tmp_path)
    both = (failed(), failed(OTHER), failed("tests/t.py::test_x"))
    reruns = [again("fail", check=check.id) for check in both[:2]]
    jobs.job(GATHER.key, *finished(GATHER, *both, status=1), *reruns, again(check="tests/t.py::test_x"))
    assert jobs.ruled().evidence[2:] == (
        f"again on the same node, {NODE}: 2 checks: fail",
        f"again on the same node, {NODE}: tests/t.py::test_x: pass",
    )
    said = again("fail").model_copy(update={"message": "max_abs_err 0.7\nmore"})
    jobs.job(GATHER.key, *finished(GATHER, failed(), status=1), said)
    assert jobs.ruled().evidence[2:] == (f"again on the same node, {NODE}: {TEST}: fail: max_abs_err 0.7",)


def test_quarantined_and_unexpected_passes_are_listed(tmp_path):
    jobs = Jobs(tmp_path)
    FAILS(jobs)
    ruled = jobs.ruled(quarantine=Quarantine(tests=(entry(), entry(OTHER))))
    assert (ruled.quarantined, ruled.unexpected_passes) == ((TEST,), (OTHER,))


def test_a_quarantined_failure_of_an_earlier_attempt_is_no_flake(tmp_path):
    jobs = Jobs(tmp_path)
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1), *finished(GATHER, passed(TEST), passed()))
    assert jobs.ruled(quarantine=Quarantine(tests=(entry(),))).ruling is Ruling.PASS


GPU = health("before").gpus[0]


def gpu(**changes):
    return GPU.model_copy(update=changes)


def errors(number):
    """What a hook sees of a GPU that has counted so many memory errors."""
    return {"gpus": (gpu(ecc_uncorrectable=number),)}


OTHER_GPU = gpu(bdf="0000:06:00.0")
TROUBLE = {
    "fit": ({}, {}),
    "problems, though healthy": ({"problems": ("3 zombies",)}, {}, "unfit before: 3 zombies"),
    "unhealthy without a word": ({}, {"healthy": False}, "unfit after: the hook does not say why"),
    "another node": ({}, {"host": ELSEWHERE}, f"the health after is of {ELSEWHERE}, the results are of {NODE}"),
    "more GPUs than the step has": ({"gpus": (GPU, OTHER_GPU)}, {"gpus": (GPU, OTHER_GPU)}),
    "too few from the start": ({"gpus": ()}, {"gpus": ()}, "0 of 1 GPUs before", "0 of 1 GPUs after"),
    "another GPU in its place": ({}, {"gpus": (OTHER_GPU,)}, "GPU 0000:05:00.0 was gone afterwards"),
    "new memory errors": (errors(1), errors(4), "GPU 0000:05:00.0: 3 new uncorrectable memory errors"),
    "one new memory error": (errors(3), errors(4), "GPU 0000:05:00.0: 1 new uncorrectable memory errors"),
    "old memory errors": (errors(4), errors(4)),
    "a counter that began again": (errors(4), errors(1)),
    "a kernel log from before": ({"dmesg": ("old",)}, {}),
    "unhealthy for its kernel log": ({"healthy": False, "dmesg": ("GPU reset",)}, {}, "kernel log: GPU reset"),
    "a long kernel log": ({}, {"dmesg": tuple("abcdefg")}, *(f"kernel log: {letter}" for letter in "abcde")),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble(name):
    before, after, *found = TROUBLE[name]
    records = health("before", **before), health("after", **after)
    assert nodes.trouble(records, NODE, 1) == tuple(found)
    assert nodes.trouble(records, "", 1) == tuple(words for words in found if "the results are of" not in words)


def test_one_record_or_none_is_no_trouble():
    assert nodes.trouble((), NODE, 1) == nodes.trouble((health("before"),), NODE, 1) == ()


def test_the_lines_show_memory_and_what_was_left_running():
    other = gpu(bdf="0000:06:00.0", name="")
    after = {"gpus": (gpu(vram_used_mib=9000),), "ended": ("python 4711",)}
    records = health("before", gpus=(GPU, other)), health("after", **after)
    assert nodes.lines(records) == (
        "GPU 0000:05:00.0 MI300X: 285 MiB before, 9,000 MiB after, of 196,592 MiB",
        "GPU 0000:06:00.0: 285 MiB before, not there after, of 196,592 MiB",
        "left running, and ended: python 4711",
    )


@pytest.mark.parametrize(
    ("changes", "profile", "demanded"),
    [
        ({}, "pr", True),
        ({}, "nightly", True),
        ({}, "gate", False),
        ({}, "quick", False),
        ({"queue": None}, "pr", False),
        ({"device": "cpu"}, "pr", False),
        ({"device": "a100"}, "pr", True),
    ],
    ids=["pr", "nightly", "local", "quick", "no-queue", "cpu", "another-gpu"],
)
def test_where_it_is_demanded(changes, profile, demanded):
    assert nodes.is_demanded(GATHER.model_copy(update=changes), plan(profile=profile)) is demanded


def test_a_missing_health_file_is_missing_and_not_wrong(tmp_path):
    assert results.read_health(tmp_path, GATHER.key) == ((), "")
    assert nodes.missing(()) == "before, after"
    (tmp_path / "health-before.json").symlink_to(tmp_path / "nowhere")
    assert "health-before.json: not a health record" in results.read_health(tmp_path, GATHER.key)[1]
