"""Tiny configs of the families whose states are gated delta rules or short convolutions."""

from __future__ import annotations

import transformers as hf
from models.families.configs_mamba import COMMON, HEADS

DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,  # as the value heads: a kernel of vLLM for CUDA compiles for no other
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "head_dim": 32,
}
IN_TURN = ["linear_attention", "full_attention"] * 2


def qwen3_next() -> hf.Qwen3NextConfig:
    """Gated delta rule and gated attention in turn; four experts and a shared one in every layer."""
    return hf.Qwen3NextConfig(
        **COMMON,
        **HEADS,
        **DELTA,
        intermediate_size=64,
        num_hidden_layers=4,
        layer_types=IN_TURN,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    )


def qwen3_5() -> hf.Qwen3_5TextConfig:
    """Gated delta rule and gated attention in turn, dense."""
    return hf.Qwen3_5TextConfig(
        **COMMON, **HEADS, **DELTA, intermediate_size=128, num_hidden_layers=4, layer_types=IN_TURN
    )


def lfm2() -> hf.Lfm2Config:
    """Short convolutions and attention in turn.

    vLLM reads `conv_dim`, `conv_dim_out` and `conv_use_xavier_init`, which published configs hold and transformers'
    class does not know.
    """
    return hf.Lfm2Config(
        **COMMON | {"tie_word_embeddings": True},
        **HEADS,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        block_dim=HEADS["hidden_size"],
        conv_dim=HEADS["hidden_size"],
        conv_dim_out=HEADS["hidden_size"],
        conv_use_xavier_init=True,
    )


def kimi_linear() -> hf.KimiLinearConfig:
    """Kimi delta attention, and MLA without positions in every second layer; experts in every layer.

    transformers reads `layer_types`, vLLM `linear_attn_config` with layers counted from 1, and names of its own for
    the experts. A dense first layer, which published models have, transformers would write under the name of experts.
    """
    return hf.KimiLinearConfig(
        **COMMON,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,  # these four are the published sizes: a kernel of vLLM for CUDA takes no other
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        linear_attn_config={
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        mla_use_nope=True,
        first_k_dense_replace=0,
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
    )
