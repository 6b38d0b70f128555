# SPDX-License-Identifier: Apache-2.0
"""Write K and V of a step into the paged cache.

    key_cache[slot // block_size, slot % block_size, h, :] = key[n, h, :]     slot = slot_mapping[n] >= 0; V alike

A program copies BLOCK_M head rows (token, head) of K and of V. Every stride but the innermost is an argument, for K and
V separately; offsets are int64, because a hybrid model's block stride reaches megabytes and int32 products wrap at a
few thousand blocks. A quantised cache stores `encode(x / scale)`; with a scale for each token and head the write
computes it, `max(absmax / largest code, 1e-6)`, and stores it too.

In a packed cache tokens are neighbours in memory, and a token's channels lie far apart: slots in no order make 2-byte
pieces of every store. What keeps that from being a read and a write of HBM each is the L2: `packed_write_kernel` takes
BLOCK_M tokens of BLOCK_D channels, and all tokens of one head and slice are written before the next ones, so that
pieces of a cache line meet there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from pagedkv.arch import next_power_of_two
from pagedkv.cache import checks as cache_checks
from pagedkv.device import current, on
from pagedkv.fp8.scales import kernel_scales, quantised
from pagedkv.launch import rows_of_program, tuning
from pagedkv.prepared import Launch, compiler_settings, find, keep, signature
from pagedkv.strides import alignment, key_channels, scale_at, sides_of, value_channels, value_tokens, wide

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache


class WriteStrides(NamedTuple):
    """Strides that a launch of a write passes, in elements."""

    key: tuple[int, ...]
    """Strides of token and head."""
    value: tuple[int, ...]
    """Strides of token and head."""
    key_cache: tuple[int, ...]
    """Strides of block, token, head and group of X channels."""
    value_cache: tuple[int, ...]
    """Strides of block, token (in `shuffle` of a group of X tokens), head and channel."""
    slot: tuple[int, ...]
    """Strides of token."""
    key_scale: tuple[int, int, int]
    """Strides of block, token and head."""
    value_scale: tuple[int, int, int]


class WriteOptions(NamedTuple):
    """Compile-time options of a write: Triton compiles once for each combination of values."""

    NUM_HEADS: int
    """KV heads."""
    HEAD_SIZE: int
    BLOCK_SIZE: int
    BLOCK_M: int
    """Head rows of a program; into a packed cache tokens. A power of two."""
    BLOCK_D: int
    """Channels of a program, a power of two; into a packed cache with scales per token, and into rows, whole heads."""
    PACKING: str
    X: int
    KV_SCALES: str
    """Kind of scales of a quantised cache (`scales.ScaleKind`)."""
    FP8_FORMAT: str
    FP8_MAX: float
    """Largest finite value of FP8_FORMAT."""
    STRIDE_ALIGN: int
    """Largest power of two up to 16 that divides all strides (`strides.alignment`)."""


@triton.jit(do_not_specialize=["num_rows"])  # changes every step
def _write_kernel(
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,
    slot_mapping,  # [num_slots] int64
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_rows,  # num_slots * NUM_HEADS
    strides,  # WriteStrides
    OPTIONS: tl.constexpr,  # WriteOptions
):
    NUM_HEADS: tl.constexpr = OPTIONS.NUM_HEADS
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    FP8_MAX: tl.constexpr = OPTIONS.FP8_MAX
    stride_key_token, stride_key_head = wide(strides.key, OPTIONS.STRIDE_ALIGN)
    stride_value_token, stride_value_head = wide(strides.value, OPTIONS.STRIDE_ALIGN)
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale, strides, OPTIONS.STRIDE_ALIGN)
    (stride_slot,) = wide(strides.slot)
    row = tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    slot = tl.load(slot_mapping + token * stride_slot, mask=row < num_rows, other=-1)
    channel = tl.arange(0, OPTIONS.BLOCK_D)
    mask = (slot >= 0)[:, None] & (channel < OPTIONS.HEAD_SIZE)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    target = block * key_side.block + offset * key_side.token + head * key_side.head
    k = tl.load(key + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = scale_at(key_side, block, offset, head)
    k = quantised(k, scale, slot >= 0, KV_SCALES, FP8_FORMAT, FP8_MAX)
    tl.store(key_side.cache + target[:, None] + channel[None, :], k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    target = block * value_side.block + offset * value_side.token + head * value_side.head
    v = tl.load(value + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = scale_at(value_side, block, offset, head)
    v = quantised(v, scale, slot >= 0, KV_SCALES, FP8_FORMAT, FP8_MAX)
    tl.store(value_side.cache + target[:, None] + channel[None, :], v, mask=mask)


def write_kv_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    cache: PagedCache,
    slot_mapping: Tensor,  # [n <= num_tokens] int64
    *,
    debug: bool = False,
) -> None:
    """Copy K and V of the first n tokens to their slots; a negative slot is not written.

    Any strides with a dense last dimension, for each of the tensors on its own. Nothing else of the pool changes.

    Args:
        key: K of this step; fp32, fp16 or bf16, and in the dtype of the cache if that is not quantised.
        value: V of this step, in the dtype of K.
        cache: The cache, in any packing. With scales per token and head, those of the written slots are written too.
        slot_mapping: `block * block_size + token_in_block` of each token. May be shorter than `key`, which a captured
            graph pads.
        debug: Also check the scales, and that every slot lies in the pool and occurs once (synchronises with the
            device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """
    key_of_call = None
    if not debug:
        key_of_call = ("write", cache.signature, *map(signature, (key, value, slot_mapping)), compiler_settings())
    call = find(key_of_call)
    if call is not None:
        call.run(cache, key, value, slot_mapping)
        return
    cache_checks.step(key, value, cache, slot_mapping, debug=debug)
    if slot_mapping.shape[0] == 0:
        return
    call = _prepare(key, value, cache, slot_mapping)
    call.run(cache, key, value, slot_mapping)
    keep(key_of_call, call)


@dataclass(frozen=True)
class WriteCall:
    """Launch of the writes with one signature."""

    write: Launch
    numbers: tuple[int, WriteStrides]
    """Last arguments of `write`."""

    def run(self, cache: PagedCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Launch for the tensors of one call; those of `write_kv_cache`."""
        with on(key):
            self.write(key, value, cache.key, cache.value, slot_mapping, *cache.scales, *self.numbers)


def _prepare(key: Tensor, value: Tensor, cache: PagedCache, slot_mapping: Tensor) -> WriteCall:
    """Choose the launch of a write that was checked."""
    num_slots, num_kv_heads, head_size = slot_mapping.shape[0], cache.num_kv_heads, cache.head_size
    arch = current(key)
    data = tuning(arch.name).write
    scales = kernel_scales(cache)
    strides = (key.stride()[:2], value.stride()[:2], cache.key_strides, cache.value_strides)
    padded = next_power_of_two(head_size)
    if cache.packing == "rows":
        kernel, count = _write_kernel, num_slots * num_kv_heads
        rows, width = rows_of_program(arch, count, most=data.block_m, fewest=next_power_of_two(num_kv_heads)), padded
        grid: tuple[int, ...] = (-(-count // rows),)
    else:
        kernel, count = packed_write_kernel, num_slots
        width = padded if scales.kind == "per_token" else min(data.block_d, padded)
        rows = rows_of_program(arch, count, most=data.block_m * padded // width, fewest=16)
        grid = (-(-count // rows), num_kv_heads * -(-head_size // width))
    options = WriteOptions(
        NUM_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=rows,
        BLOCK_D=width,
        PACKING=cache.packing,
        X=cache.x,
        KV_SCALES=scales.kind,
        FP8_FORMAT=scales.format,
        FP8_MAX=scales.largest,
        STRIDE_ALIGN=alignment(*itertools.chain(*strides)),
    )
    write = Launch(kernel, grid, OPTIONS=options, num_warps=data.waves)
    return WriteCall(write, (count, WriteStrides(*strides, slot_mapping.stride(), *scales.strides)))


@triton.jit(do_not_specialize=["num_slots"])
def packed_write_kernel(
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # axes of PACKING
    value_cache,
    slot_mapping,  # [num_slots] int64
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_slots,
    strides,  # WriteStrides
    OPTIONS: tl.constexpr,  # WriteOptions
):
    """Store BLOCK_D channels of K and V of BLOCK_M tokens; grid [ceil(num_slots / BLOCK_M), NUM_HEADS * slices]."""
    NUM_HEADS: tl.constexpr = OPTIONS.NUM_HEADS
    BLOCK_SIZE: tl.constexpr = OPTIONS.BLOCK_SIZE
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    PACKING: tl.constexpr = OPTIONS.PACKING
    X: tl.constexpr = OPTIONS.X
    KV_SCALES: tl.constexpr = OPTIONS.KV_SCALES
    FP8_FORMAT: tl.constexpr = OPTIONS.FP8_FORMAT
    FP8_MAX: tl.constexpr = OPTIONS.FP8_MAX
    stride_key_token, stride_key_head = wide(strides.key, OPTIONS.STRIDE_ALIGN)
    stride_value_token, stride_value_head = wide(strides.value, OPTIONS.STRIDE_ALIGN)
    key_side, value_side = sides_of(key_cache, value_cache, key_scale, value_scale, strides, OPTIONS.STRIDE_ALIGN)
    (stride_slot,) = wide(strides.slot)
    head = (tl.program_id(1) % NUM_HEADS).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slot_mapping + token * stride_slot, mask=token < num_slots, other=-1)
    channel = tl.program_id(1) // NUM_HEADS * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (slot >= 0)[:, None] & (channel < OPTIONS.HEAD_SIZE)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    k = tl.load(key + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = scale_at(key_side, block, offset, head)
    k = quantised(k, scale, slot >= 0, KV_SCALES, FP8_FORMAT, FP8_MAX)
    target = block * key_side.block + offset * key_side.token + head * key_side.head
    tl.store(key_side.cache + target[:, None] + key_channels(channel, key_side.inner, X)[None, :], k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    v = tl.load(value + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = scale_at(value_side, block, offset, head)
    v = quantised(v, scale, slot >= 0, KV_SCALES, FP8_FORMAT, FP8_MAX)
    # Lanes along the tokens: neighbours in memory where the slots are.
    target = block * value_side.block + value_tokens(offset, value_side.token, PACKING, X, BLOCK_SIZE)
    target = (target + head * value_side.head)[None, :] + value_channels(channel, value_side.inner, PACKING)[:, None]
    tl.store(value_side.cache + target, tl.trans(v), mask=tl.trans(mask))
