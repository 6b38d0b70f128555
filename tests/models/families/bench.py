"""What a behaviour works with: one engine of one family, the oracle, and ways to ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from models.attending import E4M3
from models.families import judge
from models.families.schedule import Limits, Request, Schedule, prompt, spoken

if TYPE_CHECKING:
    from models.families.answers import Answer
    from models.families.family import Family
    from models.families.running import Engine

    from pagedkv.vllm_plugin.inspect import ServedLayer

Numbers = dict[str, float]


class NotDrivenError(Exception):
    """The engine answered, but did not do what the behaviour is about."""


class NotHereError(Exception):
    """This platform cannot do it; the message says why."""


@dataclass
class Bench:
    """One engine of one family, the oracle, and what has been asked of the engine before."""

    engine: Engine
    oracle: judge.Oracle
    family: Family
    seed: int
    examples: int
    _alone: dict[Request, Answer] = field(default_factory=dict)

    def request(self, length: int, answers: int, *, seed: int = 1, arrives: int = 0) -> Request:
        """A request of the text `seed`."""
        if self.family.attention == "cross":
            return spoken(Request(prompt(length, seed, self.vocabulary), answers, arrives, speech=seed))
        return Request(prompt(length, seed, self.vocabulary), answers, arrives)

    def right(self, schedule: Schedule, *, prompt_rows: bool = False, preempt_at: int | None = None) -> Numbers:
        """Ask, and compare with the oracle."""
        listens = self.family.attention == "cross"  # an encoder-decoder gives no distributions of its prompt
        answers = self.engine.ask(schedule, prompt_rows=prompt_rows and not listens, preempt_at=preempt_at)
        near = judge.compare(schedule, answers, self.oracle)
        return {"max_abs_err": near.max_abs_err, "tolerance": near.tolerance, "positions": near.positions}

    def alone(self, request: Request) -> Answer:
        """What a request gets without company, with as many answers as any schedule asks for."""
        key = Request(request.prompt, Limits.answers, speech=request.speech)
        if key not in self._alone:
            self._alone[key] = self.engine.ask((key,), rows=False)[0]
        return self._alone[key]

    def blocks(self, length: int) -> int:
        """Blocks of all kinds that a prompt holds; counting starts anew."""
        self.engine.probe.restart()
        self.engine.ask((self.request(length, 1),), rows=False)
        held = self.engine.probe.seen.blocks
        self.engine.probe.restart()
        return held

    @property
    def vocabulary(self) -> int:
        """Number of words, whether or not they are in a tokenizer."""
        return self.engine.config.model_config.get_vocab_size()

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answers together."""
        return self.engine.config.model_config.max_model_len

    @property
    def chunk(self) -> int:
        """Most tokens of one engine step."""
        return self.engine.config.scheduler_config.max_num_batched_tokens


def require_codes(family: Family, layers: list[ServedLayer]) -> None:
    """The workers must say that the cache holds what the family asks for: FP8 codes of this device's format, or none.

    Raises:
        NotDrivenError: A layer's cache holds something else.
    """
    for layer in layers:
        kind, form = layer["kv_dtype"], layer["fp8_format"]
        asked = E4M3 if family.fp8_cache else None
        right = form == asked and (getattr(torch, kind).itemsize == 1) == family.fp8_cache
        require(right, f"the cache of {layer['layer']} holds {kind} as {form}; asked for was {asked or 'none of FP8'}")


def require(driven: bool, what: str) -> None:
    if not driven:
        raise NotDrivenError(what)
