# SPDX-License-Identifier: Apache-2.0
"""Recipes: how a published hybrid is served with pagedkv on so many GPUs, and what is expected of it.

`recipes.toml` holds them; `page` makes the page of the site. The numbers are those of `hilgate fit`, and tests hold
each against it.
"""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("recipes.toml")

NOTE = (
    "This page is made from `docs/recipes.toml` when the site is built. **Expected, by `hilgate fit`; no AMD GPU has "
    "run any of these.** A test holds each number against `fit`, and each option against vLLM 0.32's own parser."
)


class InvalidRecipeError(Exception):
    """`recipes.toml` lacks a key, has one that nobody reads, or a value of another type."""


@dataclass(frozen=True)
class Recipe:
    """One model on so many GPUs of one kind."""

    gpu: str
    """As `hilgate fit --gpu` has it; of an MI250X one die is a GPU."""
    arch: str
    gpus: int
    """Ranks that share each layer (`--tensor-parallel-size`)."""
    block_size: int
    """Tokens of a block of attention, as vLLM inflates it."""
    state_bytes: int
    """Of one sequence in one recurrent layer of one rank."""
    prefix_unit: int
    """Tokens of which a prefix cache hits whole multiples."""
    num_blocks: int
    """Of the pool, and the greatest `max_num_seqs` that vLLM starts with."""
    full_sequences: int
    """Sequences of the longest length that run at once without one being preempted."""
    max_num_seqs: int
    """What the command asks for: the greatest power of two up to `full_sequences` and vLLM's own 1,024."""


@dataclass(frozen=True)
class Served:
    """A model and its recipes."""

    name: str
    """Of its config in `tests/kernels/routing/configs/`."""
    model: str
    """As a hub has it."""
    family: str
    """Of `evals/families/families.yaml`."""
    weights: float
    """GiB of the whole model: an estimate from its known size at two bytes a parameter; no file was looked at."""
    command: str
    """With {model}, {gpus} and {max_num_seqs}."""
    routes: dict[str, str]
    """Task -> the kernel that serves the attention layers."""
    scan: str
    """The kernel of the last step of a Mamba-2 prefill; "" where no layer is one."""
    graphs: str
    """vLLM's `cudagraph_mode` after all backends were asked."""
    recipes: tuple[Recipe, ...]

    def line(self, recipe: Recipe) -> str:
        """The command of a recipe."""
        return self.command.format(model=self.model, gpus=recipe.gpus, max_num_seqs=recipe.max_num_seqs)


def read(file: Path = FILE) -> tuple[list[Served], dict[str, str]]:
    """Read the recipes, and the families that have none, each with its reason.

    Raises:
        InvalidRecipeError: The file is not as this module says; the message names the place.
    """
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    without = data.pop("without", {})
    served = []
    for name, given in data.items():
        on = given.pop("on", None)
        if not isinstance(on, list) or not on:
            raise InvalidRecipeError(f"{file.name}: {name}: got no [[{name}.on]]; expected a recipe at least.")
        recipes = tuple(_made(Recipe, one, f"{file.name}: {name}.on[{at}]") for at, one in enumerate(on))
        served.append(_made(Served, given | {"name": name, "recipes": recipes}, f"{file.name}: {name}"))
    return served, without


def _made(kind: type[Any], given: dict[str, Any], where: str) -> Any:
    """Make an instance whose every field is given, and nothing else."""
    types = {"str": str, "int": int, "float": float, "dict[str, str]": dict, "tuple[Recipe, ...]": tuple}
    wanted = {field.name: types[str(field.type)] for field in fields(kind)}
    if wanted.keys() != given.keys():
        raise InvalidRecipeError(f"{where}: got the keys {sorted(given)}; expected {sorted(wanted)}.")
    for key, value in given.items():
        if type(value) is not wanted[key]:
            raise InvalidRecipeError(f"{where}.{key}: got {value!r}; expected {wanted[key].__name__}.")
    return kind(**given)


def environment_and_options(line: str) -> tuple[dict[str, str], list[str]]:
    """Split a command into its variables and what stands behind `vllm serve`.

    Raises:
        InvalidRecipeError: It does not serve with vLLM.
    """
    words = shlex.split(line)
    variables = {}
    while words and "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    if words[:2] != ["vllm", "serve"]:
        raise InvalidRecipeError(f"got the command {line!r}; expected [NAME=VALUE ...] vllm serve MODEL ...")
    return variables, words[2:]


def page() -> str:
    """The page of all recipes."""
    served, without = read()
    parts = ["# Recipes", NOTE, INTRODUCTION]
    for one in served:
        routes = ", ".join(f"{task} `{kernel}`" for task, kernel in one.routes.items())
        scan = f"; the prefill's scan `{one.scan}`" if one.scan else ""
        rows = [
            f"| {recipe.gpus} x {recipe.gpu} ({recipe.arch}) | {recipe.block_size} | {recipe.state_bytes:,} "
            f"| {recipe.prefix_unit} | {recipe.num_blocks:,} | {recipe.full_sequences:,} |"
            for recipe in one.recipes
        ]
        commands = [f"# {recipe.gpus} x {recipe.gpu}\n{one.line(recipe)}" for recipe in one.recipes]
        parts += [
            f"## {one.model}",
            f"Family `{one.family}`. Attention: {routes}{scan}. Graphs: `{one.graphs}`. Weights: {one.weights:g} GiB.",
            "\n".join([HEAD, "|---|---|---|---|---|---|", *rows]),
            "```bash\n" + "\n".join(commands) + "\n```",
        ]
    parts += ["## Families without a recipe", "\n".join(f"* `{name}`: {why}." for name, why in without.items())]
    return "\n\n".join(parts) + "\n"


HEAD = (
    "| on | block, tokens | state, bytes a layer | prefix unit, tokens | `max_num_seqs` at most | full length at once |"
)

INTRODUCTION = """\
`pip install` [the wheel](../../kernels/README.md#install) into vLLM's ROCm image, start the server, and look for
`pagedkv serves` in its log. What stands in a row is for that number of GPUs:

* **block**: vLLM makes a block of attention as large as a state. It rounds `--block-size` up to this.
* **prefix unit**: a prompt takes whole multiples of it from the cache. A shared beginning that is shorter is computed
  again.
* **`max_num_seqs` at most**: blocks of the pool, of memory x 0.92, less weights, less 4 GiB for activations and graphs
  (an assumption; vLLM measures them). With more sequences vLLM does not start.
* **full length at once**: sequences of `--max-model-len` tokens that run without one being preempted. The command asks
  for a power of two below. Raise `--max-num-seqs` where your prompts are shorter; `hilgate fit` says how many run.

Weights are an estimate, two bytes a parameter; no file was looked at. With the model's folder at hand, ask again:

    hilgate fit FOLDER --arch gfx942 --gpu MI300X --tp 2 --with none --max-model-len 32768
"""
