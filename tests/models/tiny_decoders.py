"""Two tiny decoders without state layers, and what transformers computes with them.

Gemma-2: soft cap, a scale of its own, and layers with and without a sliding window: two KV cache groups of one pool.
Bloom: ALiBi. Weights are drawn wide, so that every next-token distribution depends visibly on its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, Gemma2Config, Gemma2ForCausalLM

from families import plain_attention

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
        num_hidden_layers=4,
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


def log_probs(folder: Path, tokens: list[int], dtype: torch.dtype, attention: str = "eager") -> torch.Tensor:
    """Next-token log-probabilities [len(tokens), VOCABULARY] float64, computed in `dtype` over the whole sequence.

    Args:
        folder: The checkpoint.
        tokens: The sequence.
        dtype: Of weights and arithmetic.
        attention: "eager"; or for Gemma "fp8" or "fp8 per token": with keys and values rounded to E4M3 codes, with
            the scale 1, or so that the largest channel of each token and head is the largest code. With " up"
            or " down" behind it they are larger or smaller by 2^-20 before they are rounded, what the fp32 sum of 128
            products may lose (2^-24 sqrt(128)): whatever is so near a boundary that another order of summation would
            round it the other way is rounded the other way.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    if isinstance(model, BloomForCausalLM):
        for block in model.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU()  # as vLLM has it; transformers approximates it by tanh
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)


def _register(name: str, *, per_token: bool, factor: float) -> None:
    plain_attention.register(
        name, plain_attention.through(lambda rows: plain_attention.rounded(rows * factor, per_token=per_token))
    )


for _name, _per_token in (("fp8", False), ("fp8 per token", True)):
    _register(_name, per_token=_per_token, factor=1.0)
    _register(f"{_name} up", per_token=_per_token, factor=1 + 2**-20)
    _register(f"{_name} down", per_token=_per_token, factor=1 - 2**-20)
