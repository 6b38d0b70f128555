# SPDX-License-Identifier: Apache-2.0
"""Every model under every layout and packing that vLLM can give it: what runs, one process per packing.

Those of MLA, which has no packings, are in test_handover.py: a change of its kernel then runs that step alone.

Starting vLLM takes as long as a dozen of these engines, so a process goes through all models of its packing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from models import engine

from families import checkpoints, plain_attention
from families.family import FAMILIES, FamiliesFile, load
from families.oracle import VOCABULARY, Oracle
from families.processes import GPU, IN_PROCESS
from families.schedule import Schedule, ScheduledRequest, prompt, spoken

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

NOISE = 2**-20
"""What the fp32 sum of the 128 products of a key or value may lose: 2^-24 sqrt(128) = 2^-20.5."""
LOST_BEFORE = 2 * NOISE
"""What it may have lost beside that: its layer's input is four such sums (attention, its projection, two of the MLP),
whose signs are as good as random: sqrt(4)."""

SECONDS = 600
"""Limit for one process; several times what it takes on two idle cores."""

PACKINGS = ("rows", "native", "shuffle")

MODELS = load(Path(__file__).with_name("decoders.yaml"), FamiliesFile).families | {
    name: FAMILIES[name] for name in ("granite-4.0-h", "deepseek-v3", "whisper")
}

# Packings of two parts need layouts in which the tokens of a head slot are one run. State layers share the pool, and
# then vLLM takes only layouts in which a page is one run: not LHBNC. test_pages.py has every combination.
LAYOUTS = {
    "gemma-2": {
        "rows": ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
        "native": ("LHBNC", "BHLNC"),
        "shuffle": ("LBHNC", "BLHNC"),
    },
    "whisper": {"rows": ("LBHNC", "LHBNC"), "native": ("LHBNC",), "shuffle": ("BLHNC",)},
    "granite-4.0-h": {"rows": ("LBHNC", "LBNHC", "BLHNC"), "native": ("LBHNC", "BLHNC"), "shuffle": ("LBHNC", "BLHNC")},
    "bloom": {"rows": ("LBHNC",)},
    "llama-4": {"rows": ("LBHNC",)},
    "gpt-oss": {"rows": ("LBHNC",), "native": ("LHBNC",), "shuffle": ("BLHNC",)},
    "gemma-2-fp8": {"rows": ("LBNHC",), "native": ("LBHNC",), "shuffle": ("BLHNC",)},
    "gemma-2-fp8-per-token": {"rows": ("LBHNC",), "native": ("BLHNC",), "shuffle": ("LHBNC",)},
}
RUNS = [(m, packing, layout) for m, packings in LAYOUTS.items() for packing in packings for layout in packings[packing]]

PROMPTS = tuple(ScheduledRequest(prompt(n, n, VOCABULARY), 8) for n in (3, 47, 96))
SPEECH = tuple(spoken(ScheduledRequest(prompt(n + 1, n, VOCABULARY), 8, speech=n)) for n in (3, 20, 40))


def dtype(model: str) -> torch.dtype:
    """Dtype of weights and arithmetic.

    On GPUs float32 too: an answer is then decided by layouts and not by rounding, and vLLM refuses Gemma-2 in float16.
    Its MLA takes 16 bits alone there.
    """
    return torch.float16 if GPU and model == "deepseek-v3" else torch.float32


def arguments(model: str) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`."""
    return {"dtype": str(dtype(model)).removeprefix("torch.")} | MODELS[model].arguments("cuda" if GPU else "cpu")


def requests(model: str) -> Schedule:
    """What a model is asked: prompts of unlike length at once."""
    return SPEECH if MODELS[model].attention == "cross" else PROMPTS


def save(folder: Path, models: Collection[str]) -> dict[str, Path]:
    """Write the checkpoints; return their folders by model."""
    for name in models:
        checkpoints.save(MODELS[name], folder / name, dtype(name))
    return {name: folder / name for name in models}


def oracle(model: str, folder: Path) -> Oracle:
    """What transformers computes with a model."""
    loaded = Oracle.load(MODELS[model], folder, dtype(model))
    if model == "bloom":
        for block in (*loaded.exact.transformer.h, *loaded.working.transformer.h):
            block.mlp.gelu_impl = torch.nn.GELU()  # as vLLM has it; transformers approximates it by tanh
    if model.startswith("gemma-2-fp8"):
        keep = plain_attention.KEPT[loaded.attention]
        lost = NOISE + (LOST_BEFORE if model.endswith("per-token") else 0.0)
        noises = (lost, -lost)
        loaded.rough = [{"exact": False}, *({"attention": _scaled(keep, by)} for by in noises)]
    return loaded


def _scaled(keep: Callable[[torch.Tensor], torch.Tensor], by: float) -> str:
    """Attention to keys and values moved before they are rounded: those near a boundary go to its other side.

    Half of the channels move up and half down: a scale for each token would undo a factor of all of them.
    """

    def moved(rows: torch.Tensor) -> torch.Tensor:
        up = torch.rand(rows.shape[-1], generator=torch.Generator().manual_seed(7)) < 0.5
        return keep(rows * torch.where(up.to(rows.device), 1 + by, 1 - by).to(rows.dtype))

    return plain_attention.register(f"{keep} of {by}", plain_attention.through(moved))


def run(folders: dict[str, Path], logs: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Run everything; return the results by model, packing and layout."""

    def engines(packing: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for model, chosen, layout in RUNS:
            if chosen == packing:
                asked = {"only": requests(model)}
                yield f"{model}/{layout}", engine.spec(folders[model], asked, layout=layout, **arguments(model))

    def process(packing: str) -> dict[str, Any]:
        (logs / packing).mkdir()
        environment = IN_PROCESS | {"PAGEDKV_PACKING": packing}
        return engine.run(logs / packing, dict(engines(packing)), environment, seconds=SECONDS)

    with ThreadPoolExecutor(max_workers=1 if GPU else 2) as pool:
        results = dict(zip(PACKINGS, pool.map(process, PACKINGS), strict=True))
    return {(model, packing, layout): results[packing][f"{model}/{layout}"] for model, packing, layout in RUNS}
