"""Which engine serves a gate, and with what arguments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hileval.declare import Gate
    from hileval.engines import Engine
    from hilgate.model import Scalar

EngineName = Literal["vllm", "transformers", "server"]
REPORTER = "pagedkv.vllm_plugin.inspect.WorkerReport"
OURS = "CUSTOM"
"""Our backend's member of vLLM's AttentionBackendEnum."""


def starter(gate: Gate, engine: EngineName) -> Callable[[], Engine]:
    """What starts the engine when the first question is asked."""

    def start() -> Engine:
        os.environ.update(gate.env)
        if engine == "vllm":
            from hileval.engines.vllm_engine import VllmEngine

            return VllmEngine(model_of(gate), gate.attention_backend or "vllm", gate.engine_args)
        if engine == "server":
            from hileval.engines.server import ServerEngine

            return ServerEngine(serve_command(gate), model=gate.model, env={**gate.env, "VLLM_SERVER_DEV_MODE": "1"})
        if gate.kind == "documents":
            from hileval.engines.speech_engine import SpeechEngine

            return SpeechEngine(gate.path(gate.model))
        from hileval.engines.transformers_engine import TransformersEngine

        return TransformersEngine(gate.path(gate.model))

    return start


def model_of(gate: Gate) -> Path | str:
    """Folder of a model in this repository, or the name of one of a hub."""
    return gate.path(gate.model) if gate.weights == "repository" else gate.model


def serve_command(gate: Gate) -> list[str]:
    """The command line of `vllm serve` for a gate; `{port}` stands for the port."""
    words = ["vllm", "serve", str(model_of(gate)), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["--served-model-name", gate.model]
    words += ["--revision", gate.revision] if gate.revision else []
    if gate.attention_backend == "pagedkv":
        words += ["--attention-backend", OURS, "--worker-extension-cls", REPORTER]
    return words + options(gate.engine_args)


def options(arguments: Mapping[str, Scalar]) -> list[str]:
    """Arguments of `vllm.LLM` as options of `vllm serve`: True and False are `--name` and `--no-name`."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words
