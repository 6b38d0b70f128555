# SPDX-License-Identifier: Apache-2.0
"""What instructions compute, as a table: one line each, an expression in a, b, c over the types of its operands.

Types: u i f are uint32, int32, float32; Q L uint64, int64; h float16; w k uint16, int16. CDNA3 ISA, sections "SALU",
"VALU"; a 16-bit result clears the upper half of its register, but for `v_mad_u16`. Instructions that are more than an
expression are in translate.py. `MNEMONICS` lists every instruction that is known; each has an oracle
(tests/amdgcn).
"""

from __future__ import annotations

VECTOR: dict[str, tuple[str, str, str]] = {}
"""Mnemonic -> type of the result, types of the sources, expression."""


def _vector(names: str, result: str, sources: str, expression: str) -> None:
    VECTOR.update(dict.fromkeys(names.split(), (result, sources, expression)))


_vector("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u", "u", "a")
_vector("v_add_u32", "u", "uu", "a + b")
_vector("v_sub_u32", "u", "uu", "a - b")
_vector("v_subrev_u32", "u", "uu", "b - a")
_vector("v_mul_lo_u32", "u", "uu", "a * b")
_vector("v_mul_hi_u32", "u", "uu", "high_product(a, b)")
_vector("v_mul_hi_i32", "u", "ii", "high_product_signed(a, b)")
_vector("v_and_b32", "u", "uu", "a & b")
_vector("v_or_b32", "u", "uu", "a | b")
_vector("v_xor_b32", "u", "uu", "a ^ b")
_vector("v_not_b32", "u", "u", "~a")
_vector("v_lshlrev_b32", "u", "uu", "b << (a & U(31))")
_vector("v_lshrrev_b32", "u", "uu", "b >> (a & U(31))")
_vector("v_ashrrev_i32", "i", "ii", "b >> (a & I(31))")
_vector("v_add3_u32", "u", "uuu", "a + b + c")
_vector("v_lshl_add_u32", "u", "uuu", "(a << (b & U(31))) + c")
_vector("v_add_lshl_u32", "u", "uuu", "(a + b) << (c & U(31))")
_vector("v_lshl_or_b32", "u", "uuu", "(a << (b & U(31))) | c")
_vector("v_and_or_b32", "u", "uuu", "(a & b) | c")
_vector("v_or3_b32", "u", "uuu", "a | b | c")
_vector("v_xad_u32", "u", "uuu", "(a ^ b) + c")
_vector("v_bfe_u32", "u", "uuu", "field(a, b, c & U(31))")
_vector("v_bfe_i32", "u", "uuu", "field_signed(a, b, c & U(31))")
_vector("v_bfrev_b32", "u", "u", "reverse_bits(a)")
_vector("v_mbcnt_lo_u32_b32", "u", "uu", "count_below(a, False, lanes) + b")
_vector("v_mbcnt_hi_u32_b32", "u", "uu", "count_below(a, True, lanes) + b")
_vector("v_bfi_b32", "u", "uuu", "(a & b) | (~a & c)")
_vector("v_perm_b32", "u", "uuu", "permute_bytes(a, b, c)")
_vector("v_alignbit_b32", "u", "uuu", "align_bits(a, b, c)")
_vector("v_mul_u32_u24", "u", "uu", "(a & U(0xFFFFFF)) * (b & U(0xFFFFFF))")
_vector("v_mad_u32_u24", "u", "uuu", "(a & U(0xFFFFFF)) * (b & U(0xFFFFFF)) + c")
_vector("v_mul_i32_i24", "i", "uu", "sign_extend(a, 24) * sign_extend(b, 24)")
_vector("v_mad_i32_i24", "u", "uuu", "(sign_extend(a, 24) * sign_extend(b, 24)).view(U) + c")
_vector("v_min_i32", "i", "ii", "np.minimum(a, b)")
_vector("v_max_i32", "i", "ii", "np.maximum(a, b)")
_vector("v_min3_i32", "i", "iii", "np.minimum(np.minimum(a, b), c)")
_vector("v_min_u32", "u", "uu", "np.minimum(a, b)")
_vector("v_max_u32", "u", "uu", "np.maximum(a, b)")

_vector("v_add_u16", "w", "ww", "a + b")
_vector("v_sub_u16", "w", "ww", "a - b")
_vector("v_mul_lo_u16", "w", "ww", "a * b")
_vector("v_mad_u16", "w", "www", "a * b + c")
_vector("v_lshlrev_b16", "w", "ww", "b << (a & W16(15))")
_vector("v_lshrrev_b16", "w", "ww", "b >> (a & W16(15))")
_vector("v_ashrrev_i16", "w", "wk", "(b >> (a & W16(15)).view(S16)).view(W16)")

_vector("v_mov_b64", "Q", "Q", "a")
_vector("v_lshl_add_u64", "Q", "QuQ", "(a << (b & U(7)).astype(Q)) + c")
_vector("v_lshlrev_b64", "Q", "uQ", "b << (a & U(63)).astype(Q)")
_vector("v_lshrrev_b64", "Q", "uQ", "b >> (a & U(63)).astype(Q)")
_vector("v_ashrrev_i64", "L", "uL", "b >> (a & U(63)).astype(L)")

_vector("v_add_f32", "f", "ff", "a + b")
_vector("v_sub_f32", "f", "ff", "a - b")
_vector("v_subrev_f32", "f", "ff", "b - a")
_vector("v_mul_f32", "f", "ff", "a * b")
_vector("v_fma_f32 v_fmamk_f32 v_fmaak_f32", "f", "fff", "fma(a, b, c)")
_LOW, _HIGH = (f"half(a{shift}).astype(F) * half(b{shift}).astype(F)" for shift in ("", " >> U(16)"))
_vector("v_dot2_f32_f16", "f", "uuf", f"c + {_LOW} + {_HIGH}")
_vector("v_max_f32", "f", "ff", "maximum(a, b)")
_vector("v_min_f32", "f", "ff", "minimum(a, b)")
_vector("v_max3_f32", "f", "fff", "maximum(maximum(a, b), c)")
_vector("v_min3_f32", "f", "fff", "minimum(minimum(a, b), c)")
_vector("v_med3_f32", "f", "fff", "median(a, b, c)")
_vector("v_mul_f16", "h", "hh", "a * b")
_vector("v_add_f16", "h", "hh", "a + b")
_vector("v_sub_f16", "h", "hh", "a - b")
_vector("v_max_f16", "h", "hh", "maximum(a, b)")
_vector("v_rndne_f32", "f", "f", "np.rint(a)")
_vector("v_floor_f32", "f", "f", "np.floor(a)")
_vector("v_trunc_f32", "f", "f", "np.trunc(a)")

_vector("v_max_num_f32", "f", "ff", "larger_number(a, b)")
_vector("v_min_num_f32", "f", "ff", "smaller_number(a, b)")
_vector("v_max_num_f16", "h", "hh", "larger_number(a, b)")
_vector("v_min_num_f16", "h", "hh", "smaller_number(a, b)")
_vector("v_max3_num_f32", "f", "fff", "larger_number(larger_number(a, b), c)")
_vector("v_min3_num_f32", "f", "fff", "smaller_number(smaller_number(a, b), c)")
_vector("v_maxmin_num_f32", "f", "fff", "smaller_number(larger_number(a, b), c)")
_vector("v_minmax_num_f32", "f", "fff", "larger_number(smaller_number(a, b), c)")
_vector("v_med3_num_f32", "f", "fff", "middle_number(a, b, c)")
_vector("v_xor3_b32", "u", "uuu", "a ^ b ^ c")

_vector("v_exp_f32", "f", "f", "exp2(a)")
_vector("v_log_f32", "f", "f", "log2(a)")
_vector("v_rcp_f32 v_rcp_iflag_f32", "f", "f", "reciprocal(a)")
_vector("v_sqrt_f32", "f", "f", "square_root(a)")
_vector("v_rsq_f32", "f", "f", "reciprocal_root(a)")
_vector("v_ldexp_f32", "f", "fi", "ldexp(a, b)")
_vector("v_div_fixup_f32", "f", "fff", "div_fixup(a, b, c)")

_vector("v_cvt_f32_i32", "f", "i", "a.astype(F)")
_vector("v_cvt_f32_u32", "f", "u", "a.astype(F)")
_vector("v_cvt_u32_f32", "u", "f", "to_unsigned(a)")
_vector("v_cvt_i32_f32", "i", "f", "to_signed(a)")
_vector("v_cvt_f16_f32", "h", "f", "a.astype(H)")
_vector("v_cvt_f32_f16", "f", "h", "a.astype(F)")
_vector("v_cvt_pk_bf16_f32", "u", "ff", "bfloat16_bits(a) | (bfloat16_bits(b) << U(16))")
_vector("v_cvt_pk_f16_f32", "u", "ff", "half_bits(a) | (half_bits(b) << U(16))")
_vector("v_pack_b32_f16", "u", "ww", "a.astype(U) | (b.astype(U) << U(16))")

COMPARE = {
    "lt": "a < b",
    "eq": "a == b",
    "le": "a <= b",
    "gt": "a > b",
    "ne": "a != b",
    "ge": "a >= b",
    "lg": "(a < b) | (a > b)",
    "o": "(a == a) & (b == b)",
    "u": "(a != a) | (b != b)",
    "neq": "a != b",
    "nge": "~(a >= b)",
    "nlg": "~((a < b) | (a > b))",
    "ngt": "~(a > b)",
    "nle": "~(a <= b)",
    "nlt": "~(a < b)",
}
"""Comparisons by name. Of unordered floats all are false except the `n` forms and `u`."""
COMPARED = {"i32": "i", "u32": "u", "f32": "f", "i64": "L", "u64": "Q", "f16": "h", "u16": "w", "i16": "k"}

PACKED = {
    "add_f16": ("h", "a + b"),
    "mul_f16": ("h", "a * b"),
    "max_f16": ("h", "maximum(a, b)"),
    "min_f16": ("h", "minimum(a, b)"),
    "max_num_f16": ("h", "larger_number(a, b)"),
    "min_num_f16": ("h", "smaller_number(a, b)"),
    "ashrrev_i16": ("k", "b >> (a & S16(15))"),
    "lshlrev_b16": ("w", "b << (a & W16(15))"),
    "lshrrev_b16": ("w", "b >> (a & W16(15))"),
    "add_u16": ("w", "a + b"),
    "mul_lo_u16": ("w", "a * b"),
}
"""`v_pk_`: the same on both halves."""

LOGIC = {
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
    "andn2": "a & ~b",
    "orn2": "a | ~b",
    "nand": "~(a & b)",
    "nor": "~(a | b)",
    "xnor": "~(a ^ b)",
}
"""Scalar operations on 32 or 64 bits; SCC says that the result is not 0. With `saveexec` b is exec."""

_OVERFLOW_ADD, _OVERFLOW_SUB = "((a ^ r) & (b ^ r)) < 0", "((a ^ b) & (a ^ r)) < 0"
SCALAR: dict[str, tuple[str, str, str]] = {
    "s_mov_b32": ("u", "a", ""),
    "s_movk_i32": ("i", "b", ""),
    "s_cselect_b32": ("u", "np.where(scc, a, b)", ""),
    "s_addc_u32": ("u", "a + b + scc", "(a.astype(Q) + b + scc) >> Q(32) != 0"),
    "s_subb_u32": ("u", "a - b - scc", "a < b.astype(Q) + scc"),
    "s_add_u32": ("u", "a + b", "r < a"),
    "s_sub_u32": ("u", "a - b", "a < b"),
    "s_add_i32": ("i", "a + b", _OVERFLOW_ADD),
    "s_addk_i32": ("i", "a + b", _OVERFLOW_ADD),
    "s_sub_i32": ("i", "a - b", _OVERFLOW_SUB),
    "s_mul_i32": ("u", "a * b", ""),
    "s_mulk_i32": ("i", "a * b", ""),
    "s_mul_hi_u32": ("u", "high_product(a, b)", ""),
    "s_mul_hi_i32": ("i", "high_product_signed(a, b).view(I)", ""),
    "s_min_i32": ("i", "np.minimum(a, b)", "a < b"),
    "s_max_i32": ("i", "np.maximum(a, b)", "a >= b"),
    "s_min_u32": ("u", "np.minimum(a, b)", "a < b"),
    "s_max_u32": ("u", "np.maximum(a, b)", "a >= b"),
    "s_lshl_b32": ("u", "a << (b & U(31))", "r != 0"),
    "s_lshr_b32": ("u", "a >> (b & U(31))", "r != 0"),
    "s_ashr_i32": ("i", "a >> (b & I(31))", "r != 0"),
    "s_bfe_u32": ("u", "field(a, b, (b >> U(16)) & U(127))", "r != 0"),
    "s_bfe_i32": ("u", "field_signed(a, b, (b >> U(16)) & U(127))", "r != 0"),
    "s_pack_ll_b32_b16": ("u", "(a & U(0xFFFF)) | (b << U(16))", ""),
    "s_pack_hl_b32_b16": ("u", "(a >> U(16)) | (b << U(16))", ""),
    "s_bcnt1_i32_b32": ("u", "count_bits(a)", "r != 0"),
    "s_ff1_i32_b32": ("u", "np.where(a == 0, U(0xFFFFFFFF), count_bits(~a & (a - U(1))))", ""),
    "s_flbit_i32": ("u", "leading_difference(a)", ""),
    "s_not_b32": ("u", "~a", "r != 0"),
    "s_brev_b32": ("u", "reverse_bits(a)", ""),
    "s_abs_i32": ("u", "np.abs(a.view(I)).view(U)", "r != 0"),
    "s_sext_i32_i16": ("u", "sign_extend(a, 16).view(U)", ""),
    "s_sext_i32_i8": ("u", "sign_extend(a, 8).view(U)", ""),
    "s_mov_b64": ("Q", "a", ""),
    "s_not_b64": ("Q", "~a", "r != 0"),
    "s_cselect_b64": ("Q", "np.where(scc, a, b)", ""),
    "s_lshl_b64": ("Qu", "a << (b & U(63)).astype(Q)", "r != 0"),
    "s_lshr_b64": ("Qu", "a >> (b & U(63)).astype(Q)", "r != 0"),
    "s_ashr_i64": ("Lu", "a >> (b & U(63)).astype(L)", "r != 0"),
    "s_bfe_i64": ("Lu", "field_signed_64(a, b)", "r != 0"),
}
"""Mnemonic -> type of the result and of a (and of b if another), expression, what SCC becomes (nothing: it stays)."""
SCALAR |= {
    f"s_lshl{k}_add_u32": ("u", f"(a << U({k})) + b", f"((a.astype(Q) << Q({k})) + b) >> Q(32) != 0")
    for k in (1, 2, 3, 4)
}

SCALAR |= {
    "s_add_nc_u64": ("Q", "a + b", ""),
    "s_sub_nc_u64": ("Q", "a - b", ""),
    "s_mul_u64": ("Q", "a * b", ""),
    "s_bitset0_b32": ("u", "a & ~(U(1) << (b & U(31)))", ""),
    "s_bitset1_b32": ("u", "a | (U(1) << (b & U(31)))", ""),
}
_ON_SCALARS = (
    "add_f32 sub_f32 mul_f32 max_num_f32 min_num_f32 cvt_f32_i32 cvt_f32_u32 cvt_i32_f32 cvt_u32_f32 cvt_f32_f16"
)
for _name in _ON_SCALARS.split():  # gfx12's scalar unit does what the vector unit does
    SCALAR[f"s_{_name}"] = (VECTOR[f"v_{_name}"][1][0], VECTOR[f"v_{_name}"][2], "")
SCALAR["s_mul_f16"] = ("u", "half_bits(half(b) * half(c)) | (a & U(0xFFFF0000))", "")  # a is what its target held
SCALAR |= {f"v_s_{name}_f32": ("f", VECTOR[f"v_{name}_f32"][2], "") for name in ("exp", "log", "rcp", "rsq", "sqrt")}

SCALAR_COMPARE = {"eq": "==", "lg": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}

WIDTHS = {
    "ubyte": (1, False),
    "sbyte": (1, True),
    "byte": (1, False),
    "ushort": (2, False),
    "sshort": (2, True),
    "short": (2, False),
    "dword": (4, False),
    "dwordx2": (8, False),
    "dwordx3": (12, False),
    "dwordx4": (16, False),
    "dwordx8": (32, False),
    "dwordx16": (64, False),
}
"""Widths of an access to memory: bytes of a lane, and whether the sign is extended."""

ATOMICS: dict[str, tuple[str, str]] = {
    "swap": ("u", "b"),
    "cmpswap": ("u", "np.where(a == c, b, a)"),
    "add": ("u", "a + b"),
    "sub": ("u", "a - b"),
    "smin": ("i", "np.minimum(a, b)"),
    "umin": ("u", "np.minimum(a, b)"),
    "smax": ("i", "np.maximum(a, b)"),
    "umax": ("u", "np.maximum(a, b)"),
    "and": ("u", "a & b"),
    "or": ("u", "a | b"),
    "xor": ("u", "a ^ b"),
    "add_f32": ("f", "a + b"),
    "pk_add_f16": ("u", "half_bits(half(a) + half(b)) | (half_bits(half(a >> U(16)) + half(b >> U(16))) << U(16))"),
    "pk_add_bf16": (
        "u",
        (
            "bfloat16_bits((a << U(16)).view(F) + (b << U(16)).view(F))"
            " | (bfloat16_bits((a & U(0xFFFF0000)).view(F) + (b & U(0xFFFF0000)).view(F)) << U(16))"
        ),
    ),
}
"""Name after `global_atomic_` -> type, and what the word a in memory becomes with the data b (and c). Denormals stay:
gfx942's and gfx950's atomics do not flush them, and gfx90a's, which do, are not executed."""

_INTEGERS, _ORDERS = ("i32", "u32", "i64", "u64", "u16", "i16"), ("lt", "eq", "le", "gt", "ne", "ge")
_OTHERS = """
s_nop v_nop s_endpgm s_barrier s_branch s_setprio s_sleep s_waitcnt s_cbranch_scc0 s_cbranch_scc1 s_cbranch_vccz
s_cbranch_vccnz s_cbranch_execz s_cbranch_execnz s_load_dword s_load_dwordx2 s_load_dwordx4 s_load_dwordx8
s_load_dwordx16 s_load_dwordx3 s_load_ubyte s_load_sbyte s_load_ushort s_load_sshort
s_bitcmp0_b32 s_bitcmp1_b32 s_and_saveexec_b64 s_or_saveexec_b64 s_andn2_saveexec_b64
s_and_saveexec_b32 s_or_saveexec_b32 s_andn2_saveexec_b32
s_barrier_signal s_delay_alu s_clause s_wait_alu s_sendmsg global_inv
v_wmma_f32_16x16x16_f16 v_wmma_f32_16x16x16_bf16 v_permlanex16_b32
s_bcnt1_i32_b64 v_cndmask_b32 v_fmac_f32 v_div_scale_f32 v_div_fmas_f32 v_fma_mixlo_f16 v_fma_mixhi_f16 v_fma_mix_f32
v_add_co_u32 v_sub_co_u32 v_subrev_co_u32 v_addc_co_u32 v_subb_co_u32 v_subbrev_co_u32 v_mad_u64_u32 v_mad_i64_i32
v_pk_add_f32 v_pk_mul_f32 v_pk_fma_f32 v_pk_mov_b32 v_bitop3_b16 v_bitop3_b32
v_cvt_pk_f32_fp8 v_cvt_pk_f32_bf8 v_cvt_scalef32_pk_f32_fp8 v_cvt_scalef32_pk_f32_bf8
v_cvt_scalef32_pk_f16_fp8 v_cvt_scalef32_pk_bf16_fp8
v_readlane_b32 v_writelane_b32 v_readfirstlane_b32 v_permlane16_swap_b32 v_permlane32_swap_b32
v_mfma_f32_16x16x4_f32 v_mfma_f32_32x32x2_f32 v_mfma_f32_16x16x8_xf32 v_mfma_f32_32x32x4_xf32
v_mfma_f32_16x16x16_f16 v_mfma_f32_32x32x8_f16 v_mfma_f32_16x16x32_f16 v_mfma_f32_32x32x16_f16
v_mfma_f32_16x16x16_bf16 v_mfma_f32_32x32x8_bf16 v_mfma_f32_16x16x32_bf16 v_mfma_f32_32x32x16_bf16
ds_bpermute_b32 ds_permute_b32 ds_swizzle_b32 ds_read_b64_tr_b16 ds_read_b64_tr_b8
ds_read_u8 ds_read_i8 ds_read_u16 ds_read_i16
ds_read_u8_d16 ds_read_u8_d16_hi ds_read_u16_d16 ds_read_u16_d16_hi ds_read_b32 ds_read_b64 ds_read_b96 ds_read_b128
ds_read2_b32 ds_read2_b64
ds_read2st64_b32 ds_read2st64_b64 ds_write_b8 ds_write_b8_d16_hi ds_write_b16 ds_write_b16_d16_hi ds_write_b32
ds_write_b64 ds_write_b96 ds_write_b128 ds_write2_b32 ds_write2_b64 ds_write2st64_b32 ds_write2st64_b64
global_load_ubyte global_load_sbyte global_load_ushort global_load_sshort global_load_short_d16
global_load_short_d16_hi global_load_dword global_load_dwordx2 global_load_dwordx3 global_load_dwordx4
global_load_lds_dword global_load_lds_dwordx4
global_store_byte global_store_byte_d16_hi global_store_short global_store_short_d16_hi global_store_dword
global_store_dwordx2 global_store_dwordx3 global_store_dwordx4
buffer_load_ubyte buffer_load_ushort buffer_load_dword buffer_load_dwordx2 buffer_load_dwordx3 buffer_load_dwordx4
buffer_wbl2 buffer_inv
buffer_store_byte buffer_store_short buffer_store_dword buffer_store_dwordx2 buffer_store_dwordx3 buffer_store_dwordx4
scratch_load_dword scratch_load_dwordx2 scratch_load_dwordx4 scratch_store_dword scratch_store_dwordx2
scratch_store_dwordx4
"""

MNEMONICS = frozenset(
    [
        *VECTOR,
        *SCALAR,
        *_OTHERS.split(),
        *(f"v_pk_{name}" for name in PACKED),
        *(f"{kind}_atomic_{name}" for kind in ("global", "buffer") for name in ATOMICS),
        *(f"v_cmp_{order}_{kind}" for order in _ORDERS for kind in _INTEGERS),
        *(f"v_cmp_{order}_{kind}" for order in COMPARE if order != "ne" for kind in ("f32", "f16")),
        *(f"s_{name}_b{bits}" for name in LOGIC for bits in (32, 64)),
        *(f"s_cmp_{order}_{kind}" for order in SCALAR_COMPARE for kind in ("i32", "u32")),
        *(f"s_cmp_{order}_f32" for order in COMPARE if order != "ne"),
        "s_cmp_eq_u64",
        "s_cmp_lg_u64",
        *(f"s_cmpk_{order}_{kind}" for order in SCALAR_COMPARE for kind in ("i32", "u32")),
    ]
)
"""Every instruction that is known; another is refused, whatever its name looks like."""
