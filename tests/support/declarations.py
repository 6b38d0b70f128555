# SPDX-License-Identifier: Apache-2.0
"""Small declarations, machines and changes, for tests of planning."""

from __future__ import annotations

from hilgate.declare.load import Declarations
from hilgate.git import Changes
from hilgate.model.declaration import Agents, Area
from hilgate.plan.machine import Machine

AGENTS = Agents.model_validate(
    {
        "devices": {"cpu": {"env": {"TRITON_INTERPRET": "1", "A": "device"}}, "gfx942": {}, "cuda": {}},
        "queues": {
            "amd-cpu": {"device": "cpu", "gpus": 0, "memory_gib": 64},
            "amd_mi300_1": {"device": "gfx942", "gpus": 1, "memory_gib": 192},
        },
    }
)
LAPTOP = Machine(device="cpu", name="a processor", gpus=0, cores=2, memory_gib=16.0, distributions={"torch": "2"})
MI300X = LAPTOP.model_copy(update={"device": "gfx942", "name": "AMD MI300X", "gpus": 8})


def step(key, devices=("cpu",), **more):
    return {
        "key": key,
        "label": key.title(),
        "command": "python -m x",
        "devices": devices,
        "evidence": "junit",
        "timeout_minutes": 5,
        **more,
    }


def declare(agents=AGENTS, **areas):
    """Areas by name; each claims the folder of its name."""
    return Declarations(
        tuple(
            Area.model_validate({"area": name, "title": "T", "why": "W", "paths": [f"{name}/"], "steps": steps})
            for name, steps in areas.items()
        ),
        agents,
    )


def change(*files, base="main"):
    return Changes("c" * 40, dirty=False, base=base, files=files if base else None)


EVERYTHING = change(base=None)
EVERYWHERE = ("cpu", "gfx942", "cuda")


def reasons(plan):
    return {omission.key: omission.reason for omission in plan.omissions}
