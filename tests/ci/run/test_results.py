# SPDX-License-Identifier: Apache-2.0
"""results.jsonl: what is written is read back, nothing damaged is believed, and no job hides what others found."""

from __future__ import annotations

import datetime as dt
import errno
import subprocess

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
    environment,
    failed,
    finished,
    gpu_step,
    health,
    image,
    opening,
    passed,
)
from support.plans import IDENTITY

from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.judge.verdict import judge
from hilgate.model.plan import plan_digest
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.run import results
from hilgate.run.results import NOTE, read_restored, restored_files

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
WRITE = gpu_step("write")


def verdict_of(a_plan, recorded):
    return judge(a_plan, recorded, plan_digest(a_plan), decided=NOW)


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def cut(length):
    return lambda jobs: jobs.path().write_bytes(jobs.path().read_bytes()[:length])


def forged(change):
    """Other lines, under a digest that holds."""

    def spoil(jobs):
        found = change(jobs.path().read_bytes().splitlines(keepends=True)[:-1])
        jobs.path().write_bytes(results.with_digest(b"".join(found)))

    return spoil


def as_a_folder(jobs):
    jobs.path().unlink()
    jobs.path().mkdir()


def left(*records, **changes):
    return lambda jobs: jobs.job(GATHER.key, *records, **changes)


def note(text):
    return lambda jobs: jobs.path(name="restored.json").write_text(text)


def health_text(text, moment="after"):
    return lambda jobs: jobs.path(name=f"health-{moment}.json").write_text(text)


CHANGED = "not as it was written"
SOUND = finished(GATHER, passed())
DAMAGE = {
    "empty": (cut(0), "the file is empty"),
    "truncated": (cut(-20), CHANGED),
    "a-folder-instead": (as_a_folder, "cannot be read"),
    "binary": (forged(lambda _: [b"\x00\xff\n"]), "not a record"),
    "another-schema": (
        forged(lambda found: [found[0].replace(b'_version":8', b'_version":1'), *found[1:]]),
        "not a record: schema 1, this reads 8",
    ),
    "no-build-record": (forged(lambda found: found[1:]), "its first record is not the build's"),
    "a-rerun-elsewhere-among-its-own": (left(*SOUND, again(host=ELSEWHERE)), "in each other's place"),
    "no-end-of-the-step": (left(SOUND[0]), "does not say how the step ended"),
    "health-of-the-other-moment": (
        health_text(health("before").model_dump_json()),
        "health-after.json: it is of gather-gfx942, before it ran",
    ),
    "health-of-another-step": (
        health_text(health("after", WRITE.key).model_dump_json()),
        "health-after.json: it is of write-gfx942",
    ),
}


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


def test_no_prefix_and_no_flipped_bit_is_believed(jobs):
    """Every fifth place is tried, and in each byte another bit."""
    whole = jobs.path().read_bytes()
    sound = results.read(jobs.path(), jobs.plan, plan_digest(jobs.plan), GATHER.key)
    assert sound.attempts[0].checks == (passed(TEST), passed())
    for place in range(0, len(whole), 5):
        flipped = whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
        for spoilt in (whole[:place], flipped):
            jobs.path().write_bytes(spoilt)
            with pytest.raises(RecordsError):
                results.read(jobs.path(), jobs.plan, plan_digest(jobs.plan), GATHER.key)


@pytest.mark.parametrize("tree", ["u" * 64, ""], ids=["another", "none"])
def test_of_two_states_of_the_files_neither_is_believed(jobs, tree):
    jobs.job(GATHER.key, *finished(GATHER, passed()), tree=tree)
    assert set(jobs.recorded().damaged) == {GATHER.key, IMAGE_STEP.key}
    assert "differ from those that other jobs" in jobs.ruled().why


def test_a_damaged_job_has_no_say_in_which_files_are_right(jobs):
    jobs.job(IMAGE_STEP.key, image(), *finished(IMAGE_STEP, passed()), tree="u" * 64)
    path = jobs.path(IMAGE_STEP.key)
    path.write_bytes(path.read_bytes()[:-20])
    assert set(jobs.recorded().damaged) == {IMAGE_STEP.key}


RECHECK = f"{GATHER.key}.recheck"


@pytest.mark.parametrize(
    ("records", "tree"),
    [
        (finished(GATHER, passed(TEST)), "t"),
        ([again(host=NODE)], "t"),
        ([image(step=GATHER.key)], "t"),
        ([again(host=ELSEWHERE)], "u"),
    ],
    ids=["a-step", "a-rerun-on-the-same-node", "an-image", "other-files"],
)
def test_a_recheck_holds_only_reruns_elsewhere_over_these_files(jobs, records, tree):
    jobs.job(GATHER.key, *finished(GATHER, failed(), passed(), status=1))
    jobs.job(RECHECK, *records, environment=environment(ELSEWHERE), tree=tree * 64)
    assert set(jobs.recorded().damaged) == {RECHECK}
    ruled = jobs.ruled()
    assert (ruled.outcome, ruled.ruling) == (Outcome.FAIL, Ruling.REGRESSION)
    assert any("its rerun elsewhere cannot be believed" in line for line in ruled.evidence)


def test_an_unplanned_steps_folder_is_named_and_files_ignored(jobs):
    (jobs.folder / "readme.txt").write_text("")
    jobs.job("scan-gfx942", *finished(WRITE, failed(), status=1))
    assert jobs.recorded().damaged == {"scan-gfx942": "the step 'scan-gfx942' is not in the plan"}
    assert jobs.verdict().outcome is Outcome.PASS


def test_what_a_job_restored_is_reported(jobs):
    note('{"merge_base": "b", "files": ["tests/support/tolerances.py"]}')(jobs)
    assert "with these files of the merge base: tests/support/tolerances.py" in jobs.ruled().evidence


@pytest.mark.parametrize("folder", ["", ".recheck"])
def test_an_approved_job_over_the_bases_files_did_not_run(jobs, folder):
    jobs.path(GATHER.key + folder).parent.mkdir(exist_ok=True)
    jobs.path(GATHER.key + folder, NOTE).write_text('{"files": ["tests/support/tolerances.py"]}')
    recorded = results.read_all(jobs.folder.parent, jobs.folder, jobs.plan, plan_digest(jobs.plan), approved=True)
    assert "not with those that were approved" in recorded.damaged[GATHER.key + folder]
    assert (GATHER.key in recorded.attempts) is bool(folder)


def test_a_full_disk_leaves_the_old_file_whole_and_says_so(jobs, monkeypatch):
    before = jobs.path().read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(RecordsError, match="No space left"):
        results.write(jobs.path().parent, opening(jobs.plan), finished(GATHER, failed(), status=1))
    assert jobs.path().read_bytes() == before


FILES = ("tests/kept.py", "tests/gone.py", "tests/new.py")


@pytest.fixture
def checkout(tmp_path):
    """A change that edits one file, deletes one and adds one; its results folder and its merge base."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    for name in ("kept", "gone"):
        (root / "tests" / f"{name}.py").write_text("old\n")
    for arguments in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "base"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True).stdout
    (root / "tests" / "kept.py").write_text("mine\n")
    (root / "tests" / "gone.py").unlink()
    (root / "tests" / "new.py").write_text("mine\n")
    (tmp_path / "job").mkdir()
    return root, sha.strip(), tmp_path / "job"


def state(root):
    return {path.name: path.read_text() for path in sorted((root / "tests").iterdir())}


def test_files_are_the_bases_and_restored_after_an_interrupt(checkout):
    root, sha, job = checkout
    before = state(root)
    with restored_files(root, sha, FILES, job):
        assert state(root) == {"gone.py": "old\n", "kept.py": "old\n"}
    assert state(root) == before
    with pytest.raises(KeyboardInterrupt), restored_files(root, sha, FILES, job):
        raise KeyboardInterrupt
    assert state(root) == before == {"kept.py": "mine\n", "new.py": "mine\n"}
    assert read_restored(job) == (tuple(sorted(FILES)), "")


def test_without_files_nothing_is_noted(checkout):
    root, _, job = checkout
    with restored_files(root, "no such commit", (), job):
        pass
    assert not (job / NOTE).exists()
    assert read_restored(job) == ((), "")


def test_a_link_is_replaced_and_not_followed(checkout, tmp_path):
    root, sha, job = checkout
    outside = tmp_path / "outside"
    outside.write_text("precious\n")
    (root / "tests" / "kept.py").unlink()
    (root / "tests" / "kept.py").symlink_to(outside)
    with restored_files(root, sha, FILES[:1], job):
        assert (root / "tests" / "kept.py").read_text() == "old\n"
    assert outside.read_text() == "precious\n"


def test_a_folder_that_leads_out_of_the_checkout_stops_the_job(checkout, tmp_path):
    root, sha, job = checkout
    (tmp_path / "elsewhere").mkdir()
    for path in (root / "tests").iterdir():
        path.unlink()
    (root / "tests").rmdir()
    (root / "tests").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(CannotRunHereError, match="leads out of the checkout"),
        restored_files(root, sha, FILES[:1], job),
    ):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []
