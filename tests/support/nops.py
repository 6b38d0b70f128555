# SPDX-License-Identifier: Apache-2.0
"""Is each `s_nop` of a text demanded by the wait states that are written down? Each is taken out in turn.

LLVM writes no `s_nop` without a hazard, so one that `check_wait_states` does not miss is a rule that it lacks, or a
place where LLVM is more careful than the rules: `REASONS`.
"""

from __future__ import annotations

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
    """Why LLVM may want wait states where the rules do not."""
    last, following = (before[-1] if before else None), behind[0]
    if not last:
        return ""
    if effects(last).counter == effects(following).counter in {"vm", "sm"}:
        return "LLVM ends a clause of loads; which of them it lets stand follows from its own window"
    written, effect = effects(last).writes, effects(following)
    if last.mnemonic.startswith("v_pk_") and written & effect.reads:
        return "LLVM takes the bit of op_sel_hi[0] for that of a result in the upper half (DST_OP_SEL)"
    lanes = [each for each in before[-3:] if each.mnemonic == "v_writelane_b32"]
    if following.mnemonic == "v_writelane_b32" and any(effects(each).writes & effect.writes for each in lanes):
        return "LLVM parts two writes of lanes of one register; no rule of the ISA asks for it"
    return ""
