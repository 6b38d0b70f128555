# SPDX-License-Identifier: Apache-2.0
"""`fit` against the numbers that the installed vLLM computes itself: every family, and published sizes on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import engine

pytest.importorskip("vllm", reason="needs package:vllm")

from families.family import FAMILIES
from families.processes import ENVIRONMENT
from pagedkv.routing.explain import Deployment
from pagedkv.routing.fit import GIB, Budget, NotAHybridError, fit
from pagedkv.routing.model_config import read_config

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

LFM2 = {"block_dim": 2048, "conv_dim": 2048, "conv_dim_out": 2048, "block_auto_adjust_ff_dim": False}
"""What vLLM reads beside the keys that are stored here."""

LENGTH = 2048
MEMORY = 8 * GIB


def cases():
    for name in HYBRIDS:
        for setting, arguments in SETTINGS.items():
            # The CPU platform has no prefix cache for MLA (with AMX alone), and then refuses to have asked for one.
            if arguments["enable_prefix_caching"] and FAMILIES[name].attention == "latent":
                continue
            yield f"{name}, {setting}", name, FAMILIES[name].architecture, 1, setting
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
    return {folder.name: folder for folder in base.iterdir()}


@pytest.fixture(scope="module")
def planned(folders, tmp_path_factory):
    specs = {
        case: {
            "model": folders[name],
            "architecture": architecture,
            "tp": tp,
            "memory": MEMORY,
            "arguments": {"dtype": "float16", "block_size": 16, "max_model_len": LENGTH} | SETTINGS[setting],
        }
        for case, (name, architecture, tp, setting) in (CASES | STATELESS).items()
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
    with pytest.raises(NotAHybridError, match="has no recurrent layers"):
        fitted(folders[STATELESS[case][0]], **SETTINGS["plain"])
