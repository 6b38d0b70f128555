# SPDX-License-Identifier: Apache-2.0
"""Instructions against oracles that share no code with the machine: Python integers and fractions lane by lane, torch's
dtypes, correctly rounded quotients, plain loops over documented layouts. `test_pseudocode.py` has those that AMD's own
text describes. An instruction without an oracle is red.
"""

import ctypes
import dataclasses
import functools
import itertools
import math
import operator
import random
import re
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.pseudocode import described
from support.wave import EDGES, WAVES, data, machine, program, run

from amdgcn import arithmetic, translate
from amdgcn.errors import LaunchError, UnknownInstructionError, UnreadableTextError
from amdgcn.machine import Machine
from amdgcn.meaning import ATOMICS, MNEMONICS
from amdgcn.memory import Memory
from amdgcn.text import parse
from amdgcn.waits import check_waits

ONES = 0xFFFFFFFF
COVERED: set[str] = set()


A, B, C = data(1), data(2), data(3)
LISTS = [each.ravel().tolist() for each in (A, B, C)]


def signed(x, bits=32):
    x &= (1 << bits) - 1
    return x - (1 << bits) if bits and x >> (bits - 1) else x


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits & ONES))[0]


def f16(bits):
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def bits32(value):
    return struct.unpack("<I", struct.pack("<f", ctypes.c_float(value).value))[0]


def bits16(value):
    if math.isnan(value):
        return 0x7E00
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def rounded(exact):
    """A fraction as the nearest float32, ties to even: bits."""
    if exact == 0:
        return 0
    sign, exact = (0x80000000, -exact) if exact < 0 else (0, exact)
    exponent = max(exact.numerator.bit_length() - exact.denominator.bit_length() - 1, -127)
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(exact / quantum)  # Python's round: ties to even
    value = units * quantum
    return sign | (0x7F800000 if value >= Fraction(2) ** 128 else bits32(float(value)))


def fused(a, b, c):
    """a * b + c of three float32, rounded once: bits."""
    if all(map(math.isfinite, (a, b, c))) and (exact := Fraction(a) * Fraction(b) + Fraction(c)):
        return rounded(exact)
    return bits32(a * b + c)


def sum_bits(a, b):
    return bits32(a + b)


def same_floats(got, want, width=32, ulps=0):
    """Equal bits; any NaN for a NaN; zeros of both signs alike; so many units in the last place where asked."""
    inf = 0x7F800000 if width == 32 else 0x7C00
    top = 1 << (width - 1)

    def key(x):
        x &= 2 * top - 1
        return "nan" if x & (top - 1) > inf else -(x - top) if x & top else x

    p, q = key(got), key(want)
    return p == q or (ulps and "nan" not in {p, q} and abs(p - q) <= ulps)


def check(got, want, what, same=None):
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        ok = same(g, w) if same else g == w & ONES
        assert ok, f"{what}, sample {k}: {[hex(each[k % len(each)]) for each in LISTS]} gives {g:#x}, expected {w:#x}"


def covers(names):
    COVERED.update(names)
    return names


MOVES = ("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32")


def listed(count):
    return list(zip(*LISTS[:count], strict=True))


def vector_line(name, count):
    suffix = "" if count == 3 or "pk_" in name or "pack" in name else "_e32"
    return f"{name}{suffix} v4, {', '.join(['v1', 'v2', 'v3'][:count])}"


def result(lines, **options):
    return run(lines, {1: A, 2: B, 3: C, 4: np.full_like(A, 0xDEADBEEF)}, **options).V[4].ravel().tolist()


@pytest.mark.parametrize("name", covers(MOVES))
def test_moves(name):
    check(result(f"{name} v4, v1"), LISTS[0], name)


def extreme(a, b, sign, value=f32, width=32, quiet=0x400000):
    """Bits of the larger one, or with sign -1 of the smaller one: IEEE 754-2008 with signalling NaN, +0 above -0."""
    nan = [math.isnan(value(each)) for each in (a, b)]
    for each, is_nan in zip((a, b), nan, strict=True):
        if is_nan and not each & quiet:
            return each | quiet
    if any(nan):
        return b if nan[0] else a
    first, second = ((value(each), -(each >> width - 1)) for each in (a, b))
    return a if (first >= second if sign > 0 else first < second) else b


EXTREMES = {
    "v_max_f32": lambda a, b: extreme(a, b, 1),
    "v_min_f32": lambda a, b: extreme(a, b, -1),
    "v_max3_f32": lambda a, b, c: extreme(extreme(a, b, 1), c, 1),
    "v_min3_f32": lambda a, b, c: extreme(extreme(a, b, -1), c, -1),
}


NANS = [0x7F800001, 0xFF812345, 0x7FC00000, 0xFFC01234]  # two that signal, two that are quiet


@pytest.mark.parametrize("name", covers(EXTREMES))
def test_extremes(name):
    count, choose = EXTREMES[name].__code__.co_argcount, random.Random(6)
    sources = [[choose.choice(NANS) if choose.random() < 0.3 else x for x in each] for each in LISTS[:count]]
    registers = {k: np.array(each, np.uint32).reshape(A.shape) for k, each in enumerate(sources, start=1)}
    got = run(vector_line(name, count), registers).V[4].ravel().tolist()
    for each, x in zip(zip(*sources, strict=True), got, strict=True):
        assert x == EXTREMES[name](*each), (name, [hex(bits) for bits in each], hex(x))


INF = 0x7F800000
BEYOND_THE_TEXT = {
    # Of this AMD's text says nothing: denormals, which the transcendental unit neither takes nor gives, the sign of a
    # zero, and numbers that are whole already.
    "v_rcp_f32": [(0x00000001, INF), (0x807FFFFF, INF | 1 << 31), (0x7F000000, 0), (0xFF000000, 1 << 31)],
    "v_rcp_iflag_f32": [(0x00000001, INF), (0x7F000000, 0)],
    "v_rsq_f32": [(0x00000001, INF), (0x80000001, INF | 1 << 31), (0x00800000, 0x5F000000)],
    "v_sqrt_f32": [(0x007FFFFF, 0), (0x80000001, 1 << 31)],
    "v_log_f32": [(0x00000001, INF | 1 << 31), (0x80000001, INF | 1 << 31), (0x00800000, 0xC2FC0000)],
    "v_exp_f32": [(0x00000001, 0x3F800000), (0xC2FE0000, 0), (0xC2FC0000, 0x00800000)],  # of -127 and -126
    "v_rndne_f32": [(0x4B000001, 0x4B000001), (0xCB000003, 0xCB000003), (0xBE800000, 1 << 31), (0x3F000000, 0)],
    "v_floor_f32": [(0x80000000, 1 << 31), (0x4B000001, 0x4B000001)],
    "v_trunc_f32": [(0xBF000000, 1 << 31), (0xCB000003, 0xCB000003)],
}


@pytest.mark.parametrize("name", BEYOND_THE_TEXT)
def test_edges_that_the_text_leaves_open(name):
    given, want = zip(*BEYOND_THE_TEXT[name], strict=True)
    lanes = np.resize(np.array(given, np.uint32), A.shape)
    got = run(f"{name}_e32 v4, v1", {1: lanes, 4: A}).V[4].ravel().tolist()
    assert list(map(hex, got[: len(want)])) == list(map(hex, want))


@pytest.mark.parametrize("name", ["v_fmamk_f32", "v_fmaak_f32"])
def test_fma_with_a_constant(name):
    constant = 0x40490FDB
    line = (
        f"v_fmamk_f32 v4, v1, {constant:#x}, v2" if name == "v_fmamk_f32" else f"v_fmaak_f32 v4, v1, v2, {constant:#x}"
    )
    sources = [(a, constant, b) if "mk" in name else (a, b, constant) for a, b in listed(2)]
    check(result(line), [fused(*map(f32, each)) for each in sources], name, same_floats)


def test_ldexp():
    covers(["v_ldexp_f32"])
    exponents = np.random.default_rng(4).integers(-300, 300, A.shape).astype(np.int32).view(np.uint32)
    got = run("v_ldexp_f32 v4, v1, v2", {1: A, 2: exponents, 4: A}).V[4].ravel().tolist()
    pairs = zip(LISTS[0], exponents.view(np.int32).ravel().tolist(), strict=True)
    want = [
        rounded(Fraction(f32(a)) * Fraction(2) ** e) | a & 0x80000000 if math.isfinite(f32(a)) else a for a, e in pairs
    ]
    check(got, want, "v_ldexp_f32", same_floats)


def test_conversions_as_torch_does_them():
    covers(["v_cvt_f16_f32", "v_cvt_f32_f16", "v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32"])
    many = np.random.default_rng(7).integers(0, 2**32, (512, 64), dtype=np.uint32)
    other = many[::-1].copy()
    floats = torch.from_numpy(many.view(np.float32))

    def of(line, **options):
        return run(line, {1: many, 2: other, 4: many}, arch="gfx950", **options).V[4]

    def equal(got, want, dtype):
        p, q = (torch.from_numpy(each.astype(np.uint16).view(np.int16)).view(dtype) for each in (got, want))
        same = p.view(torch.int16) == q.view(torch.int16)
        assert bool((same | (p.isnan() & q.isnan())).all())

    half, brain = (floats.to(t).view(torch.int16).numpy().view(np.uint16) for t in (torch.float16, torch.bfloat16))
    equal(of("v_cvt_f16_f32_e32 v4, v1"), half, torch.float16)
    for name, low, dtype in (("bf16", brain, torch.bfloat16), ("f16", half, torch.float16)):
        got = of(f"v_cvt_pk_{name}_f32 v4, v1, v2")
        equal(got & 0xFFFF, low, dtype)
        equal(got >> 16, low[::-1], dtype)
    every = np.arange(65536, dtype=np.uint32).reshape(1024, 64)
    got = run("v_cvt_f32_f16_e32 v4, v1", {1: every}).V[4].view(np.float32)
    want = torch.arange(65536).to(torch.int16).view(torch.float16).float().numpy().reshape(1024, 64)
    assert np.array_equal(got, want, equal_nan=True)


FLOAT8 = {
    ("fp8", "gfx942"): torch.float8_e4m3fnuz,
    ("fp8", "gfx950"): torch.float8_e4m3fn,
    ("bf8", "gfx942"): torch.float8_e5m2fnuz,
    ("bf8", "gfx950"): torch.float8_e5m2,
}


@pytest.mark.parametrize(("kind", "arch"), FLOAT8)
def test_every_8_bit_float(kind, arch):
    covers([f"v_cvt_pk_f32_{kind}", f"v_cvt_scalef32_pk_f32_{kind}"])
    codes = np.arange(256, dtype=np.uint32).reshape(4, 64)
    words = codes | (255 - codes) << 8 | (codes ^ 0x55) << 16 | (codes ^ 0xAA) << 24
    table = torch.arange(256, dtype=torch.uint8).view(FLOAT8[kind, arch]).float().numpy()
    scaled = f"v_cvt_scalef32_pk_f32_{kind} v[4:5], v1, v2 op_sel:[1,0,0]"
    lines = [
        (f"v_cvt_pk_f32_{kind}_e32 v[4:5], v1", 0, 1),
        (f"v_cvt_pk_f32_{kind}_sdwa v[4:5], v1 src0_sel:WORD_1", 16, 1),
    ]
    lines += [(scaled, 16, 0.25)] if arch == "gfx950" else []
    for line, shift, factor in lines:
        group = run(line, {1: words, 2: np.full_like(words, 0x3E812345)}, arch=arch)
        for k in (0, 1):
            want = (torch.from_numpy(table[words >> (shift + 8 * k) & 255]) * factor).numpy()
            assert np.array_equal(group.V[4 + k].view(np.float32), want, equal_nan=True), line


HALVES_OF_FLOAT8 = {"f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("scale", [0x3F812345, 0x3E812345], ids=["1", "0.25"])
@pytest.mark.parametrize("kind", HALVES_OF_FLOAT8)
def test_every_8_bit_float_as_a_half(kind, scale):
    """Both halves of a register from either half of the codes; NaN stays NaN, and all results are exact."""
    name = f"v_cvt_scalef32_pk_{kind}_fp8"
    covers([name])
    codes = np.arange(256, dtype=np.uint32).reshape(4, 64)
    words = codes | (255 - codes) << 8 | (codes ^ 0x55) << 16 | (codes ^ 0xAA) << 24
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    factor = 2.0 ** ((scale >> 23) - 127)
    for line, shift in ((f"{name} v4, v1, v2", 0), (f"{name} v4, v1, v2 op_sel:[1,0,0]", 16)):
        group = run(line, {1: words, 2: np.full_like(words, scale), 4: words}, arch="gfx950")
        got = torch.from_numpy(np.ascontiguousarray(group.V[4]).view(np.int16)).view(HALVES_OF_FLOAT8[kind])
        for k in (0, 1):
            code = torch.from_numpy((words >> (shift + 8 * k) & 255).astype(np.int64))
            want = (table[code] * factor).to(HALVES_OF_FLOAT8[kind])
            torch.testing.assert_close(got[:, k::2], want, rtol=0, atol=0, equal_nan=True, msg=line)
            assert torch.equal(got[:, k::2].isnan(), code & 127 == 127)


def test_quotients_are_rounded_correctly():
    """The sequence that LLVM writes for a / b, over random bits: every exponent, denormals, infinities, NaN."""
    covers(["v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32"])
    gen = np.random.default_rng(5)
    a, b = (gen.integers(0, 2**32, (1024, 64), dtype=np.uint32) for _ in range(2))
    a[0, : len(EDGES)], b[0, : len(EDGES)] = EDGES, EDGES[::-1]
    group = run(
        """
        v_div_scale_f32 v3, s[2:3], v2, v2, v1
        v_div_scale_f32 v4, vcc, v1, v2, v1
        v_rcp_f32_e32 v5, v3
        v_fma_f32 v6, -v3, v5, 1.0
        v_fma_f32 v5, v6, v5, v5
        v_mul_f32_e32 v6, v4, v5
        v_fma_f32 v7, -v3, v6, v4
        v_fma_f32 v6, v7, v5, v6
        v_fma_f32 v7, -v3, v6, v4
        v_div_fmas_f32 v5, v7, v5, v6
        v_div_fixup_f32 v8, v5, v2, v1
        """,
        {1: a, 2: b},
    )
    with np.errstate(all="ignore"):
        want = a.view(np.float32) / b.view(np.float32)
    got = group.V[8].view(np.float32)
    wrong = (group.V[8] != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert not wrong.any(), (
        f"{wrong.sum()} wrong: {[(hex(x), hex(y)) for x, y in zip(a[wrong][:4], b[wrong][:4], strict=True)]}"
    )


def test_lanes_that_are_off_compare_as_false():
    off = (np.arange(256).reshape(A.shape) % 7) == 0
    got = run("v_cmp_ge_u32_e32 vcc, v6, v8", {6: A, 8: np.minimum(A, B)}, off=off).mask(106)
    assert got.tolist() == (~off).tolist()


SA, SC = (np.array(each, np.uint32) for each in (LISTS[0], LISTS[2]))
SCC = np.arange(256) % 2 == 1


def scalar(line):
    group = run(line, scalar={2: SA, 3: SC, 11: np.array(LISTS[1], np.uint32)}, scc=SCC)
    return group.S[10].tolist(), group.S[11].tolist(), group.scc.tolist()


def test_constants_have_a_sign():
    assert scalar("s_movk_i32 s10, 0xffe8")[0] == [0xFFFFFFE8] * 256
    low, high, _ = scalar("s_cselect_b64 s[10:11], s[2:3], -1")
    wide = zip(LISTS[0], LISTS[2], SCC, strict=True)
    assert list(zip(low, high, strict=True)) == [(a, c) if scc else (ONES, ONES) for a, c, scc in wide]


def test_ones_of_64_bits():
    [name] = covers(["s_bcnt1_i32_b64"])
    got, kept, scc = scalar(f"{name} s10, s[2:3]")
    assert got == [a.bit_count() + c.bit_count() for a, c in zip(LISTS[0], LISTS[2], strict=True)]
    assert scc == [count != 0 for count in got]
    assert kept == LISTS[1], "one register is written"


@pytest.mark.parametrize("half", ["lo", "hi"])
def test_lanes_before(half):
    [name] = covers([f"v_mbcnt_{half}_u32_b32"])
    got = run(f"{name} v4, v1, v2", {1: A, 2: B}).V[4]
    first = 0 if half == "lo" else 32
    for (w, k), a in np.ndenumerate(A):
        before = sum(int(a) >> lane - first & 1 for lane in range(first, min(k, first + 32)))
        assert int(got[w, k]) == (before + int(B[w, k])) & ONES


@pytest.mark.parametrize("name", ["and", "or", "andn2"])
def test_saveexec(name):
    covers([f"s_{name}_saveexec_b64"])
    off = (A & 4) != 0
    group = run(f"s_{name}_saveexec_b64 s[10:11], s[2:3]", {1: A}, {2: SA[:4], 3: SC[:4]}, off=off)
    old = [sum(1 << lane for lane in range(64) if not off[w, lane]) for w in range(WAVES)]
    source = [a | c << 32 for a, c in zip(SA[:4].tolist(), SC[:4].tolist(), strict=True)]
    new = [{"and": s & e, "or": s | e, "andn2": s & ~e}[name] for s, e in zip(source, old, strict=True)]
    words = [
        [x | y << 32 for x, y in zip(group.S[k].tolist(), group.S[k + 1].tolist(), strict=True)] for k in (10, 126)
    ]
    assert words == [old, new]
    assert group.scc.tolist() == [each != 0 for each in new]


def test_cndmask_takes_signs_as_floats_do():
    covers(["v_cndmask_b32"])
    group = run("v_cndmask_b32_e64 v4, -|v1|, v2, s[4:5]", {1: A, 2: B, 4: A}, {4: SA[:4], 5: SC[:4]})
    chosen = group.mask(4).ravel().tolist()
    pairs = zip(LISTS[0], LISTS[1], chosen, strict=True)
    assert group.V[4].ravel().tolist() == [b if c else a | 0x80000000 for a, b, c in pairs]


MEANINGS = {
    # Line -> what of A, B, C and the old 0xdeadbeef; the source is AMD's pseudo-code, or LLVM where the line says so.
    "v_bfe_i32 v4, v1, 20, 20": lambda a, b, c: signed(a) >> 20,  # LLVM: constantFoldBFE
    "v_lshl_add_u64 v[4:5], v[6:7], 2, v[8:9]": lambda a, b, c: (a << 2) + c,
    "v_mul_f32_e64 v4, v1, v2 clamp": lambda a, b, c: clamped(bits32(f32(a) * f32(b))),
    "v_max_f32_e64 v4, v1, v1 clamp": lambda a, b, c: clamped(a),
    "v_sub_u32_e64 v4, v1, v2 clamp": lambda a, b, c: max(a - b, 0),
    "v_add_co_u32_sdwa v4, vcc, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1": (
        lambda a, b, c: a + (b >> 16)
    ),
    "v_pk_mov_b32 v[4:5], 1.0, 1.0": lambda a, b, c: 0x3F800000,  # LLVM: expandPostRAPseudo writes it
    "v_pk_add_u16 v4, v1, 1.0": lambda a, b, c: a & 0xFFFF | (a + 0x3F800000) & 0xFFFF0000,
    "v_pk_add_u16 v4, v1, -1": lambda a, b, c: (a - 1) & 0xFFFF | (a - 0x10000) & 0xFFFF0000,
    "v_pk_add_u16 v4, v1, 5": lambda a, b, c: (a + 5) & 0xFFFF | a & 0xFFFF0000,
    "v_bitop3_b16 v4, v1, v2, v3 bitop3:0xc0 op_sel:[1,0,0,0]": lambda a, b, c: a >> 16 & b & 0xFFFF,
    "v_bitop3_b16 v4, v1, v2, v3 bitop3:0xc0 op_sel:[0,0,0,1]": lambda a, b, c: (a & b & 0xFFFF) << 16 | 0xBEEF,
}


def clamped(x):
    value = f32(x)
    return 0 if math.isnan(value) or value <= 0 else bits32(min(value, 1.0))


@pytest.mark.parametrize("line", MEANINGS)
def test_a_meaning_as_amd_writes_it(line):
    registers = {1: A, 2: B, 3: C, 4: np.full_like(A, 0xDEADBEEF), 6: A, 7: A, 8: C, 9: A}
    arch = "gfx950" if "bitop3" in line else "gfx942"
    got = run(line, registers, arch=arch).V[4].ravel().tolist()
    check(got, [MEANINGS[line](*each) for each in listed(3)], line)


def test_signed_zeros_are_ordered():
    zeros = np.tile(np.array([[0, 1 << 31]], np.uint32), (4, 32))
    other = zeros[:, ::-1].copy()
    assert not run("v_max_f32_e32 v4, v1, v2", {1: zeros, 2: other}).V[4].any()
    assert (run("v_min_f32_e32 v4, v1, v2", {1: zeros, 2: other}).V[4] == 1 << 31).all()


def test_a_packed_float_constant_is_in_the_lower_half():
    """LLVM, isInlinableLiteralV2F16: its upper half is 0, unless op_sel_hi takes the lower one for both."""
    low, high = (A & 0x3FFF), (A >> 16 & 0x3FFF)
    x = run("v_pk_add_f16 v4, v1, 1.0", {1: low | high << 16}).V[4].ravel().tolist()
    want = [bits16(f16(a) + 1) | bits16(f16(b)) << 16 for a, b in zip(low.ravel(), high.ravel(), strict=True)]
    assert x == want
    x = run("v_pk_add_f16 v4, v1, 1.0 op_sel_hi:[1,0]", {1: low | high << 16}).V[4].ravel().tolist()
    want = [bits16(f16(a) + 1) | bits16(f16(b) + 1) << 16 for a, b in zip(low.ravel(), high.ravel(), strict=True)]
    assert x == want


@pytest.mark.parametrize("name", ["v_add_co_u32", "v_addc_co_u32"])
def test_a_carry_of_lanes_that_change_places(name):
    carry = ", vcc" if "addc" in name else ""
    line = f"{name}_dpp v4, vcc, v1, v2{carry} quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
    group = run(line, {1: A, 2: B}, {106: np.full(4, ONES, np.uint32), 107: np.full(4, ONES, np.uint32)})
    total = A[:, np.arange(64) ^ 1].astype(np.uint64) + B + bool(carry)
    assert (group.V[4] == total.astype(np.uint32)).all()
    assert (group.mask(106) == (total >> np.uint64(32) != 0)).all()


def test_bpermute_adds_its_offset():
    """LLVM folds an addition into it (llvm.amdgcn.ds.bpermute.ll)."""
    address = (A % 64 * 4).astype(np.uint32)
    got = run("ds_bpermute_b32 v4, v1, v2 offset:4\ns_waitcnt lgkmcnt(0)", {1: address, 2: B}).V[4]
    assert (got == np.take_along_axis(B, (A.astype(np.int64) % 64 + 1) % 64, 1)).all()


def test_permute_gives():
    covers(["ds_permute_b32"])
    off = np.zeros((WAVES, 64), bool)
    off[:, :3] = True
    got = run("ds_permute_b32 v4, v1, v2 offset:4\ns_waitcnt lgkmcnt(0)", {1: A, 2: B, 4: C}, off=off).V[4]
    for w in range(WAVES):
        given = [0] * 64
        for k in range(3, 64):
            given[int(A[w, k]) + 4 >> 2 & 63] = int(B[w, k])
        assert got[w].tolist() == [*C[w, :3].tolist(), *given[3:]]


def test_an_integer_constant_of_a_product_is_its_bits():
    zero = np.zeros_like(A)
    for text, bits in (("1", 1), ("1.0", 0x3F800000), ("0", 0)):
        line = f"v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], {text}"
        assert (run(line, {2: zero, 3: zero, 4: zero, 5: zero}).V[20] == bits).all()


def halves(x, low, high):
    return x >> 16 * low & 0xFFFF, x >> 16 * high & 0xFFFF


PACKED = {
    "v_pk_add_f16": lambda a, b: bits16(f16(a) + f16(b)),
    "v_pk_ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15) & 0xFFFF,
    "v_pk_add_u16": lambda a, b: a + b & 0xFFFF,
}
"""One of each type: AMD's text has the others, and says nothing of halves that change places."""


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("select", [((0, 0), (1, 1)), ((1, 0), (0, 0)), ((0, 1), (1, 0))])
def test_packed_halves(name, select):
    (la, lb), (ha, hb) = select
    got = result(f"{name} v4, v1, v2 op_sel:[{la},{lb}] op_sel_hi:[{ha},{hb}]")
    same = same_floats if name.endswith("f16") else int.__eq__
    for g, a, b in zip(got, *LISTS[:2], strict=True):
        (al, ah), (bl, bh) = halves(a, la, ha), halves(b, lb, hb)
        for part, want in ((g & 0xFFFF, PACKED[name](al, bl)), (g >> 16, PACKED[name](ah, bh))):
            assert same_floats(part, want, 16) if same is same_floats else part == want


def test_packed_float32():
    covers(["v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32"])
    registers = {6: A, 7: B, 8: C, 9: A[::-1].copy(), 10: B[::-1].copy(), 11: C[::-1].copy()}
    lists = {k: v.ravel().tolist() for k, v in registers.items()}
    oracles = {"add": lambda a, b, c: sum_bits(a, b), "mul": lambda a, b, c: bits32(a * b), "fma": fused}
    for name, oracle in oracles.items():
        third, sel, sel_hi, neg = (
            (", v[10:11]", "0,1,0", "1,0,1", "0,1,0") if name == "fma" else ("", "0,1", "1,0", "0,1")
        )
        line = f"v_pk_{name}_f32 v[4:5], v[6:7], v[8:9]{third} op_sel:[{sel}] op_sel_hi:[{sel_hi}] neg_lo:[{neg}]"
        group = run(line, registers)
        for k, (a, b, c, sign) in enumerate(((6, 9, 10, -1), (7, 8, 11, 1))):
            want = [oracle(f32(x), sign * f32(y), f32(z)) for x, y, z in zip(lists[a], lists[b], lists[c], strict=True)]
            check(group.V[4 + k].ravel().tolist(), want, line, same_floats)
    group = run("v_pk_mov_b32 v[4:5], v[6:7], v[8:9] op_sel:[1,0]", registers)
    assert (group.V[4] == B).all()
    assert (group.V[5] == C).all()


def test_mixed_precision():
    covers(["v_fma_mixlo_f16", "v_fma_mixhi_f16", "v_fma_mix_f32"])
    for name in ("mixlo_f16", "mixhi_f16", "mix_f32"):
        got = result(f"v_fma_{name} v4, v1, -v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,1]")
        for g, a, b, c in zip(got, *LISTS, strict=True):
            want = fused(f16(a >> 16), -f32(b), f16(c))
            if name == "mix_f32":
                assert same_floats(g, want)
                continue
            kept, new = (g >> 16, g & 0xFFFF) if name == "mixlo_f16" else (g & 0xFFFF, g >> 16)
            assert kept == (0xDEAD if name == "mixlo_f16" else 0xBEEF)
            assert same_floats(new, bits16(f32(want)), 16)
    zero = run("v_fma_mix_f32 v4, v1, -1.0, neg(0)", {1: np.zeros_like(A), 4: A}).V[4]
    assert (zero == 1 << 31).all(), "-0 and -0 are -0"


@pytest.mark.parametrize("table", [0x00, 0x01, 0x6C, 0x96, 0xE8, 0xFF, 0x54])
def test_any_boolean_function(table):
    covers(["v_bitop3_b32", "v_bitop3_b16"])

    def oracle(a, b, c):
        return sum((table >> (4 * (a >> k & 1) + 2 * (b >> k & 1) + (c >> k & 1)) & 1) << k for k in range(32))

    want = [oracle(*each) for each in listed(3)]
    assert result(f"v_bitop3_b32 v4, v1, v2, v3 bitop3:{table:#x}", arch="gfx950") == want
    assert result(f"v_bitop3_b16 v4, v1, v2, v3 bitop3:{table:#x}", arch="gfx950") == [each & 0xFFFF for each in want]


# Lanes and parts of registers


@pytest.mark.parametrize("part", ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE"])
def test_sdwa(part, unused):
    def extract(x):
        return (
            x
            if part == "DWORD"
            else signed(x >> (8 if part[0] == "B" else 16) * int(part[-1]), 8 if part[0] == "B" else 16)
        )

    line = f"v_add_u32_sdwa v4, sext(v1), v2 dst_sel:{part} dst_unused:{unused} src0_sel:{part} src1_sel:BYTE_1"
    bits = {"B": 8, "W": 16, "D": 32}[part[0]]
    shift = 0 if part == "DWORD" else bits * int(part[-1])
    mask = (1 << bits) - 1 << shift
    want = []
    for a, b in listed(2):
        value = (extract(a) + (b >> 8 & 255)) << shift & mask
        want.append(value | (0xDEADBEEF & ~mask if unused == "UNUSED_PRESERVE" else 0))
    assert result(line) == want


DPP = {
    "quad_perm:[1,3,0,2]": lambda k: k // 4 * 4 + [1, 3, 0, 2][k % 4],
    "row_shr:3": lambda k: k - 3 if k % 16 >= 3 else None,
    "row_shl:5": lambda k: k + 5 if k % 16 + 5 < 16 else None,
    "row_ror:4": lambda k: k // 16 * 16 + (k - 4) % 16,
    "row_mirror": lambda k: k // 16 * 16 + 15 - k % 16,
    "row_half_mirror": lambda k: k // 8 * 8 + 7 - k % 8,
    "row_bcast:15": lambda k: k // 16 * 16 - 1 if k >= 16 else None,
    "row_bcast:31": lambda k: 31 if k >= 32 else None,
    "wave_shl:1": lambda k: k + 1 if k < 63 else None,
    "wave_shr:1": lambda k: k - 1 if k else None,
}


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("masks", [(0xF, 0xF), (0xA, 0xF), (0xF, 0x5)])
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp(control, masks, bound):
    """A lane whose source does not exist, or is off, keeps its old value, or with bound_ctrl takes 0."""
    off = np.zeros((WAVES, 64), bool)
    off[:, [5, 20, 31, 47]] = True
    rows, banks = masks
    line = f"v_add_u32_dpp v4, v1, v2 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{bound}"
    got = run(line, {1: A, 2: B, 4: C}, off=off).V[4]
    for w in range(WAVES):
        for k in range(64):
            source = DPP[control](k)
            missing = source is None or off[w, source]
            writes = not off[w, k] and rows >> k // 16 & 1 and banks >> k % 16 // 4 & 1 and (bound or not missing)
            moved = 0 if missing else int(A[w, source or 0])
            assert int(got[w, k]) == ((moved + int(B[w, k])) & ONES if writes else int(C[w, k])), (w, k)


SWIZZLES = {
    "SWAP,16": lambda k: k ^ 16,
    "REVERSE,8": lambda k: k // 8 * 8 + 7 - k % 8,
    "BROADCAST,8,3": lambda k: k // 8 * 8 + 3,
    "QUAD_PERM,2,0,3,1": lambda k: k // 4 * 4 + [2, 0, 3, 1][k % 4],
    # bit 4 cleared, bit 3 set, bit 2 kept, bit 1 inverted, bit 0 kept
    'BITMASK_PERM,"01pip"': lambda k: k // 32 * 32 + ((k % 32 & 0b00111 | 0b01000) ^ 0b00010),
}


@pytest.mark.parametrize("control", SWIZZLES)
def test_swizzle(control):
    covers(["ds_swizzle_b32"])
    source = SWIZZLES[control]
    off = np.zeros((WAVES, 64), bool)
    off[:, 9] = True
    group = run(f"ds_swizzle_b32 v4, v1 offset:swizzle({control})\ns_waitcnt lgkmcnt(0)", {1: A, 4: C}, off=off)
    want = [[0 if source(k) == 9 else int(A[w, source(k)]) for k in range(64)] for w in range(WAVES)]
    assert np.where(off, 0, group.V[4]).tolist() == np.where(off, 0, np.array(want)).tolist()


def test_other_lanes():
    covers(
        [
            "ds_bpermute_b32",
            "v_readlane_b32",
            "v_writelane_b32",
            "v_readfirstlane_b32",
            "v_permlane16_swap_b32",
            "v_permlane32_swap_b32",
        ]
    )
    off = np.zeros((WAVES, 64), bool)
    off[:, :3] = True
    group = run("ds_bpermute_b32 v4, v1, v2\ns_waitcnt lgkmcnt(0)", {1: A, 2: B, 4: C}, off=off)
    for w in range(WAVES):
        for k in range(3, 64):
            source = int(A[w, k]) >> 2 & 63
            assert int(group.V[4][w, k]) == (0 if source < 3 else int(B[w, source]))
    group = run(
        "v_readfirstlane_b32 s8, v1\nv_readlane_b32 s9, v1, 17\nv_writelane_b32 v4, s9, 5", {1: A, 4: C}, off=off
    )
    assert group.S[8].tolist() == A[:, 3].tolist()
    assert group.S[9].tolist() == A[:, 17].tolist()
    assert [int(x) for x in group.V[4][:, 5]] == A[:, 17].tolist()
    assert (np.delete(group.V[4], 5, 1) == np.delete(C, 5, 1)).all()
    for width in (16, 32):
        group = run(f"v_permlane{width}_swap_b32 v1, v2", {1: A, 2: B}, arch="gfx950")
        for k in range(64):  # the upper lanes of each pair of rows of the first with the lower ones of the second
            upper = k // width % 2 == 1
            assert (group.V[1][:, k] == (B[:, k - width] if upper else A[:, k])).all()
            assert (group.V[2][:, k] == (B[:, k] if upper else A[:, k + width])).all()


def test_lanes_that_are_off_keep_their_registers():
    off = (A & 1) == 1
    got = run("v_add_u32_e32 v4, v1, v2", {1: A, 2: B, 4: C}, off=off).V[4]
    assert (got == np.where(off, C, A + B)).all()


# Matrices


def pack(values, kind):
    """Registers of [waves, 64, width] float32 values."""
    if kind in {"f32", "xf32"}:
        words = values.astype(np.float32).view(np.uint32)
    elif kind == "f16":
        words = np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
    else:
        brain = torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy()
        words = np.ascontiguousarray(brain).view(np.uint32)
    return [np.ascontiguousarray(words[..., k]) for k in range(words.shape[-1])]


@pytest.mark.parametrize("name", covers(sorted(each for each in MNEMONICS if re.match("v_(mf|wm)ma_", each))))
def test_matrix_products(name):
    """Small integers, so that every sum is exact; each element put into and taken out of its documented place."""
    which, side, _, k, kind = re.fullmatch(r"v_(\w+)_f32_(\d+)x(\d+)x(\d+)_(\w+)", name).groups()
    side, k = int(side), int(k)
    lanes, rows = (32, 8) if which == "wmma" else (64, 4)
    width = k * side // lanes
    gen = np.random.default_rng(3)
    a, b = gen.integers(-8, 9, (2, side, k)), gen.integers(-8, 9, (2, k, side))
    c = gen.integers(-8, 9, (2, side, side))
    a[1], c[1] = 0, 0
    a[1, 3, k - 2] = 1  # one element alone: row 3 of the result is row k - 2 of B
    registers = [np.zeros((2, lanes, width)), np.zeros((2, lanes, width))]
    for lane in range(lanes):
        for j in range(width):
            depth = lane // side * width + j
            registers[0][:, lane, j], registers[1][:, lane, j] = a[:, lane % side, depth], b[:, depth, lane % side]
    count = side * side // lanes
    places = {
        (r, lane): (lanes // side * rows * (r // rows) + rows * (lane // side) + r % rows, lane % side)
        for r in range(count)
        for lane in range(lanes)
    }
    assert len(set(places.values())) == side * side
    added = np.zeros((count, 2, lanes), np.float32)
    for (r, lane), (row, column) in places.items():
        added[r, :, lane] = c[:, row, column]
    left, right = pack(registers[0], kind), pack(registers[1], kind)
    n = len(left)
    values = {20 + j: each for j, each in enumerate(left)} | {30 + j: each for j, each in enumerate(right)}
    values |= {40 + r: added[r].view(np.uint32) for r in range(count)}
    target, first = ("a[0:{}]", 256) if lanes == 64 else ("v[0:{}]", 0)
    text = f"{name} {target.format(count - 1)}, v[20:{19 + n}], v[30:{29 + n}], v[40:{39 + count}]".replace(":20]", "]")
    text = text if n > 1 else text.replace("v[20:20]", "v20").replace("v[20]", "v20").replace("v[30:30]", "v30")
    arch = "gfx1201" if lanes == 32 else "gfx950" if "x32_" in name or "32x32x16" in name else "gfx942"
    group = run(text, values, arch=arch)
    want = a @ b + c
    assert (want[1, 3] == b[1, k - 2]).all()
    for (r, lane), (row, column) in places.items():
        assert group.V[first + r].view(np.float32)[:, lane].tolist() == want[:, row, column].tolist()


def test_xf32_keeps_ten_bits_of_mantissa():
    ones = np.full((1, 64), bits32(1.0), np.uint32)
    for value, kept in ((1 + 2**-10, 1 + 2**-10), (1 + 2**-12, 1.0), (1 + 3 * 2**-11, 1 + 2**-9), (1 + 2**-11, 1.0)):
        x = np.full((1, 64), bits32(value), np.uint32)
        group = run("v_mfma_f32_16x16x8_xf32 v[8:11], v[2:3], v[4:5], 0", {2: x, 3: x, 4: ones, 5: ones})
        assert group.V[8].view(np.float32).tolist() == [[8 * kept] * 64]


def test_one_rounding_of_a_sum_in_a_matrix_product():
    x = np.full((1, 64), bits32(1 + 2**-23), np.uint32)
    group = run("v_mfma_f32_16x16x4_f32 v[8:11], v2, v3, 1.0", {2: x, 3: x})
    assert group.V[8].tolist() == [[rounded(4 * Fraction(1 + 2**-23) ** 2 + 1)] * 64]


# Memory

PLACE = np.stack([np.random.default_rng(w).permutation(64) for w in range(WAVES)]).astype(np.uint32)
LDS = {  # bytes of each of its parts, step between them
    "ds_{}_b32": [4],
    "ds_{}_b64": [8],
    "ds_{}_b96": [12],
    "ds_{}_b128": [16],
    "ds_{}2_b32": [4, 4],
    "ds_{}2_b64": [8, 8],
    "ds_{}2st64_b32": [4, 4],
    "ds_{}2st64_b64": [8, 8],
}


@pytest.mark.parametrize("form", LDS)
def test_lds_words(form):
    """Each lane writes its own words and reads another's; the bytes lie where the offsets say."""
    parts, size = LDS[form], LDS[form][0]
    read, write = covers([form.format("read"), form.format("write")])
    registers = sum(parts) // 4
    scale = size * (64 if "st64" in form else 1)
    offsets = "offset0:1 offset1:3" if len(parts) == 2 else f"offset:{size}"
    steps = [scale, 3 * scale] if len(parts) == 2 else [size]
    pitch = 4 * size if "st64" not in form else size
    sources = ", ".join(
        f"v[{10 + k * size // 4}:{9 + (k + 1) * size // 4}]" if size > 4 else f"v{10 + k}" for k in range(len(parts))
    )
    target = f"v[30:{29 + registers}]" if registers > 1 else "v30"
    words = {10 + k: data(20 + k) for k in range(registers)}
    at = np.broadcast_to(np.arange(64, dtype=np.uint32) * pitch, A.shape)
    group = run(
        f"{write} v1, {sources} {offsets}\ns_waitcnt lgkmcnt(0)\n{read} {target}, v2 {offsets}\ns_waitcnt lgkmcnt(0)",
        {1: at, 2: PLACE * np.uint32(pitch)} | words,
        lds_bytes=65536,
    )
    memory = group.machine.lds.bytes.reshape(WAVES, -1)
    for w in range(WAVES):
        for lane in range(64):
            for k, step in enumerate(steps):
                stored = memory[w, lane * pitch + step :][:size].view(np.uint32).tolist()
                assert stored == [int(words[10 + k * size // 4 + j][w, lane]) for j in range(size // 4)]
                other = int(PLACE[w, lane])
                got = [int(group.V[30 + k * size // 4 + j][w, lane]) for j in range(size // 4)]
                assert got == [int(words[10 + k * size // 4 + j][w, other]) for j in range(size // 4)]


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("ds_read_u8", lambda x, old: x & 255),
        ("ds_read_i8", lambda x, old: signed(x, 8)),
        ("ds_read_u16", lambda x, old: x & 0xFFFF),
        ("ds_read_i16", lambda x, old: signed(x, 16)),
        ("ds_read_u8_d16", lambda x, old: old & 0xFFFF0000 | x & 255),
        ("ds_read_u8_d16_hi", lambda x, old: old & 0xFFFF | (x & 255) << 16),
        ("ds_read_u16_d16", lambda x, old: old & 0xFFFF0000 | x & 0xFFFF),
        ("ds_read_u16_d16_hi", lambda x, old: old & 0xFFFF | (x & 0xFFFF) << 16),
    ],
)
def test_lds_parts_read(name, oracle):
    covers([name])
    at = np.broadcast_to(np.arange(64, dtype=np.uint32) * 8, A.shape)
    group = run(
        f"ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\n{name} v4, v1 offset:2\ns_waitcnt lgkmcnt(0)", {1: at, 2: B, 4: C}
    )
    want = [oracle(b >> 16, c) & ONES for b, c in zip(LISTS[1], LISTS[2], strict=True)]
    assert group.V[4].ravel().tolist() == want


@pytest.mark.parametrize(
    ("name", "size", "shift"),
    [("ds_write_b8", 1, 0), ("ds_write_b8_d16_hi", 1, 16), ("ds_write_b16", 2, 0), ("ds_write_b16_d16_hi", 2, 16)],
)
def test_lds_parts_written(name, size, shift):
    covers([name])
    at = np.broadcast_to(np.arange(64, dtype=np.uint32) * 8, A.shape)
    memory = run(
        f"ds_write_b32 v1, v3\n{name} v1, v2 offset:2\ns_waitcnt lgkmcnt(0)", {1: at, 2: B, 3: C}
    ).machine.lds.bytes
    words = memory.reshape(WAVES, -1)[:, :512].copy().view(np.uint32)[:, ::2].ravel().tolist()
    mask = (1 << 8 * size) - 1 << 16
    assert words == [c & ~mask | (b >> shift) << 16 & mask for b, c in zip(LISTS[1], LISTS[2], strict=True)]


@pytest.mark.parametrize("suffix", ["", "x4"])
def test_loads_into_lds_lie_side_by_side(suffix):
    """From M0 and the offset on, whatever the lanes read."""
    [name] = covers([f"global_load_lds_dword{suffix}"])
    count, at = (4 if suffix else 1), PLACE[:1] * np.uint32(16)
    for load in (f"{name} v1, s[4:5]", f"buffer_load_dword{suffix} v1, s[8:11], 0 offen lds"):
        lines = f"s_mov_b32 m0, 0x100\n{load} offset:32\ns_waitcnt vmcnt(0)"
        group, words = in_memory(lines, {1: at})
        stored = group.machine.lds.bytes[0x120:][: 256 * count].view(np.uint32).reshape(64, count).tolist()
        assert stored == [words[8 + 4 * int(k) :][:count].tolist() for k in PLACE[0]], load


@pytest.mark.parametrize("bits", [8, 16])
def test_transposed_read(bits):
    """16 lanes hold 4 rows of 16 halves, or 8 of 16 bytes, 8 bytes a lane; afterwards lane k of them holds column k."""
    rows, mask = 64 // bits, (1 << bits) - 1
    at = np.broadcast_to(np.arange(64, dtype=np.uint32) * 8, A.shape)
    lines = f"ds_write_b64 v1, v[2:3]\ns_waitcnt lgkmcnt(0)\nds_read_b64_tr_b{bits} v[4:5], v1\ns_waitcnt lgkmcnt(0)"
    group = run(lines, {1: at, 2: A, 3: B}, arch="gfx950")
    for w in range(WAVES):
        for group_of in range(4):
            stored = [
                (int(A[w, lane]) | int(B[w, lane]) << 32) >> bits * j & mask
                for lane in range(16 * group_of, 16 * group_of + 16)
                for j in range(rows)
            ]
            for k in range(16):
                lane = 16 * group_of + k
                got = int(group.V[4][w, lane]) | int(group.V[5][w, lane]) << 32
                assert [got >> bits * row & mask for row in range(rows)] == [
                    stored[16 * row + k] for row in range(rows)
                ]


covers(["ds_read_b64_tr_b8", "ds_read_b64_tr_b16"])


GLOBAL = {
    "load_ubyte": lambda x, old: x & 255,
    "load_sbyte": lambda x, old: signed(x, 8),
    "load_ushort": lambda x, old: x & 0xFFFF,
    "load_sshort": lambda x, old: signed(x, 16),
    "load_short_d16": lambda x, old: old & 0xFFFF0000 | x & 0xFFFF,
    "load_short_d16_hi": lambda x, old: old & 0xFFFF | (x & 0xFFFF) << 16,
}


WORDS = np.arange(1024, dtype=np.uint32) * np.uint32(0x01030507) + np.uint32(0x80)


def in_memory(lines, values, arch="gfx942"):
    """Run with a copy of WORDS, whose address is in s[4:5] and whose descriptor in s[8:11]; return it as well."""
    memory, words = Memory(), WORDS.copy()
    base = memory.add("words", words.view(np.uint8))
    low, high, flags = base & ONES, base >> 32, 0x31027000 if arch == GFX12 else 0x27000
    registers = {4: low, 5: high, 8: low, 9: high, 10: 0x7FFFFFFE, 11: flags, 12: 64}
    return run(lines, values, registers, arch=arch, memory=memory), words


@pytest.mark.parametrize("name", GLOBAL)
def test_global_parts(name):
    covers([f"global_{name}"])
    at = np.broadcast_to(np.arange(64, dtype=np.uint32) * 4, (1, 64))
    old = C[:1]
    lines = [f"global_{name} v4, v1, s[4:5] offset:2"]
    if "ubyte" in name or "ushort" in name:
        covers([f"buffer_{name}"])
        lines.append(f"buffer_{name} v4, v1, s[8:11], 0 offen offset:2")
    for line in lines:
        group, words = in_memory(f"{line}\ns_waitcnt vmcnt(0)", {1: at, 4: old})
        want = [GLOBAL[name](int(x) >> 16, int(c)) & ONES for x, c in zip(words[:64], old[0], strict=True)]
        assert group.V[4][0].tolist() == want, line


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_global_words(count):
    suffix = f"x{count}" if count > 1 else ""
    covers([f"{kind}_{verb}_dword{suffix}" for kind in ("global", "buffer") for verb in ("load", "store")])
    registers = f"v[20:{19 + count}]" if count > 1 else "v20"
    at = (np.arange(64, dtype=np.uint32) * 16)[None]
    for address in ("v1, s[4:5] offset:1024", "v[2:3], off offset:1024", "v1, s[8:11], s12 offen offset:960"):
        kind = "buffer" if "offen" in address else "global"
        base = np.uint64(1 << 40) + at.astype(np.uint64)
        values = {1: at, 2: (base & np.uint64(ONES)).astype(np.uint32), 3: (base >> np.uint64(32)).astype(np.uint32)}
        group, words = in_memory(f"{kind}_load_dword{suffix} {registers}, {address}\ns_waitcnt vmcnt(0)", values)
        want = [[int(words[256 + 4 * lane + j]) for lane in range(64)] for j in range(count)]
        assert [group.V[20 + j][0].tolist() for j in range(count)] == want, address
        pieces = address.split(", ", 1)
        order = f"{registers}, {address}" if kind == "buffer" else f"{pieces[0]}, {registers}, {pieces[1]}"
        stored = {20 + j: data(50 + j)[:1] for j in range(count)}
        group, words = in_memory(f"{kind}_store_dword{suffix} {order}", values | stored)
        for lane in range(64):
            got = words[256 + 4 * lane : 256 + 4 * lane + count].tolist()
            assert got == [int(stored[20 + j][0, lane]) for j in range(count)], address


@pytest.mark.parametrize(
    ("name", "size", "shift"), [("byte", 1, 0), ("byte_d16_hi", 1, 16), ("short", 2, 0), ("short_d16_hi", 2, 16)]
)
def test_global_parts_stored(name, size, shift):
    at = (np.arange(64, dtype=np.uint32) * 4)[None]
    lines = [f"global_store_{name} v1, v2, s[4:5] offset:2"]
    covers([f"global_store_{name}"])
    if not shift:
        covers([f"buffer_store_{name}"])
        lines.append(f"buffer_store_{name} v2, v1, s[8:11], 0 offen offset:2")
    mask = (1 << 8 * size) - 1 << 16
    before = (np.arange(1024, dtype=np.uint32) * np.uint32(0x01030507) + np.uint32(0x80)).tolist()
    for line in lines:
        _, words = in_memory(line, {1: at, 2: B[:1]})
        want = [x & ~mask | (int(b) >> shift) << 16 & mask for x, b in zip(before[:64], B[0], strict=True)]
        assert words[:64].tolist() == want, line


@pytest.mark.parametrize("count", [1, 2, 4])
def test_scratch_belongs_to_a_lane(count):
    suffix = f"x{count}" if count > 1 else ""
    store, load = covers([f"scratch_store_dword{suffix}", f"scratch_load_dword{suffix}"])
    source, target = (f"v[{k}:{k + count - 1}]" if count > 1 else f"v{k}" for k in (20, 30))
    values = {20 + j: data(60 + j) for j in range(count)}
    group = run(
        f"{store} off, {source}, off offset:16\n{load} {target}, off, off offset:16\ns_waitcnt vmcnt(0)", values
    )
    assert all((group.V[30 + j] == values[20 + j]).all() for j in range(count))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count):
    [name] = covers([f"s_load_dword{f'x{count}' if count > 1 else ''}"])
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    group, words = in_memory(f"{name} {target}, s[4:5], 0x1c\ns_waitcnt lgkmcnt(0)", {1: A[:1]})
    assert [int(group.S[16 + k][0]) for k in range(count)] == words[7 : 7 + count].tolist()


# Atomics


def of_torch(dtype):
    """Sum of two halves of each of two words, as torch rounds it."""

    def add(old, new):
        a, b = (torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(dtype) for word in (old, new))
        low, high = (a.float() + b.float()).to(dtype).view(torch.uint16).tolist()
        return low | high << 16

    return add


CHANGES = {
    "add": lambda old, new: old + new,
    "umax": max,
    "smin": lambda old, new: min(signed(old), signed(new)),
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "pk_add_bf16": of_torch(torch.bfloat16),
}
"""Some atomics, and the one that AMD's text is not evaluated for."""


def same_bfloat16(got, want):
    """Equal halves; any NaN for a NaN."""
    pairs = [((got >> at) & 0xFFFF, (want >> at) & 0xFFFF) for at in (0, 16)]
    return all(p == q or min(p & 0x7FFF, q & 0x7FFF) > 0x7F80 for p, q in pairs)


FORMS = {  # text of an instruction with its data in v20 and what it returns in v20 too, or in v30
    "global_atomic_{} v1, {}, s[4:5] offset:1024": None,
    "global_atomic_{} v30, v1, {}, s[4:5] offset:1024 sc0": 30,
    "global_atomic_{} v30, v[2:3], {}, off offset:1024 sc0": 30,
    "buffer_atomic_{} {}, v1, s[8:11], s12 offen offset:960": None,
    "buffer_atomic_{} {}, v1, s[8:11], s12 offen offset:960 sc0": 20,
}


def atomic(form, name, data_registers, places, values):
    """(words before, words after, what came back) of an atomic at 1024 + places."""
    at = np.asarray(places, np.uint32)[None]
    base = np.uint64(1 << 40) + at.astype(np.uint64)
    values |= {1: at, 2: (base & np.uint64(ONES)).astype(np.uint32), 3: (base >> np.uint64(32)).astype(np.uint32)}
    before = in_memory("s_nop 0", {1: at})[1][256:]
    group, words = in_memory(f"{form.format(name, data_registers)}\ns_waitcnt vmcnt(0)", values)
    back = FORMS[form]
    return before.tolist(), words[256:].tolist(), None if back is None else group.V[back][0].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHANGES)
def test_atomics_of_a_word_for_each_lane(name, form):
    """In every form; `test_an_atomic_is_its_text` has what each of the others computes."""
    covers([f"{form.partition('_')[0]}_atomic_{each}" for each in ATOMICS])
    new, places = data(70)[:1], 4 * PLACE[0]
    before, after, returned = atomic(form, name, "v20", places, {20: new})
    old = [before[k] for k in PLACE[0]]
    same = same_bfloat16 if name == "pk_add_bf16" else None
    check([after[k] for k in PLACE[0]], list(map(CHANGES[name], old, new[0].tolist())), name, same)
    assert after[64:] == before[64:]
    assert returned in (None, old)


@pytest.mark.parametrize("form", FORMS)
def test_compare_and_swap(form):
    before = in_memory("s_nop 0", {1: A[:1]})[1][256:320]
    wanted = before + np.uint32(1) * (np.arange(64, dtype=np.uint32) % 3 == 1)
    new = data(70)[0]
    old, after, returned = atomic(
        form, "cmpswap", "v[20:21]", 4 * np.arange(64), {20: new[None], 21: wanted.astype(np.uint32)[None]}
    )
    assert after[:64] == [int(old[k] if k % 3 == 1 else new[k]) for k in range(64)]
    assert returned in (None, old[:64])


@pytest.mark.parametrize(
    ("name", "of_all"),
    [
        ("add", lambda old, new: old + sum(new)),
        ("umax", lambda old, new: max(old, *new)),
        ("smin", lambda old, new: min(map(signed, (old, *new)))),
        ("or", lambda old, new: functools.reduce(operator.or_, new, old)),
        ("xor", lambda old, new: functools.reduce(operator.xor, new, old)),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_atomics_of_all_lanes_on_three_words(name, of_all, form):
    """What comes back are the values of one order of them."""
    places, new = np.arange(64) % 3 * 4, data(71)[:1]
    before, after, returned = atomic(form, name, "v20", places, {20: new})
    for word in range(3):
        mine = [int(each) for each in new[0, word::3]]
        assert after[word] == of_all(before[word], mine) & ONES
        if returned:
            steps = [CHANGES[name](old, one) & ONES for old, one in zip(returned[word::3], mine, strict=True)]
            assert sorted([before[word], *steps]) == sorted([after[word], *returned[word::3]])


def test_lanes_of_all_waves_take_numbers():
    memory, words = Memory(), np.zeros(4, np.uint32)
    base = memory.add("words", words.view(np.uint8))
    zero, one = np.zeros((5, 64), np.uint32), np.ones((5, 64), np.uint32)
    group = run(
        "global_atomic_add v30, v1, v20, s[4:5] sc0\ns_waitcnt vmcnt(0)",
        {1: zero, 20: one},
        {4: base & ONES, 5: base >> 32},
        memory=memory,
        off=np.arange(64) % 2 == zero,
    )
    assert sorted(group.V[30][:, 1::2].ravel().tolist()) == list(range(160))
    assert words.tolist() == [160, 0, 0, 0]


def test_an_atomic_out_of_range_changes_nothing():
    at = (np.arange(64, dtype=np.uint32) * 4)[None]
    line = "s_mov_b32 s10, 128\nbuffer_atomic_add v20, v1, s[8:11], 0 offen sc0\ns_waitcnt vmcnt(0)"
    before = in_memory("s_nop 0", {1: at})[1]
    group, words = in_memory(line, {1: at, 20: at + np.uint32(7)})
    assert words[32:].tolist() == before[32:].tolist()
    assert words[:32].tolist() == (before[:32] + at[0, :32] + np.uint32(7)).tolist()
    assert group.V[20][0, 32:].tolist() == [0] * 32


# Control


@pytest.mark.parametrize(
    ("branch", "setup", "taken"),
    [
        ("scc0", "s_cmp_eq_u32 s2, 5", lambda x: x != 5),
        ("scc1", "s_cmp_eq_u32 s2, 5", lambda x: x == 5),
        ("vccz", "s_and_b64 vcc, s[2:3], 1", lambda x: x & 1 == 0),
        ("vccnz", "s_and_b64 vcc, s[2:3], 1", lambda x: x & 1 == 1),
        ("execz", "s_and_b64 exec, s[2:3], 1", lambda x: x & 1 == 0),
        ("execnz", "s_and_b64 exec, s[2:3], 1", lambda x: x & 1 == 1),
    ],
)
def test_branches(branch, setup, taken):

    from amdgcn.memory import Memory

    covers([f"s_cbranch_{branch}", "s_branch", "s_endpgm", "s_nop", "s_waitcnt", "s_barrier", "s_setprio", "s_sleep"])
    covers(["buffer_wbl2", "buffer_inv", "v_nop"])
    out = np.zeros(32, np.uint8)
    memory = Memory()
    pointer = memory.add("out", out)
    kernarg = memory.add("kernel arguments", np.array([pointer], np.uint64).view(np.uint8))
    text = f"""
        s_load_dwordx2 s[6:7], s[0:1], 0x0
        s_mov_b32 s3, 0
        s_waitcnt lgkmcnt(0)
        {setup}
        s_cbranch_{branch} .LBB0_1
        s_mov_b32 s8, 3
        s_branch .LBB0_2
        .LBB0_1:
        s_mov_b32 s8, 7
        .LBB0_2:
        s_nop 3
        v_nop
        s_setprio 1
        s_sleep 1
        buffer_wbl2 sc1
        buffer_inv sc1
        s_barrier
        s_mov_b64 exec, -1
        s_lshl_b32 s9, s2, 2
        v_mov_b32_e32 v1, s9
        v_mov_b32_e32 v2, s8
        global_store_dword v1, v2, s[6:7]
        """
    machine(text, memory=memory, lds_bytes=0).run((8, 1, 1), 1, kernarg)
    assert out.view(np.uint32).tolist() == [7 if taken(x) else 3 for x in range(8)]


# gfx12: its own instructions, and the older ones under their new names. AMD's text has the others (test_pseudocode.py).

GFX12 = "gfx1201"
NARROW = {k + 1: each.reshape(-1, 32) for k, each in enumerate((A, B, C))}
ODD = np.arange(32) % 2 == 1


def on_gfx12(lines, values=None, scalars=None, **options):
    return run(lines, values or NARROW, scalars, arch=GFX12, **options)


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        ("v_dual_mov_b32 v1, v2 :: v_dual_mov_b32 v2, v1", lambda a, b, c: b, lambda a, b, c: a),
        ("v_dual_add_nc_u32 v1, v2, v3 :: v_dual_and_b32 v2, v1, v3", lambda a, b, c: b + c, lambda a, b, c: a & c),
        ("v_dual_mov_b32 v1, v3 :: v_dual_lshlrev_b32 v2, 4, v1", lambda a, b, c: c, lambda a, b, c: a << 4),
        ("v_dual_and_b32 v1, v1, v2 :: v_dual_mov_b32 v2, 7", lambda a, b, c: a & b, lambda a, b, c: b * 0 + 7),
        (
            "v_dual_cndmask_b32 v1, v2, v3 :: v_dual_mov_b32 v2, v1",
            lambda a, b, c: np.where(ODD, c, b),
            lambda a, b, c: a,
        ),
    ],
)
def test_two_instructions_of_a_line_read_before_they_write(line, first, second):
    off = np.arange(256).reshape(-1, 32) % 5 == 0
    group = on_gfx12(f"s_mov_b32 vcc_lo, 0xaaaaaaaa\n{line}", off=off)
    for register, oracle in ((1, first), (2, second)):
        want = np.where(off, NARROW[register], oracle(*NARROW.values()))
        assert (group.V[register] == want).all(), register


def test_comparisons_into_exec():
    off = np.arange(256).reshape(-1, 32) % 7 == 0
    group = on_gfx12("v_cmpx_gt_u32_e64 v1, v2\nv_mov_b32_e32 v3, 7", off=off)
    assert (group.V[3] == np.where((NARROW[1] > NARROW[2]) & ~off, 7, NARROW[3])).all()


@pytest.mark.parametrize("name", ["and", "or", "andn2"])
def test_saveexec_of_32_lanes(name):
    covers([f"s_{name}_saveexec_b32"])
    off = (NARROW[1] & 4) != 0
    source = SA[:8]
    group = on_gfx12(f"s_{name.replace('andn2', 'and_not1')}_saveexec_b32 s10, s2", NARROW, {2: source}, off=off)
    old = [sum(1 << lane for lane in range(32) if not off[w, lane]) for w in range(8)]
    new = [{"and": s & e, "or": s | e, "andn2": s & ~e & ONES}[name] for s, e in zip(source.tolist(), old, strict=True)]
    assert [group.S[k].tolist() for k in (10, 126)] == [old, new]
    assert group.scc.tolist() == [each != 0 for each in new]


def test_a_mask_of_32_lanes_is_one_register():
    group = on_gfx12(
        "s_mov_b32 vcc_hi, 5\nv_cmp_gt_u32_e32 vcc_lo, v1, v2\ns_mov_b32 s3, ttmp9\ns_add_co_i32 s4, m0, null"
    )
    want = [sum(1 << k for k in range(32) if a[k] > b[k]) for a, b in zip(NARROW[1], NARROW[2], strict=True)]
    assert group.S[106].tolist() == want
    assert group.S[107].tolist() == [5] * 8
    assert group.S[3].tolist() == list(range(8)), "the workgroup's number"
    assert (group.S[4] == group.S[125]).all()


def test_a_branch_asks_for_one_register():
    memory, out = Memory(), np.zeros(4, np.uint32)
    base = memory.add("out", out.view(np.uint8))
    lines = f"""
        s_mov_b32 vcc_hi, 1
        s_and_b32 vcc_lo, ttmp9, 1
        s_mov_b32 s4, 0
        s_mov_b32 s5, {base >> 32}
        s_mov_b32 s3, 3
        s_cbranch_vccz .LBB0_1
        s_mov_b32 s3, 7
        .LBB0_1:
        s_lshl_b32 s6, ttmp9, 2
        v_mov_b32_e32 v1, s6
        v_mov_b32_e32 v2, s3
        global_store_b32 v1, v2, s[4:5]
        s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)
        """
    machine(lines, arch=GFX12, memory=memory, lds_bytes=0).run((4, 1, 1), 1, base)
    assert out.tolist() == [3, 7, 3, 7]


def test_the_other_row():
    covers(["v_permlanex16_b32"])
    off = np.arange(256).reshape(-1, 32) % 6 == 0
    group = on_gfx12("v_permlanex16_b32 v2, v1, s2, 0x76543210 op_sel:[1,0]", NARROW, {2: SA[:8]}, off=off)
    for wave, a in enumerate(NARROW[1]):
        select = int(SA[wave]) | 0x76543210 << 32
        moved = [int(a[(1 - lane // 16) * 16 + (select >> lane % 16 * 4 & 15)]) for lane in range(32)]
        assert group.V[2][wave].tolist() == np.where(off[wave], NARROW[2][wave], moved).tolist()


def test_lanes_of_32_lanes():
    lane, moved = np.arange(32), {4: np.broadcast_to(np.arange(32, dtype=np.uint32) * 12, (8, 32))}
    dpp = "v_mov_b32_dpp v5, v1 row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    lines = (
        f"ds_bpermute_b32 v6, v4, v1\n{dpp}\nv_readlane_b32 s3, v1, 31\nv_mbcnt_lo_u32_b32 v7, -1, 0\ns_wait_dscnt 0x0"
    )
    group = on_gfx12(lines, NARROW | moved)
    assert (group.V[6] == NARROW[1][:, lane * 3 % 32]).all()
    assert (group.V[5] == np.where(lane % 16 >= 3, NARROW[1][:, lane - 3], 0)).all()
    assert (group.S[3] == NARROW[1][:, 31]).all()
    assert (group.V[7] == lane).all()


LOADS = {
    # Load -> its bytes, and the register that it makes of them and of the old content.
    "u8": (1, lambda x, old: x & 0xFF),
    "i8": (1, lambda x, old: signed(x, 8)),
    "u16": (2, lambda x, old: x & 0xFFFF),
    "i16": (2, lambda x, old: signed(x, 16)),
    "d16_b16": (2, lambda x, old: x & 0xFFFF | old & 0xFFFF0000),
    "d16_hi_b16": (2, lambda x, old: (x & 0xFFFF) << 16 | old & 0xFFFF),
    **{f"b{8 * size}": (size, lambda x, old: x) for size in (4, 8, 12, 16)},
}


def of_registers(count, first=20):
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


@pytest.mark.parametrize("name", LOADS)
def test_loads_under_their_new_names(name):
    size, oracle = LOADS[name]
    count, at, old = max(1, size // 4), (np.arange(32, dtype=np.uint32) * 16)[None], NARROW[3][:1]
    target = of_registers(count)
    lines = [f"global_load_{name} {target}, v1, s[4:5] offset:32\ns_wait_loadcnt 0x0"]
    lines += [f"buffer_load_{name} {target}, v1, s[8:11], null offen offset:32\ns_wait_loadcnt 0x0"]
    lines = lines[:1] if "d16" in name or name in {"i8", "i16"} else lines
    for each in lines:
        group, words = in_memory(each, {1: at} | dict.fromkeys(range(20, 24), old), GFX12)
        for j in range(count):
            want = [oracle(int(words[8 + 4 * lane + j]), int(old[0, lane])) & ONES for lane in range(32)]
            assert group.V[20 + j][0].tolist() == want, each
    if size in {1, 2, 4, 8, 12} and "d16" not in name:
        known = {"b96": "dwordx3", "u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort"}.get(name)
        covers([f"s_load_{known}"] if known else [])
        scalars = f"s[20:{19 + count}]" if count > 1 else "s20"
        for line in (
            f"s_load_{name} {scalars}, s[4:5], 0x20",
            f"s_mov_b32 s3, 28\ns_load_{name} {scalars}, s[4:5], s3 offset:0x4",
        ):
            group, words = in_memory(f"{line}\ns_wait_kmcnt 0x0", {1: at}, GFX12)
            assert [int(group.S[20 + j][0]) for j in range(count)] == [
                oracle(int(words[8 + j]), 0) & ONES for j in range(count)
            ]


@pytest.mark.parametrize(
    ("name", "size"), [("b8", 1), ("b16", 2), ("d16_hi_b16", 2), ("b32", 4), ("b64", 8), ("b128", 16)]
)
def test_stores_under_their_new_names(name, size):
    count, at = max(1, size // 4), (np.arange(32, dtype=np.uint32) * 16)[None]
    values = {1: at} | {20 + j: NARROW[1][j : j + 1] for j in range(count)}
    source, shift, mask = of_registers(count), 16 if "hi" in name else 0, (1 << 8 * min(size, 4)) - 1
    lines = [f"global_store_{name} v1, {source}, s[4:5]"]
    lines += [] if "hi" in name else [f"buffer_store_{name} {source}, v1, s[8:11], null offen"]
    for line in lines:
        _, words = in_memory(line, values, GFX12)
        for lane, j in itertools.product(range(32), range(count)):
            new = int(values[20 + j][0, lane]) >> shift & mask
            assert int(words[4 * lane + j]) == int(WORDS[4 * lane + j]) & ~mask | new, line
    if size >= 4 and size != 12:
        load = f"scratch_load_{name} {of_registers(count, 30)}, off, off offset:8"
        group = on_gfx12(f"scratch_store_{name} off, {source}, off offset:8\n{load}\ns_wait_loadcnt 0x0", values)
        assert all((group.V[30 + j] == values[20 + j]).all() for j in range(count))


@pytest.mark.parametrize(
    "form", ["b8", "b16", "b16_d16_hi", "b32", "b64", "b128", "2addr_b32", "2addr_b64", "2addr_stride64_b32"]
)
def test_lds_under_its_new_names(form):
    size = int(re.findall(r"b(\d+)", form)[0]) // 8
    count, two = max(1, size // 4), "2addr" in form
    at = (np.arange(32, dtype=np.uint32) * 16)[None]
    values = {1: at} | {20 + j: NARROW[1][j : j + 1] for j in range(8)}
    back = {1: "u8", 2: "u16"}.get(size, form)
    gap = (512 // size if "64" not in form.partition("b")[0] else 2) if two else 0  # 512 bytes on
    offset = f" offset1:{gap}" if two else ""
    stored = f"{of_registers(count)}, {of_registers(count, 20 + count)}" if two else of_registers(count)
    load = f"ds_load_{back} {of_registers(count * (1 + two), 40)}, v1{offset}"
    group = on_gfx12(f"ds_store_{form} v1, {stored}{offset}\ns_wait_dscnt 0x0\n{load}\ns_wait_dscnt 0x0", values)
    for j in range(count * (1 + two)):
        want = values[20 + j] >> (16 if "hi" in form else 0) & ((1 << 8 * min(size, 4)) - 1)
        assert (group.V[40 + j] == want).all(), (form, j)


@pytest.mark.parametrize(
    ("lines", "arrived"),
    [
        ("global_load_b32 v2, v1, s[4:5]\ns_wait_loadcnt 0x0", True),
        ("global_load_b32 v2, v1, s[4:5]\ns_wait_storecnt 0x0\ns_wait_dscnt 0x0\ns_wait_kmcnt 0x0", False),
        ("global_load_b32 v2, v1, s[4:5]\nglobal_store_b32 v1, v1, s[4:5]\ns_wait_loadcnt 0x1", False),
        ("global_load_b32 v2, v1, s[4:5]\nglobal_inv scope:SCOPE_SE\ns_wait_loadcnt 0x1", True),
        ("global_load_b32 v2, v1, s[4:5]\nds_store_b32 v1, v1\ns_wait_loadcnt_dscnt 0x3f", True),
        ("ds_load_b32 v2, v1\ns_wait_loadcnt_dscnt 0x3f00", True),
        ("ds_load_b32 v2, v1\ns_wait_loadcnt_dscnt 0x3f", False),
        ("ds_load_b32 v2, v1\ns_wait_storecnt_dscnt 0x0", True),
        ("s_load_b32 s2, s[4:5], 0x0\ns_wait_dscnt 0x0\ns_wait_kmcnt 0x1", False),
        ("s_load_b32 s2, s[4:5], 0x0\ns_wait_kmcnt 0x0", True),
    ],
)
def test_each_counter_waits_for_its_own(lines, arrived):
    """Before the wait there is junk, and the static check says so."""
    covers(["global_inv"])
    use = "v_mov_b32_e32 v3, s2" if lines.startswith("s_load") else "v_mov_b32_e32 v3, v2"
    text = f"ds_store_b32 v1, v1\ns_wait_dscnt 0x0\n{lines}\n{use}"
    assert (check_waits(program(text, GFX12)) == []) == arrived
    group, _ = in_memory(text, {1: np.zeros((1, 32), np.uint32)}, GFX12)
    assert (group.V[3] != group.junk).all() == arrived


REFUSED = {
    "gfx942": {
        # What once was read by no code here: each would change the result.
        "v_pk_mul_f32 v[4:5], v[6:7], v[8:9] clamp": "",
        "v_add_co_u32_e64 v4, s[2:3], v1, v2 clamp": "",
        "v_mad_u64_u32 v[4:5], s[2:3], v1, v2, v[8:9] clamp": "",
        "v_cmp_lt_f32_e64 s[2:3], v1, v2 clamp": "",
        "v_add_u32_e32 v4, v1, v2 op_sel:[0,1,0]": "",
        "v_pk_mov_b32 v[4:5], v[6:7], v[8:9] neg_lo:[1,0]": "",
        "v_cvt_pk_f32_fp8_sdwa v[4:5], v1 src0_sel:BYTE_1": "",
        "v_cvt_pk_f32_fp8_sdwa v[4:5], v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1": "",
        "v_readfirstlane_b32 s2, s3": "",
        "v_writelane_b32 v4, s2, s3": "",
        "v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23] neg_lo:[1,0,0]": "",
        "v_readfirstlane_b32_dpp s2, v1 row_shr:1 row_mask:0xf bank_mask:0xf": "",
        "v_div_fmas_f32_sdwa v4, v1, v2, v3 src0_sel:WORD_1": "",
        "ds_read2_b32 v[4:5], v1 offset:8": "",
        "ds_write_b32 v1, v2 offset0:1": "",
        "s_add_u32 s2, s3, s4 clamp": "",
        "global_load_dword v4, v[6:7], off offen": "",
        "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1": "modifier",
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[4:11], v[6:13], 0": "no meaning is known",
        "v_mfma_f32_16x16x16_f16 v[0:3], v[4:7], v[6:7], v[0:3]": "K = 16",
        "s_load_dword s2, s[0:1], s3": "register offset",
        "v_readlane_b32 s2, v1, s3": "lane in a register",
        "v_add_u32_e64 v1, v2, v3 clamp": "clamp",
        "buffer_load_dword v1, v2, s[4:7], 0 idxen": "modifier",
        "buffer_load_ushort v5, s[24:27], 0 offen lds": "its place in LDS is not known",
        "v_mov_b32_dpp v1, v2 row_newbcast:3 row_mask:0xf bank_mask:0xf": "row_newbcast",
    },
    "gfx950": {"v_permlane32_swap_b32_e32 v4, v1 row_mask:0x3": ""},
    GFX12: {
        "s_barrier_signal -1\nds_store_b32 v1, v2\ns_barrier_wait -1": "stands between it and its wait",
        "s_barrier_signal -1\ns_branch .LBB0_1\n.LBB0_1:\ns_barrier_wait -1": "stands between it and its wait",
        "s_barrier_signal -1\n.LBB0_1:\ns_barrier_wait -1": "its wait is in another block",
        "s_sendmsg sendmsg(MSG_INTERRUPT)": "is not known",
        "v_permlanex16_b32 v1, v2, -1, -1": "op_sel",
        "v_dual_frobnicate_b32 v1, v2 :: v_dual_mov_b32 v2, v1": "no meaning is known|operands are not known",
    },
}
"""Arch -> text -> why it is refused; empty where the mnemonic says enough."""


@pytest.mark.parametrize(("arch", "lines"), [(arch, lines) for arch, texts in REFUSED.items() for lines in texts])
def test_a_form_that_is_not_known_is_refused_by_name(arch, lines):
    refused = (UnknownInstructionError, UnreadableTextError)
    with pytest.raises(refused, match=REFUSED[arch][lines] or None) as error:
        translate.translate(program(lines, arch))
    assert lines.split()[0].replace("dual_", "") in str(error.value).replace("dual_", "")


def test_hints_do_nothing_and_barriers_may_hold_own_work():
    covers(["s_barrier_signal", "s_delay_alu", "s_clause", "s_wait_alu", "s_sendmsg"])
    delay = "s_delay_alu instid0(VALU_DEP_1) | instskip(NEXT) | instid1(SALU_CYCLE_1)"
    spill = "scratch_store_b32 off, v1, off\nscratch_load_b32 v2, off, off\ns_wait_loadcnt 0x0"
    group = on_gfx12(f"s_clause 0x1\n{delay}\ns_wait_alu 0xfffe\ns_barrier_signal -1\n{spill}\ns_barrier_wait -1")
    assert (group.V[2] == NARROW[1]).all()


def test_another_arch_and_other_widths_of_a_wave_are_refused():
    with pytest.raises(UnreadableTextError, match="gfx942, gfx950, gfx1201"):
        parse('\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1100"\nkernel:\n\ts_endpgm\n')
    one = program("s_nop 0", GFX12)
    one.descriptor |= {"wavefront_size32": 0, "workgroup_processor_mode": 1}
    with pytest.raises(LaunchError, match="wavefront_size32"):
        Machine(translate.translate(one), Memory(), 0)


# Errors that were once made in writing the machine, made again: an oracle sees each


def ignore_signs_on_bits(monkeypatch):
    real = translate._Writer._read

    def read(self, operand, kind, *rest, **more):
        operand = dataclasses.replace(operand, absolute=False) if kind == "u" else operand
        return real(self, operand, kind, *rest, **more)

    monkeypatch.setattr(translate._Writer, "_read", read)


def forget_the_sign_of_a_constant(monkeypatch):
    real = dataclasses.replace

    def forget(each, **changes):
        changes |= {"constant": changes["constant"] & 0xFFFF} if "constant" in changes else {}
        return real(each, **changes)

    monkeypatch.setattr(translate, "replace", forget)


def undo_2_to_32(monkeypatch):
    def div_fmas(a, b, c, undo):
        total = arithmetic.fma(a, b, c)
        return np.where(undo, arithmetic.ldexp(total, np.where(arithmetic.exponent_bits(c) > 127, 32, -32)), total)

    monkeypatch.setitem(translate._NAMES, "div_fmas", div_fmas)


def forget_overflow(monkeypatch):
    monkeypatch.setitem(translate._NAMES, "div_fixup", lambda quotient, denominator, numerator: quotient)


def round_twice(monkeypatch):
    def fma(a, b, c):
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    monkeypatch.setitem(translate._NAMES, "fma", fma)


PLANTS = [
    (ignore_signs_on_bits, test_cndmask_takes_signs_as_floats_do),
    (forget_the_sign_of_a_constant, test_constants_have_a_sign),
    (undo_2_to_32, test_quotients_are_rounded_correctly),
    (forget_overflow, test_quotients_are_rounded_correctly),
    (round_twice, functools.partial(test_fma_with_a_constant, "v_fmaak_f32")),
]


@pytest.mark.parametrize(("plant", "oracle"), PLANTS, ids=[plant.__name__ for plant, _ in PLANTS])
def test_a_planted_error_is_seen(plant, oracle, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        oracle()


def test_every_instruction_has_an_oracle():
    """Last in the file: the tests above say what they cover; of the others AMD's text says what they compute."""
    compared = {*described().values(), *described("gfx1201").values()}
    assert sorted(MNEMONICS - COVERED - compared) == [], "write an oracle for these"
    assert sorted(COVERED - MNEMONICS) == [], "these have an oracle and are not known"
