# SPDX-License-Identifier: Apache-2.0
"""Declarations of gates (`evals/gates.yaml`): model, task, engine, limits and rule of each."""

from __future__ import annotations

import datetime as dt
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hileval.distances import FLOOR, Floor
from hileval.gates.rule import BrokenLimits, GateRule
from hileval.records.answers import COMMIT
from hilgate.errors import DeclarationError, MisuseError
from hilgate.model import Key, Scalar, StrictModel, first_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hileval.records.answers import SideName


EVALS = Path(__file__).resolve().parents[2]
"""The `evals/` folder: paths in gates.yaml are relative to it."""


BACKENDS = EVALS / "families/backends.yaml"
"""vLLM's own attention backends, as the families declare them: gates take their platforms and environments from it."""

EngineName = Literal["vllm", "transformers"]
Occasion = Literal["pre-merge", "nightly", "release"]
"""Reason for a run of a gate. Each has a rule; without one, the night uses the rule of a merge."""

Trusted = Literal[
    "vllm", "TRITON_ATTN", "ROCM_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_MLA", "CPU_ATTN"
]
"""Attentions of the engine beside which a gate may be asked, by vLLM's name; `vllm` is the one that it chooses."""

PROFILE_VARIABLE = "HILGATE_PROFILE"


def occasion(environment: Mapping[str, str]) -> Occasion:
    """The occasion of the plan that runs this gate; a run on a person's machine counts as before a merge."""
    profile = environment.get(PROFILE_VARIABLE)
    return "release" if profile == "release" else "nightly" if profile == "nightly" else "pre-merge"


class TaskError(DeclarationError):
    """A task file is unreadable or names what does not exist."""


class DocumentTask(StrictModel):
    """A task file of a gate of kind `documents`."""

    task: str = Field(min_length=1)
    modality: Literal["audio", "image"]
    """Input of the encoder."""
    prompt: str = Field(min_length=1)
    """Beginning of the decoder's text."""
    texts: str | None = None
    """JSON lines (`id`, `text`), relative to evals/, which are spoken."""
    data_folder: str | None = None
    """Environment variable that names a folder of images and texts."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Repetition penalty that the model's publisher recommends."""
    scoring: Literal[1] = 1
    """Version of `hileval.ask.documents`: scores of another one are not comparable."""

    @model_validator(mode="after")
    def _one_source(self) -> DocumentTask:
        if (self.modality == "audio") != (self.texts is not None) or (self.texts is None) != bool(self.data_folder):
            raise ValueError("audio needs `texts` alone, image needs `data_folder` alone")
        return self


class Published(StrictModel):
    """A published figure of the model: the floor rests on it until there is a baseline of our own."""

    value: float = Field(ge=0, le=1)
    kind: Literal["measured", "threshold"]
    """A measured score, or a threshold that was chosen somewhere below one."""
    metric: str = Field(min_length=1)
    """Metric, filter and number of examples."""
    n: int = Field(ge=1)
    """Questions; 1,319 are all of GSM8K's test set."""
    source: str = Field(min_length=1)
    read: dt.date | None = None
    """Day on which the source was read."""


class GateStep(StrictModel):
    """Keys of a gate's step that the rules of `hileval.gates.steps` do not decide."""

    label: str = ""
    """Label of the step in a plan, a few words; empty names the task, or the peer of a drift gate, and the model."""
    minutes: float | None = Field(default=None, gt=0)
    """Minutes on 2 cores, or on its GPUs. Only a gate on a hub's model may leave them out; they are then guessed."""
    before_merge: bool = False
    """Whether a pull request runs a gate of a hub's model too; those of the repository's models all are. It gets the
    network and no secret, so the model must be open to everyone."""
    local: bool = False
    """Whether `hilgate gate` on a person's machine runs it too; else only agents do."""


class Gate(StrictModel):
    """One accuracy gate."""

    title: str
    """Name in reports."""
    model: str
    """Folder with weights, config and tokenizer, relative to evals/, or the name of a hub model."""
    weights: Literal["repository", "hub"] = "repository"
    """Place of the weights; agents, which have network and cache, fetch those of a hub."""
    revision: str = Field(default="", pattern=COMMIT)
    """Commit of the hub model, of its weights, tokenizer and code. Empty is the one that its baseline was recorded
    with, and before there is one what `main` is today, which is said."""
    kind: Literal["questions", "documents"] = "questions"
    """Questions of lm-eval, or documents that an encoder-decoder model is to write down (`hileval.ask.documents`)."""
    task: str
    """Task file, relative to evals/: lm-eval's of questions, `DocumentTask` of documents."""
    num_fewshot: int = Field(ge=0)
    """Examples before each question."""
    max_gen_toks: int = Field(ge=1)
    """Token limit of an answer; reaching it sets the flag `truncated`."""
    protocol: Literal["completions", "chat"] = "completions"
    """Form of a question: a text to continue, or a message of a chat."""
    filter: Literal["strict", "flexible"] = "strict"
    """The gated one of two scores; the other is watched. Questions have lm-eval's two extractions; documents are right
    as a whole or in one drawn line (`hileval.ask.documents`)."""
    engine: EngineName
    """vLLM in this process, or transformers."""
    attention_backend: str | None = Field(pattern=r"^(pagedkv|vllm|[A-Z][A-Z0-9_]*)$")
    """Backend that must serve every attention layer: `pagedkv` (ours), a backend by vLLM's name (TRITON_ATTN,
    ROCM_AITER_FA ...) or `vllm` (whichever it chooses); None where the engine cannot say."""
    backends: tuple[str, ...] = ()
    """Attention backends of vLLM, by its names, that are asked the same questions, each by a gate of its own:
    NAME-BACKEND in small letters. It runs when vLLM or aiter changes, and at night; no release waits for it."""
    paired_with: Trusted | None = None
    """Peer whose attention is asked the same questions in the same job, once, as long as there is no baseline. A merge
    may pass so; a release does not."""
    engine_args: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of `vllm.LLM`, chosen so that the run meets what the gate is about."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the engine: layout and kernel switches."""
    arch: tuple[Key, ...] = ()
    """Devices it is gated on; empty is every device."""
    gpus: int = Field(default=1, ge=1, le=8)
    """Tensor-parallel size."""
    deterministic: bool = False
    """The trusted engine repeats itself to the last token (a CPU in float32): one stored run is as good as five. Else
    as many distinct runs are demanded as the rule says (`baseline_runs`)."""
    rules: dict[Occasion, Key] = Field(default={"pre-merge": "pre-merge", "release": "release"})
    """Rule of each occasion, by its name in `rules:`."""
    floor: float | None = Field(default=None, gt=0, lt=1)
    """Share of right answers below which the model is not the model any more, baseline or not; None only where nothing
    was published of a hub's model, which then proves nothing before its first baseline."""
    published: tuple[Published, ...] = ()
    """Published figures of the model."""
    broken: BrokenLimits
    """Limits of broken output."""
    baseline: str
    """Stored per-question outcomes, relative to evals/."""
    step: GateStep = GateStep()
    """Keys of its step."""

    @model_validator(mode="after")
    def _engine_and_backend_agree(self) -> Gate:
        """Refuse keys that contradict each other."""
        if self.engine == "vllm" and self.attention_backend is None:
            raise ValueError("attention_backend is required with engine vllm")
        if self.engine == "transformers" and self.attention_backend is not None:
            raise ValueError("attention_backend means nothing to transformers")
        if self.paired_with is not None and self.attention_backend in {None, self.paired_with}:
            raise ValueError(
                f"paired_with: {self.paired_with} beside attention_backend {self.attention_backend} is no pair"
            )
        if self.backends and (self.weights != "hub" or self.attention_backend != "pagedkv"):
            raise ValueError("backends is for models of a hub whose attention is ours")
        if self.step.before_merge and self.weights != "hub":
            raise ValueError(
                "step.before_merge is for models of a hub: those of the repository always run before a merge"
            )
        if self.weights != "hub" and self.revision:
            raise ValueError("revision is for models of a hub")
        if self.floor is None and (self.weights != "hub" or self.published or self.kind == "questions"):
            raise ValueError("floor is required, except for documents on a hub's model of which nothing is published")
        if self.kind == "documents" and (self.protocol == "chat" or self.num_fewshot):
            raise ValueError("documents have no examples and no chat")
        if (size := self.engine_args.get("tensor_parallel_size", 1)) != self.gpus:
            raise ValueError(
                f"gpus is {self.gpus}, and tensor_parallel_size {size}: a step would get too few or too many"
            )
        return self

    def served_by(self, name: str) -> Gate:
        """The same questions with one of vLLM's attention backends in place of ours.

        Args:
            name: The backend, by vLLM's name.

        Raises:
            DeclarationError: `families/backends.yaml` has none of that name on AMD GPUs.
        """
        backends = read_backends()
        if name not in backends or "rocm" not in backends[name].platforms or name == self.attention_backend:
            others = sorted(other for other in backends if other != self.attention_backend)
            raise DeclarationError(
                f"backends: {name!r} is no attention backend of vLLM on AMD GPUs",
                where=f"evals/gates.yaml: {self.title}",
                remedy=f"name some of {', '.join(others)}, or declare it in {BACKENDS.name}",
            )
        update = {
            "title": f"{self.title}, attention by {name}",
            "attention_backend": name,
            "backends": (),
            # Beside itself it would be asked twice; its floor holds it until a baseline is recorded.
            "paired_with": None if self.paired_with == name else self.paired_with,
            "env": backends[name].environment,
            "arch": (*self.arch, *(("cuda",) if "cuda" in backends[name].platforms else ())),
            "rules": {when: rule for when, rule in self.rules.items() if when != "release"},
            "step": self.step.model_copy(update={"label": ""}),
        }
        return self.model_copy(update=update)

    @property
    def turns(self) -> dict[str, bool]:
        """lm-eval's option for the examples of a chat: one message with the question, as vLLM asks, not turns."""
        return {"fewshot_as_multiturn": False} if self.protocol == "chat" else {}

    def rule_at(self, when: Occasion) -> Key:
        """The rule of an occasion.

        Raises:
            MisuseError: The gate is not for that occasion.
        """
        if when == "nightly" and when not in self.rules:
            when = "pre-merge"
        if when not in self.rules:
            raise MisuseError(f"this gate has no rule for {when}", where=self.title, remedy="add it to its `rules`")
        return self.rules[when]

    def path(self, relative: str) -> Path:
        """An absolute path for a path of the declaration."""
        return EVALS / relative


class DriftGate(StrictModel):
    """A gate on log-probabilities (`hileval.gates.drift`) of the model of another gate, served as that declares."""

    kind: Literal["drift"]
    """Tells it from a gate on answers."""
    of: Key
    """The gate whose model, task, engine and attention it is."""
    peer: str = Field(default="vllm", pattern=r"^(vllm|transformers|[A-Z][A-Z0-9_]*)$")
    """Attention that is asked in the same job: vLLM's own, one of its by name, or transformers' in float32 where
    vLLM's cannot serve the class; with an FP8 cache its keys and values are rounded to the same codes."""
    second: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Another attention of vLLM that is trusted: what it differs from the peer, reading and writing, is rounding as
    well. In 16 bits a peer that rounds alike in every batch says too little (docs/reference/drift.md).
    Served by the peer's own backend it makes the gate inconclusive, so both are best named."""
    engine_args: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments that differ from the other gate's, such as a longer `max_model_len`."""
    lengths: dict[int, int] = Field(default={0: 16}, min_length=1)
    """Length in tokens -> number of such sequences; length 0 is one question with its answer."""
    written: int = Field(default=16, ge=1)
    """Tokens that are written after the beginning of each sequence, one by one."""
    floor: Floor = FLOOR
    """Nats of median, 90 % and worst that count as rounding at least, whatever the peer differs from itself."""
    arch: tuple[Key, ...] = ()
    """Devices it is gated on; empty is those of the other gate."""
    step: GateStep = GateStep()
    """Keys of its step."""

    @property
    def sides(self) -> tuple[SideName, ...]:
        """The engines that are asked, in this order: the peer reads what the others wrote."""
        return ("ours", "second", "peer") if self.second else ("ours", "peer")


class Backend(BaseModel):
    """Keys of an attention backend in `families/backends.yaml` that gates read."""

    model_config = ConfigDict(frozen=True)

    platforms: tuple[Literal["cpu", "cuda", "rocm"], ...]
    """The platforms of vLLM that have it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment of its engines."""


class Gates(StrictModel):
    """The file."""

    rules: dict[Key, GateRule] = Field(min_length=1)
    gates: dict[Key, Gate] = Field(min_length=1)
    drifts: dict[Key, DriftGate] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _rules_exist(self) -> Gates:
        for name, drift in self.drifts.items():
            if drift.of not in self.gates or name in self.gates or self.gates[drift.of].kind != "questions":
                raise ValueError(f"drift {name}: `of` names a gate of questions, whose name it must not have")
        for name, gate in self.gates.items():
            for when, rule in gate.rules.items():
                if rule not in self.rules:
                    raise ValueError(f"gate {name}: no rule {rule!r} for {when}; declared: {', '.join(self.rules)}")
        return self

    @property
    def of_backends(self) -> dict[Key, Gate]:
        """The gates of vLLM's own attention backends, by name, in the order of the gates that they are made from.

        Raises:
            DeclarationError: A gate names a backend that is not declared.
        """
        return {
            f"{name}-{backend.lower().replace('_', '-')}": gate.served_by(backend)
            for name, gate in self.gates.items()
            for backend in gate.backends
        }

    def deciding_together(self, gate: Gate) -> int:
        """Number of gates that share alpha with this one on agents, itself included: those of hub models.

        Gates of our attention accuse a change of ours; those of vLLM's backends accuse vLLM or aiter.
        """
        return sum(other.weights == "hub" for other in self._like(gate))

    def sharing(self, gate: Gate, when: Occasion) -> int:
        """Number of gates that share alpha with this one on an occasion: few gates of hub models run before a merge."""
        if gate.weights != "hub":
            return 1
        if when == "pre-merge" and gate.step.before_merge:
            return sum(other.step.before_merge for other in self._like(gate))
        return self.deciding_together(gate)

    def _like(self, gate: Gate) -> tuple[Gate, ...]:
        """All declared gates if this is one of them, else all gates of vLLM's backends."""
        others = tuple(self.of_backends.values())
        return others if gate in others else tuple(self.gates.values())


@functools.lru_cache(maxsize=1)
def read_backends() -> dict[str, Backend]:
    """The attention backends that the families declare, by vLLM's name.

    Raises:
        DeclarationError: The file is missing, is no YAML, or lacks a key of a backend.
    """
    try:
        declared = yaml.safe_load(BACKENDS.read_text(encoding="utf-8"))
        return {name: Backend.model_validate(keys) for name, keys in declared["backends"].items()}
    except ValidationError as error:
        why = first_problem(error)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise DeclarationError(why, where=str(BACKENDS), remedy="restore it from git, or compare with families/backends.py")


def load_gates(path: Path = EVALS / "gates.yaml") -> Gates:
    """Read gates.yaml.

    Raises:
        DeclarationError: missing, not YAML, an unknown or missing key, a value out of range, an unknown backend.
    """
    remedy = "compare with the attribute docstrings in hileval/gates/declare.py"
    try:
        declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError("cannot read the gates", where=str(path), remedy="restore it from git") from error
    except yaml.YAMLError as error:
        raise DeclarationError(f"not YAML: {str(error).splitlines()[0]}", where=str(path), remedy=remedy) from error
    try:
        gates = Gates.model_validate(declared)
    except ValidationError as error:
        raise DeclarationError(first_problem(error), where=str(path), remedy=remedy) from error
    if taken := sorted(set(gates.of_backends) & {*gates.gates, *gates.drifts}):
        raise DeclarationError(
            f"gate {taken[0]} has the name of one that `backends` makes", where=str(path), remedy="rename it"
        )
    return gates


def read_document_task(path: Path) -> DocumentTask:
    """Read the task file of a gate of kind `documents`.

    Raises:
        TaskError: Missing, not YAML, or a key that is missing, unknown or out of range; names it.
    """
    try:
        return DocumentTask.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        why = first_problem(error)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise TaskError(why, where=str(path), remedy="see evals/tasks/pocket_speech.yaml")
