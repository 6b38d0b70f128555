# SPDX-License-Identifier: Apache-2.0
"""The assembly text of gfx12 in the words of gfx9: most of its instructions are known under another name.

What is only a hint to the hardware's scheduler (`s_delay_alu`) or a wait state (`s_wait_alu`) keeps its name and loses
its operands. What is new has a line in meaning.py.
"""

from __future__ import annotations

import re

HINTS = {"s_delay_alu", "s_clause", "s_wait_alu"}
"""No result depends on them. Wait states are LLVM's to insert, as on CDNA."""

RENAMED = {
    "v_add_nc_u32": "v_add_u32",
    "v_sub_nc_u32": "v_sub_u32",
    "v_subrev_nc_u32": "v_subrev_u32",
    "v_add_nc_u16": "v_add_u16",
    "v_sub_nc_u16": "v_sub_u16",
    "v_add_co_ci_u32": "v_addc_co_u32",
    "v_sub_co_ci_u32": "v_subb_co_u32",
    "v_subrev_co_ci_u32": "v_subbrev_co_u32",
    "v_mad_co_u64_u32": "v_mad_u64_u32",
    "v_mad_co_i64_i32": "v_mad_i64_i32",
    "s_add_co_i32": "s_add_i32",
    "s_sub_co_i32": "s_sub_i32",
    "s_add_co_u32": "s_add_u32",
    "s_sub_co_u32": "s_sub_u32",
    "s_add_co_ci_u32": "s_addc_u32",
    "s_sub_co_ci_u32": "s_subb_u32",
    "s_addk_co_i32": "s_addk_i32",
    "s_and_not1_b32": "s_andn2_b32",
    "s_and_not1_b64": "s_andn2_b64",
    "s_or_not1_b32": "s_orn2_b32",
    "s_or_not1_b64": "s_orn2_b64",
    "s_and_not1_saveexec_b32": "s_andn2_saveexec_b32",
    "s_cls_i32": "s_flbit_i32",
    "s_ctz_i32_b32": "s_ff1_i32_b32",
    "s_barrier_wait": "s_barrier",
}
_SIZES = {"u8": "ubyte", "i8": "sbyte", "b8": "byte", "u16": "ushort", "i16": "sshort", "b16": "short", "b32": "dword"}
_SIZES |= {f"b{32 * count}": f"dwordx{count}" for count in (2, 3, 4, 8, 16)}
_SIZES |= {"d16_b16": "short_d16", "d16_hi_b16": "short_d16_hi", "d16_hi_b8": "byte_d16_hi"}
_ATOMICS = {"min_i32": "smin", "min_u32": "umin", "max_i32": "smax", "max_u32": "umax", "cmpswap_b32": "cmpswap"}
_ATOMICS |= {f"{name}_{kind}": name for kind in ("u32", "b32") for name in ("swap", "add", "sub", "and", "or", "xor")}

_COUNTED = re.compile(r"s_wait_(?:(load|store)cnt_dscnt|(load|store|ds|km)cnt)")
_DUAL = re.compile(r"(v_)dual_(\w+)")


def renamed(mnemonic: str) -> str:
    """The name under which an instruction is known here; its own if that is another's name nowhere."""
    name = RENAMED.get(mnemonic, mnemonic)
    if found := re.fullmatch(r"((?:global|buffer|scratch|s)_(?:load|store))_(\w+)", name):
        return f"{found[1]}_{_SIZES.get(found[2], found[2])}"
    if found := re.fullmatch(r"((?:global|buffer)_atomic)_(\w+)", name):
        return f"{found[1]}_{_ATOMICS.get(found[2], found[2])}"
    if found := re.fullmatch(r"ds_(load|store)_(2addr_)?(stride64_)?(\w+)", name):
        verb = {"load": "read", "store": "write"}[found[1]] + ("2" if found[2] else "") + ("st64" if found[3] else "")
        return f"ds_{verb}_{found[4]}"
    return name


def halves(code: str) -> list[str]:
    """The two instructions of a line that has two (`v_dual_a .. :: v_dual_b ..`), else the line."""
    return [_DUAL.sub(r"\1\2", half.strip(), count=1) for half in code.split("::")] if "::" in code else [code]


def counts(mnemonic: str, operand: str) -> dict[str, str] | None:
    """What a wait waits for, as modifiers: counter and how many may be outstanding; None for another instruction."""
    found = _COUNTED.fullmatch(mnemonic)
    if not found:
        return None
    number = int(operand, 0)
    if found[1]:
        return {f"{found[1]}cnt": str(number >> 8 & 63), "dscnt": str(number & 63)}
    return {f"{found[2]}cnt": str(number)}
