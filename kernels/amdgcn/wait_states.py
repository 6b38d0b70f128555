# SPDX-License-Identifier: Apache-2.0
"""Static check of wait states: hazards of gfx90a, gfx942 and gfx950 that the hardware leaves to software (`s_nop`).

Rules and figures: CDNA3 ISA, section 4.5 "Manually inserted wait states", and what LLVM's hazard recogniser adds for
gfx950 (one more after a matrix instruction of four passes or more). gfx90a (CDNA2 ISA, 4.5) has fewer rules: it waits
for scalars, transcendentals and parts of registers itself, and its matrix instructions take 8 and 16 passes. Every
instruction is one wait state, `s_nop N` is N + 1. A forward dataflow keeps, for each register and kind of writer, the
fewest wait states since it was written.

LLVM's recogniser adds: a lane swap of gfx950 behind a VALU write, a load into LDS behind a write of M0, a load into the
C of a running product, and, because a page fault may repeat them together (XNACK), consecutive scalar loads of which
one overwrites another's address.

Where LLVM's code and these rules differ, the rules are the same and LLVM's count is not: its recogniser walks back over
a whole block, so on the path of a taken branch it counts the `s_branch` behind it too, which does not run there. Such
a path is one wait state short. Whether a taken branch costs so much that it does not matter, only a GPU can say. The
check is strict, and so audited kernels are held; `as_llvm` counts as LLVM does, for launches of any shape of a test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from .effects import Effects, Register, effects
from .errors import LaunchError
from .text import EXEC, M0, VCC
from .waits import Hazard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .text import Instruction, Program

Writer = Literal["valu", "trans", "shifted", "matrix", "matrix source", "wide store", "salu"]
"""`shifted`: a result whose place in the register SDWA or op_sel chose; `wide store`: data of a store above 8 bytes;
`salu`: M0 by a scalar instruction."""

ARCHES = ("gfx90a", "gfx942", "gfx950")
_WINDOW = 24
"""More than any hazard needs."""

_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(?:16|32)")
_MATRIX = re.compile(r"v_mfma_f32_(16x16|32x32)x\d+_?(\w+)")
_WIDE_STORE = re.compile(r"(?:global|buffer|scratch)_store_dwordx[34]")
_NARROWED = re.compile(r"v_cvt_scalef32_\w*pk\w*_(?:fp4|fp6|bf6|fp8|bf8)_\w+")
_LANE_SELECT = ("v_readlane_b32", "v_writelane_b32")
_LANE_READ = ("v_readlane_b32", "v_readfirstlane_b32")
_MEMORY = ("global_", "buffer_", "scratch_", "ds_")
_State = dict[tuple[Writer, Register], tuple[int, int, bool]]
"""Last write: wait states since, passes of a matrix instruction, whether it is one of the XDL unit."""


def passes(mnemonic: str, *, older: bool = False) -> tuple[int, bool]:
    """Passes of four cycles, and whether the XDL unit does it (all but fp32): CDNA3 ISA, table of matrix instructions.

    The products of one side take as long whatever their type, because K grows as the type shrinks.
    """
    found = _MATRIX.fullmatch(mnemonic)
    assert found, mnemonic
    if older:
        return (8 if found[1] == "16x16" else 16), True
    xdl = found[2] != "f32"
    return (4 if found[1] == "16x16" else 8) * (1 if xdl else 2), xdl


def check_wait_states(program: Program, *, as_llvm: bool = False) -> list[Hazard]:
    """Instructions that follow another too closely.

    Args:
        program: As read.
        as_llvm: Whether an `s_branch` behind a taken branch counts too.

    Raises:
        LaunchError: The arch has other rules than those written here.
        UnknownInstructionError: See `effects`.
    """
    if program.arch not in ARCHES:
        raise LaunchError(f"wait states of {program.arch} are not written down; those of {', '.join(ARCHES)} are")
    _, found = _entries(program, as_llvm=as_llvm)
    return [found[index] for index in sorted(found)]


def _entries(program: Program, *, as_llvm: bool) -> tuple[dict[int, _State], dict[int, Hazard]]:
    """State in front of each block that can be reached, and the hazards by instruction."""
    entry: dict[int, _State] = {0: {}}
    work, found = [0], dict[int, Hazard]()
    while work:
        block = work.pop()
        ages, hazards = _through(program, block, entry[block], -1)
        found |= {each.instruction.index: each for each in hazards}
        for successor, more in _successors(program, block, as_llvm=as_llvm):
            old = entry.get(successor, {})
            aged = {key: (age + more, count, xdl) for key, (age, count, xdl) in ages.items()}
            new = old | {key: each for key, each in aged.items() if key not in old or each[0] < old[key][0]}
            if successor not in entry or new != old:
                entry[successor] = new
                work.append(successor)
    return entry, found


def _through(program: Program, block: int, entry: _State, without: int) -> tuple[_State, list[Hazard]]:
    """State behind a block and the hazards in it; the instruction `without` is left out."""
    newer, older = program.arch == "gfx950", program.arch == "gfx90a"
    state: _State = {key: (-age, count, xdl) for key, (age, count, xdl) in entry.items()}
    now, clause, found = 0, _clause_before(program, block), list[Hazard]()
    for instruction in program.blocks[block].instructions:
        if instruction.index == without:
            continue
        effect = effects(instruction)
        for (writer, register), need in _needs(instruction, effect, newer=newer, older=older, state=state):
            since = now - state[writer, register][0]
            if since < need:
                why = f"{register[0]}{register[1]} of a {writer} {since} wait states before, {need} are needed"
                found.append(Hazard(instruction, why))
        clause = [*clause, effect] if effect.counter == "sm" else []
        if why := _unsafe_to_repeat(clause):
            found.append(Hazard(instruction, why))
        now += int(instruction.operands[0].value) + 1 if instruction.mnemonic == "s_nop" else 1
        for writer, register in _writes(instruction, effect, older=older):
            state[writer, register] = (now, *_length(instruction, older=older))
    return {k: (now - at, count, xdl) for k, (at, count, xdl) in state.items() if now - at < _WINDOW}, found


def _clause_before(program: Program, block: int) -> list[Effects]:
    """Scalar loads that end the blocks in front of this one, as far as nothing but a label is between them."""
    clause: list[Effects] = []
    for before in reversed(program.blocks[:block]):
        for instruction in reversed(before.instructions):
            effect = effects(instruction)
            if effect.counter != "sm":
                return clause
            clause.insert(0, effect)
    return clause


def _unsafe_to_repeat(clause: list[Effects]) -> str:
    """Why scalar loads that follow each other may not be executed again from the first of them."""
    if len(clause) < 2:
        return ""
    loaded = set[Register]().union(*(each.writes for each in clause))
    reads = set[Register]().union(*(each.reads for each in clause))
    if common := sorted(loaded & reads):
        return f"{common[0][0]}{common[0][1]} is an address of loads that overwrite it, which a page fault may repeat"
    return ""


def _successors(program: Program, block: int, *, as_llvm: bool) -> Iterator[tuple[int, int]]:
    """Blocks that may follow, and wait states on the way to them."""
    behind = program.blocks[block + 1 : block + 2]
    skipped = as_llvm and behind and [one.mnemonic for one in behind[0].instructions] == ["s_branch"]
    for successor in program.successors(block):
        yield successor, int(bool(skipped and successor != block + 1))


def _length(instruction: Instruction, *, older: bool) -> tuple[int, bool]:
    return passes(instruction.mnemonic, older=older) if instruction.mnemonic.startswith("v_mfma") else (0, False)


def _writes(instruction: Instruction, effect: Effects, *, older: bool) -> Iterator[tuple[Writer, Register]]:
    name = instruction.mnemonic
    if name.startswith("v_mfma"):
        yield from (("matrix", register) for register in effect.writes)
        if passes(name, older=older)[1]:  # only the XDL unit reads C late
            yield from (("matrix source", register) for register in instruction.operands[3].registers())
    elif name.startswith("v_"):
        for register in effect.writes:
            yield "valu", register
            if _TRANSCENDENTAL.fullmatch(name):
                yield "trans", register
            if _shifts(instruction):
                yield "shifted", register
    elif name.startswith("s_"):
        yield from (("salu", register) for register in effect.writes if register == ("s", M0))
    elif _WIDE_STORE.fullmatch(name):
        data = instruction.operands[0 if name.startswith("buffer") else 1]
        scalar = name.startswith("buffer") and instruction.operands[3].kind == "s"
        yield from (() if scalar else (("wide store", register) for register in data.registers()))


def _shifts(instruction: Instruction) -> bool:
    """Whether SDWA or op_sel put the result at a place in its register."""
    name, chosen = instruction.mnemonic, instruction.numbers("op_sel", [])
    upper = bool(chosen[3:] and chosen[3]) or bool(_NARROWED.fullmatch(name) and any(chosen))
    return upper or instruction.modifiers.get("dst_sel", "DWORD") != "DWORD" or "mixhi" in name


def _needs(
    instruction: Instruction, effect: Effects, *, newer: bool, older: bool, state: _State
) -> Iterator[tuple[tuple[Writer, Register], int]]:
    """Wait states that must lie between earlier writes and this instruction, for those writes that are in `state`."""
    name, operands = instruction.mnemonic, instruction.operands
    matrix, vector, memory = name.startswith("v_mfma"), name.startswith("v_"), name.startswith(_MEMORY)
    need: dict[tuple[Writer, Register], int] = defaultdict(int)

    def demand(writer: Writer, registers: object, states: int) -> None:
        for register in registers:  # type: ignore[attr-defined]
            if (writer, register) in state:
                need[writer, register] = max(need[writer, register], states)

    scalars = {register for register in effect.reads if register[0] == "s" and register[1] < M0}
    vectors = {register for register in effect.reads if register[0] == "v"}
    exec_ = {("s", EXEC), ("s", EXEC + 1)}
    if vector and name in _LANE_SELECT:
        demand("valu", operands[2].registers(), 4)
    if vector and not older:
        demand("valu", scalars, 2)
        if name in _LANE_SELECT:
            demand("valu", exec_, 4)
        if name in _LANE_READ:
            demand("valu", vectors, 1)
        if not _TRANSCENDENTAL.fullmatch(name):
            demand("trans", vectors, 1)
        demand("shifted", vectors, 1)
    if vector:
        if name == "v_div_fmas_f32":
            demand("valu", {("s", VCC), ("s", VCC + 1)}, 4)
        if instruction.encoding == "dpp":
            demand("valu", vectors, 2)  # what it keeps of its destination too
            demand("valu", exec_, 5)
        demand("wide store", effect.writes, 1 if older else 2)
    if newer and name.startswith("v_permlane"):
        demand("valu", vectors | effect.writes, 2)
    if memory:
        demand("valu", scalars, 5)
        if instruction.to_lds:
            demand("salu", {("s", M0)}, 1)
    if matrix:
        demand("valu", exec_, 4)
        demand("valu", vectors, 2)
    for key in [key for key in state if key[0] == "matrix" and (key[1] in vectors or key[1] in effect.writes)]:
        count, xdl = state[key][1:]
        wait = count + (3 + (newer and count != 2) if xdl else 2)
        if not matrix or key[1] in set().union(*(operand.registers() for operand in operands[1:3])):
            need[key] = wait
        elif key[1] in operands[3].registers():
            same = all((state.get(("matrix", each)) or (None,))[0] == state[key][0] for each in operands[3].registers())
            own_xdl = passes(name, older=older)[1]
            late = count + (not older) + (newer and count != 2) if xdl else count
            need[key] = 0 if same or (own_xdl and not xdl) else late
    if (vector and not matrix) or memory:
        for key in [key for key in state if key[0] == "matrix source" and key[1] in effect.writes]:
            need[key] = {2: 1, 4: 3, 8: 7, 16: 15}[state[key][1]]
    yield from need.items()
