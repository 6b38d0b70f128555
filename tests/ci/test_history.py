"""The history: one build once, whole or not at all, and every line believed only when it is sound."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from toybuilds import built, failed, passed, skipped
from toyplans import plan, step

from hilgate import results
from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.history import benchmarks, collect, store
from hilgate.history.store import BUILDS, CHECKS, STEPS
from hilgate.model import Outcome, Ruling

NOW = dt.datetime(2026, 11, 21, 7, tzinfo=dt.UTC)


def entry(number=0, checks=None, **changes):
    """The lines of a build of one step; another number is another build."""
    one = step("a", "x", minutes=1.0 + number)
    usual = [passed("n", numbers={"err": 0.5}), passed("quiet"), failed("f", "bad\nmore")]
    return collect.of_build(*built((one, usual if checks is None else checks), **changes), branch="main")


def read(folder):
    with store.opened(folder) as history:
        return history


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.jsonl*"))}


def test_a_build_is_three_kinds_of_lines(tmp_path):
    added, notes = store.append(tmp_path, entry())
    history = read(tmp_path)
    (build,), (one,) = history.builds, history.steps
    assert (added, notes, history.notes) == (True, (), ())
    assert (build.outcome, build.steps, build.branch, build.seconds) == (Outcome.FAIL, 1, "main", 90.0)
    assert (one.key, one.step, one.device, one.queue, one.node) == ("a-cpu", "a", "cpu", "amd-cpu", "desk")
    assert (one.ruling, one.passed, one.failed, one.attempts) == (Ruling.REGRESSION, 2, 1, 1)
    assert [(line.id, line.message) for line in history.checks] == [("n", ""), ("f", "bad")]


def test_a_line_of_a_step_has_the_fields_that_others_read(tmp_path):
    store.append(tmp_path, entry())
    line = json.loads((tmp_path / STEPS).read_text())
    assert line["kind"] == "step"
    wanted = "build commit branch time key step area device queue outcome ruling seconds gpu_minutes queue_seconds"
    assert {*wanted.split(), "attempts", "flaky", "schema_version"} <= set(line)


def test_adding_twice_changes_nothing(tmp_path):
    store.append(tmp_path, entry())
    before = bytes_of(tmp_path)
    assert store.append(tmp_path, entry()) == (False, ())
    assert bytes_of(tmp_path) == before


def test_another_verdict_on_the_same_results_is_the_same_build():
    a_plan, recorded, verdict = built((step("a", "x"), [passed()]))
    again = verdict.model_copy(update={"decided": NOW, "why": "decided again"})
    first, second = (collect.of_build(a_plan, recorded, one, branch="") for one in (verdict, again))
    assert first.build.build == second.build.build


def test_gpu_minutes_count_every_attempt_and_every_gpu():
    a_plan, recorded, verdict = built((step("a", "x", gpus=4), [passed()]))
    (attempt,) = recorded.attempts["a-cpu"]
    twice = results.Recorded(recorded.builds, {"a-cpu": (attempt, attempt)})
    found = collect.of_build(a_plan, twice, verdict, branch="")
    assert found.steps[0].gpu_minutes == pytest.approx(2 * 90 / 60 * 4)
    assert found.build.gpu_minutes == found.steps[0].gpu_minutes


def test_the_queue_is_waited_in_from_when_a_step_could_start():
    # Toy steps start at midnight, one second apart, and take 90 s: b could start when a had ended, c at once.
    before = dt.datetime(2026, 11, 20, 23, 59, tzinfo=dt.UTC)
    a_plan, recorded, verdict = built(
        (step("a", "x"), [passed()]), (step("b", "x", depends_on=("a-cpu",)), [passed()]), (step("c", "x"), [passed()]),
        created=before,
    )  # fmt: skip
    waited = [line.queue_seconds for line in collect.of_build(a_plan, recorded, verdict, branch="").steps]
    assert waited == [60.0, 0.0, 62.0]


def test_a_step_that_did_not_run_took_nothing():
    found = collect.of_build(*built((step("a", "x"), [passed()]), (step("b", "x"), None)), branch="")
    lost = found.steps[1]
    assert (lost.outcome, lost.attempts, lost.seconds, lost.queue_seconds) == (Outcome.DID_NOT_RUN, 0, 0.0, 0.0)


def test_a_verdict_of_another_plan_is_refused():
    a_plan, recorded, verdict = built((step("a", "x"), [passed()]))
    with pytest.raises(RecordsError, match="has no answer for b-cpu"):
        collect.of_build(plan(step("a", "x"), step("b", "x")), recorded, verdict, branch="")
    with pytest.raises(RecordsError, match="is of commit cccc"):
        collect.of_build(a_plan.model_copy(update={"commit": "d" * 40}), recorded, verdict, branch="")
    with pytest.raises(RecordsError, match="no job"):
        collect.of_build(a_plan, results.Recorded((), {}), verdict, branch="")


@pytest.mark.parametrize("name", [BUILDS, STEPS, CHECKS])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999], ids=["nothing", "half", "all but the end of the line"])
def test_an_interrupted_write_loses_nothing_and_is_repeated_whole(tmp_path, name, kept):
    """A crash while one of the files was written: the files after it never got theirs."""
    store.append(tmp_path, entry(0))
    before = bytes_of(tmp_path)
    store.append(tmp_path, entry(1))
    order = [CHECKS, STEPS, BUILDS]
    for other in order[order.index(name) + 1 :]:
        (tmp_path / other).write_bytes(before[other])
    after = (tmp_path / name).read_bytes()[len(before[name]) :]
    cut = before[name] + after[: int(len(after) * kept)]
    (tmp_path / name).write_bytes(cut)
    broken = bytes_of(tmp_path)

    history = read(tmp_path)
    assert [line.build for line in history.builds] == [entry(0).build.build]
    assert {line.build for line in (*history.steps, *history.checks)} == {entry(0).build.build}
    assert bytes_of(tmp_path) == broken, "reading changes nothing"

    added, notes = store.append(tmp_path, entry(1))
    assert added
    assert len(notes) == len(history.notes)
    damaged = b"".join(content for file, content in bytes_of(tmp_path).items() if file.endswith(".damaged"))
    for file, content in broken.items():
        assert content[len(before[file]) :].strip() in damaged
    assert [line.build for line in read(tmp_path).builds] == [entry(0).build.build, entry(1).build.build]
    assert len(read(tmp_path).steps) == 2
    assert read(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "Field required"),
        ("nonsense", "Invalid JSON"),
        ("", "Invalid JSON"),
        ('{"kind": "build", "surprise": 1}', "Field required"),
    ],
    ids=["empty object", "no JSON", "empty line", "unknown key"],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line, words):
    store.append(tmp_path, entry(0))
    path = tmp_path / STEPS
    path.write_text(f"{line}\n" + path.read_text())
    before = bytes_of(tmp_path)
    with pytest.raises(RecordsError) as caught:
        store.append(tmp_path, entry(1))
    assert f"{STEPS}:1" in str(caught.value)
    assert words in str(caught.value)
    assert bytes_of(tmp_path) == before
    with pytest.raises(RecordsError), store.opened(tmp_path):
        pass


def test_another_schema_version_is_refused(tmp_path):
    store.append(tmp_path, entry(0))
    path = tmp_path / BUILDS
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(RecordsError, match="schema_version"):
        read(tmp_path)


def test_lines_of_an_unknown_build_among_whole_ones_are_no_interrupted_write(tmp_path):
    store.append(tmp_path, entry(0))
    store.append(tmp_path, entry(1))
    path = tmp_path / BUILDS
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    with pytest.raises(RecordsError, match="stands before whole builds"):
        read(tmp_path)


def test_a_build_that_is_there_twice_is_refused(tmp_path):
    store.append(tmp_path, entry())
    path = tmp_path / BUILDS
    path.write_text(path.read_text() * 2)
    with pytest.raises(RecordsError, match="twice"):
        read(tmp_path)


def test_a_full_disk_is_said_and_the_next_add_repairs_it(tmp_path, monkeypatch):
    real = store._write

    def write(path, lines):
        if path.name == STEPS:
            real(path, lines[:0])
            raise OSError(28, "No space left on device")
        real(path, lines)

    monkeypatch.setattr(store, "_write", write)
    with pytest.raises(RecordsError, match="No space left"):
        store.append(tmp_path, entry())
    monkeypatch.undo()
    added, notes = store.append(tmp_path, entry())
    assert (added, len(notes)) == (True, 1)
    assert len(read(tmp_path).checks) == 2


def test_an_empty_history_says_what_to_do(tmp_path):
    with pytest.raises(NothingSelectedError, match="no build") as caught, store.opened(tmp_path / "none"):
        pass
    assert "hilgate history add" in str(caught.value)


def add_many(folder, numbers):
    for number in numbers:
        store.append(Path(folder), entry(number))


def test_two_writers_and_a_build_that_both_add(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(str(tmp_path), range(start, start + 12))) for start in (0, 6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    history = read(tmp_path)
    assert sorted(line.build for line in history.builds) == sorted(entry(number).build.build for number in range(18))
    assert len(history.steps) == 18
    assert list(tmp_path.glob("*.damaged")) == []


def test_a_held_lock_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    with store.locked(tmp_path, fcntl.LOCK_EX), pytest.raises(MisuseError, match="held"):
        store.append(tmp_path, entry())


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MisuseError, match="cannot be written"):
        store.append(tmp_path / "file", entry())


CASE = {
    "case": "decode bs1 2k", "op": "decode", "ours_us": 12.5, "spread": 0.1, "peer": "theirs", "peer_us": 16.0,
    "gbps": 674.0, "rel_error": 0.003, "trouble": "", "hardware": "a GPU", "commit": "22aa2dee5da4", "goal": "met",
}  # fmt: skip


def recorded_run(folder, *rows):
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(CASE | row) + "\n" for row in rows))
    return path


def test_a_recorded_benchmark_is_a_build_of_one_step(tmp_path):
    wrong = {"case": "prefill", "ours_us": None, "trouble": "ours: WRONG"}
    found = benchmarks.of_benchmarks(recorded_run(tmp_path, {}, wrong), measured=NOW, branch="main")
    assert (found.build.profile, found.build.outcome, found.build.time) == ("benchmarks", Outcome.FAIL, NOW)
    assert (found.steps[0].device, found.steps[0].passed, found.steps[0].failed) == ("a GPU", 1, 1)
    assert found.checks[0].numbers["ours_us"] == 12.5
    assert (found.checks[1].outcome, found.checks[1].message) == (Outcome.FAIL, "ours: WRONG")


def test_the_recorded_run_of_this_repository_can_be_added(tmp_path):
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.jsonl"
    store.append(tmp_path, benchmarks.of_benchmarks(path, measured=NOW, branch=""))
    assert len(read(tmp_path).checks) == len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        ([{}, {"commit": "another-commit"}], "two commits"),
        ([{}, {"ours_us": "fast"}], "run.jsonl:2"),
        ([{"ours_us": float("nan")}], "run.jsonl:1"),
    ],
    ids=["empty", "two commits", "not a number", "nan"],
)
def test_benchmarks_that_are_none_are_refused(tmp_path, rows, words):
    with pytest.raises(RecordsError) as caught:
        benchmarks.of_benchmarks(recorded_run(tmp_path, *rows), measured=NOW, branch="")
    assert words in str(caught.value)


def test_a_missing_file_of_benchmarks_is_refused(tmp_path):
    with pytest.raises(RecordsError, match="no benchmarks"):
        benchmarks.of_benchmarks(tmp_path / "none", measured=NOW, branch="")


def test_a_long_message_is_cut():
    found = entry(checks=[failed("f", "x" * 1000), skipped("s", "needs gfx950")])
    assert len(found.checks[0].message) == collect.MESSAGE_CHARACTERS + 1
    assert found.checks[1].message == "needs gfx950"


def test_a_history_that_nobody_may_write_to_can_be_read(tmp_path, monkeypatch):
    store.append(tmp_path, entry())
    (tmp_path / store.LOCK_FILE).unlink()

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert len(read(tmp_path).builds) == 1
    with pytest.raises(MisuseError, match="Permission denied"):
        store.append(tmp_path, entry(1))
