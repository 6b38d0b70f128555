# SPDX-License-Identifier: Apache-2.0
"""What a driver serves, a family's tiny model or a published checkpoint: its folder, its oracle, its engines."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from families import checkpoints, engine, mtp, oracle
from families.engine import FamilyEngine
from families.family import FAMILIES
from families.oracle import PublishedOracle
from families.plans import COMMON, GRAPHS, plans, published_plans

if TYPE_CHECKING:
    from families.family import Family
    from families.plans import EnginePlan
    from families.published import Checkpoint

BEST = 20
"""Tokens of each distribution that are compared of a published checkpoint: all words of a position would be up to 262
thousand Python objects."""

ASKED = 8192
"""Longest request of the engine that is asked for its block: vLLM makes none that is longer than a request."""

SCANNED = 256
"""Tokens that Mamba-2's scan takes at once in published models."""


class Tiny:
    """The tiny model of a family; every word of a distribution is compared."""

    best: int | None = None
    measured = True
    """Whether what is declared of vLLM's limits was measured on this very model."""

    def __init__(self, family: Family, folder: Path) -> None:
        """`folder` is where its checkpoint is written."""
        self.family, self._folder = family, folder

    @cached_property
    def checkpoint(self) -> Path:
        """Its folder."""
        engine.register(self.family.architecture)
        engine.register(self.family.drafter)
        folder = self._folder / f"{self.family.name}-model"
        checkpoints.save(self.family, folder, self.dtype)
        return folder

    @cached_property
    def oracle(self) -> oracle.Oracle:
        """What transformers computes with it."""
        return oracle.Oracle.load(self.family, self.checkpoint, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations. GPUs multiply float32 in TF32, with fewer bits than the oracle's float32 has."""
        return torch.float32 if current_platform.is_cpu() else torch.float16

    @cached_property
    def heads(self) -> tuple[mtp.Head, mtp.Head]:
        """What its own head drafts (MTP) in transformers, in float64 and in its dtype."""
        models, attention = (self.oracle.exact, self.oracle.working), self.oracle.attention
        exact, working = (mtp.Head.read(self.family, model, self.checkpoint, attention) for model in models)
        return exact, working

    def labels(self, engine: FamilyEngine) -> dict[str, str]:  # noqa: ARG002 - of others it matters which engine
        """What a cell says of it beside who served."""
        return {}

    def plans(self, platform: str) -> tuple[EnginePlan, ...]:
        """Its engines."""
        return plans(self.family, platform)

    def arguments(self, platform: str, own: dict[str, Any]) -> dict[str, Any]:
        """Of vLLM's `LLM`; `own` are those of the plan."""
        memory = {"kv_cache_memory_bytes": 1 << 28}  # given, not measured, so that engines can share a GPU
        here = {} if platform == "cpu" else GRAPHS | {"gpu_memory_utilization": 0.1, "mamba_ssm_cache_dtype": "float32"}
        kind = {"dtype": str(self.dtype).removeprefix("torch.")}
        return COMMON | memory | kind | here | own | self.family.arguments(platform)


class PublishedFamily(Tiny):
    """A published checkpoint; the BEST words of each distribution are compared."""

    best: int | None = BEST
    measured = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(FAMILIES[checkpoint.family], Path(checkpoint.folder))
        self._published = checkpoint

    @cached_property
    def checkpoint(self) -> Path:
        """Its folder."""
        engine.register(self.family.architecture)
        return self._folder

    @cached_property
    def oracle(self) -> oracle.Oracle:
        """What transformers computes with it."""
        device = "cpu" if current_platform.is_cpu() else "cuda"
        return PublishedOracle.read(Path(self._published.judged_by), self.dtype, best=BEST, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Its own; where that is not served, the nearest that is.

        Triton's interpreter computes bfloat16 wrongly: float32 there. GPUs compute float32 as `Tiny.dtype` says:
        bfloat16 there, which has the same range.
        """
        own, cpu = getattr(torch, self._published.dtype), current_platform.is_cpu()
        instead = {(torch.bfloat16, True): torch.float32, (torch.float32, False): torch.bfloat16}
        return instead.get((own, cpu), own)

    def labels(self, engine: FamilyEngine) -> dict[str, str]:
        """Its dtype, the block that vLLM has made, and the commit that it was fetched at."""
        found = {"dtype": str(self.dtype).removeprefix("torch."), "block_size": str(engine.block_size)}
        return found | ({"revision": self._published.revision} if self._published.revision else {})

    def plans(self, platform: str) -> tuple[EnginePlan, ...]:
        """Its engines. How large its blocks are only an engine knows, so one is started to ask.

        Without attention a block is as long as a request may be, and what counts is the scan's chunk.

        Raises:
            Exception: Whatever vLLM raises when it cannot start it.
        """
        if not self.family.attention:
            return published_plans(self.family, platform, SCANNED)
        reach: dict[str, Any] = {"max_model_len": min(self._published.positions or ASKED, ASKED)}
        reach["num_gpu_blocks_override"] = None  # as many as such a request takes, however small they are
        with FamilyEngine(self.checkpoint, poison=False, **self.arguments(platform, reach)) as engine:
            block = engine.block_size
        return published_plans(self.family, platform, block)

    def arguments(self, platform: str, own: dict[str, Any]) -> dict[str, Any]:
        """Of vLLM's `LLM`, with a pool for real pages, and states in float32 unless the plan says otherwise."""
        room = {"kv_cache_memory_bytes": 1 << (30 if platform == "cpu" else 34), "mamba_ssm_cache_dtype": "float32"}
        return super().arguments(platform, room | own)
