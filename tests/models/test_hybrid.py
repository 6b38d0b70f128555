"""A hybrid model in unmodified vLLM with our kernels gives what transformers gives, and our kernels did it."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import engine, tiny_hybrid

from families.fleet import IN_PROCESS

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(3 * engine.SECONDS + 60)]

BATCHES = {
    "prefill": {"prompts": [tiny_hybrid.prompt(29, seed=1)], "max_tokens": 1},
    "chunks": {"prompts": [tiny_hybrid.prompt(140, seed=2)], "max_tokens": 8},
    "mixed": {"prompts": [tiny_hybrid.prompt(n, seed=n) for n in (3, 47, 96, 20)], "max_tokens": 12},
}
CALLS = {"prefill": 1, "chunks": 4 + 7}
"""Engine steps: 29 tokens fit one step of 37, 140 take 4; the step that ends a prompt also gives the first token."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_hybrid")
    tiny_hybrid.save(folder, engine.DTYPE)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return tiny_hybrid.Oracle.load(checkpoint, engine.DTYPE)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Three engines, two at a time where each has a core, by name.

    `served` is vLLM as deployed, with an engine core and a worker of their own. `packed` stores all layers of a block
    together, so that nothing but the last dimension is dense. `unplugged` has lost our plugin, as after a failed load.
    """
    jobs = {
        "served": (engine.spec(checkpoint, BATCHES), {}),
        "unplugged": (
            engine.spec(checkpoint, {"prefill": BATCHES["prefill"]}, ours=False),
            IN_PROCESS | {"VLLM_PLUGINS": ""},
        ),
        "packed": (engine.spec(checkpoint, {"chunks": BATCHES["chunks"]}, layout="BLHNC"), IN_PROCESS),
    }
    with ThreadPoolExecutor(max_workers=1 if engine.GPU else 2) as pool:  # two would measure one GPU's memory at once
        futures = {
            name: pool.submit(engine.run, tmp_path_factory.mktemp(name), {name: spec}, environment)
            for name, (spec, environment) in jobs.items()
        }
        return {name: future.result()[name] for name, future in futures.items()}


@pytest.fixture(scope="module")
def served(runs):
    return runs["served"]


@pytest.fixture(scope="module")
def unplugged(runs):
    return runs["unplugged"]


@pytest.fixture(scope="module")
def tolerance(oracle):
    """Largest admissible error of a log-probability.

    Twice what rounding does to transformers itself on the longest sequence: it and vLLM compute the same sums in
    another order, so neither is nearer to float64 by right, and each may be off in its own direction.
    """
    tokens = BATCHES["chunks"]["prompts"][0]
    return 2 * (oracle.log_probs(tokens, exact=False) - oracle.log_probs(tokens)).abs().max().item()


def rows(batch, answers):
    """(name, prompt, answer tokens, log-probabilities) of each request."""
    for prompt, answer in zip(BATCHES[batch]["prompts"], answers, strict=True):
        yield f"{batch}, prompt of {len(prompt)}", prompt, answer["tokens"], torch.tensor(answer["log_probs"]).double()


@pytest.mark.parametrize(("run", "batch"), [*(("served", batch) for batch in BATCHES), ("packed", "chunks")])
def test_log_probabilities_equal_transformers(run, batch, runs, oracle, tolerance):
    for name, prompt, tokens, got in rows(batch, runs[run]["batches"][batch]["answers"]):
        assert len(tokens) == BATCHES[batch]["max_tokens"], name
        want = oracle.log_probs(prompt + tokens[:-1])
        assert got.shape == want.shape, name
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_greedy_tokens_equal_transformers(served, oracle, tolerance):
    """Where two tokens are closer than rounding reaches, either is right; such steps may not be many."""
    steps = []
    for batch in BATCHES:
        for name, prompt, tokens, _ in rows(batch, served["batches"][batch]["answers"]):
            want = oracle.log_probs(prompt + tokens[:-1])[len(prompt) - 1 :]
            best = want.topk(2).values
            decided = best[:, 0] - best[:, 1] > 2 * tolerance
            assert torch.tensor(tokens)[decided].tolist() == want.argmax(-1)[decided].tolist(), name
            steps += decided.tolist()
    assert len(steps) == sum(len(b["prompts"]) * b["max_tokens"] for b in BATCHES.values())
    assert all(steps) if engine.DTYPE is torch.float32 else sum(steps) > len(steps) / 2


def test_answers_are_not_degenerate(served):
    tokens = [t for answer in served["batches"]["mixed"]["answers"] for t in answer["tokens"]]
    assert len(set(tokens)) > len(tokens) / 3


def test_tolerance_resolves_one_lost_block(oracle, tolerance):
    """The comparison would notice a kernel that skips the second of three blocks."""
    tokens = BATCHES["chunks"]["prompts"][0]
    lost = range(tiny_hybrid.BLOCK_SIZE, 2 * tiny_hybrid.BLOCK_SIZE)
    difference = (oracle.without_keys(tokens, lost) - oracle.log_probs(tokens)).abs()
    assert difference[: lost.stop].max() == 0
    assert difference[lost.stop :].amax(-1).min() > 4 * tolerance


@pytest.mark.parametrize("batch", BATCHES)
def test_every_attention_layer_was_ours(batch, served):
    layers = served["batches"][batch]["layers"]
    assert [row["layer"] for row in layers] == [
        f"model.layers.{i}.self_attn.attn" for i in tiny_hybrid.ATTENTION_LAYERS
    ]
    for row in layers:
        assert row["impl"] == "pagedkv.vllm_plugin.impl.PagedKVImpl"
        assert row["writes"] == row["attentions"] >= 1
        if batch in CALLS:
            assert row["attentions"] == CALLS[batch]
    assert served["refusal"] == ""


@pytest.mark.parametrize(("run", "layers_per_block"), [("served", 1), ("packed", len(tiny_hybrid.ATTENTION_LAYERS))])
def test_kv_pool_is_that_of_a_hybrid(run, layers_per_block, runs):
    """The block is inflated until it holds a state page, and in the packed layout blocks of a layer are far apart."""
    block_size, channels = tiny_hybrid.BLOCK_SIZE, 2 * tiny_hybrid.HEAD_SIZE
    assert runs[run]["block_size"] == block_size
    assert block_size.bit_count() > 1, "a power of two would hide wrong index arithmetic"
    shape = [engine.ENGINE["num_gpu_blocks_override"], tiny_hybrid.KV_HEADS, block_size, channels]
    for row in runs[run]["batches"]["chunks"]["layers"]:
        assert row["kv_shape"] == shape
        assert row["kv_strides"][0] == layers_per_block * math.prod(shape[1:])
        assert row["kv_strides"][-1] == 1
        assert row["kv_dtype"] == str(engine.DTYPE).removeprefix("torch.")
    layers = len(tiny_hybrid.ATTENTION_LAYERS)
    assert runs[run]["poisoned_bytes"] == [layers * engine.DTYPE.itemsize * math.prod(shape)]


def test_engine_without_the_plugin_is_detected(unplugged, oracle, tolerance):
    """Its answers are right, which is why only the report can tell."""
    for name, prompt, tokens, got in rows("prefill", unplugged["batches"]["prefill"]["answers"]):
        torch.testing.assert_close(got, oracle.log_probs(prompt + tokens[:-1]), rtol=0, atol=tolerance, msg=name)
    message = unplugged["refusal"]
    for index in tiny_hybrid.ATTENTION_LAYERS:
        assert f"model.layers.{index}.self_attn.attn (rank 0): served by vllm." in message
    assert "VLLM_PLUGINS" in message
