# SPDX-License-Identifier: Apache-2.0
"""Write K and V of a step into the paged cache.

    key_cache[slot // block_size, slot % block_size, h, :] = key[n, h, :]     slot = slot_mapping[n] >= 0; V alike

A program copies ROWS head rows (token, head) of K and of V. Every stride but the innermost is an argument, for K and V
separately; offsets are int64, because a hybrid model's block stride reaches megabytes and int32 products wrap at a few
thousand blocks. A quantised cache stores `encode(x / scale)`; with a scale for each token and head the write computes
it, `max(absmax / largest code, 1e-6)`, and stores it too.

In a packed cache tokens are neighbours in memory, and a token's channels lie far apart: slots in no order make 2-byte
pieces of every store. What keeps that from being a read and a write of HBM each is the L2: `packed_write_kernel` takes
TOKENS tokens of SLICE channels, and all tokens of one head and slice are written before the next ones, so that pieces
of a cache line meet there.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pagedkv.arch import next_power_of_two
from pagedkv.cache import checks as cache_checks
from pagedkv.device import current, on
from pagedkv.fp8.scales import PER_TOKEN, kernel_scales, stored
from pagedkv.launch import rows_of_program, tuning
from pagedkv.layout import PACKINGS
from pagedkv.prepared import Launch, call, look
from pagedkv.strides import alignment, key_channels, value_channels, value_tokens, wide

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache.cache import PagedCache
    from pagedkv.prepared import Prepared


@triton.jit(do_not_specialize=["num_rows"])  # which another step has others of
def _write_kernel(
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,
    slot_mapping,  # [num_slots] int64
    key_scale,  # fp32; see scales.KernelScales
    value_scale,
    num_rows,  # num_slots * NUM_HEADS
    key_strides,  # token, head
    value_strides,
    key_cache_strides,  # block, token, head, group of X channels
    value_cache_strides,  # block, token (of PACKING 2: group of X tokens), head, channel
    slot_strides,  # token
    key_scale_strides,  # block, token, head
    value_scale_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,  # see scales.KernelScales
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.alignment
):
    stride_key_token, stride_key_head = wide(key_strides, ALIGN)
    stride_value_token, stride_value_head = wide(value_strides, ALIGN)
    stride_kc_block, stride_kc_token, stride_kc_head, _ = wide(key_cache_strides, ALIGN)
    stride_vc_block, stride_vc_token, stride_vc_head, _ = wide(value_cache_strides, ALIGN)
    stride_ks_block, stride_ks_token, stride_ks_head = wide(key_scale_strides)
    stride_vs_block, stride_vs_token, stride_vs_head = wide(value_scale_strides)
    (stride_slot,) = wide(slot_strides)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    slot = tl.load(slot_mapping + token * stride_slot, mask=row < num_rows, other=-1)
    channel = tl.arange(0, PADDED)
    mask = (slot >= 0)[:, None] & (channel < HEAD_SIZE)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    target = block * stride_kc_block + offset * stride_kc_token + head * stride_kc_head
    k = tl.load(key + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = key_scale + block * stride_ks_block + offset * stride_ks_token + head * stride_ks_head
    k = stored(k, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    tl.store(key_cache + target[:, None] + channel[None, :], k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    target = block * stride_vc_block + offset * stride_vc_token + head * stride_vc_head
    v = tl.load(value + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = value_scale + block * stride_vs_block + offset * stride_vs_token + head * stride_vs_head
    v = stored(v, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    tl.store(value_cache + target[:, None] + channel[None, :], v, mask=mask)


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
        value: V of this step, likewise.
        cache: The cache, in any packing. With scales per token and head, those of the written slots are written too.
        slot_mapping: `block * block_size + token_in_block` of each token. May be shorter than `key`, which a captured
            graph pads.
        debug: Also check that every slot lies in the pool and occurs once (synchronises with the device).

    Raises:
        ArgumentError: an argument is wrong (`pagedkv.errors`).
    """

    def prepare() -> Prepared | None:
        cache_checks.step(key, value, cache, slot_mapping, debug=debug)
        num_kv_heads, head_size = cache.num_kv_heads, cache.head_size
        num_slots = slot_mapping.shape[0]
        if num_slots == 0:
            return None
        arch = current(key)
        data = tuning(arch.name).write
        scales = kernel_scales(cache)
        strides = (key.stride()[:2], value.stride()[:2], cache.key_strides, cache.value_strides)
        padded = next_power_of_two(head_size)
        if cache.packing == "rows":
            kernel, count = _write_kernel, num_slots * num_kv_heads
            rows = rows_of_program(arch, count, most=data.rows, fewest=next_power_of_two(num_kv_heads))
            grid: tuple[int, ...] = (-(-count // rows),)
            sizes = {"PADDED": padded, "ROWS": rows}
        else:
            kernel, count = packed_write_kernel, num_slots
            width = padded if scales.kind == PER_TOKEN else min(data.slice, padded)
            tokens = rows_of_program(arch, count, most=data.rows * padded // width, fewest=16)
            grid = (-(-count // tokens), num_kv_heads * -(-head_size // width))
            sizes = {"TOKENS": tokens, "SLICE": width, "PACKING": PACKINGS.index(cache.packing), "X": cache.x}
        write = Launch(
            kernel,
            grid,
            NUM_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            BLOCK_SIZE=cache.block_size,
            SCALES=scales.kind,
            FORMAT=scales.format,
            LARGEST=scales.largest,
            ALIGN=alignment(*itertools.chain(*strides)),
            num_warps=data.waves,
            **sizes,
        )
        numbers = (count, *strides, slot_mapping.stride(), *scales.strides)

        def run(cache: PagedCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
            with on(key):
                write(key, value, cache.key, cache.value, slot_mapping, *cache.scales, *numbers)

        return run, (write,)

    tensors = (key, value, slot_mapping)
    call(None if debug else ("write", cache.look, *map(look, tensors)), prepare, cache, *tensors)


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
    key_strides,  # token, head
    value_strides,
    key_cache_strides,  # block, token, head, group of X channels
    value_cache_strides,  # block, token (of PACKING 2: group of X tokens), head, channel
    slot_strides,  # token
    key_scale_strides,  # block, token, head
    value_scale_strides,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # a power of two
    SLICE: tl.constexpr,  # channels of a program, a power of two; the whole head with scales per token
    PACKING: tl.constexpr,
    X: tl.constexpr,
    SCALES: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.alignment
):
    """Store SLICE channels of K and V of TOKENS tokens; grid [ceil(num_slots / TOKENS), NUM_HEADS * slices]."""
    stride_key_token, stride_key_head = wide(key_strides, ALIGN)
    stride_value_token, stride_value_head = wide(value_strides, ALIGN)
    stride_kc_block, stride_kc_token, stride_kc_head, stride_kc_group = wide(key_cache_strides, ALIGN)
    stride_vc_block, stride_vc_token, stride_vc_head, stride_vc_channel = wide(value_cache_strides, ALIGN)
    stride_ks_block, stride_ks_token, stride_ks_head = wide(key_scale_strides)
    stride_vs_block, stride_vs_token, stride_vs_head = wide(value_scale_strides)
    (stride_slot,) = wide(slot_strides)
    head = (tl.program_id(1) % NUM_HEADS).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token * stride_slot, mask=token < num_slots, other=-1)
    channel = tl.program_id(1) // NUM_HEADS * SLICE + tl.arange(0, SLICE)
    mask = (slot >= 0)[:, None] & (channel < HEAD_SIZE)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    k = tl.load(key + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = key_scale + block * stride_ks_block + offset * stride_ks_token + head * stride_ks_head
    k = stored(k, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    target = block * stride_kc_block + offset * stride_kc_token + head * stride_kc_head
    tl.store(key_cache + target[:, None] + key_channels(channel, stride_kc_group, X)[None, :], k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    v = tl.load(value + source[:, None] + channel[None, :], mask=mask, other=0.0)
    scale = value_scale + block * stride_vs_block + offset * stride_vs_token + head * stride_vs_head
    v = stored(v, scale, slot >= 0, SCALES, FORMAT, LARGEST)
    # Lanes along the tokens: neighbours in memory where the slots are.
    target = block * stride_vc_block + value_tokens(offset, stride_vc_token, PACKING, X, BLOCK_SIZE)
    target = (target + head * stride_vc_head)[None, :] + value_channels(channel, stride_vc_channel, PACKING)[:, None]
    tl.store(value_cache + target, tl.trans(v), mask=tl.trans(mask))
