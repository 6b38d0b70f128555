"""What transformers computes with a family's checkpoint: eager, the whole sequence at once, no cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from models import tiny_whisper
from models.tiny_hybrid import prompt
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from models.families.family import Family

PROBES = (160, 131, 47, 20)
"""Lengths of the sequences on which rounding is measured beside the sequence in question."""

SLACK = 2.0
"""transformers and vLLM compute the same sums in another order: neither is nearer to the truth by right, and each may
be off in its own direction."""


@dataclass(frozen=True)
class Error:
    """How far log-probabilities [rows, VOCABULARY] are from others."""

    worst: float
    """Of all entries."""
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


@dataclass(eq=False)
class Oracle:
    """One checkpoint, loaded twice."""

    exact: torch.nn.Module
    """The weights of the checkpoint, computed in float64."""
    working: torch.nn.Module
    """The same in the engine's dtype: how far rounding alone moves the answer."""
    hear: Any = None
    """Of a speech model, what makes features of sound."""
    _probed: Error | None = field(default=None, repr=False)

    @classmethod
    def load(cls, family: Family, folder: Path, dtype: torch.dtype) -> Oracle:
        """Load the checkpoint that `checkpoints.save` wrote for this family with this dtype."""
        if family.attention == "cross":
            return cls(*tiny_whisper.load(folder, (torch.float64, dtype)))
        # `eager` experts: transformers' grouped product knows no float64.
        load = AutoModelForCausalLM.from_pretrained
        kind = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return cls(*(load(folder, dtype=d, **kind).eval() for d in (torch.float64, dtype)))

    @property
    def wide(self) -> bool:
        """Whether `exact` computes in float64."""
        return self.exact.dtype is torch.float64

    def ids(self, tokens: list[int]) -> torch.Tensor:
        """Tokens as the models take them, [1, len(tokens)]."""
        return torch.tensor([tokens], device=self.exact.device)

    def log_probs(self, tokens: list[int], *, audio: int | None = None, exact: bool = True) -> torch.Tensor:
        """Next-token log-probabilities, [len(tokens), VOCABULARY] float64; row i follows tokens[: i + 1].

        Args:
            tokens: The sequence; of a speech model what its decoder has said.
            audio: Seed of what a speech model hears (`tiny_whisper.audio`).
            exact: In float64, else in the engine's dtype.
        """
        model = self.exact if exact else self.working
        ids = self.ids(tokens)
        arguments = {"input_ids": ids}
        if self.hear is not None:
            sound = self.hear(tiny_whisper.audio(audio), sampling_rate=tiny_whisper.SAMPLING_RATE, return_tensors="pt")
            arguments = {"input_features": sound.input_features.to(model.dtype), "decoder_input_ids": ids}
        with torch.inference_mode(), InFloat64(enabled=exact and self.wide):
            return model(**arguments, use_cache=False).logits[0].double().log_softmax(-1)

    def rounding(self, tokens: list[int], *, audio: int | None = None) -> Error:
        """By how much rounding to the engine's dtype moves transformers' own log-probabilities."""
        exact, working = (self.log_probs(tokens, audio=audio, exact=e) for e in (True, False))
        return Error.of(working, exact)

    def tolerance(self, tokens: list[int], *, audio: int | None = None) -> Error:
        """Admissible error of the log-probabilities of this sequence.

        SLACK times what rounding does to transformers itself, on this sequence and on PROBES: the largest of a few
        hundred roundings is a figure of the model, that of three tokens is chance.

        In float32 the worst error alone resolves a lost block a thousandfold. In 16 bits a token that stands between
        two experts may be sent to the other, with which one row is off by 2; the typical error still resolves a lost
        block, which moves every row behind it.
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
        name = "eager_without_keys"
        AttentionInterface.register(name, _blind(hidden))
        AttentionMaskInterface.register(name, eager_mask)  # without it the mask is None
        self.exact.set_attn_implementation(name)
        try:
            return self.log_probs(tokens)
        finally:
            self.exact.set_attn_implementation("eager")

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
        with torch.inference_mode(), InFloat64(enabled=self.wide):
            out = self.exact(self.ids(tokens[:at]), use_cache=True)
            name = "past_key_values" if "past_key_values" in out else "cache_params"  # the latter without attention
            cache = out[name]
            for i, token in enumerate(tokens[at:], start=at):
                touch(cache)
                where = {"position_ids": self.ids([i])} if name == "past_key_values" else {}
                rows.append(self.exact(self.ids([token]), use_cache=True, **{name: cache}, **where).logits[0, 0])
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


def _blind(hidden: range):
    """Eager attention that hides some keys from the queries after them."""

    def attend(_module, query, key, value, mask, scaling, **_kwargs):
        mask = mask.clone()
        mask[..., hidden.stop :, hidden.start : hidden.stop] = torch.finfo(mask.dtype).min
        key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], 1) for rows in (key, value))
        weights = (query @ key.mT * scaling + mask).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend
