"""The audit of the Mamba kernels from end to end: select, compile, judge."""

from __future__ import annotations

import functools
import importlib.metadata
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.audit.compilation import Figures, compile_launches
from pagedkv.audit.findings import exit_status, write_findings
from pagedkv.audit.isolation import run_isolated
from pagedkv.audit.warmth import progress, warm_up

from .declared import load_declared
from .imports import without_cuda
from .judge import Compilation, judge_configuration, judge_kernel
from .package_kernels import package_kernels
from .report import format_report
from .vllm_kernels import vllm_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.audit.findings import Finding

    from .declared import Declared
    from .kernel import Kernel

__all__ = ["exit_status", "format_report", "ids", "run", "select", "write_findings"]


@dataclass(frozen=True)
class Unit:
    """One configuration of one kernel to compile for one arch."""

    arch: str
    kernel: Kernel
    configuration: str

    @property
    def id(self) -> str:
        """As in its finding."""
        return f"{self.arch}/{self.kernel.id}/{self.configuration}"

    def compile(self) -> list[Figures]:
        """Compile it; meant for a child process, see `compile_launches`."""
        with self.kernel.configurations[self.configuration](), without_cuda():
            return compile_launches(self.arch, self.kernel.launch)


@functools.cache
def all_kernels() -> tuple[Kernel, ...]:
    """Those of the packages, then vLLM's own.

    Raises:
        CannotRunHereError: A package is missing or cannot be imported.
    """
    return (*package_kernels(), *vllm_kernels())


def select(only: str, arches: Sequence[str]) -> list[Unit]:
    """Each configuration of each kernel whose id contains `only`."""
    units = [
        Unit(arch, kernel, configuration)
        for arch in arches
        for kernel in all_kernels()
        for configuration in kernel.configurations
    ]
    return [unit for unit in units if only in unit.id]


def ids(units: Sequence[Unit]) -> list[str]:
    """What `--list` prints."""
    return [unit.id for unit in units]


def run(units: Sequence[Unit], *, version: str, jobs: int, timeout: float) -> tuple[list[Finding], int]:
    """Compile and judge.

    Args:
        units: From `select`.
        version: Of Triton.
        jobs: Compilers at a time.
        timeout: Seconds for one configuration.

    Returns:
        The findings, and how many code objects were read. A kernel of which only some configurations were selected
        gets no finding of its own: the others might be the ones that compile.

    Raises:
        CannotRunHereError: The AMD compiler does not work here.
        InvalidDeclarationError: See `load_declared`.
    """
    declarations = load_declared(all_kernels())
    warm_up()
    done: list[Compilation | None] = [None] * len(units)
    calls = [unit.compile for unit in units]
    for count, (index, result, seconds) in enumerate(run_isolated(calls, jobs=jobs, timeout=timeout), start=1):
        unit = units[index]
        done[index] = Compilation(unit.arch, unit.kernel, unit.configuration, result, seconds)
        progress(count, len(calls))
    compilations = [each for each in done if each is not None]
    return judge_all(compilations, declarations, version), sum(each.figures is not None for each in compilations)


def judge_all(compilations: Sequence[Compilation], declarations: Sequence[Declared], version: str) -> list[Finding]:
    """Findings of all configurations, then of all kernels of which every configuration was compiled.

    Args:
        compilations: In any order.
        declarations: Crashes that are expected.
        version: Of Triton.
    """
    findings = []
    by_kernel = defaultdict(list)
    for done in compilations:
        labels = {"triton": version, "version": _version(done.kernel.package)}
        declared = next((each for each in declarations if each.concerns(done, version)), None)
        findings.append(judge_configuration(done, declared, labels))
        by_kernel[done.arch, done.kernel.id].append((done, declared, labels))
    whole = (group for group in by_kernel.values() if len(group) == len(group[0][0].kernel.configurations))
    findings += [judge_kernel([(done, declared) for done, declared, _ in group], group[0][2]) for group in whole]
    return findings


@functools.cache
def _version(package: str) -> str:
    """Of the installed distribution; vLLM's CPU build has a name of its own."""
    for name in (package, f"{package}-cpu"):
        for distribution in importlib.metadata.distributions(name=name):
            return distribution.version
    return "unknown"
