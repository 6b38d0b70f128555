# SPDX-License-Identifier: Apache-2.0
"""The reader refuses what it does not know; the static checks see every planted missing wait and wait state."""

import io
import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.nops import kept_for_nothing
from support.wave import program, run

from amdgcn.effects import effects
from amdgcn.errors import LaunchError, UnknownInstructionError, UnreadableTextError
from amdgcn.figures import bank_conflicts
from amdgcn.known import Known, machine_code
from amdgcn.memory import Memory
from amdgcn.text import parse
from amdgcn.wait_states import check_wait_states, passes
from amdgcn.waits import check_waits


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("v_add_u32_e32 v0, v1, w2", "the operand 'w2' is not known"),
        ("v_add_u32_e32 v0, v1, v2 quux:3", "the modifier 'quux:3' is not known"),
        ("global_load_dword v0, v1, s[2:3] scope:SCOPE_DEV", "the modifier 'scope:SCOPE_DEV' is not known"),
        ("s_waitcnt vmcnt(0) storecnt(1)", "a counter is not known"),
        (".set something, 4", "unknown directive"),
        ("V_ADD v0, v1", "no instruction"),
    ],
)
def test_what_is_not_understood_is_named_with_its_line(line, why):
    with pytest.raises(UnreadableTextError, match=re.escape(why)) as error:
        program(line)
    assert line.split()[0] in str(error.value)


def test_a_text_that_ends_early_is_no_kernel():
    with pytest.raises(UnreadableTextError, match="no whole kernel"):
        parse('\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\nkernel:\n\ts_endpgm\n')


@pytest.mark.parametrize(
    "line",
    [
        "flat_load_dword v0, v[2:3]",
        "v_cmpx_eq_u32 v0, v1",
        "s_setreg_b32 m0, s3",
        "ds_add_u32 v0, v1",
    ],
)
def test_operands_of_an_unknown_instruction_are_not_guessed(line):
    [one, _] = program(line).instructions
    with pytest.raises(UnknownInstructionError, match=line.split()[0]):
        effects(one)


def test_operands():
    [one, two, three, _] = program("""
        v_fma_f32 v3, -|v4|, a[5:6], 0.5
        v_add_u32_sdwa v1, sext(v2), vcc_lo dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:DWORD
        s_load_dwordx4 s[4:7], s[0:1], 0x1c
        """).instructions
    assert one.operands[1] == replace(one.operands[1], kind="v", number=4, negated=True, absolute=True)
    assert one.operands[2].registers() == [("v", 261), ("v", 262)]
    assert one.operands[3].value == 0.5
    assert program("v_fma_mix_f32 v0, v1, s2, neg(0)").instructions[0].operands[3].negated
    assert two.operands[1].extended
    assert ("v", 1) in effects(two).reads, "the half that stays is read"
    assert effects(three).writes == {("s", k) for k in (4, 5, 6, 7)}
    assert three.source == "kernel.py:3"


@pytest.mark.parametrize(
    ("line", "reads", "writes"),
    [
        ("global_atomic_add v0, v1, s[2:3]", {0, 1}, set()),
        ("global_atomic_add v0, v1, v2, s[2:3] sc0", {1, 2}, {0}),
        ("global_atomic_add v0, v[4:5], v2, off glc", {2, 4, 5}, {0}),  # as gfx90a writes it
        ("buffer_atomic_cmpswap v[0:1], v3, s[4:7], 0 offen", {0, 1, 3}, set()),
        ("buffer_atomic_cmpswap v[0:1], v3, s[4:7], 0 offen sc0", {0, 1, 3}, {0}),
    ],
)
def test_operands_of_an_atomic(line, reads, writes):
    found = effects(program(line).instructions[0])
    assert {number for kind, number in found.reads if kind == "v"} == reads
    assert found.writes == {("v", number) for number in writes}
    assert found.counter == "vm"


def test_a_load_into_lds_writes_no_register():
    [one, _] = program("buffer_load_dwordx4 v5, s[24:27], 0 offen lds").instructions
    assert not effects(one).writes
    assert effects(one).reads >= {("v", 5), ("s", 24), ("s", 124)}


LOOP = """
    s_load_dwordx2 s[2:3], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[2:3]
    .LBB0_1:
    global_load_dword v3, v1, s[2:3] offset:4
    s_waitcnt vmcnt(1)
    v_add_u32_e32 v4, v2, v1
    s_waitcnt vmcnt(0)
    v_mov_b32_e32 v2, v3
    ds_write_b32 v1, v2
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v5, v1
    s_waitcnt lgkmcnt(0)
    v_add_u32_e32 v6, v5, v4
    s_cbranch_scc1 .LBB0_1
    """


def test_waits_of_a_loop_suffice():
    assert check_waits(program(LOOP)) == []


@pytest.mark.parametrize("number", [3, 7, 9, 15])
def test_a_missing_wait_is_found(number):
    lines = LOOP.strip().splitlines()
    assert "s_waitcnt" in lines.pop(number - 1)
    assert check_waits(program("\n".join(lines)))


@pytest.mark.parametrize("number", [7, 9])
def test_a_wait_for_one_operation_less_is_found(number):
    lines = LOOP.strip().splitlines()
    lines[number - 1] = re.sub(r"vmcnt\((\d)\)", lambda found: f"vmcnt({int(found[1]) + 1})", lines[number - 1])
    [first, *_] = check_waits(program("\n".join(lines)))
    assert "may still be loading" in str(first)
    assert "kernel.py:" in str(first)


def test_a_register_that_is_loaded_in_order_again_needs_no_wait():
    assert check_waits(program("global_load_dword v2, v1, s[2:3]\nglobal_load_dword v2, v1, s[2:3] offset:4")) == []
    assert check_waits(program("global_load_dword v2, v1, s[2:3]\nds_read_b32 v2, v1")), "two counters have no order"


@pytest.mark.parametrize(("load", "holds"), [("global_load_dword v{}, v1, s[4:5]", 63), ("ds_read_b32 v{}, v1", 15)])
def test_a_counter_that_is_full_is_a_wait(load, holds):
    """The loads that it cannot count besides were issued, so the first has arrived; here and when it runs."""
    for newer in (holds, holds - 1):
        loads = (load.format(20 + k) for k in range(newer + 1))
        lines = "\n".join(["ds_write_b32 v1, v1", "s_waitcnt lgkmcnt(0)", *loads, "v_mov_b32_e32 v2, v20"])
        assert bool(check_waits(program(lines))) == (newer < holds)
        memory, words = Memory(), np.zeros(64, np.uint32)
        base = memory.add("words", words.view(np.uint8))
        group = run(lines, {1: np.zeros((1, 64))}, {4: base & 0xFFFFFFFF, 5: base >> 32}, memory=memory)
        assert (group.V[2] == group.junk).all() == (newer < holds)


MFMA = "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]"
HAZARDS = [  # first, second, wait states that must lie between on gfx942 (CDNA3 ISA, 4.5)
    ("v_cmp_eq_u32_e64 s[2:3], v1, v2", "v_cndmask_b32_e64 v3, v1, v2, s[2:3]", 2),
    ("v_readlane_b32 s4, v1, 0", "v_writelane_b32 v2, s4, 1", 2),
    ("v_readfirstlane_b32 s2, v1", "global_load_dword v3, v1, s[2:3]", 5),
    ("v_div_scale_f32 v1, vcc, v2, v3, v2", "v_div_fmas_f32 v4, v1, v2, v3", 4),
    ("v_mov_b32_e32 v1, v2", "v_add_u32_dpp v3, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    ("v_mov_b32_e32 v1, v2", "v_readlane_b32 s4, v1, 0", 1),
    ("v_exp_f32_e32 v1, v2", "v_mul_f32_e32 v3, v1, v2", 1),
    (
        "v_add_u32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_mov_b32_e32 v4, v1",
        1,
    ),
    ("global_store_dwordx4 v0, v[4:7], s[2:3]", "v_mov_b32_e32 v5, 0", 2),
    (MFMA, "v_add_f32_e32 v8, v1, v1", 7),
    (MFMA, "global_store_dword v9, v2, s[2:3]", 7),
    (MFMA, "v_mov_b32_e32 v2, 0", 7),
    (MFMA, "v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[6:7], 0", 7),
    (MFMA, "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], v[2:5]", 5),
    (MFMA, "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], v[0:3]", 0),
    ("v_mfma_f32_32x32x2_f32 v[0:15], v16, v17, 0", "v_add_f32_e32 v18, v1, v1", 18),
    ("v_mov_b32_e32 v4, 0", MFMA, 2),
    ("v_mov_b32_e32 v3, v2", "v_add_u32_dpp v3, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", 2),
    ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[8:11]", "global_load_dword v9, v20, s[2:3]", 3),
    ("v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[20:35]", "ds_read_b32 v22, v40", 7),
]


@pytest.mark.parametrize(("first", "second", "need"), HAZARDS)
def test_wait_states(first, second, need):
    def found(states):
        return check_wait_states(program("\n".join([first, *(["s_nop 0"] * states), second])))

    assert not found(need)
    if need:
        [hazard] = found(need - 1)
        assert str(hazard.instruction).startswith(second.split()[0])
        assert not check_wait_states(program(f"{first}\ns_nop {need - 1}\n{second}"))


def test_gfx950_needs_one_more_after_a_matrix_instruction():
    text = f"{MFMA}\ns_nop 6\nv_add_f32_e32 v8, v1, v1"
    assert not check_wait_states(program(text))
    assert check_wait_states(program(text, "gfx950"))


def test_wait_states_of_another_arch_are_not_assumed():
    with pytest.raises(LaunchError, match="gfx908"):
        check_wait_states(program("v_mov_b32_e32 v0, 0", "gfx908"))


OLD_MFMA = "v_mfma_f32_16x16x16f16 v[0:3], v[4:5], v[6:7], v[0:3]"
OLDER = [  # CDNA2 ISA, 4.5
    (OLD_MFMA, "v_add_f32_e32 v8, v1, v1", 11),
    (OLD_MFMA, "global_store_dword v9, v2, s[2:3]", 11),
    (OLD_MFMA, "v_mov_b32_e32 v2, 0", 11),
    (OLD_MFMA, "v_mfma_f32_16x16x16f16 v[8:11], v[0:1], v[6:7], 0", 11),
    (OLD_MFMA, "v_mfma_f32_16x16x16f16 v[8:11], v[4:5], v[6:7], v[2:5]", 8),
    (OLD_MFMA, "v_mfma_f32_16x16x16f16 v[8:11], v[4:5], v[6:7], v[0:3]", 0),
    ("v_mfma_f32_32x32x8bf16_1k v[0:15], v[16:17], v[18:19], 0", "v_add_f32_e32 v20, v1, v1", 19),
    ("v_readfirstlane_b32 s2, v1", "global_load_dword v3, v1, s[2:3]", 5),
    ("v_cmp_eq_u32_e64 s[2:3], v1, v2", "v_cndmask_b32_e64 v3, v1, v2, s[2:3]", 0),
    ("v_exp_f32_e32 v1, v2", "v_mul_f32_e32 v3, v1, v2", 0),
    ("global_store_dwordx4 v0, v[4:7], s[2:3]", "v_mov_b32_e32 v5, 0", 1),
]


NEWER = [  # what gfx950 adds: LLVM's checkPermlaneHazards, hasCvtScaleForwardingHazard
    ("v_mov_b32_e32 v0, v1", "v_permlane32_swap_b32_e32 v0, v2", 2),
    ("v_mov_b32_e32 v0, v1", "v_permlane16_swap_b32_e32 v2, v0", 2),
    ("v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, v3 op_sel:[0,0,0,1]", "v_mov_b32_e32 v4, v0", 1),
    ("v_bitop3_b16 v0, v1, v2, v3 bitop3:0xc0 op_sel:[0,0,0,1]", "v_mov_b32_e32 v4, v0", 1),
    ("s_mov_b32 m0, s5", "buffer_load_dwordx4 v0, s[8:11], 0 offen lds", 1),
]


@pytest.mark.parametrize(("first", "second", "need"), NEWER)
def test_wait_states_of_gfx950(first, second, need):
    def found(states):
        return check_wait_states(program("\n".join([first, *(["s_nop 0"] * states), second]), "gfx950"))

    assert not found(need)
    assert str(found(need - 1)[0].instruction).startswith(second.split()[0])


def test_scalar_loads_that_a_page_fault_repeats():
    """LLVM, checkSoftClauseHazards: the second load overwrites the address of the first."""
    loads = ["s_load_dwordx2 s[4:5], s[2:3], 0x0", "s_load_dwordx2 s[2:3], s[2:3], 0x8"]
    assert check_wait_states(program("\n".join(loads)))
    assert not check_wait_states(program("\n".join([loads[0], "s_nop 0", loads[1]])))
    assert not check_wait_states(program(loads[1]))
    assert check_wait_states(program("\n".join([loads[0], ".LBB0_1:", loads[1]]))), "a label ends no clause"
    assert not check_wait_states(program("\n".join([loads[0], "s_cbranch_scc1 .LBB0_1", ".LBB0_1:", loads[1]])))


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([MFMA, "s_nop 6", "v_add_f32_e32 v8, v1, v1"], False),
        (["v_mov_b32_e32 v1, 0", "s_nop 0", "v_add_f32_e32 v8, v1, v1"], True),
        (["v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", "s_nop 0", "v_add_f32_e32 v8, v3, v3"], False),
        (["v_exp_f32_e32 v1, v2", "s_nop 0", ".LBB0_1:", "v_mul_f32_e32 v3, v1, v2", "s_cbranch_scc1 .LBB0_1"], False),
        # Each of LLVM's own rules, and beside it what the rule does not say.
        (["v_pk_mul_f32 v[2:3], v[4:5], v[6:7] op_sel_hi:[0,1]", "s_nop 0", "v_add_f32_e32 v8, v3, v3"], True),
        (["v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", "s_nop 0", "v_add_f32_e32 v8, v9, v9"], True),
        (
            ["v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", "s_nop 0", *(f"v_accvgpr_write_b32 a{k}, v{k}" for k in (4, 3))],
            False,
        ),
        (["v_pk_mul_f32 v[2:3], v[4:5], v[6:7]", "s_nop 0", "v_accvgpr_write_b32 a4, v4", "s_mov_b32 s2, 0"], True),
        (["global_load_dword v1, v2, s[4:5]", "s_nop 0", "global_store_dword v3, v4, s[6:7]"], False),
        (["global_load_dword v1, v2, s[4:5]", "s_nop 0", "global_load_dword v2, v3, s[6:7]"], False),
        (["global_load_dword v1, v2, s[4:5]", "s_nop 0", "global_load_dword v3, v2, s[6:7]"], True),
        (["global_store_dword v3, v4, s[6:7]", "s_nop 0", "global_store_dword v3, v4, s[6:7]"], True),
        (["v_writelane_b32 v1, s6, 5", "s_nop 1", "v_writelane_b32 v1, s7, 6"], False),
        (["v_writelane_b32 v1, s6, 5", "s_nop 1", "v_writelane_b32 v1, s8, 6"], True),
        (["v_writelane_b32 v1, s6, 5", "s_nop 1", "v_writelane_b32 v2, s7, 6"], True),
    ],
)
def test_a_nop_that_nothing_demands_is_named(lines, kept):
    assert bool(kept_for_nothing(program("\n".join(lines)))) == kept


@pytest.mark.parametrize(("first", "second", "need"), OLDER)
def test_wait_states_of_gfx90a(first, second, need):
    def found(states):
        return check_wait_states(program("\n".join([first, *(["s_nop 0"] * states), second]), "gfx90a"))

    assert not found(need)
    if need:
        assert str(found(need - 1)[0].instruction).startswith(second.split()[0])


def test_wait_states_are_counted_along_the_shorter_path():
    loop = "s_nop 7\n.LBB0_1:\nv_add_f32_e32 v8, v1, v1\n" + MFMA + "\ns_cbranch_scc1 .LBB0_1"
    [hazard] = check_wait_states(program(loop))
    assert hazard.instruction.mnemonic == "v_add_f32"


@pytest.mark.parametrize(("nops", "short"), [(5, False), (4, True)])
def test_a_branch_that_does_not_run_is_no_wait_state(nops, short):
    """LLVM counts the `s_branch` on both ways out of the block."""
    ways = f"s_cbranch_scc1 .LBB0_1\ns_branch .LBB0_2\n.LBB0_1:\ns_nop {nops}\nv_add_f32_e32 v8, v1, v1\n.LBB0_2:"
    text = f"{MFMA}\n{ways}\ns_nop 0"
    assert bool(check_wait_states(program(text))) == short
    assert not check_wait_states(program(text), as_llvm=True)


SPOILT = {
    "cut off": lambda data: data[:100],
    "a bit": lambda data: data[:-40] + bytes([data[-40] ^ 4]) + data[-39:],
    "a whole file of another launch": lambda _: kept_as("another", np.zeros(0, np.uint8)),
    "an archive without a note": lambda _: archive(**{"0": np.zeros(64, np.uint8)}),
    "empty": lambda _: b"",
}


def archive(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def kept_as(key, before):
    with tempfile.TemporaryDirectory() as folder:
        Known(Path(folder)).keep(key, memory_of(1), [before], {"waves": 3})
        return Path(folder, key).read_bytes()


def memory_of(value):
    return SimpleNamespace(regions=[SimpleNamespace(views={1: np.full(64, value, np.uint8)})])


@pytest.mark.parametrize("name", SPOILT)
def test_a_damaged_launch_is_not_known_and_is_deleted(name, tmp_path):
    """A full disk or a power cut would make its test red on each run."""
    known, memory = Known(tmp_path), memory_of(0)
    known.keep("a", memory_of(1), [np.zeros(64, np.uint8)], {"waves": 3})
    assert known.replay("a", memory) == {"waves": 3}
    assert memory.regions[0].views[1].tolist() == [1] * 64
    path = tmp_path / "a"
    path.write_bytes(SPOILT[name](path.read_bytes()))
    assert known.replay("a", memory_of(0)) is None
    assert not path.exists()


def test_tensors_that_share_memory_are_another_launch():
    """`add_one(x, y)` copies and `add_one(a, a)` overwrites: the same bytes, names and code."""

    def key(*starts):
        memory, data = Memory(), np.zeros(64, np.uint8)
        apart = [data, np.zeros(64, np.uint8)]
        for k, start in enumerate(starts):
            memory.add("xy"[k], (apart[k] if start is None else data[start : start + 32])[:32])
        return Known(Path("nowhere")).key(program("s_nop 0"), memory, ())

    keys = [key(None, None), key(0, 0), key(0, 16), key(16, 0)]
    assert len(set(keys)) == 4
    assert key(0, 32) == key(None, None), "side by side is apart"


def test_passes_follow_the_flops():
    rate = {"f16": 512, "f32": 64, "xf32": 256}  # per cycle and SIMD: MI300X data sheet / 304 compute units / 4 SIMDs
    for name, kind in (
        ("32x32x8_f16", "f16"),
        ("16x16x16_f16", "f16"),
        ("32x32x2_f32", "f32"),
        ("16x16x4_f32", "f32"),
        ("16x16x8_xf32", "xf32"),
        ("32x32x4_xf32", "xf32"),
    ):
        rows, columns, k = map(int, re.findall(r"\d+", name.split("_")[0]))
        assert passes(f"v_mfma_f32_{name}") == (rows * columns * k * 2 // rate[kind] // 4, kind != "f32")


TEXT = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
\t.file 1 "here" "kernel.py"
kernel:
\t.loc 1 1 0
\ts_endpgm
\t.amdhsa_kernel kernel
\t.end_amdhsa_kernel
"""


def test_machine_code_is_what_the_gpu_sees_of_a_text():
    """Lines of Python, comments and spaces are not; an operand and the arch are."""
    move, rest = "v_mov_b32_e32 v1, 0", ["s_nop 0", "v_add_u32_e32 v2, v1, v1"]

    def code(*lines, arch="gfx942"):
        return machine_code(program("\n".join(lines), arch))

    assert code(move, *rest) == code(f"{move}  ; a comment", *rest)
    elsewhere = parse(TEXT.replace(".loc 1 1 0", ".loc 1 77 0"))
    assert elsewhere.instructions[0].source != parse(TEXT).instructions[0].source
    assert machine_code(elsewhere) == machine_code(parse(TEXT))
    assert len({code(move, *rest), code("v_mov_b32_e32 v1, 1", *rest), code(move, *rest, arch="gfx950")}) == 3


@pytest.mark.parametrize(
    ("stride", "size", "banks", "cycles"),
    [
        (4, 4, 32, 0),
        (0, 4, 32, 0),
        (128, 4, 32, 2 * 31),
        (8, 4, 32, 2),
        (128, 4, 64, 31),
        (16, 16, 32, 0),
        (256, 16, 32, 8 * 7),
    ],
)
def test_bank_conflicts_of_a_stride(stride, size, banks, cycles):
    """64 lanes `stride` bytes apart, as many at a time as fill the banks; one word for all of them is no conflict."""
    address = np.arange(64)[None] * stride
    assert bank_conflicts(address, None, size, banks) == cycles
    assert bank_conflicts(address, np.arange(64)[None] < 1, size, banks) == 0


def test_seeded_changes_of_waits_in_a_long_program_are_found():
    """Loads and uses at random distances; every wait removed in turn, which matters exactly where its load is used."""
    random.seed(5)
    lines = []
    for k in range(40):
        lines += [f"global_load_dword v{10 + k}, v1, s[2:3] offset:{4 * k}"]
        lines += ["v_mov_b32_e32 v2, 0"] * random.randrange(3)
        lines += ["s_waitcnt vmcnt(0)", f"v_add_u32_e32 v3, v{10 + k}, v3"]
    assert check_waits(program("\n".join(lines))) == []
    for k in [k for k, line in enumerate(lines) if line.startswith("s_wait")]:
        assert len(check_waits(program("\n".join(lines[:k] + lines[k + 1 :])))) == 1
