# SPDX-License-Identifier: Apache-2.0
"""Documents to be parsed: read and checked, asked of an encoder-decoder model, and scored whole and line by line.

A task file says which documents. Spoken ones are made of JSON lines in this repository (`hileval.pocket.data`); images
lie in a folder that an environment variable names, each beside its expected text: `page-07.png`, `page-07.md`.

Which score may be gated follows from the paired test: it treats questions as independent. Lines of one document are
not: one wrong token changes what is written after it, and a damaged cache spoils a document, not a line. So a question
is a document. It has two binary scores that depend on nothing else: whether all of it is right (`strict`), and whether
one line is right that was drawn before anything was answered (`flexible`), for pages too long to be ever right as a
whole. The share of all right lines is reported beside them and never tested.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hileval.engines import ModelFilesError, Prompt, bounded
from hileval.gates.declare import EVALS
from hileval.records.answers import INVALID, Sample, ScoreError, flags_of
from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.model.record import json_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hileval.engines import Answer, Engine
    from hileval.gates.declare import DocumentTask
    from hileval.gates.resolve import ResolvedGate


IMAGES = (".png", ".jpg", ".jpeg")
TEXT = ".md"
REMEDY = "see docs/reference/accuracy-gates.md, Parsing models"


class DocumentError(RecordsError):
    """A document that cannot be asked: no partner, no text, two of one id, unreadable, or longer than the answer."""


@dataclass(frozen=True, slots=True)
class TaskDocument:
    """One document.

    Attributes:
        id: Its name; unique in the task.
        text: What is to be written.
        data: Encoded image as in its file, or samples [n] of a sound at 16 kHz, int16, little end first.
    """

    id: str
    text: str
    data: bytes

    @property
    def digest(self) -> str:
        """sha256 of text and data."""
        text = self.text.encode()
        return hashlib.sha256(b"%d\n%b%b" % (len(text), text, self.data)).hexdigest()


def data_folder(variable: str, path: Path) -> Path:
    """The folder that an environment variable names, for the task in `path`.

    Raises:
        CannotRunHereError: The variable is not set, or names no folder.
    """
    folder = os.environ.get(variable)
    if not folder or not Path(folder).is_dir():
        raise CannotRunHereError(
            f"{variable} names no folder", where=str(path), remedy=f"set {variable} to the folder that holds its data"
        )
    return Path(folder)


def read_documents(task: DocumentTask, path: Path) -> tuple[TaskDocument, ...]:
    """Every document of a task, in the order of their ids.

    Raises:
        CannotRunHereError: The environment variable names no folder.
        DocumentError: See the class; names document and field.
    """
    if task.texts is not None:
        where, sources = EVALS / task.texts, _spoken(EVALS / task.texts)
    else:
        where = data_folder(task.data_folder or "", path)
        sources = _images(where)
    documents: dict[str, TaskDocument] = {}
    digests: dict[str, str] = {}
    for document in sources:
        if document.id in documents:
            raise DocumentError(f"id: {document.id!r} occurs twice", where=str(where), remedy="rename or remove one")
        if not lines_of(document.text):
            raise DocumentError(
                f"text: that of {document.id!r} is empty", where=str(where), remedy="write down what is to be read"
            )
        if (twin := digests.setdefault(document.digest, document.id)) != document.id:
            raise DocumentError(
                f"id: {document.id!r} and {twin!r} are the same document", where=str(where), remedy="remove one"
            )
        documents[document.id] = document
    if not documents:
        raise DocumentError("no document", where=str(where), remedy=REMEDY)
    return tuple(documents[name] for name in sorted(documents))


def _spoken(file: Path) -> Iterator[TaskDocument]:
    from hileval.pocket.data import speak

    try:
        lines = list(json_lines(file))
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {type(error).__name__}", where=str(file), remedy="restore it from git"
        ) from error
    for number, line in lines:
        try:
            row = json.loads(line)
            name, text = row["id"], row["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DocumentError(
                f"not a document (id, text): {error!r:.60}", where=f"{file}:{number}", remedy="restore it from git"
            ) from error
        for field, value in (("id", name), ("text", text)):
            if not isinstance(value, str):
                raise DocumentError(f"{field}: {value!r:.40} is no string", where=f"{file}:{number}", remedy=REMEDY)
        yield TaskDocument(name, text, speak(text).astype("<i2").tobytes() if text.strip() else b"")


def _images(folder: Path) -> Iterator[TaskDocument]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    images = [file for file in files if file.suffix.lower() in IMAGES]
    texts = {file.stem: file for file in files if file.suffix.lower() == TEXT}
    if alone := sorted(texts.keys() - {file.stem for file in images}):
        raise DocumentError(f"image: none beside {texts[alone[0]].name}", where=str(folder), remedy=REMEDY)
    for file in images:
        if file.stem not in texts:
            raise DocumentError(f"text: no {file.stem}{TEXT} beside {file.name}", where=str(folder), remedy=REMEDY)
        try:
            text, data = texts[file.stem].read_text(encoding="utf-8"), file.read_bytes()
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"text: {texts[file.stem].name} is not UTF-8", where=str(folder), remedy="save it as UTF-8"
            ) from error
        try:
            picture(data)
        except Exception as error:  # Pillow raises whatever a format's reader does
            raise DocumentError(
                f"image: {file.name} cannot be read: {error}", where=str(folder), remedy="save it again"
            ) from error
        yield TaskDocument(file.stem, text, data)


def picture(data: bytes) -> Any:
    """The image in a file's bytes, as Pillow's RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def sound(data: bytes) -> Any:
    """The sound of `TaskDocument.data`, [samples] float32 in [-1, 1)."""
    import numpy as np

    return np.frombuffer(data, dtype="<i2").astype(np.float32) / 32_768


@dataclass(frozen=True, slots=True)
class LineScore:
    """Score of an answer.

    Attributes:
        whole: Every line right, none missing, none too many.
        drawn: The drawn line is right.
        right: Number of right lines.
        lines: Number of lines.
    """

    whole: bool
    drawn: bool
    right: int
    lines: int


def lines_of(text: str) -> list[str]:
    """Lines as they are compared: Unicode in its composed form, without blanks at the end, none empty."""
    lines = (line.rstrip() for line in unicodedata.normalize("NFC", text).splitlines())
    return [line for line in lines if line]


def drawn_line(doc_hash: str, lines: int) -> int:
    """Number of the line drawn of a document: a function of the document alone, so every run is judged by the same."""
    return int(doc_hash[:16], 16) % lines


def score_lines(target: str, answer: str, doc_hash: str) -> LineScore:
    """Compare an answer with the expected text, which has at least one line."""
    expected, written = lines_of(target), lines_of(answer)
    right = matching_lines(expected, written)
    return LineScore(expected == written, right[drawn_line(doc_hash, len(expected))], sum(right), len(expected))


def matching_lines(wanted: Sequence[str], written: Sequence[str]) -> list[bool]:
    """For each wanted line, whether it stands in a longest common subsequence: a line left out costs itself alone.

    Of several longest ones, the one that takes lines as early as it can.
    """
    rows, columns = len(wanted), len(written)
    longest = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            longest[i][j] = (
                longest[i + 1][j + 1] + 1 if wanted[i] == written[j] else max(longest[i + 1][j], longest[i][j + 1])
            )
    matched = [False] * rows
    i = j = 0
    while i < rows and j < columns:
        if wanted[i] == written[j]:
            matched[i] = True
            i, j = i + 1, j + 1
        elif longest[i + 1][j] > longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return matched


class DocumentQuestions:
    """Documents on an engine: the encoder is shown each, and what the decoder writes is compared with its text.

    Attributes:
        identity: What a baseline must share.
        available: How many documents the task holds.
        engine: Started when the first document is asked.
    """

    def __init__(self, gate: ResolvedGate) -> None:
        """Read and check every document; nothing expensive starts yet.

        Raises:
            TaskError: The task file is wrong.
            DocumentError: A document cannot be asked.
            CannotRunHereError: The documents or the model are not on this machine.
        """
        self._gate, self._start = gate.declared, gate.start
        self._task = gate.documents
        self._documents = read_documents(self._task, gate.task_file)
        _require_room(gate, self._documents)
        self.identity = gate.identity
        self.available = len(self._documents)
        self.engine: Engine | None = None

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:  # noqa: ARG002
        """Answers to these documents, in their order.

        Raises:
            ScoreError: The engine gave another number of answers.
            HilgateError: Whatever the engine raises.
        """
        self.engine = self.engine or self._start()
        prompts = [self._prompt(self._documents[number]) for number in ids]
        raw = self.engine.answer(prompts, max_tokens=self._gate.max_gen_toks, stop=[])
        answers = bounded(raw, self._gate.max_gen_toks)
        if len(answers) != len(ids):
            raise ScoreError(f"{len(answers)} answers to {len(ids)} documents", remedy="repeat the run")
        pairs = zip(ids, answers, strict=True)
        return [_sample(number, self._documents[number], self._task, answer) for number, answer in pairs]

    def _prompt(self, document: TaskDocument) -> Prompt:
        task = self._task
        media = sound(document.data) if task.modality == "audio" else picture(document.data)
        return Prompt(task.prompt, task.modality, media, task.repetition_penalty)


def _sample(number: int, document: TaskDocument, task: DocumentTask, answer: Answer) -> Sample:
    result = score_lines(document.text, answer.text, document.digest)
    wanted = lines_of(document.text)
    # Flags that the right answer has as well say nothing: a page may hold no number, or the same row many times.
    excused = flags_of(document.text, finish_reason="stop")
    flags = flags_of(answer.text, finish_reason=answer.finish_reason, non_finite=answer.non_finite)
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
        flexible=wanted[drawn_line(document.digest, len(wanted))] if result.drawn else INVALID,
        strict_correct=result.whole,
        flexible_correct=result.drawn,
        lines=result.lines,
        lines_right=result.right,
        flags=tuple(flag for flag in flags if flag not in excused),
    )


def _require_room(gate: ResolvedGate, documents: Sequence[TaskDocument]) -> None:
    """Refuse a document whose text does not fit into an answer: it could never be right.

    Raises:
        DocumentError: Names document and field.
        ModelFilesError: The model has no tokenizer.json.
    """
    from tokenizers import Tokenizer  # not transformers': it imports Triton before the engine has said how it runs

    declared, file = gate.declared, gate.folder / "tokenizer.json"
    if not file.is_file():
        raise ModelFilesError("tokenizer.json is missing", where=declared.model, remedy="fetch the whole model")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for document in documents:
        needed = len(tokenizer.encode(document.text, add_special_tokens=False).ids) + 1
        if needed > declared.max_gen_toks:
            raise DocumentError(
                f"text: that of {document.id!r} takes {needed} tokens with its end, and max_gen_toks is "
                f"{declared.max_gen_toks}",
                where=declared.title,
                remedy="split the document, or raise max_gen_toks if the model can write as much",
            )
