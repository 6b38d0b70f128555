"""Run in a process of its own: start the engines of a spec one after the other, write what they answered.

    python tests/models/drive.py spec.json result.json

A process of its own, because the environment decides whether Triton interprets, which plugins vLLM loads and how pages
are packed, and because whatever an engine leaves behind ends with its process group. It ends when its standard input
closes, too: a test run that is killed takes its engines with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a program's own folder comes first, not tests/

from vllm import LLM, RequestOutput, SamplingParams, envs
from vllm.platforms import current_platform

from families.engine import clean, shut_down, starting
from pagedkv.vllm_plugin.errors import NotServedError
from pagedkv.vllm_plugin.inspect import WORKER_EXTENSION, build_llm, require_served, served_layers


def main(spec_file: Path, result_file: Path) -> None:
    """Do what the spec says; the result is written once, at the end, so that half a run is no result."""
    engines = json.loads(spec_file.read_text())
    result_file.write_text(json.dumps({name: one_engine(spec) for name, spec in engines.items()}))


def one_engine(spec: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, answer its batches, end it."""
    envs.disable_envs_cache()  # an engine before this one has frozen what vLLM reads from the environment
    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if spec["layout"] is not None:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = spec["layout"]
    with starting():
        if spec["ours"]:
            llm = build_llm(spec["model"], **spec["engine"])
        else:
            # The CPU platform takes no choice; on GPUs this backend is in every build of vLLM, whatever its libraries.
            backend = {} if current_platform.is_cpu() else {"attention_backend": "TRITON_ATTN"}
            llm = LLM(spec["model"], worker_extension_cls=WORKER_EXTENSION, **backend, **spec["engine"])
    result: dict[str, Any] = {"batches": {}}
    if spec["ours"]:
        result["poisoned_bytes"] = llm.collective_rpc("pagedkv_poison")
    for name, batch in spec["batches"].items():
        llm.collective_rpc("pagedkv_reset")
        result["batches"][name] = {"answers": generate(llm, **batch), "layers": served_layers(llm)}
    result["block_size"] = llm.llm_engine.vllm_config.cache_config.block_size
    result["refusal"] = ""
    try:
        require_served(served_layers(llm))
    except NotServedError as error:
        result["refusal"] = str(error)
    shut_down(llm)
    del llm
    clean()
    return result


def generate(
    llm: LLM, prompts: list[Any], max_tokens: int, *, ignore_eos: bool = True, log_probs: bool = True
) -> list[dict[str, Any]]:
    """Greedy tokens of one batch, and the log-probabilities of all tokens where they are asked for.

    Args:
        llm: The engine.
        prompts: Token ids; or `{"audio": seed, "tokens": ids}`, what a speech model hears and begins with.
        max_tokens: Answer length, at most.
        ignore_eos: Whether an answer goes on after its end.
        log_probs: Whether to return `[prompt + answer - 1, vocabulary]`: row i is the distribution after the first
            i + 1 tokens. An encoder-decoder model gives none of its prompt, so there rows begin after the prompt.
    """
    speech = any(isinstance(prompt, dict) for prompt in prompts)
    everything = -1 if log_probs else None
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=everything,
        prompt_logprobs=None if speech else everything,
        detokenize=False,
    )
    outputs = llm.generate([as_vllm(prompt) for prompt in prompts], sampling, use_tqdm=False)
    return [{"tokens": list(o.outputs[0].token_ids)} | ({"log_probs": table(o)} if log_probs else {}) for o in outputs]


def as_vllm(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    from families.speech import SAMPLING_RATE, audio

    heard = {"prompt": "", "multi_modal_data": {"audio": (audio(prompt["audio"]), SAMPLING_RATE)}}
    return {"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": prompt["tokens"]}}


def table(output: RequestOutput) -> list[list[float]]:
    rows = [*(output.prompt_logprobs or [None])[1:], *output.outputs[0].logprobs]
    return [[row[token].logprob for token in range(len(row))] for row in rows]


def end_with_parent() -> None:
    """Kill this process group, engine core and workers included, once nobody holds the other end of standard input."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
