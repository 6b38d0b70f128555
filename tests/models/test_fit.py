# SPDX-License-Identifier: Apache-2.0
"""`fit` against the numbers that the installed vLLM computes itself: every family, and published sizes on ranks.

And every model type that transformers knows: its layers are those that transformers makes, or it is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from models import engine

pytest.importorskip("vllm", reason="needs package:vllm")

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from families.family import FAMILIES
from families.processes import ENVIRONMENT
from pagedkv.device import INTERPRETED
from pagedkv.errors import InvalidFileError
from pagedkv.routing import model_types
from pagedkv.routing.explain import Deployment
from pagedkv.routing.fit import GIB, Budget, NotAHybridError, fit
from pagedkv.routing.model_config import layer_kinds, read_config, recurrent_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(360)]

CONFIGS = Path(__file__).parents[1] / "kernels/routing/configs"
GONE = {"plamo2", "bamba"}
"""Families that vLLM has removed."""

HYBRIDS = tuple(name for name, family in FAMILIES.items() if family.states and name not in GONE)
OTHERS = tuple(name for name, family in FAMILIES.items() if not family.states and family.attention != "cross")
"""An encoder-decoder wants its tokenizer before it tells its layers; tests/kernels/routing has one of them refused."""

SETTINGS = {
    "plain": {"enable_prefix_caching": False},
    "prefix": {"enable_prefix_caching": True},
    "drafts": {
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
    "fp8": {"enable_prefix_caching": True, "kv_cache_dtype": "fp8"},
}
RANKS = {
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
    "qwen3.5-27b": "Qwen3_5ForCausalLM",
    "qwen3.5-35b-a3b": "Qwen3_5MoeForCausalLM",
    "granite-4.0-h-tiny": "GraniteMoeHybridForCausalLM",
    "nemotron-h-8b": "NemotronHForCausalLM",
    "zamba2-1.2b": "Zamba2ForCausalLM",
    "falcon-h1-0.5b": "FalconH1ForCausalLM",
    "jamba-v0.1": "JambaForCausalLM",
    "lfm2-1.2b": "Lfm2ForCausalLM",
}
"""Published config: vLLM's class."""

OUTER = {"minicpm-v-4.6": "MiniCPMV4_6ForConditionalGeneration"}
"""Multimodal model around the language model of Qwen3.5: vLLM's class, which ignores its dtype of states."""

LFM2 = {"block_dim": 2048, "conv_dim": 2048, "conv_dim_out": 2048, "block_auto_adjust_ff_dim": False}
"""What vLLM reads beside the keys that are stored here."""

LENGTH = 2048
MEMORY = 8 * GIB


def cases():
    for name in HYBRIDS:
        for setting, arguments in SETTINGS.items():
            # The CPU platform has no prefix cache for MLA (with AMX alone), and then refuses to have asked for one.
            if arguments["enable_prefix_caching"] and "kv_lora_rank" in FAMILIES[name].config:
                continue
            yield f"{name}, {setting}", name, FAMILIES[name].architecture, 1, setting
    for name, architecture in OUTER.items():
        yield f"{name}, plain", name, architecture, 1, "plain"
    for name, architecture in RANKS.items():
        for tp in (1, 2, 4, 8):
            if (name, tp) == ("granite-4.0-h-tiny", 8):  # 12 heads
                continue
            yield f"{name}, {tp} ranks", name, architecture, tp, "prefix"


CASES = {name: rest for name, *rest in cases()}
STATELESS = {f"{name}, plain": [name, FAMILIES[name].architecture, 1, "plain"] for name in OTHERS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each config."""
    base = tmp_path_factory.mktemp("configs")
    for name in HYBRIDS + OTHERS:
        config = FAMILIES[name].make_config()
        config.architectures = [FAMILIES[name].architecture]
        config.save_pretrained(base / name)
    for name, architecture in RANKS.items():
        (base / name).mkdir()
        keys = json.loads((CONFIGS / f"{name}.json").read_text()) | {"architectures": [architecture]}
        keys |= keys.pop("text_config", {}) | (LFM2 if name.startswith("lfm2") else {})
        (base / name / "config.json").write_text(json.dumps(keys))
    for name, architecture in OUTER.items():
        config = AutoConfig.for_model("minicpmv4_6")
        config.architectures = [architecture]
        config.text_config.mamba_ssm_dtype = "float32"
        config.save_pretrained(base / name)
    return {folder.name: folder for folder in base.iterdir()}


@pytest.fixture(scope="module")
def planned(folders, tmp_path_factory):
    specs = {}
    for case, (name, architecture, tp, setting) in (CASES | STATELESS).items():
        arguments = {"dtype": "float16", "block_size": 16, "max_model_len": LENGTH} | SETTINGS[setting]
        if name in FAMILIES and not INTERPRETED:
            arguments |= FAMILIES[name].engine_gpu  # a prefill of MLA for heads of any size
        specs[case] = {
            "model": folders[name],
            "architecture": architecture,
            "tp": tp,
            "memory": MEMORY,
            "arguments": arguments,
        }
    folder = tmp_path_factory.mktemp("log")
    return engine.run(folder, specs, ENVIRONMENT, driver="models.memory")


def fitted(folder, tp=1, **arguments):
    """The same by our arithmetic; memory is all for the pool."""
    deployment = Deployment(
        arch="gfx942",
        providers=("pagedkv",),
        tp=tp,
        dtype="float16",
        max_seq_len=LENGTH,
        kv_cache_dtype=arguments.get("kv_cache_dtype", "auto"),
        drafts=arguments.get("speculative_config", {}).get("num_speculative_tokens", 0),
    )
    service = Budget(
        gpu="any",
        memory=MEMORY / GIB,
        weights=0.0,
        utilization=1,
        reserve=0,
        prefix_cache=arguments["enable_prefix_caching"],
    )
    return fit(read_config(folder), deployment, service)


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_vllms(case, planned, folders):
    name, _, tp, setting = CASES[case]
    theirs = planned[case]
    assert "error" not in theirs
    ours = fitted(folders[name], tp, **SETTINGS[setting])
    pages = ours.pages
    assert set(theirs["states"]) == {pages.state_bytes}
    assert len(theirs["states"]) + theirs["attention"] == sum(layer.kind.count for layer in ours.explanation.layers)
    assert set(theirs["page_bytes"]) == {pages.page_bytes}
    assert theirs["block_size"] == pages.block_size
    assert theirs["groups"] == pages.attention_groups + pages.state_groups
    assert theirs["num_blocks"] == ours.num_blocks
    assert theirs["full_sequences"] == pytest.approx(ours.full_sequences, rel=1e-9)
    if ours.prefix_unit:
        assert theirs["hit_unit"] == ours.prefix_unit
    at_most, one_more = theirs["refusals"].values()
    assert at_most == ""
    assert f"lower max_num_seqs to at most {ours.num_blocks}" in one_more


@pytest.mark.parametrize("case", STATELESS)
def test_what_has_no_states_is_no_hybrid(case, planned, folders):
    """vLLM finds no recurrent layer in it either."""
    assert planned[case]["states"] == []
    with pytest.raises(NotAHybridError, match="has no recurrent layer that is described here"):
        fitted(folders[STATELESS[case][0]], **SETTINGS["plain"])


HELD = {
    "full_attention": ["full"],
    "attention": ["full"],
    "sliding_attention": ["sliding"],
    "linear_attention": ["state"],
    "mamba": ["state"],
    "conv": ["state"],
    "hybrid": ["full", "state"],
    "moe": [],
    "mlp": [],
}
"""What layers hold, by the words of transformers."""

UNMADE = {"musicgen", "musicgen_melody", "vision-encoder-decoder"}
"""Types whose classes have no default."""

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - UNMADE)


def layers_of(made):
    """Layers of a config of transformers by what they hold."""
    words = getattr(made, "layer_types", None) or getattr(made, "layers_block_type", None)
    if words is None:
        slides = getattr(made, "sliding_window", None) and getattr(made, "use_sliding_window", True)
        words = ["sliding_attention" if slides else "full_attention"] * made.num_hidden_layers
        if not hasattr(made, "num_attention_heads"):
            words = ["mamba"] * made.num_hidden_layers
    return Counter(held for word in words for held in HELD[word])


@pytest.mark.parametrize("model_type", TYPES)
def test_no_layer_of_a_default_config_is_guessed(model_type, tmp_path):
    """An answer is of a known type or of listed layers, and has the layers and heads of transformers' class."""
    made = CONFIG_MAPPING[model_type]()
    made.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    try:
        kinds = layer_kinds(config)
    except InvalidFileError as error:
        assert f"where: {tmp_path / 'config.json'}" in str(error)  # noqa: PT017 - to refuse is right as well
        return
    made = made.get_text_config(decoder=True)
    assert (
        config.model_type in model_types.RULES or config.model_type in model_types.ENCODER_DECODERS or config.listed()
    )
    kinds = [kind for kind in kinds if kind.attn_type == "decoder" and kind.keeps != "nothing"]
    found = Counter()
    for kind in kinds:
        found["state" if kind.keeps == "state" else "sliding" if kind.window else "full"] += kind.count
    assert found == layers_of(made)
    for kind in kinds:
        if kind.keeps == "cache":
            heads = made.num_attention_heads
            kv_heads = 1 if getattr(made, "multi_query", False) else getattr(made, "num_key_value_heads", None) or heads
            assert kind.num_kv_heads == kv_heads
            assert kind.head_size == (getattr(made, "head_dim", None) or made.hidden_size // heads)


def answer(config):
    """Layers, but for the longest sequence, which the command asks for, and bytes of states; None where refused."""
    try:
        kinds = [replace(kind, max_seq_len=None) for kind in layer_kinds(config)]
        states = [kind for kind in kinds if kind.keeps == "state"]
        return kinds, [recurrent_state(config, tp=1, dtype="float16", ssm_dtype="float32").bytes for _ in states]
    except InvalidFileError:
        return None


@pytest.mark.parametrize("model_type", sorted(model_types.RULES.keys() & CONFIG_MAPPING.keys()))
def test_a_missing_key_is_not_guessed(model_type, tmp_path):
    """Where the class of transformers has a default, the answer without the key is the one of that default, or none."""
    made = CONFIG_MAPPING[model_type]()
    made.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    whole = answer(config)
    for key in config.keys.keys() - {"model_type", "layer_types", "layers_block_type"}:
        without = {name: value for name, value in config.keys.items() if name != key}
        assert answer(replace(config, keys=without)) in (whole, None), key
    if isinstance(getattr(type(made), "head_dim", None), int) and model_type not in model_types.LATENT:
        without = {name: value for name, value in config.keys.items() if name != "head_dim"}
        assert answer(replace(config, keys=without)) is None
