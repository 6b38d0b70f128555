"""Write K and V of a step into the paged cache.

    key_cache[slot // block_size, slot % block_size, h, :] = key[n, h, :]     slot = slot_mapping[n] >= 0; V alike

A program copies ROWS head rows (token, head) of K and of V. Every stride but the last is an argument, for K and V
separately; offsets are int64, because a hybrid model's block stride reaches megabytes and int32 products wrap at a few
thousand blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from . import checks
from .arch import next_power_of_two
from .device import current, on
from .launch import tuning
from .strides import hidden_alignment, multiple

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _write_kernel(
    key,  # [num_tokens, num_kv_heads, head_size]
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,
    slot_mapping,  # [num_slots] int64
    num_rows,  # num_slots * NUM_HEADS
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_kc_block: tl.int64,
    stride_kc_token: tl.int64,
    stride_kc_head: tl.int64,
    stride_vc_block: tl.int64,
    stride_vc_token: tl.int64,
    stride_vc_head: tl.int64,
    stride_slot: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,  # see strides.hidden_alignment
):
    if ALIGN > 1:
        stride_key_token = multiple(stride_key_token, ALIGN)
        stride_key_head = multiple(stride_key_head, ALIGN)
        stride_value_token = multiple(stride_value_token, ALIGN)
        stride_value_head = multiple(stride_value_head, ALIGN)
        stride_kc_block = multiple(stride_kc_block, ALIGN)
        stride_kc_token = multiple(stride_kc_token, ALIGN)
        stride_kc_head = multiple(stride_kc_head, ALIGN)
        stride_vc_block = multiple(stride_vc_block, ALIGN)
        stride_vc_token = multiple(stride_vc_token, ALIGN)
        stride_vc_head = multiple(stride_vc_head, ALIGN)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    slot = tl.load(slot_mapping + token * stride_slot, mask=row < num_rows, other=-1)
    channel = tl.arange(0, PADDED)[None, :]
    mask = (slot >= 0)[:, None] & (channel < HEAD_SIZE)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    source = token * stride_key_token + head * stride_key_head
    target = block * stride_kc_block + offset * stride_kc_token + head * stride_kc_head
    k = tl.load(key + source[:, None] + channel, mask=mask)
    tl.store(key_cache + target[:, None] + channel, k, mask=mask)

    source = token * stride_value_token + head * stride_value_head
    target = block * stride_vc_block + offset * stride_vc_token + head * stride_vc_head
    v = tl.load(value + source[:, None] + channel, mask=mask)
    tl.store(value_cache + target[:, None] + channel, v, mask=mask)


def write_kv_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, head_size]
    value: Tensor,  # [num_tokens, num_kv_heads, head_size]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    slot_mapping: Tensor,  # [n <= num_tokens] int64
    *,
    debug: bool = False,
) -> None:
    """Copy K and V of the first n tokens to their slots; a negative slot is not written.

    Any strides with a dense last dimension, for each of the four tensors on its own. Nothing else of the pool changes.

    Args:
        key: K of this step, in the dtype of the cache (fp32, fp16 or bf16).
        value: V of this step.
        key_cache: Logical view of the K side of the pool.
        value_cache: Logical view of the V side of the pool.
        slot_mapping: `block * block_size + token_in_block` of each token. May be shorter than `key`, which a captured
            graph pads.
        debug: Also check that every slot lies in the pool and occurs once (synchronises with the device).

    Raises:
        ArgumentError: the subclass of `pagedkv.errors` that names the mistake.
    """
    checks.caches(key_cache, value_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    axes = "[num_tokens, num_kv_heads, head_size]"
    checks.shape("key", key, (None, num_kv_heads, head_size), axes)
    checks.shape("value", value, tuple(key.shape), axes)
    checks.shape("slot_mapping", slot_mapping, (None,), "[n], one slot per token")
    checks.at_most("slot_mapping", slot_mapping.shape[0], key.shape[0], "num_tokens of key")
    for name, tensor in (("key", key), ("value", value)):
        checks.dtype(name, tensor, (key_cache.dtype,), "Cast to the dtype of the cache.")
        checks.dense(name, tensor)
    checks.dtype("slot_mapping", slot_mapping, (torch.int64,), "Slots of a large pool exceed 32 bits.")
    checks.device(("key_cache", key_cache), {"key": key, "value": value, "slot_mapping": slot_mapping})
    if debug:
        checks.slots_exist(slot_mapping, num_blocks * block_size)
    num_rows = slot_mapping.shape[0] * num_kv_heads
    if num_rows == 0:
        return
    launch = tuning(current().name).write
    rows = min(launch.rows, next_power_of_two(num_rows))
    with on(key_cache):
        _write_kernel[(triton.cdiv(num_rows, rows),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            num_rows,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            slot_mapping.stride(0),
            NUM_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            PADDED=next_power_of_two(head_size),
            BLOCK_SIZE=block_size,
            ROWS=rows,
            ALIGN=hidden_alignment(key, value, key_cache, value_cache),
            num_warps=launch.waves,
        )
