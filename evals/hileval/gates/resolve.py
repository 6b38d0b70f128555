# SPDX-License-Identifier: Apache-2.0
"""Look up once what a run of a gate rests on: declaration, rule, stored runs, engine and model."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hileval.gates.declare import find_gate, occasion
from hileval.gates.foreign import read_foreign
from hileval.gates.rule import shared
from hileval.records.baseline import Baseline
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from hileval.engines import Engine
    from hileval.gates.declare import EngineName, Gate, Gates, Occasion
    from hileval.gates.rule import GateRule


@dataclasses.dataclass(frozen=True)
class ResolvedGate:
    """A gate as one run asks it.

    Attributes:
        name: Its key in gates.yaml; ids of its checks begin with it.
        declared: Its declaration.
        rule: The rule that applies now; gates that decide together share its alpha.
        engine: The engine to ask, the declared one or another.
        baseline: The stored runs it is compared with; None judges the floor alone.
    """

    name: str
    declared: Gate
    rule: GateRule
    engine: EngineName
    baseline: Baseline | None = None

    @functools.cached_property
    def folder(self) -> Path:
        """Folder of its model: in this repository, or in the hub's cache, fetched if this machine may.

        Raises:
            CannotRunHereError: It is neither here nor can it be fetched.
        """
        gate = self.declared
        return snapshot(gate.model, gate.revision) if gate.weights == "hub" else gate.path(gate.model)

    @property
    def task(self) -> Path:
        """Its task file."""
        return self.declared.path(self.declared.task)

    @property
    def key(self) -> Path:
        """The test set of a gate with drawn weights: its questions with what the trusted attention answered."""
        return self.folder / "key.jsonl"

    def using(self, **changes: object) -> ResolvedGate:
        """The same with other values in these fields of its declaration."""
        return dataclasses.replace(self, declared=self.declared.model_copy(update=changes))

    def start(self) -> Engine:
        """Start its engine, once the first question is asked: imports and weights take minutes."""
        gate = self.declared
        os.environ.update(gate.env)
        if self.engine == "vllm":
            from hileval.engines.vllm_engine import VllmEngine

            drawn = {"load_format": "drawn"} if gate.weights == "drawn" else {}
            # What identifies a run is what is loaded: never a name that the hub could look up anew.
            model = str(self.folder) if gate.weights != "repository" else self.folder
            return VllmEngine(model, gate.attention_backend or "vllm", gate.engine_args | drawn)
        from hileval.engines.transformers_engine import SpeechEngine, TransformersEngine

        return (SpeechEngine if gate.kind == "documents" else TransformersEngine)(self.folder)


def resolve(
    name: str, declared: Gates, *, when: Occasion | None = None, of: int = 1, engine: EngineName | None = None
) -> ResolvedGate:
    """The gate of a name, or of an accuracy configuration of vLLM, as it is to be asked now.

    Args:
        name: Its key, or the path of the configuration.
        declared: What gates.yaml declares.
        when: The occasion; None finds out what the plan that runs it is for.
        of: How many gates decide together and share alpha.
        engine: Another engine than the declared one.

    Raises:
        UnknownGateError: No gate has this name.
        MisuseError: It is not for that occasion.
        BaselineError: It has no baseline, or a damaged one; only a gate of a hub's model may have none yet.
    """
    name, gate = read_foreign(Path(name)) if name.endswith((".yaml", ".yml")) else (name, find_gate(name, declared))
    path = gate.path(gate.baseline)
    rule = shared(declared.rule(gate, when or occasion(os.environ)), of)
    baseline = Baseline.read(path) if path.exists() or gate.weights != "hub" else None
    return ResolvedGate(name, gate, rule, engine or gate.engine, baseline)


def without_baseline(name: str, declared: Gates, engine: EngineName | None = None) -> ResolvedGate:
    """A gate whose answers are recorded and not judged: by its first rule, beside no stored runs."""
    gate = find_gate(name, declared)
    return ResolvedGate(name, gate, declared.rule(gate, next(iter(gate.rules))), engine or gate.engine)


def snapshot(model: str, revision: str) -> Path:
    """Folder of a model in the hub's cache, fetched if this machine may.

    Raises:
        CannotRunHereError: It is neither here nor can it be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision or None))
    except Exception as error:
        raise CannotRunHereError(
            f"the model is not on this machine: {type(error).__name__}",
            where=f"{model}@{revision or 'main'}",
            remedy="run it on an agent that has the hub's cache, or fetch the model first",
        ) from error
