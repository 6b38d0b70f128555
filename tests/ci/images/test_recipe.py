# SPDX-License-Identifier: Apache-2.0
"""The recipes as they are written: linted, parsed, agreeing with each other, and run against a fake tool chain."""

from __future__ import annotations

import re
import subprocess

import hcl2
import pytest
from support.images import ROOT, instructions

from hilgate.declare.load import load_project
from hilgate.images.contents import contents, inputs
from hilgate.images.pins import labels, read

DOCKERFILES = ("cpu", "rocm")


def unquoted(value):
    """python-hcl2 keeps quotes; a name that is left without them is a variable."""
    if isinstance(value, dict):
        return {unquoted(key): unquoted(inner) for key, inner in value.items() if key != "__is_block__"}
    if isinstance(value, list):
        return [unquoted(one) for one in value]
    return value[1:-1] if isinstance(value, str) and value.startswith('"') else value


@pytest.fixture(scope="module")
def bake():
    with (ROOT / "docker/docker-bake.hcl").open() as file:
        raw = hcl2.load(file)
    targets = {next(iter(unquoted(one))): one[next(iter(one))] for one in raw["target"]}
    variables = {next(iter(unquoted(one))): one[next(iter(one))] for one in raw["variable"]}
    groups = {next(iter(unquoted(one))): unquoted(one[next(iter(one))]) for one in raw["group"]}
    return targets, variables, groups


def complaints(image: str, text: str) -> list[str]:
    """What is wrong with a Dockerfile that no linter knows."""
    found = []
    arguments = [one for one in instructions(image, text) if one["instruction"] == "ARG"]
    found += [f"ARG {one['value']} has a default" for one in arguments if "=" in one["value"]]
    for one in instructions(image, text):
        value = one["value"]
        if one["instruction"] == "FROM" and not re.match(
            r"(\$\{BASE\}|scratch|base|compiler|image)( AS [\w-]+)?$", value
        ):
            found.append(f"FROM {value} is no pinned base and no stage")
        if one["instruction"] == "ADD":
            added = re.fullmatch(r"--keep-git-dir=true \$\{(\w+)_GIT\} (\S+)", value)
            checks = (
                f'scripts/commit.sh {added[2]} "${{{added[1]}_COMMIT}}" "${{{added[1]}_SUBMODULES}}"' if added else ""
            )
            if not checks or checks not in text:
                found.append(f"ADD {value} is no commit that is checked")
        if one["instruction"] == "RUN" and re.search(r"\b(git|curl|wget)\b", value):
            found.append(f"RUN fetches: {value}")
        resolving = [part for part in value.split("&&") if "pip install" in part and "--no-deps" not in part]
        found += [f"{one['instruction']} resolves dependencies: {part}" for part in resolving]
        if one["instruction"] in {"RUN", "ENV"} and re.search(
            r"native|privileged|--security=insecure|PIP_\w*URL", value
        ):
            found.append(f"{one['instruction']} is not allowed: {value}")
    return found


@pytest.mark.parametrize("image", DOCKERFILES)
def test_a_recipe_is_pinned_and_fetches_nothing_by_name(image):
    assert complaints(image, (ROOT / f"docker/{image}.Dockerfile").read_text()) == []


@pytest.mark.parametrize("image", DOCKERFILES)
def test_what_a_recipe_copies_is_covered_by_the_key(image):
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    covered = (*inputs(load_project(ROOT).images[image], done.stdout.splitlines()), "pins.json")
    for one in instructions(image):
        if one["instruction"] == "COPY" and "--from" not in one["value"]:
            for source in one["value"].split()[:-1]:
                assert any(name == source or name.startswith(f"{source}/") for name in covered), source


def test_every_variable_of_the_bake_file_comes_from_the_pins(bake, variables):
    _, declared, _ = bake
    assert set(declared) == set(variables)
    assert [name for name, block in declared.items() if set(block) - {"__is_block__"}] == []


def test_targets_publish_and_cache_nothing_by_the_file_itself(bake):
    targets, _, groups = bake
    assert {"wheels-mamba", "wheels-conv1d", "wheels-aiter", "wheels-vllm", "rocm", "cpu"} <= set(targets)
    assert groups["default"]["targets"] == ["cpu", "rocm"]
    assert all(one in targets for group in groups.values() for one in group["targets"])
    text = (ROOT / "docker/docker-bake.hcl").read_text()
    assert not re.search(r"cache-(to|from)|output\s*=|push", text)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_every_argument_of_the_recipe_is_a_given_variable(bake, variables, image):
    targets, _, _ = bake
    given = {}
    for target in targets.values():
        if unquoted(target.get("dockerfile", "docker/rocm.Dockerfile")) == f"docker/{image}.Dockerfile":
            given |= target.get("args", {})
    given.pop("__is_block__", None)
    assert set(given.values()) <= set(variables)
    declared = {one["value"] for one in instructions(image) if one["instruction"] == "ARG"}
    assert declared == set(given)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_labels_of_the_bake_file_are_those_that_are_checked(bake, variables, image):
    block = unquoted(bake[0][image]["labels"])
    values = {name: variables.get(value, value) for name, value in block.items()}
    assert values == labels(image, read(ROOT), contents(ROOT)[image], "c" * 40)
