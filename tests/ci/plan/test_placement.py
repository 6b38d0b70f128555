"""What a machine can run, area by area."""

from dataclasses import replace

from hilgate.declare.load import Declarations
from hilgate.model import Agents, Area
from hilgate.plan.expand import readiness
from hilgate.plan.machine import Machine

LAPTOP = Machine(device="cpu", name="p", gpus=0, cores=2, memory_gib=16.0, distributions={"torch": "2"})


def step(key, devices=("cpu",), **more):
    return {
        "key": key,
        "label": key,
        "command": "c",
        "devices": devices,
        "evidence": "junit",
        "timeout_minutes": 1,
        **more,
    }


AREA = Area.model_validate(
    {
        "area": "a",
        "title": "T",
        "why": "W",
        "paths": ["a/"],
        "steps": [
            step("anywhere", ("cpu", "gfx942")),
            step("gpu", ("gfx942", "gfx950")),
            step("engine", packages=("torch", "vllm")),
        ],
    }
)
DECLARED = Declarations((AREA,), Agents(devices={}, queues={}))


def test_partly_with_every_obstacle_named():
    (found,) = readiness(DECLARED, LAPTOP)
    assert (found.answer, found.ready, found.steps, found.on) == ("partly", 1, 3, ("cpu",))
    assert found.obstacles == ("needs gfx942 or gfx950", "vllm not installed")


def test_complete_machine():
    machine = replace(LAPTOP, device="gfx942", distributions={"torch": "2", "vllm": "0"})
    (found,) = readiness(DECLARED, machine)
    assert (found.answer, found.on, found.obstacles) == ("yes", ("gfx942", "cpu"), ())


def test_nothing_runs():
    only_gpu = replace(DECLARED, areas=(AREA.model_copy(update={"steps": AREA.steps[1:]}),))
    assert readiness(only_gpu, LAPTOP)[0].answer == "no"
