# SPDX-License-Identifier: Apache-2.0
"""The first wrong layer is named; the engine's side is played by transformers in float32 with one weight spoilt."""

from __future__ import annotations

import copy

import pytest
import torch

from families import layers
from families.family import FAMILIES
from families.oracle import prompt

FAMILY = FAMILIES["granite-4.0-h"]
KINDS = ["state", "attention", "state", "attention"]
TOKENS = prompt(60, seed=3)


@pytest.fixture(scope="module")
def oracle(oracle_of):
    return oracle_of(FAMILY.name)


@pytest.fixture
def served(oracle, monkeypatch):
    """A second copy of the model, whose streams are taken for the engine's."""
    engine = copy.deepcopy(oracle)

    def streams(_llm, _family, tokens):
        return KINDS, layers.reference_streams(engine, tokens, exact=False)

    monkeypatch.setattr(layers, "engine_streams", streams)
    return engine.working


@pytest.mark.usefixtures("served")
def test_no_layer_of_a_right_model_is_named(oracle):
    assert layers.first_diverging(None, FAMILY, oracle, TOKENS) is None


@pytest.mark.parametrize("spoilt", range(4))
@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_spoilt_layer_is_named(spoilt, factor, oracle, served):
    with torch.no_grad():
        layers.decoder_layers(served)[spoilt].input_layernorm.weight.mul_(factor)
    named = layers.first_diverging(None, FAMILY, oracle, TOKENS)
    assert (named.index, named.kind) == (spoilt, KINDS[spoilt])


def test_encoder_and_decoder_are_refused(oracle_of):
    with pytest.raises(ValueError, match="2 lists of layers"):
        layers.decoder_layers(oracle_of("whisper").exact)
