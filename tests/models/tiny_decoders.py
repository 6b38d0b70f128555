"""Two tiny decoders without state layers, and what transformers computes with them.

Gemma-2: soft cap, a scale of its own, and layers with and without a sliding window: two KV cache groups of one pool.
Bloom: ALiBi. Weights are drawn wide, so that every next-token distribution depends visibly on its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, Gemma2Config, Gemma2ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 128
HEADS, HEAD_SIZE = 4, 32
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def save_gemma(folder: Path, dtype: torch.dtype) -> None:
    """Soft cap 2 bends most scores; scale 40 ** -0.5 is not that of the head size; a window is two blocks."""
    torch.manual_seed(20)
    config = Gemma2Config(
        **TOKENS,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        query_pre_attn_scalar=40,
        sliding_window=32,
        attn_logit_softcapping=2.0,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    Gemma2ForCausalLM(config).to(dtype).save_pretrained(folder)


def save_bloom(folder: Path, dtype: torch.dtype) -> None:
    """Every head has its own slope."""
    torch.manual_seed(21)
    config = BloomConfig(**TOKENS, hidden_size=HEADS * HEAD_SIZE, n_layer=2, n_head=HEADS, initializer_range=0.2)
    BloomForCausalLM(config).to(dtype).save_pretrained(folder)


def log_probs(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Next-token log-probabilities [len(tokens), VOCABULARY] float64, computed in `dtype` over the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
