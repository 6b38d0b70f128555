"""Decode, prefill and mixed batches made runnable: the same caches and queries for both sides."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pagedkv.attention.paged import paged_attention

from . import oracle, peers, pools
from .cases import PAGED_2D
from .sides import Side, Work, side

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pagedkv.cache.cache import PagedCache

    from .cases import Case

SOFTCAP = 5.0
"""Of unit-normal scores: low enough to change them."""


def attention(case: Case, device: str, dtype: torch.dtype, sets: int) -> Work:
    """Return the work of an attention case."""
    num_tokens = sum(query_len for _, query_len in case.lens)
    shape = (num_tokens, case.num_q_heads, case.head_size)
    starts = list(itertools.accumulate((query_len for _, query_len in case.lens), initial=0))
    inputs = []
    for _ in range(sets):
        table = pools.block_table(case, device)
        metadata = {
            "block_table": table,
            "seq_lens": torch.tensor([seq_len for seq_len, _ in case.lens], device=device, dtype=torch.int32),
            "query_start_loc": torch.tensor(starts, device=device, dtype=torch.int32),
        }
        query = torch.randn(shape, device=device, dtype=dtype)
        inputs.append((query, pools.new(case, device, dtype, table.numel()), metadata))
    options: dict = {"sliding_window": case.window}
    if case.capped:
        options |= {"softcap": SOFTCAP, "sinks": torch.randn(case.num_q_heads, device=device)}

    def judge(outs: list[Tensor]) -> float:
        return max(_error(case, *each, out, options) for each, out in zip(inputs, outs, strict=True))

    def make(call: Callable, data: list[tuple]) -> Side:
        outs = [torch.empty(shape, device=device, dtype=dtype) for _ in data]
        return side([(*each, out) for each, out in zip(data, outs, strict=True)], call, outs, lambda: judge(outs))

    def peer() -> Side:
        if case.peer == PAGED_2D:
            data = [(query, pools.packed(cache, "native"), metadata) for query, cache, metadata in inputs]
            return make(peers.paged_attention_2d(case, inputs[0][0]), data)
        return make(peers.unified_attention(case, inputs[0][0], options), inputs)

    bound = oracle.attention_bound(dtype, scaled_rows=case.scales == "token")
    return Work(make(_ours(case, options), inputs), peer, bound, sets)


def _ours(case: Case, options: dict) -> Callable[..., None]:
    """Return our call: one, or for a mixed batch one for its decode sequences and one for the rest."""
    batches = [(slice(0, case.num_seqs), case.seq_len, case.query_len)]
    if case.prefill_tokens:
        batches.append((slice(case.num_seqs, case.num_seqs + 1), case.prefill_tokens, case.prefill_tokens))

    def run(query: Tensor, cache: PagedCache, metadata: dict[str, Tensor], out: Tensor) -> None:
        for seqs, seq_len, query_len in batches:
            paged_attention(
                query, cache, out, block_table=metadata["block_table"][seqs], seq_lens=metadata["seq_lens"][seqs],
                query_start_loc=metadata["query_start_loc"][seqs.start : seqs.stop + 1], max_query_len=query_len,
                max_seq_len=seq_len, scale=case.head_size**-0.5, num_splits=case.num_splits, **options,
            )  # fmt: skip

    return run


def _error(case: Case, query: Tensor, cache: PagedCache, metadata: dict, out: Tensor, options: dict) -> float:
    """Judge by what the case says, not by what was passed to the sides."""
    expected: dict = {"window": case.window}
    if case.capped:
        expected |= {"softcap": SOFTCAP, "sinks": options["sinks"]}
    golden = oracle.attention(query, *pools.stored(cache), metadata["block_table"], case.lens, **expected)
    return oracle.row_error(out, golden)
