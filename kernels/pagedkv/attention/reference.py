# SPDX-License-Identifier: Apache-2.0
"""The oracle of attention: plain torch loops over sequences in float64, importing nothing but the cache's oracle.

MLA decode is attention with one KV head, the latent row, whose value is the first channels of its key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.cache.reference import context


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * Q K^T) V for every query token and the log of its sum of exponentials, in float64.

    Query token t of a sequence stands at position `seq_len - query_len + t`. It sees positions up to its own (causal)
    or all of the sequence, and with a window w of those only the last w, its own included. A query that sees nothing
    gets 0 and -inf. Rows of `query` beyond `query_start_loc[-1]` are NaN in the result: they have no answer.

    Args:
        query: `[num_tokens, num_q_heads, head_size]`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_size]`.
        value_cache: Like `key_cache`, with the channels of the result.
        block_table: `[num_seqs, max_blocks]`.
        seq_lens: `[num_seqs]`, keys of each sequence (context and this step).
        query_start_loc: `[num_seqs + 1]`.
        scale: Factor of the scores.
        causal: Whether a query sees no later position.
        sliding_window: Window, or None.
        softcap: Scores x become `softcap * tanh(x / softcap)`.
        alibi_slopes: `[num_q_heads]`; then `slope * (position of the key - position of the query)` is added.
        sinks: `[num_q_heads]`; one more score of each head, whose value is 0.

    Returns:
        `[num_tokens, num_q_heads, channels of a value]` and `[num_tokens, num_q_heads]`, on the CPU.
    """
    query = query.double().cpu()
    num_kv_heads = key_cache.shape[2]
    out = query.new_full((*query.shape[:2], value_cache.shape[3]), float("nan"))
    sums = out.new_full(out.shape[:2], float("nan"))
    for seq, seq_len in enumerate(seq_lens.tolist()):
        begin, end = (int(x) for x in query_start_loc[seq : seq + 2])
        if begin == end:
            continue  # its length may mean nothing
        first = seq_len - (end - begin)
        # Keys that no query of this step sees are not read: a freed block may hold anything.
        oldest = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        keys = context(key_cache, block_table[seq], oldest, seq_len).double().cpu()
        values = context(value_cache, block_table[seq], oldest, seq_len).double().cpu()
        for n in range(begin, end):
            position = first + n - begin
            low = oldest if sliding_window is None else max(oldest, position - sliding_window + 1)
            high = position + 1 if causal else seq_len
            seen = slice(max(0, low - oldest), max(0, high - oldest))
            grouped = query[n].unflatten(0, (num_kv_heads, -1))
            scores = torch.einsum("hgd,khd->hgk", grouped, keys[seen]).flatten(0, 1) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distance = torch.arange(low, high) - position
                scores = scores + alibi_slopes.double().cpu()[:, None] * distance
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().cpu()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : keys[seen].shape[0]].unflatten(0, (num_kv_heads, -1))
            out[n] = torch.einsum("hgk,khd->hgd", weights, values[seen]).flatten(0, 1)
            sums[n] = torch.logsumexp(scores, dim=1)
    return out, sums
