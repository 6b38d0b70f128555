# SPDX-License-Identifier: Apache-2.0
"""Each recipe of docs/recipes.toml against what `hilgate fit` answers to its own command.

That vLLM takes the commands is test_vllm.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.recipes import recipes

from pagedkv.routing import __main__ as cli

CONFIGS = Path(__file__).parents[1] / "kernels/routing/configs"
FAMILIES = Path(__file__).parents[2] / "evals/families/families.yaml"
SERVED, WITHOUT = recipes.read()
CASES = {f"{one.name}, {it.gpus} x {it.gpu}": (one, it) for one in SERVED for it in one.recipes}

SAME = {
    "--tensor-parallel-size": "--tp",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--enable-prefix-caching": "--prefix-cache",
}
"""Option of vLLM -> that of `fit` which says the same."""

UNASKED = {"--attention-backend": "CUSTOM"}
"""What makes the layers ours, which `--with none` says to `fit`."""


def asked(one, recipe):
    """The arguments of `fit` that a recipe's command stands for."""
    _, (_, *words) = recipes.environment_and_options(one.line(recipe))
    options = []
    while words:
        option = words.pop(0)
        value = [words.pop(0)] if words and not words[0].startswith("-") else []
        if option in UNASKED:
            assert value == [UNASKED[option]]
        else:
            options += [SAME[option], *value]
    config, where = CONFIGS / f"{one.name}.json", ["--arch", recipe.arch, "--gpu", recipe.gpu]
    return ["fit", str(config), *where, "--weights", str(one.weights), "--with", "none", "--json", *options]


def differences(one, recipe, capsys):
    """What a recipe says otherwise than `fit`: key -> (recipe, fit)."""
    arguments = asked(one, recipe)
    status = cli.main(arguments)
    printed = capsys.readouterr()
    assert printed.err == ""
    made = json.loads(printed.out)
    (attending,) = (layer["route"] for layer in made["layers"] if "route" in layer)
    longest = arguments[arguments.index("--max-model-len") + 1]
    full = made["running"][longest]
    said = {
        "status": (0, status),
        "gpus": (recipe.gpus, made["deployment"]["tp"]),
        "block_size": (recipe.block_size, made["block_size"]),
        "state_bytes": (recipe.state_bytes, made["pages"]["state_bytes"]),
        "prefix_unit": (recipe.prefix_unit, made["prefix_unit"]),
        "num_blocks": (recipe.num_blocks, made["greatest_max_num_seqs"]),
        "full_sequences": (recipe.full_sequences, full),
        "max_num_seqs": (recipe.max_num_seqs, min(1024, 1 << (full.bit_length() - 1))),
        "routes": (one.routes, {task: choice["kernel"] for task, choice in attending.items() if choice["kernel"]}),
        "scan": (one.scan, next((layer["scan"]["kernel"] for layer in made["layers"] if "scan" in layer), "")),
    }
    return {key: pair for key, pair in said.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_is_what_fit_says(case, capsys):
    assert differences(*CASES[case], capsys) == {}


@pytest.mark.parametrize("key", ["block_size", "state_bytes", "prefix_unit", "num_blocks", "full_sequences"])
def test_a_wrong_number_is_red(key, capsys):
    one, recipe = next(iter(CASES.values()))
    wrong = replace(recipe, **{key: getattr(recipe, key) + 1})
    assert differences(one, wrong, capsys) == {key: (getattr(wrong, key), getattr(recipe, key))}


def test_a_wrong_command_is_red(capsys):
    """More ranks, more sequences than there are blocks, and a kernel that does not serve."""
    one, recipe = next(iter(CASES.values()))
    assert {"block_size", "state_bytes"} <= differences(one, replace(recipe, gpus=8), capsys).keys()
    assert differences(one, replace(recipe, max_num_seqs=recipe.num_blocks + 1), capsys)["status"] == (0, 1)
    other = replace(one, routes=one.routes | {"decode": "vllm.kernel_unified_attention"})
    assert differences(other, recipe, capsys).keys() == {"routes"}
    assert differences(replace(one, scan="pagedkv.ssd_prefill"), recipe, capsys).keys() == {"scan"}
    with pytest.raises(KeyError, match="--block-size"):
        asked(replace(one, command=one.command + " --block-size 32"), recipe)


@pytest.mark.parametrize("one", SERVED, ids=[one.name for one in SERVED])
def test_our_scan_is_asked_for_where_it_is_named(one):
    variables, _ = recipes.environment_and_options(one.line(one.recipes[0]))
    assert variables == ({"PAGEDKV_SSD": "1"} if one.scan == "pagedkv.ssd_prefill" else {})


def test_every_family_with_states_has_a_recipe_or_a_reason():
    families = yaml.safe_load(FAMILIES.read_text(encoding="utf-8"))["families"]
    plain = {name for name, family in families.items() if "kv_cache_dtype" not in (family.get("engine") or {})}
    hybrids = {name for name in plain if families[name].get("states")}
    assert {one.family for one in SERVED} | WITHOUT.keys() == hybrids
    assert not {one.family for one in SERVED} & WITHOUT.keys()


def test_every_amd_gpu_has_recipes_of_every_model():
    for one in SERVED:
        assert {recipe.gpu for recipe in one.recipes} == {"MI250X", "MI300X", "MI325X", "MI355X"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("block_size = 544", "block_sise = 544"), r"qwen3-next-80b-a3b.on\[0\]: got the keys"),
        (("block_size = 544", 'block_size = "544"'), r"on\[0\].block_size: got '544'; expected int"),
        (('graphs = "FULL_AND_PIECEWISE"', ""), "qwen3-next-80b-a3b: got the keys"),
        (('[["lfm2-1.2b".on]]', '[["lfm2-1.2b".onn]]'), "lfm2-1.2b: got no"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, change, words):
    text = recipes.FILE.read_text(encoding="utf-8")
    count = -1 if "lfm2" in change[0] else 1
    (tmp_path / "recipes.toml").write_text(text.replace(*change, count), encoding="utf-8")
    with pytest.raises(recipes.InvalidRecipeError, match=words):
        recipes.read(tmp_path / "recipes.toml")


def test_a_command_of_another_program_is_refused():
    with pytest.raises(recipes.InvalidRecipeError, match="vllm serve MODEL"):
        recipes.environment_and_options("PAGEDKV_SSD=1 python -m vllm")


def test_the_page_has_every_command_and_says_that_nothing_was_run():
    text = recipes.page()
    for one, recipe in CASES.values():
        assert f"\n{one.line(recipe)}\n" in text
    assert "no AMD GPU has run any" in text
    assert "measured" not in text.replace("vLLM measures them", "")
