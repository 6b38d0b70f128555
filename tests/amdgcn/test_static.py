# SPDX-License-Identifier: Apache-2.0
"""The reader refuses what it does not know; the static check sees every planted missing wait."""

import re
from dataclasses import replace

import numpy as np
import pytest
from support.wave import program, run

from amdgcn.effects import effects
from amdgcn.errors import UnknownInstructionError, UnreadableTextError
from amdgcn.memory import Memory
from amdgcn.text import parse
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
