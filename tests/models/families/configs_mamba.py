"""Tiny configs of the families with Mamba layers, with and without attention beside them.

Sizes: a state page is 22 to 40 attention tokens, so that vLLM inflates blocks to 32 or 48 tokens.
"""

from __future__ import annotations

from typing import Any

import transformers as hf

VOCABULARY = 128
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPREAD = 0.1
"""Deviation of the weights: wide enough that every distribution depends on its context, and no wider, or 64 channels in
and out would amplify roundings until float16 resolves no lost block. Of 0.2, 0.14, 0.1 and 0.07 this does best."""
COMMON: dict[str, Any] = TOKENS | {
    "max_position_embeddings": 2048,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
}
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Attention heads of 32 channels, the smallest that vLLM's own CPU attention takes."""

UNCLAMPED = 1e-9
"""A time step that no token here comes near."""


def jamba() -> hf.JambaConfig:
    """Mamba-1 and attention in turn; two experts in every second layer."""
    return hf.JambaConfig(
        **COMMON,
        **HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_dt_rank=8,  # 16 bytes of float16: the CUDA scan reads the rows behind it as vectors
        mamba_d_conv=4,
        mamba_expand=2,
    )


def zamba2() -> hf.Zamba2Config:
    """Mamba-2, and attention blocks whose weights all hybrid layers share.

    vLLM always ties the head to the embedding, whatever `tie_word_embeddings` says. transformers clamps the time steps
    of a prompt's scan at `time_step_min`, though not that of a decode step; vLLM clamps none, and here nobody does.
    """
    return hf.Zamba2Config(
        **COMMON | {"tie_word_embeddings": True},
        **HEADS | {"num_attention_heads": 4, "num_key_value_heads": 4},
        intermediate_size=128,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=8,
        mamba_d_state=64,
        mamba_ngroups=1,
        n_mamba_heads=4,
        mamba_expand=2,
        chunk_size=16,
        time_step_min=UNCLAMPED,
    )


def falcon_h1() -> hf.FalconH1Config:
    """Mamba-2 and attention side by side in every layer; every multiplier differs from 1."""
    return hf.FalconH1Config(
        **COMMON,
        **HEADS,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
        embedding_multiplier=1.5,
        lm_head_multiplier=0.75,
        attention_in_multiplier=1.25,
        attention_out_multiplier=0.75,
        key_multiplier=0.5,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.75,
        ssm_multipliers=[0.75, 1.25, 0.5, 1.5, 0.875],
        mlp_multipliers=[0.75, 1.25],
    )


def granite() -> hf.GraniteMoeHybridConfig:
    """Mamba-2 and attention in turn, experts and a shared expert in every layer; every multiplier differs from 1."""
    return hf.GraniteMoeHybridConfig(
        **COMMON,
        **HEADS,
        intermediate_size=64,
        shared_intermediate_size=64,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        position_embedding_type="rope",
        attention_multiplier=0.25,
        embedding_multiplier=1.5,
        residual_multiplier=0.75,
        logits_scaling=1.25,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=16,
    )


def nemotron_h() -> hf.NemotronHConfig:
    """Mamba-2, attention and MLP as layers of their own; of the time step see `zamba2`."""
    return hf.NemotronHConfig(
        **COMMON,
        **HEADS,
        intermediate_size=128,
        head_dim=32,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        time_step_min=UNCLAMPED,
    )


def mamba() -> hf.MambaConfig:
    """Mamba-1 alone."""
    return hf.MambaConfig(**_state_only())


def falcon_mamba() -> hf.FalconMambaConfig:
    """Mamba-1 alone, with norms of B, C and the time step."""
    return hf.FalconMambaConfig(**_state_only())


def _state_only() -> dict[str, Any]:
    return TOKENS | {
        "hidden_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "time_step_rank": 8,
        "initializer_range": SPREAD,
        "tie_word_embeddings": False,
    }


def mamba2() -> hf.Mamba2Config:
    """Mamba-2 alone."""
    return hf.Mamba2Config(
        **_state_only() | {"state_size": 16},
        num_heads=4,
        head_dim=32,
        n_groups=1,
        expand=2,
        chunk_size=16,
    )


def bamba() -> hf.BambaConfig:
    """Mamba-2 and attention in turn."""
    return hf.BambaConfig(
        **COMMON,
        **HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
    )
