# SPDX-License-Identifier: Apache-2.0
"""Questions and documents of pocket models, made from a seed: word problems in GSM8K's format, and spoken records.

Word problems: every person owns some of the same thing; the question names two or three of them. All others are
distractors, and the order in which people are introduced is not the order in which they are asked for, so an answer
needs one look-up per person in the context: attention over the KV cache, not only recurrent state. The rationale
restates what was looked up before it computes. Without the restatement a model of this size does not learn the task
(measured: 49 % exact match after twice the steps).

Documents: two to five lines, `Tom 7 pens`. Each word is a chord of two tones that lasts 40 ms; the first word comes
after a silence of varying length, so where a line is heard follows from what is heard and not from the decoder's
position alone. The sound is computed in integers from one table: the same samples on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hileval.engines import SAMPLING_RATE
from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt


NAMES = (
    "Ada",
    "Ann",
    "Ben",
    "Bob",
    "Cem",
    "Eva",
    "Ian",
    "Ivy",
    "Joe",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Sam",
    "Tom",
    "Zoe",
)
ITEMS = ("pens", "books", "coins", "cards", "apples", "eggs", "shells", "stamps")
MAX_COUNT = 9
"""Most things one person owns (fewest: 2, for the plural); the largest answer is three times that."""
PEOPLE = (4, 12)
"""Fewest and most people in one question."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its worked answer, as GSM8K stores it."""

    question: str
    answer: str
    """Rationale, a line break, `#### N`."""

    @property
    def number(self) -> int:
        """The final answer."""
        return int(self.answer.rsplit("#### ", 1)[1])

    @property
    def digest(self) -> str:
        """sha256 of the question text: how overlap between training and test questions is excluded."""
        return hashlib.sha256(self.question.encode()).hexdigest()


def make_problem(rng: random.Random, people: tuple[int, int] = PEOPLE, names: tuple[str, ...] = NAMES) -> Problem:
    """Draw one problem; the same generator state gives the same problem."""
    owners = rng.sample(names, rng.randint(*people))
    item = rng.choice(ITEMS)
    owns = {name: rng.randint(2, MAX_COUNT) for name in owners}
    story = " ".join(f"{name} has {owns[name]} {item}." for name in owners)
    kind = rng.choice(("sum of two", "difference", "sum of three"))
    asked = rng.sample(owners, 3 if kind == "sum of three" else 2)
    if kind == "difference":
        asked.sort(key=lambda name: -owns[name])
        more, fewer = asked
        ask = f"How many more {item} does {more} have than {fewer}?"
        working = f"{owns[more]} - {owns[fewer]} = {(result := owns[more] - owns[fewer])}"
    else:
        *first, last = asked
        ask = f"How many {item} do {', '.join(first)} and {last} have together?"
        result = sum(owns[name] for name in asked)
        working = f"{' + '.join(str(owns[name]) for name in asked)} = {result}"
    restated = " ".join(f"{name} has {owns[name]}." for name in asked)
    return Problem(question=f"{story} {ask}", answer=f"{restated} {working}\n#### {result}")


def problems(
    seed: int,
    *,
    people: tuple[int, int] = PEOPLE,
    names: tuple[str, ...] = NAMES,
    exclude: frozenset[str] = frozenset(),
) -> Iterator[Problem]:
    """Yield an endless stream of distinct problems, none of whose digests is in `exclude`."""
    rng = random.Random(seed)
    seen = set(exclude)
    while True:
        problem = make_problem(rng, people, names)
        if problem.digest not in seen:
            seen.add(problem.digest)
            yield problem


def write_jsonl(path: Path, rows: list[Problem]) -> None:
    """Write problems as GSM8K's JSON lines (`question`, `answer`)."""
    lines = [json.dumps({"question": row.question, "answer": row.answer}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_jsonl(path: Path) -> list[Problem]:
    """Read GSM8K's JSON lines.

    Raises:
        RecordsError: the file is missing or empty, or a line is not an object with exactly `question` and `answer`.
    """
    if not path.is_file():
        raise RecordsError("no question file", where=str(path), remedy="python -m hileval.pocket questions")
    rows: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append(Problem(question=row["question"], answer=row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordsError(
                "not a GSM8K record (question, answer)",
                where=f"{path}:{number}",
                remedy="restore the file from git or write it again: python -m hileval.pocket questions",
            ) from error
    if not rows:
        raise RecordsError("a question file without questions", where=str(path), remedy="restore it from git")
    return rows


SLOT = 640
"""Samples of a chord or of a unit of silence: 40 ms, four frames of the spectrogram, two tokens of the encoder."""
SLOTS = SAMPLING_RATE // SLOT
"""Slots that the encoder hears: one second."""
RECORDS = (2, 5)
"""Fewest and most lines of a document."""
COUNTS = tuple(str(n) for n in range(10))
TONES = (180, 360, 530, 710, 890, 1080, 1290, 1550, 1860, 2240)
"""Hertz: each in the middle of another of the extractor's 16 bands."""
LOUDNESS = 8_000
"""Amplitude of one tone, of 32,767."""
CHORDS = dict(zip((*NAMES, *COUNTS, *ITEMS), itertools.combinations(range(len(TONES)), 2), strict=False))
"""Word -> which two tones."""


class UnspeakableError(RecordsError):
    """A document holds a word without a chord, or is longer than what the encoder hears."""


def make_document(rng: random.Random) -> str:
    """Draw one document; the same generator state gives the same text, lines joined by line breaks."""
    names = rng.sample(NAMES, rng.randint(*RECORDS))
    return "\n".join(f"{name} {rng.choice(COUNTS)} {rng.choice(ITEMS)}" for name in names)


def documents(seed: int, *, exclude: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield an endless stream of distinct documents, none of which is in `exclude`."""
    rng = random.Random(seed)
    seen = set(exclude)
    while True:
        document = make_document(rng)
        if document not in seen:
            seen.add(document)
            yield document


def speak(text: str) -> npt.NDArray[np.int16]:
    """The sound of a document, [SAMPLING_RATE] int16.

    The silence before it is drawn from its text.

    Raises:
        UnspeakableError: A word has no chord, or there are more words than fit; names the word or the number.
    """
    words = text.split()
    if unknown := [word for word in words if word not in CHORDS]:
        raise UnspeakableError(
            f"no chord for {unknown[0]!r}", where=repr(text[:40]), remedy="see hileval.pocket.data.CHORDS"
        )
    room = SLOTS - len(words)
    if not words or room < 0:
        raise UnspeakableError(
            f"{len(words)} words where 1 to {SLOTS} can be heard", where=repr(text[:40]), remedy="shorten the document"
        )
    before = hashlib.sha256(text.encode()).digest()[0] % (room + 1)
    sound = np.zeros(SAMPLING_RATE, dtype=np.int64)
    for slot, word in enumerate(words, before):
        time = np.arange(slot * SLOT, (slot + 1) * SLOT)
        for tone in CHORDS[word]:
            sound[time] += _WAVE[TONES[tone] * time % SAMPLING_RATE]
    return sound.astype(np.int16)


def write_documents(path: Path, texts: list[str]) -> None:
    """Write documents as JSON lines (`id`, `text`)."""
    lines = (json.dumps({"id": f"{number:04}", "text": text}) for number, text in enumerate(texts))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_WAVE = np.rint(LOUDNESS * np.sin(2 * np.pi * np.arange(SAMPLING_RATE) / SAMPLING_RATE)).astype(np.int64)
"""One turn, a sample per hertz: a tone of f hertz steps through it by f."""
