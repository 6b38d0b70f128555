# SPDX-License-Identifier: Apache-2.0
"""How often a drift gate fails an attention that is right: six right attentions, each in every role.

A gate has three roles: ours, the peer, and a second trusted attention. Which of several right attentions plays which
role says how much of the difference rounding explains, so all 120 assignments of six attentions are replayed, in each
dtype. Ours reads in other batches and in another order than the peer. Each replay draws some of the sequences, as a
gate has them, and applies the gate's own rule to reading and to writing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hileval.distances import Drift, divergence
from hileval.engines.transformers_engine import TransformersEngine, as_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hileval.engines import Rows

    Attention = Callable[..., tuple[Any, None]]

DTYPES = ("float32", "bfloat16", "float16")
WRITTEN, BLOCK = 16, 16
ONE_IN_A_HUNDRED = 0.01
"""False alarms that are promised at most."""


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


Far = list[list[float]]
"""Divergences in nats, sequence by sequence."""


def far(got: Rows, want: Rows) -> Far:
    """How far the rows of `got` are from those of `want`."""
    return [[divergence(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(got, want, strict=True)]


def by_blocks(size: int, *, splits: int = 1, wide: bool = False, scaled: bool = False) -> Attention:
    """A causal attention [sequences, heads, tokens, channels] with an online softmax, as kernels on GPUs have it.

    Args:
        size: Keys of a block.
        splits: Parts of the keys that are computed apart and merged by their sums, as decode kernels do.
        wide: Weights stay in float32 for the product with V; else they are rounded to the model's dtype.
        scaled: The query is scaled in the model's dtype, and powers of two replace those of e.
    """

    def attention(
        _: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **__: Any
    ) -> tuple[Any, None]:
        dtype = query.dtype
        key, value = (side.repeat_interleave(query.shape[1] // side.shape[1], 1).float() for side in (key, value))
        n, queries = key.shape[-2], query.shape[-2]
        hidden = torch.ones(queries, n, dtype=torch.bool).triu(n - queries + 1)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[..., :n]
        if scaled:
            query, power = (query * (scaling * math.log2(math.e))).float(), torch.exp2
        else:
            query, power = query.float() * scaling, torch.exp
        parts = []
        part = -(-n // splits)
        for begin in range(0, n, part):
            most = torch.full((*query.shape[:-1], 1), -1e30)
            total, out = torch.zeros_like(most), torch.zeros(query.shape)
            for first in range(begin, min(begin + part, n), size):
                some = slice(first, min(first + size, begin + part, n))
                scores = (query @ key[..., some, :].mT).masked_fill(hidden[..., some], -1e30)
                highest = torch.maximum(most, scores.amax(-1, keepdim=True))
                weights = power(scores - highest).masked_fill(hidden[..., some], 0.0)
                scale, most = power(most - highest), highest
                total = total * scale + weights.sum(-1, keepdim=True)
                out = out * scale + (weights if wide else weights.to(dtype).float()) @ value[..., some, :]
            parts.append((most, total, out))
        top = torch.stack([most for most, _, _ in parts]).amax(0)
        total = sum(power(most - top) * total for most, total, _ in parts)
        out = sum(power(most - top) * out for most, _, out in parts)
        return (out / total.clamp_min(1e-30)).to(dtype).transpose(1, 2).contiguous(), None

    return attention


ATTENTIONS: dict[str, Attention | None] = {
    "sdpa": None,
    "blocks of 16": by_blocks(16),
    "blocks of 128": by_blocks(128),
    "four splits": by_blocks(16, splits=4),
    "weights in float32": by_blocks(16, wide=True),
    "scaled query": by_blocks(16, scaled=True),
}
"""Right ones, by the word that names them; torch's own needs no function."""


@dataclass(frozen=True)
class Said:
    """What one attention says, in one dtype."""

    read: Rows
    alone: Rows
    """`read` again, each sequence in a batch of its own,"""
    shuffled: Rows
    """and in batches of 16 in another order, as ours."""
    lost: Rows
    """`read` of sequences in which one block is replaced."""
    wrote: Rows
    """Of the tokens it wrote, one by one."""
    checked: dict[str, Rows]
    """By whose tokens they are: the same places, where all tokens are given at once."""


def ask(folder: Path, sequences: list[list[int]], dtype: str, rng: np.random.Generator) -> dict[str, Said]:
    """Ask every attention about these sequences."""
    plain = list(range(len(sequences)))
    order = rng.permutation(plain).tolist()
    asked = [tokens[: len(tokens) // 2] for tokens in sequences]
    lost = [
        [*one[: len(one) // 3], *sequences[i - 1][:BLOCK], *one[len(one) // 3 + BLOCK :]]
        for i, one in enumerate(sequences)
    ]
    engine = TransformersEngine(folder)
    engine.model.to(getattr(torch, dtype))

    def serve(name: str) -> None:
        if (attention := ATTENTIONS[name]) is not None:
            ALL_ATTENTION_FUNCTIONS.register(name, attention)
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
        engine.model.set_attn_implementation(name)

    joined: dict[str, list[list[int]]] = {}
    wrote: dict[str, Rows] = {}
    for name in ATTENTIONS:
        serve(name)
        written, wrote[name] = engine.write(asked, WRITTEN)
        joined[name] = [[*a, *b] for a, b in zip(asked, written, strict=True)]
    said = {}
    for name in ATTENTIONS:
        serve(name)
        said[name] = Said(
            read=read(engine.model, sequences, 4, plain),
            alone=read(engine.model, sequences, 1, plain),
            shuffled=read(engine.model, sequences, 16, order),
            lost=read(engine.model, lost, 4, plain),
            wrote=wrote[name],
            checked={
                other: [row[-WRITTEN:] for row in read(engine.model, tokens, 4, plain)]
                for other, tokens in joined.items()
            },
        )
    return said


@dataclass(frozen=True)
class RoundingFigures:
    """Of all roles in one dtype; shares of replays."""

    dtype: str
    alone: float
    """That fail, in the mean of all roles, where the peer's rounding is its own,"""
    beside: float
    """and where the second attention's counts as well."""
    often: int
    """Roles in which more than ONE_IN_A_HUNDRED fail so,"""
    roles: int
    """of so many."""
    worst: float
    """That fail in the worst role,"""
    worst_role: tuple[str, str, str]
    """which is: ours, the peer, the second."""
    unnoticed: float
    """In which one replaced block of one sequence is explained, in the mean of all roles."""
    ours: Drift
    """Ours reading, of all sequences, in the worst role,"""
    rounding: Drift
    """and what rounding is there."""


def false_alarms(said: Mapping[str, Said], dtype: str, *, drawn: int, replays: int, seed: int) -> RoundingFigures:
    """Replay gates with every attention in every role.

    Args:
        said: Of each attention (`ask`).
        dtype: What it was asked in.
        drawn: Sequences that a gate has.
        replays: Gates for each role; all roles have the same.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    sequences = len(next(iter(said.values())).read)
    draws = [rng.choice(sequences, drawn, replace=False).tolist() for _ in range(replays)]
    everything = list(range(sequences))
    table = _Table(said, [*draws, everything, *([one] for one in everything)])
    roles = list(itertools.permutations(said, 3))
    alone, beside, unnoticed = np.zeros((3, len(roles), replays), dtype=bool)
    for role, (ours, peer, second) in enumerate(roles):
        for k in range(replays):
            read, wrote = table.ours("shuffled", ours, peer, k), table.ours("wrote", ours, peer, k)
            own = [table.rounding(way, peer, peer, k) for way in ("alone", "wrote")]
            others = [table.rounding(way, second, peer, k) for way in ("read", "wrote")]
            both = [Drift.largest(*pair) for pair in zip(own, others, strict=True)]
            alone[role, k] = not (read.within(own[0]) and wrote.within(own[1]))
            beside[role, k] = not (read.within(both[0]) and wrote.within(both[1]))
            lost = table.ours("lost", peer, peer, replays + 1 + draws[k][0])
            unnoticed[role, k] = lost.worst <= both[0].limit().worst
    shares = beside.mean(axis=1)
    worst = int(shares.argmax())
    ours, peer, second = roles[worst]
    rounding = table.rounding("alone", peer, peer, replays), table.rounding("read", second, peer, replays)
    return RoundingFigures(
        dtype=dtype,
        alone=float(alone.mean()),
        beside=float(beside.mean()),
        often=int((shares > ONE_IN_A_HUNDRED).sum()),
        roles=len(roles),
        worst=float(shares[worst]),
        worst_role=roles[worst],
        unnoticed=float(unnoticed.mean()),
        ours=table.ours("shuffled", ours, peer, replays),
        rounding=Drift.largest(*rounding),
    )


class _Table:
    """Divergences of each pair of attentions, and their figures in each draw of sequences, computed once."""

    def __init__(self, said: Mapping[str, Said], draws: Sequence[Sequence[int]]) -> None:
        self._said, self._draws = said, draws
        self._far: dict[tuple[str, str, str], Far] = {}
        self._found: dict[tuple[str, str, str, int, bool], Drift] = {}

    def ours(self, way: str, one: str, peer: str, draw: int) -> Drift:
        """An attention from the peer, in one way of asking (a field of `Said`)."""
        return self._drift(way, one, peer, draw, rounding=False)

    def rounding(self, way: str, one: str, peer: str, draw: int) -> Drift:
        """The same as a measure of rounding."""
        return self._drift(way, one, peer, draw, rounding=True)

    def _drift(self, way: str, one: str, peer: str, draw: int, *, rounding: bool) -> Drift:
        key = way, one, peer
        if key not in self._far:
            right = self._said[peer].checked[one] if way == "wrote" else self._said[peer].read
            self._far[key] = far(getattr(self._said[one], way), right)
        if (*key, draw, rounding) not in self._found:
            values = [value for i in self._draws[draw] for value in self._far[key][i]]
            self._found[*key, draw, rounding] = Drift.changed(values) if rounding else Drift.of(values)
        return self._found[*key, draw, rounding]
