# SPDX-License-Identifier: Apache-2.0
"""Measured minutes: the median of the last passes, and nothing that is no pass."""

import pytest
from support.builds import NOW, built, remember
from support.declarations import EVERYTHING, declare
from support.declarations import step as declared_step
from support.jobs import failed, passed
from support.plans import ENVIRONMENT, plan, step

from hilgate.errors import MisuseError, RecordsError
from hilgate.model.declaration import Smoke
from hilgate.plan import estimate as estimating
from hilgate.plan.estimate import (
    PASSES,
    Passed,
    Passes,
    estimate,
    forecast,
    in_order,
    longest_chains,
    measured,
    size_of,
)
from hilgate.plan.make import assemble


def verdicts(folder, *minutes):
    """A history of builds in which step s took these minutes, the oldest first; None is a failure."""
    for number, taken in enumerate(minutes):
        _, _, verdict = built((step("s", "x"), [passed() if taken else failed()]))
        steps = tuple(one.model_copy(update={"seconds": 60.0 * (taken or 99)}) for one in verdict.steps)
        build = folder / f"{NOW:%Y%m%d}T{number:06}Z-{number:012}-0"
        build.mkdir(parents=True)
        (build / "verdict.json").write_text(verdict.model_copy(update={"steps": steps}).model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("minutes", "median"),
    [((1, None, 3), 2.0), ((10,) * 50 + (1,) * PASSES, 1.0), ((1,) * 5 + (100,), 1.0)],
    ids=["only passes", "the last passes", "one slow node"],
)
def test_the_median_of_the_last_passes_counts(tmp_path, minutes, median):
    assert measured(tmp_path, verdicts(tmp_path / "history", *minutes)) == {"s-cpu": median}


def test_a_build_of_the_history_is_measured(tmp_path):
    remember(tmp_path / "results" / "history", [passed()])
    assert measured(tmp_path) == {"a-cpu": 1.5}


def test_a_damaged_verdict_is_named(tmp_path):
    path = next(verdicts(tmp_path, 1).glob("*/verdict.json"))
    path.write_text("{")
    with pytest.raises(RecordsError) as caught:
        measured(tmp_path, tmp_path)
    assert caught.value.where == str(path)


def test_without_a_history_nothing_is_measured_but_a_named_one_must_exist(tmp_path):
    assert measured(tmp_path) == {}
    with pytest.raises(MisuseError, match="no such history"):
        measured(tmp_path, tmp_path / "absent")


def test_estimate_sums_and_finds_the_longest_chain():
    declared = declare(
        a=[
            declared_step("x", minutes=1),
            declared_step("y", minutes=2, needs=("x",)),
            declared_step("z", ("gfx942",), minutes=2.5),
        ]
    )
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"))
    assert (size.minutes, size.chain, size.chain_minutes, size.gpu_minutes) == (5.5, ("x-cpu", "y-cpu"), 3, 2.5)
    assert size.measured == frozenset()


def test_estimate_takes_what_was_measured():
    declared = declare(a=[declared_step("x", minutes=1), declared_step("z", ("gfx942",), minutes=2.5)])
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"), {"x-cpu": 4.0, "other-cpu": 9.0})
    assert (size.minutes, size.chain, size.measured) == (6.5, ("x-cpu",), {"x-cpu"})


def test_the_longest_chain_of_dependants_begins_with_each_step():
    steps = (step("short", "x"), step("head", "x"), step("tail", "x", depends_on=("head-cpu",)))
    chains = longest_chains(steps, {"short-cpu": 3, "head-cpu": 1, "tail-cpu": 5})
    assert chains == {
        "short-cpu": (3, ("short-cpu",)),
        "head-cpu": (6, ("head-cpu", "tail-cpu")),
        "tail-cpu": (5, ("tail-cpu",)),
    }


LONG = (
    step("quick", "x", minutes=0.1),
    step("head", "x", minutes=1),
    step("tail", "x", minutes=5, depends_on=("head-cpu",)),
    step("wide", "x", minutes=2, cores=2),
    step("short", "x", minutes=3),
)


def test_a_quick_step_goes_first_and_then_the_longest_chain():
    assert in_order(LONG) == ["quick-cpu", "head-cpu", "tail-cpu", "short-cpu", "wide-cpu"]
    assert in_order(LONG[2:3]) == ["tail-cpu"], "what it needs has passed already"


@pytest.mark.parametrize(
    ("steps", "cores", "minutes"),
    [
        (LONG[:2], 2, 1),  # side by side
        (LONG[:2], 1, 1.1),  # one after the other
        (LONG[:3], 8, 6),  # a chain has no use for cores
        (LONG, 1, 11.1),  # what wants more than there are runs alone
        (LONG, 2, 8),  # quick, then short, beside head and tail; wide when both cores are free
        (LONG, 4, 6),
        ((step("a", "x", device="cuda", minutes=2), step("b", "x", device="cuda", minutes=3)), 8, 5),  # one GPU
        ((), 2, 0),
    ],
)
def test_a_forecast_is_the_end_of_the_schedule(steps, cores, minutes):
    assert forecast(steps, {one.key: one.step.minutes for one in steps}, cores) == pytest.approx(minutes)


def passes(folder, *taken, key="head-cpu", command="x", host=ENVIRONMENT.host, cores=2, declared=1.0):
    """Passes of one step that took these minutes."""
    found = [
        Passed(key=key, command=command, host=host, cores=cores, declared=declared, minutes=minutes, ended=number)
        for number, minutes in enumerate(taken)
    ]
    Passes(passes=tuple(found)).save(folder / "results" / "passes.json")


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr(estimating.socket, "gethostname", lambda: ENVIRONMENT.host)
    monkeypatch.setattr(estimating, "slowness", lambda: 3.0)
    monkeypatch.setattr(estimating, "detect", lambda: ENVIRONMENT)


@pytest.mark.parametrize(
    ("kept", "of", "minutes"),
    [
        (None, 0, (3, 15)),  # a first run: declared minutes at the pace of this machine
        ({"host": "another"}, 0, (3, 15)),
        ({"cores": 64}, 0, (3, 15)),
        ({}, 1, (4, 20)),  # measured, and the other at the pace that it shows
        ({"command": "x -k y"}, 0, (4, 20)),  # a part of it tells the pace and not the minutes
    ],
)
@pytest.mark.usefixtures("local")
def test_a_desk_forecasts_by_what_it_measured_itself(tmp_path, kept, of, minutes):
    if kept is not None:
        passes(tmp_path, 4.0, 9.0, 2.0, **kept)
    size = size_of(plan(*LONG[1:3]), tmp_path)
    assert (len(size.measured), size.cores, tuple(size.each.values())) == (of, 2, minutes)
    assert size.wall == sum(minutes)
    assert size_of(plan(*LONG[1:3]), tmp_path, keys=frozenset({"tail-cpu"})).wall == minutes[1]


@pytest.mark.parametrize("damage", [None, "{", '{"schema_version": 2}', '{"schema_version": 1, "passes": [{}]}'])
@pytest.mark.usefixtures("local")
def test_passes_are_kept_once_and_the_last_few_only_whatever_was_there(tmp_path, damage):
    """A file that was edited by hand stops nothing and is believed in nothing."""
    (tmp_path / "results").mkdir()
    if damage:
        (tmp_path / "results" / "passes.json").write_text(damage)
    a_plan, recorded, _ = built((step("s", "x", minutes=2), [passed()]), (step("bad", "x"), [failed()]))
    (good,), (bad,) = (recorded.attempts[key] for key in ("s-cpu", "bad-cpu"))
    later = [good.record.model_copy(update={"seconds": 90.0 + number}) for number in range(9)]
    for records in ([good.record, bad.record], [good.record], later):
        estimating.remember(tmp_path, a_plan, records)
    kept = Passes.read(tmp_path).passes
    assert [(one.key, one.declared, round(60 * one.minutes)) for one in kept] == [
        ("s-cpu", 2, 90 + number) for number in range(4, 9)
    ]


@pytest.mark.parametrize(
    ("changes", "profile", "kept"),
    [
        ({}, "gate", 1),
        ({"arguments": "-k y"}, "gate", 0),
        ({"arguments": "-k y", "smoke": Smoke(arguments="-k y", minimum=1, minutes=1)}, "gate", 1),
        ({"arguments": "-k y", "smoke": Smoke(arguments="-k y", minimum=1, minutes=1)}, "smoke", 1),
        ({}, "pr", 0),
    ],
)
@pytest.mark.usefixtures("local")
def test_a_part_that_was_run_by_hand_tells_no_pace(tmp_path, changes, profile, kept):
    (tmp_path / "results").mkdir()
    a_plan, recorded, _ = built((step("s", "x", **changes), [passed()]), profile=profile)
    estimating.remember(tmp_path, a_plan, [recorded.attempts["s-cpu"][0].record])
    assert len(Passes.read(tmp_path).passes) == kept


def test_a_pace_is_measured_and_passes_without_a_results_folder_are_not_written(tmp_path):
    assert 0 < estimating.slowness() < 1000
    estimating.remember(tmp_path, plan(), [])
    assert not list(tmp_path.iterdir())


def test_the_pace_is_the_least_of_three_samples(monkeypatch):
    """What else runs for a moment makes a sample longer and none shorter."""
    ticks = iter([0.0, 9.0, 10.0, 10.22, 20.0, 21.0])
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: next(ticks))
    assert estimating.slowness.__wrapped__() == pytest.approx(2.0)
    assert list(ticks) == []


@pytest.mark.parametrize(
    ("taken", "profile", "ci", "stretched"),
    [
        ((), "gate", "", 3.0),
        ((2.0,), "gate", "", 3.0),  # quicker before than now
        ((4.5, 4.0, 9.0), "smoke", "", 4.5),  # what passes show
        ((), "gate", "true", 1.0),
        ((4.5,), "pr", "", 1.0),
        ((4.5,), "nightly", "", 1.0),
    ],
)
@pytest.mark.usefixtures("local")
def test_timeouts_stretch_with_the_pace_and_never_in_ci(tmp_path, monkeypatch, taken, profile, ci, stretched):
    monkeypatch.setenv("CI", ci)
    passes(tmp_path, *taken)
    assert estimating.stretch(plan(LONG[1], profile=profile), tmp_path, 2) == stretched


def test_timeouts_never_shrink(tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "")
    monkeypatch.setattr(estimating, "slowness", lambda: 0.2)
    assert estimating.stretch(plan(LONG[1]), tmp_path, 2) == 1.0
