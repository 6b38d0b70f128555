"""From compilations to findings: one for each configuration, one for each kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.audit.errors import LdsExceededError
from pagedkv.audit.findings import Finding, Outcome
from pagedkv.audit.isolation import Crash
from pagedkv.audit.judge import words
from pagedkv.audit.machine import ARCHES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedkv.audit.compilation import Figures

    from .declared import Declared
    from .kernel import Kernel

USABLE, OVERSIZE, CRASHED, UNKNOWN = "usable", "oversize", "crashed", "unknown"
"""What became of a configuration: code that fits, more LDS than there is, no code, no answer in time."""


@dataclass(frozen=True)
class Compilation:
    """One configuration of one kernel on one arch."""

    arch: str
    kernel: Kernel
    configuration: str
    result: list[Figures] | Exception | Crash
    seconds: float

    @property
    def id(self) -> str:
        """`<arch>/<package>/<kernel>/<configuration>`."""
        return f"{self.arch}/{self.kernel.id}/{self.configuration}"

    @property
    def fate(self) -> str:
        """One of `USABLE`, `OVERSIZE`, `CRASHED`, `UNKNOWN`."""
        if isinstance(self.result, LdsExceededError):
            return OVERSIZE
        if isinstance(self.result, Crash) and self.result.timed_out:
            return UNKNOWN
        return USABLE if self.figures else CRASHED

    @property
    def figures(self) -> Figures | None:
        """Of the one kernel that the launch must compile; None if it compiled another one, or several, or none."""
        if isinstance(self.result, list) and [each.kernel for each in self.result] == [self.kernel.name]:
            return self.result[0]
        return None

    @property
    def words(self) -> str:
        """What went wrong."""
        if isinstance(self.result, list):
            compiled = ", ".join(each.kernel for each in self.result) or "nothing"
            return f"the launch must compile {self.kernel.name} alone; it compiled {compiled}"
        return words(self.result)


def judge_configuration(done: Compilation, declared: Declared | None, labels: Mapping[str, str]) -> Finding:
    """Whether a compilation is what it must be.

    Triton's autotuner drops a configuration that wants too much LDS. Any other failure of any configuration leaves the
    launch with an exception (`Autotuner._bench`), so one crash is enough to lose the kernel.

    Args:
        done: The compilation.
        declared: The declaration that concerns it, if there is one.
        labels: On top of the compilation's own.
    """
    outcome: Outcome = "pass"
    message = ""
    if declared and done.fate != UNKNOWN:
        if done.fate != CRASHED:
            outcome, message = "fail", f"it was declared to crash and does not ({done.fate}): remove the declaration"
        elif declared.matches(done.words):
            message = f"crashes as declared: {declared.why}"
        else:
            outcome, message = "fail", f"it crashes otherwise than declared ({declared.says!r}): {done.words}"
    elif done.fate == UNKNOWN:
        outcome, message = "inconclusive", done.words
    elif done.fate == CRASHED:
        outcome, message = "fail", f"a crash that nobody declared: {done.words}"
    elif done.fate == OVERSIZE:
        dropped = done.kernel.autotuned
        outcome = "pass" if dropped else "fail"
        message = f"{done.words}: {'the autotuner drops it' if dropped else 'every launch would raise OutOfResources'}"
    return Finding(done.id, outcome, done.seconds, message, _labels(done) | labels, _numbers(done))


def judge_kernel(group: Sequence[tuple[Compilation, Declared | None]], labels: Mapping[str, str]) -> Finding:
    """Whether a kernel is left with a configuration that compiles and fits.

    Args:
        group: All its configurations on one arch, each with the declaration that concerns it.
        labels: On top of the kernel's own.
    """
    compilations = [done for done, _ in group]
    first = compilations[0]
    fates = Counter(done.fate for done in compilations)
    outcome: Outcome = "pass"
    message = ""
    if not fates[USABLE]:
        said = ", ".join(f"{count} {fate}" for fate, count in fates.items())
        message = f"none of {len(compilations)} configurations can be launched: {said}"
        if all(declared and done.fate == CRASHED for done, declared in group):
            message += "".join(f", as declared: {why}" for why in {declared.why for _, declared in group if declared})
        else:
            outcome = "inconclusive" if fates[UNKNOWN] else "fail"
    numbers = {"configurations": len(compilations)} | {fate: fates[fate] for fate in (USABLE, OVERSIZE, CRASHED)}
    known = [done.figures for done in compilations if done.figures]
    if known:
        numbers |= {
            "spilling": sum(each.code.vgpr_spills > 0 or each.code.scratch_bytes > 0 for each in known),
            "lds_bytes": max(each.lds_bytes for each in known),
            "vgpr": max(each.code.vgpr for each in known),
            "mfma": max(each.text.mfma for each in known),
        }
    own = _labels(first) | labels
    del own["configuration"]
    seconds = sum(done.seconds for done in compilations)
    return Finding(f"{first.arch}/{first.kernel.id}", outcome, seconds, message, own, numbers)


def _labels(done: Compilation) -> dict[str, str]:
    return {
        "side": "mamba",
        "package": done.kernel.package,
        "kernel": done.kernel.id.partition("/")[2],
        "arch": done.arch,
        "configuration": done.configuration,
    }


def _numbers(done: Compilation) -> dict[str, float]:
    limit = ARCHES[done.arch].lds_bytes
    if isinstance(done.result, LdsExceededError):
        return {"lds_bytes": done.result.lds_bytes, "lds_limit_bytes": limit}
    if (figures := done.figures) is None:
        return {}
    return {
        "lds_bytes": figures.lds_bytes,
        "lds_limit_bytes": limit,
        "vgpr": figures.code.vgpr,
        "vgpr_spills": figures.code.vgpr_spills,
        "scratch_bytes": figures.code.scratch_bytes,
        "waves_per_simd": figures.waves_per_simd,
        "mfma": figures.text.mfma,
        "compile_seconds": round(figures.compile_seconds, 3),
    }
