# SPDX-License-Identifier: Apache-2.0
"""Cases of the audit: launches to compile, of our kernels, vLLM's, the Mamba packages' and the delta rules."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

Source = Literal["ours", "vllm", "mamba", "delta"]

SOURCES: dict[Source, str] = {
    "ours": "our_kernels",
    "vllm": "vllm_kernels",
    "mamba": "mamba_kernels",
    "delta": "delta_kernels",
}
"""Module beside this one whose `cases()` lists them. Imported by name: each needs packages that the others do not."""


@dataclass(frozen=True)
class LaunchConfiguration:
    """One of the configurations that a kernel of another package may be launched with."""

    kernel: str
    """`<package>/<Triton function>`, with a variant after it where one kernel is compiled at two shapes."""
    name: str
    count: int
    """Configurations that the kernel has."""
    autotuned: bool
    """Whether Triton's autotuner chooses, and so drops what does not fit."""
    taken: Callable[[], AbstractContextManager[object]] = field(
        default=contextlib.nullcontext, compare=False, repr=False
    )
    """A context in which the kernel's launcher takes it."""


@dataclass(frozen=True)
class Case:
    """One launch to compile."""

    source: Source
    name: str
    """Operation, dtype and shapes; of a configuration, kernel and configuration."""
    kernels: tuple[str, ...]
    """Triton functions that the launch must compile, in this order."""
    launch: Callable[[], object]
    """Runs a launcher on CPU tensors."""
    labels: Mapping[str, str]
    """What the case is about, for its findings."""
    optional: tuple[str, ...] = ()
    """What it may compile after those; nothing else."""
    scattered: tuple[str, ...] = ()
    """Pointers through which no lane can read 16 consecutive bytes in the case's cache layout."""
    expected_lds: int = 0
    """Planted defects: the bytes of LDS that it must be caught with."""
    configuration: LaunchConfiguration | None = None
    """Name of the configuration, for a kernel that is judged by all its configurations together."""

    def id(self, arch: str, kernel: str) -> str:
        """`<arch>/<source>/<case>/<kernel>`, or `<arch>/<package>/<kernel>/<configuration>`."""
        return f"{arch}/{self.name}" if self.configuration else f"{arch}/{self.source}/{self.name}/{kernel}"

    def launches(self, kernels: tuple[str, ...]) -> bool:
        """Whether these are the Triton functions that the case should compile."""
        count = len(self.kernels)
        return kernels[:count] == self.kernels and set(kernels[count:]) <= set(self.optional)


@cache
def cases_of(source: Source) -> tuple[Case, ...]:
    """Every case of a source.

    Raises:
        CannotRunHereError: A package that the source needs cannot be imported.
    """
    return tuple(importlib.import_module(f"{__package__}.{SOURCES[source]}").cases())


def select(only: Iterable[str], arches: Iterable[str], sources: Iterable[Source]) -> list[tuple[str, Case]]:
    """(arch, case) for each case with an id that contains one of `only`.

    Raises:
        CannotRunHereError: As `cases_of`.
    """
    cases = [case for source in sources for case in cases_of(source)]
    return [
        (arch, case)
        for arch in arches
        for case in cases
        if any(text in case.id(arch, kernel) for kernel in (*case.kernels, *case.optional) for text in only)
    ]
