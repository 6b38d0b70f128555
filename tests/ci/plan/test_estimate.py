# SPDX-License-Identifier: Apache-2.0
"""How long a plan takes: measured minutes, else declared ones, divided by the cores."""

import pytest
from support.builds import built
from support.declarations import EVERYTHING, declare
from support.declarations import step as declared_step
from support.jobs import failed, passed
from support.plans import plan, step

from hilgate.plan import estimate as estimating
from hilgate.plan.estimate import MINUTES_FILE, estimate, keep_minutes, last_minutes
from hilgate.plan.make import assemble

STEPS = (
    step("short", "x", minutes=1),
    step("wide", "x", minutes=2),
    step("long", "x", minutes=5),
)


@pytest.mark.parametrize(
    ("last", "cores", "minutes"),
    [
        ({}, 1, 8),  # declared
        ({}, 2, 5),  # the longest step, as (1 + 2 + 5) / 2 is less
        ({}, 8, 5),  # never less than the longest step
        ({"short-cpu": 5.0}, 2, 6),  # measured for one
        ({"short-cpu": 3.0, "wide-cpu": 1.0, "long-cpu": 9.0}, 2, 9),
        ({"gone-cpu": 90.0}, 2, 5),
    ],
)
def test_an_estimate_is_the_sum_divided_by_the_cores(last, cores, minutes):
    size = estimate(plan(*STEPS), last, cores=cores)
    assert (size.minutes, size.cores) == (minutes, cores)
    assert size.measured == last.keys() - {"gone-cpu"}


def test_only_what_is_to_run_counts():
    size = estimate(plan(*STEPS), {}, cores=2, keys={"short-cpu"})
    assert (size.minutes, size.each["long-cpu"]) == (1, 5)
    assert estimate(plan(*STEPS), {}, cores=2, keys=()).minutes == 0


def test_a_part_of_a_step_is_not_estimated_by_the_whole():
    part = STEPS[2].part("-k x").redeclared(minutes=0.5)
    size = estimate(plan(part), {"long-cpu": 9.0}, cores=1)
    assert (size.minutes, size.measured) == (0.5, frozenset())


def test_a_plan_of_agents_is_the_sum_of_declared_minutes():
    declared = declare(a=[declared_step("x", minutes=1), declared_step("z", ("gfx942",), minutes=2.5)])
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"))
    assert (size.minutes, size.gpu_minutes, size.measured, size.cores) == (3.5, 2.5, frozenset(), 0)


@pytest.mark.parametrize("damage", [None, "{", '{"schema_version": 2}', '{"schema_version": 1, "minutes": {}}'])
def test_the_last_pass_of_each_whole_step_is_kept(tmp_path, damage):
    """A file that was edited by hand stops nothing and is believed in nothing."""
    (tmp_path / "results").mkdir()
    if damage:
        (tmp_path / MINUTES_FILE).write_text(damage)
    steps = {"s": passed(), "bad": failed(), "t": passed()}
    a_plan, recorded, _ = built(*((step(name, "x"), [check]) for name, check in steps.items()))
    good, bad, other = (recorded.attempts[f"{key}-cpu"][0].record for key in steps)
    keep_minutes(tmp_path, a_plan, [good, bad, other])
    keep_minutes(tmp_path, a_plan, [good.model_copy(update={"seconds": 30.0}), bad])
    assert last_minutes(tmp_path) == {"s-cpu": 0.5, "t-cpu": other.seconds / 60}


@pytest.mark.parametrize(("changes", "profile"), [({"arguments": "-k y"}, "gate"), ({}, "pr")])
def test_parts_and_plans_of_agents_leave_no_minutes(tmp_path, changes, profile):
    (tmp_path / "results").mkdir()
    a_plan, recorded, _ = built((step("s", "x", **changes), [passed()]), profile=profile)
    keep_minutes(tmp_path, a_plan, [recorded.attempts["s-cpu"][0].record])
    assert last_minutes(tmp_path) == {}


def test_minutes_of_another_machine_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    a_plan, recorded, _ = built((step("s", "x"), [passed()]))
    keep_minutes(tmp_path, a_plan, [recorded.attempts["s-cpu"][0].record])
    assert last_minutes(tmp_path)
    monkeypatch.setattr(estimating.socket, "gethostname", lambda: "another")
    assert last_minutes(tmp_path) == {}


def test_without_a_results_folder_nothing_is_written(tmp_path):
    a_plan, recorded, _ = built((step("s", "x"), [passed()]))
    keep_minutes(tmp_path, a_plan, [recorded.attempts["s-cpu"][0].record])
    assert not list(tmp_path.iterdir())
