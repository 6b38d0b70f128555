# SPDX-License-Identifier: Apache-2.0
"""Schedules of requests: drawn at random, driven against the same requests alone, shrunk where they fail. Pure.

A seed means the same schedule everywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


START = 1
FIRST_WORD = 3
"""Token ids below are special: padding, beginning, end."""


@dataclass(frozen=True)
class FamilyAnswer:
    """What one request got."""

    tokens: tuple[int, ...]
    rows: torch.Tensor | None
    """Log-probabilities [positions, tokens] float64, of the last positions; None where not asked for."""
    gaps: tuple[float, ...]
    """How much each token was better than the second best, in nats; empty where not asked for."""
    cached: int
    """Prompt tokens that a prefix cache had."""
    ids: torch.Tensor | None = None
    """The tokens that `rows` are of, [positions, tokens] int64, the likeliest first; None where they are all."""


@dataclass(frozen=True)
class ScheduledRequest:
    """One request as a client sends it."""

    prompt: tuple[int, ...]
    answers: int
    """Tokens it asks for; the end token does not stop it."""
    arrives: int = 0
    """Engine step before which it comes."""
    leaves: int | None = None
    """Answers after which the client hangs up; None when it stays."""
    speech: int | None = None
    """Seed of what an encoder-decoder hears; None for models that only read."""

    @property
    def expected(self) -> int:
        """Answers that must come: the client may hang up before the last."""
        return self.answers if self.leaves is None else min(self.answers, self.leaves)


Schedule = tuple[ScheduledRequest, ...]


def prompt(length: int, seed: int, vocabulary: int) -> tuple[int, ...]:
    """Token ids that are neither constant nor periodic. Of two prompts of one seed the shorter begins the longer."""
    rng = Random(seed)
    return tuple(rng.randrange(FIRST_WORD, vocabulary) for _ in range(length))


def spoken(request: ScheduledRequest) -> ScheduledRequest:
    """The same as a question to an encoder-decoder, whose text begins with its start token."""
    return replace(request, prompt=(START, *request.prompt[1:]))


@dataclass(frozen=True)
class ScheduleLimits:
    """What a drawn schedule may hold."""

    lengths: tuple[int, ...]
    """Prompt lengths, in tokens."""
    vocabulary: int
    requests: int = 6
    answers: int = 9
    steps: int = 10
    """Latest arrival, in engine steps."""
    seeds: int = 2
    """How many texts there are; prompts of one text share a prefix."""
    speech: bool = False


def awkward_lengths(block: int, chunk: int, longest: int) -> tuple[int, ...]:
    """Lengths around the edges of blocks and chunks, where index arithmetic breaks.

    Args:
        block: Tokens of a KV block, as inflated by vLLM.
        chunk: Most tokens of one engine step.
        longest: Admissible prompt length.
    """
    edges = {1, 2, block - 1, block, block + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 2 * block + 1}
    return tuple(sorted(length for length in edges if 1 <= length <= longest))


def draw(limits: ScheduleLimits, rng: Random) -> Schedule:
    """A schedule of two requests or more."""
    return tuple(_draw_request(limits, rng) for _ in range(rng.randint(2, limits.requests)))


def _draw_request(limits: ScheduleLimits, rng: Random) -> ScheduledRequest:
    text = rng.randint(1, limits.seeds)
    request = ScheduledRequest(
        prompt=prompt(rng.choice(limits.lengths), text, limits.vocabulary),
        answers=rng.randint(1, limits.answers),
        arrives=rng.randint(0, limits.steps),
        leaves=rng.randint(1, 3) if rng.random() < 0.2 else None,
        speech=rng.randint(1, limits.seeds) if limits.speech else None,
    )
    return spoken(request) if limits.speech else request


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are simpler by one step, the greatest step first: what a failure is shrunk to."""
    for index in range(len(schedule)):
        if len(schedule) > 1:
            yield schedule[:index] + schedule[index + 1 :]
    for index, request in enumerate(schedule):
        before, after = schedule[:index], schedule[index + 1 :]
        if request.leaves is not None:
            yield (*before, replace(request, leaves=None), *after)
        if request.arrives:
            yield (*before, replace(request, arrives=0), *after)
        if request.answers > 1:
            yield (*before, replace(request, answers=request.answers // 2), *after)
        if len(request.prompt) > 1:
            yield (*before, replace(request, prompt=request.prompt[: len(request.prompt) // 2]), *after)
            yield (*before, replace(request, prompt=request.prompt[:-1]), *after)


def in_words(schedule: Schedule) -> str:
    """A schedule in one line: `47 tokens for 5 at step 2, ...`."""
    return ", ".join(
        f"{len(request.prompt)} tokens for {request.answers} at step {request.arrives}"
        + (f" leaving after {request.leaves}" if request.leaves else "")
        for request in schedule
    )


SHRINK_SECONDS = 30.0
"""Time of shrinking; after it the smallest failing schedule so far is small enough to read."""


class CompanyError(Exception):
    """An answer depends on the other requests; the message has the smallest schedule that shows it."""


def search(
    limits: ScheduleLimits,
    *,
    seed: int,
    examples: int,
    ask: Callable[[Schedule], list[FamilyAnswer]],
    alone: Callable[[ScheduledRequest], FamilyAnswer],
    tie: float,
) -> int:
    """Draw schedules and look for one whose answers depend on company.

    Args:
        limits: What schedules may hold.
        seed: The same seed draws the same schedules.
        examples: How many to draw.
        ask: Drives a schedule.
        alone: The answer to a request that has the engine to itself.
        tie: Nats within which rounding decides between two tokens.

    Returns:
        How many requests were driven, of schedules that are all right.

    Raises:
        CompanyError: The answers of one depend on company.
    """

    def fails(schedule: Schedule) -> str:
        return difference(schedule, ask(schedule), [alone(request) for request in schedule], tie)

    rng = Random(seed)
    requests = 0
    for number in range(examples):
        schedule = draw(limits, rng)
        requests += len(schedule)
        if why := fails(schedule):
            smallest, why = shrink(schedule, why, fails)
            raise CompanyError(f"{why}; schedule {number} of seed {seed}, shrunk to: {in_words(smallest)}")
    return requests


def shrink(
    schedule: Schedule, why: str, fails: Callable[[Schedule], str], seconds: float = SHRINK_SECONDS
) -> tuple[Schedule, str]:
    """Simplify a failing schedule while it fails, and while there is time.

    Args:
        schedule: It fails.
        why: How.
        fails: How a schedule fails; empty when it does not.
        seconds: When to be content.

    Returns:
        The simplest failing schedule found, and how it fails.
    """
    deadline = time.monotonic() + seconds
    while True:
        for candidate in smaller(schedule):
            if time.monotonic() > deadline:
                return schedule, why
            if found := fails(candidate):
                schedule, why = candidate, found
                break
        else:  # nothing simpler fails
            return schedule, why


def difference(schedule: Schedule, answers: list[FamilyAnswer], alone: list[FamilyAnswer], tie: float) -> str:
    """The first token in which a request's answer depends on its company; empty when none does.

    Args:
        schedule: What was asked.
        answers: What came back.
        alone: What each request gets that has the engine to itself, at least as many tokens.
        tie: Nats within which rounding decides between two tokens. After such a token the texts differ by right, so
            nothing after it is compared.
    """
    for index, (request, got, want) in enumerate(zip(schedule, answers, alone, strict=True)):
        if len(got.tokens) < request.expected:
            return f"request {index} got {len(got.tokens)} of {request.expected} tokens"
        for place, (ours, theirs, gap) in enumerate(zip(got.tokens, want.tokens, want.gaps, strict=False)):
            if ours != theirs and gap > tie:
                return (
                    f"request {index} ({len(request.prompt)} prompt tokens) answers {ours} instead of {theirs} at "
                    f"token {place}; alone that token leads by {gap:.2g} nats"
                )
            if ours != theirs:
                break
    return ""
