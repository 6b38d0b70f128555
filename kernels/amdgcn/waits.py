# SPDX-License-Identifier: Apache-2.0
"""Static check of `s_waitcnt`: on every path, a loaded register is waited for before it is used.

A forward dataflow over the blocks: for each register of an outstanding load, how many newer operations of its counter
were issued, the fewest over all paths. Vector memory and LDS return in order, scalar memory in any (CDNA3 ISA, 4.4).
Whether LDS is waited for before the barrier that publishes it depends on addresses: lds.py looks at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .effects import Register, effects

if TYPE_CHECKING:
    from collections.abc import Callable

    from .text import Instruction, Program

_ORDERED = {"vmcnt": "vm", "loadcnt": "vm", "storecnt": "st", "lgkmcnt": "ds", "dscnt": "ds"}
_UNORDERED = ("lgkmcnt", "kmcnt")
_MANY = 64
_State = dict[tuple[str, Register], int]
"""(counter, register) -> newer operations of that counter."""


@dataclass(frozen=True)
class Hazard:
    """An instruction that runs too early."""

    instruction: Instruction
    why: str

    def __str__(self) -> str:
        return f"{self.why}: {self.instruction}"


def waited(wait: Instruction) -> dict[str, int]:
    """Counter -> how many of its operations may be outstanding after a wait; what has no order is waited for whole."""
    limits = {counter: wait.number(name) for name, counter in _ORDERED.items() if wait.flag(name)}
    waits_for_all = any(wait.number(name, 1) == 0 for name in _UNORDERED)
    return limits | ({"sm": 0} if waits_for_all else {})


def check_waits(program: Program) -> list[Hazard]:
    """Instructions that use a register whose load may be outstanding.

    Raises:
        UnknownInstructionError: See `effects`.
    """
    entry: dict[int, _State] = {0: {}}
    work = [0]
    while work:
        block = work.pop()
        state = entry[block]
        for instruction in program.blocks[block].instructions:
            state = _after(state, instruction, None)
        for successor in program.successors(block):
            old = entry.get(successor)
            new = (
                state if old is None else {key: min(old.get(key, _MANY), state.get(key, _MANY)) for key in old | state}
            )
            if new != old:
                entry[successor] = dict(new)
                work.append(successor)
    found: list[Hazard] = []
    for block, state in entry.items():
        for instruction in program.blocks[block].instructions:
            state = _after(state, instruction, lambda one, why: found.append(Hazard(one, why)))  # noqa: PLW2901
    return found


def _after(state: _State, instruction: Instruction, report: Callable[[Instruction, str], None] | None) -> _State:
    holds = instruction.target.holds
    if instruction.mnemonic == "s_waitcnt":
        limit = waited(instruction)
        return {key: newer for key, newer in state.items() if newer < limit.get(key[0], _MANY)}
    effect = effects(instruction)
    if report and state:
        late = {register: counter for counter, register in state}
        for register in sorted((effect.reads | effect.writes) & late.keys()):
            in_order = effect.counter == late[register] != "sm" and register not in effect.reads
            if not in_order:  # a newer load of the same counter arrives later in any case
                report(instruction, f"{register[0]}{register[1]} may still be loading")
    if effect.counter:
        newest = effect.counter if effect.counter in holds else ""
        counted = ((key, newer + (key[0] == newest)) for key, newer in state.items())
        state = {key: newer for key, newer in counted if newer < holds.get(key[0], _MANY)}
        state |= {(effect.counter, register): 0 for register in effect.writes}
    return state
