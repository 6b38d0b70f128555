# SPDX-License-Identifier: Apache-2.0
"""Which steps share a Buildkite job."""

from __future__ import annotations

import pytest
from support.declarations import change
from support.pipelines import DECLARED
from support.plans import changed, step

from hilgate.plan.jobs import JOB_MINUTES, SMALL_MINUTES, shared
from hilgate.plan.make import assemble


def small(name: str, minutes: float = 1.0, **changes: object):
    values = {"key": f"{name}-gfx942", "device": "gfx942", "queue": "q", "image": "rocm"}
    return step(name, "true", minutes=minutes, **(values | changes))


def jobs_of(*steps, minutes=None):
    jobs: dict[str, list[str]] = {}
    for one in shared(steps, minutes or {}):
        jobs.setdefault(one.job_key, []).append(one.step.key)
    return list(jobs.values())


def test_small_steps_share_a_job_up_to_its_bound():
    assert jobs_of(*(small(name, 2.9) for name in "abcdefg")) == [list("abcd"), list("efg")]
    assert jobs_of(small("a"), small("b", SMALL_MINUTES), small("c")) == [["a", "c"], ["b"]]


def test_measured_minutes_go_before_declared_ones():
    assert jobs_of(small("a", 20), small("b"), minutes={"a-gfx942": 0.5}) == [["a", "b"]]
    assert jobs_of(small("a"), small("b"), minutes={"a-gfx942": 20.0}) == [["a"], ["b"]]


@pytest.mark.parametrize(
    "unlike",
    [
        {"queue": "other"},
        {"image": "other"},
        {"image": None},
        {"gpus": 2},
        {"secrets": ("TOKEN",)},
        {"depends_on": ("c-gfx942",)},
        {"provides": "rocm"},
        {"report_only": True},
    ],
    ids=str,
)
def test_unlike_steps_share_no_job(unlike):
    assert len(jobs_of(small("a"), small("b"))) == 1
    assert len(jobs_of(small("a"), changed(small("b"), **unlike))) == 2


def test_steps_in_pods_share_nothing():
    pods = [small("a"), small("b"), small("c", queue="p"), small("d", queue="p")]
    assert [one.job for one in shared(pods, {}, {"p"})] == ["a-gfx942", "a-gfx942", None, None]


def test_steps_that_others_need_share_a_job_where_the_same_ones_need_them():
    first, second = ("a-gfx942", "b-gfx942"), ("a-gfx942", "b-gfx942", "c-gfx942")
    needs = small("a"), small("b"), small("c")
    found = jobs_of(*needs, small("d", depends_on=first), small("e", depends_on=second))
    assert found == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_full_plan_has_a_third_of_the_jobs_that_it_has_steps():
    plan = assemble(DECLARED, change("pyproject.toml", base="main"), None, profile="pr")
    jobs = plan.jobs()
    assert len(jobs) * 2 < len(plan.steps)
    for steps in jobs.values():
        assert len(steps) == 1 or sum(one.step.minutes for one in steps) <= JOB_MINUTES
    on_gpus = [steps for steps in jobs.values() if steps[0].gpus]
    assert len(on_gpus) < sum(step.gpus > 0 for step in plan.steps)
