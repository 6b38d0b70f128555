# SPDX-License-Identifier: Apache-2.0
"""Several sequences and KV heads in one attention program, for Triton's interpreter alone: all of this is a GPU's 1.

There an operation costs the same whatever its size, so programs are few and large (`tuning/interpreter.toml`): rows are
sequences x tokens x query heads, columns sequences x tokens x KV heads, and a row sees the columns of its own. On a GPU
SEQS = HEADS = 1: sequences and lengths are scalars, and what is here returns them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(index, first_seq, EACH: tl.constexpr, SEQS: tl.constexpr):
    """Return the sequence of each row or column, of which a sequence has EACH; first_seq if the program has one."""
    return first_seq + (index // EACH if SEQS > 1 else 0)


@triton.jit
def lengths_of(seq, seq_lens, query_start_loc, num_seqs, SEQS: tl.constexpr):
    """Return the tokens of a sequence; among several, 0 for one without a query, whose length means nothing."""
    if SEQS > 1:
        start = tl.load(query_start_loc + seq, mask=seq < num_seqs, other=0)
        end = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=0)
        length = tl.load(seq_lens + seq, mask=end > start, other=0)
    else:
        length = tl.load(seq_lens + seq)
    return length


@triton.jit
def lowest(bound, SEQS: tl.constexpr):
    """Return the least bound of the program's sequences."""
    return tl.min(bound, axis=0) if SEQS > 1 else bound


@triton.jit
def highest(bound, SEQS: tl.constexpr):
    """Return the largest bound of the program's sequences."""
    return tl.max(bound, axis=0) if SEQS > 1 else bound


@triton.jit
def shared(row_live, row_seq, row_head, column_seq, column_head, HEADS: tl.constexpr, SEQS: tl.constexpr):
    """Return [ROWS, columns or 1]: whether row and column are of the same sequence and KV head."""
    same = row_live[:, None]
    if HEADS > 1:
        same = same & (row_head[:, None] == column_head[None, :])
    if SEQS > 1:
        same = same & (row_seq[:, None] == column_seq[None, :])
    return same
