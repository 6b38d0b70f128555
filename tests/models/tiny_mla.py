"""A tiny DeepSeek-V2 with random but non-degenerate weights, and what transformers computes with it in float64.

Two dense layers, 4 heads over latent rows of 256 + 64 channels; transformers attends without absorbing the projections
and so shares no intermediate result with a decode kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 128
LAYERS = 2
HEADS = 4
LATENT, ROPE = 256, 64  # vLLM knows latent rows of 320 and 576 channels


def save(folder: Path, dtype: torch.dtype) -> None:
    """Write the model; the same seed gives the same weights on every machine."""
    torch.manual_seed(21)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=ROPE,
        v_head_dim=32,
        first_k_dense_replace=LAYERS,  # no mixture of experts
        n_routed_experts=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        num_experts_per_tok=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    DeepseekV2ForCausalLM(config).to(dtype).save_pretrained(folder)


def log_probs(folder: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """Next-token log-probabilities [len(tokens), VOCABULARY]; row i follows tokens[: i + 1]."""
    model = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
