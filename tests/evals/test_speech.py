"""The pocket speech model and its documents: what is heard, what is written, and what damaged caches leave of it."""

import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hileval.engines import EngineError, Prompt
from hileval.engines.speech_engine import SpeechEngine
from hileval.pocket import damage, data
from hileval.pocket.cli import MODELS, SPEECH_FILE, TEST_QUESTIONS, TEST_SEED, reserved_documents, transcribed
from hileval.pocket.data import documents, make_document, speak
from hileval.pocket.models import build_tokenizer

INVISIBLE = "cross K and V moved together (invisible to attention)"
TOKENIZER = build_tokenizer("speech")
TEXTS = list(itertools.islice(documents(TEST_SEED), 40))


@pytest.fixture(scope="module")
def engine():
    return SpeechEngine(MODELS / "speech")


TIME = np.arange(data.SLOT) / data.SAMPLING_RATE
LISTEN = np.exp(-2j * np.pi * np.outer(data.TONES, TIME))


def heard(sound):
    """The words of a sound, by Fourier transform of each slot: nothing of what made it."""
    words = {chord: word for word, chord in data.CHORDS.items()}
    found = []
    for slot in sound.reshape(-1, data.SLOT).astype(float):
        if slot.any():
            loud = np.argsort(abs(LISTEN @ slot))
            found.append(words[tuple(sorted(loud[-2:].tolist()))])
    return found


@settings(deadline=None)  # the first one takes as long as a busy machine lets it
@given(st.integers(0, 2**32))
def test_a_document_can_be_heard_in_its_sound(seed):
    text = make_document(random.Random(seed))
    sound = speak(text)
    assert sound.dtype == np.int16
    assert heard(sound) == text.split()
    lines = [line.split() for line in text.split("\n")]
    assert 2 <= len(lines) <= 5
    assert len({name for name, _, _ in lines}) == len(lines)


@given(st.integers(0, 2**32))
def test_the_tokenizer_loses_nothing(seed):
    text = make_document(random.Random(seed))
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == 4 * len(text.split("\n")) - 1


def test_documents_begin_at_various_times():
    starts = {int(np.flatnonzero(speak(text).reshape(-1, data.SLOT).any(1))[0]) for text in TEXTS}
    assert len(starts) >= 10


def test_the_same_samples_everywhere():
    """No sample of the table is near a half, so that no machine's sine rounds it otherwise."""
    exact = data.LOUDNESS * np.sin(2 * np.pi * np.arange(data.SAMPLING_RATE) / data.SAMPLING_RATE)
    doubled = np.abs(exact % 1 - 0.5)
    assert doubled[np.abs(exact) > 0].min() > 1e-6
    digest = hashlib.sha256(speak("Tom 7 pens").astype("<i2").tobytes()).hexdigest()
    assert digest == "a726f3411e8047a80dd8b3ad994f6f6fffdb6a3f423e52b982633784a255d68f"


def test_every_word_has_a_chord_of_its_own():
    assert len(set(data.CHORDS.values())) == len(data.CHORDS) == 34


def test_the_committed_documents_are_the_seeds():
    assert reserved_documents() == frozenset(itertools.islice(documents(TEST_SEED), TEST_QUESTIONS))
    assert len(SPEECH_FILE.read_text().splitlines()) == TEST_QUESTIONS


def test_it_is_small():
    assert sum(file.stat().st_size for file in (MODELS / "speech").iterdir()) < 2**20


def test_it_writes_down_forty_documents(engine):
    assert transcribed(engine, TEXTS) == 40


@pytest.mark.parametrize("fault", [fault for fault in (*damage.CROSS_FAULTS, damage.SELF_FAULT) if fault != INVISIBLE])
def test_damage_shows(engine, fault):
    remove = damage.plant(engine.model, fault)
    try:
        assert transcribed(engine, TEXTS) <= 12
    finally:
        remove()


def test_moving_keys_and_values_together_does_not_show_and_a_removed_fault_leaves_nothing(engine):
    for fault in (INVISIBLE, "cross V zeroed"):
        remove = damage.plant(engine.model, fault)
        if fault == INVISIBLE:
            assert transcribed(engine, TEXTS) == 40
        remove()
    assert transcribed(engine, TEXTS) == 40


def test_silence_is_no_document(engine):
    (answer,) = engine.answer([Prompt("<s>", "audio", np.zeros(16_000, np.float32))], max_tokens=24, stop=[])
    assert answer.text not in TEXTS
    assert transcribed(engine, TEXTS[:3]) == 3


@pytest.mark.parametrize(
    "prompts",
    [
        ["text"],
        [Prompt("<s>", "image", None)],
        [Prompt("<s>", "audio", None, 1.1)],
        [Prompt("<s>", "audio", None), Prompt("</s>", "audio", None)],
    ],
)
def test_what_the_second_opinion_does_not_do_is_refused(engine, prompts):
    with pytest.raises(EngineError, match="only sounds"):
        engine.answer(prompts, max_tokens=4, stop=[])


def test_an_answer_that_does_not_end_is_cut(engine):
    prompt = Prompt("<s>", "audio", speak(TEXTS[0]).astype(np.float32) / 32_768)
    (answer,) = engine.answer([prompt], max_tokens=5, stop=[])
    assert (answer.finish_reason, answer.n_tokens) == ("length", 5)
    assert TEXTS[0].startswith(answer.text)
