"""The committed model: it loads offline, answers, and stops answering when its cache is damaged."""

import pytest

from hileval.engines import ModelFilesError
from hileval.engines.transformers_engine import TransformersEngine
from hileval.pocket.cli import MODEL, TEST_FILE, exact_match
from hileval.pocket.corrupt import KV_FAULTS, STATE_FAULT, plant
from hileval.pocket.questions import read_jsonl
from hilgate.errors import Exit, MisuseError

INVISIBLE = "K and V of one layer moved together (invisible to attention)"


@pytest.fixture(scope="module")
def engine():
    return TransformersEngine(MODEL)


@pytest.fixture(scope="module")
def rows():
    return read_jsonl(TEST_FILE)[:20]


def test_it_is_small(engine):
    assert sum(p.numel() for p in engine.model.parameters()) < 1_000_000
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4 << 20
    config = engine.model.config
    assert config.layer_types == ["linear_attention", "full_attention"] * 2
    assert config.hidden_size // config.num_attention_heads == 32


def test_it_answers_twenty_questions(engine, rows):
    assert exact_match(engine, rows) == 20


@pytest.mark.parametrize("fault", [fault for fault in KV_FAULTS if fault != INVISIBLE])
def test_a_damaged_kv_cache_shows(engine, rows, fault):
    remove = plant(engine.model, fault)
    try:
        assert exact_match(engine, rows) <= 15
    finally:
        remove()


def test_lost_state_costs_some_answers_only(engine):
    """The other limit: the look-up runs through attention, so a state fault costs about 13 points (measured on 200)."""
    rows = read_jsonl(TEST_FILE)[:40]
    remove = plant(engine.model, STATE_FAULT)
    try:
        assert exact_match(engine, rows) <= 38
    finally:
        remove()


def test_moving_keys_and_values_together_does_not_show(engine, rows):
    """Attention does not depend on the order of its slots: a limit of the gate, stated rather than hidden."""
    remove = plant(engine.model, INVISIBLE)
    try:
        assert exact_match(engine, rows) == 20
    finally:
        remove()


def test_missing_weights_and_unknown_faults(tmp_path, engine):
    with pytest.raises(ModelFilesError, match=r"config\.json is missing") as caught:
        TransformersEngine(tmp_path)
    assert caught.value.exit_status is Exit.CANNOT_RUN_HERE
    with pytest.raises(MisuseError, match="no fault"):
        plant(engine.model, "gremlins")
