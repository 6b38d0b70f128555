# SPDX-License-Identifier: Apache-2.0
"""Which steps share a Buildkite job, which are split into several, and when they are ended."""

from __future__ import annotations

import json

import pytest
from support.declarations import change
from support.pipelines import DECLARED
from support.plans import changed, plan, step

from agent_host import job
from hilgate.plan.jobs import JOB_MINUTES, LEAST_PASSES, LEAST_TIMEOUT, SMALL_MINUTES, Times, lay_out
from hilgate.plan.make import assemble


def small(name: str, minutes: float = 1.0, **changes: object):
    values = {"key": f"{name}-gfx942", "device": "gfx942", "queue": "q", "image": "rocm"}
    return step(name, str(changes.pop("command", "true")), minutes=minutes, **(values | changes))


def jobs_of(*steps, minutes=None):
    jobs: dict[str, list[str]] = {}
    for one in lay_out(steps, Times(passes={key: [took] for key, took in (minutes or {}).items()})):
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
    assert [one.job for one in lay_out(pods, pods={"p"})] == ["a-gfx942", "a-gfx942", None, None]


def test_steps_with_the_same_dependants_share_a_job():
    first, second = ("a-gfx942", "b-gfx942"), ("a-gfx942", "b-gfx942", "c-gfx942")
    needs = small("a"), small("b"), small("c")
    found = jobs_of(*needs, small("d", depends_on=first), small("e", depends_on=second))
    assert found == [["a", "b"], ["c"], ["d"], ["e"]]


def test_steps_with_other_needs_share_no_job():
    assert jobs_of(small("c", 5), small("a"), small("b", depends_on=("c-gfx942",))) == [["c"], ["a"], ["b"]]


def long(minutes: float = 30.0, **changes: object):
    return small("long", minutes, command="python -m pytest tests/t", evidence="junit", shard_minutes=10.0, **changes)


@pytest.mark.parametrize(
    ("minutes", "times", "shards"),
    [
        (30.0, Times(), 3),
        (30.1, Times(), 4),
        (10.0, Times(), 1),
        (5.0, Times(passes={"long-gfx942": [25.0, 20.0, 30.0]}), 3),
        (30.0, Times(passes={"long-gfx942": [9.0]}), 1),
        (30.0, Times(tests={"long-gfx942": {"a": 1.0, "b": 2.0}}), 2),
        (180.0, Times(), 16),
    ],
)
def test_a_long_step_is_split_into_jobs_by_what_it_usually_takes(minutes, times, shards):
    steps = lay_out([long(minutes, timeout_minutes=180), small("later", depends_on=("long-gfx942",))], times)
    keys = [f"long-gfx942-{n}of{shards}" for n in range(1, shards + 1)] if shards > 1 else ["long-gfx942"]
    assert [one.key for one in steps] == [*keys, "later-gfx942"]
    assert steps[-1].depends_on == tuple(keys)
    assert all(one.whole == "long-gfx942" and one.job is None for one in steps[:-1])
    if shards > 1:
        assert steps[0].label.endswith(f", 1 of {shards}")
        assert "pytest-split" in steps[0].step.packages


def test_hosts_find_the_planned_keys_and_jobs_of_steps():
    steps = lay_out([long(timeout_minutes=180), small("a"), small("b")])
    read = json.loads(plan(*steps, profile="pr", images={"rocm": "d" * 64}).model_dump_json())["steps"]
    assert [job.key_of(one) for one in read] == [one.key for one in steps]
    assert [job.job_of(one) for one in read] == [one.job_key for one in steps]


@pytest.mark.parametrize(
    ("passes", "minutes"),
    [
        ([1.0] * (LEAST_PASSES - 1), 60),
        ([1.0] * LEAST_PASSES, LEAST_TIMEOUT),
        ([4.0] * 40, 16),
        ([4.0] * 19 + [6.0], 17),
        ([20.0] * 40, 60),
        ([14.9] * 40, 60),
    ],
    ids=["too few", "floor", "four times", "most passes", "never longer", "as declared"],
)
def test_a_timeout_follows_measured_times_below_the_declared(passes, minutes):
    (step,) = lay_out([small("a", timeout_minutes=60)], Times(passes={"a-gfx942": passes}))
    assert step.step.timeout_minutes == minutes
    assert (f"; ended after {minutes} min, as 95 % of {len(passes)} passes took up to" in step.reason) == (minutes < 60)


def test_a_full_plan_has_far_fewer_jobs_than_steps():
    plan = assemble(DECLARED, change("pyproject.toml", base="main"), None, profile="pr")
    jobs = plan.jobs()
    assert len(jobs) < 0.6 * len(plan.steps)
    for steps in jobs.values():
        assert len(steps) == 1 or sum(one.step.minutes for one in steps) <= JOB_MINUTES
    on_gpus = [steps for steps in jobs.values() if steps[0].gpus]
    assert len(on_gpus) < sum(step.gpus > 0 for step in plan.steps)
