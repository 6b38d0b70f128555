# SPDX-License-Identifier: Apache-2.0
"""Which engines a family is served by, and what each of them drives. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from families.family import TINY_ALONE
from families.scripted import DRAFTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from families.family import Family

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": 192,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 37,  # divides neither the block nor the prompts
    "enable_prefix_caching": False,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 64,
    "seed": 0,
}

GRAPHS: dict[str, Any] = {
    # Decode runs as captured graphs, prompts run eagerly; without torch.compile, which would take minutes a family.
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
"""On GPUs, of every engine. Three requests are padded to four."""

PRODUCTION: dict[str, Any] = {
    # None leaves a choice to vLLM: torch.compile, graphs, a prefix cache where layers attend, its max_num_seqs.
    "enforce_eager": False,
    "compilation_config": None,
    "enable_prefix_caching": None,
    "max_num_seqs": None,
}
"""Of an engine as it is started in production."""

NGRAMS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,  # or of a text without repetition nothing is drafted
    "prompt_lookup_max": 3,
}
"""Drafts of what came behind the last few tokens when they came before."""

PREDICTED = 2
"""Drafts of a step by a checkpoint's own head. The second is drafted from what the head itself has made."""

LONG: dict[str, Any] = {"max_model_len": 512}
"""Of scripted drafts beside states: two blocks as an FP8 cache gets them. There is no prefix cache: vLLM would copy
cached states with a Triton kernel, which its CPU platform does not have."""

SCRIPT = "families.scripted.ScriptedDrafter"

STEP = {"cpu": 256, "cuda": 1024, "rocm": 1024}
"""Tokens of one step in production: no fewer than vLLM's own max_num_seqs, so that vLLM starts."""

INFLATED = (544, 784, 1056, 1152)
"""Tokens of a block that vLLM chooses for Qwen3-Next with bfloat16 states, a 48-head GDN with float32 states,
Qwen3.5-35B, and Qwen3-Next on CPUs: kernels.md gives the arithmetic. None is a power of two."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its arguments, and the behaviours that it drives, in this order."""

    behaviours: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    poison: bool = True
    """Whether the KV pool holds NaN at the start. A prefix cache must not be poisoned."""
    compiled: bool = False
    """Whether torch.compile is at work."""


def plans(family: Family, platform: str, sizes: Sequence[int] = ()) -> tuple[EnginePlan, ...]:
    """The engines of one family.

    Args:
        family: Which one.
        platform: "cpu", "cuda" or "rocm".
        sizes: Tokens of the blocks to try. Without any they are those that its models get; on GPUs all of INFLATED too.
    """
    cache = {"enable_prefix_caching": True}
    # One engine for both, where a prefix cache is known to work beside everything else.
    second = (
        (EnginePlan(("again", "prefix"), cache, poison=False),)
        if family.attention == "paged"
        else (EnginePlan(("again",)), EnginePlan(("prefix",), cache, poison=False))
    )
    # Of one engine where there are graphs.
    together = (("production",), ("graphs",)) if platform == "cpu" else (("production", "graphs"),)
    sizes = sizes or (family.blocks if platform == "cpu" else sorted({*family.blocks, *INFLATED}))
    return (
        EnginePlan(("prefill", "decode", "chunked", "mixed", "preempt", "reuse", "fuzz")),
        *second,
        EnginePlan(
            ("spec",),
            {"speculative_config": NGRAMS},
        ),
        EnginePlan(
            ("verify",),
            (LONG if family.states else cache)
            | {"speculative_config": {"method": "custom_class", "model": SCRIPT, "num_speculative_tokens": DRAFTS}},
            poison=bool(family.states),
        ),
        EnginePlan(("mtp",), predicting(platform)),
        *(EnginePlan(("blocks",), inflated(size)) for size in sizes),
        EnginePlan(("state",), {"mamba_ssm_cache_dtype": state_dtype(family, platform)}),
        EnginePlan(("padded",)),
        *(EnginePlan(columns, production(family, platform), poison=False, compiled=True) for columns in together),
    )


def state_dtype(family: Family, platform: str) -> str:
    """Of states, where a cell asks for another one than the model's.

    Not bfloat16 on CPUs where our scan serves: Triton's interpreter computes it wrongly, and the scan refuses it there.
    """
    return "float16" if family.ssd and platform == "cpu" else "bfloat16"


def published_plans(family: Family, platform: str, block: int) -> tuple[EnginePlan, ...]:
    """The engines of a published checkpoint.

    Args:
        family: Its family.
        platform: "cpu", "cuda" or "rocm".
        block: Tokens of its KV block, as vLLM inflates it. Requests reach across two edges of it; a chunk is two thirds
            of it, so that chunks end at other places than blocks.
    """
    reach = {"max_model_len": max(COMMON["max_model_len"], 2 * block + 64)}
    reach |= {"max_num_batched_tokens": max(COMMON["max_num_batched_tokens"], 2 * block // 3 | 1)}
    wide = max(block, INFLATED[0])  # where its states do not make it so large, the least that those of another make
    return tuple(
        replace(plan, arguments=plan.arguments if plan.behaviours == ("blocks",) else reach | plan.arguments)
        for plan in plans(family, platform, (wide,))
        if plan.behaviours[0] not in TINY_ALONE
    )


def predicting(platform: str) -> dict[str, Any]:
    """Arguments of an engine that drafts with the checkpoint's own head; on GPUs four requests fit a graph."""
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": PREDICTED}}
    if platform == "cpu":
        return drafts
    sizes = [*GRAPHS["compilation_config"]["cudagraph_capture_sizes"], COMMON["max_num_seqs"] * (1 + PREDICTED)]
    return drafts | {"compilation_config": GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": sizes}}


def inflated(size: int) -> dict[str, Any]:
    """Arguments of an engine with blocks of `size` tokens, and prompts that cross from one into the next."""
    return {
        "block_size": size,
        "num_gpu_blocks_override": 10 + 4 * (64 // size),
        "max_model_len": size + 64,
        "max_num_batched_tokens": 256,
    }


def production(family: Family, platform: str) -> dict[str, Any]:
    """Arguments of an engine as in production, but for its size."""
    step = STEP[platform]
    # On CPUs the scan of Mamba-2 gives no states within a step; where a step goes beyond a block vLLM reads past the
    # end of what it gives (IndexError). There a block is as long as a step.
    here: dict[str, Any] = {"block_size": step} if platform == "cpu" else {}
    if platform == "cpu" and family.attention in ("cross", "latent"):
        here = {}  # its context is no longer than a step, and must hold several blocks
    return (
        PRODUCTION
        | here
        | {
            "max_num_batched_tokens": step,
            # vLLM chunks no prompt of MLA on CPUs.
            "max_model_len": step if platform == "cpu" and family.attention == "latent" else 2 * step + 64,
            "num_gpu_blocks_override": step + 128,  # a block for each sequence, or vLLM captures no full graphs
        }
    )


def not_here(platform: str, family: Family, behaviour: str) -> str | None:
    """Why there is no engine to start for a behaviour; None where there is."""
    if platform == "cpu" and behaviour == "padded":
        return "vLLM's CPU platform captures no graphs, so no batch is padded"
    if platform != "cpu" and behaviour == "verify":
        return "drafts are scripted in model runner V1 on the CPU; GPUs draft by n-grams (spec)"
    if platform == "cpu" and behaviour == "graphs":
        return "vLLM's CPU platform captures no graphs: a step is compiled and run"
    if family.attention == "cross" and behaviour == "prefix":
        return "vLLM caches no prefixes of encoder-decoders: CrossAttentionManager does not support caching"
    return None
