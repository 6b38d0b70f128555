# SPDX-License-Identifier: Apache-2.0
"""Judge an engine's answers by a reference: every distribution within what rounding explains, every token. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from families.schedule import FamilyAnswer, Schedule


@dataclass(frozen=True)
class Error:
    """How far log-probabilities [rows, VOCABULARY] are from others."""

    worst: float
    """Largest error of all entries."""
    typical: float
    """Median over rows of the worst entry of a row."""

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> Error:
        """Compare; NaN counts as infinitely far.

        Raises:
            ValueError: Another number of rows or of tokens.
        """
        if got.shape != want.shape:
            raise ValueError(f"log-probabilities of shape {list(got.shape)}, expected {list(want.shape)}")
        rows = (got.double() - want.double()).abs().nan_to_num(nan=math.inf).amax(-1)
        return cls(worst=rows.max().item(), typical=rows.median().item())

    @classmethod
    def largest(cls, errors: Iterable[Error]) -> Error:
        """The larger of each figure."""
        errors = list(errors)
        return cls(worst=max(e.worst for e in errors), typical=max(e.typical for e in errors))

    def times(self, factor: float) -> Error:
        """Both figures multiplied."""
        return Error(worst=self.worst * factor, typical=self.typical * factor)

    def within(self, tolerance: Error) -> bool:
        """Whether neither figure is larger than that of the tolerance."""
        return self.worst <= tolerance.worst and self.typical <= tolerance.typical


@dataclass(frozen=True)
class Tolerance:
    """Errors of the log-probabilities of one sequence, in nats, that rounding explains."""

    rows: torch.Tensor
    """Bound of each row [tokens]: larger where a router may have sent this token, or one before it, to another expert,
    and where rounding moves the row farther than most."""
    typical: float
    """Bound of half of the rows."""
    widest: float
    """Bound of most rows of any sequence, whatever the routers choose."""

    @property
    def worst(self) -> float:
        """Tolerance of the row that may be off farthest."""
        return self.rows.max().item()


ENOUGH_ROWS = 8
"""Positions from which on their median says something."""

AMONG = 5
"""Where only the best tokens are compared and two greedy texts part, each one's token must be among so many of the
other's: the rule of vLLM's own model tests (`check_logprobs_close`)."""


class Reference(Protocol):
    """What the judge asks of `families.oracle`."""

    def log_probs(self, tokens: list[int], *, audio: int | None = None) -> torch.Tensor:
        """Log-probabilities [len(tokens), vocabulary] float64; row i follows i + 1 tokens."""

    def tolerance(
        self, tokens: list[int], *, audio: int | None = None, errors: torch.Tensor | None = None
    ) -> Tolerance:
        """Errors of log-probabilities of these tokens that rounding explains; `errors` are those of the last rows."""


class WrongAnswerError(Exception):
    """An answer is not what it should be; the message says which, where, and by how much."""

    def __init__(self, message: str, tokens: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tokens = tuple(tokens)
        """The sequence it was wrong about; empty where there is none to look into."""


@dataclass(frozen=True)
class Closeness:
    """How near a right answer was."""

    max_abs_err: float
    """Largest error of a log-probability, in nats."""
    tolerance: float
    """The admissible error, of the row where it is least."""
    positions: int
    """Distributions compared."""
    undecided: int
    """Tokens for which two were closer than rounding reaches."""

    @property
    def numbers(self) -> dict[str, float]:
        """What a cell of the table records of it."""
        return {"max_abs_err": self.max_abs_err, "tolerance": self.tolerance, "positions": self.positions}


def compare(schedule: Schedule, answers: list[FamilyAnswer], oracle: Reference, *, slack: float = 0.0) -> Closeness:
    """Compare every distribution that came back, or what came back of it, and every token.

    Args:
        schedule: What was asked.
        answers: What came back, with distributions.
        oracle: What is right.
        slack: Nats on top of the oracle's tolerance, for rounding that its computation has not.

    Raises:
        WrongAnswerError: A distribution is not finite or farther off than the tolerance, tokens are missing, or a token
            is not the best one although rounding cannot have decided it, or is none of the AMONG best where the
            greedy texts part.
    """
    worst, least, positions, undecided = 0.0, math.inf, 0, 0
    shares: list[torch.Tensor] = []
    """Errors of each request, as shares of what is usual for it."""
    for index, (request, answer) in enumerate(zip(schedule, answers, strict=True)):
        name = f"request {index} ({len(request.prompt)} prompt tokens)"
        if len(answer.tokens) < request.expected:
            raise WrongAnswerError(f"{name} got {len(answer.tokens)} of {request.expected} tokens")
        if answer.rows is None:
            raise WrongAnswerError(f"{name} came back without distributions")
        tokens = [*request.prompt, *answer.tokens[:-1]]
        want = oracle.log_probs(tokens, audio=request.speech)[-len(answer.rows) :]
        first = len(request.prompt) + len(answer.tokens) - 1 - len(want)
        if not torch.isfinite(answer.rows).all():
            where = int((~torch.isfinite(answer.rows)).any(-1).nonzero()[0])
            raise WrongAnswerError(f"{name}: log-probabilities are not finite from position {first + where} on", tokens)
        compared = want if answer.ids is None else want.gather(-1, answer.ids.to(want.device))
        error = (answer.rows - compared.cpu()).abs().amax(-1)
        explained = oracle.tolerance(tokens, audio=request.speech, errors=error - slack)
        limit, usual = explained.rows[-len(answer.rows) :].cpu() + slack, explained.typical + slack
        if (error > limit).any():
            where = int((error > limit).nonzero()[0])
            raise WrongAnswerError(
                f"{name}: log-probabilities are off by {error[where]:.2g} at position {first + where} "
                f"(at worst by {error.max():.2g}, at half of {len(error)} by {error.median():.2g}); "
                f"rounding explains {limit[where]:.2g}, and {usual:.2g} at half",
                tokens,
            )
        if len(error) >= ENOUGH_ROWS and error.median() > usual:
            raise WrongAnswerError(
                f"{name}: log-probabilities are off by {error.median():.2g} at half of {len(error)} positions; "
                f"rounding explains {usual:.2g}",
                tokens,
            )
        shares.append(error / usual)
        best = want[-len(answer.tokens) :].topk(AMONG)
        leads, favourites = (best.values[:, 0] - best.values[:, 1]).cpu(), best.indices.cpu()
        decided = leads > 2 * limit[-len(answer.tokens) :]
        differ = torch.tensor(answer.tokens) != favourites[:, 0]
        if (decided & differ).any():
            raise WrongAnswerError(
                f"{name}: answer token {int((decided & differ).nonzero()[0])} is not the most probable one", tokens
            )
        if answer.ids is not None and differ.any():
            _require_among_best(name, int(differ.nonzero()[0]), answer, answer.ids, favourites, tokens)
        worst, least, positions = max(worst, error.max().item()), min(least, limit.min().item()), positions + len(want)
        undecided += int((~decided).sum())
    together = torch.cat(shares)
    if len(together) >= ENOUGH_ROWS and together.median() > 1:
        raise WrongAnswerError(
            f"{len(schedule)} requests: log-probabilities are off by {together.median():.2g} times what rounding "
            f"explains at half of {len(together)} positions",
            tokens,
        )
    return Closeness(worst, least, positions, undecided)


def _require_among_best(
    name: str, place: int, answer: FamilyAnswer, ids: torch.Tensor, favourites: torch.Tensor, tokens: Sequence[int]
) -> None:
    """Demand that two texts part at `place` for one of the other side's best; `favourites` [answers, AMONG]."""
    token, theirs = answer.tokens[place], favourites[place].tolist()
    ours = ids[place - len(answer.tokens)][:AMONG].tolist()
    if token not in theirs or theirs[0] not in ours:
        raise WrongAnswerError(
            f"{name}: the texts part at answer token {place}: {token} instead of {theirs[0]}, and one of the two is "
            f"not among the {AMONG} best of the other side",
            tokens,
        )
