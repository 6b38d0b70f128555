"""The oracle of multi-head latent attention: plain torch loops over sequences in float64, importing nothing of ours."""

from __future__ import annotations

import torch
from torch import Tensor


def latent_rows(cache: Tensor, block_row: Tensor, seq_len: int) -> Tensor:
    """Return the rows of the sequence whose blocks `block_row` lists: `[seq_len, latent_size + rope_size]`."""
    block_size = cache.shape[1]
    rows = [cache[int(block_row[p // block_size]), p % block_size] for p in range(seq_len)]
    return torch.stack(rows) if rows else cache.new_empty((0, cache.shape[2]))


def mla_decode(
    query: Tensor,
    cache: Tensor,
    latent_size: int,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and the natural log-sum-exp of every query, in float64 on the CPU.

    Query token t of a sequence stands at position `seq_len - query_len + t` and sees positions up to its own. Key is
    the whole cached row, value its first `latent_size` channels; all heads share them. A query that sees nothing gets
    0 and -inf. Rows of `query` beyond `query_start_loc[-1]` are NaN in the result: they have no answer.

    Args:
        query: `[num_tokens, num_heads, latent_size + rope_size]`.
        cache: `[num_blocks, block_size, latent_size + rope_size]`, numbers (of a quantised cache: codes times scale).
        latent_size: Channels that are key and value.
        block_table: `[num_seqs, max_blocks]`.
        seq_lens: `[num_seqs]`.
        query_start_loc: `[num_seqs + 1]`.
        scale: Factor of the scores.

    Returns:
        `[num_tokens, num_heads, latent_size]` and `[num_tokens, num_heads]`.
    """
    query = query.double().cpu()
    out = query.new_full((*query.shape[:2], latent_size), float("nan"))
    lse = query.new_full(query.shape[:2], float("nan"))
    for seq, seq_len in enumerate(seq_lens.tolist()):
        begin, end = query_start_loc[seq : seq + 2].tolist()
        rows = latent_rows(cache, block_table[seq], seq_len).double().cpu() if end > begin else cache
        for n in range(begin, end):
            seen = rows[: max(0, seq_len - (end - begin) + n - begin + 1)]
            scores = query[n] @ seen.T * scale
            lse[n] = torch.logsumexp(scores, dim=1)
            out[n] = torch.softmax(scores, dim=1) @ seen[:, :latent_size]
    return out, lse
