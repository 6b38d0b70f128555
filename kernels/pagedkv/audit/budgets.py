"""Budgets as data, and the judgement of one code object against them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AuditError
from .machine import ARCHES

if TYPE_CHECKING:
    from .compilation import Figures

FILE = Path(__file__).with_name("budgets.toml")


class InvalidBudgetsError(AuditError):
    """`budgets.toml` has an unknown key or a value that cannot be a limit."""


@dataclass(frozen=True)
class KernelBudget:
    """Limits of one Triton function."""

    tile: str = ""
    """Name of the compile-time argument that holds its tile; empty for kernels without one."""
    mfma: int = 0
    wide_share: float = 0.0


@dataclass(frozen=True)
class Budgets:
    """The whole file."""

    vgpr_spills: int
    scratch_bytes: int
    kernels: dict[str, KernelBudget]
    evidence: dict[str, KernelBudget]

    def tile_argument(self, kernel: str) -> str:
        """Compile-time argument holding the tile of `kernel`, ours or not; empty if unknown."""
        return (self.kernels.get(kernel) or self.evidence.get(kernel) or KernelBudget()).tile

    def violations(self, figures: Figures, *, dense_rows: bool) -> list[str]:
        """What is wrong with one compiled kernel of ours, one sentence each; empty when it is within budget.

        Args:
            figures: The kernel.
            dense_rows: Whether the cache layout lets a lane read 16 consecutive bytes of a row.
        """
        budget = self.kernels.get(figures.kernel)
        if budget is None:
            return [f"{figures.kernel} has no budget: add [kernels.{figures.kernel}] to {FILE.name}"]
        code, text, limit = figures.code, figures.text, ARCHES[figures.arch].lds_bytes
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
        share = text.wide_share()
        if dense_rows and budget.wide_share and (share is None or share < budget.wide_share):
            narrow = ", ".join(f"{s.count} of {s.width} B from {s.source}" for s in text.loads if s.width < 16)
            found.append(
                f"{share or 0:.0%} of the loaded bytes come in 16-byte loads (at least {budget.wide_share:.0%}): "
                f"{narrow or 'no loads at all'}"
            )
        if figures.register_waves != text.occupancy:
            found.append(
                f"the audit's register model says {figures.register_waves} waves per SIMD, LLVM says {text.occupancy}: "
                "one of them is wrong, correct machine.py"
            )
        return found


def lds_message(kernel: str, lds_bytes: int, arch: str) -> str:
    """The sentence for a kernel that cannot be launched for want of LDS."""
    return (
        f"{kernel} needs {lds_bytes} B of LDS, {arch} has {ARCHES[arch].lds_bytes} B per workgroup: every launch would "
        "raise OutOfResources; derive the tile from the LDS size, not from the block size"
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
    unknown = set(data) - {"every", "kernels", "evidence"}
    if unknown or set(data.get("every", {})) != {"vgpr_spills", "scratch_bytes"}:
        raise InvalidBudgetsError(
            f"{path.name}: expected [every] with vgpr_spills and scratch_bytes, and tables under kernels and evidence"
            + (f"; got {', '.join(sorted(unknown))}" if unknown else "")
        )
    limits = {key: _number(path, f"every.{key}", value, int) for key, value in data["every"].items()}
    return Budgets(
        **limits,
        kernels={name: _kernel(path, name, table) for name, table in data.get("kernels", {}).items()},
        evidence={name: _kernel(path, name, table) for name, table in data.get("evidence", {}).items()},
    )


def _kernel(path: Path, name: str, table: dict[str, Any]) -> KernelBudget:
    known = {field.name for field in fields(KernelBudget)}
    if unknown := set(table) - known:
        raise InvalidBudgetsError(
            f"{path.name}: {name} has unknown {', '.join(sorted(unknown))}; known: {sorted(known)}"
        )
    if not isinstance(table.get("tile", ""), str):
        raise InvalidBudgetsError(f"{path.name}: {name}.tile is the name of a kernel argument, got {table['tile']!r}")
    if "mfma" in table:
        _number(path, f"{name}.mfma", table["mfma"], int)
    if "wide_share" in table and _number(path, f"{name}.wide_share", table["wide_share"], float) > 1:
        raise InvalidBudgetsError(f"{path.name}: {name}.wide_share is a share, got {table['wide_share']}")
    return KernelBudget(**table)


def _number(path: Path, where: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or value < 0:
        raise InvalidBudgetsError(f"{path.name}: {where} must be a {kind.__name__} of at least 0, got {value!r}")
    return value
