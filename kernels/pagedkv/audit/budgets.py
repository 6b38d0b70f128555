"""Budgets of code objects: limits of registers, LDS and loads from `budgets.toml`, and what breaks them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .code_object import wide_share
from .errors import InvalidBudgetsError
from .machine import COMPUTE_UNITS

if TYPE_CHECKING:
    from .compile import Figures

FILE = Path(__file__).with_name("budgets.toml")

_LIMITS = {"vgpr_spills": int, "scratch_bytes": int, "wide_share": float}
"""Keys of `[every]`."""


@dataclass(frozen=True)
class KernelBudget:
    """Limits of one Triton function."""

    tile: str = ""
    """Compile-time argument that holds the tokens of K and V that a program handles at once; empty without one."""
    rows: str = ""
    """Compile-time argument that holds the query rows of a program; empty without one."""
    mfma: int = 0
    wide: tuple[str, ...] = ()
    """Pointer arguments through which rows of K and V are read, 16 bytes at a time wherever rows allow it."""


FIGURES = ("waves_per_simd", "kv_tokens_in_flight", "query_rows_in_flight")
"""Figures in which our kernels and vLLM's can be compared; of each, more is better."""


@dataclass(frozen=True)
class Comparison:
    """One `[[compare]]`: ours must reach theirs in one figure."""

    operation: str
    ours: str
    """Our Triton function."""
    theirs: str
    """vLLM's."""
    figure: str
    """One of `FIGURES`."""


@dataclass(frozen=True)
class Budgets:
    """The whole file."""

    vgpr_spills: int
    scratch_bytes: int
    wide_share: float
    comparisons: tuple[Comparison, ...]
    kernels: dict[str, KernelBudget]
    evidence: dict[str, KernelBudget]

    def known(self, kernel: str) -> KernelBudget:
        """What is declared of a Triton function, ours or not."""
        return self.kernels.get(kernel) or self.evidence.get(kernel) or KernelBudget()

    def narrow(self, figures: Figures, pointer: str) -> str:
        """What is wrong with the loads through `pointer`; empty if they are as wide as asked."""
        sites = figures.text.loads_through(pointer)
        if not sites:
            return f"no tl.load through {pointer} in the machine code: correct the kernel, or `wide` in {FILE.name}"
        share = wide_share(sites)
        if share >= self.wide_share:
            return ""
        narrow = ", ".join(f"{site.count} of {site.width} B at {site.source}" for site in sites if site.width < 16)
        return (
            f"{share:.0%} of the bytes read through {pointer} come in 16-byte loads, at least {self.wide_share:.0%} "
            f"must: {narrow}"
        )

    def violations(self, figures: Figures, *, scattered: tuple[str, ...] = ()) -> list[str]:
        """What is wrong with one compiled kernel of ours, one sentence each; empty when it is within budget.

        Args:
            figures: The kernel.
            scattered: Pointers through which the cache layout lets no lane read 16 consecutive bytes.
        """
        budget = self.kernels.get(figures.kernel)
        if budget is None:
            return [f"{figures.kernel} has no budget: add [kernels.{figures.kernel}] to {FILE.name}"]
        code, text, limit = figures.code, figures.text, COMPUTE_UNITS[figures.arch].lds_bytes
        found = []
        if figures.lds_bytes > limit:
            found.append(lds_message(figures.kernel, figures.lds_bytes, figures.arch))
        if code.vgpr_spills > self.vgpr_spills:
            found.append(
                f"{code.vgpr_spills} VGPRs spilled (budget {self.vgpr_spills}) at {code.vgpr} of 512: "
                "use a smaller tile or more waves"
            )
        if code.scratch_bytes > self.scratch_bytes:
            found.append(f"{code.scratch_bytes} B of scratch per work-item (budget {self.scratch_bytes})")
        if text.mfma < budget.mfma:
            found.append(
                f"{text.mfma} MFMA instructions (at least {budget.mfma}): the dot product runs on the vector ALU"
            )
        wide = (pointer for pointer in budget.wide if pointer not in scattered)
        found += [problem for pointer in wide if (problem := self.narrow(figures, pointer))]
        if figures.register_waves != text.occupancy:
            found.append(
                f"the audit's register model says {figures.register_waves} waves per SIMD, LLVM says {text.occupancy}: "
                "one of them is wrong, correct machine.py"
            )
        return found


def lds_message(kernel: str, lds_bytes: int, arch: str) -> str:
    """The sentence for a kernel that cannot be launched for want of LDS."""
    return (
        f"{kernel} needs {lds_bytes} B of LDS, {arch} has {COMPUTE_UNITS[arch].lds_bytes} B per workgroup: "
        "every launch would raise OutOfResources; derive the tile from the LDS size, not from the block size"
    )


def load_budgets(path: Path = FILE) -> Budgets:
    """Read budgets.

    Raises:
        InvalidBudgetsError: Not TOML, an unknown key, or a value of the wrong type or sign.
    """
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidBudgetsError(f"{path.name} is not TOML: {error}") from error
    unknown = set(data) - {"every", "kernels", "evidence", "compare"}
    if unknown or set(data.get("every", {})) != set(_LIMITS):
        raise InvalidBudgetsError(
            f"{path.name}: expected [every] with {', '.join(_LIMITS)}, and tables under kernels and evidence"
            + (f"; got {', '.join(sorted(unknown))}" if unknown else "")
        )
    limits = {key: _number(path, f"every.{key}", data["every"][key], kind) for key, kind in _LIMITS.items()}
    if limits["wide_share"] > 1:
        raise InvalidBudgetsError(f"{path.name}: every.wide_share is a share, got {limits['wide_share']}")
    return Budgets(
        **limits,
        comparisons=tuple(_comparison(path, table) for table in data.get("compare", [])),
        kernels={name: _kernel(path, name, table) for name, table in data.get("kernels", {}).items()},
        evidence={name: _kernel(path, name, table) for name, table in data.get("evidence", {}).items()},
    )


def _kernel(path: Path, name: str, table: dict[str, Any]) -> KernelBudget:
    known = {field.name for field in fields(KernelBudget)}
    if unknown := set(table) - known:
        raise InvalidBudgetsError(
            f"{path.name}: {name} has unknown {', '.join(sorted(unknown))}; known: {sorted(known)}"
        )
    for key in ("tile", "rows"):
        if not isinstance(table.get(key, ""), str):
            raise InvalidBudgetsError(f"{path.name}: {name}.{key} names a kernel argument, got {table[key]!r}")
    if "mfma" in table:
        _number(path, f"{name}.mfma", table["mfma"], int)
    wide = table.get("wide", [])
    if not isinstance(wide, list) or not all(isinstance(pointer, str) for pointer in wide):
        raise InvalidBudgetsError(f"{path.name}: {name}.wide is a list of kernel arguments, got {wide!r}")
    return KernelBudget(**(table | {"wide": tuple(wide)}))


def _comparison(path: Path, table: dict[str, Any]) -> Comparison:
    if set(table) != {field.name for field in fields(Comparison)} or table["figure"] not in FIGURES:
        raise InvalidBudgetsError(
            f"{path.name}: [[compare]] takes operation, ours, theirs and a figure of {', '.join(FIGURES)}; got {table}"
        )
    return Comparison(**table)


def _number(path: Path, where: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or value < 0:
        raise InvalidBudgetsError(f"{path.name}: {where} must be a {kind.__name__} of at least 0, got {value!r}")
    return value
