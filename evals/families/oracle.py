"""Compute in float64 what a model computes in float32.

What transformers computes with a family's checkpoint: eager, the whole sequence at once, no cache.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from families import plain_attention, speech
from families.judge import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from families.family import Family


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32: norms, softmax, scans and routers of transformers do.

    Without it the float64 model would be right to float32 alone, no better than what it judges.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Pass every torch function on, with float64 in place of float32."""
        kwargs = kwargs or {}
        if not self.enabled:
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*args, **kwargs)


VOCABULARY = 128
"""Words of every tiny model."""

PROBES = (160, 131, 47, 20)
"""Lengths of the sequences on which rounding is measured beside the sequence in question."""

SLACK = 2.0
"""transformers and vLLM compute the same sums in another order: neither is nearer to the truth by right, and each may
be off in its own direction."""


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that are neither constant nor periodic; no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@dataclass(eq=False)
class Oracle:
    """One checkpoint, loaded twice."""

    exact: torch.nn.Module
    """The weights of the checkpoint, computed in float64."""
    working: torch.nn.Module
    """The same in the engine's dtype: how far rounding alone moves the answer."""
    hear: Any = None
    """Of a speech model, what makes features of sound."""
    attention: str = "eager"
    """What both attend with; `plain_attention.PLAIN` rounds keys and values as the cache does."""
    _probed: Error | None = field(default=None, repr=False)
    _last: tuple[Any, torch.Tensor] | None = field(default=None, repr=False)

    @classmethod
    def load(cls, family: Family, folder: Path, dtype: torch.dtype) -> Oracle:
        """Load the checkpoint that `checkpoints.save` wrote for this family with this dtype."""
        if family.attention == "cross":
            return cls(*speech.load(folder, (torch.float64, dtype)))
        attention = plain_attention.PLAIN if family.fp8_cache else "eager"
        # transformers' own config class by name: vLLM puts others in its place, which its models understand alone.
        # `eager` experts: transformers' grouped product knows no float64.
        load, config = AutoModelForCausalLM.from_pretrained, type(family.make_config())
        kind = {"attn_implementation": attention, "experts_implementation": "eager"}
        models = (
            load(folder, config=config.from_pretrained(folder), dtype=d, **kind).eval() for d in (torch.float64, dtype)
        )
        return cls(*models, attention=attention)

    @property
    def wide(self) -> bool:
        """Whether `exact` computes in float64."""
        return self.exact.dtype is torch.float64

    def ids(self, tokens: list[int]) -> torch.Tensor:
        """Tokens as the models take them, [1, len(tokens)]."""
        return torch.tensor([tokens], device=self.exact.device)

    @cached_property
    def rough(self) -> list[dict[str, Any]]:
        """Ways to compute, for `computing`, that are right but for rounding.

        The engine's dtype; and with an FP8 cache two ways to round to the other code, wherever that dtype leaves the
        choice open. How far that is has been measured: SLACK times what it does to keys and values.
        """
        if self.attention != plain_attention.PLAIN:
            return [{"exact": False}]
        reach = SLACK * self._noise()
        return [{"exact": False}, *({"attention": plain_attention.nudged(by)} for by in (reach, -reach))]

    def _noise(self) -> float:
        """Largest error of a key or value of the first layer, before which no router stands, as a share of its row."""
        seen: list[torch.Tensor] = []
        attention, tokens = plain_attention.noted(seen), self.probe(max(PROBES))
        for exact in (True, False):
            self.log_probs(tokens, exact=exact, attention=attention)
        sides = zip(seen[:2], seen[len(seen) // 2 :], strict=False)
        return max(((b - a).abs() / a.abs().amax(-1, keepdim=True)).max().item() for a, b in sides)

    @contextmanager
    def computing(self, *, exact: bool = True, attention: str | None = None) -> Iterator[torch.nn.Module]:
        """The model to call.

        Args:
            exact: In float64, else in the engine's dtype.
            attention: What it shall attend with, where not as always.
        """
        model = self.exact if exact else self.working
        if attention is not None:
            model.set_attn_implementation(attention)
        try:
            with torch.inference_mode(), InFloat64(enabled=exact and self.wide):
                yield model
        finally:
            if attention is not None:
                model.set_attn_implementation(self.attention)

    def log_probs(self, tokens: list[int], *, audio: int | None = None, **way: Any) -> torch.Tensor:
        """Next-token log-probabilities, [len(tokens), VOCABULARY] float64; row i follows tokens[: i + 1].

        Args:
            tokens: The sequence; of a speech model what its decoder has said.
            audio: Seed of what a speech model hears (`tiny_whisper.audio`).
            **way: Of `computing`; without one in float64, which is kept, for who asks for it asks for `tolerance` next.
        """
        asked = (tuple(tokens), audio)
        if not way and self._last is not None and self._last[0] == asked:
            return self._last[1]
        ids = self.ids(tokens)
        arguments = {"input_ids": ids}
        with self.computing(**way) as model:
            if self.hear is not None:
                heard, rate = speech.audio(audio), speech.SAMPLING_RATE
                sound = self.hear(heard, sampling_rate=rate, return_tensors="pt")
                arguments = {"input_features": sound.input_features.to(model.dtype), "decoder_input_ids": ids}
            found = model(**arguments, use_cache=False).logits[0].double().log_softmax(-1)
        if not way:
            self._last = (asked, found)
        return found

    def rounding(self, tokens: list[int], *, audio: int | None = None) -> Error:
        """By how much rounding moves transformers' own log-probabilities: the larger figure of all ways of `rough`.

        That is rounding to the engine's dtype; and with an FP8 cache to another code, wherever another order of
        summation would do it.
        """
        exact = self.log_probs(tokens, audio=audio)
        return Error.largest(Error.of(self.log_probs(tokens, audio=audio, **way), exact) for way in self.rough)

    def tolerance(self, tokens: list[int], *, audio: int | None = None) -> Error:
        """Admissible error of the log-probabilities of this sequence.

        SLACK times what rounding does to transformers itself, on this sequence and on PROBES: the largest of a few
        hundred roundings is a figure of the model, that of three tokens is chance.

        In float32 the worst error alone resolves a lost block a thousandfold. In 16 bits a token that stands between
        two experts may be sent to the other, with which one row is off by 2; the typical error still resolves a lost
        block, which moves every row behind it.

        With an FP8 cache in float32 a lost block moves half of the rows 101 times as far as the typical error, each at
        least 25 times as far as the worst; a cache that is not quantised moves half of them 7.6 times as far as the
        typical error. A format of codes that differs in its smallest values alone is not seen (`bench.require_codes`).
        """
        if self._probed is None:
            self._probed = Error.largest(self.rounding(self.probe(n), audio=n) for n in PROBES)
        return Error.largest([self._probed, self.rounding(tokens, audio=audio)]).times(SLACK)

    def probe(self, length: int) -> list[int]:
        """A sequence on which rounding is measured; one of PROBES gives its length."""
        longest = self.exact.config.max_target_positions if self.hear is not None else max(PROBES)
        return prompt(min(length, longest), seed=length)

    def without_keys(self, tokens: list[int], hidden: range) -> torch.Tensor:
        """What `log_probs` would be if no later token saw the keys at the positions `hidden`: a lost block.

        Raises:
            ValueError: A speech model, whose encoder this would blind too.
        """
        if self.hear is not None:
            raise ValueError("without_keys is for decoders alone")
        kept = plain_attention.rounded if self.attention == plain_attention.PLAIN else torch.Tensor.clone
        return self.log_probs(tokens, attention=plain_attention.without_keys(hidden, kept))

    def resumed(self, tokens: list[int], at: int, *, lose_state: bool) -> torch.Tensor:
        """Log-probabilities of the rows from `at` on, decoded token by token from the cache of the tokens before.

        Args:
            tokens: The sequence.
            at: Where to resume.
            lose_state: Zero the states of all layers there, as if their page had been lost; keys and values stay.

        Returns:
            [len(tokens) - at, VOCABULARY] float64.
        """
        lost = [_zero_states] if lose_state else []
        return self._stepwise(tokens, at, lambda cache: lost.pop()(cache) if lost else None)

    def _stepwise(self, tokens: list[int], at: int, touch: Callable[[Any], None]) -> torch.Tensor:
        """Decode the tokens from `at` on, one by one; before each, `touch` may change the cache."""
        rows = []
        with self.computing() as model:
            out = model(self.ids(tokens[:at]), use_cache=True)
            name = "past_key_values" if "past_key_values" in out else "cache_params"  # the latter without attention
            cache = out[name]
            for i, token in enumerate(tokens[at:], start=at):
                touch(cache)
                where = {"position_ids": self.ids([i])} if name == "past_key_values" else {}
                rows.append(model(self.ids([token]), use_cache=True, **{name: cache}, **where).logits[0, 0])
        return torch.stack(rows).double().log_softmax(-1)

    def state_rounding(self, tokens: list[int], at: int, dtype: str) -> float:
        """By how much a log-probability moves, times SLACK, where states are kept in another dtype.

        Args:
            tokens: The sequence.
            at: Tokens of the prompt: states are rounded after it, and after each token that follows.
            dtype: "bfloat16", say, of the recurrent states.
        """
        rows = self._stepwise(tokens, at, partial(_round_states, dtype=getattr(torch, dtype)))
        return SLACK * (rows - self.log_probs(tokens)[at:]).abs().max().item()


def _zero_states(cache: Any) -> None:
    """Zero what the layers of transformers' cache hold beside keys and values."""
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            for state in states.values():
                if state is not None:  # a convolution or an MLP has no recurrent state
                    state.zero_()


def _round_states(cache: Any, dtype: torch.dtype) -> None:
    """Round what the layers of transformers' cache hold as recurrent states."""
    for layer in cache.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                state.copy_(state.to(dtype))
