# SPDX-License-Identifier: Apache-2.0
"""A folder served and judged as a published checkpoint is, and an oracle of other weights that turns its cells red."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs package:vllm")

import torch
from safetensors.torch import load_file, save_file

from families import checkpoints, drive
from families.engine import COMMON
from families.family import FAMILIES
from families.published import Checkpoint, PublishedCells, select_rows

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(600)]

FAMILY = FAMILIES["granite-4.0-h"]
SIZES = {"vocab_size": 3000, "mamba_d_state": 64}
"""Sizes of a state so large that a block becomes longer than any request of the tiny table."""

BEHAVIOURS = ("prefill", "chunked", "preempt")
SPOILT = "model.layers.2.input_layernorm.weight"


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """Two folders of the same checkpoint; the second is judged by weights of which one differs."""
    right, wrong, judge = (tmp_path_factory.mktemp(name) for name in ("right", "wrong", "judge"))

    for folder in (right, wrong, judge):
        checkpoints.save(
            replace(FAMILY, config=FAMILY.config | SIZES),
            folder,
            torch.float16,
        )
    weights = load_file(judge / "model.safetensors")
    weights[SPOILT][7] *= 2
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})

    def judged(checkpoint):
        return replace(checkpoint, judged_by=str(judge)) if checkpoint.name == str(wrong) else checkpoint

    rows = select_rows([], [str(right), str(wrong)], [], BEHAVIOURS)
    made = PublishedCells(tmp_path_factory.mktemp("driven"), rows, {"seed": 1, "examples": 1}, 300, judged)
    return {
        name: {one: made.cell(str(folder), one) for one in BEHAVIOURS}
        for name, folder in (("right", right), ("wrong", wrong))
    }


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_folder_passes(behaviour, driven):
    cell = driven["right"][behaviour]
    assert cell.outcome == "pass", cell.reason
    assert cell.labels["dtype"] == "float16"
    assert int(cell.labels["block_size"]) > COMMON["max_model_len"]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_an_oracle_of_other_weights_names_the_layer(behaviour, driven, record_property):
    cell = driven["wrong"][behaviour]
    record_property("reason", cell.reason)
    assert cell.outcome == "fail"
    assert "log-probabilities are off by" in cell.reason
    assert "at half of" in cell.reason, "16 bits resolve it by the typical error alone"
    assert "the first wrong layer is 2 (state)" in cell.reason


def test_the_engine_has_room_for_its_requests(monkeypatch, tmp_path):
    started = []

    def engine(_checkpoint, **arguments):
        started.append(arguments)
        return nullcontext(SimpleNamespace(block_size=32))

    monkeypatch.setattr(drive, "FamilyEngine", engine)
    monkeypatch.setattr(drive, "register", lambda _family: True)
    checkpoint = Checkpoint("c", str(tmp_path), "lfm2", "float16", 128_000, str(tmp_path))
    plans = drive.PublishedModel(checkpoint).plans("cpu")
    (asked,) = started
    assert asked["max_model_len"] == drive.ASKED
    assert asked["num_gpu_blocks_override"] is None, "64 blocks of 32 tokens would hold 2,048"
    reaches = {plan.arguments.get("max_model_len") for plan in plans if plan.behaviours != ("blocks",)}
    assert reaches == {COMMON["max_model_len"]}
