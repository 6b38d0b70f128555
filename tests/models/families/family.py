"""What is declared of a model family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PretrainedConfig

PLATFORMS = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Family:
    """One family."""

    name: str
    """In ids of tests: lower case, hyphens."""
    title: str
    """What its layers are."""
    architecture: str
    """Name under which vLLM's registry knows the model class."""
    config: Callable[[], PretrainedConfig] | None
    """Makes the tiny config; None where transformers has no such class."""
    attention: str
    """"paged", "latent" (MLA), "cross" (beside self attention) or "" for none."""
    states: tuple[str, ...] = ()
    """What a state page holds, in vLLM's order: "conv", "ssm", "delta"."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's `LLM` on every platform."""
    engine_cpu: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments on the CPU platform."""
    engine_gpu: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments on CUDA and ROCm."""
    stand_ins: tuple[str, ...] = ()
    """Operators that the CPU platform lacks and `stand_ins.py` supplies."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Platform of PLATFORMS to a regular expression: what vLLM's error there says. A platform not named runs it."""

    @property
    def fp8_cache(self) -> bool:
        """Whether its KV cache holds FP8 codes."""
        return str(self.engine.get("kv_cache_dtype", "auto")).startswith("fp8")

    def arguments(self, platform: str) -> dict[str, Any]:
        """Arguments of vLLM's `LLM` beyond those that all engine tests share.

        Raises:
            KeyError: `platform` is none of PLATFORMS.
        """
        if platform not in PLATFORMS:
            raise KeyError(f"platform {platform!r}; one of {', '.join(PLATFORMS)}")
        return {**self.engine, **(self.engine_cpu if platform == "cpu" else self.engine_gpu)}
