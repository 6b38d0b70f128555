"""results.jsonl: what is written is read back, and no damage is ever believed."""

from __future__ import annotations

import datetime as dt
import fcntl

import pytest
from support.plans import failing, passing, plan, runner, step, writes_findings

from hilgate.errors import MisuseError, RecordsError
from hilgate.judge import verdict as judge
from hilgate.model import Outcome, Ruling
from hilgate.plan.make import plan_digest
from hilgate.run import results
from hilgate.run import runner as lock

PLAN = plan(step("a", writes_findings(passing("a1"), passing("a2"))), step("b", writes_findings(passing("b1"))))
DIGEST = plan_digest(PLAN)
NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a complete, passing results file."""
    folder = tmp_path_factory.mktemp("sound")
    runner(PLAN, folder, cores=1).run()  # one after the other, so that the lines have an order
    return (folder / results.RESULTS_FILE).read_bytes()


def outcome_of(path, a_plan=PLAN):
    """The verdict over a file, or the error that refuses it."""
    digest = plan_digest(a_plan)
    try:
        recorded = results.read(path, a_plan, digest)
    except RecordsError as error:
        return error
    return judge.judge(a_plan, recorded, digest, decided=NOW).outcome


def test_a_complete_file_is_a_pass(sound, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(sound)
    assert outcome_of(path) is Outcome.PASS


def test_a_file_truncated_at_any_byte_is_never_a_pass(tmp_path):
    a_plan = plan(step("a", writes_findings(passing())))
    runner(a_plan, tmp_path).run()
    path = tmp_path / results.RESULTS_FILE
    whole = path.read_bytes()
    assert outcome_of(path, a_plan) is Outcome.PASS
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert outcome_of(path, a_plan) is not Outcome.PASS, length


def test_a_file_with_any_line_removed_is_never_a_pass(sound, tmp_path):
    path = tmp_path / "r.jsonl"
    lines = sound.splitlines(keepends=True)
    for missing in range(len(lines)):
        path.write_bytes(b"".join(lines[:missing] + lines[missing + 1 :]))
        assert outcome_of(path) is not Outcome.PASS, lines[missing]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda lines: [b"{garbage\n", *lines], "not a record"),
        (lambda lines: [*lines, b'{"kind": "surprise"}\n'], "not a record"),
        (lambda lines: [*lines, lines[2].replace(b'"step":"a-cpu"', b'"step":"zz"')], "'zz' is not in the plan"),
        (lambda lines: [lines[0].replace(DIGEST.encode(), b"0" * 64), *lines[1:]], "answer another plan"),
        (lambda lines: [lines[0].replace(b"c" * 40, b"d" * 40), *lines[1:]], "are of commit"),
        (lambda lines: [*lines, lines[0].replace(b"t" * 64, b"u" * 64)], "two states of the files"),
        (lambda lines: lines[2:], "first record must be the build's"),
        (lambda lines: lines[1:], "not as they were written"),
        (lambda lines: lines * 2, "not as they were written"),
        (lambda lines: [lines[0], lines[1], lines[3], lines[2], *lines[4:]], "not as they were written"),
        (lambda lines: [lines[0], *[line.replace(b'"id":"a1"', b'"id":"a7"') for line in lines[1:]]], "not as they"),
        (lambda lines: lines[:-1], "the last lines have no seal"),
        (lambda lines: [lines[0], *[line for line in lines[1:] if b'"check"' not in line[:20]]], "lines were lost"),
        (lambda _: [], "the file is empty"),
    ],
)
def test_damage_is_refused_with_file_line_and_remedy(sound, tmp_path, spoil, why):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(spoil(sound.splitlines(keepends=True))))
    error = outcome_of(path)
    assert isinstance(error, RecordsError)
    assert why in error.what
    assert error.where.startswith(f"{path}:")
    assert "--resume" in error.remedy


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(RecordsError, match="no results"):
        results.read(tmp_path / "none.jsonl", PLAN, DIGEST)


def test_repair_sets_damage_aside_and_loses_no_byte(sound, tmp_path):
    path = tmp_path / results.RESULTS_FILE
    lines = sound.splitlines(keepends=True)
    last_of_b = next(n for n, line in enumerate(lines) if b'"key":"b-cpu"' in line)
    cut = lines[last_of_b][:30]
    check_of_b = lines[last_of_b - 1]
    path.write_bytes(b"".join(lines[:last_of_b]) + b"\xff\x00 garbage\n" + cut)
    recorded = results.repair(path, PLAN, DIGEST)
    assert recorded is not None
    assert "b-cpu" not in recorded.attempts
    assert (tmp_path / results.DAMAGED_FILE).read_bytes() == check_of_b + b"\xff\x00 garbage\n" + cut + b"\n"
    kept = results.read(path, PLAN, DIGEST)
    assert kept.attempts == recorded.attempts
    runner(PLAN, tmp_path, done=frozenset(recorded.attempts)).run()
    assert outcome_of(path) is Outcome.PASS


def test_repair_without_an_opening_record_starts_over(tmp_path):
    path = tmp_path / results.RESULTS_FILE
    path.write_bytes(b"not json\n")
    assert results.repair(path, PLAN, DIGEST) is None
    assert path.read_bytes() == b""
    assert (tmp_path / results.DAMAGED_FILE).read_bytes() == b"not json\n"


def test_repair_refuses_the_results_of_another_plan(sound, tmp_path):
    path = tmp_path / results.RESULTS_FILE
    path.write_bytes(sound)
    with pytest.raises(RecordsError, match="another plan"):
        results.repair(path, PLAN, "0" * 64)
    assert path.read_bytes() == sound


@pytest.mark.parametrize(
    ("first_exit", "before", "outcome", "ruling"),
    [(5, Outcome.DID_NOT_RUN, Outcome.PASS, Ruling.PASS), (1, Outcome.FAIL, Outcome.INCONCLUSIVE, Ruling.FLAKY)],
    ids=["did-not-run-is-made-good", "a-failure-is-not"],
)
def test_a_step_that_ran_again_keeps_its_first_attempt(tmp_path, first_exit, before, outcome, ruling):
    mark = tmp_path / "seen"
    code = f"p = pathlib.Path({str(mark)!r}); n = p.exists(); p.write_text('x'); sys.exit(0 if n else {first_exit})"
    a_plan = plan(step("a", writes_findings(passing(), then=code)))
    runner(a_plan, tmp_path).run()
    runner(a_plan, tmp_path).run()
    recorded = results.read(tmp_path / results.RESULTS_FILE, a_plan, plan_digest(a_plan))
    assert [attempt.record.outcome for attempt in recorded.attempts["a-cpu"]] == [before, Outcome.PASS]
    verdict = judge.judge(a_plan, recorded, plan_digest(a_plan), decided=NOW)
    assert (verdict.outcome, verdict.steps[0].ruling) == (outcome, ruling)
    assert f"attempt 2; before: {before.value}" in verdict.steps[0].why


def test_a_group_in_the_middle_is_lost_alone(sound, tmp_path):
    path = tmp_path / results.RESULTS_FILE
    path.write_bytes(sound.replace(b'"id":"a1"', b'"id":"a7"'))
    recorded = results.repair(path, PLAN, DIGEST)
    assert recorded is not None
    assert set(recorded.attempts) == {"b-cpu"}
    assert results.read(path, PLAN, DIGEST).attempts == recorded.attempts


def test_nothing_is_appended_behind_an_end_without_a_seal(sound, tmp_path):
    path = tmp_path / results.RESULTS_FILE
    path.write_bytes(sound[:-1])
    with pytest.raises(RecordsError, match="no seal"):
        runner(PLAN, tmp_path).run()


def test_jobs_of_agents_are_read_together_and_one_that_left_nothing_did_not_run(tmp_path):
    a_plan = plan(
        step("a", writes_findings(passing())), step("b", writes_findings(failing(), status=1)), step("c", "x")
    )
    for key in ("a-cpu", "b-cpu"):
        runner(a_plan, tmp_path / "jobs" / key, only=frozenset({key})).run()
    (tmp_path / "jobs" / "c-cpu").mkdir()
    recorded = results.read_all(tmp_path, tmp_path / "jobs", a_plan, plan_digest(a_plan))
    verdict = judge.judge(a_plan, recorded, plan_digest(a_plan), decided=NOW)
    assert [s.outcome for s in verdict.steps] == [Outcome.PASS, Outcome.FAIL, Outcome.DID_NOT_RUN]
    nothing = results.read_all(tmp_path, tmp_path / "none", a_plan, plan_digest(a_plan))
    assert judge.judge(a_plan, nothing, plan_digest(a_plan), decided=NOW).outcome is Outcome.DID_NOT_RUN


def test_two_runs_in_one_folder_refuse(tmp_path):
    with lock.Folder(tmp_path), pytest.raises(MisuseError, match="another hilgate run"), lock.Folder(tmp_path):
        pass
    with lock.Folder(tmp_path) as held:
        assert held.path == tmp_path


def test_the_lock_is_the_kernels_so_a_killed_run_leaves_none(tmp_path):
    (tmp_path / lock.LOCK_FILE).write_text("")
    with lock.Folder(tmp_path), (tmp_path / lock.LOCK_FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
