# SPDX-License-Identifier: Apache-2.0
"""The order in which steps start, and which run side by side."""

import pytest
from support.plans import step

from hilgate.run.schedule import chain_minutes, fits, in_order

STEPS = (
    step("quick", "x", minutes=0.1),
    step("head", "x", minutes=1),
    step("tail", "x", minutes=5, depends_on=("head-cpu",)),
    step("wide", "x", minutes=2),
    step("short", "x", minutes=3),
)
QUICK, HEAD, TAIL, WIDE, SHORT = STEPS


def test_the_longest_chain_of_dependants_begins_with_each_step():
    minutes = {"quick-cpu": 0.1, "head-cpu": 6, "tail-cpu": 5, "wide-cpu": 2, "short-cpu": 3}
    assert chain_minutes(STEPS) == minutes


def test_a_quick_step_goes_first_and_then_the_longest_chain():
    assert in_order(STEPS) == ["quick-cpu", "head-cpu", "tail-cpu", "short-cpu", "wide-cpu"]
    assert in_order(STEPS[2:3]) == ["tail-cpu"], "what it needs has passed already"


ON_A_GPU = step("a", "x", device="cuda"), step("b", "x", device="cuda")


@pytest.mark.parametrize(
    ("one", "running", "cores", "fit"),
    [
        (SHORT, [], 1, True),
        (SHORT, [HEAD], 1, False),
        (SHORT, [HEAD], 2, True),
        (WIDE, [HEAD, TAIL], 2, False),
        (WIDE, [HEAD, TAIL], 3, True),
        (ON_A_GPU[0], [ON_A_GPU[1]], 8, False),  # one GPU
        (ON_A_GPU[0], [HEAD], 8, True),
    ],
)
def test_a_step_starts_where_a_core_and_its_gpu_are_free(one, running, cores, fit):
    assert fits(one, running, cores) is fit
