# SPDX-License-Identifier: Apache-2.0
"""A head that predicts one token more (MTP), as Qwen publishes it: its weights beside a tiny model, and its drafts.

At position i it takes the embedding of token i + 1 and the model's hidden state of position i, and drafts token i + 2.
transformers leaves it out of the model; so does vLLM, which makes a drafter of it.
"""

from __future__ import annotations

import statistics
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from families import oracle
from families.judge import Error
from families.schedule import prompt

if TYPE_CHECKING:
    from pathlib import Path

    from families.family import Family
    from families.oracle import Oracle
    from families.probe import Verified

LEARNT = ((20, 71), (20, 72))
"""Lengths and seeds of the prompts whose answers the head has been fitted to; of others it knows next to nothing."""

ANSWERS = 40
"""Answer tokens of each request. Both together are fewer positions than the head's first product has inputs."""

NOISE = 0.02
"""Deviation by which the head's layer differs from the last of the model."""

NORM_NOISE = 0.1
"""Noise of its norms."""

WEIGHTS = "model.safetensors"
TWIN = "mtp"
"""Folder in a checkpoint's folder: the model with the head's layer and norm in the place of its last ones, which is how
transformers reads and computes them. vLLM reads the files beside it."""


@dataclass(eq=False)
class Head:
    """The head in transformers' own layers."""

    model: Any
    """The model that it drafts for: embedding, positions and the last product are the same."""
    twin: Any
    """Whether it is a twin (`TWIN`)."""
    of_embedding: Any
    """Norm of the embedding of a token."""
    of_hidden: Any
    """Norm of a hidden state."""
    joined: torch.Tensor
    """[hidden, 2 * hidden] product of both, embedding first."""

    @classmethod
    def read(cls, family: Family, model: Any, folder: Path, attention: str) -> Head:
        """Read the head of the checkpoint that `save` wrote.

        Args:
            family: Whose it is.
            model: As `oracle.read` has read it; the head gets its dtype.
            folder: Where it is.
            attention: What the head attends with, as `Oracle.attention`.
        """
        twin: Any = oracle.read(family, folder / TWIN, model.dtype, attention)
        weights = load_file(folder / WEIGHTS)
        of_embedding, of_hidden = (deepcopy(model.model.norm) for _ in range(2))
        of_embedding.weight.data = weights["mtp.pre_fc_norm_embedding.weight"].to(model.dtype)
        of_hidden.weight.data = weights["mtp.pre_fc_norm_hidden.weight"].to(model.dtype)
        return cls(model, twin, of_embedding, of_hidden, weights["mtp.fc.weight"].to(model.dtype))

    def inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What is joined, [1, positions - 1, 2 * hidden].

        Args:
            tokens: [1, positions].
            hidden: [1, positions, hidden] states of the model.
        """
        embedded = self.of_embedding(self.model.model.embed_tokens(tokens[:, 1:]))
        return torch.cat([embedded, self.of_hidden(hidden[:, :-1])], -1)

    def log_probs(self, tokens: list[int], place: int, count: int) -> torch.Tensor:
        """Log-probabilities [count, words] float64 of the drafts after `tokens[:place]`, each if those before it hold.

        Args:
            tokens: The text, `place + count - 1` tokens or more.
            place: Tokens that are known when it drafts, two or more.
            count: How many drafts.
        """
        # It attends as the model does at this moment.
        self.twin.set_attn_implementation(self.model.config._attn_implementation)
        ids = torch.tensor([tokens[: place + count - 1]])
        hidden = self.model.model(ids[:, :place], use_cache=False).last_hidden_state
        stream, found = self.inputs(ids[:, :place], hidden) @ self.joined.T, []
        for draft in range(count):
            made = self.twin.model.norm(self._attend(stream))[:, -1:]
            found.append(self.model.lm_head(made)[0, 0].double().log_softmax(-1))
            if draft + 1 < count:  # what it has made stands for the hidden state that the model has not computed yet
                pair = ids[:, place + draft - 1 : place + draft + 1]
                stream = torch.cat([stream, self.inputs(pair, made.expand(-1, 2, -1)) @ self.joined.T], 1)
        return torch.stack(found)

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        """The head's layer, over all positions."""
        count = stream.shape[1]
        places = torch.arange(count)[None]
        rotary = self.model.model.rotary_emb
        # Qwen3.5 turns by three places of a token, which in text are one.
        turned_by = places.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else places
        unseen = torch.full((count, count), torch.finfo(stream.dtype).min, dtype=stream.dtype).triu(1)
        made = self.twin.model.layers[-1](
            stream,
            position_embeddings=rotary(stream, turned_by),
            attention_mask=unseen[None, None],
            position_ids=places,
        )
        found: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return found


@torch.no_grad()
def save(model: Any, folder: Path, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Add a head to the checkpoint of a model.

    Its weights are drawn, but for the product of embedding and hidden state. That is fitted to the answers to LEARNT,
    of which the head then drafts half right: of a head that is drawn whole one draft in forty would be taken.

    Args:
        model: In float32.
        folder: Where it was saved, in `dtype`.
        dtype: Of the weights as stored.
        generator: Draws them.
    """

    def noisy(module: Any, deviation: float) -> Any:
        copy = deepcopy(module)
        for weight in copy.parameters():
            weight.add_(deviation * torch.randn(weight.shape, generator=generator))
        return copy

    twin, norm = deepcopy(model), model.model.norm
    twin.model.layers[-1] = noisy(model.model.layers[-1], NOISE)
    twin.model.norm = noisy(norm, NORM_NOISE)
    head = Head(model, twin, noisy(norm, NORM_NOISE), noisy(norm, NORM_NOISE), torch.empty(0))
    given, wanted = [], []
    for length, seed in LEARNT:
        tokens = _answered(model, prompt(length, seed, model.config.vocab_size))
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        given.append(head.inputs(tokens, hidden)[0, length - 1 :])
        wanted.append(hidden[0, length:] / (1 + twin.model.norm.weight))  # what the norm makes the next hidden state of
    fitted = torch.linalg.lstsq(torch.cat(given).double(), torch.cat(wanted).double(), driver="gelsd").solution.T
    twin.to(dtype).save_pretrained(folder / TWIN)
    last = f"model.layers.{len(twin.model.layers) - 1}."
    made = {
        f"mtp.layers.0.{name.removeprefix(last)}": weight
        for name, weight in load_file(folder / TWIN / WEIGHTS).items()
        if name.startswith(last)
    } | {
        "mtp.fc.weight": fitted.to(dtype).contiguous(),
        "mtp.norm.weight": twin.model.norm.weight.to(dtype),
        "mtp.pre_fc_norm_embedding.weight": head.of_embedding.weight.to(dtype),
        "mtp.pre_fc_norm_hidden.weight": head.of_hidden.weight.to(dtype),
    }
    save_file(load_file(folder / WEIGHTS) | made, folder / WEIGHTS, metadata={"format": "pt"})


def _answered(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """The tokens and the ANSWERS likeliest ones after them, [1, len(tokens) + ANSWERS]."""
    text = [*tokens]
    for _ in range(ANSWERS):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return torch.tensor([text])


class WrongDraftError(Exception):
    """The engine drafted other tokens than the head does; the message says where."""


def compare(
    reference: Oracle, heads: tuple[Head, Head], texts: dict[tuple[int, ...], list[int]], verified: list[Verified]
) -> dict[str, float]:
    """Hold which drafts were taken against what the head drafts in transformers.

    A draft that was taken was the text's token, one that was thrown away was not. As of answers, rounding may decide
    between two tokens that are nearer than it reaches at worst. Where a router may send a token to another expert that
    is far: so of the drafts that should be taken by more than rounding usually reaches, half must have been.

    Args:
        reference: Of the model.
        heads: In float64, and in the engine's dtype.
        texts: By prompt, each text with its answers.
        verified: What the engine has verified.

    Returns:
        How many tokens were `drafted` and `taken`, in how many steps a draft was taken and the next thrown away
        (`parted`), how many drafts were compared (`judged_drafts`), and how many had to be taken (`due`).

    Raises:
        WrongDraftError: A draft was taken that the head does not make, or thrown away that it does.
    """
    rows: list[tuple[int, int, bool, torch.Tensor]] = []
    rounding = []
    for one in verified:
        text, place = texts[one.prompt], len(one.prompt) + one.answered
        count = min(one.taken + 1, one.drafts, len(text) - place)
        if not one.answered or count < 1:
            continue  # a last chunk of a prompt that vLLM has filled up, or drafts after the last answer
        ways = []
        for way in ({}, *reference.rough):
            with reference.computing(**way) as model:
                ways.append(heads[model is reference.working].log_probs(text, place, count))
        rounding.append(max(Error.of(way, ways[0]).worst for way in ways[1:]))
        rows += [(place + n, text[place + n], n < one.taken, row) for n, row in enumerate(ways[0])]
    if not rows:
        raise WrongDraftError("no draft was verified")
    worst, usual = (2 * oracle.SLACK * reach for reach in (max(rounding), statistics.median(rounding)))
    due = []
    for place, token, taken, row in rows:
        (first, second), best = row.topk(2).values.tolist(), int(row.argmax())
        wrong = first - float(row[token]) if taken else (first - second) * (best == token)
        if wrong > worst:
            raise WrongDraftError(
                f"the draft of token {place} was {'taken' if taken else 'thrown away'}, although transformers' own "
                f"differs by {wrong:.2g} nats; rounding explains {worst:.2g}"
            )
        if best == token and first - second > usual:
            due.append(taken)
    if 2 * sum(due) < max(1, len(due)):
        raise WrongDraftError(f"of {len(due)} drafts that transformers has right {sum(due)} were taken")
    return {
        "drafted": sum(one.drafts for one in verified),
        "taken": sum(one.taken for one in verified),
        "parted": sum(0 < one.taken < one.drafts for one in verified),
        "judged_drafts": len(rows),
        "due": len(due),
    }
