# SPDX-License-Identifier: Apache-2.0
"""Which registers an instruction reads and writes, and which counter of `s_waitcnt` it raises (CDNA3 ISA, 4.4)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import UnknownInstructionError
from .targets import EXEC, VCC

if TYPE_CHECKING:
    from .targets import Counter, Target
    from .text import Instruction, Operand

Register = tuple[str, int]

_NOTHING_WRITTEN = re.compile(
    r"s_(?:cmpk?_\w+|bitcmp[01]_b32|branch|cbranch_\w+|endpgm|barrier(?:_signal)?|nop|waitcnt|setprio|sleep|sendmsg)"
    r"|(?:global|buffer|scratch)_store_\w+|ds_write\w+|(?:global|buffer)_atomic_\w+|buffer_wbl2|(?:buffer|global)_inv"
    r"|s_delay_alu|s_clause|s_wait_alu|v_nop"
)
_TWO_WRITTEN = re.compile(
    r"v_(?:(?:add|sub|subrev)_co_u32|(?:addc|subb|subbrev)_co_u32|mad_[iu]64_[iu]32|div_scale_f32)"
)
_BOTH_WRITTEN = re.compile(r"v_permlane(?:16|32)_swap_b32")
_DESTINATION_READ = re.compile(
    r"v_fmac_f32|v_mad_u16|v_bitop3_b16|v_writelane_b32|v_fma_mix(?:lo|hi)_f16|s_(?:addk|mulk)_i32|s_bitset[01]_b32|s_mul_f16|(?:global|ds|buffer)_\w+_d16(?:_hi)?"
)
_HALF_WRITTEN = re.compile(
    r"v_(?:add|sub|mul|mul_lo|mad|lshlrev|lshrrev|ashrrev|min|max|(?:min|max)_num)_[iubf]16|v_cvt_f16_f32"
)
"""Results of 16 bits, which on gfx12 keep the upper half of their register."""
_ONE_WRITTEN = re.compile(
    r"v_(?!cmpx_|movrel|dot(?!2_f32_f16)|smfmac)\w+|s_(?:load_\w+|(?:and|or|xor|andn2|orn2|nand|nor|xnor)(?:_saveexec)?_b(?:32|64)"
    r"|(?:add|sub|min|max)_[iu]32|mul_f16|(?:add|sub|mul|min_num|max_num)_f32|cvt_\w+|(?:add|sub)_nc_u64|mul_u64|(?:addc|subb)_u32|(?:addk|mulk|movk)_i32|mul_i32|mul_hi_[iu]32|mov_b(?:32|64)"
    r"|cselect_b(?:32|64)|lsh[lr]_b(?:32|64)|ashr_i(?:32|64)|bf[em]_[iub](?:32|64)|lshl[1-4]_add_u32|pack_\w+|flbit_\w+"
    r"|ff1_i32_b(?:32|64)|not_b(?:32|64)|brev_b32|abs_i32|bcnt[01]_i32_b(?:32|64)|sext_i32_i(?:8|16)|bitset[01]_b32)"
    r"|(?:global|buffer|scratch)_load_\w+|ds_(?:read\w*|b?permute_b32|swizzle_b32)"
)


@dataclass(frozen=True)
class Effects:
    """What one instruction reads and writes."""

    reads: frozenset[Register]
    writes: frozenset[Register]
    counter: Counter


def effects(instruction: Instruction) -> Effects:
    """What the instruction reads and writes.

    Raises:
        UnknownInstructionError: The mnemonic is not one of those whose operands are known here.
    """
    return _effects(
        instruction.mnemonic,
        instruction.operands,
        instruction.modifiers.get("dst_unused") == "UNUSED_PRESERVE" or "row_mask" in instruction.modifiers,
        instruction.to_lds,
        instruction.returns,
        instruction.target,
    )


@lru_cache(maxsize=1 << 16)
def _effects(
    mnemonic: str, operands: tuple[Operand, ...], merges: bool, to_lds: bool, returns: bool, target: Target
) -> Effects:
    """Registers that an instruction reads and writes, from its name and operands."""
    vcc, exec_ = (frozenset(("s", first + k) for k in range(target.words)) for first in (VCC, EXEC))
    if returns:
        written = 1
    elif to_lds or _NOTHING_WRITTEN.fullmatch(mnemonic):
        written = 0
    elif _TWO_WRITTEN.fullmatch(mnemonic) or _BOTH_WRITTEN.fullmatch(mnemonic):
        written = 2
    elif _ONE_WRITTEN.fullmatch(mnemonic):
        written = 1
    else:
        raise UnknownInstructionError(mnemonic, "its operands are not known")
    reads = {each for operand in operands[written:] for each in operand.registers()}
    writes = {each for operand in operands[:written] for each in operand.registers()}
    if returns and mnemonic.startswith("buffer_"):  # what was there comes into the first register of the data
        reads |= writes
        writes = set(operands[0].registers()[:1])
    if merges or _BOTH_WRITTEN.fullmatch(mnemonic) or _DESTINATION_READ.fullmatch(mnemonic):
        reads |= writes
    if target.gfx12 and _HALF_WRITTEN.fullmatch(mnemonic):
        reads |= writes
    if mnemonic.startswith(("v_", "global_", "buffer_", "ds_", "scratch_")):
        reads |= exec_
    if mnemonic == "v_div_fmas_f32" or (mnemonic == "v_cndmask_b32" and len(operands) == 3) or "_vcc" in mnemonic:
        reads |= vcc
    if to_lds:  # the address in LDS
        reads.add(("s", target.names["m0"][0]))
    if "saveexec" in mnemonic:
        reads |= exec_
        writes |= exec_
    if "_exec" in mnemonic and mnemonic.startswith("s_cbranch"):
        reads |= exec_
    counter: Counter = ""
    if mnemonic.startswith("s_load_"):
        counter = "sm"
    elif mnemonic.startswith("ds_"):
        counter = "ds"
    elif mnemonic.startswith(("global_", "buffer_", "scratch_")) and mnemonic not in {"buffer_wbl2", "buffer_inv"}:
        counter = target.stores if "_store_" in mnemonic or ("_atomic_" in mnemonic and not returns) else "vm"
    return Effects(frozenset(reads), frozenset(writes), counter)
