"""The pocket models: one for each class of KV cache that the kernels serve. Untrained, fp32.

hybrid    attention and Mamba-2 (GraniteMoeHybrid)     rows of a pool that attention and state share
window    soft cap, every second layer sees 8 tokens  two cache groups of one pool (Gemma 2)
latent    multi-head latent attention                  one latent row per token (DeepSeek V2)
packed    plain attention with normed queries and keys served from aiter's SHUFFLE packing with FP8 codes (Qwen 3)
speech    cross attention to 50 tokens of an encoder   two cache groups of one pool, one written once (Whisper)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from hileval.pocket.start_weights import structure

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

HIDDEN = 128
LAYERS = 4
LONGEST = 512
MEL_BINS = 16
"""Bands of the spectrogram that the speech model hears."""
SLOW = 1e6
"""RoPE's theta: most channels hardly turn within a question, so that names match wherever they stand."""


def build(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model; `name` is a key of `ARCHITECTURES`."""
    if name == "speech":
        return _speech(tokenizer)
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if name == "hybrid":
        return ARCHITECTURES[name](common)
    model = ARCHITECTURES[name](common | {"rope_parameters": {"rope_type": "default", "rope_theta": SLOW}})
    structure(model)
    return model


def _hybrid(common: dict[str, Any]) -> PreTrainedModel:
    config = transformers.GraniteMoeHybridConfig(
        **common,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        num_key_value_heads=2,
        attention_multiplier=32**-0.5,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=HIDDEN,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=16,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _window(common: dict[str, Any]) -> PreTrainedModel:
    config = transformers.Gemma2Config(
        **common,
        intermediate_size=256,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=None,
    )
    return transformers.Gemma2ForCausalLM(config)


def _latent(common: dict[str, Any]) -> PreTrainedModel:
    config = transformers.DeepseekV2Config(
        **(common | {"tie_word_embeddings": False}),
        intermediate_size=256,
        num_key_value_heads=4,
        kv_lora_rank=256,  # vLLM knows latent rows of 256 + 64 and 512 + 64 channels
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=LAYERS,  # no mixture of experts
        n_routed_experts=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        num_experts_per_tok=1,
    )
    return transformers.DeepseekV2ForCausalLM(config)


def _packed(common: dict[str, Any]) -> PreTrainedModel:
    config = transformers.Qwen3Config(**common, intermediate_size=256, num_key_value_heads=2, head_dim=32)
    return transformers.Qwen3ForCausalLM(config)


def _speech(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    width = 64
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MEL_BINS,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=50,
        max_target_positions=32,
        init_std=0.06,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float32",
    )
    return transformers.WhisperForConditionalGeneration(config)


ARCHITECTURES: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "hybrid": _hybrid,
    "window": _window,
    "latent": _latent,
    "packed": _packed,
}
"""Name -> decoder; the encoder-decoder is `speech`. The folder of a trained one is evals/pocket/<name>."""
