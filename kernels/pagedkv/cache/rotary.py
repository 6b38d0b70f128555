# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding (RoPE) of Q and K in place, and the write of K and V into the paged cache, in one launch.

A pair (a, b) of channels of a row at position p turns by the angle of the pair (Su et al., arXiv 2104.09864, eq. 34):

    a' = a cos[p, i] - b sin[p, i]        b' = b cos[p, i] + a sin[p, i]        i < rotary_dim / 2

Pair i is (i, i + rotary_dim / 2) in the style of GPT-NeoX and (2 i, 2 i + 1) in that of GPT-J; channels from
`rotary_dim` on stay as they are. Products are in fp32, and the result is rounded to the dtype of Q and K before it is
stored or quantised: a cache has the same bits as if the turned K had been given to `cache.write`.

A program takes BLOCK_M rows of one head: of Q, which it turns, or of K, which it also writes together with V.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pagedkv import checks
from pagedkv.arch import next_power_of_two
from pagedkv.cache import checks as cache_checks
from pagedkv.device import current, on
from pagedkv.errors import ArgumentError
from pagedkv.fp8.scales import kernel_scales, quantised
from pagedkv.launch import tuning
from pagedkv.strides import alignment, key_channels, scale_at, sides_of, value_channels, value_tokens, wide

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


FEWEST_TOKENS = 16
"""Fewest tokens of a program. Not fewer than lanes: a row that two waves hold would be read by one after the other had
stored it."""


class RotatedStrides(NamedTuple):
    """Strides that a launch of `rotated_write_kernel` passes, in elements."""

    query: tuple[int, ...]
    """Strides of token and head; so are those of key and value."""
    key: tuple[int, ...]
    value: tuple[int, ...]
    key_cache: tuple[int, ...]
    """Strides of block, token, head and group of X channels."""
    value_cache: tuple[int, ...]
    """Strides of block, token (in `shuffle` of a group of X tokens), head and channel."""
    indices: tuple[int, int, int]
    """The first one of positions, cos_sin and slot_mapping."""
    key_scale: tuple[int, int, int]
    """Strides of block, token and head."""
    value_scale: tuple[int, int, int]


class RotatedOptions(NamedTuple):
    """Compile-time options of `rotated_write_kernel`: Triton compiles once for each combination of values."""

    NUM_Q_HEADS: int
    HEAD_SIZE: int
    HEAD_SIZE_PADDED: int
    """HEAD_SIZE rounded up to a power of two."""
    ROTARY_DIM: int
    """Channels that turn."""
    IS_NEOX: bool
    """Whether pairs are halves of the rotary channels, else neighbours."""
    BLOCK_SIZE: int
    BLOCK_M: int
    """Tokens of a program, a power of two."""
    PACKING: str
    X: int
    KV_SCALES: str
    """Kind of scales of a quantised cache (`scales.ScaleKind`)."""
    FP8_FORMAT: str
    FP8_MAX: float
    """Largest finite value of FP8_FORMAT."""
    STRIDE_ALIGN: int
    """Largest power of two up to 16 that divides all strides (`strides.alignment`)."""


@triton.jit
def _turn(rows, channel, mask, cos, sin, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """Turn the rows [BLOCK_M, HEAD_SIZE_PADDED] that `rows` points at, in place, and return them.

    The partner of a channel comes from registers: what another lane reads here this one may have stored already.
    """
    x = tl.load(rows, mask=mask, other=0.0)
    HALF: tl.constexpr = ROTARY_DIM // 2
    other = tl.where(channel < HALF, channel + HALF, channel - HALF) if IS_NEOX else channel ^ 1
    turns = channel < ROTARY_DIM
    other = tl.broadcast_to(tl.where(turns, other, channel)[None, :], x.shape)
    wide_x = x.to(tl.float32)
    turned = wide_x * cos + tl.gather(wide_x, other, axis=1) * sin
    x = tl.where(turns[None, :], turned.to(x.dtype), x)
    tl.store(rows, x, mask=mask & turns[None, :])
    return x


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def rotated_write_kernel(
    query,  # [num_tokens, num_q_heads, head_size]
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # axes of PACKING
    value_cache,
    positions,  # [num_tokens] int64
    cos_sin,  # [max_position, ROTARY_DIM]: cosines, then sines
    slot_mapping,  # [num_slots] int64
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_tokens,
    num_slots,
    strides,  # RotatedStrides
    OPTIONS: tl.constexpr,  # RotatedOptions
):
    """Turn BLOCK_M rows of one head, and write K and V; grid [ceil(num_tokens / BLOCK_M), heads of Q and K]."""
    NUM_Q_HEADS: tl.constexpr = OPTIONS.NUM_Q_HEADS
    ROTARY_DIM: tl.constexpr = OPTIONS.ROTARY_DIM
    IS_NEOX: tl.constexpr = OPTIONS.IS_NEOX
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    PACKING: tl.constexpr = OPTIONS.PACKING
    X: tl.constexpr = OPTIONS.X
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    FP8_MAX: tl.constexpr = OPTIONS.FP8_MAX
    stride_query_token, stride_query_head = wide(strides.query, OPTIONS.STRIDE_ALIGN)
    stride_key_token, stride_key_head = wide(strides.key, OPTIONS.STRIDE_ALIGN)
    stride_value_token, stride_value_head = wide(strides.value, OPTIONS.STRIDE_ALIGN)
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale, strides, OPTIONS.STRIDE_ALIGN)
    stride_position, stride_cos_sin, stride_slot = wide(strides.indices)
    token = tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, OPTIONS.HEAD_SIZE_PADDED)
    inside = token < num_tokens
    mask = inside[:, None] & (channel < OPTIONS.HEAD_SIZE)[None, :]

    HALF: tl.constexpr = ROTARY_DIM // 2
    angle = channel % HALF if IS_NEOX else channel // 2
    position = tl.load(positions + token * stride_position, mask=inside, other=0)
    angles = cos_sin + (position * stride_cos_sin)[:, None] + angle[None, :]
    turned = inside[:, None] & (channel < ROTARY_DIM)[None, :]
    cos = tl.load(angles, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=turned, other=0.0).to(tl.float32)
    first = channel < HALF if IS_NEOX else channel % 2 == 0
    sin = tl.where(first[None, :], -sin, sin)

    if head < NUM_Q_HEADS:
        source = token * stride_query_token + head * stride_query_head
        _turn(query + source[:, None] + channel[None, :], channel, mask, cos, sin, ROTARY_DIM, IS_NEOX)
    else:
        head -= NUM_Q_HEADS
        slot = tl.load(slot_mapping + token * stride_slot, mask=token < num_slots, other=-1)
        written = slot >= 0
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE

        source = token * stride_key_token + head * stride_key_head
        k = _turn(key + source[:, None] + channel[None, :], channel, mask, cos, sin, ROTARY_DIM, IS_NEOX)
        scale = scale_at(key_side, block, offset, head)
        k = quantised(k, scale, written, KV_SCALES, FP8_FORMAT, FP8_MAX)
        target = block * key_side.block + offset * key_side.token + head * key_side.head
        place = channel if PACKING == "rows" else key_channels(channel, key_side.inner, X)
        tl.store(key_side.cache + target[:, None] + place[None, :], k, mask=mask & written[:, None])

        source = token * stride_value_token + head * stride_value_head
        v = tl.load(value + source[:, None] + channel[None, :], mask=mask & written[:, None], other=0.0)
        scale = scale_at(value_side, block, offset, head)
        v = quantised(v, scale, written, KV_SCALES, FP8_FORMAT, FP8_MAX)
        target = block * value_side.block + value_tokens(offset, value_side.token, PACKING, X, BLOCK_SIZE)
        target += head * value_side.head
        place = value_channels(channel, value_side.inner, PACKING)
        tl.store(value_side.cache + target[:, None] + place[None, :], v, mask=mask & written[:, None])


def rotate_and_write(
    query: Tensor,  # [num_tokens, num_q_heads, head_size]
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    cache: PagedCache,
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor,  # [max_position, rotary_dim]
    slot_mapping: Tensor,  # [n <= num_tokens] int64
    *,
    neox: bool,
    debug: bool = False,
) -> None:
    """Turn all tokens of Q and K in place, and copy the turned K and V of the first n to their slots.

    A token whose slot is negative, or that has none, is turned and not written. Any strides with a dense last
    dimension, for each of the tensors on its own.

    Args:
        query: Q of this step, in the dtype of K.
        key: K of this step, as `write_kv_cache` takes it.
        value: V of this step, in the dtype of K.
        cache: The cache, in any packing.
        positions: Position of each token in its sequence.
        cos_sin: For each position the cosines, then the sines of `rotary_dim / 2` angles; fp32, fp16 or bf16.
        slot_mapping: Slots as `write_kv_cache` takes them.
        neox: Whether pairs are halves of the rotary channels (GPT-NeoX), else neighbours (GPT-J).
        debug: Also check scales, positions and slots (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    cache_checks.step(key, value, cache, slot_mapping, debug=debug)
    num_tokens, num_kv_heads, head_size = key.shape
    checks.shape("query", query, (num_tokens, None, head_size), "[num_tokens, num_q_heads, head_size]")
    checks.shape("positions", positions, (num_tokens,), "[num_tokens]")
    checks.shape("cos_sin", cos_sin, (None, None), "[max_position, rotary_dim]")
    checks.dtype("query", query, (key.dtype,), "Take both as slices of one projection.")
    checks.dtype("positions", positions, (torch.int64,), "Cast with .to(torch.int64).")
    checks.dtype("cos_sin", cos_sin, checks.DTYPES, "Take floating-point angles.")
    checks.computable("query", query)
    checks.computable("cos_sin", cos_sin)
    others = {"query": query, "positions": positions, "cos_sin": cos_sin}
    for name in ("query", "cos_sin"):
        checks.dense(name, others[name])
    max_position, rotary_dim = cos_sin.shape
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise ArgumentError(
            "shape",
            "cos_sin",
            got=f"rotary_dim {rotary_dim}",
            expected=f"an even number in 2 .. {head_size}, the head size",
            remedy="Give the cosines and sines of half as many angles as channels turn.",
        )
    checks.device(("cache.key", cache.key), others)
    if debug:
        checks.within("positions", positions, max_position, "max_position of cos_sin")
    if num_tokens == 0:
        return
    launch = tuning(current(query).name).write
    scales = kernel_scales(cache)
    strides = (query.stride()[:2], key.stride()[:2], value.stride()[:2], cache.key_strides, cache.value_strides)
    tokens = min(launch.block_m, max(FEWEST_TOKENS, next_power_of_two(num_tokens)))
    options = RotatedOptions(
        NUM_Q_HEADS=query.shape[1],
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=max(16, next_power_of_two(head_size)),
        ROTARY_DIM=rotary_dim,
        IS_NEOX=neox,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=tokens,
        PACKING=cache.packing,
        X=cache.x,
        KV_SCALES=scales.kind,
        FP8_FORMAT=scales.format,
        FP8_MAX=scales.largest,
        STRIDE_ALIGN=alignment(*itertools.chain(*strides)),
    )
    with on(cache.key):
        rotated_write_kernel[-(-num_tokens // tokens), query.shape[1] + num_kv_heads](
            query,
            key,
            value,
            cache.key,
            cache.value,
            positions,
            cos_sin,
            slot_mapping,
            *cache.scales,
            num_tokens,
            slot_mapping.shape[0],
            RotatedStrides(*strides, (positions.stride(0), cos_sin.stride(0), slot_mapping.stride(0)), *scales.strides),
            OPTIONS=options,
            num_warps=launch.waves,
        )
