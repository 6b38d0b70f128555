"""Tiny configs of the families without states: latent attention, experts, an encoder."""

from __future__ import annotations

import transformers as hf
from models.families.configs_mamba import COMMON, HEADS


def deepseek_v3() -> hf.DeepseekV3Config:
    """MLA with 8 heads, what a rank of eight holds of Kimi-K2's 64; a dense layer and one of experts.

    vLLM scores experts by sigmoid and loads the router's correction only where `scoring_func` and `topk_method` say so,
    as published configs do; transformers always does both.
    """
    return hf.DeepseekV3Config(
        **COMMON,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=256,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=4,
        moe_intermediate_size=64,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )


def qwen3_moe() -> hf.Qwen3MoeConfig:
    """Attention alone; four experts in every layer."""
    return hf.Qwen3MoeConfig(
        **COMMON,
        **HEADS,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
