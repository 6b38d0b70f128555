# SPDX-License-Identifier: Apache-2.0
"""The data about kernels: complete, sourced, and true to the defects that were paid for."""

from __future__ import annotations

import re

import pytest
from support import routing_oracle as oracle

from pagedkv.arch import ARCHES
from pagedkv.errors import InvalidFileError
from pagedkv.routing import NoKernelError, Request, route
from pagedkv.routing.candidates import FOLDER, GPU_ARCHES, PREFERENCE, load, read_kernels, read_preference

ASM = ("aiter.pa_fwd_asm", "aiter.paged_attention_common")
SHUFFLE = {"packing": "shuffle"}

DEFECTS = {
    "C1 head size 256 in the assembly (vllm 32914)": (SHUFFLE | {"head_size": 256}, ASM, "head_size"),
    "C3 custom scale in the assembly (aiter attention.py:235)": (SHUFFLE | {"scale": 0.05}, ASM, "scale"),
    "C4 window dropped (vllm 46847, aiter 3959)": (
        SHUFFLE | {"window": 64},
        (*ASM, "aiter.paged_attention_rocm"),
        "window",
    ),
    "C4 soft cap dropped": (SHUFFLE | {"softcap": 30.0}, (*ASM, "aiter.paged_attention_rocm"), "softcap"),
    "C4 ALiBi dropped": (SHUFFLE | {"alibi": True}, ASM, "alibi"),
    "C4 sinks dropped": (SHUFFLE | {"sinks": True}, (*ASM, "aiter.paged_attention_rocm"), "sinks"),
    "block ids of 16 bits (aiter 3062)": (SHUFFLE | {"num_blocks": 65_536}, ASM, "num_blocks"),
    "pool of unknown size (aiter 3062)": (SHUFFLE | {"num_blocks": None}, ASM, "num_blocks"),
    "scales ignored by the SHUFFLE writer": (
        SHUFFLE | {"kv_cache_dtype": "e4m3fnuz", "kv_scales": "tensor"},
        ("vllm.reshape_and_cache_shuffle_triton", "vllm.cp_mha_gather_cache_shuffle"),
        "kv_scales",
    ),
    "window gathered as NHD from SHUFFLE (vllm 33123)": (
        SHUFFLE | {"window": 64},
        ("vllm.cp_mha_gather_cache_nhd",),
        "packing",
    ),
    "block 1056 in the native writer (vllm 35923)": (
        {"packing": "native", "block_size": 1056},
        ("vllm.reshape_and_cache", "vllm.paged_attention_rocm"),
        "block_size",
    ),
    "interleaved block of 16 in native kernels (vllm 38502)": (
        {"packing": "native", "sides": "interleaved"},
        ("vllm.reshape_and_cache", "vllm.paged_attention_rocm"),
        "sides",
    ),
    "NaN outside the window (vllm)": (
        {"packing": "native", "window": 64},
        ("vllm.kernel_paged_attention_2d",),
        "window",
    ),
    "soft cap kept and not passed (vllm ROCM_ATTN)": (
        {"packing": "native", "softcap": 30.0},
        ("vllm.paged_attention_rocm", "vllm.kernel_paged_attention_2d", "vllm.context_attention_fwd"),
        "softcap",
    ),
    "soft cap not passed in prefill (vllm ROCM_AITER_FA)": (
        {"softcap": 30.0},
        ("aiter.flash_attn_varlen_func",),
        "softcap",
    ),
    "sink counted by every chunk (vllm ROCM_AITER_FA)": ({"sinks": True}, ("aiter.flash_attn_varlen_func",), "sinks"),
    "window in paged_attention_v1 (vllm 34570)": ({"window": 64}, ("aiter.paged_attention_v1",), "window"),
    "head size 32 skips V (vllm 34570)": ({"head_size": 32}, ("aiter.paged_attention_v1",), "head_size"),
    "head size 80 is no power of two (vllm 37228)": (
        SHUFFLE | {"head_size": 80},
        ("vllm.reshape_and_cache_shuffle_triton",),
        "head_size",
    ),
    "fnuz bytes read as fn (vllm 45562)": (
        {"kv_cache_dtype": "e4m3fn", "kv_scales": "tensor"},
        ("vllm.kernel_unified_attention", "aiter.paged_attention_v1", "vllm.triton_reshape_and_cache_flash"),
        "kv_cache_dtype",
    ),
    "e5m2 written as e4m3 (vllm)": (
        {"packing": "native", "kv_cache_dtype": "e5m2", "kv_scales": "tensor"},
        ("vllm.triton_reshape_and_cache_flash", "vllm.kernel_paged_attention_2d", "vllm.context_attention_fwd"),
        "kv_cache_dtype",
    ),
    "cross attention in the prefill kernel (vllm 38450)": (
        {"packing": "native", "causal": False, "attn_type": "encoder_decoder"},
        ("vllm.context_attention_fwd", "vllm.kernel_paged_attention_2d"),
        "attn_type",
    ),
    "128k tokens in the HIP kernel (vllm 39001)": (
        {"packing": "native", "max_seq_len": 131_073},
        ("vllm.paged_attention_rocm",),
        "max_seq_len",
    ),
}
"""Defect: what a layer asks, kernels that must not serve it, and the feature for which they are turned away."""


def turned_away(changes: dict, kernel: str) -> set[str]:
    """Features that a rejection of the kernel names; empty where the kernel could serve."""
    answer = route(Request(**(oracle.HOME | changes)), {"pagedkv", "aiter", "vllm"})
    for choice in answer.choices:
        for rejection in choice.rejected:
            if rejection.kernel == kernel:
                return {mismatch.feature for mismatch in rejection.mismatches} | {
                    word for mismatch in rejection.mismatches for word in re.findall(r": (\w+) ", mismatch.takes)
                }
    return set()


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_known_defect_turns_the_kernel_away(defect):
    changes, kernels, feature = DEFECTS[defect]
    if feature == "packing":  # a gather is looked for only where the reader of longer queries needs one
        answer = route(Request(**(oracle.HOME | changes)), {"pagedkv", "aiter", "vllm"})
        assert answer.prefill.kernel == "aiter.flash_attn_varlen_func"
        assert answer.gather.kernel == "pagedkv.gather_kv_cache"
    for kernel in kernels:
        assert feature in turned_away(changes, kernel), kernel


def test_a_rejection_says_asked_taken_and_source():
    answer = route(Request(**(oracle.HOME | SHUFFLE | {"head_size": 256})), {"pagedkv", "aiter"})
    printed = [str(rejection) for rejection in answer.decode.rejected]
    assert "aiter.pa_fwd_asm: head_size 256, takes 128 only (csrc/py_itfs_cu/asm_pa.cu pa_fwd)" in printed


def test_no_kernel_is_an_error_with_each_near_miss():
    with pytest.raises(NoKernelError, match="none serves head_size") as caught:
        route(Request(**(oracle.HOME | {"head_size": 264})), {"pagedkv", "aiter"})
    assert caught.value.missing == ("head_size",)
    assert "pagedkv.paged_attention: head_size 264, takes multiples of 8, at least 32, at most 256" in str(caught.value)
    with pytest.raises(NoKernelError, match="each lacks something else"):
        route(Request(**(oracle.HOME | {"packing": "native", "window": 64, "block_size": 16})), {"vllm"})
    with pytest.raises(NoKernelError, match="Add a provider"):
        route(Request(**oracle.HOME), set())


def places():
    """Arch and place of every kernel of every task."""
    return [(arch, place) for arch, tasks in load().items() for order in tasks.values() for place in order]


def test_every_kernel_has_its_place_and_every_limit_a_source():
    assert {arch for arch, _ in places()} == set(ARCHES)
    for arch, preferred in places():
        assert all(limit.source for limit in preferred.kernel.limits.values())
        if preferred.reason != "policy":
            assert GPU_ARCHES[preferred.reason.removeprefix("measured on ")] == arch
            assert re.search(r"\d|Slower", preferred.why), preferred


def test_no_amd_gpu_prefers_our_kernels_for_a_time():
    """None has been timed there, so the preference is policy; on sm_90 it is what an H200 measured."""
    ours = {(arch, place.reason) for arch, place in places() if place.kernel.provider == "pagedkv"}
    untimed = set(ARCHES) - {"sm_90"}
    assert ours == {(arch, "policy") for arch in untimed} | {("sm_90", "measured on H200")}


KERNEL = (FOLDER / "aiter.toml").read_text(encoding="utf-8").split("[[kernel]]")[3]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('softcap = { takes = "none"', "# {", "missing or unknown: softcap"),
        ("softcap = {", "soft_cap = {", "missing or unknown: soft_cap, softcap"),
        ('window = { takes = "none", source =', 'window = { takes = "none", sauce =', "expected a table of"),
        ("head_size = { takes = [128]", "head_size = { takes = 128", "takes: got 128"),
        ("head_size = { takes = [128]", "head_size = { takes = []", "takes: got"),
        ("head_size = { takes = [128]", "head_size = { from = 0", "from: got 0"),
        ("head_size = { takes = [128]", "head_size = { takes = [128], to = 256", "one of takes, a range, or branches"),
        ("head_size = { takes = [128]", "head_size = { power_of_two = false", "power_of_two: got False"),
        ('source = "csrc/py_itfs_cu/asm_pa.cu pa_fwd" }', 'source = " " }', "got source ' '"),
        ('serves = ["decode"]', 'serves = ["decoding"]', "serves: got"),
        ('reads = "cache"', 'reads = "none"', "reads: got 'none'"),
        ('name = "aiter.', 'name = "vllm.', "begins with 'aiter'"),
        ("summary =", "abstract =", "expected the keys limits, name, reads, serves, summary"),
        ("[kernel.limits]", "[kernel.limits", "candidates/aiter.toml is not TOML"),
    ],
)
def test_data_with_something_missing_is_an_error(old, new, message):
    assert old in KERNEL
    with pytest.raises(InvalidFileError, match=re.escape(message)):
        read_kernels("[[kernel]]" + KERNEL.replace(old, new, 1), "aiter")


OURS_ON_AMD = (
    'reason = "policy", why = "One kernel for every layout and feature comes before vLLM\'s Triton kernels. '
    'No AMD GPU has timed it."'
)
GATHER = '{ kernel = "vllm.cp_mha_gather_cache_nhd", reason = "policy"'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # A time of an H200 as the reason for gfx942: as what it is, and hidden in the words of a policy.
        (
            OURS_ON_AMD,
            'reason = "measured on H200", why = "1.1 times as fast."',
            "pagedkv.paged_attention: got a time of the H200 (sm_90) as the reason for gfx942; expected a measurement",
        ),
        (
            OURS_ON_AMD,
            'reason = "policy", why = "1.1 times as fast on an H200."',
            "got a time of the H200 (sm_90) as the reason for gfx942",
        ),
        (
            'arches = ["gfx942"]\ndecode',
            'arches = ["gfx942", "gfx950"]\ndecode',
            "got a time of the MI308X (gfx942) as the reason for gfx950",
        ),
        (GATHER, GATHER.replace("policy", "taste"), "reason: got 'taste'; expected 'policy', or 'measured on '"),
        (GATHER, GATHER.replace("policy", "measured on MI999"), "reason: got 'measured on MI999'"),
        (GATHER, GATHER.replace("policy", "measured"), "reason: got 'measured'"),
        (GATHER, GATHER.replace("nhd", "shuffle"), "each of"),
        (GATHER, GATHER.replace("reason", "basis"), "expected kernel, reason and why"),
        ('arches = ["sm_90"]', 'arches = ["sm_91"]', "arches: got sm_91; known:"),
        ('arches = ["sm_90"]', "arches = []", "arches: got []"),
        ('arches = ["sm_90"]', 'arches = ["sm_90", "gfx942"]', "as the reason for gfx942"),
        (
            'arches = ["gfx90a", "gfx950", ',
            'arches = ["gfx90a", ',
            "no order of decode on gfx950",
        ),
        (
            'arches = ["gfx90a", "gfx950", ',
            'arches = ["gfx90a", "gfx942", "gfx950", ',
            "decode: gfx942 has an order already",
        ),
        ("gather = [", "collect = [", "keys: got collect; known: arches, decode, prefill, write, gather"),
        ("[[order]]", "[[orders]]", "tables: got orders; known: order"),
    ],
)
def test_an_incomplete_or_foreign_order_is_refused(old, new, message):
    kernels = {place.kernel.name: place.kernel for _, place in places()}
    text = PREFERENCE.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(InvalidFileError, match=re.escape(message)):
        read_preference(text.replace(old, new), kernels)
