"""A tiny gpt-oss with random but non-degenerate weights, and what transformers computes with it in float64.

Attention sinks in each layer, a sliding window in every other one, and a mixture of experts of which each token takes
all: routing can then not change by rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import GptOssConfig, GptOssForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 128
LAYERS, WINDOW = 2, 32
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
EXPERTS = 2


def save(folder: Path, dtype: torch.dtype) -> None:
    """Write the model; the same seed gives the same weights on every machine."""
    torch.manual_seed(22)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.sinks, -1.0, 3.0)
    model.to(dtype).save_pretrained(folder)


def log_probs(folder: Path, tokens: list[int], dtype: torch.dtype, *, sinks: bool = True) -> torch.Tensor:
    """Next-token log-probabilities [len(tokens), VOCABULARY]; row i follows tokens[: i + 1]."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = GptOssForCausalLM.from_pretrained(folder, dtype=dtype, **eager).eval()
    if not sinks:
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-torch.inf)
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
