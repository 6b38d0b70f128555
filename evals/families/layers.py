# SPDX-License-Identifier: Apache-2.0
"""Find the first decoder layer in which an engine leaves transformers' path, once its answers are found wrong.

The residual stream after every decoder layer is captured on both sides, for one prompt, and compared with what
rounding does to transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from families.family import Family
    from families.oracle import Oracle

SLACK = 8.0
"""Factor over the usual rounding, which is largest in a few channels; a wrong layer is off by thousands of it."""

RESIDUAL_FIRST = frozenset({"GraniteMoeHybridForCausalLM"})
"""Architectures whose layers in vLLM return the stream itself, and beside it what it was. The others return what is
still to be added, and beside it the stream; or the stream alone."""


@dataclass(frozen=True)
class FamilyLayer:
    """One decoder layer: how far its output is from transformers'."""

    index: int
    kind: str
    """"attention", "state", "attention and state" or "mlp"."""
    error: float
    """Largest difference of the stream after the layer."""
    tolerance: float

    @property
    def diverges(self) -> bool:
        """Whether the error, NaN included, exceeds the tolerance."""
        return not self.error <= self.tolerance


def first_diverging(llm: Any, family: Family, oracle: Oracle, tokens: list[int]) -> FamilyLayer | None:
    """Name the first layer that is wrong; None where all layers are right (then look at the head, or at decoding).

    Args:
        llm: The engine, in this process or with pickled functions allowed (vLLM's `apply_model`).
        family: What it serves.
        oracle: Of the same checkpoint.
        tokens: A prompt; it may take several steps.
    """
    return next((layer for layer in compare(llm, family, oracle, tokens) if layer.diverges), None)


def compare(llm: Any, family: Family, oracle: Oracle, tokens: list[int]) -> list[FamilyLayer]:
    """Every decoder layer in order.

    Raises:
        ValueError: The two models do not have the same number of decoder layers, or not the same shape of rows.
    """
    kinds, got = engine_streams(llm, family, tokens)
    want = reference_streams(oracle, tokens)
    rough = [reference_streams(oracle, tokens, **way) for way in oracle.rough]
    if len(got) != len(want):
        raise ValueError(f"{family.name}: {len(got)} decoder layers in vLLM, {len(want)} in transformers")
    layers, rounding = [], 0.0
    for index, (kind, g, whole, *others) in enumerate(zip(kinds, got, want, *rough, strict=True)):
        if len(g) > len(whole) or g.shape[1:] != whole.shape[1:]:
            raise ValueError(f"{family.name}, layer {index}: rows {list(g.shape)} in vLLM, {list(whole.shape)} wanted")
        w = whole[: len(g)]  # a last step of one token may be a graph's: no hook sees it
        for other in others:
            rounding = max(rounding, (other[: len(g)] - w).abs().max().item())  # a layer inherits what others lost
        layers.append(FamilyLayer(index, kind, (g - w).abs().max().item(), SLACK * rounding))
    return layers


def engine_streams(llm: Any, family: Family, tokens: list[int]) -> tuple[list[str], list[torch.Tensor]]:
    """Kind of each decoder layer, and the residual stream after it: [len(tokens), channels] float64.

    Raises:
        ValueError: Every step ran as a captured graph, which calls no layer.
    """
    from vllm import SamplingParams

    summed = family.architecture not in RESIDUAL_FIRST
    kinds: list[str] = llm.apply_model(lambda model: _watch(model, summed=summed))[0]
    llm.reset_prefix_cache()  # or it would answer for the prompt's first tokens
    llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    steps = llm.apply_model(_unwatch)[0]
    if not all(steps):
        raise ValueError(f"{len(tokens)} tokens: every step ran as a captured graph, which calls no layer")
    return kinds, [torch.cat(rows)[: len(tokens)] for rows in steps]


def reference_streams(oracle: Oracle, tokens: list[int], **way: Any) -> list[torch.Tensor]:
    """The same of transformers, which adds within its layers; `way` is of the oracle's `computing`."""
    seen: list[torch.Tensor] = []

    def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0].double().cpu())

    with oracle.computing(**way) as model:
        hooks = [layer.register_forward_hook(note) for layer in decoder_layers(model)]
        try:
            model(oracle.ids(tokens), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return seen


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of layers that the stream passes.

    Raises:
        ValueError: The model has none, or several.
    """
    found = [m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and name.endswith("layers")]
    outer = [m for m in found if not any(m is inner for other in found if other is not m for inner in other.modules())]
    if len(outer) != 1:
        raise ValueError(f"{type(model).__name__}: {len(outer)} lists of layers; first_diverging is for decoders alone")
    return outer[0]


def _watch(model: torch.nn.Module, *, summed: bool) -> list[str]:
    """Begin to note the stream in a worker; returns the kind of each layer.

    Compiled code calls no hook. Until `_unwatch`, vLLM runs the module uncompiled (`do_not_compile`).
    """
    compiled = [part for part in model.modules() if getattr(part, "do_not_compile", True) is False]
    for part in compiled:
        part.do_not_compile = True
    model._pagedkv_compiled = compiled
    watched = []
    for layer in decoder_layers(model):
        rows: list[torch.Tensor] = []

        def note(_module: Any, _inputs: Any, output: Any, rows: list[torch.Tensor] = rows) -> None:
            if isinstance(output, tuple):
                output = output[0].double() + output[1].double() if summed else output[0]
            rows.append(output.detach().double().cpu())

        watched.append((layer.register_forward_hook(note), rows))
    model._pagedkv_watched = watched
    return [_kind(layer) for layer in decoder_layers(model)]


def _unwatch(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Stop; returns the rows of each step of each layer."""
    for hook, _rows in model._pagedkv_watched:
        hook.remove()
    watched = model._pagedkv_watched
    for part in model._pagedkv_compiled:
        part.do_not_compile = False
    del model._pagedkv_watched, model._pagedkv_compiled
    return [rows for _hook, rows in watched]


def _kind(layer: torch.nn.Module) -> str:
    """What a layer of vLLM does, by the layers within it that own pages."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    paged = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    states = [module for module in paged if isinstance(module, MambaBase)]
    names = ["attention"] * (len(states) < len(paged)) + ["state"] * bool(states)
    return " and ".join(names) or "mlp"
