# SPDX-License-Identifier: Apache-2.0
"""What transformers computes with a checkpoint, as reference: eager, the whole sequence at once, no cache."""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from families import plain_attention, schedule, speech
from families.choices import Choices, moved_leads, open_choices
from families.judge import Error, Tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from families.choices import Choice, OpenChoice
    from families.family import Family


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32: norms, softmax, scans and routers of transformers do.

    Without it the float64 model would be right to float32 alone, no better than what it judges.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass every torch function on, with float64 in place of float32."""
        kwargs = kwargs or {}
        if not self.enabled:
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*args, **kwargs)


KERNEL_PACKAGES = ("mamba_ssm", "causal_conv1d", "fla")
"""transformers takes its scans from them where they are installed, as they are in our images: what would check vLLM's
scans would then be their ancestors. It decides when it imports a model's module."""

DRAWS = 4
"""Computations in the engine's dtype, each rounded otherwise: what one of them is off by is chance."""


VOCABULARY = 128
"""Words of every tiny model."""

PROBES = (160, 131, 47, 20)
"""Lengths of the sequences on which rounding is measured beside the sequence in question."""

SLACK = 2.0
"""transformers and vLLM compute the same sums in another order: neither is nearer to the truth by right, and each may
be off in its own direction."""


@dataclass(frozen=True)
class Rounding:
    """How far rounding alone moves the log-probabilities of a model."""

    error: Error
    """Where routers choose by what has been rounded."""
    same_experts: float
    """The worst error where routers choose as the exact model does."""
    reach: tuple[float, ...]
    """How much it moves the lead of the last expert that a router chooses, for each router; () if not measured."""

    @classmethod
    def largest(cls, several: Iterable[Rounding]) -> Rounding:
        """The larger of each figure."""
        several = list(several)
        return cls(
            Error.largest(each.error for each in several),
            max(each.same_experts for each in several),
            tuple(map(max, zip(*(each.reach for each in several), strict=True))),
        )


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
    """The model in the engine's dtype: how far rounding alone moves the answer."""
    features: Any = None
    """Speech models: what makes features of sound."""
    attention: str = "eager"
    """What both attend with; those of `plain_attention.KEPT` round keys and values as the cache does."""
    _probed: Rounding | None = field(default=None, repr=False)
    _last: tuple[Any, torch.Tensor, Sequence[Choice]] | None = field(default=None, repr=False)

    @classmethod
    def load(cls, family: Family, folder: Path, dtype: torch.dtype) -> Oracle:
        """Load the checkpoint that `checkpoints.save` wrote for this family with this dtype."""
        if family.attention == "cross":
            return cls(*speech.load(folder, (torch.float64, dtype)))
        attention = str(family.engine["kv_cache_dtype"]) if family.fp8_cache else "eager"
        exact, working = (read(family, folder, d, attention) for d in (torch.float64, dtype))
        return cls(exact, working, attention=attention)

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
        if self.attention == "eager":
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
    def computing(
        self, *, exact: bool = True, attention: str | None = None, draw: int = 0
    ) -> Iterator[torch.nn.Module]:
        """The model to call.

        Args:
            exact: In float64, else in the engine's dtype.
            attention: What it shall attend with, where not as always.
            draw: Seed of what embeddings differ by, up to half a unit in the last place, so that everything after them
                is rounded otherwise; 0 for nothing.
        """
        model = self.exact if exact else self.working
        generator = torch.Generator().manual_seed(draw)

        def moved(_module: torch.nn.Module, _inputs: object, rows: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(rows.shape, generator=generator).to(rows.device) - 0.5
            return (rows.double() * (1 + torch.finfo(rows.dtype).eps * noise)).to(rows.dtype)

        hook = model.get_input_embeddings().register_forward_hook(moved) if draw else nullcontext()
        if attention is not None:
            model.set_attn_implementation(attention)
        try:
            with hook, torch.inference_mode(), InFloat64(enabled=exact and self.wide):
                yield model
        finally:
            if attention is not None:
                model.set_attn_implementation(self.attention)

    def log_probs(self, tokens: list[int], *, audio: int | None = None, **way: Any) -> torch.Tensor:
        """Next-token log-probabilities, [len(tokens), VOCABULARY] float64; row i follows tokens[: i + 1].

        Args:
            tokens: The sequence; of a speech model that of its decoder.
            audio: Seed of what a speech model hears (`speech.audio`).
            **way: Of `computing`; without one in float64, which is kept, for who asks for it asks for `tolerance` next.
        """
        return self._computed(tokens, audio, **way) if way else self._exactly(tokens, audio)[0]

    def _exactly(self, tokens: list[int], audio: int | None) -> tuple[torch.Tensor, Sequence[Choice]]:
        """Compute in float64 the log-probabilities, and what the routers chose."""
        sequence = (tuple(tokens), audio)
        if self._last is None or self._last[0] != sequence:
            with Choices() as choices:
                found = self._computed(tokens, audio)
            self._last = (sequence, found, choices.seen)
        return self._last[1:]

    def _computed(self, tokens: list[int], audio: int | None, **way: Any) -> torch.Tensor:
        """Compute what `log_probs` returns, and keep nothing."""
        ids = self.ids(tokens)
        arguments = {"input_ids": ids}
        with self.computing(**way) as model:
            if self.features is not None:
                assert audio is not None, "a speech model must hear something"
                kind = {"sampling_rate": speech.SAMPLING_RATE, "return_tensors": "pt"}
                sound = self.features(speech.audio(audio), **kind)
                arguments = {"input_features": sound.input_features.to(model.dtype), "decoder_input_ids": ids}
            rows: torch.Tensor = model(**arguments, use_cache=False).logits[0].double().log_softmax(-1)
        return rows

    def rounding(self, tokens: list[int], *, audio: int | None = None) -> Rounding:
        """By how much rounding moves transformers' own log-probabilities: the larger figure of all ways of `rough`.

        That is rounding to the engine's dtype; and with an FP8 cache to another code, wherever another order of
        summation would do it.
        """
        exact, chosen = self._exactly(tokens, audio)
        found = []
        for way in self.rough:
            error = Error.of(self._computed(tokens, audio, **way), exact)
            if not chosen:
                found.append(Rounding(error, error.worst, ()))
                continue
            with Choices(repeat=chosen) as rounded:
                same = Error.of(self._computed(tokens, audio, **way), exact)
            found.append(Rounding(error, same.worst, tuple(moved_leads(chosen, rounded.seen))))
        return Rounding.largest(found)

    def tolerance(
        self, tokens: list[int], *, audio: int | None = None, errors: torch.Tensor | None = None
    ) -> Tolerance:
        """Admissible errors of the log-probabilities of this sequence.

        Args:
            tokens: The sequence.
            audio: Seed of what a speech model hears.
            errors: What the last rows are off by. Bounds that take forward passes of their own are computed until they
                explain it: a sequence of 2,048 tokens of Qwen3-Next has 446 open choices of experts (7 minutes).
                Without it all are computed.

        SLACK times what rounding does to transformers itself, on this sequence and on PROBES: the largest of a few
        hundred roundings is a figure of the model, that of three tokens is chance.

        A row that rounding moves farther than others has a bound of its own: 2 SLACK times the root mean square of its
        errors in DRAWS more computations, because a single one may by chance leave it nearly right. (Qwen3.5 with 8
        heads, 29 tokens: noise in the embeddings moves one row four times as far as half of the rows, in float64 too.
        In forty draws float16 moves it by 0.007 to 0.057, and twice the first of them explains 0.046. Of 6,800 texts,
        each judged by other draws than its own, a bound from one draw called 0.3 to 0.8 % wrong, bounds of rows 0.02 to
        0.04 %; for half of the rows they are no larger.)

        In 16 bits a token that stands between two experts may be sent to the other, and its row is off by up to 2; no
        other row may be off that far. So rounding is measured with the experts of the exact model, and where a lead is
        within reach of rounding, what the other choice would do to each row comes on top: of several the largest, which
        SLACK times covers two. No choice excuses more than rounding moved any row, where routers chose for themselves.
        (The tiny Granite in float16: 0.02 in half of the rows, up to 0.76 in a few.)

        In float32 the worst error resolves a lost block a thousandfold. With an FP8 cache in float32 a lost block moves
        half of the rows 101 times as far as the typical error, each at least 25 times as far as the worst; a cache that
        is not quantised moves half of them 7.6 times as far as the typical error. A format of codes that differs in its
        smallest values alone is not seen (`bench.require_codes`).
        """
        if self._probed is None:
            self._probed = Rounding.largest(self.rounding(self.probe(n), audio=n) for n in PROBES)
        rounding = Rounding.largest([self._probed, self.rounding(tokens, audio=audio)])
        common = SLACK * min(rounding.same_experts, rounding.error.worst)
        rows = torch.full((len(tokens),), common, dtype=torch.float64, device=self.exact.device)
        further = self._further_bounds(tokens, audio, rounding)
        while errors is None or (errors.to(rows.device) > rows[-len(errors) :]).any():
            bound = next(further, None)
            if bound is None:
                break
            rows = rows.maximum(bound)
        return Tolerance(rows, SLACK * rounding.error.typical, SLACK * rounding.error.worst)

    def _further_bounds(self, tokens: list[int], audio: int | None, rounding: Rounding) -> Iterator[torch.Tensor]:
        """Bounds of each row [len(tokens)]: from its errors in more draws, then from each open choice of experts."""
        yield 2 * SLACK * self._unsteady(tokens, audio)
        for place in self._open_choices(tokens, audio, rounding.reach):
            moved = rounding.same_experts + self._moved_by(place, tokens, audio)
            yield SLACK * moved.clamp(max=rounding.error.worst)

    def _unsteady(self, tokens: list[int], audio: int | None) -> torch.Tensor:
        """How far rounding moves each row [len(tokens)] in root mean square, with the experts of the exact model."""
        exact, chosen = self._exactly(tokens, audio)
        moved = []
        for draw in range(1, DRAWS + 1):
            with Choices(repeat=chosen) if chosen else nullcontext():
                moved.append((self._computed(tokens, audio, exact=False, draw=draw) - exact).abs().amax(-1))
        return torch.stack(moved).square().mean(0).sqrt()

    def _open_choices(self, tokens: list[int], audio: int | None, reach: Sequence[float]) -> list[OpenChoice]:
        """Choices of experts that rounding may decide, the last token's first."""
        found = open_choices(self._exactly(tokens, audio)[1], [SLACK * each for each in reach]) if reach else []
        return sorted(found, key=attrgetter("row"), reverse=True)

    def _moved_by(self, place: OpenChoice, tokens: list[int], audio: int | None) -> torch.Tensor:
        """How far each row [len(tokens)] moves if this choice is decided otherwise."""
        with Choices(other=place):
            return (self._computed(tokens, audio) - self._exactly(tokens, audio)[0]).abs().amax(-1)

    def probe(self, length: int) -> list[int]:
        """A sequence on which rounding is measured; one of PROBES gives its length."""
        longest = self.exact.config.max_target_positions if self.features is not None else max(PROBES)
        return prompt(min(length, longest), seed=length)

    def without_keys(self, tokens: list[int], hidden: range) -> torch.Tensor:
        """What `log_probs` of a decoder would be if no later token saw the keys at `hidden`: a lost block."""
        kept = plain_attention.KEPT[self.attention]
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
        return self._stepwise(tokens, at, first=_zero_states if lose_state else None)

    def _stepwise(
        self,
        tokens: list[int],
        at: int,
        *,
        first: Callable[[Any], None] | None = None,
        each: Callable[[Any], None] | None = None,
    ) -> torch.Tensor:
        """Decode the tokens from `at` on, one by one.

        `first` changes the cache before the first of them, `each` before each.
        """
        rows = []
        with self.computing() as model:
            masks: dict[str, Any] = {}
            if model.config.model_type == "kimi_linear" and "full_attention" not in model.config.layer_types:
                # transformers would ask the cache for its length, which attention layers alone know.
                masks = {"attention_mask": dict.fromkeys(("full_attention", "linear_attention"))}
            places = {"position_ids": self.ids(list(range(at)))} if masks else {}
            out = model(self.ids(tokens[:at]), use_cache=True, **places, **masks)
            name = "past_key_values" if "past_key_values" in out else "cache_params"  # the latter without attention
            cache = out[name]
            if first is not None:
                first(cache)
            for i, token in enumerate(tokens[at:], start=at):
                if each is not None:
                    each(cache)
                where = {"position_ids": self.ids([i])} if name == "past_key_values" else {}
                rows.append(model(self.ids([token]), use_cache=True, **{name: cache}, **where, **masks).logits[0, 0])
        return torch.stack(rows).double().log_softmax(-1)

    def state_rounding(self, tokens: list[int], at: int, dtype: str, *, cut: bool = False) -> float:
        """By how much a log-probability moves, times SLACK, where states are kept in another dtype.

        Args:
            tokens: The sequence.
            at: Tokens of the prompt: states are rounded after it, and after each token that follows.
            dtype: "bfloat16", say, of the recurrent states.
            cut: The engine cuts states towards zero instead of rounding them to the nearest.
        """
        rows = self._stepwise(tokens, at, each=partial(_round_states, dtype=getattr(torch, dtype), cut=cut))
        return SLACK * (rows - self.log_probs(tokens)[at:]).abs().max().item()


def read(family: Family, folder: Path, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    """Load a checkpoint of a family in a dtype, attending as `Oracle.attention` says."""
    # transformers' own config class by name: vLLM puts others in its place, which its models understand alone.
    config = type(family.make_config()).from_pretrained(folder)
    # `eager` experts: transformers' grouped product knows no float64.
    kind = {"attn_implementation": attention, "experts_implementation": "eager"}
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **kind)
    return model.eval()


def _zero_states(cache: Any) -> None:
    """Zero what the layers of transformers' cache hold beside keys and values."""
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            for state in states.values():
                if state is not None:  # a convolution or an MLP has no recurrent state
                    state.zero_()


def _round_states(cache: Any, dtype: torch.dtype, *, cut: bool) -> None:
    """Round what the layers of transformers' cache hold as recurrent states; to the nearest, or towards zero."""
    for layer in cache.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                nearest = state.to(dtype)
                away = nearest.abs() > state.abs()
                smaller = torch.nextafter(nearest, torch.zeros_like(nearest))
                state.copy_(torch.where(away, smaller, nearest) if cut else nearest)


@dataclass(eq=False)
class PublishedOracle(Oracle):
    """A published checkpoint, on the engine's device; `exact` is in float32, or in float64 beside an engine in float32.

    Memory beside the engine's: 4 bytes a parameter for the wider copy and 2 for the narrow one, and in a forward pass
    20 bytes for each token and word of the vocabulary. transformers' scans in plain torch take, of Mamba-2, 4 bytes x
    heads x state channels x chunk size squared for each chunk, twice. All of this is arithmetic: no GPU has run it.
    """

    best: int = 20
    """Tokens of a distribution on which rounding is measured: as many as an engine is asked for."""

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, *, best: int, device: str) -> PublishedOracle:
        """Load a checkpoint.

        Args:
            folder: Where it is.
            dtype: Of the engine.
            best: How many tokens of each distribution are compared.
            device: "cpu" or "cuda" (CUDA or HIP).
        """
        wide = torch.float64 if dtype is torch.float32 else torch.float32
        kind = {"attn_implementation": "eager", "experts_implementation": "eager", "trust_remote_code": False}
        with plain_torch():
            exact, working = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=d, **kind).eval() for d in (wide, dtype)
            )
        for model in (exact, working):
            unlimited(model)
        return cls(exact.to(device), working.to(device), best=best)

    @contextmanager
    def computing(self, **way: Any) -> Iterator[torch.nn.Module]:
        """Compute as the base class does, without TF32."""
        with no_tf32(), super().computing(**way) as model:
            yield model

    def rounding(self, tokens: list[int], *, audio: int | None = None) -> Rounding:
        """By how much rounding moves transformers' own log-probabilities of the `best` tokens at each position.

        Where two experts are as good as each other, one draw goes to one of them, and would not explain an engine that
        goes to the other. (The tiny Granite in float16, 179 tokens: one draw of eight is off by 0.17, the others by
        0.006 at most, and so was an engine off by 0.13.)
        """
        exact = self.log_probs(tokens, audio=audio).topk(self.best)
        errors = []
        for draw in range(DRAWS):
            rows = self.log_probs(tokens, audio=audio, exact=False, draw=draw)
            errors.append(Error.of(rows.gather(-1, exact.indices), exact.values))
        error = Error.largest(errors)
        return Rounding(error, error.worst, ())

    def _unsteady(self, tokens: list[int], audio: int | None) -> torch.Tensor:  # noqa: ARG002 - as in `Oracle`
        """Return zeros: `rounding` is the worst of several draws already, and a forward pass is dear."""
        return torch.zeros(len(tokens), dtype=torch.float64, device=self.exact.device)

    def probe(self, length: int) -> list[int]:
        """A sequence of words of this vocabulary."""
        return list(schedule.prompt(length, length, self.exact.config.get_text_config().vocab_size))


def unlimited(model: torch.nn.Module) -> None:
    """Limit time steps as the config says, which is not at all where it says nothing.

    transformers' Zamba2 and Nemotron-H take for a limit what initial time steps are drawn from (`time_step_min`), in a
    prompt's scan and not in the step of an answer. vLLM limits none.
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(getattr(model.config, "time_step_limit", None) or (0.0, math.inf))


@contextmanager
def plain_torch() -> Iterator[None]:
    """Let transformers find no kernels while it imports a model's module."""
    here = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in KERNEL_PACKAGES}
    hidden = {*here, *KERNEL_PACKAGES}
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # None: an import of it fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(here)


@contextmanager
def no_tf32() -> Iterator[None]:
    """Multiply and convolve float32 in float32; the setting is the process's, and an engine lives in it too."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
