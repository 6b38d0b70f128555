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


class _Compiled(torch.nn.Module):
    """A compiled model of vLLM: its layers are called only where it runs uncompiled."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.do_not_compile = False

    def forward(self, rows):
        if not self.do_not_compile:
            return rows
        for layer in self.layers:
            rows = layer(rows)
        return rows


class _Served:
    """The part of vLLM's `LLM` that a comparison of layers asks for; `graph` is a step that is replayed."""

    def __init__(self, graph=False):
        self.model, self.graph = _Compiled(), graph

    def apply_model(self, function):
        return [function(self.model)]

    def reset_prefix_cache(self):
        """Nothing is cached."""

    def generate(self, prompts, *_args, **_kwargs):
        if not self.graph:
            self.model(torch.ones(len(prompts[0]["prompt_token_ids"]), 4))


def test_layers_of_a_compiled_model_are_seen():
    pytest.importorskip("vllm", reason="needs package:vllm")
    served = _Served()
    kinds, streams = layers.engine_streams(served, FAMILY, TOKENS[:5])
    assert (kinds, [rows.shape for rows in streams]) == (["mlp"] * 2, [(5, 4)] * 2)
    assert served.model.do_not_compile is False
    served.generate([{"prompt_token_ids": TOKENS}])
    assert [len(layer._forward_hooks) for layer in served.model.layers] == [0, 0]


def test_a_prompt_that_is_all_graphs_is_refused_by_name():
    pytest.importorskip("vllm", reason="needs package:vllm")
    with pytest.raises(ValueError, match="5 tokens: every step ran as a captured graph"):
        layers.engine_streams(_Served(graph=True), FAMILY, TOKENS[:5])
