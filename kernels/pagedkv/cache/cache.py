# SPDX-License-Identifier: Apache-2.0
"""The paged cache of one KV group as the operations take it: two tensors, how they are packed, how they are quantised.

It is made in one place, from one description, and handed to the write, the gather and the attention alike, so they
cannot disagree about where a token lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.errors import ArgumentError
from pagedkv.layout import KEY_AXES, PACKINGS, VALUE_AXES, Packing, vector_elements
from pagedkv.prepared import signature

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from pagedkv.fp8.formats import FormatName


@dataclass(frozen=True)
class Quantisation:
    """FP8 cache: it stores `q = cast(clamp(v / scale))`, which stands for `float(q) * scale`; NaN stays NaN.

    A scale is fp32: of shape `[]` or `[1]` for the whole tensor, `[num_kv_heads]` for each head, or `[num_blocks,
    block_size, num_kv_heads]` (any strides) for each token and head. The last kind is computed by the write.
    """

    format: FormatName
    """"e4m3fn" (gfx950, CUDA), "e4m3fnuz" (gfx942) or "e5m2"."""
    key_scale: Tensor
    value_scale: Tensor

    @property
    def per_token(self) -> bool:
        """Whether each token and head has scales of its own."""
        return self.key_scale.dim() == 3


@dataclass(frozen=True)
class PagedCache:
    """K and V of one KV group; for the axes of each packing see `pagedkv.layout`.

    Any strides but a dense last dimension, for K and V separately. A quantised cache holds FP8 codes as uint8.
    """

    key: Tensor
    value: Tensor
    packing: Packing = "rows"
    quantisation: Quantisation | None = None

    def __post_init__(self) -> None:
        """Refuse a packing that does not exist: a silent default would read garbage."""
        if self.packing not in PACKINGS:
            remedy = "Take the packing that the pool was laid out in (`pagedkv.layout`)."
            expected = f"one of {', '.join(PACKINGS)}"
            raise ArgumentError("option", "packing", got=repr(self.packing), expected=expected, remedy=remedy)

    @property
    def x(self) -> int:
        """Elements in 16 bytes."""
        return vector_elements(self.key.element_size())

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.key.shape[1 if self.packing == "rows" else 3]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.key.shape[2 if self.packing == "rows" else 1]

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.key.shape[3] if self.packing == "rows" else self.key.shape[2] * self.key.shape[4]

    @property
    def has_native_kv_cache_layout(self) -> bool:
        """Whether the blocks of each side follow each other without a gap (see `pagedkv.layout.Layout`)."""
        return all(side.stride(0) == math.prod(side.shape[1:]) for side in (self.key, self.value))

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Scales of K and V as kernels take them: any tensors where it is not quantised."""
        scaled = self.quantisation
        return (self.key, self.value) if scaled is None else (scaled.key_scale, scaled.value_scale)

    @property
    def signature(self) -> Hashable:
        """Signatures of its tensors (`pagedkv.prepared.signature`), and how it is packed and quantised.

        Asked at each call: a server that sleeps and wakes up points the same tensors at other memory (`Tensor.set_`).
        """
        scaled = self.quantisation
        scales = scaled and (scaled.format, signature(scaled.key_scale), signature(scaled.value_scale))
        return self.packing, signature(self.key), signature(self.value), scales

    @property
    def key_strides(self) -> tuple[int, int, int, int]:
        """Strides of block, token, head and group of x channels (0 in `rows`), in elements."""
        return _strides(self.key, KEY_AXES[self.packing], "bthC")

    @property
    def value_strides(self) -> tuple[int, int, int, int]:
        """Strides of block, token, head and channel, in elements.

        A dense axis has 0: tokens in `native`, channels in `rows`. In `shuffle` the second is of a group of x tokens.
        """
        axes = VALUE_AXES[self.packing]
        return _strides(self.value, axes, {"rows": "bth ", "native": "b hc", "shuffle": "bThc"}[self.packing])


def _strides(side: Tensor, axes: str, wanted: str) -> tuple[int, int, int, int]:
    strides = dict(zip(axes, side.stride(), strict=True))
    block, token, head, last = (strides.get(axis, 0) for axis in wanted)
    return block, token, head, last
