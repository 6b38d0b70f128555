"""Every feature a request can ask for, in the order in which a rejection names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from .request import Request

Task = Literal["decode", "prefill", "write", "gather"]
"""`prefill` is every query with more than a decode step's tokens: prefill, and extend of a cached context."""
TASKS: tuple[Task, ...] = ("decode", "prefill", "write", "gather")
READERS: tuple[Task, ...] = ("decode", "prefill")

HARDWARE_FP8 = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn", "sm_90": "e4m3fn"}
"""The 4-bit-exponent format that the matrix and conversion instructions of an arch mean (CDNA3 and CDNA4 ISA, "FP8";
PTX ISA `.e4m3`). The same byte read as the other format is wrong by a factor of 2."""

UNKNOWN_BLOCKS = 1 << 62
"""Stands for a pool of unknown size: more than any limit."""


@dataclass(frozen=True)
class Feature:
    """One column of the table of limits."""

    key: str
    """Its name in the data."""
    value: Callable[[Request, Task], object]
    """What a request asks of a kernel that does a task; None is nothing."""
    words: Callable[[Request], str]
    """The same for a person."""
    tasks: tuple[Task, ...] = TASKS
    """Tasks that have it; a kernel of another task does not state it."""


def _kv_cache_dtype(request: Request, _task: Task) -> str:
    hardware = HARDWARE_FP8.get(request.arch)
    return "hardware_fp8" if request.kv_cache_dtype == hardware else request.kv_cache_dtype


def _plain(key: str, tasks: tuple[Task, ...] = TASKS) -> Feature:
    def value(request: Request, _task: Task) -> object:
        return getattr(request, key) or None  # False is not asked for

    return Feature(key, value, lambda request: f"{key} {getattr(request, key)}", tasks)


FEATURES: tuple[Feature, ...] = (
    _plain("arch"),
    _plain("attn_type", READERS),
    _plain("head_size"),
    _plain("dtype"),
    Feature("kv_cache_dtype", _kv_cache_dtype, lambda r: f"kv_cache_dtype {r.kv_cache_dtype} on {r.arch}"),
    Feature(
        "kv_scales",
        lambda r, _: None if r.kv_scales == "none" else r.kv_scales,
        lambda r: f"kv_scales {r.kv_scales}",
    ),
    Feature("packing", lambda r, _: r.layout.packing, lambda r: f"packing {r.packing}"),
    Feature(
        "sides",
        lambda r, _: "planes" if r.layout.has_native_kv_cache_layout else "interleaved",
        lambda r: f"sides {r.sides}",
    ),
    _plain("block_size"),
    Feature(
        "num_blocks",
        lambda r, _: r.num_blocks or UNKNOWN_BLOCKS,
        lambda r: f"num_blocks {r.num_blocks or 'not given'}",
    ),
    Feature(
        "gqa",
        lambda r, _: r.num_q_heads // r.num_kv_heads,
        lambda r: f"gqa {r.num_q_heads // r.num_kv_heads}",
        READERS,
    ),
    _plain("window", READERS),
    _plain("softcap", READERS),
    _plain("alibi", READERS),
    _plain("sinks", READERS),
    Feature("scale", lambda r, _: r.custom_scale, lambda r: f"scale {r.scale:g}", READERS),
    Feature("q_len", lambda r, task: r.q_len if task == "decode" else None, lambda r: f"q_len {r.q_len}", READERS),
    Feature(
        "mask",
        lambda r, _: "causal" if r.causal else "full",
        lambda r: f"mask {'causal' if r.causal else 'full'}",
        READERS,
    ),
    _plain("max_seq_len", READERS),
)


def stated(tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """Return the features that a kernel of these tasks must state; of a reader also its dependence on `batch_size`."""
    keys = tuple(feature.key for feature in FEATURES if set(tasks) & set(feature.tasks))
    return (*keys, "batch_size") if set(tasks) & set(READERS) else keys
