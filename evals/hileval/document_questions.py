"""The questions of a gate of kind `documents`: one per document, beside lm-eval's of `hileval.harness`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from hileval.broken import flags_of
from hileval.documents import DocumentError, picture, read_documents, read_task, sound
from hileval.engines import ModelFilesError, Prompt, require_model_files
from hileval.harness import INVALID, ScoreError, TaskQuestions
from hileval.hub import snapshot, weights_sha
from hileval.lines import drawn, lines_of, score
from hileval.records import Identity, Sample
from hileval.task import sha256_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hileval.declare import Gate
    from hileval.documents import Document, DocumentTask
    from hileval.engines import Answer, Engine

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""What turns sound, images and text into the model's input."""


def questions_of(gate: Gate, start: Callable[[], Engine]) -> TaskQuestions | DocumentQuestions:
    """The questions of a gate, of either kind.

    Raises:
        HilgateError: See the classes.
    """
    return DocumentQuestions(gate, start) if gate.kind == "documents" else TaskQuestions(gate, start)


class DocumentQuestions:
    """Documents on an engine: the encoder is shown each, and what the decoder writes is compared with its text.

    Attributes:
        identity: What a baseline must share.
        available: How many documents the task holds.
        engine: Started when the first document is asked.
    """

    def __init__(self, gate: Gate, start: Callable[[], Engine]) -> None:
        """Read and check every document; nothing expensive starts yet.

        Raises:
            TaskError: The task file is wrong.
            DocumentError: A document cannot be asked.
            CannotRunHereError: The documents or the model are not on this machine.
        """
        path = gate.path(gate.task)
        self._task = read_task(path)
        self._documents = read_documents(self._task, path)
        if gate.weights == "repository":
            require_model_files(gate.path(gate.model))
        self.identity = _identify(gate, self._task)
        _require_room(gate, self._documents)
        self.available = len(self._documents)
        self._gate, self._start = gate, start
        self.engine: Engine | None = None

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:  # noqa: ARG002
        """Answers to these documents, in their order.

        Raises:
            ScoreError: The engine gave another number of answers.
            HilgateError: Whatever the engine raises.
        """
        self.engine = self.engine or self._start()
        prompts = [self._prompt(self._documents[one]) for one in ids]
        answers = self.engine.answer(prompts, max_tokens=self._gate.max_gen_toks, stop=[])
        if len(answers) != len(ids):
            raise ScoreError(f"{len(answers)} answers to {len(ids)} documents", remedy="repeat the run")
        return [_sample(one, self._documents[one], self._task, got) for one, got in zip(ids, answers, strict=True)]

    def _prompt(self, document: Document) -> Prompt:
        task = self._task
        media = sound(document.data) if task.modality == "audio" else picture(document.data)
        return Prompt(task.prompt, task.modality, media, task.repetition_penalty)


def _sample(number: int, document: Document, task: DocumentTask, answer: Answer) -> Sample:
    result = score(document.text, answer.text, document.digest)
    wanted = lines_of(document.text)
    # What the right answer would be blamed for says nothing: a page may hold no number, or one row many times.
    excused = flags_of(document.text, finish_reason="stop")
    found = flags_of(answer.text, finish_reason=answer.finish_reason, non_finite=answer.non_finite)
    return Sample(
        doc_id=number,
        doc_hash=document.digest,
        prompt_hash=hashlib.sha256(task.prompt.encode() + document.data).hexdigest(),
        question=document.id,
        target=" / ".join(wanted),
        text=answer.text,
        finish_reason=answer.finish_reason,
        n_tokens=answer.n_tokens,
        non_finite=answer.non_finite,
        strict=" / ".join(lines_of(answer.text)),
        flexible=wanted[drawn(document.digest, len(wanted))] if result.drawn else INVALID,
        strict_correct=result.whole,
        flexible_correct=result.drawn,
        lines=result.lines,
        lines_right=result.right,
        flags=tuple(flag for flag in found if flag not in excused),
    )


def _folder(gate: Gate) -> Path:
    return snapshot(gate.model, gate.revision) if gate.weights == "hub" else gate.path(gate.model)


def _identify(gate: Gate, task: DocumentTask) -> Identity:
    """What this run would have to share with a baseline; lm-eval has no part in it."""
    folder = _folder(gate)
    weights = sorted(folder.glob("*.safetensors"))
    generation = {"repetition_penalty": task.repetition_penalty, "temperature": 0, "max_gen_toks": gate.max_gen_toks}
    return Identity(
        model=gate.model,
        revision=gate.revision,
        weights=weights_sha(folder) if gate.weights == "hub" else sha256_files(*weights, folder / "config.json"),
        tokenizer=sha256_files(*(folder / name for name in TOKENIZER_FILES)),
        chat_template=sha256_files(folder / "chat_template.jinja"),
        task=hashlib.sha256(json.dumps(task.model_dump(), sort_keys=True).encode()).hexdigest(),
        num_fewshot=0,
        fewshot="none",
        generation=json.dumps(generation, sort_keys=True),
        lm_eval="none",
    )


def _require_room(gate: Gate, documents: Sequence[Document]) -> None:
    """Refuse a document whose text does not fit into an answer: it could never be right.

    Raises:
        DocumentError: Names document and field.
        ModelFilesError: The model has no tokenizer.json.
    """
    from tokenizers import Tokenizer  # not transformers': it imports Triton before the engine has said how it runs

    file = _folder(gate) / "tokenizer.json"
    if not file.is_file():
        raise ModelFilesError("tokenizer.json is missing", where=gate.model, remedy="fetch the whole model")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for document in documents:
        needed = len(tokenizer.encode(document.text, add_special_tokens=False).ids) + 1
        if needed > gate.max_gen_toks:
            raise DocumentError(
                f"text: that of {document.id!r} takes {needed} tokens with its end, and max_gen_toks is "
                f"{gate.max_gen_toks}",
                where=gate.title,
                remedy="split the document, or raise max_gen_toks if the model can write as much",
            )
