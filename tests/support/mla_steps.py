# SPDX-License-Identifier: Apache-2.0
"""Test data of MLA decode: sequences in a padded latent pool in which every byte that nobody wrote is NaN."""

from __future__ import annotations

import dataclasses

import torch

from pagedkv.mla.decode import mla_decode
from pagedkv.mla.launch import MlaShape


@dataclasses.dataclass
class Step:
    cache: torch.Tensor  # [num_blocks, block_size, latent + rope]
    query: torch.Tensor  # [num_tokens, num_heads, latent + rope]
    latent: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int

    @property
    def metadata(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("block_table", "seq_lens", "query_start_loc")}

    def shape(self, **changes: int) -> MlaShape:
        """What the launch of the step follows from, but for the changes."""
        _, heads, width = self.query.shape
        own = {"latent_size": self.latent, "rope_size": width - self.latent, "num_heads": heads}
        own |= {"element_bytes": self.query.element_size(), "max_query_len": self.max_query_len}
        return MlaShape(**(own | changes))

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5


def step(
    device, heads, seq_lens, query_lens=None, *, block_size=16, latent=64, rope=16, dtype="float32", padding=(24, 40)
) -> Step:
    """Unit-normal sequences in a NaN pool: rows and blocks are padded, block ids permuted, and columns of the block
    table after a sequence name a block that holds nothing but NaN."""
    query_lens = [min(1, n) for n in seq_lens] if query_lens is None else query_lens
    gen = torch.Generator().manual_seed(sum(seq_lens) * 31 + heads)
    as_dtype, width = getattr(torch, dtype), latent + rope
    max_blocks = max(1, *(-(-n // block_size) for n in seq_lens))
    num_blocks = len(seq_lens) * max_blocks + 2
    row = width + padding[0]
    strides = (block_size * row + padding[1], row, 1)
    pool = torch.full((num_blocks * strides[0],), float("nan"), dtype=as_dtype, device=device)
    cache = pool.as_strided((num_blocks, block_size, width), strides)
    order = torch.randperm(num_blocks, generator=gen)
    blocks = order[1 : 1 + len(seq_lens) * max_blocks].view(len(seq_lens), max_blocks)
    table = torch.full((len(seq_lens), max_blocks), int(order[0]), dtype=torch.int32)
    for seq, seq_len in enumerate(seq_lens):
        position = torch.arange(seq_len)
        block = blocks[seq, position // block_size]
        table[seq, position // block_size] = block.int()
        rows = torch.randn(seq_len, width, generator=gen)
        cache[block.to(device), (position % block_size).to(device)] = rows.to(device, as_dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads, width, generator=gen).to(device, as_dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Step(cache, query, latent, table.to(device), lens, starts.to(device), max(1, *query_lens))


def decode(data: Step, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of our kernels; both are NaN before."""
    shape = data.query.shape[:2]
    out = torch.full((*shape, data.latent), float("nan"), dtype=data.query.dtype, device=data.query.device)
    lse = torch.full(shape, float("nan"), device=data.query.device)
    options = {"scale": data.scale, "max_query_len": data.max_query_len, "lse": lse} | options
    mla_decode(data.query, data.cache, out, **data.metadata, **options)
    return out, lse
