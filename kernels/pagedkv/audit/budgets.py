# SPDX-License-Identifier: Apache-2.0
"""Budgets of code objects and known defects of a compiler, as data: `budgets.toml` and `declared.toml`.

A declared crash, spill or narrow load is checked both ways: what is not declared fails, and so does a declaration that
is no longer true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv import toml
from pagedkv.arch import limits
from pagedkv.errors import InvalidFileError

from .code_object import wide_share
from .machine import MACHINES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .cases import Case, LaunchConfiguration
    from .compile import Figures

FILE = Path(__file__).with_name("budgets.toml")
DECLARED = Path(__file__).with_name("declared.toml")


@dataclass(frozen=True)
class Limits:
    """Limits of every code object of ours."""

    vgpr_spills: int
    scratch_bytes: int
    wide_share: float
    """Least share of the bytes of K and V that come in 16-byte loads, where they can."""


@dataclass(frozen=True)
class KernelBudget:
    """Limits of one Triton function."""

    tile: str = ""
    """Compile-time argument that holds the tokens of K and V that a program handles at once; empty without one."""
    rows: str = ""
    """Compile-time argument that holds the query rows of a program; empty without one."""
    channels: tuple[str, ...] = ()
    """Compile-time arguments whose sum is what the products of a tile multiply its rows and tokens with."""
    mfma: int = 0
    mfma_share: float = 1.0
    """Least share of what the matrix instructions of a loop compute that the products of a tile need."""
    wmma_share: float = 1.0
    """The same least share on RDNA."""
    wide: tuple[str, ...] = ()
    """Pointer arguments through which rows of K and V are read, 16 bytes at a time wherever rows allow it."""
    wmma_wide: int = 16
    """Bytes of a wide load on RDNA."""


@dataclass(frozen=True)
class LoopBudget:
    """One `[[loop]]`: what the innermost loop over tiles must reach."""

    rows: str
    """Regular expression found in `Case.id`."""
    flop_per_instruction: float
    """Least floating-point operations that the products need for each instruction that any wave issues."""
    waves_per_simd: float
    """Fewest."""


@dataclass(frozen=True)
class Ceiling:
    """One line of `[ceilings."<Triton>"]`: what a row was measured to take, with a hundredth to spare."""

    loop_instructions: int
    """Most that a wave issues in a turn of the first loop with products."""
    mfma: int
    """Most matrix instructions of those."""
    waves_per_simd: float
    """Fewest."""


@dataclass(frozen=True)
class Unpromised:
    """One `[[unpromised]]`: rows of ours that an arch need not hold within budget; what they cost is reported."""

    rows: str
    """Regular expression found in `Case.id`."""
    why: str
    triton: str = ""
    """Version that alone is not promised to hold them; empty for every one."""

    def concerns(self, row: str, triton: str) -> bool:
        """Whether it speaks of a row, by `Case.id`, that this version of Triton compiled."""
        return self.triton in ("", triton) and re.search(self.rows, row) is not None


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

    every: Limits
    comparisons: tuple[Comparison, ...]
    loops: tuple[LoopBudget, ...]
    kernels: dict[str, KernelBudget]
    """Budgets of our kernels."""
    evidence: dict[str, KernelBudget]
    """Evidence about vLLM's kernels."""
    ceilings: dict[str, dict[str, Ceiling]] = field(default_factory=dict)
    """Version of Triton -> `Case.id` -> its ceiling."""
    unpromised: tuple[Unpromised, ...] = ()

    def promise(self, row: str, triton: str) -> Unpromised | None:
        """Why a row of ours is not promised with that version of Triton; None of one that is."""
        return next((each for each in self.unpromised if each.concerns(row, triton)), None)

    def narrow(self, figures: Figures, pointer: str) -> str:
        """What is wrong with the loads through `pointer`; empty if they are as wide as asked."""
        wide = self.kernels[figures.kernel].wmma_wide if limits(figures.arch).matrix == "wmma" else 16
        sites = figures.text.loads_through(pointer)
        if not sites:
            return f"no tl.load through {pointer} in the machine code: correct the kernel, or `wide` in {FILE.name}"
        share = wide_share(sites, wide)
        if share >= self.every.wide_share:
            return ""
        narrow = ", ".join(f"{site.count} of {site.width} B at {site.source}" for site in sites if site.width < wide)
        return (
            f"{share:.0%} of the bytes read through {pointer} come in {wide}-byte loads, at least "
            f"{self.every.wide_share:.0%} must: {narrow}"
        )

    def loop_numbers(self, figures: Figures, constants: Mapping[str, str]) -> dict[str, float]:
        """What a wave issues in a turn of the first loop over tiles, and what of it the products need.

        Args:
            figures: The kernel.
            constants: Its compile-time arguments.

        Returns:
            Nothing of a kernel without products or without such a loop, and no need where its budget has no channels.
        """
        budget = (self.kernels | self.evidence).get(figures.kernel, KernelBudget())
        if not budget.mfma or not figures.text.loops:
            return {}
        loop = figures.text.loops[0]
        numbers: dict[str, float] = {"loop_instructions": loop.instructions, "mfma_issued": loop.mfma}
        if budget.channels:
            channels = sum(int(constants[name]) for name in budget.channels)
            needed = 2 * int(constants[budget.rows]) * int(constants[budget.tile]) * channels / figures.num_waves
            numbers["mfma_needed"] = needed * loop.mfma / loop.flop
            numbers["flop_per_instruction"] = round(needed / loop.instructions, 1)
        return numbers

    def ceiling_violations(self, row: str, triton: str, numbers: Mapping[str, float], figures: Figures) -> list[str]:
        """What is wrong with a kernel that has a ceiling; empty without one.

        Args:
            row: `Case.id`.
            triton: Version that compiled it.
            numbers: From `loop_numbers`.
            figures: The kernel.
        """
        ceiling = self.ceilings.get(triton, {}).get(row)
        if ceiling is None:
            return []
        limits_of_loop = {"loop_instructions": ceiling.loop_instructions, "mfma_issued": ceiling.mfma}
        found = [
            f"{name} is {numbers.get(name, 'unknown')} (ceiling {most} with Triton {triton})"
            for name, most in limits_of_loop.items()
            if name not in numbers or numbers[name] > most
        ]
        if figures.waves_per_simd < ceiling.waves_per_simd:
            found.append(f"{figures.waves_per_simd:g} waves a SIMD (at least {ceiling.waves_per_simd:g})")
        return found

    def loop_violations(self, row: str, numbers: Mapping[str, float], figures: Figures) -> list[str]:
        """What is wrong with the loop over tiles of a kernel of ours; empty for nothing.

        Args:
            row: `Case.id`.
            numbers: From `loop_numbers`.
            figures: The kernel.
        """
        if "mfma_needed" not in numbers:
            return []
        found = []
        issued, needed = numbers["mfma_issued"], numbers["mfma_needed"]
        budget = self.kernels[figures.kernel]
        if needed < (budget.wmma_share if limits(figures.arch).matrix == "wmma" else budget.mfma_share) * issued:
            found.append(
                f"a wave issues {issued:g} MFMA instructions in a turn of the loop over tiles and needs {needed:g}: "
                "waves compute the same; use fewer waves, or an instruction of fewer rows (matrix_instr_nonkdim)"
            )
        for each in self.loops:
            if not re.search(each.rows, row):
                continue
            waves, flop = figures.waves_per_simd, numbers["flop_per_instruction"]
            if waves < each.waves_per_simd or flop < each.flop_per_instruction:
                found.append(
                    f"{flop:g} FLOP for each of the {numbers['loop_instructions']:g} instructions in the loop over "
                    f"tiles (at least {each.flop_per_instruction:g}) at {waves:g} waves a SIMD (at least "
                    f"{each.waves_per_simd:g}): see what `python -m pagedkv.audit.sweep` finds"
                )
        return found

    def violations(
        self, figures: Figures, *, scattered: tuple[str, ...] = (), spill: DeclaredSpill | None = None
    ) -> list[str]:
        """What is wrong with one compiled kernel of ours, one sentence each; empty when it is within budget.

        Args:
            figures: The kernel.
            scattered: Pointers through which the cache layout lets no lane read 16 consecutive bytes.
            spill: What it is declared to spill with this Triton, instead of the limits of every kernel.
        """
        budget = self.kernels.get(figures.kernel)
        if budget is None:
            return [f"{figures.kernel} has no budget: add [kernels.{figures.kernel}] to {FILE.name}"]
        code, text, limit = figures.code, figures.text, limits(figures.arch).lds_bytes
        found = []
        if figures.lds_bytes > limit:
            found.append(lds_message(figures.kernel, figures.lds_bytes, figures.arch))
        spilled = (code.vgpr_spills, code.scratch_bytes)
        if spill and spilled != (spill.vgpr_spills, spill.scratch_bytes):
            found.append(
                f"{code.vgpr_spills} VGPRs spilled and {code.scratch_bytes} B of scratch, declared are "
                f"{spill.vgpr_spills} and {spill.scratch_bytes}: correct that entry of {DECLARED.name}, or remove it"
            )
        if not spill and code.vgpr_spills > self.every.vgpr_spills:
            found.append(
                f"{code.vgpr_spills} VGPRs spilled (budget {self.every.vgpr_spills}) at {code.vgpr} of "
                f"{limits(figures.arch).registers}: "
                "use a smaller tile or more waves"
            )
        if not spill and code.scratch_bytes > self.every.scratch_bytes:
            found.append(f"{code.scratch_bytes} B of scratch per work-item (budget {self.every.scratch_bytes})")
        if figures.pointer_choices:
            found.append(
                f"a branch yields a pointer at {', '.join(figures.pointer_choices)}, which Triton 3.6.0 cannot compile "
                "where it comes from two tensors: load in the branch, and yield what was loaded"
            )
        if text.mfma < budget.mfma:
            found.append(
                f"{text.mfma} MFMA instructions (at least {budget.mfma}): the dot product runs on the vector ALU"
            )
        if figures.arch == "gfx950" and text.broadcast_high:
            found.append(
                f"{text.broadcast_high} v_pk_fma_f32 with op_sel:[0,1,0], whose lower half gfx950 now and then does "
                "not accumulate (ROCm/rocMLIR PR 2459): order the arithmetic otherwise"
            )
        wide = (pointer for pointer in budget.wide if pointer not in scattered)
        found += filter(None, (self.narrow(figures, pointer) for pointer in wide))
        if figures.register_waves != text.occupancy:
            found.append(
                f"the audit's register model says {figures.register_waves} waves per SIMD, LLVM says {text.occupancy}: "
                "one of them is wrong, correct machine.py"
            )
        return found


def lds_message(kernel: str, lds_bytes: int, arch: str) -> str:
    """The sentence for a kernel that cannot be launched for want of LDS."""
    return (
        f"{kernel} needs {lds_bytes} B of LDS, {arch} has {limits(arch).lds_bytes} B per workgroup: "
        "every launch would raise OutOfResources; derive the tile from the LDS size, not from the block size"
    )


def load_budgets(path: Path = FILE) -> Budgets:
    """Read budgets.

    Raises:
        InvalidFileError: Not TOML, an unknown key, or a value of the wrong type or sign.
    """
    tables = ("every", "kernels", "evidence", "compare", "loop", "ceilings", "unpromised")
    data = toml.parse(path.name, path.read_text(encoding="utf-8"), tables)
    every = toml.entry(f"{path.name}: every", data.get("every", {}), Limits)
    if every.wide_share > 1:
        raise InvalidFileError(f"{path.name}: every: wide_share is a share, got {every.wide_share}")
    loops = toml.entries(f"{path.name}: loop", data.get("loop", []), LoopBudget)
    unpromised = toml.entries(f"{path.name}: unpromised", data.get("unpromised", []), Unpromised)
    for each in unpromised:
        _pattern(f"{path.name}: unpromised", each.rows)
    for loop in loops:
        _pattern(f"{path.name}: loop", loop.rows)
    comparisons = toml.entries(f"{path.name}: compare", data.get("compare", []), Comparison)
    toml.among(f"{path.name}: compare: figure", (each.figure for each in comparisons), FIGURES)
    kernels, evidence = (
        {name: toml.entry(f"{path.name}: {name}", table, KernelBudget) for name, table in data.get(kind, {}).items()}
        for kind in ("kernels", "evidence")
    )
    ceilings = {
        version: {row: toml.entry(f"{path.name}: ceilings, {row}", table, Ceiling) for row, table in rows.items()}
        for version, rows in data.get("ceilings", {}).items()
    }
    return Budgets(every, comparisons, loops, kernels, evidence, ceilings, unpromised)


EVERY = "every"


@dataclass(frozen=True)
class DeclaredCrash:
    """One `[[crash]]`: the compiler fails on configurations of a kernel."""

    kernel: str
    """`LaunchConfiguration.kernel`."""
    triton: str
    arch: tuple[str, ...]
    configurations: tuple[str, ...]
    """Names, or `EVERY` alone."""
    says: str
    """Regular expression found in what the compiler printed."""
    why: str

    def matches(self, message: str) -> bool:
        """Whether the compiler crashed as declared."""
        return re.search(self.says, message, re.DOTALL) is not None


@dataclass(frozen=True)
class DeclaredNarrow:
    """One `[[narrow]]`: the compiler reads rows of K or V in pieces of less than 16 bytes."""

    triton: str
    row: str
    """`Case.id`."""
    pointers: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class DeclaredSpill:
    """One `[[spill]]`: the compiler needs more registers than there are."""

    triton: str
    row: str
    """`Case.id`."""
    vgpr_spills: int
    scratch_bytes: int
    why: str


@dataclass(frozen=True)
class Declared:
    """The whole file."""

    crashes: tuple[DeclaredCrash, ...] = ()
    narrow: tuple[DeclaredNarrow, ...] = ()
    spills: tuple[DeclaredSpill, ...] = ()

    def crash(self, configuration: LaunchConfiguration, arch: str, triton: str) -> DeclaredCrash | None:
        """The declaration that concerns a configuration on an arch and a version of Triton."""
        for each in self.crashes:
            named = each.configurations == (EVERY,) or configuration.name in each.configurations
            if (each.kernel, each.triton) == (configuration.kernel, triton) and arch in each.arch and named:
                return each
        return None

    def narrow_pointers(self, row: str, triton: str) -> tuple[str, ...]:
        """Pointers of a row through which that version of Triton is known to load less than 16 bytes."""
        return tuple(p for each in self.narrow if (each.triton, each.row) == (triton, row) for p in each.pointers)

    def spill(self, row: str, triton: str) -> DeclaredSpill | None:
        """The declaration of what a row spills with that version of Triton."""
        return next((each for each in self.spills if (each.triton, each.row) == (triton, row)), None)

    def check_names(self, cases: Iterable[Case]) -> None:
        """Refuse a crash that is declared of a kernel or configuration that does not exist.

        Args:
            cases: All that have configurations.

        Raises:
            InvalidFileError: One does not exist.
        """
        known: dict[str, list[str]] = {}
        for configuration in (case.configuration for case in cases if case.configuration):
            known.setdefault(configuration.kernel, [EVERY]).append(configuration.name)
        for each in self.crashes:
            toml.among(f"{DECLARED.name}: kernel", [each.kernel], sorted(known))
            toml.among(f"{DECLARED.name}, {each.kernel}: configurations", each.configurations, known[each.kernel])


def load_declared(path: Path = DECLARED) -> Declared:
    """Read the declarations.

    Raises:
        InvalidFileError: Not TOML, a key is missing, unknown or empty, an arch does not exist, or a regular expression
            cannot be compiled.
    """
    data = toml.parse(path.name, path.read_text(encoding="utf-8"), ("crash", "narrow", "spill"))
    crashes = toml.entries(f"{path.name}: crash", data.get("crash", []), DeclaredCrash)
    for each in crashes:
        toml.among(f"{path.name}, {each.kernel}: arch", each.arch, MACHINES)
        _pattern(f"{path.name}, {each.kernel}: says", each.says)
    narrow = toml.entries(f"{path.name}: narrow", data.get("narrow", []), DeclaredNarrow)
    return Declared(crashes, narrow, toml.entries(f"{path.name}: spill", data.get("spill", []), DeclaredSpill))


def _pattern(where: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidFileError(f"{where}: {text!r} is no regular expression: {error}") from error
