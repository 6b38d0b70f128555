# SPDX-License-Identifier: Apache-2.0
"""The simulation of a fleet: who waits how long, and which jobs a plan has."""

from __future__ import annotations

import random

import pytest

from ci import simulate
from ci.simulate import DAY, GATE, Job

OWN = simulate.JOB_MINUTES
PLANS, RECHECKS, JUDGES = (simulate.GATE_MINUTES[name] + OWN for name in ("plan", "recheck", "verdict"))


def test_jobs_wait_for_agents_and_for_what_they_need():
    """Two builds at once, one agent of the queue: image, then kernels."""
    image, kernels = Job("image", "gpu", 10.0, 0), Job("kernels", "gpu", 5.0, 2, frozenset({"image"}))
    day = simulate.Fleet([(0.0, [image, kernels])] * 2, {GATE: 2, "gpu": 1}, 0.0).run()
    assert (day.jobs, day.gpu_minutes) == (2 * 5, 2 * 5.0 * 2)
    assert sorted(day.waited["gpu"]) == [0.0, 5.0, 10.0, 10.0]  # image, image, kernels, kernels
    first, second = PLANS + 25 + RECHECKS + JUDGES, PLANS + 30 + RECHECKS + JUDGES
    assert day.took == pytest.approx([first, second])


def test_builds_before_the_reported_day_are_not_reported():
    day = simulate.Fleet([(0.0, []), (DAY, [Job("a", "cpu", 1.0, 0)])], {GATE: 1, "cpu": 1}, DAY).run()
    assert len(day.took) == 1
    assert day.waited["cpu"] == [0.0]


def test_gate_agents_suffice_for_nineteen_of_twenty_jobs():
    builds = [(at, [Job("a", "cpu", 1.0, 0)]) for at in simulate.arrivals(1000, 2, random.Random(0))]
    number = simulate.gate_agents(builds)
    busy = 1000 * (PLANS + RECHECKS + JUDGES) / DAY
    assert busy < number < 4 * busy
