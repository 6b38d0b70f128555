"""Start `drive.py`, wait, and end every process it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from families.fleet import GPU, QUIET, end_group

DRIVER = Path(__file__).with_name("drive.py")
DTYPE = torch.float16 if GPU else torch.float32
"""Not bfloat16, which GPUs serve: its rounding moves this log-probability or that by up to 0.7, a lost block by 1.4."""

SECONDS = 240
"""Several times what a start and a few batches take on two busy cores."""

ENGINE = {
    "dtype": str(DTYPE).removeprefix("torch."),
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 37,  # divides neither the block nor the prompts
    "enable_prefix_caching": False,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 40,
    "seed": 0,
} | ({"gpu_memory_utilization": 0.2} if GPU else {"kv_cache_memory_bytes": 1 << 26})


def spec(
    model: Path, batches: dict[str, Any], *, ours: bool = True, layout: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """What `drive.py` is to do with one engine.

    Args:
        model: Folder of the model.
        batches: By name, the arguments of `drive.generate`.
        ours: Whether our plugin shall serve.
        layout: Physical order of vLLM's KV cache; None leaves it to vLLM.
        **arguments: Of vLLM's `LLM`, on top of ENGINE.
    """
    engine = ENGINE | arguments
    return {"model": str(model), "ours": ours, "layout": layout, "engine": engine, "batches": batches}


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
    spec_file, result_file, log_file = (folder / name for name in ("spec.json", "result.json", "log.txt"))
    spec_file.write_text(json.dumps(engines))
    command = [sys.executable, str(DRIVER), str(spec_file), str(result_file)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | QUIET | environment,
            stdin=subprocess.PIPE,  # never written to: the driver ends when this process does
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"killed after {seconds} s"
        finally:
            end_group(process)
    assert status == 0, f"vLLM's driver ended with {status}:\n" + "\n".join(log_file.read_text().splitlines()[-40:])
    return json.loads(result_file.read_text())
