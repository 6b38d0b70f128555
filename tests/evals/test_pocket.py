"""The committed models: they load offline, answer, and stop answering when their caches are damaged."""

import pytest
import torch

from hileval.engines import ModelFilesError
from hileval.engines.transformers_engine import TransformersEngine
from hileval.pocket import damage, models
from hileval.pocket.cli import MODELS, TEST_FILE, exact_match
from hileval.pocket.data import read_jsonl
from hileval.pocket.models import build_tokenizer
from hileval.pocket.train import RECIPES
from hilgate.errors import Exit, MisuseError

VISIBLE = [
    ("hybrid", fault) for fault in damage.KV_FAULTS if "invisible" not in fault
] + [
    ("packed", "V of one layer zeroed"),
    ("packed", "V of one layer read in another packing"),
    ("latent", "latent rows of every layer zeroed"),
    ("latent", "rope channels of every layer zeroed"),
    ("window", "V of one layer shifted by one block"),
    ("window", "window of 2 tokens instead of 8"),
    ("window", "no window"),
]  # fmt: skip


@pytest.fixture(scope="module")
def engines():
    return {name: TransformersEngine(MODELS / name) for name in models.ARCHITECTURES}


@pytest.fixture(scope="module")
def rows():
    return read_jsonl(TEST_FILE)[:20]


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_they_are_small(name):
    assert sum(file.stat().st_size for file in (MODELS / name).iterdir()) < 2.6 * 2**20


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_they_answer_twenty_questions(engines, rows, name):
    assert exact_match(engines[name], rows) == 20


@pytest.mark.parametrize(("name", "fault"), VISIBLE)
def test_damage_shows(engines, rows, name, fault):
    remove = damage.plant(engines[name].model, fault)
    try:
        assert exact_match(engines[name], rows) <= 15
    finally:
        remove()


def test_lost_state_costs_some_answers_only(engines):
    """The other limit: the look-up runs through attention, so a state fault costs about 13 points (measured on 200)."""
    rows = read_jsonl(TEST_FILE)[:40]
    remove = damage.plant(engines["hybrid"].model, damage.STATE_FAULT)
    try:
        assert exact_match(engines["hybrid"], rows) <= 38
    finally:
        remove()


def test_moving_keys_and_values_together_does_not_show(engines, rows):
    """Attention does not depend on the order of its slots: a limit of the gate, stated rather than hidden."""
    model = engines["packed"].model
    fault = next(fault for fault in damage.faults(model) if "moved together" in fault)
    remove = damage.plant(model, fault)
    try:
        assert exact_match(engines["packed"], rows) == 20
    finally:
        remove()


def test_a_removed_setting_fault_leaves_nothing(engines, rows):
    model = engines["window"].model
    damage.plant(model, "no window")()
    assert model.config.sliding_window == 8
    assert exact_match(engines["window"], rows[:5]) == 5


def test_another_packing_moves_values_within_their_blocks():
    values = torch.arange(2.0 * 40 * 32).reshape(1, 2, 40, 32)
    keys, damaged = damage.PACKED_FAULTS["V of one layer read in another packing"](values, values)
    assert keys is values
    assert not torch.equal(damaged[:, :, :32], values[:, :, :32])
    assert torch.equal(damaged[:, :, :32].flatten().sort()[0], values[:, :, :32].flatten().sort()[0])
    assert torch.equal(damaged[:, :, 32:], values[:, :, 32:]), "a block that is not full stays"


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_an_untrained_model_is_the_seeds(name):
    tokenizer = build_tokenizer()
    states = []
    for _ in range(2):
        torch.manual_seed(RECIPES[name].seed)
        states.append(models.build(name, tokenizer).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", ["packed", "window"])
def test_the_first_layer_starts_by_looking_one_and_two_tokens_back(name):
    torch.manual_seed(0)
    model = models.build(name, build_tokenizer())
    attention = model.model.layers[0].self_attn
    query = attention.q_proj.weight.view(4, 32, -1)[:, :, 0].detach()
    key = attention.k_proj.weight.view(2, 32, -1)[0, :, 0].detach()
    turns = torch.arange(0, 6)[:, None] * (models.SLOW ** (-torch.arange(0, 32, 2) / 32))
    cos, sin = turns.cos(), turns.sin()
    for head in range(4):
        first, second = query[head, :16], query[head, 16:]
        score = ((first * cos - second * sin) * key[:16] + (second * cos + first * sin) * key[16:]).sum(-1)
        assert int(score.argmax()) == 1 + head % 2


def test_missing_weights_and_unknown_faults(tmp_path, engines):
    with pytest.raises(ModelFilesError, match=r"config\.json is missing") as caught:
        TransformersEngine(tmp_path)
    assert caught.value.exit_status is Exit.CANNOT_RUN_HERE
    with pytest.raises(MisuseError, match="no fault"):
        damage.plant(engines["hybrid"].model, "gremlins")
