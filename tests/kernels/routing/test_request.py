# SPDX-License-Identifier: Apache-2.0
"""What a layer may ask for, and the one description of its cache."""

from __future__ import annotations

import re

import pytest
from support import routing_oracle as oracle

from pagedkv.configurations import CONFIGURATIONS
from pagedkv.layout import NAMES, describe, packing_of
from pagedkv.routing import CacheLayout, Request, RequestError, route


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gfx1030"}, "arch: got 'gfx1030'; expected one of gfx90a"),
        ({"phase": "train"}, "phase: got 'train'"),
        ({"head_size": 0}, "head_size: got 0; expected an integer >= 1"),
        ({"head_size": 128.0}, "head_size: got 128.0"),
        ({"num_q_heads": 33}, "a multiple of num_kv_heads 8"),
        ({"dtype": "fp16"}, "dtype: got 'fp16'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got 'fp8'; expected one of auto, e4m3fn"),
        ({"kv_cache_dtype": "e4m3fn"}, "kv_scales: got 'none'; expected unit, tensor, head or token"),
        ({"kv_scales": "tensor"}, "kv_scales: got 'tensor'; expected none"),
        ({"block_size": True}, "block_size: got True"),
        ({"packing": "nhd"}, "packing: got 'nhd'"),
        (
            {"packing": "native", "head_size": 36},
            "head_size: got 36; expected a multiple of 8. Take packing 'rows', which has no such bound.",
        ),
        ({"packing": "shuffle", "block_size": 12}, "block_size: got 12; expected a multiple of 8"),
        ({"window": 0}, "window: got 0"),
        ({"window": 8, "causal": False}, "window: got 8; expected None where causal is False"),
        ({"softcap": 0.0}, "softcap: got 0.0; expected None or a finite number > 0"),
        ({"softcap": float("inf")}, "softcap: got inf"),
        ({"scale": -1.0}, "scale: got -1.0"),
        ({"alibi": 1}, "alibi: got 1; expected True or False"),
        ({"attn_type": "encoder_decoder"}, "causal: got True; expected False"),
        ({"attn_type": "mla"}, "attn_type: got 'mla'"),
        ({"q_len": 0}, "q_len: got 0"),
        ({"num_blocks": 0}, "num_blocks: got 0"),
    ],
)
def test_a_request_that_no_layer_makes(changes, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        Request(**(oracle.HOME | changes))


def test_a_provider_that_does_not_exist():
    with pytest.raises(RequestError, match=r"providers: got \['flashinfer'\]; expected some of aiter, pagedkv, vllm"):
        route(Request(**oracle.HOME), {"flashinfer"})


def test_the_usual_scale_is_no_feature():
    for scale in (None, 128**-0.5, 0.08838834764):
        assert Request(**(oracle.HOME | {"scale": scale})).custom_scale is None
    assert Request(**(oracle.HOME | {"scale": 0.0884})).custom_scale == 0.0884


def sides_of(name):
    return "interleaved" if name == "packed" or name.endswith("interleaved") else "planes"


@pytest.mark.parametrize("name", NAMES)
def test_native_blocks_are_those_of_the_pool(name):
    """Who lets planes be native blocks says what the strides say that tests and audit build their pools from."""
    pool = describe(name, 5, 16, 2, 64, x=8)
    layout = CacheLayout(packing_of(name), sides_of(name), block_size=16, num_kv_heads=2, head_size=64, element_bytes=2)
    assert layout.has_native_kv_cache_layout is pool.has_native_kv_cache_layout


@pytest.mark.parametrize("case", CONFIGURATIONS, ids=lambda case: case.id)
def test_what_the_kernels_promise_is_routed_to_them(case):
    """What the data says of our kernels is not less than what their tests and the audit hold them to."""
    attends = case.op == "attention"
    request = Request(
        arch="gfx942",
        phase=case.phase if attends else "mixed",
        head_size=case.head_size if attends else 64,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        dtype=case.dtype,
        kv_cache_dtype=case.quantised or "auto",
        kv_scales=case.scales if case.quantised else "none",
        block_size=case.block_size,
        packing=packing_of(case.layout),
        sides=sides_of(case.layout),
        window=case.window,
        softcap=case.softcap,
        alibi=case.alibi,
        sinks=case.sinks,
        causal=case.causal,
        attn_type="decoder" if case.causal else "encoder_decoder",
        max_num_seqs=64,
        max_seq_len=8192,
    )
    named = {choice.kernel for choice in route(request, {"pagedkv"}).choices} - {None}
    assert named == {"pagedkv.paged_attention", "pagedkv.write_kv_cache"}
