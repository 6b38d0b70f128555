"""Which engine serves a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from hileval.declare import Gate
    from hileval.engines import Engine

EngineName = Literal["vllm", "transformers", "server"]


def starter(gate: Gate, engine: EngineName) -> Callable[[], Engine]:
    """What starts the engine when the first question is asked."""
    from hileval.engines import TransformersEngine, VllmEngine

    def start() -> Engine:
        model = gate.path(gate.model)
        if engine == "vllm":
            return VllmEngine(model, gate.attention_backend or "vllm", gate.engine_args)
        return TransformersEngine(model)

    return start
