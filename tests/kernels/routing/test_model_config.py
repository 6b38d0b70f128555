# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json: the names that families use, and what is refused because it does not say enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.errors import InvalidFileError, MisuseError
from pagedkv.routing.explain import Deployment, explain
from pagedkv.routing.model_config import Config

CONFIGS = Path(__file__).parent / "configs"


def explained_config(config, arch, **more):
    return explain(config, Deployment(arch=arch, providers=("pagedkv",), **more))


LLAMA = json.loads((CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "t5"}, InvalidFileError, "relative position bias"),
        (
            {"layer_types": ["chunked_attention"]},
            InvalidFileError,
            "layers of type chunked_attention are not described",
        ),
        ({"layer_types": "full_attention"}, InvalidFileError, "expected a list of words"),
        ({"sliding_window": 4096}, InvalidFileError, "does not say in which layers"),
        ({"num_attention_heads": None}, InvalidFileError, "says none of num_attention_heads, n_head, n_heads"),
        ({"num_key_value_heads": "8"}, InvalidFileError, "num_key_value_heads: got '8'"),
        ({"attn_logit_softcapping": -1}, InvalidFileError, "attn_logit_softcapping: got -1"),
        ({"num_hidden_layers": 10**9}, InvalidFileError, "num_hidden_layers: got 1000000000; expected at most 10000"),
        ({"hybrid_override_pattern": "M?"}, InvalidFileError, "letters"),
        (
            {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
            InvalidFileError,
            "recurrent layers that are not described",
        ),
        ({"torch_dtype": "int4"}, InvalidFileError, "dtype: got 'int4'"),
        ({"torch_dtype": None}, MisuseError, "--dtype"),
        ({"max_position_embeddings": None}, MisuseError, "--max-model-len"),
    ],
)
def test_a_config_that_does_not_say_enough(changes, error, message):
    with pytest.raises(error, match=message):
        explained_config(Config("config.json", LLAMA | changes), "gfx942")


GEMMA_2 = {"head_dim": 128, "query_pre_attn_scalar": 128, "attn_logit_softcapping": 50.0}


@pytest.mark.parametrize(
    ("changes", "full", "sliding"),
    [
        ({"sliding_window": 64, "use_sliding_window": False}, 32, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({"sliding_window": 64, "sliding_window_pattern": 6}, 5, 27),
        ({"sliding_window": 64, "model_type": "gemma2", "num_hidden_layers": 33} | GEMMA_2, 16, 17),
    ],
)
def test_which_layers_slide(changes, full, sliding):
    answer = explained_config(Config("config.json", LLAMA | changes), "gfx942")
    counts = {bool(layer.request.window): layer.kind.count for layer in answer.layers}
    assert (counts.get(False, 0), counts.get(True, 0)) == (full, sliding)


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"num_key_value_heads": None}, 32),
        ({"attn_config": {"kv_n_heads": 4}}, 4),
    ],
)
def test_kv_heads_of_other_families(changes, kv_heads):
    (layer,) = explained_config(Config("config.json", LLAMA | changes), "gfx942").layers
    assert layer.request.num_kv_heads == kv_heads
