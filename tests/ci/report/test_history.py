# SPDX-License-Identifier: Apache-2.0
"""The history file: each build is in it whole and once, beside readers and after a crash, and what is asked of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import os
import signal
import sqlite3

import pytest
from support.builds import NOW, began, built, remember, rows_of, three_builds
from support.jobs import failed, passed, skipped
from support.plans import COMMIT, plan, step

from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.plan.jobs import Times, lay_out
from hilgate.report import history
from hilgate.run import results

CHECKS = [passed("n", numbers={"err": 0.5}), failed("f", "bad\nmore"), skipped("s", "no GPU")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.sqlite"


def sql(path, statement, *values):
    """What a statement answers, by a connection of its own."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def began_at(minute):
    return (NOW + dt.timedelta(minutes=minute)).timestamp()


def builds(path):
    return rows_of(path)["builds"]


def test_what_was_recorded_is_read_back(path):
    assert remember(path, CHECKS) == f"20261121T000000Z-{COMMIT[:12]}"
    steps = history.newest_build_of(path, COMMIT)
    assert steps.keys() == {"a-cpu"}
    assert steps["a-cpu"].outcome is Outcome.FAIL
    assert steps["a-cpu"].checks == {
        "n": (Outcome.PASS, ""),
        "f": (Outcome.FAIL, "bad"),
        "s": (Outcome.DID_NOT_RUN, ""),
    }


def test_checks_are_of_the_attempt_that_counts_seconds_of_all(path):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    (last,) = recorded.attempts["a-cpu"]
    first = results.Attempt(last.record.model_copy(update={"seconds": 10.0}), (passed("old"),) * 2)
    history.add(path, a_plan, results.Recorded(recorded.builds, {"a-cpu": (first, last)}), verdict)
    assert history.newest_build_of(path, COMMIT)["a-cpu"].checks.keys() == {"n", "f", "s"}
    (row,) = history.ask(path, ["times"], step="a")["times"]
    assert row["value"] == [100 / 60]


def test_adding_or_judging_twice_changes_nothing(path):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    build, added = history.add(path, a_plan, recorded, verdict)
    before = rows_of(path)
    again = verdict.model_copy(update={"decided": NOW + dt.timedelta(hours=1), "why": "decided again"})
    assert added
    assert history.add(path, a_plan, recorded, again) == (build, False)
    assert rows_of(path) == before


def shards(in_second=None):
    """A build whose step `a` ran in two shards."""
    whole = step("a", "python -m pytest", evidence="junit", shard_minutes=10.0, minutes=20.0)
    first, second = lay_out([whole])
    return built((first, [passed("n", seconds=2.0)]), (second, [in_second or failed("f", "bad"), passed("m")]))


def test_shards_are_one_step_of_the_history(path):
    history.add(path, *shards())
    (row,) = rows_of(path)["steps"]
    assert row[1:3] == ("a-cpu", "a")
    steps = history.newest_build_of(path, COMMIT)
    assert steps["a-cpu"].outcome is Outcome.FAIL
    assert steps["a-cpu"].checks.keys() == {"n", "f", "m"}
    assert history.lately(path, 9).failures == {("a-cpu", "f"): 1}


def test_times_of_passes_and_tests_are_found_for_later_plans(path):
    whole = step("a", "python -m pytest", evidence="junit", shard_minutes=10.0)
    for minute, seconds in enumerate((90.0, 30.0)):
        remember(path, [passed("n", seconds=seconds), passed("m")], minute=minute, of=whole)
    remember(path, CHECKS, minute=3)
    times = history.times(path, ["a-cpu", "b-cpu"])
    assert times.passes == {"a-cpu": [1.5, 1.5]}
    assert times.tests == {"a-cpu": {"n": 30.0, "m": history.LEAST_SECONDS}}
    assert history.times(path, []).tests == {}
    assert history.times(path.with_name("none"), ["a-cpu"]) == Times()
    remember(path, [passed("n")], minute=4, keep=1)
    assert history.times(path, ["a-cpu"]).tests == {}


def test_builds_that_ran_the_same_tests_share_their_list(path):
    for minute in range(3):
        remember(path, CHECKS, minute=minute)
    remember(path, [*CHECKS, passed("another")], minute=3)
    assert len(rows_of(path)["test_lists"]) == 2
    assert len(builds(path)) == 4


def test_an_id_that_stands_twice_counts_once(path):
    remember(path, [failed("f", "first"), failed("f", "second")])
    assert history.newest_build_of(path, COMMIT)["a-cpu"].checks == {"f": (Outcome.FAIL, "first")}
    assert history.lately(path, 9).failures == {("a-cpu", "f"): 1}


def test_an_image_is_found_by_contents_in_the_newest_build(path):
    for minute, (content, digest) in enumerate((("1", "a"), ("1", "b"), ("2", "c"))):
        known = {"images": {"rocm": content * 64}, "digests": {"rocm": "sha256:" + digest * 64}}
        remember(path, CHECKS, minute=minute, **known)
    asked = [number * 64 for number in "123"]
    assert history.images(path, asked) == {"1" * 64: "sha256:" + "b" * 64, "2" * 64: "sha256:" + "c" * 64}
    assert history.images(path.with_name("none"), asked) == {}


def test_the_newest_build_of_a_commit_is_found(path):
    for minute, commit, check in ((3, "a", "late"), (1, "b", "other"), (2, "a", "early")):
        remember(path, [passed(check)], minute=minute, commit=commit * 40)
    assert history.newest_build_of(path, "a" * 40)["a-cpu"].checks.keys() == {"late"}
    assert history.newest_build_of(path, "d" * 40) is None


def test_a_verdict_of_another_plan_is_refused(path):
    a_plan, recorded, verdict = built((step("a", "x"), [passed()]))
    with pytest.raises(RecordsError, match="has no answer for b-cpu"):
        history.add(path, plan(step("a", "x"), step("b", "x")), recorded, verdict)
    with pytest.raises(RecordsError, match="is of commit cccc"):
        history.add(path, a_plan.model_copy(update={"commit": "d" * 40}), recorded, verdict)
    with pytest.raises(RecordsError, match="no job"):
        history.add(path, a_plan, results.Recorded((), {}), verdict)
    assert not path.exists()


def test_failures_are_counted_over_the_newest_builds(path):
    remember(path, [failed("f")])
    for minute in (1, 2):
        remember(path, [failed("f"), passed("p"), passed("sometimes")], flaky=("sometimes",), minute=minute)
    found = history.lately(path, 2)
    assert found.failures == {("a-cpu", "f"): 2, ("a-cpu", "sometimes"): 2}
    assert {name: times for name, times in found.flaky.items() if times} == {("a-cpu", "sometimes"): 2}
    assert found.runs == {"a-cpu": 2}


def jobs_on(path, minute, *rulings, queue="mi300", job=None, **changes):
    """Add a build of as many steps on a queue, with these rulings; `job` is the job that they share."""
    steps = [step(f"s{number}", "x", device="gfx942", queue=queue, job=job) for number in range(len(rulings))]
    a_plan, recorded, verdict = built(*[(one, [passed()]) for one in steps], **{"profile": "pr", **changes})
    decided = [
        one.model_copy(update={"ruling": Ruling(ruling)}) for one, ruling in zip(verdict.steps, rulings, strict=True)
    ]
    recorded = began(recorded, NOW + dt.timedelta(minutes=minute))
    history.add(path, a_plan, recorded, verdict.model_copy(update={"steps": tuple(decided)}))


def test_infrastructure_failures_in_a_row_are_counted_by_queue(path):
    jobs_on(path, 0, "infra", "infra")
    jobs_on(path, 1, "pass", "infra")
    assert history.trouble(path) == {}, "one job of the newest build was none"
    jobs_on(path, 2, "infra", "infra", "infra")
    jobs_on(path, 3, "regression", queue="other")
    jobs_on(path, 4, "infra", queue="far")
    assert history.trouble(path) == {
        "mi300": (3, "2026-11-21 00:02 UTC"),
        "far": (1, "2026-11-21 00:04 UTC"),
    }
    jobs_on(path, 5, "regression")
    assert history.trouble(path).keys() == {"far"}, "it works again"


def test_a_shared_job_is_one_failure_of_its_queue(path):
    jobs_on(path, 0, "infra", "infra", "infra", job="s0-gfx942")
    assert history.trouble(path)["mi300"][0] == 1
    jobs_on(path, 1, "pass", "infra", job="s0-gfx942")
    assert history.trouble(path) == {}


def test_runs_on_a_persons_machine_say_nothing_of_a_queue(path):
    jobs_on(path, 0, "infra", profile="gate")
    assert history.trouble(path) == {}


# One file, many processes


def add_many(path, first):
    a_plan, recorded, verdict = built((step("a", "x"), CHECKS))
    for number in range(12):
        history.add(path, a_plan, began(recorded, NOW + dt.timedelta(minutes=first + number)), verdict)


def processes(*targets_and_arguments):
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=target, args=arguments) for target, *arguments in targets_and_arguments]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return [one.exitcode for one in started]


def test_writers_at_once_add_the_same_builds_once(path):
    assert processes((add_many, path, 0), (add_many, path, 0), (add_many, path, 6)) == [0, 0, 0]
    assert len(builds(path)) == 18
    assert sql(path, "pragma integrity_check") == [("ok",)]
    assert sql(path, "pragma foreign_key_check") == []


def read_often(path):
    for _ in range(40):
        steps = history.newest_build_of(path, COMMIT)
        assert len(steps["a-cpu"].checks) == len(CHECKS), "half a build"


def test_a_reader_beside_a_writer_sees_whole_builds(path):
    remember(path, CHECKS, minute=100)
    assert processes((add_many, path, 0), (read_often, path)) == [0, 0]


def die_while_adding(path):
    """End by a signal after the first row of a build was written."""

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    history._add_contents = kill  # in a process of its own
    remember(path, CHECKS, minute=1)


def test_a_writer_that_is_killed_leaves_no_part_of_a_build(path):
    remember(path, CHECKS)
    before = rows_of(path)
    assert processes((die_while_adding, path)) == [-signal.SIGKILL]
    assert rows_of(path) == before
    remember(path, CHECKS, minute=1)
    assert len(builds(path)) == 2


def test_an_error_while_adding_leaves_no_part_of_a_build(path, monkeypatch):
    remember(path, CHECKS)
    before = rows_of(path)

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(history, "_add_contents", full)
    with pytest.raises(MisuseError, match="disk is full"):
        remember(path, CHECKS, minute=1)
    assert rows_of(path) == before


# Files that are none of ours


def test_an_empty_history_says_what_to_do(path):
    with pytest.raises(NothingSelectedError, match="no build") as caught:
        history.ask(path)
    assert "hilgate history add" in str(caught.value)
    assert not path.exists(), "a reader makes no file"


ODD_FILES = {
    "newer": (
        lambda path: [remember(path, CHECKS), sql(path, "pragma user_version = 99")],
        "a newer hilgate wrote this",
    ),
    "older": (
        lambda path: [remember(path, CHECKS), sql(path, "pragma user_version = 1")],
        "an older hilgate wrote this",
    ),
    "another database": (lambda path: sql(path, "create table x (y)"), "no history of hilgate"),
    "text": (lambda path: path.write_text("plan.json, verdict.json\n" * 50), "not a database"),
    "a folder": (lambda path: path.mkdir(), "this is a folder"),
}


@pytest.mark.parametrize("use", [lambda path: remember(path, CHECKS), history.ask], ids=["add", "show"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_file_that_is_none_of_ours_is_refused_and_stays(path, kind, use):
    make, words = ODD_FILES[kind]
    make(path)
    before = path.is_file() and path.read_bytes()
    with pytest.raises((RecordsError, MisuseError), match=words) as refused:
        use(path)
    assert "history.sqlite" in str(refused.value)
    assert (path.is_file() and path.read_bytes()) == before


def test_the_oldest_builds_are_removed_and_nothing_of_them_stays(path):
    for minute in (3, 1, 2, 0):
        known = {"images": {"rocm": str(minute) * 64}, "digests": {"rocm": "sha256:" + "a" * 64}}
        checks = [failed(f"f{minute}"), passed("decode", numbers={"ours_us": minute})]
        remember(path, checks, minute=minute, keep=2, **known)
    rows = rows_of(path)
    assert sorted(row[2] for row in rows["builds"]) == [began_at(2), began_at(3)]
    unused = {"kernel_lists": 0, "test_seconds": 0}
    assert {name: len(found) for name, found in rows.items()} == dict.fromkeys(rows, 2) | unused
    assert sql(path, "pragma foreign_key_check") == []


def test_a_history_that_is_full_grows_no_more(path):
    sizes = []
    for minute in range(60):
        checks = [failed(f"{minute}-{n}", "x" * 100) for n in range(50)]
        remember(path, checks, minute=minute, keep=5)
        sizes.append(sql(path, "pragma page_count"))
    assert max(sizes[20:]) <= max(sizes[:20])


def test_a_damaged_file_is_an_error_for_show_and_no_images(path):
    for minute in range(20):
        remember(path, [failed(f"f{minute}{n}") for n in range(20)], minute=minute)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(RecordsError, match="damaged"):
        history.ask(path)
    assert history.images(path, ["1" * 64]) == {}


# What is asked


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return three_builds(tmp_path_factory.mktemp("history") / "history.sqlite")


def ask(path, metric, **narrowed):
    return history.ask(path, (metric,), **narrowed)[metric]


def test_accuracy_over_builds_with_its_interval(asked):
    (row,) = ask(asked, "accuracy")
    assert (row["id"], row["device"], row["builds"]) == ("pocket/accuracy", "gfx942", 3)
    assert row["score"] == [0.5, 0.6, 0.7]
    assert (row["low"], row["high"]) == (pytest.approx([0.4, 0.5, 0.6]), pytest.approx([0.6, 0.7, 0.8]))
    assert row["baseline"] == [0.55, 0.55, None]


def test_a_kernel_time_is_compared_with_the_earlier_median(asked):
    (row,) = ask(asked, "kernels")
    assert (row["id"], row["number"], row["value"]) == ("decode", "ours_us", [10.0, 12.0, 22.0])
    assert (row["last"], row["before"], row["change"]) == (22.0, 11.0, 1.0)
    (alone,) = ask(asked, "kernels", since=NOW + dt.timedelta(minutes=2))
    assert (alone["builds"], alone["before"], alone["change"]) == (1, None, None)


def test_flakes_count_once_in_builds_in_which_the_step_ran(asked):
    flaky, failing = ask(asked, "flakes")
    assert (flaky["id"], flaky["flaky"], flaky["failed"], flaky["builds"]) == ("sometimes", 2, 0, 3)
    assert (flaky["low"], flaky["high"]) == history.rate_interval(2, 3)
    assert (failing["id"], failing["flaky"], failing["failed"]) == ("broken", 0, 1)
    assert failing["last"] == NOW + dt.timedelta(minutes=2)


def test_times_of_whole_builds_and_of_steps_the_slowest_first(asked):
    # a takes 90 s on 2 GPUs and b 91 s, one second later.
    whole, b, a = ask(asked, "times")
    assert [row["key"] for row in (whole, b, a)] == ["whole build", "b-cpu", "a-gfx942"]
    assert whole["value"] == pytest.approx([92 / 60] * 3)
    assert (a["builds"], a["last"], a["before"], a["change"]) == (3, 1.5, 1.5, 0.0)
    assert (a["gpu_hours"], b["gpu_hours"]) == (pytest.approx(3 * 90 * 2 / 3600), 0.0)


@pytest.mark.parametrize("name", ["a", "a-gfx942"], ids=["declared", "planned"])
def test_a_step_is_named_either_way(asked, name):
    assert len(ask(asked, "accuracy", step=name)) == 1
    assert [row["key"] for row in ask(asked, "times", step=name)] == ["a-gfx942"]
    assert ask(asked, "accuracy", step="b-cpu") == []
    with pytest.raises(MisuseError, match="did you mean"):
        ask(asked, "accuracy", step="a-gfx943")


def test_builds_before_since_do_not_count(asked):
    later = NOW + dt.timedelta(minutes=1)
    assert ask(asked, "times", since=later)[0]["builds"] == 2
    assert [row["flaky"] for row in ask(asked, "flakes", since=later)] == [1, 0]


def test_the_flake_rate_is_of_builds_that_say_something(path):
    for minute, (check, flaky) in enumerate(
        [(passed("c"), ()), (failed("c"), ("c",)), (failed("c"), ()), (passed("c"), ())]
    ):
        remember(path, [check], minute=minute, flaky=flaky)
    (found,) = history.steadiness(path)
    assert (found.key, found.builds, found.flaky, found.newest) == ("a-cpu", 3, 1, "pass")
    assert found.interval == history.rate_interval(1, 3)
    (last,) = history.steadiness(path, since=NOW + dt.timedelta(minutes=2))
    assert (last.builds, last.flaky) == (1, 0)


def test_builds_that_are_missing_bring_the_upper_bound_below_it():
    for builds, flaky in ((0, 0), (10, 0), (100, 3)):
        one = history.Steadiness("a", builds, flaky, "pass")
        assert history.rate_interval(flaky, builds + one.missing)[1] < history.STEADY
        assert history.rate_interval(flaky, builds + one.missing - 1)[1] >= history.STEADY


@pytest.mark.parametrize(
    ("number", "of", "expected"),
    [(0, 10, (0.0, 0.2775)), (1, 10, (0.0179, 0.4042)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962))],
)
def test_the_interval_of_a_rate_is_wilsons(number, of, expected):
    """The rates that lie 1.96 standard errors of their own away, found by bisection."""
    assert history.rate_interval(number, of) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("number", "of"), [(0, 0), (2, 1), (-1, 3)])
def test_a_rate_of_nothing_is_refused(number, of):
    with pytest.raises(MisuseError, match="is no rate"):
        history.rate_interval(number, of)


def launched(path, kernels, *, minute=0, keep=None, devices=("cpu",), noted=(), **changes):
    """Add a build of a step that noted these kernels on each device; `noted` are other fields of its records."""
    steps = [step(f"a-{device}", "x", key="a", device=device) for device in devices]
    a_plan, recorded, verdict = built(*[(one, [passed("n")]) for one in steps], **changes)
    for one in steps:
        (attempt,) = recorded.attempts[one.key]
        record = attempt.record.model_copy(update={"kernels": kernels, **dict(noted)})
        recorded.attempts[one.key] = (results.Attempt(record, attempt.checks),)
    history.add(path, a_plan, began(recorded, NOW + dt.timedelta(minutes=minute)), verdict, keep=keep)


def test_what_a_step_launched_is_kept_once_and_read_newest_first(path):
    launched(path, ("k.py::one",), commit="a" * 40)
    launched(path, ("k.py::one",), commit="b" * 40, minute=1)
    launched(path, ("k.py::one", "k.py::two"), commit="d" * 40, minute=2)
    assert [(one.commit[0], one.names, one.problem) for one in history.launches(path, "a", "cpu")] == [
        ("d", {"k.py::one", "k.py::two"}, ""),
        ("b", {"k.py::one"}, ""),
        ("a", {"k.py::one"}, ""),
    ]
    assert len(rows_of(path)["kernel_lists"]) == 2
    assert history.launches(path, "a", "gfx942") == history.launches(path, "b", "cpu") == []
    launched(path, ("k.py::one",), commit="e" * 40, minute=3, keep=1)
    assert len(rows_of(path)["kernel_lists"]) == 1


@pytest.mark.parametrize(
    "why",
    [
        {"noted": {"outcome": Outcome.FAIL}},
        {"noted": {"kernels": None}},
        {"noted": {"lacked": ("cpu:amx_tile",)}},
        {"dirty": True},
    ],
    ids=["it failed", "a note was lost", "another machine would launch more", "of no commit"],
)
def test_what_is_no_whole_record_of_a_commit_is_not_kept(path, why):
    launched(path, ("k.py::one",), **why)
    assert history.launches(path, "a", "cpu") == []


def test_what_a_device_lacks_it_lacks_everywhere(path):
    launched(path, (), noted={"lacked": ("device:gfx950",)})
    assert [one.names for one in history.launches(path, "a", "cpu")] == [set()]


@pytest.mark.parametrize("text", ["x\x9c", "not zlib"])
def test_a_record_that_is_cut_off_says_so(path, text):
    launched(path, ("k.py::one",), commit="a" * 40)
    launched(path, ("k.py::two",), commit="b" * 40, minute=1)
    sql(path, "update kernel_lists set names = ? where id = 2", text.encode("latin-1"))
    assert [(one.commit[0], one.problem) for one in history.launches(path, "a", "cpu")] == [
        ("b", "is cut off"),
        ("a", ""),
    ]


def noted(recorded, kernels):
    """The same records, in which each step has launched these, by its key."""
    attempts = {
        key: tuple(results.Attempt(one.record.model_copy(update={"kernels": kernels[key]}), one.checks) for one in each)
        for key, each in recorded.attempts.items()
    }
    return results.Recorded(recorded.builds, attempts)


def test_the_shards_of_a_build_count_together_or_not_at_all(path):
    a_plan, recorded, verdict = shards(passed("f"))
    first, second = recorded.attempts
    verdict = verdict.model_copy(
        update={"steps": tuple(one.model_copy(update={"outcome": Outcome.PASS}) for one in verdict.steps)}
    )
    history.add(path, a_plan, noted(recorded, {first: ("k.py::one",), second: ("k.py::two",)}), verdict)
    assert [one.names for one in history.launches(path, "a", "cpu")] == [{"k.py::one", "k.py::two"}]
    later = began(noted(recorded, {first: ("k.py::one",), second: None}), NOW + dt.timedelta(minutes=1))
    history.add(path, a_plan, later, verdict)
    assert len(builds(path)) == 2
    assert len(history.launches(path, "a", "cpu")) == 1


def test_of_many_builds_only_the_newest_are_looked_at(path, monkeypatch):
    monkeypatch.setattr(history, "MOST_RECORDS", 2)
    for minute in range(3):
        launched(path, (), minute=minute, commit=str(minute) * 40)
    assert [one.commit[0] for one in history.launches(path, "a", "cpu")] == ["2", "1"]
