# SPDX-License-Identifier: Apache-2.0
"""Models as their configs describe them: kinds of layers, block sizes, and a route for each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pagedkv.arch import ARCHES, limits
from pagedkv.errors import InvalidFileError, MisuseError
from pagedkv.routing import NoKernelError
from pagedkv.routing.explain import Deployment, explain, kv_format
from pagedkv.routing.model_config import hybrid_block_size, read_config, recurrent_state

CONFIGS = Path(__file__).parent / "configs"
POCKET = Path(__file__).resolve().parents[3] / "evals" / "pocket" / "hybrid"
EVERYBODY = ("pagedkv", "aiter", "vllm")


def explained(name: str, arch: str = "gfx942", providers=EVERYBODY, **more):
    return explain(read_config(CONFIGS / f"{name}.json"), Deployment(arch=arch, providers=providers, **more))


KINDS = {
    "granite-4.0-h-tiny": ["4 full attention q12kv4d128 scale=0.0078125", "36 Mamba-2"],
    "qwen3-next-80b-a3b": ["12 full attention q16kv2d256", "36 gated delta net"],
    "qwen3.5-35b-a3b": ["10 full attention q16kv2d256", "30 gated delta net"],
    "qwen3.5-27b": ["16 full attention q24kv4d256", "48 gated delta net"],
    "jamba-v0.1": ["4 full attention q32kv8d128", "28 Mamba"],
    "bamba-9b": ["3 full attention q32kv8d128", "29 Mamba-2"],
    "nemotron-h-8b": ["4 full attention q32kv8d128", "24 Mamba-2"],
    "zamba2-1.2b": ["6 full attention q32kv32d128 scale=0.125", "38 Mamba-2"],
    "falcon-h1-0.5b": ["36 full attention q8kv2d64", "36 Mamba-2"],
    "lfm2-1.2b": ["6 full attention q32kv8d64", "10 short convolution"],
    "gemma-2-27b": [
        "23 full attention q32kv16d128 softcap=50.0 scale=0.0833333",
        "23 sliding window of 4096 q32kv16d128 window=4096 softcap=50.0 scale=0.0833333",
    ],
    "gpt-oss-20b": [
        "12 full attention q64kv8d64 sinks=True",
        "12 sliding window of 128 q64kv8d64 window=128 sinks=True",
    ],
    "bloom-7b1": ["30 full attention q32kv32d128 alibi=True"],
    "mpt-7b": ["32 full attention q32kv32d128 alibi=True"],
    "whisper-large-v3": [
        "32 decoder self-attention q20kv20d64",
        "32 cross attention q20kv20d64 causal=False",
        "32 encoder self-attention",
    ],
    "deepseek-v2-lite": ["27 MLA"],
    "llama-3.1-8b": ["32 full attention q32kv8d128"],
    "mistral-7b-v0.1": ["32 sliding window of 4096 q32kv8d128 window=4096"],
}
"""Model: its kinds of layers, from its model card."""


def shown(layer) -> str:
    words = [f"{layer.kind.count} {layer.kind.name}"]
    if request := layer.request:
        words += [f"q{request.num_q_heads}kv{request.num_kv_heads}d{request.head_size}"]
        options = {key: getattr(request, key) for key in ("window", "softcap", "alibi", "sinks")}
        words += [f"{key}={value}" for key, value in options.items() if value]
        words += [f"scale={request.custom_scale:g}"] if request.custom_scale else []
        words += [] if request.causal else ["causal=False"]
    return " ".join(words)


def test_every_config_is_tried():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("model", KINDS)
def test_kinds_of_layers(model):
    assert [shown(layer) for layer in explained(model).layers] == KINDS[model]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("model", [*KINDS, "pocket"])
def test_every_layer_is_served_by_our_kernels_alone(model, arch):
    config = read_config(POCKET if model == "pocket" else CONFIGS / f"{model}.json")
    dtype = "float32" if arch == "interpreter" else None  # which computes bfloat16 wrongly
    hybrid = any(layer.kind.keeps == "state" for layer in explained_config(config, arch, dtype=dtype).layers)
    for kv_cache_dtype in ("auto", "fp8", "fp8_e5m2"):
        for packing in ("rows",) if model == "falcon-h1-0.5b" else ("rows", "native"):
            answer = explained_config(config, arch, dtype=dtype, kv_cache_dtype=kv_cache_dtype, packing=packing)
            latent_on_rdna = model == "deepseek-v2-lite" and limits(arch).matrix == "wmma"
            assert answer.served != latent_on_rdna
            assert f"does not run on {arch}" in answer.layers[0].note or not latent_on_rdna
            for layer in answer.layers:
                if layer.answer:
                    assert layer.answer.layout.sides == ("interleaved" if hybrid else "planes")
                    assert {choice.kernel for choice in layer.answer.choices} == {
                        "pagedkv.write_kv_cache",
                        "pagedkv.paged_attention",
                        None,
                    }


def explained_config(config, arch, **more):
    return explain(config, Deployment(arch=arch, providers=("pagedkv",), **more))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1201", "sm_90"])
def test_the_scan_of_mamba_2(arch):
    """Ours whatever the chunk; nobody's where there is no Mamba-2."""
    bamba = read_config(CONFIGS / "bamba-9b.json")
    attention, mamba = explained_config(bamba, arch).layers
    assert attention.scan is None
    assert mamba.scan.kernel == "pagedkv.ssd_prefill"
    assert mamba.scan.also == ("vllm._mamba_chunk_scan_combined_fwd",)
    assert f"{64 if arch != 'gfx1201' else 32} channels a program, tiles of" in mamba.scan.why
    assert mamba.scan.basis == ("measured on H200" if arch == "sm_90" else "policy")
    assert ("H200" in mamba.scan.why) == (arch == "sm_90")
    small = dataclasses.replace(bamba, keys=bamba.keys | {"mamba_n_heads": 256, "mamba_d_head": 32})
    assert "32 channels a program, tiles of" in explained_config(small, arch).layers[1].scan.why


KIMI = {
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32},
}


@pytest.mark.parametrize("size", [128, 256])
def test_the_delta_rule_says_its_setting_and_its_head_sizes(size):
    known = read_config(CONFIGS / "qwen3-next-80b-a3b.json")
    linear = KIMI["linear_attn_config"] | {"head_dim": size, "short_conv_kernel_size": 4}
    gdn = dataclasses.replace(known, keys=known.keys | {"linear_key_head_dim": size})
    kda = dataclasses.replace(known, keys=KIMI | {"linear_attn_config": linear})
    for config, theirs in ((gdn, "vllm.chunk_gated_delta_rule"), (kda, "vllm.chunk_kda_with_fused_gate")):
        delta = next(layer.scan for layer in explained_config(config, "gfx942").layers if layer.scan)
        if size == 256:
            assert (delta.kernel, delta.also) == (theirs, ())
            assert "ours take heads of 64 and 128, not 256 keys" in delta.why
        else:
            assert (delta.kernel, delta.also) == ("pagedkv.gdn_prefill and pagedkv.gdn_decode", (theirs,))
            assert "with PAGEDKV_GDN=1" in delta.why


BLOCKS = {"qwen3-next-80b-a3b": 544, "qwen3.5-35b-a3b": 1056, "qwen3.5-27b": 784}


@pytest.mark.parametrize("model", BLOCKS)
def test_block_sizes_of_hybrids(model):
    """Blocks that vLLM 0.32 reports; 544 worked out by hand: (8192 x 3 + 32 x 128 x 128) x 2 bytes of state are 536
    tokens of 2 x 2 x 256 x 2 bytes, and 544 is the next multiple of 16."""
    assert explained(model).block_size == BLOCKS[model]


@pytest.mark.parametrize(
    ("state_bytes", "token_bytes", "asked", "tokens"),
    [
        (1_097_728, 2048, 16, 544),
        (2_146_304, 2048, 16, 1056),
        (3_207_168, 4096, 16, 784),
        (268_288, 256, 128, 1152),  # seen on the CPU platform, whose blocks are multiples of 128
        (2048 * 256, 256, 16, 2048),  # one KV head of 64 channels, as in vLLM PR 38502
        (2048 * 256 + 1, 256, 16, 2064),
        (1_097_728, 2048, 64, 576),
        (100, 2048, 32, 32),
        (2048 * 17, 2048, 1, 32),
        (2048 * 17, 2048, 24, 32),  # 17 tokens are one block of 24, and 24 is no multiple of 16
    ],
)
def test_block_size_by_hand(state_bytes, token_bytes, asked, tokens):
    assert hybrid_block_size(state_bytes, token_bytes, asked=asked) == tokens


STATES = {
    "qwen3-next-80b-a3b": 1_097_728,  # (8192 x 3 + 32 x 128 x 128) x 2
    "qwen3.5-35b-a3b": 2_146_304,  # 8192 x 3 x 2 + 32 x 128 x 128 x 4
    "qwen3.5-27b": 3_207_168,  # 10240 x 3 x 2 + 48 x 128 x 128 x 4
    "granite-4.0-h-tiny": 806_400,  # ((3072 + 2 x 128) x 3 + 48 x 64 x 128) x 2
    "bamba-9b": 2_147_840,  # ((8192 + 2 x 128) x 3 + 128 x 64 x 128) x 2
    "nemotron-h-8b": 4_255_744,  # (8192 + 2 x 8 x 128) x 3 x 2 + 128 x 64 x 128 x 4: vLLM keeps its states in float32
    "zamba2-1.2b": 549_632,  # ((4096 + 2 x 64) x 3 + 64 x 64 x 64) x 2
    "falcon-h1-0.5b": 403_968,  # ((1536 + 2 x 128) x 3 + 24 x 64 x 128) x 2
    "jamba-v0.1": 311_296,  # (8192 x 3 + 8192 x 16) x 2
    "lfm2-1.2b": 8_192,  # 2048 x 2 x 2
}
"""Model: bytes of state of a sequence in one recurrent layer."""


@pytest.mark.parametrize("model", STATES)
def test_state_by_hand(model):
    assert (
        recurrent_state(read_config(CONFIGS / f"{model}.json"), tp=1, dtype="bfloat16", ssm_dtype=None).bytes
        == STATES[model]
    )


def test_state_of_a_rank_holds_the_groups_of_its_heads():
    """One group is repeated on each of two ranks: ((3072 + 2 x 2 x 128) / 2 x 3 + 24 x 64 x 128) x 2."""
    config = read_config(CONFIGS / "granite-4.0-h-tiny.json")
    assert recurrent_state(config, tp=2, dtype="bfloat16", ssm_dtype=None).bytes == 403_968


def test_what_moves_the_block_size():
    """544 tokens of bf16; half the bytes a token, or twice the bytes of state, need about twice the tokens."""
    assert explained("qwen3-next-80b-a3b", kv_cache_dtype="fp8").block_size == 1072
    assert explained("qwen3-next-80b-a3b", ssm_dtype="float32").block_size == 1056
    assert explained("qwen3-next-80b-a3b", tp=2).block_size == 544  # both are halved
    assert explained("llama-3.1-8b", block_size=1).block_size == 1


def decode(model, **more):
    return [layer.answer.decode.kernel for layer in explained(model, **more).layers if layer.answer]


def test_models_are_routed_to_kernels_that_take_them():
    assert decode("llama-3.1-8b") == ["aiter.paged_attention_v1"]
    assert decode("llama-3.1-8b", packing="shuffle") == ["aiter.paged_attention_rocm"]
    assert decode("llama-3.1-8b", packing="shuffle", num_blocks=60_000) == ["aiter.paged_attention_common"]
    assert decode("llama-3.1-8b", packing="native", arch="gfx90a") == ["vllm.paged_attention_rocm"]
    assert decode("mpt-7b") == ["aiter.paged_attention_v1"]
    assert decode("granite-4.0-h-tiny") == ["pagedkv.paged_attention"]
    assert decode("gemma-2-27b") == ["aiter.paged_attention_v1", "pagedkv.paged_attention"]
    assert decode("gpt-oss-20b", providers=("aiter", "vllm")) == ["vllm.kernel_unified_attention"] * 2


def test_an_unserved_layer_is_reported_with_near_misses():
    answer = explained("gemma-2-27b", providers=("vllm",), packing="native")
    assert not answer.served
    for layer in answer.layers:
        assert isinstance(layer.answer, NoKernelError)
        near = {str(rejection) for rejection in layer.answer.rejected if len(rejection.mismatches) == 1}
        assert any(line.startswith("vllm.kernel_unified_attention: packing native, takes rows only") for line in near)


def test_heads_are_shared_by_ranks():
    (layer, _) = explained("qwen3-next-80b-a3b", tp=4).layers
    assert (layer.request.num_q_heads, layer.request.num_kv_heads) == (4, 1)
    with pytest.raises(MisuseError, match="--tp: got 3"):
        explained("llama-3.1-8b", tp=3)


def test_fp8_means_what_the_arch_means():
    assert [kv_format("fp8", arch, "bfloat16") for arch in ("gfx942", "gfx950")] == ["e4m3fnuz", "e4m3fn"]
    assert kv_format("bfloat16", "gfx942", "bfloat16") == "auto"
    with pytest.raises(MisuseError, match="got float16; expected auto, bfloat16"):
        kv_format("float16", "gfx942", "bfloat16")


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("jamba-v0.1", {"sides": "planes"}, "expected interleaved"),
        ("bloom-7b1", {"kv_cache_dtype": "int8"}, "--kv-cache-dtype: got int8"),
        ("qwen3-next-80b-a3b", {"tp": 32}, "--tp: got 32"),
    ],
)
def test_a_deployment_that_contradicts_the_model(model, more, message):
    with pytest.raises(MisuseError, match=message):
        explained(model, **more)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("torch_dtype", "int4", InvalidFileError, "dtype: got 'int4'"),
        ("torch_dtype", None, MisuseError, "--dtype"),
        ("max_position_embeddings", None, MisuseError, "--max-model-len"),
    ],
)
def test_what_a_deployment_needs_and_a_config_lacks(key, value, error, message):
    llama = read_config(CONFIGS / "llama-3.1-8b.json")
    with pytest.raises(error, match=message):
        explained_config(dataclasses.replace(llama, keys=llama.keys | {key: value}), "gfx942")
