# SPDX-License-Identifier: Apache-2.0
"""Whether a step can run here: one answer, for the plan and for the doctor."""

import pytest
from support.declarations import EVERYTHING, LAPTOP, MI300X, declare, reasons, step

from hilgate.model.declaration import Agents
from hilgate.plan.expand import Target, expand, readiness
from hilgate.plan.make import ChangeFacts, assemble, queues_out
from hilgate.plan.select import Chosen, Wanted

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
    steps, omissions = expand(declared, Chosen({"s": Wanted("asked for")}), target)
    said = [one.reason for one in (*steps, *omissions)]
    words = [obstacle.removesuffix(" not installed").removeprefix("needs ") for obstacle in found.obstacles]
    assert all(any(word in reason for reason in said) for word in words)
    assert (found.answer == "yes") is (bool(steps) and "will not run here" not in said[0])
    assert found.on == (tuple(step.device for step in steps) if found.answer == "yes" else ())


FLEET = Agents(
    devices={"cpu": {}, "gfx942": {}, "gfx950": {}},
    queues={
        "cpus": {"device": "cpu", "gpus": 0, "memory_gib": 8},
        "mi300": {"device": "gfx942", "gpus": 1, "memory_gib": 192},
        "new": {"device": "gfx950", "gpus": 1, "memory_gib": 288, "report_only": True, "out_after": 2},
    },
)
THREE = [
    step("a", ("cpu", "gfx942", "gfx950")),
    step("after", ("gfx942",), needs=("a",)),
    step("steady", ("cpu",), report_only=True),
]


def planned(facts=None, profile="pr"):
    return assemble(declare(FLEET, a=THREE), EVERYTHING, None, profile=profile, facts=facts or ChangeFacts())


def reported(plan):
    return {one.key for one in plan.steps if one.report_only}


def test_report_only_needs_both_sides_and_no_release_has_it():
    both = frozenset({"steady-cpu", "a-gfx950"})
    assert reported(planned()) == reported(planned(ChangeFacts(report_only=both))) == both
    assert reported(planned(ChangeFacts(report_only=frozenset({"steady-cpu", "a-cpu"})))) == {"steady-cpu"}
    assert reported(planned(ChangeFacts(report_only=frozenset()))) == set()
    assert reported(planned(profile="release")) == set()


def test_a_queue_that_is_out_holds_up_only_what_needs_it():
    plan = planned(ChangeFacts(out={"mi300": "mi300 is out", "new": "new is out"}, report_only=frozenset({"a-gfx950"})))
    assert [one.key for one in plan.steps] == ["a-cpu", "steady-cpu"]
    causes = {one.key: one.cause for one in plan.omissions}
    assert causes == {"a-gfx942": "queue out", "a-gfx950": "only reported", "after-gfx942": "queue out"}
    assert {one.key for one in plan.held_up} == {"a-gfx942", "after-gfx942"}
    assert reasons(plan)["a-gfx942"] == "mi300 is out"


def test_dependants_of_a_held_up_step_wait_on_their_own_queue():
    steps = [step("base", ("cpu",)), step("top", ("gfx942",), needs=("base",))]
    facts = ChangeFacts(out={"cpus": "cpus is out"})
    plan = assemble(declare(FLEET, a=steps), EVERYTHING, None, profile="pr", facts=facts)
    assert plan.steps == ()
    assert {one.key: one.reason for one in plan.held_up} == {
        "base-cpu": "cpus is out",
        "top-gfx942": "needs base, which is omitted",
    }


@pytest.mark.parametrize(
    ("failures", "out"), [({}, set()), ({"mi300": 4, "new": 1}, set()), ({"mi300": 5, "new": 2}, {"mi300", "new"})]
)
def test_a_queue_is_out_after_as_many_failures_as_it_declares(failures, out):
    trouble = {name: (number, "2026-11-21 00:00 UTC") for name, number in failures.items()}
    found = queues_out(declare(FLEET, a=THREE), trouble)
    assert found.keys() == out
    assert "mi300" not in out or "its last 5 jobs on the default branch were infra" in found["mi300"]


def test_a_queue_is_never_out_where_that_is_declared():
    cpus = FLEET.queues["cpus"].model_copy(update={"out_after": 0})
    declared = declare(FLEET.model_copy(update={"queues": {"cpus": cpus}}), a=[step("a")])
    assert queues_out(declared, {"cpus": (99, "")}) == {}


def test_the_other_device_is_omitted_for_stronger_evidence():
    plan = assemble(declare(a=[STEPS["with what is there"]]), EVERYTHING, MI300X, profile="gate")
    assert reasons(plan) == {"s-cpu": "runs on gfx942 here, which is the stronger evidence"}
