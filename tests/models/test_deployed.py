# SPDX-License-Identifier: Apache-2.0
"""A hybrid in vLLM as deployed, its engine core in a process of its own; and how a lost plugin shows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
import torch
from models import engine

from families import checkpoints, judge
from families.engine import COMMON
from families.family import FAMILIES
from families.oracle import VOCABULARY, Oracle
from families.processes import GPU, IN_PROCESS
from families.schedule import ScheduledRequest, prompt

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(3 * engine.SECONDS + 60)]

FAMILY = FAMILIES["granite-4.0-h"]
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in (1, 3)]
DTYPE = torch.float16 if GPU else torch.float32
"""Not bfloat16, which GPUs serve: its rounding moves this log-probability or that by up to 0.7, a lost block by 1.4."""

SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} if GPU else {}
"""How the engine core's process begins: vLLM would fork one that has looked for a GPU, which no fork may use."""

BATCHES = {
    "prefill": (ScheduledRequest(prompt(29, 1, VOCABULARY), 1),),
    "chunks": (ScheduledRequest(prompt(140, 2, VOCABULARY), 8),),
    "mixed": tuple(ScheduledRequest(prompt(n, n, VOCABULARY), 12) for n in (3, 47, 96, 20)),
}
CALLS = {"prefill": 1, "chunks": 4 + 7}
"""Engine steps: 29 tokens fit one step of 37, 140 take 4; the step that ends a prompt also gives the first token."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    checkpoints.save(FAMILY, folder, DTYPE)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return Oracle.load(FAMILY, checkpoint, DTYPE)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Two engines: `served`, and `unplugged`, which has lost our plugin as after a failed load."""
    kinds = {"dtype": str(DTYPE).removeprefix("torch."), "mamba_ssm_cache_dtype": "float32"}
    served = kinds | {"distributed_executor_backend": "uni"}  # as on GPUs; a worker apart would import all once more
    prefill = {"prefill": BATCHES["prefill"]}
    jobs = {
        "served": (engine.spec(checkpoint, BATCHES, **served), {"PAGEDKV_SSD": "1"} | SPAWNED),
        "unplugged": (engine.spec(checkpoint, prefill, ours=False, **kinds), IN_PROCESS | {"VLLM_PLUGINS": ""}),
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {
            name: pool.submit(engine.run, tmp_path_factory.mktemp(name), {name: spec}, environment)
            for name, (spec, environment) in jobs.items()
        }
        return {name: future.result()[name] for name, future in futures.items()}


@pytest.mark.parametrize("batch", BATCHES)
def test_answers_equal_transformers(batch, runs, oracle, record_property):
    answers = runs["served"]["batches"][batch]["answers"]
    for request, answer in zip(BATCHES[batch], answers, strict=True):
        assert len(answer.tokens) == request.answers
        assert len(answer.rows) == len(request.prompt) + request.answers - 1
    closeness = judge.compare(BATCHES[batch], answers, oracle)
    record_property("max_abs_err", closeness.max_abs_err)
    assert closeness.undecided <= sum(request.answers for request in BATCHES[batch]) / 2


@pytest.mark.parametrize("batch", BATCHES)
def test_every_attention_layer_was_ours(batch, runs):
    layers = runs["served"]["batches"][batch]["layers"]
    assert [row["layer"] for row in layers] == LAYERS
    for row in layers:
        assert row["impl"] == "pagedkv.vllm_plugin.impl.PagedKVImpl"
        assert row["writes"] == row["attentions"] >= 1
        assert row["attentions"] == CALLS.get(batch, row["attentions"])
    assert runs["served"]["refusal"] == ""


def test_every_prefill_of_a_state_layer_was_ours(runs):
    """Two layers of Mamba-2, one scan in each of a step with tokens of a prompt in it."""
    scans = {batch: result["scans"] for batch, result in runs["served"]["batches"].items()}
    assert scans == {"prefill": [2 * 1], "chunks": [2 * 4], "mixed": scans["mixed"]}
    assert scans["mixed"] > [2 * 4]
    assert runs["unplugged"]["batches"]["prefill"]["scans"] == [0]


def test_the_whole_kv_pool_was_poisoned(runs):
    served = runs["served"]
    shape = [COMMON["num_gpu_blocks_override"], 1, served["block_size"], 2 * 32]
    for row in served["batches"]["chunks"]["layers"]:
        assert row["kv_shape"] == shape
        assert row["kv_dtype"] == str(DTYPE).removeprefix("torch.")
    assert served["poisoned_bytes"] == [len(LAYERS) * DTYPE.itemsize * prod(shape)]


def test_engine_without_the_plugin_is_detected(runs, oracle):
    """Its answers are right, which is why only the report can tell."""
    judge.compare(BATCHES["prefill"], runs["unplugged"]["batches"]["prefill"]["answers"], oracle)
    message = runs["unplugged"]["refusal"]
    for layer in LAYERS:
        assert f"{layer} (rank 0): served by vllm." in message
    assert "VLLM_PLUGINS" in message
