"""Where the cache keeps channel `c` of head `h` of token `t` of block `b`: strides and offsets, in elements.

Logically K and V are both `[num_blocks, block_size, num_kv_heads, head_size]`. Physically they share one pool, and an
engine chooses how. Four arrangements occur (names as on the left):

* `nhd`          all of K, then all of V; a block is `[block_size, num_kv_heads, head_size]`.
* `hnd`          all of K, then all of V; a block is `[num_kv_heads, block_size, head_size]`.
* `interleaved`  K0 V0 K1 V1 ...: what a hybrid model needs, because attention and Mamba share one pool and block `b`
                 must be the same bytes for both (vLLM's stride rewrite for hybrid models).
* `packed`       `[num_blocks, num_kv_heads, block_size, 2 * head_size]`: K and V of one token side by side
                 (vLLM 0.32, logical axes B, H, N, C).

In every one of them only the last dimension is dense, and that is all a kernel may assume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Name = Literal["nhd", "hnd", "interleaved", "packed"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class View:
    """One side (K or V) of the pool."""

    offset: int
    """Element of the pool at which block 0, token 0, head 0, channel 0 lies."""
    strides: tuple[int, int, int, int]
    """Of block, token, head, channel; in elements."""

    def element(self, block: int, token: int, head: int, channel: int) -> int:
        """Return the pool element that holds this channel."""
        index = (block, token, head, channel)
        return self.offset + sum(i * stride for i, stride in zip(index, self.strides, strict=True))


@dataclass(frozen=True)
class Layout:
    """A pool of `elements` elements that holds K and V of `shape`."""

    name: Name
    shape: tuple[int, int, int, int]
    """num_blocks, block_size, num_kv_heads, head_size."""
    key: View
    value: View
    elements: int


def describe(
    name: Name, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, padding: int = 0
) -> Layout:
    """Return the layout `name` of a pool.

    Args:
        name: One of `NAMES`.
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        num_kv_heads: KV heads.
        head_size: Channels of a head.
        padding: Elements after each block that belong to neither K nor V (a page rounded up).

    Raises:
        ValueError: if `name` is not a layout or an extent is not positive.
    """
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    if min(shape) < 1 or padding < 0:
        raise ValueError(f"got shape {shape} and padding {padding}; expected extents >= 1 and padding >= 0")
    side = block_size * num_kv_heads * head_size
    token_first = (num_kv_heads * head_size, head_size, 1)
    head_first = (head_size, block_size * head_size, 1)
    match name:
        case "nhd" | "hnd":
            inner = token_first if name == "nhd" else head_first
            block = side + padding
            key = View(0, (block, *inner))
            value = View(num_blocks * block, key.strides)
        case "interleaved":
            block = 2 * side + padding
            key = View(0, (block, *token_first))
            value = View(side, key.strides)
        case "packed":
            block = 2 * side + padding
            key = View(0, (block, 2 * head_size, block_size * 2 * head_size, 1))
            value = View(head_size, key.strides)
        case _:
            raise ValueError(f"got layout {name!r}; expected one of {', '.join(NAMES)}")
    sides = 2 if name in {"nhd", "hnd"} else 1
    return Layout(name, shape, key, value, sides * num_blocks * block)
