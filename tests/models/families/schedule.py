"""Requests and when they come: what the scheduler is driven with. Pure; a seed means the same schedule everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

FIRST_WORD = 3
"""Token ids below are special: padding, beginning, end."""


@dataclass(frozen=True)
class Request:
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

    def alone(self) -> Request:
        """The same question by somebody who has the engine to himself and stays."""
        return replace(self, arrives=0, leaves=None)


Schedule = tuple[Request, ...]


def prompt(length: int, seed: int, vocabulary: int) -> tuple[int, ...]:
    """Token ids that are neither constant nor periodic. Of two prompts of one seed the shorter begins the longer."""
    rng = Random(seed)  # noqa: S311 - no secret
    return tuple(rng.randrange(FIRST_WORD, vocabulary) for _ in range(length))


@dataclass(frozen=True)
class Limits:
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


def schedules(limits: Limits) -> SearchStrategy[Schedule]:
    """Schedules of two requests or more, simplest first, as Hypothesis draws and shrinks them."""
    request = st.builds(
        Request,
        prompt=st.builds(
            prompt,
            length=st.sampled_from(limits.lengths),
            seed=st.integers(1, limits.seeds),
            vocabulary=st.just(limits.vocabulary),
        ),
        answers=st.integers(1, limits.answers),
        arrives=st.integers(0, limits.steps),
        leaves=st.none() | st.integers(1, 3),
        speech=st.integers(1, limits.seeds) if limits.speech else st.none(),
    )
    return st.lists(request, min_size=2, max_size=limits.requests).map(tuple)


def told(schedule: Schedule) -> str:
    """A schedule in one line: `47 tokens for 5 at step 2, ...`."""
    return ", ".join(
        f"{len(request.prompt)} tokens for {request.answers} at step {request.arrives}"
        + (f" leaving after {request.leaves}" if request.leaves else "")
        for request in schedule
    )
