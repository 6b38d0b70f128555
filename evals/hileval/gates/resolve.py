# SPDX-License-Identifier: Apache-2.0
"""Look up everything that a run of a gate rests on: declaration, rule, stored runs, engine and model."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hileval.engines import require_model_files
from hileval.gates.declare import EVALS, TaskError, occasion, read_document_task
from hileval.records.answers import COMMIT, Identity
from hileval.records.baseline import ENDS_WITH_JOB, Baseline, IdentityMismatchError
from hilgate.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    from hileval.engines import Engine
    from hileval.gates.declare import DocumentTask, DriftGate, EngineName, Gate, Gates, Occasion
    from hileval.gates.rule import GateRule

WEIGHTS = ("*.safetensors", "config.json", "*.index.json")
TEXT_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
DOCUMENT_TOKENIZER = (*TEXT_TOKENIZER, "preprocessor_config.json", "processor_config.json")
"""Files that turn text, sound and images into the model's input."""
ALSO = ("generation_config.json", "tokenizer.model", "tiktoken.model", "*.py")
"""Other files, of some models, that turn a question into tokens or end an answer; remote code is one of them."""


class UnknownGateError(MisuseError):
    """A gate name that gates.yaml does not declare."""


@dataclasses.dataclass(frozen=True)
class ResolvedGate:
    """A gate as one run asks it.

    Attributes:
        name: Its key in gates.yaml; ids of its checks begin with it.
        declared: Its declaration.
        rule: The rule that applies now; gates that decide together share its alpha.
        engine: The engine to ask, the declared one or another.
        baseline: The stored runs it is compared with; None judges the floor alone.
        when: The occasion whose rule it is.
        limit: How many of the rule's questions are asked; None asks all of them.
        drift: The drift gate on its model, whose name it then has; None for a gate on answers.
    """

    name: str
    declared: Gate
    rule: GateRule
    engine: EngineName
    baseline: Baseline | None = None
    when: Occasion = "pre-merge"
    limit: int | None = None
    drift: DriftGate | None = None

    @property
    def wants_pair(self) -> bool:
        """Whether another attention must be asked in this job, because nothing is recorded."""
        return self.drift is None and self.declared.paired_with is not None and self.baseline is None

    @property
    def beside(self) -> str:
        """Whose run in the same job stands for a baseline that is not recorded yet; empty where that is not so."""
        paired = self.baseline is not None and self.baseline.accepted_by == ENDS_WITH_JOB
        return self.baseline.setting.attention_backend if self.baseline and paired else ""

    @property
    def revision(self) -> str:
        """Commit of its model: the declared one, or the one of the runs that it is compared with; empty is `main`."""
        return self.declared.revision or (self.baseline.identity.revision if self.baseline else "")

    @property
    def pinned(self) -> bool:
        """Whether every day asks the same model: its revision is declared or recorded, or it is in the repository."""
        return self.declared.weights != "hub" or bool(self.declared.revision or (self.revision and not self.beside))

    @functools.cached_property
    def folder(self) -> Path:
        """Folder of its model: in this repository, or in the hub's cache, fetched if this machine may.

        A model of a hub is identified by what the hub says its files contain.

        Raises:
            CannotRunHereError: It is neither here nor can it be fetched, or a file of it is missing.
        """
        gate = self.declared
        if gate.weights == "hub":
            return snapshot(gate.model, self.revision)
        require_model_files(gate.path(gate.model))
        return gate.path(gate.model)

    @property
    def task_file(self) -> Path:
        """File of its task."""
        return self.declared.path(self.declared.task)

    @functools.cached_property
    def questions(self) -> dict[str, Any]:
        """Its task of lm-eval, as one configuration.

        Raises:
            TaskError: The task file or its data cannot be read.
        """
        return resolve_task(self.task_file, self.declared.num_fewshot)

    @functools.cached_property
    def documents(self) -> DocumentTask:
        """Its task, of a gate of kind `documents`.

        Raises:
            TaskError: The task file is wrong.
        """
        return read_document_task(self.task_file)

    @functools.cached_property
    def identity(self) -> Identity:
        """The identity that a run must share with its baseline.

        Raises:
            TaskError: The task is wrong; or the tokenizer has code of its own, and the gate does not say whether that
                runs.
            CannotRunHereError: The model is not on this machine.
        """
        gate = self.declared
        if gate.kind == "documents":
            tokenizer: tuple[str, ...]
            task: dict[str, Any] = self.documents.model_dump()
            generation = {"repetition_penalty": self.documents.repetition_penalty, "temperature": 0}
            tokenizer, harness = DOCUMENT_TOKENIZER, {"fewshot": "none", "lm_eval": "none"}
        else:
            task = {key: value for key, value in self.questions.items() if key != "dataset_kwargs"} | gate.turns
            generation = self.questions["generation_kwargs"]
            tokenizer, harness = TEXT_TOKENIZER, {"lm_eval": importlib.metadata.version("lm_eval")}
        folder = self.folder
        if gate.weights == "hub":
            _require_decided(gate, folder)
        also = sorted(file for pattern in ALSO for file in folder.glob(pattern))
        weights = sorted(folder.glob("*.safetensors"))
        return Identity(
            model=gate.model,
            revision=self.revision or (folder.name if gate.weights == "hub" and re.match(COMMIT, folder.name) else ""),
            weights=weights_sha(folder) if gate.weights == "hub" else sha256_files(*weights, folder / "config.json"),
            tokenizer=sha256_files(*(folder / name for name in tokenizer), *also),
            chat_template=sha256_files(folder / "chat_template.jinja"),
            protocol=gate.protocol,
            task=hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest(),
            num_fewshot=gate.num_fewshot,
            generation=json.dumps(generation | {"max_gen_toks": gate.max_gen_toks}, sort_keys=True),
            **harness,
        )

    @functools.cached_property
    def distinct(self) -> int:
        """Number of different runs in its baseline, under the gated filter; 0 without a baseline."""
        return 0 if self.baseline is None else self.baseline.distinct(self.declared.filter)

    @functools.cached_property
    def d(self) -> float | None:
        """Discordance of its stored runs, under the gated filter; None where there are fewer than two."""
        return None if self.baseline is None else self.baseline.d(self.declared.filter)

    def using(self, **changes: object) -> ResolvedGate:
        """The same with other values in these fields of its declaration."""
        return dataclasses.replace(self, declared=self.declared.model_copy(update=changes))

    def start(self) -> Engine:
        """Start its engine, once the first question is asked: imports and weights take minutes."""
        gate = self.declared
        os.environ.update(gate.env)
        if self.engine == "vllm":
            from hileval.engines.vllm_engine import VllmEngine

            # What identifies a run is what is loaded: never a name that the hub could look up anew.
            model = str(self.folder) if gate.weights == "hub" else self.folder
            return VllmEngine(model, gate.attention_backend or "vllm", gate.engine_args)
        from hileval.engines.transformers_engine import SpeechEngine, TransformersEngine

        return (SpeechEngine if gate.kind == "documents" else TransformersEngine)(self.folder)


def resolve(
    name: str,
    declared: Gates,
    *,
    when: Occasion | None = None,
    of: int = 1,
    limit: int | None = None,
) -> ResolvedGate:
    """The gate of a name, as it is to be asked now.

    Args:
        name: Its key in gates.yaml.
        declared: What gates.yaml declares.
        when: The occasion; None finds out what the plan that runs it is for.
        of: How many gates decide together and share alpha.
        limit: How many of the rule's questions are asked; None asks all of them.

    Raises:
        UnknownGateError: No gate has this name.
        MisuseError: It is not for that occasion, or has no use for an option.
        BaselineError: It has no baseline, or a damaged one; only a gate of a hub's model may have none yet.
    """
    if name in declared.drifts:
        if when is not None or limit is not None:
            what, remedy = "a drift gate has one rule and its own sequences", "leave --when and --limit out"
            raise MisuseError(what, where=name, remedy=remedy)
        drift = declared.drifts[name]
        return dataclasses.replace(without_baseline(drift.of, declared), name=name, drift=drift)
    gate = find_gate(name, declared)
    path = gate.path(gate.baseline)
    asked = when or occasion(os.environ)
    rule = declared.rules[gate.rule_at(asked)].shared(
        min(of, declared.sharing(gate, asked)) if gate.step.before_merge else of
    )
    optional = gate.weights == "hub" or gate.paired_with is not None
    baseline = Baseline.read(path) if path.exists() or not optional else None
    if baseline is not None and gate.revision not in {"", baseline.identity.revision}:
        raise IdentityMismatchError(
            f"gates.yaml pins revision {gate.revision}, and the baseline was recorded with "
            f"{baseline.identity.revision or 'none'}",
            where=f"{name}: {path}",
            remedy="leave `revision` out of gates.yaml, or record a baseline with it: python -m hileval record",
        )
    return ResolvedGate(name, gate, rule, gate.engine, baseline, when=asked, limit=limit)


def without_baseline(name: str, declared: Gates, engine: EngineName | None = None) -> ResolvedGate:
    """A gate whose answers are recorded and not judged: by its first rule, beside no stored runs."""
    gate = find_gate(name, declared)
    return ResolvedGate(name, gate, declared.rules[next(iter(gate.rules.values()))], engine or gate.engine)


def resolve_pair(name: str, declared: Gates, when: Occasion, limit: int | None = None) -> ResolvedGate:
    """A gate without a baseline as the attention beside it is asked: by its own engine, without our switches.

    Raises:
        MisuseError: It names none.
    """
    gate = find_gate(name, declared)
    if gate.paired_with is None:
        raise MisuseError("this gate is paired with nothing", where=name, remedy="name `paired_with` in gates.yaml")
    asked = ResolvedGate(name, gate, declared.rules[gate.rule_at(when)], gate.engine, when=when, limit=limit)
    return asked.using(attention_backend=gate.paired_with, env={})


def find_gate(name: str, declared: Gates) -> Gate:
    """The gate of that name, which asks questions or documents.

    Raises:
        UnknownGateError: no such gate; the message offers the nearest name.
    """
    asked = declared.gates | declared.of_backends
    if name in asked:
        return asked[name]
    if name in declared.drifts:
        raise UnknownGateError(
            f"{name!r} is a drift gate, which has no baseline and no rule",
            where="evals/gates.yaml",
            remedy=f"name {declared.drifts[name].of!r}, the gate whose model it is, or: python -m hileval gate {name}",
        )
    near = difflib.get_close_matches(name, [*asked, *declared.drifts], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`hileval steps` lists the gates"
    raise UnknownGateError(f"there is no gate {name!r}", where="evals/gates.yaml", remedy=hint)


def resolve_task(path: Path, num_fewshot: int) -> dict[str, Any]:
    """The task as one dict: lm-eval's stock file, overlaid with ours, with absolute data files.

    Raises:
        TaskError: unreadable file, no `include`/`task`/`data.test`, missing stock task or data, examples wanted without
            training data.
    """
    try:
        ours = yaml.safe_load(path.read_text(encoding="utf-8"))
        include, name, data = ours.pop("include"), ours["task"], ours.pop("data")
        stock = importlib.metadata.distribution("lm_eval").locate_file(f"lm_eval/tasks/{include}")
        config: dict[str, Any] = yaml.safe_load(EVALS.joinpath(str(stock)).read_text(encoding="utf-8")) | ours
        files = {split: EVALS / data[split] for split in ("test", *sorted(set(data) - {"test"}))}
    except (OSError, yaml.YAMLError, KeyError, AttributeError, TypeError) as error:
        raise TaskError(
            f"not a task: {type(error).__name__} {error}", where=str(path), remedy="see evals/tasks/pocket_gsm8k.yaml"
        ) from error
    for file in files.values():
        if not file.is_file():
            raise TaskError(
                f"no data file {file.name}",
                where=str(path),
                remedy="restore it from git; python -m hileval.pocket questions makes a pocket model's",
            )
    if num_fewshot and "train" not in files:
        raise TaskError(f"{num_fewshot} examples without data.train", where=str(path), remedy="name the training file")
    if not num_fewshot:
        config.pop("training_split", None)
        config.pop("fewshot_split", None)
    else:
        # The stock sampler walks one random stream over the questions, so a subset gets other prompts than the whole.
        config["fewshot_config"] = {"sampler": "first_n"}
    config.pop("dataset_name", None)
    config |= {"task": name, "dataset_path": "json", "num_fewshot": num_fewshot}
    config["dataset_kwargs"] = {"data_files": {split: str(file) for split, file in files.items()}}
    return config


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
    """Refuse a tokenizer with code of its own where the gate does not say whether it runs.

    Where it may not run, another tokenizer silently replaces it.
    """
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
