# SPDX-License-Identifier: Apache-2.0
"""The committed models: they load offline, answer, and stop answering when their caches are damaged."""

import itertools

import numpy as np
import pytest
import torch
from support import cache_faults

from hileval.ask.documents import sound
from hileval.engines import EngineError, Prompt
from hileval.engines.transformers_engine import SpeechEngine, TransformersEngine
from hileval.pocket import models
from hileval.pocket.cli import MODELS, TEST_FILE, TEST_SEED
from hileval.pocket.data import documents, read_jsonl, speak
from hileval.pocket.models import START, build_tokenizer
from hileval.pocket.train import RECIPES, prompt_of

NAMES = (*models.ARCHITECTURES, "speech")
ROWS = [row for row in read_jsonl(TEST_FILE) if len(row.question.split()) in {25, 37, 45}][:40]
"""Questions of three lengths: engines answer prompts of one length in one batch, and the first 40 have 17 lengths."""
TEXTS = list(itertools.islice(documents(TEST_SEED), 40))
TOGETHER = {
    "packed": "K and V of one layer moved together (invisible to attention)",
    "speech": "cross K and V moved together (invisible to attention)",
}
VISIBLE = [
    *(("hybrid", fault) for fault in cache_faults.KV_FAULTS if "invisible" not in fault),
    *(("speech", fault) for fault in (*cache_faults.CROSS_FAULTS, cache_faults.SELF_FAULT) if "invisible" not in fault),
    ("packed", "V of one layer zeroed"),
    ("packed", "V of one layer read in another packing"),
    ("latent", "latent rows of every layer zeroed"),
    ("latent", "rope channels of every layer zeroed"),
    ("window", "V of one layer shifted by one block"),
    ("window", "window of 2 tokens instead of 8"),
    ("window", "no window"),
]


@pytest.fixture(scope="module")
def engines():
    kinds = {name: SpeechEngine if name == "speech" else TransformersEngine for name in NAMES}
    return {name: kind(MODELS / name) for name, kind in kinds.items()}


def exact_match(engine, rows):
    """How many rows an engine answers with the right `#### N`."""
    answers = engine.answer([prompt_of(row) for row in rows], max_tokens=32, stop=["Question:"])
    return sum(answer.text.endswith(f"#### {row.number}") for answer, row in zip(answers, rows, strict=True))


def transcribed(engine, texts):
    """How many documents an engine writes down without a mistake."""
    prompts = [Prompt(START, "audio", sound(speak(text).astype("<i2").tobytes())) for text in texts]
    answers = engine.answer(prompts, max_tokens=32, stop=[])
    return sum(answer.text == text for answer, text in zip(answers, texts, strict=True))


@pytest.fixture
def right(engines):
    """How many of the first n questions or documents a model answers, under a fault or none."""

    def count(name, n, fault=None):
        remove = cache_faults.plant(engines[name].model, fault) if fault else lambda: None
        try:
            return transcribed(engines[name], TEXTS[:n]) if name == "speech" else exact_match(engines[name], ROWS[:n])
        finally:
            remove()

    return count


@pytest.mark.parametrize("name", NAMES)
def test_they_are_small_and_answer_twenty_questions(right, name):
    assert sum(file.stat().st_size for file in (MODELS / name).iterdir()) < (1 if name == "speech" else 2.6) * 2**20
    assert right(name, 20) == 20


@pytest.mark.parametrize(("name", "fault"), VISIBLE)
def test_damage_shows(right, name, fault):
    assert right(name, 40, fault) <= 12 if name == "speech" else right(name, 20, fault) <= 15


def test_lost_state_costs_some_answers_only(right):
    """The other limit: the look-up runs through attention, so a state fault costs about 13 points (measured on 200)."""
    assert right("hybrid", 40, cache_faults.STATE_FAULT) <= 38


@pytest.mark.parametrize(("name", "n"), [("packed", 20), ("speech", 40)])
def test_moving_keys_and_values_together_does_not_show(right, name, n):
    """Attention does not depend on the order of its slots: a limit of the gate, stated rather than hidden."""
    assert right(name, n, TOGETHER[name]) == n


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_an_untrained_model_is_the_seeds(name):
    states = []
    for _ in range(2):
        torch.manual_seed(RECIPES[name].seed)
        states.append(models.build(name, build_tokenizer()).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", ["packed", "window"])
def test_the_first_layer_looks_one_and_two_tokens_back(name):
    torch.manual_seed(0)
    attention = models.build(name, build_tokenizer()).model.layers[0].self_attn
    query = attention.q_proj.weight.view(4, 32, -1)[:, :, 0].detach()
    key = attention.k_proj.weight.view(2, 32, -1)[0, :, 0].detach()
    turns = torch.arange(0, 6)[:, None] * (models.SLOW ** (-torch.arange(0, 32, 2) / 32))
    cos, sin = turns.cos(), turns.sin()
    for head in range(4):
        first, second = query[head, :16], query[head, 16:]
        score = ((first * cos - second * sin) * key[:16] + (second * cos + first * sin) * key[16:]).sum(-1)
        assert int(score.argmax()) == 1 + head % 2


def test_silence_is_no_document_and_endless_answers_are_cut(engines):
    prompts = [Prompt("<s>", "audio", sound / np.float32(32_768)) for sound in (np.zeros(16_000, int), speak(TEXTS[0]))]
    assert engines["speech"].answer(prompts[:1], max_tokens=24, stop=[])[0].text not in TEXTS
    (answer,) = engines["speech"].answer(prompts[1:], max_tokens=5, stop=[])
    assert (answer.finish_reason, answer.n_tokens) == ("length", 5)
    assert TEXTS[0].startswith(answer.text)


@pytest.mark.parametrize(
    "prompts",
    [
        ["text"],
        [Prompt("<s>", "image", None)],
        [Prompt("<s>", "audio", None, 1.1)],
        [Prompt("<s>", "audio", None), Prompt("</s>", "audio", None)],
    ],
)
def test_what_the_second_opinion_does_not_do_is_refused(engines, prompts):
    with pytest.raises(EngineError, match="only audio"):
        engines["speech"].answer(prompts, max_tokens=4, stop=[])
