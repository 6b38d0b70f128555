# SPDX-License-Identifier: Apache-2.0
"""Whether a step can run here: one answer, for the plan and for the doctor."""

import pytest
from support.declarations import EVERYTHING, LAPTOP, MI300X, change, declare, reasons, step

from hilgate.errors import CannotRunHereError
from hilgate.model.declaration import Agents
from hilgate.plan.expand import Target, Wanted, expand, readiness
from hilgate.plan.make import assemble

AREA = [
    step("anywhere", ("cpu", "gfx942")),
    step("gpu", ("gfx942", "gfx950")),
    step("engine", packages=("torch", "vllm")),
]
DECLARED = declare(Agents(devices={"cpu": {}, "gfx942": {}, "gfx950": {}}, queues={}), a=AREA)


def ready(machine, declared=DECLARED, absent=()):
    return readiness(declared, Target(machine, frozenset(absent)))[0]


def test_partly_with_every_obstacle_named():
    found = ready(LAPTOP)
    assert (found.answer, found.ready, found.steps, found.on) == ("partly", 1, 3, ("cpu",))
    assert found.obstacles == ("needs gfx942 or gfx950", "vllm not installed")


def test_complete_machine():
    machine = LAPTOP.model_copy(update={"device": "gfx942", "gpus": 1, "distributions": {"torch": "2", "vllm": "0"}})
    found = ready(machine)
    assert (found.answer, found.on, found.obstacles) == ("yes", ("gfx942", "cpu"), ())


def test_nothing_runs():
    assert ready(LAPTOP, declare(a=AREA[1:])).answer == "no"


STEPS = {
    "on two GPUs": step("s", ("gfx942",), gpus=2),
    "on two GPUs or the cpu": step("s", ("gfx942", "cpu"), gpus=2),
    "with a package": step("s", ("gfx942",), packages=("vllm",)),
    "with a package on two GPUs": step("s", ("gfx942",), gpus=2, packages=("vllm",)),
    "with a tool": step("s", ("cpu",), tools=("buildah",)),
    "with what is there": step("s", ("gfx942", "cpu"), packages=("torch",)),
}
MACHINES = {"laptop": LAPTOP, "one GPU": MI300X.model_copy(update={"gpus": 1}), "eight GPUs": MI300X}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", MACHINES)
def test_doctor_and_plan_agree(name, kind):
    """`doctor` and `plan` agree on what can run here, and both say why something cannot."""
    declared, target = declare(a=[STEPS[kind]]), Target(MACHINES[name], frozenset({"buildah"}))
    (found,) = readiness(declared, target)
    steps, omissions = expand(declared, {"s": Wanted("asked for")}, target, otherwise={})
    said = [one.reason for one in (*steps, *omissions)]
    words = [obstacle.removesuffix(" not installed").removeprefix("needs ") for obstacle in found.obstacles]
    assert all(any(word in reason for reason in said) for word in words)
    assert (found.answer == "yes") is (bool(steps) and "will not run here" not in said[0])
    assert found.on == (tuple(step.device for step in steps) if found.answer == "yes" else ())


def test_one_gpu_is_not_two():
    two = declare(a=[STEPS["on two GPUs"]])
    assert ready(MACHINES["one GPU"], two).obstacles == ("needs 2 x gfx942",)
    assert ready(MI300X, two).answer == "yes"
    with pytest.raises(CannotRunHereError, match="nothing of s can be planned") as refused:
        assemble(two, change(base=None), MACHINES["one GPU"], profile="gate", select=("s",))
    assert "needs 2 x gfx942; this machine has 1" in refused.value.where


def test_the_other_device_is_omitted_with_the_stronger_evidence_named():
    plan = assemble(declare(a=[STEPS["with what is there"]]), EVERYTHING, MI300X, profile="gate")
    assert reasons(plan) == {"s-cpu": "runs on gfx942 here, which is the stronger evidence"}
