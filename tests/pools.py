"""Test data: a KV pool of any layout in which every byte that nobody wrote is NaN, and batches of sequences in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv import layout


@dataclass
class Pool:
    storage: torch.Tensor  # [elements]
    key: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    value: torch.Tensor

    def clone(self) -> Pool:
        storage = self.storage.clone()
        views = (storage.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (self.key, self.value))
        return Pool(storage, *views)


def pool(name: str, shape: tuple[int, int, int, int], dtype: str, device: str, *, padding: int = 24) -> Pool:
    """A pool of `shape` = num_blocks, block_size, num_kv_heads, head_size, all NaN. `padding` follows each block."""
    plan = layout.describe(name, *shape, padding=padding)
    storage = torch.full((plan.elements,), float("nan"), dtype=getattr(torch, dtype), device=device)
    return Pool(storage, *(storage.as_strided(shape, view.strides, view.offset) for view in (plan.key, plan.value)))


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
) -> Batch:
    """Sequences of unit-normal data in a NaN pool; only the tokens that some query sees are finite.

    Columns of the block table behind a sequence, and those before its window, name a block that holds nothing but NaN.
    """
    gen = torch.Generator().manual_seed(sum(seq_lens) * 31 + head_size)
    as_dtype = getattr(torch, dtype)
    max_blocks = max(1, *(-(-n // block_size) for n in seq_lens))
    num_blocks = len(seq_lens) * max_blocks + 2
    pages = pool(layout_name, (num_blocks, block_size, num_kv_heads, head_size), dtype, device)
    order = torch.randperm(num_blocks, generator=gen)
    nobody, order = order[0], order[1 : 1 + len(seq_lens) * max_blocks].view(len(seq_lens), max_blocks)
    table = torch.full((len(seq_lens), max_blocks), int(nobody), dtype=torch.int32)
    for seq, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        oldest = 0 if window is None else max(0, seq_len - query_len - window + 1)
        position = torch.arange(oldest, seq_len)
        table[seq, position // block_size] = order[seq, position // block_size].int()
        where = (order[seq, position // block_size].to(device), (position % block_size).to(device))
        for cache in (pages.key, pages.value):
            data = torch.randn(len(position), num_kv_heads, head_size, generator=gen)
            cache[where] = data.to(device, as_dtype)
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
    element = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    different = (got.contiguous().view(element) != want.contiguous().view(element)).nonzero()
    if len(different):
        first = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {got.numel()} elements differ; first at {list(first)}: "
            f"got {got[first].item()}, expected {want[first].item()}"
        )
