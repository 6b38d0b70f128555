"""Documents of records, and how they sound: what the pocket speech model transcribes.

A document has two to five lines, `Tom 7 pens`. Each word is a chord of two tones that lasts 40 ms; the first word comes
after a silence of varying length, so where a line is heard follows from what is heard and not from the decoder's
position alone. The sound is computed in integers from one table: the same samples on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from typing import TYPE_CHECKING

import numpy as np

from hileval.pocket.questions import ITEMS, NAMES
from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

SAMPLING_RATE = 16_000
"""Samples per second."""
SLOT = 640
"""Samples of a chord or of a unit of silence: 40 ms, four frames of the spectrogram, two tokens of the encoder."""
SLOTS = SAMPLING_RATE // SLOT
"""What the encoder hears: one second."""
RECORDS = (2, 5)
"""Fewest and most lines of a document."""
COUNTS = tuple(str(n) for n in range(10))
TONES = (180, 360, 530, 710, 890, 1080, 1290, 1550, 1860, 2240)
"""Hertz: each in the middle of another of the extractor's 16 bands."""
LOUDNESS = 8_000
"""Of one tone, of 32,767."""
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
    """How a document sounds, [SAMPLING_RATE] int16.

    The silence before it is drawn from its text.

    Raises:
        UnspeakableError: A word has no chord, or there are more words than fit; names the word or the number.
    """
    words = text.split()
    if unknown := [word for word in words if word not in CHORDS]:
        raise UnspeakableError(f"no chord for {unknown[0]!r}", where=repr(text[:40]), remedy="see speech.CHORDS")
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
