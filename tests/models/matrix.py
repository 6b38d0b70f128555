"""Every model under every layout and packing that vLLM can give it: what runs, one process per packing.

Starting vLLM takes as long as a dozen of these engines, so a process goes through all models of its packing.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from models import engine, tiny_decoders, tiny_hybrid, tiny_sinks
from transformers import AutoTokenizer

from families import speech
from families.fleet import IN_PROCESS

if TYPE_CHECKING:
    from collections.abc import Iterator

POCKET = Path(__file__).parents[2] / "evals" / "pocket"
QUESTIONS = 24

DTYPE = torch.float32
"""On GPUs too: an answer is then decided by layouts and not by rounding, and vLLM refuses Gemma-2 in float16."""

SECONDS = 600
"""Of one process; several times what it takes on two idle cores."""

PACKINGS = ("rows", "native", "shuffle")

# Packings of two parts need layouts in which the tokens of a head slot are one run. State layers share the pool, and
# then vLLM takes only layouts in which a page is one run: not LHBNC. test_pages.py has every combination.
LAYOUTS = {
    "decoder": {
        "rows": ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
        "native": ("LHBNC", "BHLNC"),
        "shuffle": ("LBHNC", "BLHNC"),
    },
    "speech": {"rows": ("LBHNC", "LHBNC"), "native": ("LHBNC",), "shuffle": ("BLHNC",)},
    "hybrid": {"native": ("LBHNC",), "shuffle": ("BLHNC",)},
    "pocket": {"rows": ("LBHNC", "LBNHC", "BLHNC"), "native": ("LBHNC", "BLHNC"), "shuffle": ("LBHNC", "BLHNC")},
    "alibi": {"rows": ("LBHNC",)},
    "sinks": {"rows": ("LBHNC",), "native": ("LHBNC",), "shuffle": ("BLHNC",)},
    "fp8": {"rows": ("LBNHC",), "native": ("LBHNC",), "shuffle": ("BLHNC",)},
    "fp8 per token": {"rows": ("LBHNC",), "native": ("BLHNC",), "shuffle": ("LHBNC",)},
}
RUNS = [(m, packing, layout) for m, packings in LAYOUTS.items() for packing in packings for layout in packings[packing]]

DECODER_PROMPTS = [tiny_hybrid.prompt(n, seed=n) for n in (3, 47, 96)]
SPEECH_PROMPTS = [{"audio": n, "tokens": [1, *tiny_hybrid.prompt(n, seed=n)]} for n in (3, 20, 40)]
BATCHES: dict[str, dict[str, Any]] = {
    "decoder": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "alibi": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "sinks": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "fp8": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "fp8 per token": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "hybrid": {"prompts": DECODER_PROMPTS, "max_tokens": 8},
    "speech": {"prompts": SPEECH_PROMPTS, "max_tokens": 8},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8 per token": {"kv_cache_dtype": "fp8_per_token_head"},
    # The encoder's budget admits one request a step, so that steps mix first and later tokens of a decoder.
    "speech": {
        "skip_tokenizer_init": False,
        "max_model_len": 96,
        "max_num_batched_tokens": 96,
        "limit_mm_per_prompt": {"audio": 1},
    },
    "pocket": {"max_num_seqs": QUESTIONS, "max_model_len": 160, "max_num_batched_tokens": 2048},
}


def problems() -> list[dict[str, str]]:
    """Questions and worked answers of the pocket model's test set."""
    lines = (POCKET / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:QUESTIONS]]


def number(text: str) -> str:
    """The final answer in a worked one; empty if there is none."""
    return "".join(re.findall(r"#### (\S+)", text)[:1])


def save(folder: Path) -> dict[str, Path]:
    """Write the checkpoints; return their folders by model."""
    folders = {name: folder / name.replace(" ", "-") for name in ("decoder", "alibi", "sinks", "hybrid", "speech")}
    tiny_decoders.save_gemma(folders["decoder"], DTYPE)
    tiny_decoders.save_bloom(folders["alibi"], DTYPE)
    tiny_sinks.save(folders["sinks"], DTYPE)
    tiny_hybrid.save(folders["hybrid"], DTYPE)
    speech.save(folders["speech"], DTYPE)
    return folders | {"fp8": folders["decoder"], "fp8 per token": folders["decoder"], "pocket": POCKET / "hybrid"}


def run(folders: dict[str, Path], logs: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Run everything; return the results by model, packing and layout."""
    tokenizer = AutoTokenizer.from_pretrained(folders["pocket"])
    prompts = [tokenizer(f"Question: {problem['question']}\nAnswer:")["input_ids"] for problem in problems()]
    pocket = {"prompts": prompts, "max_tokens": 32, "ignore_eos": False, "log_probs": False}
    batches = BATCHES | {"pocket": pocket}

    def engines(packing: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for model, chosen, layout in RUNS:
            if chosen == packing:
                arguments = {"dtype": "float32"} | ARGUMENTS.get(model, {})
                yield (
                    f"{model}/{layout}",
                    engine.spec(folders[model], {"only": batches[model]}, layout=layout, **arguments),
                )

    def process(packing: str) -> dict[str, Any]:
        (logs / packing).mkdir()
        environment = IN_PROCESS | {"PAGEDKV_PACKING": packing}
        return engine.run(logs / packing, dict(engines(packing)), environment, seconds=SECONDS)

    with ThreadPoolExecutor(max_workers=1 if engine.GPU else 2) as pool:
        results = dict(zip(PACKINGS, pool.map(process, PACKINGS), strict=True))
    return {(model, packing, layout): results[packing][f"{model}/{layout}"] for model, packing, layout in RUNS}
