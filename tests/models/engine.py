# SPDX-License-Identifier: Apache-2.0
"""Run engines in a process of their own: write a spec, start `drive.py`, wait, and end every process it left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from families.processes import GPU, QUIET, end_group, start, status_of

if TYPE_CHECKING:
    from pathlib import Path

    from families.schedule import Schedule

SECONDS = 240
"""Several times what a start and a few batches take on two busy cores."""

EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton's products of float32 in float32. On NVIDIA it makes them in TF32 where a kernel does not say, as vLLM's of
experts does not: granite-4.0-h was off by 1e-3 on one rank of an H200 and on two."""

MEMORY: dict[str, Any] = (
    {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 28} if GPU else {"kv_cache_memory_bytes": 1 << 26}
)
"""Given and not measured: vLLM stops where another process frees memory of a GPU while it measures."""


def spec(
    model: Path,
    batches: dict[str, Schedule],
    *,
    ours: bool = True,
    rows: bool = True,
    prompt_rows: bool = True,
    layout: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """What `drive.serve` is to do with one engine.

    Args:
        model: Folder of the model.
        batches: Requests by name of their batch.
        ours: Whether our plugin shall serve.
        rows: Whether distributions come back, and not tokens alone.
        prompt_rows: Whether those of prompts too; vLLM then computes all of a prompt, whatever has been cached.
        layout: Physical order of vLLM's KV cache; None leaves it to vLLM.
        **arguments: Of vLLM's `LLM`, on top of those that all engines share (`families.engine.COMMON`).
    """
    wanted = {"rows": rows, "prompt_rows": rows and prompt_rows}
    return {
        "model": model,
        "ours": ours,
        "layout": layout,
        "arguments": MEMORY | arguments,
        "batches": batches,
    } | wanted


def run(
    folder: Path,
    engines: dict[str, dict[str, Any]],
    environment: dict[str, str],
    *,
    seconds: int = SECONDS,
    driver: str = "models.drive",
) -> dict[str, Any]:
    """Run engines one after the other in one process.

    Args:
        folder: Where the specs, the results and the log are written.
        engines: By name, what `spec` returned.
        environment: Variables on top of this process's and of QUIET.
        seconds: When to give up.
        driver: Module whose `main` does what the specs say.

    Returns:
        The results by name. A driver that fails or hangs raises AssertionError with the end of its log.
    """
    spec_file, result_file, log_file = (folder / name for name in ("spec.pt", "result.pt", "log.txt"))
    torch.save(engines, spec_file)
    process = start(driver, log_file, QUIET | EXACT | environment, spec_file, result_file)
    deadline = time.monotonic() + seconds
    try:
        while (status := status_of(process)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        end_group(process)
    ended = f"was killed after {seconds} s" if status is None else f"ended with {status}"
    assert status == 0, f"vLLM's driver {ended}:\n" + "\n".join(log_file.read_text().splitlines()[-40:])
    return torch.load(result_file, weights_only=False)
