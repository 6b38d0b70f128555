# SPDX-License-Identifier: Apache-2.0
"""Is each `s_nop` of a text demanded by the wait states that are written down? Each is taken out in turn.

LLVM writes no `s_nop` without a hazard, so one that `check_wait_states` does not miss is a rule that it lacks, or a
place where LLVM is more careful than the rules: `reason`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from amdgcn import wait_states
from amdgcn.effects import effects

if TYPE_CHECKING:
    from amdgcn.text import Instruction, Program


def kept_for_nothing(program: Program, most: int | None = None) -> list[str]:
    """Each `s_nop`, of the first `most`, without which no hazard is seen and which has no listed reason."""
    entries, hazards = wait_states._entries(program, as_llvm=True)
    found, seen = [], 0
    for block in sorted(entries):
        instructions = program.blocks[block].instructions
        for place, one in enumerate(instructions):
            if one.mnemonic != "s_nop" or (most is not None and seen >= most):
                continue
            seen += 1
            behind = instructions[place + 1 :] or program.blocks[block + 1].instructions
            if not is_demanded(program, entries, set(hazards), block, one.index) and not reason(
                instructions[:place], behind
            ):
                found.append(f"{program.name}: {one} before {' '.join(behind[0].text.split())}")
    return found


def is_demanded(program: Program, entries: dict, known: set[int], block: int, index: int) -> bool:
    """Whether the program without this instruction has a hazard that is not `known`.

    Only what is a few wait states behind it can have one, so blocks are followed for that long.
    """
    place = next(k for k, each in enumerate(program.blocks[block].instructions) if each.index == index)
    work = [(block, entries[block], -place)]
    while work:
        at, state, waited = work.pop()
        ages, hazards = wait_states._through(program, at, state, index)
        if any(each.instruction.index not in known for each in hazards):
            return True
        waited += len(program.blocks[at].instructions)
        if waited < wait_states._WINDOW:
            for successor, more in wait_states._successors(program, at, as_llvm=True):
                work.append((successor, {k: (age + more, *rest) for k, (age, *rest) in ages.items()}, waited + 1))
    return False


def reason(before: list[Instruction], behind: list[Instruction]) -> str:
    """Why LLVM writes wait states there and the rules of the ISA ask for none; empty if none of these is true.

    Each is a rule of LLVM's GCNHazardRecognizer, and looked for as it is written there.
    """
    following = behind[0]
    if _breaks_clause(before, following):
        return "checkSoftClauseHazards: a page fault may repeat loads that follow each other (XNACK)"
    if before and _is_valu(following) and _shares_a_bit(before[-1], behind):
        return "checkVALUHazards: in its encoding DST_OP_SEL of a VOP3 is the bit of op_sel_hi[0] of a VOP3P"
    if any(_begins_a_spill(each, following) for each in before[-2:]):
        return "checkVALUHazards: the first lane write of a spilled tuple defines all its scalars (spillSGPR)"
    return ""


def _is_valu(one: Instruction) -> bool:
    return one.mnemonic.startswith("v_") and not one.mnemonic.startswith("v_mfma")


def _breaks_clause(before: list[Instruction], following: Instruction) -> bool:
    """Whether it may not follow the loads in front of it: it stores, or one of them overwrites what one of them reads.

    A clause is what follows each other of vector memory. That of scalar loads has the same rule, in `wait_states`.
    """
    clause = list(itertools.takewhile(_is_vector_memory, reversed(before)))
    loaded = set().union(*(effects(each).writes for each in clause))
    if not _is_vector_memory(following) or not loaded:
        return False
    every = [*clause, following]
    writes, reads = (set().union(*(getattr(effects(each), what) for each in every)) for what in ("writes", "reads"))
    return "_store" in following.mnemonic or bool(writes & reads)


def _begins_a_spill(first: Instruction, following: Instruction) -> bool:
    """Whether both write scalars of one tuple to lanes of one register: the first is marked as writing all of it.

    A write of a scalar by a vector instruction and a read of it are two wait states apart.
    """
    if {first.mnemonic, following.mnemonic} != {"v_writelane_b32"} or first.operands[0] != following.operands[0]:
        return False
    (_, scalar, lane), (_, other, behind) = (each.operands for each in (first, following))
    return 0 < other.register - scalar.register == behind.value - lane.value


def _is_vector_memory(one: Instruction) -> bool:
    return one.mnemonic.startswith(("global_", "buffer_", "scratch_"))


def _shares_a_bit(last: Instruction, behind: list[Instruction]) -> bool:
    """Whether what follows reads a packed result; each copy of a tuple's registers is marked as reading all of them."""
    packed = last.mnemonic.startswith(("v_pk_", "v_fma_mix"))
    default = [0] if last.mnemonic.startswith("v_fma_mix") else [1]
    if not packed or not last.numbers("op_sel_hi", default)[0]:
        return False
    first = behind[0].mnemonic
    copies = first in {"v_mov_b32", "v_accvgpr_write_b32", "v_accvgpr_read_b32"}
    reading = itertools.takewhile(lambda each: each.mnemonic == first, behind) if copies else behind[:1]
    return any(effects(last).writes & effects(each).reads for each in reading)
