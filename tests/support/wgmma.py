# SPDX-License-Identifier: Apache-2.0
"""Registers of Hopper's code that an instruction writes while a product of the tensor cores still reads them.

`wgmma.mma_async` takes its first factor from shared memory or from registers, and goes on after it has been issued.
Until a wait covers it, nothing may write these registers (PTX ISA, wgmma.mma_async). Before CUDA 13.3 ptxas does so in
loops that Triton has pipelined (Triton 9433): whole rows are then wrong, or NaN, now and then. vLLM leaves out such
configurations of its Mamba-2 kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from support.hopper import printed_of
from triton import knobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FACTOR = 4
"""Registers of a thread that hold a first factor of 64 rows and 32 bytes of each."""

WRITES_NONE = re.compile(
    "BAR|BRA|BREAK|BSSY|BSYNC|CCTL|DEPBAR|ERRBAR|EXIT|FENCE|FSETP|HSETP2|ISETP|LDGDEPBAR|LDGSTS|MEMBAR|NOP|PLOP3|R2UR|RED|"
    "ST|STG|STS|SYNCS|UTMALDG|WARPGROUP|WARPSYNC|YIELD"
)
"""Instructions whose first register, if they name one, is read. Any other writes it."""

NOT_FOLLOWED = frozenset({"BRX", "CALL", "JMP", "JMX", "RET"})

MOST_GROUPS = 8
"""Pending groups that are kept apart; the oldest of more are merged."""


class Instruction(NamedTuple):
    """One line of nvdisasm."""

    address: str
    guarded: bool
    """Whether a predicate decides that it runs."""
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """Code of one kernel."""

    code: list[Instruction]
    labels: dict[str, int]
    """Place in `code` by name."""

    @property
    def factors_in_registers(self) -> int:
        """How many products take their first factor from registers."""
        return sum(bool(_factor(each)) for each in self.code)


def disassemble(cubin: bytes, folder: Path) -> Listing:
    """Read a compiled kernel with nvdisasm, which comes with Triton.

    Args:
        cubin: What `ptxas` made.
        folder: Where it may be written.
    """
    return parse(printed_of(cubin, folder, knobs.nvidia.nvdisasm.path, "-c"))


def parse(text: str) -> Listing:
    """Read what nvdisasm prints.

    Raises:
        ValueError: It holds no instructions.
    """
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            operands = tuple(each.strip() for each in found[4].split(",") if each.strip())
            code.append(Instruction(found[1], bool(found[2]), found[3], operands))
    if not code:
        raise ValueError("no instructions in what nvdisasm printed")
    return Listing(code, labels)


def overwritten(listing: Listing) -> list[str]:
    """Say which instructions write registers that a pending product reads, on any path; empty where none does.

    Raises:
        ValueError: The code goes on at a place that the text does not name.
    """
    found: dict[int, str] = {}
    seen: set[tuple[int, tuple[frozenset[int], ...], frozenset[int]]] = set()
    paths: list[tuple[int, tuple[frozenset[int], ...], frozenset[int]]] = [(0, (), frozenset())]
    while paths:
        state = paths.pop()
        if state in seen or state[0] >= len(listing.code):
            continue
        seen.add(state)
        place, groups, group = state
        one = listing.code[place]
        if spoilt := _written(one) & frozenset().union(group, *groups):
            registers = ", ".join(f"R{number}" for number in sorted(spoilt))
            found[place] = f"{one.address}: {one.name} {', '.join(one.operands)} writes {registers}"
        if one.name.startswith("HGMMA"):
            group |= _factor(one)
            if "gsb0" in one.operands:
                groups, group = (*groups, group), frozenset()
        elif one.name.startswith("WARPGROUP.DEPBAR"):
            left = int(one.operands[-1], 0)
            groups = groups[len(groups) - left :] if left else ()
        if len(groups) > MOST_GROUPS:
            groups = (groups[0] | groups[1], *groups[2:])
        paths += [(after, groups, group) for after in _following(listing, place)]
    return [found[place] for place in sorted(found)]


def _following(listing: Listing, place: int) -> Iterator[int]:
    """Where the code may go on."""
    one = listing.code[place]
    kind = one.name.partition(".")[0]
    if kind in NOT_FOLLOWED:
        raise ValueError(f"{one.address}: {one.name}: which way the code goes on is not in the text")
    conditional = one.guarded or any(re.fullmatch(r"!?U?P\w+", each) for each in one.operands)
    if kind == "BRA":
        target = re.search(r"\.L_x_\d+", one.operands[-1])
        if target is None:
            raise ValueError(f"{one.address}: {one.name} {one.operands[-1]}: no label")
        yield listing.labels[target[0]]
    if kind not in ("BRA", "EXIT") or conditional:
        yield place + 1


def _factor(one: Instruction) -> frozenset[int]:
    """Registers that hold the first factor of a product; none where it lies in shared memory."""
    if not one.name.startswith("HGMMA"):
        return frozenset()
    return _registers(one.operands[1], FACTOR)


def _written(one: Instruction) -> frozenset[int]:
    """Registers that an instruction writes."""
    kind, *kinds = one.name.split(".")
    if WRITES_NONE.fullmatch(kind):
        return frozenset()
    first = next((each for each in one.operands if not re.fullmatch(r"!?U?P\w+", each)), "")
    return _registers(first, _width(kind, kinds))


def _width(kind: str, kinds: list[str]) -> int:
    """How many registers an instruction writes, from the first on."""
    if kind == "HGMMA":
        columns = int(kinds[0].split("x")[1])
        return columns // (2 if "F32" in kinds else 4)
    if kind == "HMMA":
        return 4 if "F32" in kinds else 2
    if "128" in kinds or (kind == "LDSM" and "4" in kinds):
        return 4
    if {"64", "WIDE"} & set(kinds) or (kind == "LDSM" and "2" in kinds) or kind in ("DADD", "DMUL", "DFMA"):
        return 2
    return 1


def _registers(name: str, number: int) -> frozenset[int]:
    """`number` registers from `name` on; none where it is no general register."""
    first = re.match(r"R(\d+)(?:\.|$)", name)
    return frozenset(range(int(first[1]), int(first[1]) + number)) if first else frozenset()
