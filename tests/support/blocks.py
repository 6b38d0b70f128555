# SPDX-License-Identifier: Apache-2.0
"""Block sizes as published hybrids get them on 1, 2, 4 and 8 ranks, from `pagedkv.routing` (held against vLLM)."""

from __future__ import annotations

from pathlib import Path

from pagedkv.errors import MisuseError
from pagedkv.routing.explain import Deployment, explain
from pagedkv.routing.model_config import layer_kinds, read_config

CONFIGS = Path(__file__).parents[1] / "kernels/routing/configs"
RANKS = (1, 2, 4, 8)

SEEN = (2048, 2144)
"""Block sizes that users reported: the block of Jamba in vLLM PR 38502, and one of a hybrid with an FP8 cache and
drafts."""


def made_by(model: str, cache: str = "auto") -> dict[int, int]:
    """Block size by number of ranks, of those that can share the model."""
    config = read_config(CONFIGS / f"{model}.json")
    sizes = {}
    for tp in RANKS:
        deployment = Deployment(
            arch="gfx950", providers=("pagedkv",), tp=tp, dtype="bfloat16", kv_cache_dtype=cache, max_seq_len=4096
        )
        try:
            sizes[tp] = explain(config, deployment).block_size
        except MisuseError:
            continue
    return sizes


def hybrids() -> list[str]:
    """Stored configs of models with attention and recurrent layers."""
    kept = {path.stem: {kind.keeps for kind in layer_kinds(read_config(path))} for path in CONFIGS.glob("*.json")}
    return sorted(name for name, keeps in kept.items() if {"cache", "state"} <= keeps)


def all_sizes() -> list[int]:
    """Every size that one of them gets, with a cache in its own dtype or in FP8, and those that users have met."""
    made = {size for model in hybrids() for cache in ("auto", "fp8") for size in made_by(model, cache).values()}
    return sorted(made | set(SEEN))
