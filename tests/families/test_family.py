# SPDX-License-Identifier: Apache-2.0
"""Families are read from YAML; whatever is wrong with a declaration is said with its place and what is wanted."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml
from support import blocks

from families.drive import not_here
from families.family import (
    BEHAVIOURS,
    FAMILIES,
    PLATFORMS,
    FamiliesFile,
    FamilyDeclarationError,
    FamilyLimit,
    another_platform,
    load,
)
from hilgate.conditions import problem_of

GOOD = """
shared:
  sizes: &sizes {hidden_size: 64, num_layers: 2}
families:
  small:
    architecture: SmallForCausalLM
    attention: paged
    blocks: [16, 528]
    config_class: SmallConfig
    config: {<<: *sizes, num_layers: 4}
    cannot: {cpu: never, cuda: {spec: 'wrong|off by \\d'}, rocm: {prefix: {error: gone, needs: "cpu:amx_tile"}}}
"""


def read(tmp_path, text):
    (tmp_path / "some.yaml").write_text(text)
    return load(tmp_path / "some.yaml", FamiliesFile).families


def test_a_declaration_and_what_it_shares(tmp_path):
    small = read(tmp_path, GOOD)["small"]
    assert small.config == {"hidden_size": 64, "num_layers": 4}
    never = FamilyLimit(re.compile("never"), "device:cuda,rocm")
    assert (small.limit("cpu"), small.limit("cpu", "decode"), small.limit("rocm", "spec")) == (never, never, None)
    assert (small.limit("cuda"), small.limit("cuda", "decode")) == (None, None)
    assert small.limit("cuda", "spec") == FamilyLimit(re.compile(r"wrong|off by \d"), "device:cpu,rocm")
    assert small.limit("rocm", "prefix") == FamilyLimit(re.compile("gone"), "cpu:amx_tile", everywhere=False)


def test_the_steps_may_lack_what_the_limits_need():
    """What the families declare, hilgate can ask for; and the step declares no more than that."""
    asked = itertools.product(FAMILIES.values(), PLATFORMS, (None, *BEHAVIOURS))
    every = [(platform, family.limit(platform, behaviour)) for family, platform, behaviour in asked]
    limits = [(platform, limit) for platform, limit in every if limit]
    assert [problem_of(limit.needs) for _, limit in limits if problem_of(limit.needs)] == []
    assert {limit.needs for _, limit in limits if not limit.everywhere} == {"cpu:amx_tile", "cpu:!avx512_bf16"}
    assert all(limit.needs == another_platform(platform) for platform, limit in limits if limit.everywhere)
    assert not_here("cpu", FAMILIES["jamba"], "padded")
    area = yaml.safe_load(Path(__file__).parents[2].joinpath("ci/areas/models.yaml").read_text())
    (step,) = (step for step in area["steps"] if step["key"] == "models-families")
    assert set(step["may_lack"]) == {limit.needs for _, limit in limits}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("attention: paged", "atention: paged", "families.small.atention: Unexpected keyword argument; got 'paged'"),
        ("attention: paged", "attention: pagd", "families.small.attention: Input should be 'paged', .*; got 'pagd'"),
        ("attention: paged", "states: [cov]", "families.small.states.0: Input should be 'conv', .*; got 'cov'"),
        ("    attention: paged\n", "", "families.small: neither attention nor states"),
        ("attention: paged", "architecture: Other", "the key architecture stands twice"),
        ("    architecture: SmallForCausalLM\n", "", "families.small.architecture: Field required"),
        ("[16, 528]", "[16, 520]", "families.small.blocks.1: Input should be a multiple of 16; got 520"),
        ("attention: paged", "attention: latent", "families.small: .* expected none without paged attention"),
        ("cpu: never", "tpu: never", r"families.small.cannot.tpu.\[key\]: Input should be 'cpu', .*; got 'tpu'"),
        ("spec: ", "specs: ", r"families.small.cannot.cuda.specs.\[key\]: .*; got 'specs'"),
        ("cpu: never", "cpu: '('", "families.small.cannot.cpu.error: .* regular expression; got '\\('"),
        ("cpu: never", "cpu: 3", "families.small.cannot.cpu.error: .*; got 3"),
        ("error: gone, ", "", "families.small.cannot.rocm.prefix.error: Field required"),
        ("cpu:amx_tile", "amx", "families.small.cannot.rocm.prefix.needs: .*; got 'amx'"),
        ("error: ", "eror: ", "families.small.cannot.rocm.prefix.error: Field required"),
        ("families:", "family:", "families: Field required"),
        ("*sizes", "*size", "found undefined alias"),
        (GOOD, "", "Input should be a valid dictionary"),
        (GOOD, "families: {}", "families: Dictionary should have at least 1 item"),
        (GOOD, "families: {a: b}", "families.a: .*; got 'b'"),
    ],
)
def test_a_wrong_declaration_is_refused(old, new, problem, tmp_path):
    with pytest.raises(FamilyDeclarationError, match=rf"^some\.yaml.*{problem}"):
        read(tmp_path, GOOD.replace(old, new))


def test_a_platform_that_there_is_not_is_refused():
    with pytest.raises(KeyError, match="platform 'tpu'"):
        FAMILIES["jamba"].arguments("tpu")


PUBLISHED = {
    "jamba": ["jamba-v0.1"],
    "zamba2": ["zamba2-1.2b"],
    "falcon-h1": ["falcon-h1-0.5b"],
    "granite-4.0-h": ["granite-4.0-h-tiny"],
    "nemotron-h": ["nemotron-h-8b"],
    "qwen3-next": ["qwen3-next-80b-a3b"],
    "qwen3.5": ["qwen3.5-27b", "qwen3.5-35b-a3b"],
    "lfm2": ["lfm2-1.2b"],
    "bamba": ["bamba-9b"],
}
"""Stored configs of a family."""


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.blocks])
def test_blocks_are_those_of_published_models(name):
    """On 1, 2, 4 and 8 ranks; beside them only sizes that users have met. Every size of a hybrid is in some cell."""
    family, cache = name.removesuffix("-fp8"), "fp8" if FAMILIES[name].fp8_cache else "auto"
    made = {size for model in PUBLISHED.get(family, []) for size in blocks.made_by(model, cache).values()}
    assert made <= set(FAMILIES[name].blocks) <= made | set(blocks.SEEN)


def test_every_size_that_users_have_met_is_in_a_cell():
    paged = {name for name, family in FAMILIES.items() if family.attention == "paged" and family.config_class}
    assert {name for name, family in FAMILIES.items() if family.blocks} == paged
    assert set(blocks.SEEN) <= {size for family in FAMILIES.values() for size in family.blocks}
