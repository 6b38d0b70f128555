# SPDX-License-Identifier: Apache-2.0
"""Measured minutes: the median of the last passes, and nothing that is no pass."""

import pytest
from support.builds import NOW, built, remember
from support.declarations import EVERYTHING, declare
from support.declarations import step as declared_step
from support.jobs import failed, passed
from support.plans import step

from hilgate.errors import MisuseError, RecordsError
from hilgate.plan.estimate import PASSES, estimate, longest_chains, measured
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
    assert size.measured == 0


def test_estimate_takes_what_was_measured():
    declared = declare(a=[declared_step("x", minutes=1), declared_step("z", ("gfx942",), minutes=2.5)])
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"), {"x-cpu": 4.0, "other-cpu": 9.0})
    assert (size.minutes, size.chain, size.measured) == (6.5, ("x-cpu",), 1)


def test_the_longest_chain_of_dependants_begins_with_each_step():
    steps = (step("short", "x"), step("head", "x"), step("tail", "x", depends_on=("head-cpu",)))
    chains = longest_chains(steps, {"short-cpu": 3, "head-cpu": 1, "tail-cpu": 5})
    assert chains == {
        "short-cpu": (3, ("short-cpu",)),
        "head-cpu": (6, ("head-cpu", "tail-cpu")),
        "tail-cpu": (5, ("tail-cpu",)),
    }
