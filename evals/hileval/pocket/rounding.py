# SPDX-License-Identifier: Apache-2.0
"""How often the rule of drift gates cries wolf: a pocket model beside itself, reordered, in other batches and dtypes.

Three attentions, all right: torch's is the peer, transformers' eager one is trusted as well, and ours goes over blocks
of 16 keys with scores in float32 and weights in the model's dtype, as kernels on GPUs do. What the peer differs from
itself, writing against reading and reading each sequence alone, is the rounding that the rule allows, and with a second
trusted attention what that one differs from the peer. Each replay draws some of the sequences, as a gate has them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hileval.engines.transformers_engine import TransformersEngine, as_rows
from hileval.gates.drift import Drift, divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hileval.engines import Rows

DTYPES = ("float32", "bfloat16", "float16")
BATCHES = (1, 4, 16)
WRITTEN, BLOCK = 8, 16


def read(model: Any, sequences: Sequence[Sequence[int]], batch: int, order: Sequence[int]) -> Rows:
    """Distributions before each token but the first; `batch` sequences at once, padded behind, in this order."""
    found: dict[int, list[dict[int, float]]] = {}
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        longest = max(len(sequences[i]) for i in some)
        ids = torch.tensor([[*sequences[i], *[0] * (longest - len(sequences[i]))] for i in some])
        mask = torch.tensor([[1] * len(sequences[i]) + [0] * (longest - len(sequences[i])) for i in some])
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        found |= {i: as_rows(row[: len(sequences[i]) - 1]) for i, row in zip(some, logits, strict=True)}
    return [found[i] for i in range(len(sequences))]


def far(got: Rows, want: Rows) -> list[list[float]]:
    """Divergences in nats, sequence by sequence."""
    return [[divergence(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(got, want, strict=True)]


def by_blocks(
    _: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **__: Any
) -> tuple[Any, None]:
    """Causal attention [sequences, heads, tokens, channels] with an online softmax."""
    key, value = (side.repeat_interleave(query.shape[1] // side.shape[1], 1).float() for side in (key, value))
    n, queries = key.shape[-2], query.shape[-2]
    hidden = torch.ones(queries, n, dtype=torch.bool).triu(n - queries + 1)
    if attention_mask is not None:
        hidden = hidden | ~attention_mask[..., :n]
    most = torch.full((*query.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(most), torch.zeros(query.shape)
    for first in range(0, n, BLOCK):
        some = slice(first, first + BLOCK)
        scores = (query.float() * scaling @ key[..., some, :].mT).masked_fill(hidden[..., some], -1e30)
        highest = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = (scores - highest).exp().masked_fill(hidden[..., some], 0.0)
        scale, most = (most - highest).exp(), highest
        total = total * scale + weights.sum(-1, keepdim=True)
        out = out * scale + weights.to(query.dtype).float() @ value[..., some, :]
    return (out / total.clamp_min(1e-30)).to(query.dtype).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class Figures:
    """Of one dtype, batch size of ours and order."""

    dtype: str
    batch: int
    shuffled: bool
    alone: float
    """Share of replays that fail where the peer's rounding is its own,"""
    beside: float
    """and where the second attention's counts as well."""
    unnoticed: float
    """Share of replays, the second attention's rounding counted, in which a replaced block is explained."""
    ours: Drift
    own: Drift
    second: Drift


def false_alarms(
    folder: Path, sequences: list[list[int]], *, drawn: int, replays: int, seed: int, batches: Sequence[int] = BATCHES
) -> Iterator[Figures]:
    """Replay gates in every dtype, batch size and order.

    Args:
        folder: The model, one whose attention torch's can serve: no soft cap.
        sequences: What is read.
        drawn: Sequences that a gate has.
        replays: Gates.
        seed: Of orders and draws.
        batches: How many sequences ours reads at once.
    """
    ALL_ATTENTION_FUNCTIONS.register("blocks", by_blocks)
    ALL_MASK_ATTENTION_FUNCTIONS.register("blocks", sdpa_mask)
    rng, plain = np.random.default_rng(seed), list(range(len(sequences)))
    for dtype in DTYPES:
        engine = TransformersEngine(folder)
        engine.model.to(getattr(torch, dtype))
        engine.model.set_attn_implementation("sdpa")
        want = read(engine.model, sequences, 4, plain)
        again = far(read(engine.model, sequences, 1, plain), want)
        asked = [tokens[: len(tokens) // 2] for tokens in sequences]
        written, wrote = engine.write(asked, WRITTEN)
        whole = read(engine.model, [[*a, *b] for a, b in zip(asked, written, strict=True)], 4, plain)
        wrote_far = far(wrote, [row[-WRITTEN:] for row in whole])
        lost = [
            [*one[: len(one) // 3], *sequences[i - 1][:BLOCK], *one[len(one) // 3 + BLOCK :]]
            for i, one in enumerate(sequences)
        ]
        control = far(read(engine.model, lost, 4, plain), want)
        engine.model.set_attn_implementation("eager")
        second = far(read(engine.model, sequences, 4, plain), want)
        engine.model.set_attn_implementation("blocks")
        for batch, shuffled in itertools.product(batches, (False, True)):
            order = rng.permutation(plain).tolist() if shuffled else plain
            ours = far(read(engine.model, sequences, batch, order), want)
            counts = np.zeros(3)
            for _ in range(replays):
                some = rng.choice(plain, drawn, replace=False).tolist()
                own = Drift.largest(_of(again, some, Drift.changed), _of(wrote_far, some, Drift.changed))
                both, found = Drift.largest(own, _of(second, some, Drift.changed)), _of(ours, some)
                counts += [not found.within(own), not found.within(both), _of(control, some).within(both)]
            own = Drift.largest(_of(again, plain, Drift.changed), _of(wrote_far, plain, Drift.changed))
            alone, beside, unnoticed = (counts / replays).tolist()
            compared = _of(ours, plain), own, _of(second, plain, Drift.changed)
            yield Figures(dtype, batch, shuffled, alone, beside, unnoticed, *compared)


def _of(
    found: Sequence[Sequence[float]], some: Sequence[int], drift: Callable[[list[float]], Drift] = Drift.of
) -> Drift:
    return drift([value for i in some for value in found[i]])
