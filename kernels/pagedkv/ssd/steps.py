# SPDX-License-Identifier: Apache-2.0
"""The steps of Mamba-2's chunked scan before its outputs, in plain torch (Dao and Gu 2024, section 6).

For tests and for vLLM's CPU platform; on GPUs these are vLLM's own kernels. Laid out as those lay it out.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """What `chunk_scan` takes. Behind the tokens of a chunk dt is 0 and the sums stay; products there are 0."""

    products: Tensor  # [chunks, groups, chunk_size, chunk_size]: C_i . B_j
    dt: Tensor  # [heads, chunks, chunk_size]
    sums: Tensor  # [heads, chunks, chunk_size]: of dt A
    states: Tensor  # [chunks, heads, head_size, state], behind each chunk


def chunked(starts: list[int], chunk_size: int) -> tuple[list[int], list[int], list[int]]:
    """Chunks of one sequence each: first tokens (and the number of tokens), whose each is, the last of each sequence.

    Args:
        starts: First token of each sequence, and the number of tokens. No sequence is empty.
        chunk_size: Most tokens of a chunk.
    """
    begins: list[int] = []
    owners: list[int] = []
    last = []
    for owner, (begin, end) in enumerate(itertools.pairwise(starts)):
        own = range(begin, end, chunk_size)
        begins, owners = [*begins, *own], [*owners, *[owner] * len(own)]
        last.append(len(begins) - 1)
    return [*begins, starts[-1]], owners, last


def steps(
    x: Tensor,  # [tokens, heads, head_size]
    dt: Tensor,  # [tokens, heads], from `reference.step_size`
    A: Tensor,  # [heads], negative
    B: Tensor,  # [tokens, groups, state]
    C: Tensor,  # [tokens, groups, state]
    *,
    chunk_size: int,
    chunk_starts: list[int],
    sequences: list[int],
    initial_states: Tensor | None = None,  # [sequences, heads, head_size, state]
) -> Steps:
    """Products, sums and states of every chunk, computed in the dtype of `dt` (float64 or float32)."""
    x, A, B, C = (tensor.to(dt) for tensor in (x, A, B, C))
    chunks, (heads, head_size), (groups, size) = len(sequences), x.shape[1:], B.shape[1:]
    products = dt.new_zeros(chunks, groups, chunk_size, chunk_size)
    laid_dt, sums = dt.new_zeros(2, heads, chunks, chunk_size)
    states = dt.new_zeros(chunks, heads, head_size, size)
    for chunk, (begin, end) in enumerate(itertools.pairwise(chunk_starts)):
        sequence, tokens, length = sequences[chunk], slice(begin, end), end - begin
        laid_dt[:, chunk, :length] = dt[tokens].T
        steps_down = (dt[tokens].T * A[:, None]).cumsum(-1)
        sums[:, chunk, :length], sums[:, chunk, length:] = steps_down, steps_down[:, -1:]
        # At a sum of -inf all of its own token is left, and nothing of another.
        gone = steps_down.isneginf()
        fallen = (steps_down[:, -1:] - steps_down).masked_fill(gone, -torch.inf)
        fallen[:, -1].masked_fill_(gone[:, -1], 0.0)
        products[chunk, :, :length, :length] = torch.einsum("igs,jgs->gij", C[tokens], B[tokens])
        until_end = laid_dt[:, chunk, :length] * fallen.exp()
        per_head = B[tokens].repeat_interleave(heads // groups, dim=1)
        states[chunk] = torch.einsum("ht,thp,ths->hps", until_end, x[tokens], per_head)
        before = None if initial_states is None else initial_states[sequence].to(dt)
        if chunk and sequences[chunk - 1] == sequence:
            before = states[chunk - 1]
        if before is not None:
            states[chunk] += sums[:, chunk, -1].exp()[:, None, None] * before
    return Steps(products, laid_dt, sums, states)
