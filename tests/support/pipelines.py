# SPDX-License-Identifier: Apache-2.0
"""Plans that become pipelines, and what is read back from them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from support import plans

from hilgate.buildkite.lint import sdk_schema
from hilgate.declare.load import load

if TYPE_CHECKING:
    from hilgate.model.plan import Plan

DECLARED = load(Path(__file__).resolve().parents[2])
SCHEMAS = {
    "check-jsonschema": json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/buildkite.json").read_text("utf-8")
    ),
    "buildkite-sdk": sdk_schema(),
}


def steps_of(text: str) -> dict[str, dict[str, Any]]:
    """Key -> step, out of their groups."""
    pipeline = yaml.safe_load(text)
    return {step["key"]: step for top in pipeline["steps"] for step in top.get("steps", [top])}


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
