"""Tokens per second of the families in vLLM on a GPU: our attention beside vLLM's TRITON_ATTN, and whether they agree.

    python tests/models/families/throughput.py out.json [family ...]

Graphs on, float16, 32 requests. A decode step is timed as the difference between 1 and 65 answers, so that prompts and
vLLM's start are left out; the engines run one after the other: ours, vLLM's, ours again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a program's own folder comes first, not tests/

import torch
from models.families import checkpoints, inspection
from models.families.configs_mamba import VOCABULARY
from models.families.declared import FAMILIES
from models.families.engines import COMMON, GRAPHS
from models.families.judge import difference
from models.families.running import Answer, Engine
from models.families.schedule import Request, prompt

REQUESTS, STEPS, REPEATS = 32, 64, 5
CONTEXTS = (64, 8192)
MEMORY = 8 << 30
CHOSEN = ("jamba", "zamba2", "falcon-h1", "granite-4.0-h", "nemotron-h", "qwen3-next", "qwen3.5", "lfm2", "qwen3-moe")
TIE = 0.05
"""Nats. Float16 decides between tokens that are closer; the text behind such a token is not compared."""


def main(out: Path, names: list[str]) -> None:
    """Measure, print, write."""
    rows = []
    for name in names:
        rows += measure(name)
        out.write_text(json.dumps(rows, indent=1))


def measure(name: str) -> list[dict[str, Any]]:
    """One family: for each context the steps of both sides and whether their tokens agree."""
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        inspection.register(family)
        checkpoints.save(family, Path(folder), torch.float16)
        sides = [(ours, run(Path(folder), ours=ours, **family.arguments("cuda"))) for ours in (True, False, True)]
    rows = []
    for index, context in enumerate(CONTEXTS):
        (_, first), (_, theirs), (_, second) = ((ours, result[index]) for ours, result in sides)
        times = [*first["steps"], *second["steps"]]
        row = {
            "family": name,
            "context": context,
            "ours_tokens_per_s": round(REQUESTS / statistics.median(times)),
            "theirs_tokens_per_s": round(REQUESTS / statistics.median(theirs["steps"])),
            "ratio": round(statistics.median(theirs["steps"]) / statistics.median(times), 3),
            "ours_step_us": [round(1e6 * t) for t in times],
            "theirs_step_us": [round(1e6 * t) for t in theirs["steps"]],
            "equal": sum(a.tokens == b.tokens for a, b in zip(first["answers"], theirs["answers"], strict=True)),
            "differs": difference(first["schedule"], first["answers"], theirs["answers"], TIE),
        }
        rows.append(row)
        sys.stdout.write("{family:14s} {context:5d} {ours_tokens_per_s:7d} {theirs_tokens_per_s:7d} {ratio:6.3f} "
                         "{equal}/32 {differs}\n".format(**row))  # fmt: skip
        sys.stdout.flush()
    return rows


def run(model: Path, *, ours: bool, **arguments: Any) -> list[dict[str, Any]]:
    """One engine: per context the seconds of a decode step, and the answers."""
    engine_arguments = COMMON | GRAPHS | {
        "dtype": "float16",
        "mamba_ssm_cache_dtype": "float32",
        "hf_overrides": {"max_position_embeddings": 2 * CONTEXTS[-1]},
        "max_model_len": CONTEXTS[-1] + 128,
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": MEMORY,
        "gpu_memory_utilization": 0.5,
        "compilation_config": GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": [1, REQUESTS]},
    } | arguments  # fmt: skip
    results = []
    with Engine(model, ours=ours, poison=False, **engine_arguments) as engine:
        for context in CONTEXTS:
            schedule = tuple(Request(prompt(context - n, n + 1, VOCABULARY), STEPS + 1) for n in range(REQUESTS))
            brief = tuple(Request(request.prompt, 1) for request in schedule)
            answers = engine.ask(schedule, rows=False)  # warms up, too
            steps = [(timed(engine, schedule) - timed(engine, brief)) / STEPS for _ in range(REPEATS)]
            results.append({"schedule": schedule, "answers": answers, "steps": steps})
    return results


def timed(engine: Engine, schedule: tuple[Request, ...]) -> float:
    """Seconds of a schedule."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    answers: list[Answer] = engine.ask(schedule, rows=False)
    if not all(len(answer.tokens) == request.answers for answer, request in zip(answers, schedule, strict=True)):
        raise RuntimeError("an answer is too short to be timed")
    return time.perf_counter() - started


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CHOSEN))
