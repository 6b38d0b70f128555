"""MLA decode made runnable: queries of latent and rope channels over a cache of such rows, both sides over the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.mla.decode import mla_decode
from pagedkv.mla.tables import allocate, fill

from . import oracle, peers, pools
from .sides import Side, Work, side

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .cases import Case


def mla(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    """Return the work of a case.

    Our tables are filled before the clock starts: they serve all layers of a step, as the peer's lengths and blocks do.
    """
    shape = (case.num_seqs, case.num_q_heads, case.head_size)
    starts = torch.arange(case.num_seqs + 1, device=device, dtype=torch.int32)
    lens = torch.full((case.num_seqs,), case.seq_len, device=device, dtype=torch.int32)
    inputs = []
    for _ in range(sets):
        table = pools.block_table(case, device)
        cache = torch.randn(table.numel(), case.block_size, case.head_size, device=device, dtype=dtype)
        inputs.append((torch.randn(shape, device=device, dtype=dtype), cache, table))
    sizes = {"latent_size": case.latent_size, "rope_size": case.head_size - case.latent_size}
    shapes = {"num_heads": case.num_q_heads, "num_seqs": case.num_seqs, "max_query_len": 1}
    tables = allocate(inputs[0][0], **sizes, **shapes)
    fill(tables, lens, starts)

    def judge(outs: list[Tensor]) -> float:
        errors = []
        for (query, cache, table), out in zip(inputs, outs, strict=True):
            rows = oracle.Stored(cache[:, :, None]), oracle.Stored(cache[:, :, None, : case.latent_size])
            errors.append(oracle.row_error(out, oracle.attention(query, *rows, table, case.lens)))
        return max(errors)

    def make(call: Callable[..., None]) -> Side:
        outs = [torch.empty(*shape[:2], case.latent_size, device=device, dtype=dtype) for _ in inputs]
        return side([(*each, out) for each, out in zip(inputs, outs, strict=True)], call, outs, lambda: judge(outs))

    def ours(query: Tensor, cache: Tensor, table: Tensor, out: Tensor) -> None:
        mla_decode(
            query, cache, out, block_table=table, seq_lens=lens, query_start_loc=starts, max_query_len=1,
            scale=case.head_size**-0.5, tables=tables,
        )  # fmt: skip

    return Work(
        make(ours), lambda: make(peers.mla_decode(case, inputs[0][0], lens)), oracle.attention_bound(dtype), sets
    )
