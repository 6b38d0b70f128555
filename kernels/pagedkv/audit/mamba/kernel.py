"""One Triton kernel of a Mamba package: how it is launched, and every configuration it may be launched with."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .imports import pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

Package = Literal["mamba-ssm", "causal-conv1d", "vllm"]

ONLY = "as-launched"
"""Name of the configuration of a kernel whose launcher computes it from the shapes."""


@dataclass(frozen=True)
class Kernel:
    """One kernel at one serving shape."""

    package: Package
    name: str
    """Of the Triton function; a launch must compile this one and nothing else."""
    launch: Callable[[], object]
    """Its own package's launcher on CPU tensors."""
    configurations: Mapping[str, Callable[[], AbstractContextManager[object]]] = field(
        default_factory=lambda: {ONLY: contextlib.nullcontext}
    )
    """Name of a configuration -> a context in which the launcher takes it."""
    autotuned: bool = False
    """Whether Triton's autotuner chooses, and so drops what does not fit."""
    variant: str = ""
    """Tells two shapes of one kernel apart; empty where there is one."""

    @property
    def id(self) -> str:
        """`<package>/<kernel>`, and the variant behind it."""
        return f"{self.package}/{self.name}" + (f"-{self.variant}" if self.variant else "")


def autotuned(package: Package, tuner: Any, launch: Callable[[], object]) -> Kernel:
    """A kernel with every configuration among which Triton's autotuner would choose.

    Args:
        package: Whose it is.
        tuner: triton.runtime.Autotuner.
        launch: Its launcher.
    """
    configurations = {configuration_name(config): partial(pinned, tuner, config) for config in tuner.configs}
    return Kernel(package, tuner.base_fn.__name__, launch, configurations, autotuned=True)


def configuration_name(config: Any) -> str:
    """`M64-N32-K32-stages5-warps2` of a triton.Config."""
    sizes = [f"{name.removeprefix('BLOCK_SIZE').lstrip('_')}{value}" for name, value in config.kwargs.items()]
    return "-".join([*sizes, f"stages{config.num_stages}", f"warps{config.num_warps}"])
