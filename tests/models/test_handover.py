# SPDX-License-Identifier: Apache-2.0
"""Engines that hand KV blocks over, those of MLA in both of its layouts, and a drafting model.

Transformers judges their answers, and the KV pool holds NaN at the start: what a connector did not write cannot be
attended to by chance.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import engine, matrix

pytest.importorskip("vllm", reason="needs package:vllm")

from families import judge
from families.oracle import VOCABULARY
from families.processes import GPU, IN_PROCESS
from families.schedule import ScheduledRequest, prompt

SECONDS = 600

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(SECONDS + 60)]

MODELS = ("gemma-2", "deepseek-v3", "bloom")
MLA_BACKEND = f"pagedkv.vllm_plugin.mla_backend.{'PagedKVGPUMLABackend' if GPU else 'PagedKVMLABackend'}"

HANDED_OVER = tuple(ScheduledRequest(prompt(n, n, VOCABULARY), 8) for n in (37, 66, 96))
CACHED = [32, 64, 80]
"""Their tokens in whole blocks of 16 but for the last token, which every engine computes itself."""

DRAFTS = 3
ANSWERED = tuple(ScheduledRequest(request.prompt, 20) for request in matrix.PROMPTS)


def engines(folders, store):
    """What runs, by name; every consumer after its producer."""

    def spec(model, asked, *, prompt_rows=False, **arguments):
        arguments = matrix.arguments(model) | arguments
        return engine.spec(folders[model], {"only": asked}, prompt_rows=prompt_rows, **arguments)

    def connected(model, role, **arguments):
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(store / model)},
        }
        arguments |= {"max_num_batched_tokens": 256}  # it saves what the first step of a request computes
        return spec(model, HANDED_OVER, kv_transfer_config=connector, **arguments)

    drafter = {"method": "draft_model", "model": str(folders["bloom"]), "num_speculative_tokens": DRAFTS}
    return {
        "gemma-2, saves": connected("gemma-2", "kv_producer"),
        "gemma-2, loads": connected("gemma-2", "kv_consumer"),
        "gemma-2, loads into another layout": connected("gemma-2", "kv_consumer", layout="BLNHC"),
        # vLLM's connector loads latent rows into a copy of the cache where a layer's blocks are not one run.
        "deepseek-v3, saves": connected("deepseek-v3", "kv_producer", layout="BLHNC", prompt_rows=True),
        "deepseek-v3, loads": connected("deepseek-v3", "kv_consumer", layout="LBHNC"),
        "bloom, drafts": spec("bloom", ANSWERED, speculative_config=drafter),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    started = engines(folders, tmp_path_factory.mktemp("store"))
    # V1: the CPU platform runs no other, and on GPUs no other test has drafts under it.
    environment = IN_PROCESS | {"PAGEDKV_MLA": "1", "PAGEDKV_PACKING": "rows", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    return engine.run(tmp_path_factory.mktemp("log"), started, environment, seconds=SECONDS)


@pytest.fixture(scope="module")
def oracle(folders):
    return cache(lambda model: matrix.oracle(model, folders[model]))


def answers(runs, run):
    assert runs[run]["refusal"] == "", "every layer was ours"
    return runs[run]["batches"]["only"]["answers"]


def layers(runs, run):
    answers(runs, run)
    return runs[run]["batches"]["only"]["layers"]


def judged(runs, run, asked, oracle, record_property):
    got = answers(runs, run)
    record_property("max_abs_err", judge.compare(asked, got, oracle(run.partition(",")[0])).max_abs_err)
    return got


def test_saving_in_blocks_of_all_layers_answers_as_transformers(runs, oracle, record_property):
    got = judged(runs, "deepseek-v3, saves", HANDED_OVER, oracle, record_property)
    assert [len(answer.rows) for answer in got] == [len(request.prompt) - 1 + 8 for request in HANDED_OVER]


@pytest.mark.parametrize(("role", "together"), [("loads", 1), ("saves", 2)])
def test_latent_blocks_lie_by_layer_or_by_block(role, together, runs):
    rows = layers(runs, f"deepseek-v3, {role}")
    assert len(rows) == 2
    for row in rows:
        assert row["backend"] == MLA_BACKEND
        assert row["route"] is None, "the router knows no MLA"
        assert row["writes"] >= row["attentions"] >= 7
        assert row["kv_shape"][1:] == [row["block_size"], 256 + 64], "latent and rotary channels"
        assert row["kv_strides"][0] == together * torch.Size(row["kv_shape"][1:]).numel()
        assert row["kv_strides"][-1] == 1


@pytest.mark.parametrize("run", ["gemma-2, loads", "gemma-2, loads into another layout", "deepseek-v3, loads"])
def test_who_loads_kv_blocks_answers_as_who_computed_them(run, runs, oracle, record_property):
    saved = answers(runs, run.partition(",")[0] + ", saves")
    loaded = judged(runs, run, HANDED_OVER, oracle, record_property)
    assert [answer.cached for answer in saved] == [0, 0, 0]
    assert [answer.cached for answer in loaded] == CACHED
    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in saved]


def test_the_layout_of_the_consumer_is_another(runs):
    strides = {
        tuple(layers(runs, run)[0]["kv_strides"]) for run in ("gemma-2, saves", "gemma-2, loads into another layout")
    }
    assert len(strides) == 2


def test_what_a_model_drafts_changes_no_answer(runs, oracle, record_property):
    """The model drafts for itself, so nearly every draft is taken, and tokens are verified four at a time."""
    judged(runs, "bloom, drafts", ANSWERED, oracle, record_property)
    verifying, *drafting = sorted({row["attentions"] for row in layers(runs, "bloom, drafts")})
    assert verifying < 3 + ANSWERED[0].answers, "fewer steps than without drafts"
    assert drafting == [DRAFTS * verifying]
