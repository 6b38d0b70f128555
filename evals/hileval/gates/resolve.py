# SPDX-License-Identifier: Apache-2.0
"""Look up once what a run of a gate rests on: declaration, rule, stored runs, engine and model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hileval.engines import require_model_files
from hileval.gates.declare import EVALS, TaskError, find_gate, occasion
from hileval.gates.foreign import read_foreign
from hileval.gates.rule import shared
from hileval.records.baseline import Baseline
from hileval.records.records import Identity
from hilgate.errors import CannotRunHereError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hileval.engines import Engine
    from hileval.gates.declare import EngineName, Gate, Gates, Occasion
    from hileval.gates.rule import GateRule

WEIGHTS = ("*.safetensors", "config.json", "*.index.json")
ALSO = ("generation_config.json", "tokenizer.model", "tiktoken.model", "*.py")
"""What else may turn a question into tokens or end an answer, where a model has it: remote code is read too."""


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

        A model of a hub is identified by what the hub says its files contain.

        Raises:
            CannotRunHereError: It is neither here nor can it be fetched, or a file of it is missing.
        """
        gate = self.declared
        if gate.weights == "hub":
            return snapshot(gate.model, gate.revision)
        if gate.weights == "repository":
            require_model_files(gate.path(gate.model))
        return gate.path(gate.model)

    @property
    def task(self) -> Path:
        """Its task file."""
        return self.declared.path(self.declared.task)

    @property
    def key(self) -> Path:
        """The test set of a gate with drawn weights: its questions with what the trusted attention answered."""
        return self.folder / "key.jsonl"

    def identify(
        self,
        *,
        task: dict[str, Any],
        tokenizer: Iterable[str],
        generation: dict[str, Any],
        **of_harness: str,
    ) -> Identity:
        """What a run would have to share with a baseline.

        Args:
            task: The task without paths of this machine.
            tokenizer: Names of the files that turn questions into the model's input.
            generation: Arguments of generation.
            of_harness: `lm_eval`, its version, and `fewshot` where it is not the default.

        Raises:
            TaskError: The tokenizer has code of its own, and the gate does not say whether that runs.
        """
        gate, folder = self.declared, self.folder
        if gate.weights == "hub":
            _require_decided(gate, folder)
        also = sorted(file for pattern in ALSO for file in folder.glob(pattern))
        drawn = EVALS / "hileval/engines/worker.py"
        weights = [drawn] if gate.weights == "drawn" else sorted(folder.glob("*.safetensors"))
        return Identity(
            model=gate.model,
            revision=gate.revision,
            weights=weights_sha(folder) if gate.weights == "hub" else sha256_files(*weights, folder / "config.json"),
            tokenizer=sha256_files(*(folder / name for name in tokenizer), *also),
            chat_template=sha256_files(folder / "chat_template.jinja"),
            protocol=gate.protocol,
            task=hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest(),
            num_fewshot=gate.num_fewshot,
            generation=json.dumps(generation | {"max_gen_toks": gate.max_gen_toks}, sort_keys=True),
            **of_harness,
        )

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


def weights_sha(folder: Path) -> str:
    """sha256 over names and contents of weights and configuration of a hub's model.

    The cache keeps each file under the hash of its content and links to it, so hundreds of gigabytes need not be read:
    the name that a link points to stands for the content. A file that is no link is read.
    """
    digest = hashlib.sha256()
    for file in sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)}):
        content = file.readlink().name if file.is_symlink() else hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def sha256_files(*files: Path) -> str:
    """sha256 over names and contents of files, in the given order; a missing file counts as absent."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b"absent"
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _require_decided(gate: Gate, folder: Path) -> None:
    """A tokenizer with code of its own is replaced by another one, in silence, where that code may not run."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return  # whoever loads the tokenizer says what is wrong with it
    if isinstance(config, dict) and "auto_map" in config and "trust_remote_code" not in gate.engine_args:
        raise TaskError(
            "the model's tokenizer has code of its own, and the gate does not say whether it runs",
            where=gate.model,
            remedy="read that code, pin `revision`, and write `trust_remote_code: true` (or false) into `engine_args`",
        )
