# SPDX-License-Identifier: Apache-2.0
"""Plans that become pipelines, and what is read back from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from support import plans

from hilgate.declare.load import load
from hilgate.model.declaration import Pods, Queue

if TYPE_CHECKING:
    from hilgate.model.plan import Plan

DECLARED = load(Path(__file__).resolve().parents[2])

PODS = Pods(registry="registry.example/hilgate", cpus=12, memory_gib=128, groups=(44, 109))
POD_QUEUES = {
    "amd_mi300_1_pods": Queue(device="gfx942", gpus=1, memory_gib=192, compute_units=304, image="rocm", pods=PODS),
    "amd-cpu-pods": Queue(device="cpu", gpus=0, memory_gib=64, image="cpu", pods=PODS),
}
WITH_PODS = replace(
    DECLARED, agents=DECLARED.agents.model_copy(update={"queues": {**DECLARED.agents.queues, **POD_QUEUES}})
)
"""What the repository declares, and two queues whose jobs are pods."""


def steps_of(text: str) -> dict[str, dict[str, Any]]:
    """Key -> step, out of their groups."""
    pipeline = yaml.safe_load(text)
    return {step["key"]: step for top in pipeline["steps"] for step in top.get("steps", [top])}


def pod_plan(**changes: object) -> Plan:
    """A model that needs a GPU and a token, in a pod."""
    common: dict[str, object] = {"device": "gfx942", "queue": "amd_mi300_1_pods", "gpus": 1, "image": "rocm"}
    models = plans.step("models", "python -m pytest", key="models-gfx942", secrets=("HF_TOKEN",), **common)
    values = {"profile": "pr", "images": {"rocm": "d" * 64}, "digests": {"rocm": "sha256:" + "ab" * 32}}
    return plans.plan(models, **{**values, **changes})


def agent_plan(**changes: object) -> Plan:
    """An image, a kernel test in it and a model that needs a token."""
    image = plans.step("image-rocm", "docker/build.sh rocm", provides="rocm", network=True, timeout_minutes=60)
    common: dict[str, object] = {
        "device": "gfx942",
        "queue": "amd_mi300_1",
        "gpus": 1,
        "image": "rocm",
        "depends_on": ("image-rocm-cpu",),
    }
    kernels = plans.step("kernels", "python -m pytest", key="kernels-gfx942", **common)
    models = plans.step("models", "python -m pytest", key="models-gfx942", secrets=("HF_TOKEN",), **common)
    values: dict[str, object] = {"profile": "pr", "images": {"rocm": "d" * 64}, **changes}
    return plans.plan(image, kernels, models, **values)
