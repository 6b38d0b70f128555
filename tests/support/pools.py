# SPDX-License-Identifier: Apache-2.0
"""Test data: a KV pool of any layout in which every byte that nobody wrote is NaN, and batches of sequences in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from pagedkv import layout
from pagedkv.cache.cache import PagedCache, Quantisation

NAN_CODE = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80, "e5m2": 0x7F}
FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}

FAR = 2**30 + 64
"""A stride in elements; 4 * FAR wraps to 256 when it is computed in 32 bits."""


@dataclass
class Pool:
    """A pool; `key` and `value` have the axes of its packing, `rows` gives what they mean whatever the packing."""

    storage: torch.Tensor  # [elements]
    plan: layout.Layout
    key: torch.Tensor
    value: torch.Tensor
    quantisation: Quantisation | None = None

    @property
    def cache(self) -> PagedCache:
        return PagedCache(self.key, self.value, self.plan.packing, self.quantisation)

    def clone(self) -> Pool:
        storage = self.storage.clone()
        views = (storage.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (self.key, self.value))
        quantisation = self.quantisation
        if quantisation is not None:
            scales = (quantisation.key_scale.clone(), quantisation.value_scale.clone())
            quantisation = Quantisation(quantisation.format, *scales)
        return Pool(storage, self.plan, *views, quantisation)

    def rows(self, side: str) -> torch.Tensor:
        """Logical `[num_blocks, block_size, num_kv_heads, head_size]` of a side; of a quantised one in float64."""
        if self.plan.packing == "rows" and self.quantisation is None:
            return getattr(self, side)
        stored = self.storage[self._elements(side)]
        if self.quantisation is None:
            return stored
        return stored.view(FLOAT8[self.quantisation.format]).double() * self._scales(side)

    def put(self, side: str, block: torch.Tensor, token: torch.Tensor, data: torch.Tensor) -> None:
        """Store logical rows `data` [n, num_kv_heads, head_size], quantised by torch, at n (block, token) pairs."""
        if self.plan.packing == "rows" and self.quantisation is None:
            getattr(self, side)[block, token] = data.to(self.storage.dtype)
            return
        if self.quantisation is not None:
            kind = FLOAT8[self.quantisation.format]
            largest = torch.finfo(kind).max
            scaled = data.float() / self._scales(side).expand(self.plan.shape)[block, token].float()
            data = scaled.clamp(-largest, largest).to(kind).view(torch.uint8)
        self.storage[self._elements(side)[block, token]] = data.to(self.storage.dtype)

    def _elements(self, side: str) -> torch.Tensor:
        return _elements(getattr(self.plan, side), self.plan.shape, self.storage.device)

    def _scales(self, side: str) -> torch.Tensor:
        scale = getattr(self.quantisation, f"{side}_scale").double()
        return scale[..., None] if scale.dim() else scale


@functools.lru_cache(4)
def _elements(view: layout.View, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Each axis alone, and the sum over them spreads: the elements of a large pool are added once, not for each axis.
    axes = (torch.arange(n, device=device) for n in shape)
    return view.element(*(axis.reshape(-1, *(1 for _ in shape[place:])) for place, axis in enumerate(axes, start=1)))


def pool(
    name: str,
    shape: tuple[int, int, int, int],
    dtype: str,
    device: str,
    *,
    padding: int = 24,
    quantised: str | None = None,
    scales: str = "tensor",
) -> Pool:
    """A pool of `shape` = num_blocks, block_size, num_kv_heads, head_size, all NaN. `padding` follows each block.

    Quantised (e4m3fn, e4m3fnuz, e5m2), every code is NaN, and K and V have different scales: one per "tensor", per
    "head", or per "token" and head, the last all NaN with strides of their own.
    """
    as_dtype = torch.uint8 if quantised else getattr(torch, dtype)
    padding = -(-padding // 16) * 16 if quantised else padding
    plan = layout.describe(name, *shape, padding=padding, x=layout.vector_elements(as_dtype.itemsize))
    poison = NAN_CODE[quantised] if quantised else float("nan")
    storage = torch.full((plan.elements,), poison, dtype=as_dtype, device=device)
    views = (storage.as_strided(view.shape, view.strides, view.offset) for view in (plan.key, plan.value))
    return Pool(storage, plan, *views, quantisation(quantised, scales, shape, device) if quantised else None)


def quantisation(kind: str, scales: str, shape: tuple[int, int, int, int], device: str) -> Quantisation:
    """Scales that take unit-normal data well into the range of every format; for K and V others, and other strides."""
    num_blocks, block_size, heads, _ = shape
    if scales == "token":
        of_key = torch.full((num_blocks, heads, 2, block_size), float("nan"), device=device)[:, :, 1].transpose(1, 2)
        of_value = torch.full((num_blocks, block_size, heads + 2), float("nan"), device=device)[:, :, 1:-1]
        return Quantisation(kind, of_key, of_value)
    if scales == "head":
        numbers = torch.linspace(0.02, 0.07, 3 * heads, device=device)
        return Quantisation(kind, numbers[:heads], numbers[heads::2])
    return Quantisation(kind, torch.full((1,), 0.031, device=device), torch.tensor(0.053, device=device))


@dataclass
class Batch:
    pool: Pool
    query: torch.Tensor  # [num_tokens, num_q_heads, head_size]
    block_table: torch.Tensor  # [num_seqs, max_blocks] int32, unique and permuted ids
    seq_lens: torch.Tensor  # [num_seqs] int32
    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    max_query_len: int
    max_seq_len: int

    @property
    def metadata(self) -> dict[str, torch.Tensor]:
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
        }


def batch(
    *,
    layout_name: str,
    dtype: str,
    device: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    query_lens: list[int],
    seq_lens: list[int],
    window: int | None = None,
    quantised: str | None = None,
    scales: str = "tensor",
) -> Batch:
    """Sequences of unit-normal data in a NaN pool; only the tokens that some query sees are finite.

    Columns of the block table after a sequence, and those before its window, name a block that holds nothing but NaN.
    """
    gen = torch.Generator().manual_seed(sum(seq_lens) * 31 + head_size)
    as_dtype = getattr(torch, dtype)
    max_blocks = max(1, *(-(-n // block_size) for n in seq_lens))
    num_blocks = len(seq_lens) * max_blocks + 2
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    pages = pool(layout_name, shape, dtype, device, quantised=quantised, scales=scales)
    order = torch.randperm(num_blocks, generator=gen)
    nobody, order = order[0], order[1 : 1 + len(seq_lens) * max_blocks].view(len(seq_lens), max_blocks)
    table = torch.full((len(seq_lens), max_blocks), int(nobody), dtype=torch.int32)
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        oldest = 0 if window is None else max(0, seq_len - query_len - window + 1)
        position = torch.arange(oldest, seq_len)
        table[seq, position // block_size] = order[seq, position // block_size].int()
        where = (order[seq, position // block_size].to(device), (position % block_size).to(device))
        for side in ("key", "value"):
            data = torch.randn(len(position), num_kv_heads, head_size, generator=gen).to(device)
            if scales == "token" and quantised:
                absmax = data.abs().amax(-1) / torch.finfo(FLOAT8[quantised]).max
                getattr(pages.quantisation, f"{side}_scale")[where] = absmax
            pages.put(side, *where, data)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), num_q_heads, head_size, generator=gen)
    return Batch(
        pages,
        query.to(device, as_dtype),
        table.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        starts.to(device),
        max(query_lens),
        max(seq_lens),
    )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless two tensors hold the same bytes (NaN equals NaN); the message names the first difference."""
    element = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = (got.contiguous().view(element) != want.contiguous().view(element)).nonzero()
    if len(different):
        first = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {got.numel()} elements differ; first at {list(first)}: "
            f"got {got[first].item()}, expected {want[first].item()}"
        )
