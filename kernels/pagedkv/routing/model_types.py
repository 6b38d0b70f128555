# SPDX-License-Identifier: Apache-2.0
"""What is known of a `model_type` beyond what its `config.json` says, and which keys of a config cannot be ignored.

This is the only place that holds such knowledge; a model type that is not here is unknown. Each entry was compared with
the attention and state layers that vLLM 0.32 builds for the type, or read in vLLM's or transformers' model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LayerRule = Literal["full", "slides", "even layers slide", "listed", "hybrid", "states", "both"]
"""How the layers of a type are found where its config does not list them.

full: each has full attention.
slides, even layers slide: each one, or each second from the first on, looks back over `sliding_window` tokens.
listed: attention of several kinds; the config must list the layers.
hybrid: attention and recurrent layers; the config must list the layers.
states: all layers are recurrent.
both: each layer has attention and a recurrent state side by side.
"""

_RULES: dict[LayerRule, str] = {
    "full": """
        apertus arcee aria_text axk1 baichuan bailing_moe bitnet bloom cohere cosmos3_edge_text dbrx deepseek
        deepseek_v2 deepseek_v3 deepseek_vl_v2 dots1 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone falcon
        flex_olmo gemma glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_ocr_text gpt2 gpt_bigcode
        gpt_neox gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text
        hy_v3 hyperclovax internlm2 internlm3 jais2 kimi_k2 llama mimo minicpm minicpmv minimax_m2 ministral3 mpt
        nemotron olmo olmo2 olmoe opt orion paddleocr_vl_text persimmon phi qwen2 qwen2_5_vl qwen2_5_vl_text
        qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open
        stablelm telechat2
    """,
    "slides": "mistral mixtral phi3 phimoe starcoder2",
    "even layers slide": "gemma2 gpt_oss vaultgemma",
    "listed": "afmoe cohere2 cohere2_moe cwm exaone4 exaone_moe gemma3_text granite_swa granitemoe_swa mellum olmo3",
    "hybrid": """
        bamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text
        qwen3_next zamba2
    """,
    "states": "falcon_mamba mamba mamba2",
    "both": "falcon_h1",
}
RULES: dict[str, LayerRule] = {name: rule for rule, names in _RULES.items() for name in names.split()}
"""Model type: how its layers are found."""

_NEEDED = {
    "attention_multiplier": "granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax",
    "attn_config": "mpt",
    "attn_logit_softcapping": "gemma2 vaultgemma",
    "head_dim": """
        afmoe cohere2_moe cosmos3_edge_text cwm ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss helium hy_v3
        mellum minimax_m2 ministral3 nemotron_h paddleocr_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_next
        qwen3_vl_text seed_oss solar_open vaultgemma
    """,
    "kv_lora_rank": "axk1 deepseek_v2 deepseek_v3 deepseek_vl_v2 glm4_moe_lite kimi_k2 kimi_linear",
    "mamba_d_ssm": "falcon_h1",
    "mamba_n_heads": "falcon_h1 granitemoehybrid",
    "multi_query": "falcon",
    "n_groups": "mamba2 nemotron_h",
    "n_mamba_heads": "zamba2",
    "num_key_value_heads": """
        bitnet cosmos3_edge_text cwm ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text falcon_h1 gemma2 gemma3_text glm
        glm4 glm4v_text glm_ocr_text gpt_oss granite_swa hy_v3 jamba lfm2 mellum minimax_m2 ministral3 mistral
        mixtral nemotron_h paddleocr_vl_text phimoe qwen2_5_vl_text qwen2_vl_text qwen3_5_moe_text qwen3_5_text
        qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 vaultgemma
    """,
    "query_pre_attn_scalar": "gemma2 gemma3_text vaultgemma",
    "sliding_window": "mistral",
}
"""Key: types in whose config it must stand, null or not, because their class has a value of its own for it."""


def missing(model_type: str, keys: Collection[str]) -> list[str]:
    """Return the keys that the config of a type must have and that it has not."""
    also = {"head_dim": "attention_head_dim"}  # as the first Nemotron-H has it
    return sorted(
        key
        for key, types in _NEEDED.items()
        if model_type in types.split() and key not in keys and also.get(key) not in keys
    )


LATENT = {"axk1", "deepseek_v2", "deepseek_v3", "deepseek_vl_v2", "glm4_moe_lite", "kimi_k2", "kimi_linear"}
"""Types whose latent of `kv_lora_rank` channels vLLM 0.32 caches (`model_arch_config_convertor.py:314`)."""

SEES_ONE_MORE = {"cohere2", "cohere2_moe"}
"""Types whose layers look back over `sliding_window` tokens and their own (vLLM 0.32, `models/commandr.py:237`)."""

SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa"}
"""Types with a learnt sink in each head, which no key says."""

ENCODER_DECODERS = {"bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp", "pegasus", "whisper"}
"""Encoder-decoders whose attention is full, without a bias."""

RELATIVE_BIAS = {"longt5", "mpnet", "mt5", "switch_transformers", "t5", "umt5"}

STATE_DTYPES: dict[str, tuple[str, str | None]] = {
    "nemotron_h": ("mamba_ssm_cache_dtype", "float32"),
    "NemotronH_Nano_VL_V2": ("mamba_ssm_cache_dtype", "float32"),
    "qwen3_5": ("mamba_ssm_dtype", None),
    "qwen3_5_moe": ("mamba_ssm_dtype", None),
    "qwen3_5_moe_text": ("mamba_ssm_dtype", None),
    "qwen3_5_text": ("mamba_ssm_dtype", None),
}
"""Outermost model type: the key from which vLLM 0.32 takes the dtype of recurrent states, and what it takes without one
(`MODELS_CONFIG_MAP` in `models/config.py`, which goes by the outermost architecture). None is the model's dtype."""

_STATES_IN_MODEL_DTYPE = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe lfm2_vl mamba mamba2 minicpmv4_6 minicpmv4_7
    olmo_hybrid qwen3_next zamba2
"""
STATES_IN_MODEL_DTYPE = frozenset(_STATES_IN_MODEL_DTYPE.split())
"""Outermost model types of which vLLM 0.32 ignores such a key."""

_CHANGES_ATTENTION = re.compile(
    r"""^is_causal$
    | (attn|attention)_(type|layer|idx|ind|cfg|conf|pattern|group|every|interval|stride|block|dilat|span|mask)
    | (attn|attention)_(scale|logit) | window | sliding | chunk | spars | indexer | bidirectional | alibi
    | relative_ | position_bias | other_setting | (^|_)index_
    | (^|_)(cla|lru|mb|moba|nsa|rwkv|sinks?|swa|yoco)(_|$) | linear_att | local_(att|layer|block)
    | cross_(att|layer) | global.*(head|attn|attention) | (head|attn|attention).*global | (heads|config)_per_layer
    | per_layer_(config|head) | block_(config|type) | layer_(group|config|period|offset) | hybrid
    | kv_?(shar|reus) | (shar|reus)\w*_kv | compress | lightning | recur | retention | v_head_dim
    | softmax_(scale|logit) | softcap | qk_scale | kv_lora""",
    re.VERBOSE,
)
"""Names that change what attention computes or keeps, in the config of any type."""

_CHANGES_STATE = re.compile(
    r"mamba|(^|_)ssm|(^|_)linear_(?!att)|(^|_)delta|(^|_)conv(\d|_|$)|d_state|state_size|recurrent|^chunk_size$"
)
"""Names that describe a recurrent state; in the config of a type that has none they are a sign of another model."""

_CONCERNS_LAYERS = re.compile(
    r"attn|attention|head|kv|q_|qk|v_dim|group|layer|block|local|global|cache|memory|share|scalar|state"
)
"""Names that may change attention or state: those of an unknown type must be read or harmless."""

_HARMLESS = re.compile(
    r"""expert | moe | mlp | ffn | feed_forward | router | k_dense | num_dense | (n|topk)_group$ | rope | rotary
    | norm | (^|_)(image|audio|video|vision)(_|$) | token(_id|_index)?$ | ^quant | drop | pdrop | initializer
    | _init(_|$) | ^(use_|add_)?(attention|attn|qkv|conv)(_out|_proj)?_bias$ | eps(ilon)?$ | hidden_states$
    | output_attentions | lm_head | flash_att | implementation | attn_impl | in_fp32 | final_logit
    | (^|use_)cache$ | kv_cache_(dtype|scheme|quant) | pre_allocate_kv_cache | mtp | nextn | output_gate
    | scale_attn_weights | parallel_attn | (embedding|residual|in|out|key|ssm|mlp)_multipliers?$ | alibi_bias_max
    | num_hidden_layers$ | intermediate_size | (de|en)coder_sparse_step | sparse_(flash|head) | compression_ratio
    | offset_alibi | activation_spars | per_layer_input$ | ^(de|en)coder_(layers|attention_heads)$""",
    re.VERBOSE,
)
"""Names that one of these patterns matches and that change neither attention nor state."""

_OF_OTHER_MODALITIES = re.compile(r"^window_size$|chunk")
"""Names that concern images or sound where they stand around the language model."""

_ONLY_LISTS_LAYERS = re.compile(
    r"pattern|interval|every_n|period|offset|layer_ids|layer_indices|idxs|max_window_layers|use_sliding_window"
)
"""Names that say which layers are which; an explicit list of the layers says it too."""

_READ = """
    alibi attention_head_dim attention_multiplier attn_config attn_layer_indices attn_layer_offset attn_layer_period
    attn_logit_softcapping attn_type attn_type_list full_attention_interval full_attn_idxs head_dim hidden_size
    hybrid_override_pattern kv_n_heads layer_types layers_block_type linear_attn_config max_window_layers n_head
    n_head_kv n_heads n_layer n_layers num_attention_heads num_hidden_layers num_key_value_heads num_kv_heads
    num_layers query_pre_attn_scalar sliding_window sliding_window_pattern softmax_scale use_sliding_window
"""
READ = frozenset(_READ.split())
"""Names that `model_config.py` reads, of those that the patterns above match."""

_OF_THE_LATENT = {"kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
"""Names that are read, or change nothing, where attention caches its latent."""


def inert(value: object) -> bool:
    """Whether a value says that what its key names is not used."""
    if isinstance(value, list):
        return all(inert(each) for each in value)
    return value in (None, False, 0, -1, "", {})


def unread(model_type: str, keys: Mapping[str, object], *, around: Collection[str], listed: bool) -> list[str]:
    """Return the keys that change attention or state and are not read.

    Args:
        model_type: Of the model.
        keys: Of its config.
        around: Those that stand around the language model of a multimodal one.
        listed: Whether the config lists its layers.
    """
    off = tuple(
        f"{name.removeprefix('use_')}_" for name, value in keys.items() if name.startswith("use_") and value is False
    )
    return sorted(
        name
        for name, value in keys.items()
        if name not in READ
        and not (inert(value) and (name, value) != ("is_causal", False))
        and not name.startswith(off)
        and not (name in around and _OF_OTHER_MODALITIES.search(name))
        and not (listed and _ONLY_LISTS_LAYERS.search(name))
        and not (model_type in LATENT and name in _OF_THE_LATENT)
        and _matters(model_type, name.lower())
    )


def _matters(model_type: str, name: str) -> bool:
    if _HARMLESS.search(name):
        return False
    rule = RULES.get(model_type)
    known = rule is not None or model_type in ENCODER_DECODERS
    recurrent = rule in {"hybrid", "states", "both"}
    if recurrent and _CHANGES_STATE.search(name):
        return False
    if _CHANGES_ATTENTION.search(name) or _CHANGES_STATE.search(name):
        return True
    return not known and bool(_CONCERNS_LAYERS.search(name))


def named_like_kv_heads(keys: Mapping[str, object]) -> list[str]:
    """Return the keys that may hold a number of KV heads under another name."""
    other = re.compile(r"^(n|topk)_group$|expert|topk|mamba|n_groups|lora|cache|quant|group_size")
    alike = re.compile(r"group|kv_?head|kv_n|n_kv|key_value")
    return sorted(
        name for name, value in keys.items() if alike.search(name) and not other.search(name) and not inert(value)
    )


def named_like_states(keys: Mapping[str, object]) -> list[str]:
    """Return the keys that may describe a recurrent state."""
    return sorted(
        name
        for name, value in keys.items()
        if _CHANGES_STATE.search(name) and not _HARMLESS.search(name) and not inert(value)
    )
