# SPDX-License-Identifier: Apache-2.0
"""Run engines in a process of their own: write a spec, start `drive.py`, wait, and end every process it left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from families.fleet import GPU, QUIET
from families.plans import COMMON

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext
    from pathlib import Path

    from families.schedule import Schedule

SECONDS = 240
"""Several times what a start and a few batches take on two busy cores."""

MEMORY: dict[str, Any] = {"gpu_memory_utilization": 0.2} if GPU else {"kv_cache_memory_bytes": 1 << 26}


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
        **arguments: Of vLLM's `LLM`, on top of those that all engines share.
    """
    engine = COMMON | MEMORY | arguments
    wanted = {"rows": rows, "prompt_rows": rows and prompt_rows}
    return {"model": model, "ours": ours, "layout": layout, "arguments": engine, "batches": batches} | wanted


def run(
    folder: Path, engines: dict[str, dict[str, Any]], environment: dict[str, str], *, seconds: int = SECONDS
) -> dict[str, Any]:
    """Run engines one after the other in one process.

    Args:
        folder: Where the specs, the results and the log are written.
        engines: By name, what `spec` returned.
        environment: Variables on top of this process's and of QUIET.
        seconds: When to give up.

    Returns:
        The results by name. A driver that fails or hangs raises AssertionError with the end of its log.
    """
    spec_file, result_file, log_file = (folder / name for name in ("spec.pt", "result.pt", "log.txt"))
    torch.save(engines, spec_file)
    process = _processes().Process(target=_drive, args=(spec_file, result_file, log_file, QUIET | environment))
    with patch.dict(os.environ, QUIET | environment) if GPU else nullcontext():  # of a process that imports for itself
        process.start()
    try:
        process.join(timeout=seconds)
        status = f"killed after {seconds} s" if process.exitcode is None else process.exitcode
    finally:
        with suppress(ProcessLookupError):  # engine core and workers live in its session too
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert status == 0, f"vLLM's driver ended with {status}:\n" + "\n".join(log_file.read_text().splitlines()[-40:])
    return torch.load(result_file, weights_only=False)


@cache
def _processes() -> BaseContext:
    """Where drivers come from: forks of a process that has imported vLLM and nothing else, once for all tests.

    An import costs as much CPU time as two dozen starts of an engine. Where there is a GPU each driver imports it for
    itself: what has looked for a GPU must not be forked.
    """
    if GPU:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["families.drive"])  # all that drive.py imports; Python 3.11 finds no more
    with patch.dict(os.environ, QUIET):  # some of it is read when a module is imported
        forkserver.ensure_running()
    return context


def _drive(spec_file: Path, result_file: Path, log_file: Path, environment: dict[str, str]) -> None:
    os.setsid()
    with log_file.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(environment)
    import_module("models.drive").main(spec_file, result_file)
