# SPDX-License-Identifier: Apache-2.0
"""Where the cache keeps channel `c` of head `h` of token `t` of block `b`: axes, strides and offsets, in elements.

Logically K and V are both `[num_blocks, block_size, num_kv_heads, head_size]`. A *packing* says which axes they have in
memory, with `x` elements in 16 bytes, and which of them is the innermost one:

* `rows`     K and V `[num_blocks, block_size, num_kv_heads, head_size]`: the channels of a head are neighbours.
* `native`   K `[num_blocks, num_kv_heads, head_size // x, block_size, x]`, V `[num_blocks, num_kv_heads, head_size,
             block_size]`: what vLLM's HIP paged attention reads (ROCM_ATTN).
* `shuffle`  K as in `native`, V `[num_blocks, num_kv_heads, block_size // x, head_size, x]`: what aiter's reads.

A *layout* adds where the blocks lie in the pool that K and V share:

* `nhd`, `native`, `shuffle`   all of K, then all of V: planes.
* `hnd`                        planes of rows, and a block is `[num_kv_heads, block_size, head_size]`.
* `interleaved`, `native-interleaved`, `shuffle-interleaved`   K0 V0 K1 V1 ...: what a hybrid model needs, because
                               attention and Mamba share one pool and block `b` must be the same bytes for both.
* `packed`                     rows, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`: K and V of one token side
                               by side (vLLM 0.32, logical axes B, H, N, C).

In every one of them only the innermost axis is dense, and that is all a kernel may assume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Packing = Literal["rows", "native", "shuffle"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

Name = Literal["nhd", "hnd", "interleaved", "packed", "native", "native-interleaved", "shuffle", "shuffle-interleaved"]
NAMES: tuple[Name, ...] = get_args(Name)

KEY_AXES: dict[Packing, str] = {"rows": "bthc", "native": "bhCtc", "shuffle": "bhCtc"}
VALUE_AXES: dict[Packing, str] = {"rows": "bthc", "native": "bhct", "shuffle": "bhTct"}
"""Axes in memory, outermost first: block, token, head, channel. Where a capital letter is among them, that axis is
split: the capital counts groups of `x`, the small letter counts inside the group."""


def vector_elements(element_bytes: int) -> int:
    """Return `x`, the elements in 16 bytes, the widest load of a lane: 4 for fp32, 8 for fp16 and bf16, 16 for fp8."""
    return 16 // element_bytes


@dataclass(frozen=True)
class View:
    """One side (K or V) of the pool."""

    axes: str
    """One of `KEY_AXES`, `VALUE_AXES`."""
    offset: int
    """Element of the pool at which index 0 of all axes lies."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements; shape and strides have one entry for each of `axes`."""
    x: int

    def element(self, block: int, token: int, head: int, channel: int) -> int:
        """Return the pool element that holds this channel."""
        index = {"b": block, "t": token, "h": head, "c": channel}
        for group, inside in (("T", "t"), ("C", "c")):
            if group in self.axes:
                index[group], index[inside] = index[inside] // self.x, index[inside] % self.x
        return self.offset + sum(index[axis] * stride for axis, stride in zip(self.axes, self.strides, strict=True))


@dataclass(frozen=True)
class Layout:
    """A pool of `elements` elements that holds K and V of `shape`."""

    name: Name
    packing: Packing
    shape: tuple[int, int, int, int]
    """num_blocks, block_size, num_kv_heads, head_size."""
    key: View
    value: View
    elements: int

    @property
    def has_native_kv_cache_layout(self) -> bool:
        """Whether each side is a plane of its own, block after block (the term of vLLM PR 38502).

        A kernel that computes its own addresses from the extents may read and write such a cache and no other. What
        decides is the block stride, not `is_contiguous`, which also looks at the other side's plane.
        """
        return all(side.strides[0] == math.prod(side.shape[1:]) for side in (self.key, self.value))


def packing_of(name: Name) -> Packing:
    """Return the packing of the layout `name`."""
    if name.startswith("native"):
        return "native"
    return "shuffle" if name.startswith("shuffle") else "rows"


def _view(axes: str, order: str, shape: tuple[int, int, int, int], x: int, block: int, offset: int) -> View:
    """The view with `axes` of a side whose block, of stride `block`, is dense inside with its axes in `order`."""
    extents = dict(zip("bthc", shape, strict=True))
    for group, inside in (("T", "t"), ("C", "c")):
        if group in axes:
            extents[group], extents[inside] = extents[inside] // x, x
    strides, step = {"b": block}, 1
    for axis in reversed(order):
        strides[axis], step = step, step * extents[axis]
    return View(axes, offset, tuple(extents[a] for a in axes), tuple(strides[a] for a in axes), x)


def describe(
    name: Name, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, padding: int = 0, x: int = 8
) -> Layout:
    """Return the layout `name` of a pool.

    Args:
        name: One of `NAMES`.
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        num_kv_heads: KV heads.
        head_size: Channels of a head.
        padding: Elements after each block that belong to neither K nor V (a page rounded up).
        x: Elements in 16 bytes (`vector_elements`); the layouts without an `x` do not look at it.

    Raises:
        ValueError: if `name` is not a layout, an extent is not positive, or `x` does not divide the axis it splits.
    """
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    if name not in NAMES:
        raise ValueError(f"got layout {name!r}; expected one of {', '.join(NAMES)}")
    if min(shape) < 1 or padding < 0:
        raise ValueError(f"got shape {shape} and padding {padding}; expected extents >= 1 and padding >= 0")
    packing = packing_of(name)
    key_axes, value_axes = KEY_AXES[packing], VALUE_AXES[packing]
    if ("C" in key_axes and head_size % x) or ("T" in value_axes and block_size % x):
        raise ValueError(f"got shape {shape}; layout {name!r} splits head_size or block_size into groups of {x}")
    side = block_size * num_kv_heads * head_size
    if name == "packed":
        block = 2 * side + padding
        strides = (block, 2 * head_size, block_size * 2 * head_size, 1)
        key, value = (View("bthc", offset, shape, strides, x) for offset in (0, head_size))
        return Layout(name, packing, shape, key, value, num_blocks * block)
    interleaved = name.endswith("interleaved")
    block = (2 if interleaved else 1) * side + padding
    key = _view(key_axes, "htc" if name == "hnd" else key_axes[1:], shape, x, block, 0)
    value_offset = side if interleaved else num_blocks * block
    value = _view(value_axes, "htc" if name == "hnd" else value_axes[1:], shape, x, block, value_offset)
    return Layout(name, packing, shape, key, value, (1 if interleaved else 2) * num_blocks * block)
