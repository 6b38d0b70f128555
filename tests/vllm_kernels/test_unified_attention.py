# SPDX-License-Identifier: Apache-2.0
"""`kernel_unified_attention` and `reduce_segments` over caches of rows, whatever their strides."""

from __future__ import annotations

import pytest
import torch
from support import vllm_kernels
from support.attending import HALF, attend, check, expected

pytestmark = pytest.mark.device

LAYOUTS = ("nhd", "hnd", "interleaved", "packed")
SHAPES = ((16, 8, 2, 64), (48, 4, 4, 128), (544, 6, 2, 80), (784, 4, 1, 256), (2048, 8, 8, 64), (2144, 5, 1, 96))
"""Tokens of a block, query heads, KV heads, channels of a head."""
PHASES = {
    "decode": ([1] * 4, [1, 17, 33, 150], False),
    "segments": ([1] * 4, [1, 17, 33, 150], True),
    "extend": ([19, 1, 7, 1, 33], [19, 1, 150, 130, 70], False),
}
"""Query lengths, sequence lengths, whether sequences are split."""
SETTINGS = {
    "window": {"sliding_window": 24},
    "cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "window-cap-sinks": {"sliding_window": 24, "softcap": 5.0, "sinks": True},
}


def made(device, layout, shape, dtype, phase, **more):
    query_lens, seq_lens, _ = PHASES[phase]
    return vllm_kernels.attention_batch(device, layout, shape, dtype, query_lens=query_lens, seq_lens=seq_lens, **more)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", vllm_kernels.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=vllm_kernels.attention_id)
def test_attention(shape, layout, dtype, phase, device, record_property):
    data = made(device, layout, shape, dtype, phase)
    out = attend(data, call=vllm_kernels.unified_attention, split=PHASES[phase][2])
    check(out, expected(data), record_property)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=vllm_kernels.attention_id)
def test_settings(shape, phase, settings, device, record_property):
    """Blocks and keys before a window hold NaN."""
    options = dict(SETTINGS[settings])
    data = made(device, "interleaved", shape, HALF, phase, window=options.get("sliding_window"))
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 3, shape[1], device=device)
    out = attend(data, call=vllm_kernels.unified_attention, split=PHASES[phase][2], **options)
    op = "attention of capped scores" if "softcap" in options else "attention"
    check(out, expected(data, **options), record_property, op)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("scales", ["tensor", "token"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=vllm_kernels.attention_id)
def test_quantised_cache(shape, layout, scales, phase, device, record_property):
    data = made(device, layout, shape, HALF, phase, quantised=vllm_kernels.fp8_format(), scales=scales)
    out = attend(data, call=vllm_kernels.unified_attention, split=PHASES[phase][2])
    check(out, expected(data), record_property, "attention of scaled rows")
