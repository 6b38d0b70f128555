# SPDX-License-Identifier: Apache-2.0
"""Instructions against AMD's own pseudo-code, which nobody here has written (`support/pseudocode.py`).

`test_oracles.py` has those of which the text does not say enough.
"""

import re

import numpy as np
import pytest
from support import pseudocode
from support.wave import data, run

from amdgcn import translate
from amdgcn.meaning import ATOMICS, VECTOR
from amdgcn.memory import Memory
from amdgcn.targets import TARGETS

A, B, C = data(1), data(2), data(3)
GFX12 = "gfx1201"
TRANSCENDENTAL = {"v_exp_f32", "v_log_f32", "v_rcp_f32", "v_rcp_iflag_f32", "v_sqrt_f32", "v_rsq_f32"}
"""AMD's text is the function; the unit is good to one unit in the last place, and takes and gives no denormals."""


def denormal(x):
    return x & 0x7F800000 == 0 and x & 0x7FFFFF != 0


SAMPLES_LEFT_OUT = {
    # Mnemonic -> of which sources the text is not followed; each is a sentence of the executor's docstrings too.
    "v_div_fixup_f32": lambda s0: pseudocode.Float(s0, 32).is_nan,  # an iteration that overflowed: infinity, no NaN
    "v_rndne_f32": lambda s0: (s0 & 0x7FFFFFFF) >= 0x4B000000,  # adds 0.5, which is lost there
    **dict.fromkeys(TRANSCENDENTAL, denormal),
    **dict.fromkeys((f"v_s_{name.removeprefix('v_')}" for name in TRANSCENDENTAL), denormal),
}
UNSIGNED_ZERO = {"v_rndne_f32", "v_floor_f32", "v_trunc_f32"}
"""Their texts say nothing of the sign of a zero."""
COMPARED = [(name, arch) for arch in ("gfx942", GFX12) for name in sorted(pseudocode.described(arch))]


def sources_of(text):
    """Bits of S0, S1, .. that a text reads: 64 where it says so."""
    count = max((int(k) for k in re.findall(r"\bS(\d)\b", text)), default=-1) + 1
    wide = r"\bS{}(?:\.[uifb]64|\[63)"
    return [64 if re.search(wide.format(k), text) else 32 for k in range(count)]


def is_wide(text):
    return bool(re.search(r"\bD0?(?:\.[uifb]64(?!\[)|\[63| \})", text)) or "D0.u64 }" in text


def agrees(got, want, width, *, is_float, ulps):
    """Equal bits; of floats any NaN for a NaN."""
    if got == want or not is_float:
        return got == want
    form = pseudocode.Float(got, width), pseudocode.Float(want, width)
    if any(each.is_nan for each in form):
        return all(each.is_nan for each in form)
    return bool(ulps) and abs(got - want) <= ulps


def lists(*arrays):
    return [each.ravel().tolist() for each in arrays]


SCALAR = re.compile("s_|v_s_")
REGISTERS = (6, 8, 10)
VALUES = ((A, C), (B, A[::-1].copy()), (C, B[::-1].copy()))


def vector(name, arch):
    """(results, carries) of an instruction of lanes: low and high words, masks; and of its text."""
    text, lanes = pseudocode.texts(arch)[name], TARGETS[arch].lanes
    mask, carry = ("s2", "s4") if lanes == 32 else ("s[2:3]", "s[4:5]")
    order = np.arange(A.size).reshape(-1, lanes)
    widths, wide = sources_of(text), is_wide(text)
    constant = "SIMM32" in text
    carried = "VCC.u64[laneId]" in re.sub(r"VCC\.u64\[laneId\] =", "", text)
    masked = bool(re.search(r"VCC\.u64\[laneId\] =|D0\.u64\[laneId\] =|D1", text))
    operands = [f"v[{k}:{k + 1}]" if width == 64 else f"v{k}" for k, width in zip(REGISTERS, widths, strict=False)]
    if constant:
        operands.insert(1 if name == "v_fmamk_f32" else 2, "0x40490fdb")
    target = [mask] if "D0.u64[laneId]" in text else ["v[20:21]" if wide else "v20"]
    target += [mask] if masked and "D0.u64[laneId]" not in text else []
    operands += [carry] if carried else []
    plain = len(operands) + len(target) > 3 or "_pk_" in name or "pack" in name or wide or name.endswith("64")
    line = f"{name}{'' if plain else '_e64'} {', '.join([*target, *operands])}"
    equal = (order % 3 == 0) & ("D0.u64[laneId]" in text)  # random pairs never are
    whole = [[each.reshape(order.shape) for each in pair] for pair in VALUES]
    values = [[np.where(equal, whole[0][j], pair[j]) for j in (0, 1)] for pair in whole]
    registers = {k + j: values[n][j] for n, k in enumerate(REGISTERS) for j in (0, 1)}
    registers |= {20: np.full(order.shape, 0xDEADBEEF), 21: np.full(order.shape, 0xDEADBEEF)}
    arch_of = "gfx950" if "pk_bf16" in name or "pk_f16_f32" in name else arch
    group = run(line, registers, {4: whole[0][0][:, 0], 5: whole[0][1][:, 0]}, arch=arch_of)
    carry_in = group.mask(4).ravel().tolist()
    words = [lists(*pair) for pair in values]
    results = []
    for k in range(A.size):
        names = {
            f"S{n}": low[k] | high[k] << 32 if widths[n : n + 1] == [64] else low[k]
            for n, (low, high) in enumerate(words)
        }
        if "ThreadMask" in text:
            names["laneId"] = k % lanes
        names |= {"SIMM32": 0x40490FDB, "VCC": int(carry_in[k]), "D0": 0xDEADBEEF, "D1": 0}
        after = pseudocode.evaluate(name, arch, **names)
        results.append((names, after))
    return line, group, results, wide, masked


@pytest.mark.parametrize(("name", "arch"), [each for each in COMPARED if not SCALAR.match(each[0])])
def test_a_vector_instruction_is_its_text(name, arch):
    line, group, results, wide, masked = vector(name, arch)
    text = pseudocode.texts(arch)[name]
    compares = "D0.u64[laneId]" in text
    stored = re.findall(r"\bD0?\.([a-z]+)(\d+)", text)
    is_float, width = (stored[0][0] == "f", int(stored[0][1])) if stored else (False, 32)
    packed = re.match(r"v_pk_\w+_(f)(16|32)$|v_cvt_pk_(?:b?)(f)(16)_f32", name)
    assert group.V[20].dtype == group.V[21].dtype == np.uint32, line
    low, high = lists(group.V[20], group.V[21])
    mask = group.mask(2).ravel().tolist() if masked else []
    compared = 0
    for k, (names, after) in enumerate(results):
        shown = f"{line}, sample {k}: " + ", ".join(
            f"{key} {value:#x}" for key, value in names.items() if key[0] == "S"
        )
        if masked:
            bit = after["D0"] if compares else after["D1"] if "D1" in text else after["VCC"]
            assert mask[k] == bool(int(bit) & 1), shown
        if compares:
            continue
        got, want = low[k] | high[k] << 32 if wide else low[k], int(after["D0"])
        if name in SAMPLES_LEFT_OUT and (SAMPLES_LEFT_OUT[name](names["S0"]) or denormal(want)):
            continue
        compared += 1
        if name in UNSIGNED_ZERO and not (got | want) & 0x7FFFFFFF:
            continue
        if width == 16 and not (wide or packed):
            kept = name == "v_mad_u16" or arch == GFX12
            assert low[k] >> 16 == (0xDEAD if kept else 0), f"{shown}: the upper half"
        size = 64 if wide else width
        if packed:
            size = int(packed[2] or packed[4])
        same_type = bool(packed) or is_float
        for at in range(0, 64 if wide else 32 if packed else size, size):
            parts = got >> at & (1 << size) - 1, want >> at & (1 << size) - 1
            kind = "bf16" not in name
            ok = agrees(*parts, size, is_float=same_type and kind, ulps=name in TRANSCENDENTAL)
            if not kind and not ok:
                ok = all(part & 0x7FFF > 0x7F80 for part in parts)
            assert ok, f"{shown} gives {parts[0]:#x}, AMD's text {parts[1]:#x}"
    assert compares or compared > A.size // 2


LOW, HIGH, LOW1, HIGH1 = A.ravel(), C.ravel(), B.ravel(), A.ravel()[::-1]
SCC = np.arange(A.size) % 2 == 1


IN_LINE = re.compile("s_(cmpk|movk|addk|mulk)")
CASES = [
    (name, arch, k)
    for name, arch in COMPARED
    if SCALAR.match(name)
    for k in ((0x7, 0xFFE8, 0x8000) if IN_LINE.match(name) else (0,))
]


@pytest.mark.parametrize(("name", "arch", "constant"), CASES)
def test_a_scalar_instruction_is_its_text(name, arch, constant):
    text = pseudocode.texts(arch)[name]
    widths, wide = sources_of(text), is_wide(text) and name != "s_bcnt1_i32_b64"  # it compares 64 bits of 32
    in_line = IN_LINE.match(name)
    target = [] if re.match(r"s_(cmp|bitcmp)", name) else ["s[20:21]" if wide else "s20"]
    operands = [("s[2:3]", "s[4:5]")[k] if width == 64 else ("s2", "s4")[k] for k, width in enumerate(widths)]
    if in_line:
        operands = [hex(constant)] if target else ["s2", hex(constant)]
    line = f"{name} {', '.join([*target, *operands])}"
    registers = {2: LOW, 3: HIGH, 4: LOW1, 5: HIGH1, 20: LOW1, 21: HIGH1}
    group = run(line, scalar=registers, scc=SCC, arch=arch)
    is_float = "_f32" in name and not re.match("s_cvt_[iu]", name)
    values = [[int(x) | int(y) << 32 for x, y in zip(*pair, strict=True)] for pair in ((LOW, HIGH), (LOW1, HIGH1))]
    for k in range(A.size):
        names = {f"S{n}": values[n][k] & (1 << width) - 1 for n, width in enumerate(widths)}
        if in_line:
            names["S0" if target else "S1"] = constant
        old = int(LOW1[k]) | (int(HIGH1[k]) << 32 if wide else 0)
        after = pseudocode.evaluate(name, arch, **names, D0=old, SCC=int(SCC[k]))
        shown = f"{line}, sample {k}: {names}"
        if target:
            got = int(group.S[20][k]) | (int(group.S[21][k]) << 32 if wide else 0)
            want = int(after["D0"]) & (1 << (64 if wide else 32)) - 1
            if name in SAMPLES_LEFT_OUT and (SAMPLES_LEFT_OUT[name](names["S0"]) or denormal(want)):
                continue
            if name == "s_mul_f16":
                assert got >> 16 == old >> 16, f"{shown}: the upper half"
                assert agrees(got & 0xFFFF, want & 0xFFFF, 16, is_float=True, ulps=0), shown
                continue
            assert agrees(got, want, 32, is_float=is_float, ulps=name in SAMPLES_LEFT_OUT), shown
        assert bool(group.scc[k]) == bool(after["SCC"]), shown


@pytest.mark.parametrize("name", [name for name in ATOMICS if name != "pk_add_bf16"])  # bf16 is bits to the evaluator
def test_an_atomic_is_its_text(name):
    text = re.sub(r"addr = [^;]+;", "", pseudocode.texts()[f"global_atomic_{name}"])
    text = re.sub(r"\bMEM\[(?:addr|ADDR)\]", "D0", text).replace("RETURN_DATA", "D1")
    memory, words = Memory(), A[0].copy()
    base = memory.add("words", words.view(np.uint8))
    compare = np.where(np.arange(64) % 2, A[0], C[0]).astype(np.uint32)
    data = "v[6:7]" if name == "cmpswap" else "v6"
    at = np.arange(64, dtype=np.uint32)[None] * 4
    group = run(
        f"global_atomic_{name} v20, v1, {data}, s[4:5] sc0\ns_waitcnt vmcnt(0)",
        {1: at, 6: B[:1], 7: compare[None]},
        {4: base & 0xFFFFFFFF, 5: base >> 32},
        memory=memory,
    )
    packed = re.match(r"pk_add_(b?f16)", name)
    for k, old in enumerate(A[0].tolist()):
        given = int(B[0, k]) | int(compare[k]) << 32
        after = pseudocode.start({"D0": old, "D1": 0, "DATA": given, "dst": 0})
        pseudocode.compiled(text)(after)
        before = after["D1"].bits if isinstance(after["D1"], pseudocode.Float) else int(after["D1"])
        shown = f"{name} of {given:#x} on {old:#x}"
        assert int(group.V[20][0, k]) == before & 0xFFFFFFFF == old, shown
        got, want = int(words[k]), int(after["D0"]) & 0xFFFFFFFF
        for at_bit in (0, 16) if packed else (0,):
            size = 16 if packed else 32
            parts = got >> at_bit & (1 << size) - 1, want >> at_bit & (1 << size) - 1
            ok = agrees(*parts, size, is_float="_f" in name, ulps=0)
            assert ok, f"{shown} gives {got:#x}, AMD's text {want:#x}"


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("table", [0x00, 0x1B, 0x80, 0xC0, 0xE8, 0xFE])
def test_a_boolean_of_three_is_its_text(bits, table):
    group = run(f"v_bitop3_b{bits} v20, v6, v8, v10 bitop3:{table:#x}", {6: A, 8: B, 10: C, 20: A}, arch="gfx950")
    fields = {"OMOD": table >> 6, "ABS": table >> 3 & 7, "NEG": table & 7}
    for got, a, b, c in zip(*lists(group.V[20], A, B, C), strict=True):
        want = pseudocode.evaluate(f"v_bitop3_b{bits}", S0=a, S1=b, S2=c, INST=fields)["D"]
        assert got == int(want)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("v_bfe_u32", "(a >> (b & U(31))) & U(1)"), ("v_max_u32", "np.minimum(a, b)"), ("v_xad_u32", "(a ^ b) - c")],
)
def test_a_planted_meaning_is_seen(name, meaning, monkeypatch):
    kind, kinds, _ = VECTOR[name]
    monkeypatch.setitem(translate.VECTOR, name, (kind, kinds, meaning))
    with pytest.raises(AssertionError):
        test_a_vector_instruction_is_its_text(name, "gfx942")
