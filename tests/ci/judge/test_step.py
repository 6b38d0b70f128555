"""The taxonomy: what is told about a step, rule by rule, over real job folders of a build on agents."""

from __future__ import annotations

import pytest
from support.jobs import (
    ELSEWHERE,
    GATHER,
    IMAGE_STEP,
    NODE,
    OTHER,
    TEST,
    Jobs,
    again,
    agents_plan,
    environment,
    failed,
    finished,
    gpu_step,
    health,
    image,
    passed,
    skipped,
    undecided,
)  # fmt: skip

from hilgate.model import Outcome, Ruling

ECC = {"healthy": False, "problems": ("uncorrectable ECC: 3",)}
HUNG = {"status": None, "stopped": "timed out after 1740 s"}


def gathered(*checks, **changes):
    return lambda jobs: jobs.job(GATHER.key, *finished(GATHER, *checks, **changes))


def both(*spoil):
    return lambda jobs: [one(jobs) for one in spoil]


def reruns(*records, **changes):
    return lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1, **changes), *records)


def recheck(*records, **changes):
    return lambda jobs: jobs.job(f"{GATHER.key}.recheck", *records, **changes)


def after(**changes):
    return lambda jobs: jobs.healthy(**changes)


def without(*names):
    return lambda jobs: [jobs.path(name=name).unlink() for name in names]


FAILS = gathered(failed(), passed(), status=1)
F, D, P, Q = Outcome.FAIL, Outcome.DID_NOT_RUN, Outcome.PASS, Outcome.INCONCLUSIVE
R = Ruling

CASES = {
    "everything-is-sound": (lambda _: None, P, R.PASS, "2 passed"),
    # Regressions: the step did its work and what it checks is wrong, or it no longer does its work.
    "a-check-fails": (FAILS, F, R.REGRESSION, "max_abs_err 0.5"),
    "fails-again-on-the-same-node": (reruns(again("fail")), F, R.REGRESSION, "max_abs_err 0.5"),
    "fails-everywhere": (
        both(reruns(again("fail")), recheck(again("fail", host=ELSEWHERE))), F, R.REGRESSION, "max_abs_err 0.5"),
    "a-rerun-that-did-not-run-clears-nothing": (reruns(again("did not run")), F, R.REGRESSION, "max_abs_err 0.5"),
    "one-of-two-failures-passes-again": (
        both(lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), failed(OTHER), status=1), again())),
        F, R.REGRESSION, "max_abs_err"),
    "exit-1-without-a-failing-check": (gathered(passed(), status=1), F, R.REGRESSION, "exit 1 and no failing check"),
    "no-tests-collected": (gathered(status=5), D, R.REGRESSION, "exit 5 (no tests were collected)"),
    "zero-tests": (gathered(), D, R.REGRESSION, "it recorded no checks"),
    "everything-skipped": (gathered(skipped()), D, R.REGRESSION, "none of its 1 checks ran"),
    "pytest-called-wrongly": (gathered(status=4), D, R.REGRESSION, "exit 4"),
    "hung-on-a-healthy-node": (gathered(**HUNG), D, R.REGRESSION, "timed out"),
    "crashed-on-a-healthy-node": (gathered(status=-11), D, R.REGRESSION, "SIGSEGV"),
    "claims-a-pass": (gathered(failed(), outcome=P, message="fine"), F, R.REGRESSION, "recorded as pass"),
    "another-command": (gathered(passed(), command="true"), D, R.REGRESSION, "another command was run: true"),
    # Infrastructure: nothing was learned about the change.
    "no-record": (without("results.jsonl"), D, R.INFRA, "no record of it arrived"),
    "job-left-nothing": (
        without("results.jsonl", "health-before.json", "health-after.json"), D, R.INFRA, "no record of it arrived"),
    "refused-by-preflight": (
        both(without("results.jsonl", "health-after.json"),
             lambda jobs: jobs.path(name="health-before.json").write_text(health("before", **ECC).model_dump_json())),
        D, R.INFRA, "unfit before: uncorrectable ECC: 3"),
    "unfinished": (
        lambda jobs: jobs.job(GATHER.key, finished(GATHER, passed())[0]), D, R.INFRA, "not say how the step ended"),
    "sick-node-by-its-own-word": (gathered(status=75), D, R.INFRA, "exit 75"),
    "killed-from-outside": (gathered(status=-9), D, R.INFRA, "SIGKILL"),
    "crashed-on-a-node-in-doubt": (both(gathered(status=-11), after(**ECC)), D, R.INFRA, "its node is in doubt"),
    "hung-on-a-sick-node": (both(gathered(**HUNG), after(**ECC)), D, R.INFRA, "unfit after: uncorrectable ECC: 3"),
    "passes-on-a-node-sick-afterwards": (after(**ECC), D, R.INFRA, "unfit after"),
    "sick-without-a-reason": (after(healthy=False), D, R.INFRA, "the hook does not say why"),
    "gpu-trouble-in-the-kernel-log": (after(dmesg=("amdgpu: GPU reset begin!",)), D, R.INFRA, "GPU reset begin!"),
    "a-gpu-is-gone": (after(gpus=()), D, R.INFRA, "0 of 1 GPUs after"),
    "health-of-another-node": (after(host=ELSEWHERE), D, R.INFRA, f"is of {ELSEWHERE}"),
    "no-health-after": (without("health-after.json"), D, R.INFRA, "nothing is known of its node's health after"),
    "no-health-before": (without("health-before.json"), D, R.INFRA, "nothing is known of its node's health before"),
    "fails-on-a-sick-node": (both(FAILS, after(**ECC)), D, R.INFRA, "it may be the node's doing"),
    "fails-on-a-sick-node-and-on-a-fit-one": (
        both(FAILS, after(**ECC), recheck(again("fail", host=ELSEWHERE))), F, R.REGRESSION, "max_abs_err"),
    "ran-in-another-image": (
        gathered(passed(), environment=environment(image="sha256:" + "0" * 64)), D, R.INFRA, "it ran in image"),
    "ran-in-no-image": (gathered(passed(), environment=environment(image="")), D, R.INFRA, "it ran in image (none)"),
    "fails-in-another-image": (
        gathered(failed(), status=1, environment=environment(image="")), D, R.INFRA, f"{TEST} failed there"),
    "its-image-was-never-recorded": (
        lambda jobs: jobs.path(IMAGE_STEP.key).unlink(), D, R.INFRA, "no record says which image 'rocm'"),
    "its-image-is-of-other-contents": (
        lambda jobs: jobs.job(IMAGE_STEP.key, image(content="0" * 64), *finished(IMAGE_STEP, passed("built"))),
        D, R.INFRA, "from other contents"),
    # Flakes: failed and then passed over the same files. Never a pass.
    "passes-again-on-the-same-node": (reruns(again()), Q, R.FLAKY, f"{TEST} failed and passed when run again"),
    "passes-again-elsewhere": (
        both(reruns(again("fail")), recheck(again(host=ELSEWHERE))), Q, R.FLAKY, f"{TEST} failed and passed"),
    "flaky-and-killed": (
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=-9), again()),
        D, R.INFRA, "SIGKILL"),
    "inconclusive": (gathered(undecided()), Q, R.INCONCLUSIVE, "n=50"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_ruling(name, tmp_path):
    spoil, outcome, ruling, why = CASES[name]
    jobs = Jobs(tmp_path)
    spoil(jobs)
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (outcome, ruling), ruled.why
    assert why in ruled.why
    assert (jobs.verdict().outcome is Outcome.PASS) == (name == "everything-is-sound")


def test_findings_that_say_exit_5_are_infrastructure(tmp_path):
    findings = gpu_step(evidence="findings")
    jobs = Jobs(tmp_path, agents_plan(findings))
    jobs.job(findings.key, *finished(findings, status=5))
    assert jobs.ruled().ruling is Ruling.INFRA


def test_a_cpu_step_of_an_agent_needs_no_health_and_no_image(tmp_path):
    plain = gpu_step(key=GATHER.key, device="cpu", image=None)
    jobs = Jobs(tmp_path, agents_plan(plain))
    without("health-before.json", "health-after.json")(jobs)
    jobs.job(plain.key, *finished(plain, passed(), environment=environment(image="")))
    assert jobs.verdict().outcome is Outcome.PASS


def test_a_desk_demands_neither(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(profile="gate"))
    without("health-before.json", "health-after.json")(jobs)
    jobs.job(GATHER.key, *finished(GATHER, passed(), environment=environment(image="")))
    assert jobs.verdict().outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "it left no record of the image 'rocm'"),
        ([image(content="0" * 64)], "it built the image 'rocm' from other contents"),
    ],
    ids=["none", "other-contents"],
)
def test_a_step_that_builds_an_image_passes_only_with_its_record(tmp_path, lines, why):
    jobs = Jobs(tmp_path)
    jobs.job(IMAGE_STEP.key, *lines, *finished(IMAGE_STEP, passed("built")))
    ruled = jobs.ruled(IMAGE_STEP.key)
    assert (ruled.outcome, ruled.ruling) == (Outcome.DID_NOT_RUN, Ruling.REGRESSION)
    assert why in ruled.why


def test_the_evidence_names_node_memory_and_reruns(tmp_path):
    jobs = Jobs(tmp_path)
    both(reruns(again("fail")), recheck(again(host=ELSEWHERE)))(jobs)
    ruled = jobs.ruled()
    assert ruled.evidence == (
        f"node {NODE}: AMD Instinct MI300X",
        "GPU 0000:05:00.0 MI300X: 285 MiB before, 285 MiB after, of 196,592 MiB",
        f"again on the same node, {NODE}: {TEST}: fail: max_abs_err 0.5 > 0.001",
        f"again elsewhere, {ELSEWHERE}: {TEST}: pass",
    )
    assert (ruled.node, ruled.flaky) == (NODE, (TEST,))
    assert ruled.reproduce.endswith(f"# in image {ruled.image}")


@pytest.mark.parametrize(
    ("first", "outcome", "ruling"),
    [
        ([failed(), passed()], Outcome.INCONCLUSIVE, Ruling.FLAKY),
        ([undecided()], Outcome.INCONCLUSIVE, Ruling.INCONCLUSIVE),
        ([skipped()], Outcome.PASS, Ruling.PASS),
    ],
    ids=["failed", "inconclusive", "did-not-run"],
)
def test_only_an_attempt_that_did_not_run_is_made_good(tmp_path, first, outcome, ruling):
    jobs = Jobs(tmp_path)
    status = int(any(check.outcome is Outcome.FAIL for check in first))
    jobs.job(GATHER.key, *finished(GATHER, *first, status=status), *finished(GATHER, passed(TEST), passed()))
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (outcome, ruling)
    assert "attempt 2; before:" in ruled.why
    assert ruled.flaky == ((TEST,) if ruling is Ruling.FLAKY else ())
