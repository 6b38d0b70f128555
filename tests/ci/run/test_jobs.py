"""Folders of jobs: one that is damaged, foreign or misplaced is never believed, and never hides what others found."""

from __future__ import annotations

import pytest
from support.jobs import (
    DIGEST,
    ELSEWHERE,
    GATHER,
    IMAGE_STEP,
    NODE,
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
)  # fmt: skip

from hilgate.model import Outcome, Ruling

WRITE = gpu_step("write")


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def edited(old, new, key=GATHER.key):
    def spoil(jobs):
        text = jobs.path(key).read_bytes()
        assert old in text
        jobs.path(key).write_bytes(text.replace(old, new, 1))

    return spoil


def cut(length):
    return lambda jobs: jobs.path().write_bytes(jobs.path().read_bytes()[:length])


def lines(change):
    return lambda jobs: jobs.path().write_bytes(b"".join(change(jobs.path().read_bytes().splitlines(keepends=True))))


def swapped(found):
    found[1], found[2] = found[2], found[1]
    return found


def as_a_folder(jobs):
    jobs.path().unlink()
    jobs.path().mkdir()


def note(text):
    return lambda jobs: jobs.path(name="restored.json").write_text(text)


def health_text(text, moment="after"):
    return lambda jobs: jobs.path(name=f"health-{moment}.json").write_text(text)


DAMAGE = {
    "empty": (cut(0), "the file is empty"),
    "truncated": (cut(-20), "the last line is truncated"),
    "its-last-line-lost": (lines(lambda found: found[:-1]), "no seal"),
    "a-line-lost": (lines(lambda found: found[:2] + found[3:]), "lines were lost"),
    "lines-swapped": (lines(swapped), "not as they were written"),
    "everything-twice": (lines(lambda found: found * 2), "not as they were written"),
    "a-byte-of-an-id": (edited(b"test_gather", b"test_gathes"), "not as they were written"),
    "a-byte-of-the-seal": (edited(b'"kind":"seal"', b'"kind":"seam"'), "not a record"),
    "not-a-number": (edited(b'"seconds":60.0', b'"seconds":NaN'), "not a record"),
    "binary": (lambda jobs: jobs.path().write_bytes(b"\x00\xff" * 50 + b"\n"), "not a record"),
    "a-folder-instead": (as_a_folder, "cannot be read"),
    "another-plan": (
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, passed()), plan_digest="0" * 64), "another plan"),
    "another-commit": (
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, passed()), commit="a" * 40), "of commit aaaa"),
    "another-step": (
        lambda jobs: jobs.job(GATHER.key, *finished(IMAGE_STEP, passed())), f"holds records of '{IMAGE_STEP.key}'"),
    "a-step-of-no-plan": (
        lambda jobs: jobs.job(GATHER.key, *finished(WRITE, passed())), "the step 'write-gfx942' is not in the plan"),
    "an-image-it-does-not-build": (
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, passed()), image(step=GATHER.key)), "does not build"),
    "a-rerun-elsewhere-among-its-own": (
        lambda jobs: jobs.job(GATHER.key, *finished(GATHER, passed()), again(host=ELSEWHERE)), "in each other's place"),
    "no-build-record": (lambda jobs: jobs.path().write_bytes(b""), "the file is empty"),
    "health-is-garbage": (health_text("{"), "health-after.json: not a health record"),
    "health-is-empty": (health_text("", "before"), "health-before.json: not a health record"),
    "health-of-the-other-moment": (
        health_text(health("before").model_dump_json()), "health-after.json: it is of gather-gfx942, before it ran"),
    "health-of-another-step": (
        health_text(health("after", WRITE.key).model_dump_json()), "health-after.json: it is of write-gfx942"),
    "a-note-of-restored-files-that-is-none": (note("{}"), "restored.json: not a note"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_job_does_not_pass_and_the_others_are_judged(jobs, name):
    spoil, why = DAMAGE[name]
    spoil(jobs)
    assert why in jobs.recorded().damaged[GATHER.key]
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (Outcome.DID_NOT_RUN, Ruling.INFRA)
    assert why in ruled.why
    assert jobs.ruled(IMAGE_STEP.key).outcome is Outcome.PASS


def test_an_intact_build_passes(jobs):
    assert jobs.recorded().damaged == {}
    verdict = jobs.verdict()
    assert verdict.outcome is Outcome.PASS
    assert verdict.images == {"rocm": DIGEST}


def test_results_cut_at_any_byte_are_never_a_pass(jobs):
    whole = jobs.path().read_bytes()
    for length in range(0, len(whole), 7):
        jobs.path().write_bytes(whole[:length])
        assert jobs.verdict().outcome is not Outcome.PASS, length


def test_no_flipped_bit_is_a_pass(jobs):
    whole = jobs.path().read_bytes()
    for place in range(0, len(whole), 11):
        spoilt = bytes([whole[place] ^ (1 << place % 8)])
        jobs.path().write_bytes(whole[:place] + spoilt + whole[place + 1 :])
        assert jobs.verdict().outcome is not Outcome.PASS, place


def test_a_failing_check_in_damaged_results_is_still_a_failure(jobs):
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1))
    cut(-20)(jobs)
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (Outcome.FAIL, Ruling.REGRESSION)
    assert ruled.why.startswith(f"{TEST}: max_abs_err 0.5 > 0.001 (its results are damaged as well: ")
    assert ruled.counts.failed == 1


def test_but_not_one_of_another_commit_or_on_a_sick_node(jobs):
    records = finished(GATHER, failed(), passed(), status=1)
    jobs.job(GATHER.key, *records, commit="a" * 40)
    assert jobs.ruled().ruling is Ruling.INFRA
    jobs.job(GATHER.key, *records)
    jobs.healthy(dmesg=("amdgpu: GPU reset begin!",))
    cut(-20)(jobs)
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (Outcome.DID_NOT_RUN, Ruling.INFRA)
    assert TEST in ruled.why


def test_of_two_states_of_the_files_the_rarer_one_is_damaged(tmp_path):
    jobs = Jobs(tmp_path, agents_plan(GATHER, WRITE))
    jobs.job(WRITE.key, *finished(WRITE, passed()), tree="u" * 64)
    jobs.healthy(WRITE.key)
    write = health("before", WRITE.key), health("after", WRITE.key)
    for one in write:
        jobs.path(WRITE.key, f"health-{one.moment}.json").write_text(one.model_dump_json())
    assert list(jobs.recorded().damaged) == [WRITE.key]
    assert "differ from those that other jobs" in jobs.ruled(WRITE.key).why
    assert jobs.ruled(GATHER.key).outcome is Outcome.PASS


def test_of_two_states_equally_common_both_are(jobs):
    jobs.job(GATHER.key, *finished(GATHER, passed()), tree="u" * 64)
    assert set(jobs.recorded().damaged) == {GATHER.key, IMAGE_STEP.key}


def test_a_job_outside_a_checkout_differs_from_one_inside(jobs):
    jobs.job(GATHER.key, *finished(GATHER, passed()), tree="")
    assert jobs.verdict().outcome is not Outcome.PASS


@pytest.mark.parametrize(
    "records",
    [finished(GATHER, passed(TEST)), [again(host=NODE)], [image(step=GATHER.key)]],
    ids=["a-step", "a-rerun-on-the-same-node", "an-image"],
)
def test_a_recheck_holds_reruns_on_another_node_and_nothing_else(jobs, records):
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1))
    jobs.job(f"{GATHER.key}.recheck", *records, environment=environment(ELSEWHERE))
    assert f"{GATHER.key}.recheck" in jobs.recorded().damaged
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (Outcome.FAIL, Ruling.REGRESSION)
    assert any("its rerun elsewhere cannot be believed" in line for line in ruled.evidence)


def test_a_folder_of_no_planned_step_is_named_and_changes_nothing(jobs):
    jobs.job("scan-gfx942", *finished(WRITE, failed(), status=1))
    assert jobs.recorded().damaged == {"scan-gfx942": "the step 'scan-gfx942' is not in the plan"}
    assert jobs.verdict().outcome is Outcome.PASS


def test_files_beside_the_jobs_are_no_jobs(jobs):
    (jobs.folder / "readme.txt").write_text("")
    assert jobs.recorded().damaged == {}


def test_what_a_job_put_back_is_told(jobs):
    note('{"merge_base": "b", "files": ["tests/support/tolerances.py"]}')(jobs)
    assert "with these files of the merge base: tests/support/tolerances.py" in jobs.ruled().evidence


def test_a_damaged_job_has_no_vote_on_which_files_are_right(jobs):
    jobs.job(IMAGE_STEP.key, image(), *finished(IMAGE_STEP, passed()), tree="u" * 64)
    jobs.job(GATHER.key, *finished(GATHER, failed(), status=1))
    path = jobs.path(IMAGE_STEP.key)
    path.write_bytes(path.read_bytes()[:-20])
    assert set(jobs.recorded().damaged) == {IMAGE_STEP.key}
