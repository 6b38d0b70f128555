"""An explanation for a person, in 80 columns, and for a program, as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING

from .errors import NoKernelError

if TYPE_CHECKING:
    from .explain import Explained, Explanation
    from .router import Choice, Rejection

WIDTH = 80


def format_text(explanation: Explanation) -> str:
    """Return what a person reads."""
    deployment = explanation.deployment
    scales = f" with scales: {deployment.kv_scales}" if deployment.kv_cache_dtype.startswith("fp8") else ""
    lines = [f"{explanation.model_type} on {deployment.arch}, kernels of {', '.join(deployment.providers)}"]
    lines += _wrap(
        f"{explanation.dtype}, cache {deployment.kv_cache_dtype}{scales}, at most {deployment.max_num_seqs} sequences, "
        f"num_blocks {deployment.num_blocks or 'not given'}",
        1,
    )
    lines += _wrap(f"block_size {explanation.block_size}: {explanation.block_reason}", 1)
    for layer in explanation.layers:
        lines += ["", *_layer(layer)]
    return "\n".join(lines) + "\n"


def as_data(explanation: Explanation) -> dict[str, object]:
    """Return the same for JSON."""
    return {
        "model_type": explanation.model_type,
        "deployment": dataclasses.asdict(explanation.deployment),
        "dtype": explanation.dtype,
        "block_size": explanation.block_size,
        "served": explanation.served,
        "layers": [_layer_data(layer) for layer in explanation.layers],
    }


def _layer_data(layer: Explained) -> dict[str, object]:
    data: dict[str, object] = {"kind": dataclasses.asdict(layer.kind), "note": layer.note}
    if layer.request:
        data["request"] = dataclasses.asdict(layer.request)
    if isinstance(layer.answer, NoKernelError):
        rejected = [dataclasses.asdict(rejection) for rejection in layer.answer.rejected]
        data["no_kernel"] = {"task": layer.answer.task, "missing": layer.answer.missing, "rejected": rejected}
    elif layer.answer:
        native = layer.answer.layout.has_native_kv_cache_layout
        data["layout"] = {**dataclasses.asdict(layer.answer.layout), "has_native_kv_cache_layout": native}
        data["route"] = {choice.task: dataclasses.asdict(choice) for choice in layer.answer.choices}
    return data


def _layer(layer: Explained) -> list[str]:
    kind = layer.kind
    lines = [f"{kind.count} x {kind.name}" + (f": {_asked(layer)}" if layer.request else "")]
    lines = _wrap(lines[0], 0)
    if layer.note:
        lines += _wrap(layer.note, 1)
    if isinstance(layer.answer, NoKernelError):
        head, *_ = str(layer.answer).splitlines()
        lines += [*_wrap(f"NOT SERVED. {head}", 1), *_rejections(layer.answer.rejected)]
    elif layer.answer:
        native = "native blocks" if layer.answer.layout.has_native_kv_cache_layout else "no native blocks"
        lines += _wrap(f"cache    {layer.answer.layout}; {native}", 1, hang=9)
        for choice in layer.answer.choices:
            lines += _choice(choice)
    return lines


def _asked(layer: Explained) -> str:
    """What the layer asks for, in words."""
    request = layer.request
    assert request
    words = [f"{request.num_q_heads} heads on {request.num_kv_heads}, head size {request.head_size}"]
    words += [f"window {request.window}"] if request.window else []
    words += [f"soft cap {request.softcap:g}"] if request.softcap else []
    words += ["ALiBi"] if request.alibi else []
    words += ["sinks"] if request.sinks else []
    words += [f"scale {request.custom_scale:g}"] if request.custom_scale else []
    words += [] if request.causal else ["not causal"]
    return ", ".join([*words, f"up to {request.max_seq_len} tokens"])


def _choice(choice: Choice) -> list[str]:
    if choice.kernel is None:
        return _wrap(f"{choice.task:<8} nobody: {choice.why}", 1, hang=9)
    lines = _wrap(f"{choice.task:<8} {choice.kernel}", 1, hang=9)
    lines += _wrap(f"{choice.basis}: {choice.why}", 3)
    lines += _wrap(f"able too: {', '.join(choice.also)}", 3) if choice.also else []
    return [*lines, *_rejections(choice.rejected)]


def _rejections(rejected: tuple[Rejection, ...]) -> list[str]:
    return [line for rejection in rejected for line in _wrap(f"- {rejection}", 3, hang=2)]


def _wrap(text: str, level: int, hang: int = 0) -> list[str]:
    indent = "  " * level
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
