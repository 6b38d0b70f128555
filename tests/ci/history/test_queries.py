"""From a judged build to the lines of the history: one build once, and what each line says."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from support.builds import built, bytes_of, entry, failed, passed, remembered, skipped
from support.plans import plan, step

from hilgate.errors import RecordsError
from hilgate.history import collect, store
from hilgate.history.store import STEPS
from hilgate.model import Outcome, Ruling
from hilgate.run import results

NOW = dt.datetime(2026, 11, 21, 7, tzinfo=dt.UTC)


def test_a_build_is_three_kinds_of_lines(tmp_path):
    added, notes = store.append(tmp_path, entry())
    history = remembered(tmp_path)
    (build,), (one,) = history.builds, history.steps
    assert (added, notes, history.notes) == (True, (), ())
    assert (build.outcome, build.steps, build.branch, build.seconds) == (Outcome.FAIL, 1, "main", 90.0)
    assert (one.key, one.step, one.device, one.queue, one.node) == ("a-cpu", "a", "cpu", "amd-cpu", "desk")
    assert (one.ruling, one.passed, one.failed, one.attempts) == (Ruling.REGRESSION, 2, 1, 1)
    assert [(line.id, line.message) for line in history.checks] == [("n", ""), ("f", "bad")]


def test_a_line_of_a_step_has_the_fields_that_others_remembered(tmp_path):
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
    a_plan, recorded, verdict = built((step("a", "x", device="gfx942", gpus=4), [passed()]))
    (attempt,) = recorded.attempts["a-gfx942"]
    twice = results.Recorded(recorded.builds, {"a-gfx942": (attempt, attempt)})
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


def test_a_long_message_is_cut():
    found = entry(checks=[failed("f", "x" * 1000), skipped("s", "needs gfx950")])
    assert len(found.checks[0].message) == collect.MESSAGE_CHARACTERS + 1
    assert found.checks[1].message == "needs gfx950"
