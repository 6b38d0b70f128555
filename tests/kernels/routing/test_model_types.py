# SPDX-License-Identifier: Apache-2.0
"""Published configs by the keys that decide: what each layer is, or which key is not described. Nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pagedkv.errors import Exit, InvalidFileError
from pagedkv.routing import __main__ as cli
from pagedkv.routing import model_types
from pagedkv.routing.model_config import Config, layer_kinds, read_config, recurrent_state

CONFIGS = Path(__file__).parent / "configs"
LLAMA = json.loads((CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
BFLOAT16 = {"dtype": "bfloat16", "max_position_embeddings": 131072}


def attention(layers, heads, kv_heads, head_dim, hidden_size):
    return BFLOAT16 | {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
    }


def gated_delta_net(value_heads):
    return {
        "linear_num_value_heads": value_heads,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def latent(rank, rotary):
    return {"kv_lora_rank": rank, "qk_rope_head_dim": rotary, "qk_nope_head_dim": 128, "v_head_dim": 128}


def mamba_2(heads, head_dim, groups):
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": 128,
        "n_groups": groups,
        "conv_kernel": 4,
        "chunk_size": 128,
        "use_mamba_kernels": True,
        "mamba_hidden_act": "silu",
    }


INTERLEAVED = ["linear_attention"] * 3 + ["full_attention"]
QWEN3_8 = {
    "model_type": "qwen3_5",
    "text_config": attention(64, 24, 4, 256, 5120)
    | gated_delta_net(48)
    | {
        "model_type": "qwen3_5_text",
        "layer_types": INTERLEAVED * 16,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mtp_num_hidden_layers": 1,
    },
}
NEMOTRON_9B = attention(56, 40, 8, 128, 4480) | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    **mamba_2(128, 80, 8),
}
NEMOTRON_3_NANO = attention(52, 32, 2, 128, 2688) | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_ssm_cache_dtype": "float32",
    "sliding_window": None,
    **mamba_2(64, 64, 8),
}
KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": attention(93, 96, 96, 128, 7168)
    | latent(512, 64)
    | {
        "model_type": "kimi_linear",
        "attn_res_block_size": 4,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [layer for layer in range(1, 93) if layer % 4],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
    },
}
FALCON_H1_34B = attention(72, 20, 4, 128, 5120) | {
    "model_type": "falcon_h1",
    "mamba_d_ssm": 4096,
    "mamba_n_heads": 32,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "mamba_rms_norm": False,
    "attn_layer_indices": None,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": [0.35, 0.25, 0.12, 0.35, 0.18],
}
LFM2_VL = {
    "model_type": "lfm2_vl",
    "downsample_factor": 2,
    "text_config": BFLOAT16
    | {
        "model_type": "lfm2",
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_ff_dim": 12288,
    },
}
JAMBA2_3B = BFLOAT16 | {
    "model_type": "jamba",
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 1,
    "hidden_size": 2560,
    "attn_layer_period": 14,
    "attn_layer_offset": 7,
    "expert_layer_period": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 160,
    "use_mamba_kernels": True,
}
GRANITE_MICRO = attention(40, 40, 8, 64, 2560) | {
    "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 40,
    "attention_multiplier": 0.015625,
    "position_embedding_type": "rope",
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_chunk_size": 256,
    "mamba_expand": 2,
}
MINIMAX_M2 = attention(62, 48, 8, 128, 3072) | {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "num_mtp_modules": 3,
}
BAICHUAN_13B = {
    "model_type": "baichuan",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "model_max_length": 4096,
}
HUNYUAN_A13B = attention(32, 32, 8, 128, 4096) | {
    "model_type": "hunyuan_v1_moe",
    "attention_head_dim": 128,
    "use_cla": False,
    "cla_share_factor": 2,
    "kv_lora_rank": None,
    "use_mla": False,
}
DEEPSEEK_OCR = {
    "model_type": "deepseek_vl_v2",
    "language_config": BFLOAT16
    | {
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "hidden_size": 1280,
        "kv_lora_rank": None,
        "qk_nope_head_dim": 0,
        "v_head_dim": 0,
        "use_mla": False,
    },
}
EXAONE_3_5 = BFLOAT16 | {
    "model_type": "exaone",
    "num_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}

ANSWERED = {
    "config-14 Nemotron-Nano-9B-v2": (NEMOTRON_9B, [(4, 8, 128), (27, 12288 * 3 * 2 + 128 * 80 * 128 * 4)]),
    "config-15 Nemotron-3-Nano": (NEMOTRON_3_NANO, [(6, 2, 128), (23, 6144 * 3 * 2 + 64 * 64 * 128 * 4)]),
    "config-13 Nemotron-Nano-VL": (
        {"model_type": "NemotronH_Nano_VL_V2", "llm_config": NEMOTRON_9B, "downsample_ratio": 0.5},
        [(4, 8, 128), (27, 12288 * 3 * 2 + 128 * 80 * 128 * 4)],
    ),
    "config-17 Qwen3.8-27B": (QWEN3_8, [(16, 4, 256), (48, 10240 * 3 * 2 + 48 * 128 * 128 * 4)]),
    "config-09 Kimi-K3": (KIMI_K3, [(24, 1, 576), (69, 3 * 12288 * 3 * 2 + 96 * 128 * 128 * 4)]),
    "config-29 Falcon-H1-34B": (FALCON_H1_34B, [(72, 4, 128), (72, 5120 * 3 * 2 + 32 * 128 * 256 * 2)]),
    "config-12 LFM2.5-VL": (LFM2_VL, [(6, 8, 64), (10, 2048 * 2 * 2)]),
    "config-30 Jamba2-3B": (JAMBA2_3B, [(2, 1, 128), (26, (5120 * 3 + 5120 * 16) * 2)]),
    "config-27 Granite-4.0-micro": (GRANITE_MICRO, [(40, 8, 64)]),
    "config-22 Baichuan-13B": (BAICHUAN_13B, [(40, 40, 128)]),
    "MiniMax-M2": (MINIMAX_M2, [(62, 8, 128)]),
    "DeepSeek-OCR": (DEEPSEEK_OCR, [(12, 10, 128)]),
    "EXAONE-3.5": (EXAONE_3_5, [(32, 8, 128)]),
    "Hunyuan-A13B": (HUNYUAN_A13B, [(32, 8, 128)]),
}
"""Config: of each kind of layer its count, with KV heads and head size, or with the bytes of a state."""


def written(folder, keys):
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return read_config(folder)


@pytest.mark.parametrize("model", ANSWERED)
def test_published_configs_are_read(model, tmp_path):
    keys, kinds = ANSWERED[model]
    config = written(tmp_path, keys)
    found = []
    for kind in layer_kinds(config):
        if kind.keeps == "state":
            state = recurrent_state(config, tp=1, dtype="bfloat16", ssm_dtype=None)
            found.append((kind.count, state.bytes))
        else:
            found.append((kind.count, kind.num_kv_heads, kind.head_size))
    assert found == kinds


def test_only_the_larger_baichuan_has_alibi():
    kinds = [layer_kinds(Config("c", BAICHUAN_13B | {"hidden_size": width})) for width in (5120, 4096 * 40 // 32)]
    assert [kind.alibi for (kind,) in kinds] == [True, True]
    (small,) = layer_kinds(Config("c", BAICHUAN_13B | {"hidden_size": 4096, "num_attention_heads": 32}))
    assert not small.alibi


@pytest.mark.parametrize("command", ["explain", "fit"])
def test_what_is_not_described_is_refused(command, tmp_path, capsys):
    """Ling 3.0: an unknown type, and keys that change attention."""
    written(tmp_path, LLAMA | latent(512, 64) | {"model_type": "bailing_hybrid", "layer_group_size": 4})
    given = ["--model", str(tmp_path)] if command == "explain" else [str(tmp_path), "--weights", "9"]
    assert cli.main([command, *given, "--arch", "gfx942"]) == Exit.INVALID_FILE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"\n  where: {tmp_path / 'config.json'}\n" in printed.err
    assert "model type bailing_hybrid" in printed.err
    assert "kv_lora_rank, layer_group_size" in printed.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "llama5"},
            "model type llama5 is unknown here .* add layer_types with these 32 words to a copy",
        ),
        ({"model_type": None}, "model type None is unknown here"),
        ({"model_type": "t5"}, "relative position bias"),
        ({"layer_types": ["chunked_attention"]}, "layers of type chunked_attention are not described"),
        ({"layer_types": "full_attention"}, "expected a list of words"),
        ({"sliding_window": 4096}, "does not say in which layers"),
        ({"num_attention_heads": None}, "says none of num_attention_heads, n_head, n_heads"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads: got '8'"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping: got -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000; expected at most 10000"),
        ({"hybrid_override_pattern": "M?"}, "letters"),
        ({"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}, "recurrent layers that are not described"),
        ({"model_type": "bamba"}, "model type bamba does not list its layers"),
        ({"layer_types": ["full_attention"] * 31}, "lists 31 layers, and num_hidden_layers is 32"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "lists 2 layers, and num_hidden_layers is 32"),
        (
            {"num_key_value_heads": None, "num_query_groups": 8},
            "says none of num_key_value_heads.* but num_query_groups",
        ),
        ({"model_type": "qwen3"}, "model type qwen3 says nothing of head_dim.*; add them"),
        ({"num_attention_heads": 30}, "head_dim: got none, and 30 heads do not divide 4096 channels; add head_dim"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "minicpm"},
            "has keys that may change .*: kv_lora_rank",
        ),
        (
            {"attn_layer_period": 8, "model_type": "jamba"},
            "attn_layer_offset: got None; expected an integer from 0 to 7",
        ),
        ({"attn_layer_indices": [3], "model_type": "falcon_h1"}, "no layers of attention alone"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}},
            "full_attn_layers and kda_layers are not the 32 layers",
        ),
        ({"full_attn_idxs": [40], "model_type": "lfm2"}, r"attention in the layers \[40\]"),
        ({"is_encoder_decoder": True}, "model type llama is an encoder-decoder that is not described here"),
        ({"attn_type_list": ([0] * 7 + [1]) * 4}, "attn_type_list: 28 of 32 layers are not of type 1"),
        (
            {"model_type": "minimax", "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4},
            "model type minimax has recurrent layers",
        ),
        (
            {"model_type": "zamba2", "layers_block_type": (["mamba"] * 7 + ["hybrid"]) * 4, "mamba_headdim": 64},
            "says nothing of n_mamba_heads",
        ),
        (
            {"model_type": "zamba", "layers_block_type": (["mamba"] * 7 + ["hybrid"]) * 4, "n_mamba_heads": 2},
            "model type zamba .*n_mamba_heads",
        ),
        *(
            ({"model_type": "another", "layer_types": ["full_attention"] * 32, key: value}, f"another .*{key}")
            for key, value in {
                "mamba_ssm_dtype": "float32",
                "multi_query_group_num": 2,
                "num_attention_groups": 8,
                "short_conv_kernel_size": 4,
            }.items()
        ),
        *(
            ({key: value}, f"has keys that may change attention .*: {key}")
            for key, value in {
                "index_topk": 2048,
                "indexer_types": ["full"],
                "swa_head_dim": 64,
                "attention_sink_tokens": 4,
                "attn_layer_idx": [3],
                "relative_attention_bias": True,
                "mamba_d_state": 16,
                "ssm_cfg": {"layer": "Mamba2"},
                "linear_attn_layers": [1],
                "attention_window": 512,
                "interleaved_sliding_window": [4096],
                "sliding_window_size": 4096,
                "num_kv_shared_layers": 15,
                "kv_reuse_group": [[0, 1]],
                "attention_sink_bias_layers": [1],
                "use_alibi": True,
                "attn_logit_softcap": 30.0,
                "num_attention_heads_per_layer": [32, 16],
                "lru_width": 2560,
                "v_head_dim": 64,
                "use_bidirectional_attention": True,
                "is_causal": False,
                "attention_chunk_size": 8192,
                "attention_other_setting": {"num_attention_heads": 96},
                "attention_window_size": 2048,
                "block_configs": [{"attention": {"no_op": True}}],
                "block_types": ["recurrent", "attention"],
                "cross_attention_layers": [3, 8],
                "dual_chunk_attention_config": {"chunk_size": 262144},
                "global_attn_idx": [0, 15, 31],
                "global_head_dim": 512,
                "hybrid_layer_pattern": [0, 1, 1],
                "index_n_heads": 32,
                "indexer_topk": 2048,
                "layer_group_size": 4,
                "mb_per_layer": 2,
                "num_global_key_value_heads": 4,
                "num_mamba": 1,
                "sparse_config": {"block_size": 64},
                "swa_num_key_value_heads": 8,
            }.items()
        ),
    ],
)
def test_a_change_of_a_known_model_is_refused(changes, said):
    with pytest.raises(InvalidFileError, match=said):
        layer_kinds(Config("config.json", LLAMA | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_chunk_size": None, "num_kv_shared_layers": 0, "sliding_window": None, "layer_group_size": -1},
        {"attention_bias": True, "attention_dropout": 0.1, "attn_implementation": "sdpa", "chunk_size_feed_forward": 1},
        {
            "layer_types": ["full_attention"] * 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "sliding_window_pattern": "LLLG",
        },
        {"use_cla": False, "cla_share_factor": 2},
        {
            "ignore_index": -100,
            "offset_alibi": 100,
            "compression_ratio": 1.0,
            "crossmodal_depth": 2,
            "kv_channels": 128,
        },
        {
            "model_type": "llama5",
            "layer_types": ["full_attention"] * 32,
            "moe_layer_freq": 1,
            "n_group": 8,
            "rope_theta": 1e4,
        },
    ],
)
def test_what_is_off_or_harmless_is_no_error(changes):
    (kind,) = layer_kinds(Config("config.json", LLAMA | changes))
    assert (kind.count, kind.num_kv_heads, kind.window) == (32, 8, None)


GEMMA_2 = {"head_dim": 128, "query_pre_attn_scalar": 128, "attn_logit_softcapping": 50.0}


@pytest.mark.parametrize(
    ("changes", "full", "sliding"),
    [
        ({"sliding_window": 64, "use_sliding_window": False}, 32, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({"sliding_window": 64, "sliding_window_pattern": 6}, 5, 27),
        ({"sliding_window": 64, "model_type": "gemma2", "num_hidden_layers": 33} | GEMMA_2, 16, 17),
    ],
)
def test_which_layers_slide(changes, full, sliding):
    counts = {bool(kind.window): kind.count for kind in layer_kinds(Config("config.json", LLAMA | changes))}
    assert (counts.get(False, 0), counts.get(True, 0)) == (full, sliding)


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"num_key_value_heads": None}, 32),
        ({"attn_config": {"kv_n_heads": 4}}, 4),
    ],
)
def test_kv_heads_of_other_families(changes, kv_heads):
    (kind,) = layer_kinds(Config("config.json", LLAMA | changes))
    assert kind.num_kv_heads == kv_heads


STATE_DTYPES = {
    "qwen3_5": 4,
    "minicpmv4_6": 2,  # vLLM takes the key by the outermost architecture, and this one is not among them
}


@pytest.mark.parametrize("outer", STATE_DTYPES)
def test_the_outermost_type_decides_the_dtype_of_states(outer, tmp_path):
    config = written(tmp_path, QWEN3_8 | {"model_type": outer})
    state = recurrent_state(config, tp=1, dtype="bfloat16", ssm_dtype=None)
    assert state.bytes == 10240 * 3 * 2 + 48 * 128 * 128 * STATE_DTYPES[outer]


def test_a_state_dtype_of_an_unknown_model_must_be_given(tmp_path):
    config = written(tmp_path, QWEN3_8 | {"model_type": "qwen3_5_omni"})
    with pytest.raises(
        InvalidFileError, match=r"of model type qwen3_5_omni is not .* mamba_ssm_dtype: float32\. Give one: --ssm-dtype"
    ):
        recurrent_state(config, tp=1, dtype="bfloat16", ssm_dtype=None)
    assert recurrent_state(config, tp=1, dtype="bfloat16", ssm_dtype="float32").element_bytes == (2, 4)


class Recording(dict):
    """Keys of a config that remember which of them were asked for."""

    def __init__(self, keys, asked):
        super().__init__(
            {key: Recording(value, asked) if key == "attn_config" else value for key, value in keys.items()}
        )
        self.asked = asked

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def test_every_name_that_is_said_to_be_read_is_read(tmp_path):
    configs = [read_config(path) for path in CONFIGS.glob("*.json")]
    configs += [written(tmp_path, keys) for keys, _ in ANSWERED.values()]
    sliding = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}
    configs += [Config("llama", LLAMA | sliding), Config("llama", LLAMA | sliding | {"sliding_window_pattern": 6})]
    asked = set()
    for config in configs:
        layer_kinds(dataclasses.replace(config, keys=Recording(config.keys, asked)))
    assert asked >= model_types.READ


@pytest.mark.parametrize("arch", ["any", "gfx1030"])
def test_latent_layers_fit_on_an_arch_without_routes(arch, tmp_path, capsys):
    written(tmp_path, KIMI_K3)
    given = ["--arch", arch, "--memory", "192", "--weights", "9", "--tp", "8"]
    assert cli.main(["fit", str(tmp_path), *given]) == Exit.PASS
    assert f"not described here for arch {arch}" in " ".join(capsys.readouterr().out.split())
