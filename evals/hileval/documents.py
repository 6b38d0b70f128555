"""Documents to be parsed: what the encoder is shown, and the text that is right. Checked before anything starts.

A task file says which. Spoken ones are made of JSON lines in this repository (`hileval.pocket.speech`); images lie in a
folder that an environment variable names, each beside its expected text: `page-07.png`, `page-07.md`.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from hileval.declare import EVALS
from hileval.lines import lines_of
from hileval.task import TaskError, data_folder
from hilgate.errors import RecordsError
from hilgate.model import Noun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGES = (".png", ".jpg", ".jpeg")
TEXT = ".md"
REMEDY = "see evals/README.md, Parsing models"


class DocumentError(RecordsError):
    """A document that cannot be asked: no partner, no text, two of one id, unreadable, or longer than the answer."""


class DocumentTask(Noun):
    """A task file of a gate of kind `documents`."""

    task: str = Field(min_length=1)
    modality: Literal["audio", "image"]
    """What the encoder is shown."""
    prompt: str = Field(min_length=1)
    """What the decoder begins with."""
    texts: str | None = None
    """JSON lines (`id`, `text`), relative to evals/, which are spoken."""
    data_folder: str | None = None
    """Environment variable that names a folder of images and texts."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """The one that the model is published to be used with."""
    scoring: Literal[1] = 1
    """Version of `hileval.lines`: scores of another one are not comparable."""

    @model_validator(mode="after")
    def _one_source(self) -> DocumentTask:
        if (self.modality == "audio") != (self.texts is not None) or (self.texts is None) != bool(self.data_folder):
            raise ValueError("audio needs `texts` alone, image needs `data_folder` alone")
        return self


@dataclass(frozen=True, slots=True)
class Document:
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


def read_task(path: Path) -> DocumentTask:
    """Read a task file.

    Raises:
        TaskError: Missing, not YAML, or a key that is missing, unknown or out of range; names it.
    """
    try:
        return DocumentTask.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'task'}: {first['msg']}"
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise TaskError(why, where=str(path), remedy="see evals/tasks/pocket_speech.yaml")


def read_documents(task: DocumentTask, path: Path) -> tuple[Document, ...]:
    """Every document of a task, in the order of their ids.

    Raises:
        CannotRunHereError: The environment variable names no folder.
        DocumentError: See the class; names document and field.
    """
    if task.texts is not None:
        where, found = EVALS / task.texts, _spoken(EVALS / task.texts)
    else:
        where = data_folder(task.data_folder, path)
        found = _images(where)
    documents: dict[str, Document] = {}
    digests: dict[str, str] = {}
    for document in found:
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


def _spoken(file: Path) -> Iterator[Document]:
    from hileval.pocket.speech import speak

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(
            f"cannot be read: {type(error).__name__}", where=str(file), remedy="restore it from git"
        ) from error
    for number, line in enumerate(lines, 1):
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
        yield Document(name, text, speak(text).astype("<i2").tobytes() if text.strip() else b"")


def _images(folder: Path) -> Iterator[Document]:
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
        yield Document(file.stem, text, data)


def picture(data: bytes) -> Any:
    """The image in a file's bytes, as Pillow's RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def sound(data: bytes) -> Any:
    """The sound of `Document.data`, [samples] float32 in [-1, 1)."""
    import numpy as np

    return np.frombuffer(data, dtype="<i2").astype(np.float32) / 32_768
