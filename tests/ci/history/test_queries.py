# SPDX-License-Identifier: Apache-2.0
"""What is asked of a history of three builds, and that duckdb reads nothing else."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from support.builds import NOW, began, built, remember
from support.jobs import failed, passed
from support.plans import step

from hilgate.errors import MisuseError, RecordsError
from hilgate.history import queries, store
from hilgate.model import PLAN_FILE, VERDICT_FILE
from hilgate.run import results
from hilgate.run.results import RESULTS_FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scores and times of one step in three builds; a check flaky in two; another failed in the last."""
    folder = tmp_path_factory.mktemp("history")
    for number, time in enumerate((10.0, 12.0, 22.0)):
        score = {"exact_match": 0.5 + number / 10, "ci_low": 0.4 + number / 10, "ci_high": 0.6 + number / 10, "n": 200}
        before = {"baseline_exact_match": 0.55} if number < 2 else {}
        checks = [
            passed("pocket/accuracy", numbers=score | before),
            passed("decode", numbers={"ours_us": time, "peer_us": 1.0, "spread_us": 1.0}),
            failed("sometimes") if number == 1 else passed("sometimes"),
            failed("broken") if number == 2 else passed("broken"),
        ]
        a_plan, recorded, verdict = built(
            (step("a", "x", device="gfx942", gpus=2), checks), (step("b", "x"), [passed()])
        )
        flaky = ("sometimes",) if number < 2 else ()
        steps = (verdict.steps[0].model_copy(update={"flaky": flaky}), verdict.steps[1])
        recorded = began(recorded, NOW + dt.timedelta(minutes=number))
        store.add(folder, a_plan, recorded, verdict.model_copy(update={"steps": steps}), branch="main")
    return folder


def ask(folder, metric, **narrowed):
    return queries.ask(folder, (metric,), **narrowed)[metric]


def test_accuracy_over_builds_with_its_interval(folder):
    (row,) = ask(folder, "accuracy")
    assert (row["id"], row["device"], row["builds"]) == ("pocket/accuracy", "gfx942", 3)
    assert row["score"] == [0.5, 0.6, 0.7]
    assert (row["low"], row["high"]) == (pytest.approx([0.4, 0.5, 0.6]), pytest.approx([0.6, 0.7, 0.8]))
    assert row["baseline"] == [0.55, 0.55, None]


def test_a_kernel_time_is_compared_with_the_median_of_those_before(folder):
    (row,) = ask(folder, "kernels")
    assert (row["id"], row["number"], row["value"]) == ("decode", "ours_us", [10.0, 12.0, 22.0])
    assert (row["last"], row["before"], row["change"]) == (22.0, 11.0, 1.0)
    (alone,) = ask(folder, "kernels", since=NOW + dt.timedelta(minutes=2))
    assert (alone["builds"], alone["before"], alone["change"]) == (1, None, None)


def test_flakes_count_once_in_builds_in_which_the_step_ran(folder):
    flaky, failing = ask(folder, "flakes")
    assert (flaky["id"], flaky["flaky"], flaky["failed"], flaky["builds"]) == ("sometimes", 2, 0, 3)
    assert flaky["rate"] == pytest.approx(2 / 3)
    assert (failing["id"], failing["flaky"], failing["failed"]) == ("broken", 0, 1)


def test_minutes_of_builds_and_of_a_step(folder):
    builds = ask(folder, "minutes")
    assert [(row["time"], row["branch"], row["steps"]) for row in builds] == [
        (NOW + dt.timedelta(minutes=n), "main", 2) for n in range(3)
    ]
    # a takes 90 s on 2 GPUs and b 91 s, one second later.
    assert [(row["gpu_minutes"], row["wall_minutes"]) for row in builds] == [(3.0, pytest.approx(92 / 60))] * 3
    of_step = ask(folder, "minutes", step="a")
    assert [(row["key"], row["gpu_minutes"], row["step_minutes"]) for row in of_step] == [("a-gfx942", 3.0, 1.5)] * 3


def test_gpu_minutes_count_every_attempt(tmp_path):
    a_plan, recorded, verdict = built((step("a", "x", device="gfx942", gpus=4), [passed()]))
    attempts = {"a-gfx942": recorded.attempts["a-gfx942"] * 2}
    store.add(tmp_path, a_plan, results.Recorded(recorded.builds, attempts), verdict)
    assert ask(tmp_path, "minutes", step="a")[0]["gpu_minutes"] == pytest.approx(2 * 90 / 60 * 4)


def test_the_queue_is_waited_in_from_when_a_step_could_start(tmp_path):
    # Steps start at midnight, one second apart, and take 90 s: b could start when a had ended, c at once.
    before = dt.datetime(2026, 11, 20, 23, 59, tzinfo=dt.UTC)
    a_build = built(
        (step("a", "x"), [passed()]),
        (step("b", "x", depends_on=("a-cpu",)), [passed()]),
        (step("c", "x"), [passed()]),
        (step("d", "x"), None),
        created=before,
    )
    store.add(tmp_path, *a_build)
    waited = [ask(tmp_path, "minutes", step=name)[0]["queue_minutes"] * 60 for name in "abc"]
    assert waited == pytest.approx([60.0, 0.0, 62.0])
    assert ask(tmp_path, "minutes", step="d") == [], "it did not run"


@pytest.mark.parametrize("name", ["a", "a-gfx942"], ids=["declared", "planned"])
def test_a_step_is_named_either_way(folder, name):
    assert len(ask(folder, "accuracy", step=name)) == 1
    assert ask(folder, "accuracy", step="b-cpu") == []
    with pytest.raises(MisuseError, match="did you mean"):
        ask(folder, "accuracy", step="a-gfx943")


def test_builds_before_since_do_not_count(folder):
    assert len(ask(folder, "minutes", since=NOW + dt.timedelta(minutes=1))) == 2


@pytest.mark.parametrize("name", [PLAN_FILE, VERDICT_FILE, RESULTS_FILE])
@pytest.mark.parametrize("content", [b'{"kind"', None], ids=["half a line", "missing"])
def test_a_damaged_build_is_named(tmp_path, name, content):
    build = remember(tmp_path, [passed()])
    (build / name).unlink()
    if content is not None:
        (build / name).write_bytes(content)
    with pytest.raises(RecordsError) as caught:
        queries.ask(tmp_path)
    assert build.name in str(caught.value)


def test_duckdb_loads_no_extension(folder):
    with queries.connect(folder) as connection:
        sql = "select distinct value from duckdb_settings() where name like 'auto%extensions'"
        assert connection.execute(sql).fetchall() == [("false",)]
        with pytest.raises(Exception, match="disabled"):
            connection.execute(f"from read_csv('{folder}/x')")


def test_rows_are_json(folder):
    text = json.dumps(ask(folder, "kernels"), default=dt.datetime.isoformat)
    assert json.loads(text)[0]["time"][0] == "2026-11-21T00:00:00+00:00"


def queued(folder, number, seconds, *, began_at_all=True):
    """Add a build whose step waited so long for amd_mi300_1, or that no agent took."""
    one = step("a", "x", queue="amd_mi300_1")
    a_plan, recorded, verdict = built((one, [passed()] if began_at_all else None), created=NOW)
    start = NOW + dt.timedelta(seconds=seconds)
    for attempts in recorded.attempts.values():
        moved = attempts[0].record.model_copy(update={"started": start})
        recorded.attempts["a-cpu"] = (results.Attempt(moved, attempts[0].checks),)
    store.add(folder, a_plan, began(recorded, NOW + dt.timedelta(minutes=number)), verdict, branch="main")


def test_waiting_is_measured_for_each_queue_and_forecast(tmp_path):
    for number in range(10):
        queued(tmp_path, number, 60 * (number + 1))
    queued(tmp_path, 10, 0, began_at_all=False)
    (row,) = ask(tmp_path, "waiting")
    assert (row["queue"], row["jobs"], row["never"]) == ("amd_mi300_1", 10, 1)
    assert (row["half"], row["nine_of_ten"], row["longest"]) == (pytest.approx(5.5), pytest.approx(9.1), 10.0)
    assert queries.forecast(tmp_path, {"amd_mi300_1", "amd-cpu"}) == [
        "amd_mi300_1: a job waits 5 min 30 s as a rule, 1 of 10 over 9 min 06 s; 1 of the last 11 never began"
    ]


def test_only_the_newest_jobs_of_a_queue_are_a_forecast(tmp_path):
    for number in range(55):
        queued(tmp_path, number, 600 if number < 5 else 60)
    (row,) = ask(tmp_path, "waiting")
    assert (row["jobs"], row["longest"]) == (50, 1.0)


def test_a_history_without_a_build_or_with_a_damaged_one_forecasts_nothing(tmp_path):
    assert queries.forecast(tmp_path, {"amd-cpu"}) == []
    queued(tmp_path, 0, 60)
    assert queries.forecast(tmp_path, {"amd-cpu"}) == []
    (next(tmp_path.glob("*Z-*")) / PLAN_FILE).write_text("{")
    assert queries.forecast(tmp_path, {"amd_mi300_1"}) == []


def grid_of(folder, **narrowed):
    return {row["commit"]: row["cells"] for row in ask(folder, "grid", **narrowed)}


def test_the_grid_has_each_steps_outcome_at_each_commit(tmp_path):
    remember(tmp_path, [passed()], commit="a" * 40)
    remember(tmp_path, [failed()], minute=1, commit="b" * 40)
    remember(tmp_path, [passed()], minute=2, commit="c" * 40, flaky=("sometimes",))
    remember(tmp_path, [passed()], minute=3, commit="d" * 40)
    remember(tmp_path, [failed()], minute=4, commit="d" * 40)
    store.add(tmp_path, *lost(minute=5), branch="main")
    outcomes = {"e": "did not run", "d": "mixed", "c": "mixed", "b": "fail", "a": "pass"}
    found = grid_of(tmp_path)
    assert found == {letter * 40: {"a-cpu": outcome} for letter, outcome in outcomes.items()}
    assert list(found) == [letter * 40 for letter in "edcba"], "newest first"
    assert list(grid_of(tmp_path, since=NOW + dt.timedelta(minutes=4))) == ["e" * 40, "d" * 40]


def lost(minute):
    """A build whose step left nothing."""
    a_plan, recorded, verdict = built((step("a", "x"), None), commit="e" * 40)
    return a_plan, began(recorded, NOW + dt.timedelta(minutes=minute)), verdict


def test_hours_are_summed_by_step_and_week(folder):
    rows = {row["key"]: row for row in ask(folder, "hours")}
    assert set(rows) == {"a-gfx942", "b-cpu"}
    gpu = rows["a-gfx942"]
    assert (gpu["week"], gpu["runs"], gpu["minutes"]) == (dt.date(2026, 11, 16), 3, pytest.approx(3 * 90 / 60))
    assert gpu["gpu_hours"] == pytest.approx(3 * 90 / 3600 * 2), "of two GPUs"
    assert rows["b-cpu"]["gpu_hours"] == 0


@pytest.mark.parametrize(
    ("number", "of", "expected"),
    [(0, 10, (0.0, 0.2775)), (1, 10, (0.0179, 0.4042)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962))],
)
def test_the_interval_of_a_rate_is_wilsons(number, of, expected):
    """The rates that lie 1.96 standard errors of their own away, found by bisection."""
    assert queries.rate_interval(number, of) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("number", "of"), [(0, 0), (2, 1), (-1, 3)])
def test_a_rate_of_nothing_is_refused(number, of):
    with pytest.raises(MisuseError, match="is no rate"):
        queries.rate_interval(number, of)
