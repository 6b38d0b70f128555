"""Run in a process of its own: start vLLM, answer the batches of a spec, write what came out.

    python tests/models/drive.py spec.json result.json

A process of its own, because the environment decides whether Triton interprets and which plugins vLLM loads, and
because whatever the engine leaves behind ends with its process group. It ends when its standard input closes, too: a
test run that is killed takes its engines with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform

from pagedkv.vllm_plugin.errors import NotServedError
from pagedkv.vllm_plugin.inspect import WORKER_EXTENSION, build_llm, require_served, served_layers


def main(spec_file: Path, result_file: Path) -> None:
    """Do what the spec says; the result is written once, at the end, so that half a run is no result."""
    spec = json.loads(spec_file.read_text())
    if spec["ours"]:
        llm = build_llm(spec["model"], **spec["engine"])
    else:
        # The CPU platform takes no choice; on GPUs this backend is in every build of vLLM, whatever libraries it has.
        backend = {} if current_platform.is_cpu() else {"attention_backend": "TRITON_ATTN"}
        llm = LLM(spec["model"], worker_extension_cls=WORKER_EXTENSION, **backend, **spec["engine"])
    result: dict[str, Any] = {"batches": {}}
    if spec["ours"]:
        result["poisoned_bytes"] = llm.collective_rpc("pagedkv_poison")
    for name, batch in spec["batches"].items():
        llm.collective_rpc("pagedkv_reset")
        answers = generate(llm, batch["prompts"], batch["max_tokens"])
        result["batches"][name] = {"answers": answers, "layers": served_layers(llm)}
    result["block_size"] = llm.llm_engine.vllm_config.cache_config.block_size
    result["refusal"] = ""
    try:
        require_served(served_layers(llm))
    except NotServedError as error:
        result["refusal"] = str(error)
    result_file.write_text(json.dumps(result))


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens of one batch, with all log-probabilities of prompts and answers."""
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [{"tokens": list(o.outputs[0].token_ids), "log_probs": log_probs(o)} for o in outputs]


def log_probs(output: RequestOutput) -> list[list[float]]:
    """[prompt + answer - 1, vocabulary]: row i is the distribution after the first i + 1 tokens."""
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [[row[token].logprob for token in range(len(row))] for row in rows]


def end_with_parent() -> None:
    """Kill this process group, engine core and workers included, once nobody holds the other end of standard input."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
