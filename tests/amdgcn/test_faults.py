# SPDX-License-Identifier: Apache-2.0
"""Planted faults, each caught with buffer, wave, lane, instruction and Python line; what is right is left alone."""

import re

import numpy as np
import pytest
from support.planted import complaint, instead, must_be_noticed, planted
from support.wave import machine, program

from amdgcn.errors import LaunchError, ProgramFault
from amdgcn.launch import amdgcn
from amdgcn.memory import Memory, own_steps
from amdgcn.translate import translate

COPY = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 4, v0
    s_waitcnt lgkmcnt(0)
    global_load_dwordx4 v[2:5], v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v1, v[2:5], s[6:7]
    """
"""64 lanes copy 16 bytes each."""


def launch(
    lines,
    *,
    size=1024,
    readonly=False,
    waves=1,
    lds_bytes=4096,
    twins=2,
    source=None,
    split=False,
    arch="gfx942",
    **tensor,
):
    """Run on a source of `size` bytes and a target of 1024; return the target."""
    memory, data = Memory(), np.arange(size // 2, dtype=np.uint16).view(np.uint8) if source is None else source
    target = np.zeros(1024, np.uint8)
    pointers = [memory.add("key_cache", data, **tensor), memory.add("out", target, readonly=readonly)]
    kernarg = memory.add("kernel arguments", np.array(pointers, np.uint64).view(np.uint8), readonly=True)
    one = machine(lines, arch=arch, memory=memory, lds_bytes=lds_bytes, twins=twins, split=split)
    one.run((1, 1, 1), waves, kernarg)
    return target


def changed(lines, old, new):
    assert old in lines
    return lines.replace(old, new)


def test_a_copy_copies():
    assert launch(COPY).view(np.uint16).tolist() == list(range(512))


def test_without_twins_undefined_values_pass():
    launch(changed(COPY, "v[2:5], s[6:7]", "v[3:6], s[6:7]"), twins=1)


def test_a_late_load_overwrites_what_was_written_meanwhile():
    """Without a wait in between, the second write to v2 loses against the load."""
    late = changed(COPY, "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v2, 0\ns_waitcnt vmcnt(0)")
    assert launch(late).view(np.uint16).tolist() == list(range(512))


INTERLEAVED = {"start": 0, "shape": (4, 128), "strides": (512, 1), "itemsize": 1}
"""K of a pool K0 V0 K1 V1 ..: blocks of 128 bytes every 512."""


def test_a_tensor_s_own_bytes():
    """Lane k reads 2 bytes of block k: inside K all is well; 128 bytes on, V begins, in the middle of K's extent."""
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_and_b32_e32 v1, 3, v0
        v_lshlrev_b32_e32 v1, 9, v1
        s_waitcnt lgkmcnt(0)
        global_load_ushort v2, v1, s[4:5] offset:126
        """
    pool = np.zeros(2048, np.uint8)
    launch(lines, source=pool, **INTERLEAVED)
    message = (
        "read of 2 bytes at offset 128 of key_cache (2048 bytes, not its own bytes, or unaligned): wave 0 of workgroup"
    )
    with pytest.raises(ProgramFault, match=re.escape(message)) as error:
        launch(changed(lines, "offset:126", "offset:128"), source=pool, **INTERLEAVED)
    assert "kernel.py:5" in str(error.value)


def overlapping():
    """What a store through one tensor's pointer leaves for a load through another's."""
    memory, data, target = Memory(), np.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
    pointers = [memory.add(name, each) for name, each in (("key_cache", data), ("pool", data), ("out", target))]
    kernarg = memory.add("kernel arguments", np.array([*pointers, 0], np.uint64).view(np.uint8))
    lines = """
        s_load_dwordx8 s[4:11], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[6:7]
        s_waitcnt vmcnt(0)
        global_load_dword v2, v1, s[4:5]
        s_waitcnt vmcnt(0)
        global_store_dword v1, v2, s[8:9]
        """
    machine(lines, memory=memory, twins=2).run((1, 1, 1), 1, kernarg)
    return target.view(np.uint32)[:64].tolist()


def test_tensors_that_share_bytes_see_each_other_s_writes():
    assert overlapping() == list(range(64))


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize"),
    [
        ((4, 128), (512, 1), 1),
        ((3, 2, 5), (64, 16, 2), 2),
        ((2, 3, 4), (1, 100, 8), 1),
        ((7,), (4,), 4),
        ((2, 2), (4, 8), 4),
        ((5, 3), (0, 8), 4),
        ((1, 1), (77, 13), 2),
    ],
)
def test_own_bytes_are_those_of_the_elements(shape, strides, itemsize):
    """Against every element's bytes, one by one."""
    own = {int(np.dot(index, strides)) + k for index in np.ndindex(*shape) for k in range(itemsize)}
    end = max(own) + 1
    memory = Memory()
    memory.add("t", np.zeros(end + 64, np.uint8), end=end, shape=shape, strides=strides, itemsize=itemsize)
    for size in (1, 2, 4):
        got = memory.regions[0].owns(np.arange(-4, end + 32), size)
        assert got.tolist() == [all(at + k in own for k in range(size)) for at in range(-4, end + 32)]


def test_axes_that_overlap_count_as_one_extent():
    assert own_steps((4, 4), (2, 1), 1) == ((), 0)


EXCHANGE = """
    v_lshlrev_b32_e32 v1, 2, v0
    v_xor_b32_e32 v2, 0x100, v1
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[6:7]
    """
"""Two waves write a word for each lane and read the other's."""


def test_two_waves_exchange_words():
    got = launch(EXCHANGE, waves=2).view(np.uint32)
    assert got[:128].tolist() == [k ^ 64 for k in range(128)]


def test_an_equal_value_written_twice_is_no_race():
    equal = "v_mov_b32_e32 v4, 7\n    v_and_b32_e32 v5, 0xfc, v1\n    ds_write_b32 v5, v4\n    ds_write_b32 v5, v4"
    launch(changed(EXCHANGE, "ds_write_b32 v1, v0", equal), waves=2, twins=1)


def test_lanes_that_diverge_meet_again():
    """Odd waves take another path; both store."""
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        v_readfirstlane_b32 s8, v0
        s_lshr_b32 s8, s8, 6
        s_bitcmp1_b32 s8, 0
        s_cbranch_scc1 .LBB0_1
        v_mov_b32_e32 v2, 5
        s_branch .LBB0_2
        .LBB0_1:
        v_mov_b32_e32 v2, 6
        .LBB0_2:
        s_waitcnt lgkmcnt(0)
        v_cmp_gt_u32_e32 vcc, 0x84, v1
        s_and_saveexec_b64 s[10:11], vcc
        v_mov_b32_e32 v2, 9
        s_or_b64 exec, exec, s[10:11]
        global_store_dword v1, v2, s[6:7]
        """
    got = launch(lines, waves=3).view(np.uint32)
    assert got[:192].tolist() == [9] * 33 + [5] * 31 + [6] * 64 + [5] * 64


INTO_LDS = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 4, v0
    s_mov_b32 s10, 0x400
    s_mov_b32 s11, 0x27000
    s_waitcnt lgkmcnt(0)
    s_mov_b64 s[8:9], s[4:5]
    s_mov_b32 m0, 0x100
    buffer_load_dwordx4 v1, s[8:11], 0 offen lds
    s_waitcnt vmcnt(0)
    ds_read_b128 v[2:5], v1 offset:256
    s_waitcnt lgkmcnt(0)
    global_store_dwordx4 v1, v[2:5], s[6:7]
    """


def test_a_load_goes_to_lds_side_by_side():
    assert launch(INTO_LDS).view(np.uint16).tolist() == list(range(512))


def grid(lines, workgroups, size=1 << 15):
    memory, target = Memory(), np.zeros(size, np.uint8)
    pointers = [memory.add("out", target), 0]
    kernarg = memory.add("kernel arguments", np.array(pointers, np.uint64).view(np.uint8), readonly=True)
    machine(lines, memory=memory, twins=2).run((workgroups, 1, 1), 1, kernarg)
    return target.view(np.uint32)


EACH_ITS_OWN = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_lshl_b32 s6, s2, 8
    v_lshlrev_b32_e32 v1, 2, v0
    v_add_u32_e32 v1, s6, v1
    v_add_u32_e32 v2, s2, v0
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[4:5]
    """
"""Workgroup w writes w + lane to 64 words of its own."""


def test_workgroups_with_memory_of_their_own_do_not_meet():
    assert grid(EACH_ITS_OWN, 3)[:192].tolist() == [w + lane for w in range(3) for lane in range(64)]


@pytest.mark.parametrize(
    ("old", "new", "offset"),
    [
        ("s_lshl_b32 s6, s2, 8", "s_lshl_b32 s6, s2, 7", 128),
        ("s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(0)\n    global_load_dword v3, v1, s[4:5] offset:252", 256),
    ],
    ids=["two write one word", "one reads what another writes"],
)
def test_a_race_between_workgroups_is_found(old, new, offset):
    with pytest.raises(ProgramFault, match=f"global race: two workgroups meet at offset {offset} of out") as error:
        grid(changed(EACH_ITS_OWN, old, new), 70)
    assert error.value.where["buffer"] == "out"
    assert error.value.where["line"].startswith("kernel.py:")


def test_workgroups_that_write_an_equal_value_do_not_race():
    grid(changed(changed(EACH_ITS_OWN, "s_lshl_b32 s6, s2, 8", "s_mov_b32 s6, 0"), "s2, v0", "5, v0"), 3)


RACE = r"global race: waves [01] and [01] of workgroup \(0, 0, 0\) meet"
COUNTED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    v_mov_b32_e32 v2, 1
    s_waitcnt lgkmcnt(0)
    global_atomic_add v3, v1, v2, s[4:5] sc0
    s_waitcnt vmcnt(0)
    """
"""Every lane takes a number."""


def test_atomics_of_workgroups_and_waves_do_not_race():
    assert grid(COUNTED, 70)[:2].tolist() == [70 * 64, 0]
    assert launch(COUNTED.replace("0x0", "0x8"), waves=4).view(np.uint32)[:2].tolist() == [256, 0]


PLAIN = {"a read": "global_load_dword v4, v1, s[4:5]", "a write": "global_store_dword v1, v2, s[4:5]"}


@pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN)
def test_an_atomic_beside_a_plain_access_races(plain):
    """Between workgroups always; between waves of one without a barrier, also where its own wave did both."""
    with pytest.raises(ProgramFault, match="global race: two workgroups meet at offset 0 of out"):
        grid(f"{COUNTED}{plain}", 2)
    own = COUNTED.replace("0x0", "0x8")
    with pytest.raises(ProgramFault, match=RACE):
        launch(f"{own}{plain}", waves=2)
    launch(f"{own}s_barrier\n{plain}", waves=2)


ADDED = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    s_waitcnt lgkmcnt(0)
    global_load_dword v3, v1, s[4:5]
    s_waitcnt vmcnt(0)
    .LBB0_1:
    v_add_u32_e32 v2, 1, v3
    global_atomic_cmpswap v4, v1, v[2:3], s[4:5] sc0
    s_waitcnt vmcnt(0)
    v_cmp_ne_u32_e32 vcc, v4, v3
    v_mov_b32_e32 v3, v4
    s_and_b64 exec, exec, vcc
    s_cbranch_execnz .LBB0_1
    """
"""Every lane adds 1 to one word, as LLVM writes an atomic that the hardware lacks."""


def test_a_read_that_a_compare_and_swap_checks_does_not_race():
    assert grid(ADDED, 3)[:2].tolist() == [192, 0]
    with pytest.raises(ProgramFault, match="global race: two workgroups meet at offset 0 of out"):
        grid(f"{ADDED}s_mov_b64 exec, -1\nglobal_load_dword v3, v1, s[4:5]", 3)


IN_MEMORY = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_xor_b32_e32 v2, 0x100, v1
    v_add_u32_e32 v4, 1, v0
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[6:7]
    s_waitcnt vmcnt(0)
    s_barrier
    global_load_dword v3, v2, s[6:7]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v3, s[6:7] offset:512
    """
"""Two waves write a word for each lane to global memory, read the other's and store it after them."""


def test_waves_exchange_words_in_memory_across_a_barrier():
    got = launch(IN_MEMORY, waves=2).view(np.uint32)
    assert got[128:].tolist() == [1 + (k ^ 64) for k in range(128)]


BARRIER = "s_waitcnt vmcnt(0)\n    s_barrier"
OUTSTANDING = {
    "a write": (BARRIER, "s_barrier"),
    "a read, and a write": (
        "s_waitcnt vmcnt(0)\n    global_store_dword v1, v3, s[6:7] offset:512",
        "s_barrier\n    global_store_dword v1, v4, s[6:7] offset:4",
    ),
}
BY_SCALAR = (
    "global_load_dword v3, v2, s[6:7]\n    s_waitcnt vmcnt(0)",
    "s_load_dword s8, s[6:7], 0x0\n    s_waitcnt lgkmcnt(0)\n    v_mov_b32_e32 v3, s8",
)


@pytest.mark.parametrize(("old", "new"), OUTSTANDING.values(), ids=OUTSTANDING)
def test_one_cache_keeps_order_across_a_barrier(old, new):
    launch(changed(IN_MEMORY, old, new), waves=2)
    with pytest.raises(ProgramFault, match=RACE):  # waves on several compute units have several
        launch(changed(IN_MEMORY, old, new), waves=2, split=True)


def test_the_scalar_cache_is_another_one():
    one = changed(IN_MEMORY, *BY_SCALAR)
    launch(one, waves=2)
    with pytest.raises(ProgramFault, match=RACE):
        launch(changed(one, BARRIER, "s_barrier"), waves=2)


# Each of the programs above with one thing wrong

STORE = "wave 0 of workgroup (0, 0, 0) lane 0; global_store_dwordx4 v1, v[2:5], s[6:7]  (kernel.py:6)"
LOAD = "global_load_dwordx4 v[2:5], v1, s[4:5]  (kernel.py:4)"
UNDEFINED = "undefined value (never written, or its load not waited for) used as"
BRANCH = """
    v_mov_b32_e32 v1, 0
    v_cmp_gt_i32_e32 vcc, v7, v1
    s_cbranch_vccz .LBB0_1
    .LBB0_1:
    s_nop 0
    """
WRITE_AFTER = "ds_write_b32 v1, v0 offset:8\n    s_waitcnt lgkmcnt(0)\n    s_load"
SHARED_WORD = "v_lshlrev_b32_e32 v1, 2, v0\n    v_and_b32_e32 v1, 0xfc, v1"
ONE_WORD = "v_mov_b32_e32 v5, 0\n    global_store_dword v5, v4, s[6:7] offset:768"
LDS_RACE = re.compile(r"LDS race: (read|write) of byte \d+ .*kernel.py:\d+")
AT_ONCE = re.compile(r"LDS race: write of byte 0 .*since wave \d's access in this very instruction")
LATE = f"{SHARED_WORD}\n    s_barrier\n    ds_write_b32 v1, v0\n    s_waitcnt lgkmcnt(0)\n    s_load"
MEMORY_RACE = re.compile(rf"{RACE} at offset \d+ of out .*kernel.py:\d+")
NOWHERE = "v_mov_b32_e32 v1, 0\nv_mov_b32_e32 v2, 0\nglobal_load_dword v3, v[1:2], off"
OFF = "v_mov_b32_e32 v1, v0\nv_mov_b32_e32 v2, v0\ns_mov_b64 exec, 7\nv_permlane32_swap_b32_e32 v1, v2"
BEYOND = "read of 16 bytes at offset 1008 of key_cache (1008 bytes): wave 0 of workgroup (0, 0, 0) lane 63"
EARLY = f"{UNDEFINED} address: wave 0 of workgroup (0, 0, 0) lane 0; {LOAD}"
FAULTS = {
    "a tensor that is shorter": ((COPY, "", "", {"size": 1008}), f"{BEYOND}; {LOAD}"),
    "a write to an input": (
        (COPY, "", "", {"readonly": True}),
        f"write of 16 bytes at offset 0 of out (1024 bytes, read-only): {STORE}",
    ),
    "a load is not waited for": ((COPY, "s_waitcnt vmcnt(0)", "s_nop 0"), f"{UNDEFINED} stored data: {STORE}"),
    "a scalar load is not waited for": ((COPY, "s_waitcnt lgkmcnt(0)", "s_nop 0"), EARLY),
    "a register too far": ((COPY, "v[2:5], s[6:7]", "v[3:6], s[6:7]"), f"{UNDEFINED} stored data"),
    "an offset that is unaligned": ((COPY, "v1, s[4:5]", "v1, s[4:5] offset:2"), "not its own bytes, or unaligned"),
    "an address of another register": (
        (COPY, "v_lshlrev_b32_e32 v1, 4, v0", "v_lshlrev_b32_e32 v1, 4, v9"),
        f"{UNDEFINED} address",
    ),
    "an address of no tensor": (("", "", NOWHERE), "read of 4 bytes at no tensor's address"),
    "a branch on nothing": (
        ("", "", BRANCH),
        f"{UNDEFINED} branch condition: wave 0 of workgroup (0, 0, 0); s_cbranch_vccz .LBB0_1  (kernel.py:3)",
    ),
    "a mask of nothing": (("", "", "s_mov_b64 exec, s[8:9]"), f"{UNDEFINED} exec"),
    "an LDS address of nothing": (("", "", "ds_read_b32 v1, v7"), f"{UNDEFINED} LDS address"),
    "an address outside LDS": (
        ("", "", "v_mov_b32_e32 v1, 0x1000\nds_write_b32 v1, v0"),
        "LDS access of 4 bytes at 4096 outside 4096 bytes",
    ),
    "a loop without an end": (("", "", ".LBB0_1:\ns_branch .LBB0_1"), "kernel does not end"),
    "lanes that are off": (("", "", OFF), "lanes change places with lanes that are off"),
    "no barrier": ((EXCHANGE, "s_barrier", "s_nop 0"), LDS_RACE),
    "no wait before the barrier": ((EXCHANGE, "s_waitcnt lgkmcnt(0)\n    s_barrier", "s_barrier"), LDS_RACE),
    "a write after the barrier": ((EXCHANGE, "s_waitcnt lgkmcnt(0)\n    s_load", WRITE_AFTER), LDS_RACE),
    "two lanes of two waves, one word": ((EXCHANGE, "v_lshlrev_b32_e32 v1, 2, v0", SHARED_WORD), LDS_RACE),
    "two waves write one word at once": (
        (EXCHANGE, "s_waitcnt lgkmcnt(0)\n    s_load", f"s_waitcnt lgkmcnt(0)\n    {LATE}"),
        AT_ONCE,
    ),
    "LDS that is half written": ((EXCHANGE, "ds_write_b32 v1, v0", "ds_write_b16 v1, v0"), "undefined value"),
    "a load into LDS is not waited for": ((INTO_LDS, "s_waitcnt vmcnt(0)", "s_nop 0"), "undefined value"),
    "a descriptor of another kind": ((INTO_LDS, "0x27000", "0x7000"), "descriptor that is not of plain bytes"),
    "a descriptor of nothing": ((INTO_LDS, "s_mov_b32 s10, 0x400", "s_nop 0"), f"{UNDEFINED} descriptor"),
    "no barrier in memory": ((IN_MEMORY, BARRIER, "s_waitcnt vmcnt(0)"), MEMORY_RACE),
    "two values for one word in memory": ((IN_MEMORY, BARRIER, f"{BARRIER}\n    {ONE_WORD}"), MEMORY_RACE),
}
"""Program, what in it becomes what, and how else it is launched."""


@planted(FAULTS)
def test_a_fault_is_named(fault, monkeypatch):
    monkeypatch.setattr("amdgcn.machine.LIMIT", 10_000)
    lines, old, new, *options = fault.change
    waves = 2 if lines in {EXCHANGE, IN_MEMORY} else 1

    def look(site):
        return complaint(ProgramFault, launch, site[0], waves=waves, **site[1])

    must_be_noticed(fault, look, instead((changed(lines, old, new), dict(*options))), (lines, {}))


GFX12_EXCHANGE = """
    s_load_b128 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    ds_store_b32 v1, v0
    s_wait_dscnt 0x0
    s_barrier_signal -1
    v_xor_b32_e32 v2, 0x80, v1
    s_barrier_wait -1
    ds_load_b32 v3, v2
    s_wait_dscnt 0x0
    s_wait_kmcnt 0x0
    global_store_b32 v1, v3, s[6:7]
    """
GFX12_BARRIER = "s_barrier_signal -1\n    v_xor_b32_e32 v2, 0x80, v1\n    s_barrier_wait -1"
GFX12_RACES = {
    "no barrier": (GFX12_BARRIER, "v_xor_b32_e32 v2, 0x80, v1"),
    "no wait": (f"s_wait_dscnt 0x0\n    {GFX12_BARRIER}", GFX12_BARRIER),
    "a wait after the signal": (
        "s_wait_dscnt 0x0\n    s_barrier_signal -1",
        "s_barrier_signal -1\n    s_wait_dscnt 0x0",
    ),
}


@pytest.mark.parametrize(("old", "new"), GFX12_RACES.values(), ids=GFX12_RACES)
def test_a_wave_of_gfx12_waits_before_it_signals(old, new):
    got = launch(GFX12_EXCHANGE, waves=2, arch="gfx1201").view(np.uint32)
    assert got[:64].tolist() == [k ^ 32 for k in range(64)]
    with pytest.raises(ProgramFault, match=LDS_RACE):
        launch(changed(GFX12_EXCHANGE, old, new), waves=2, arch="gfx1201")


REPLICATED = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_and_b32_e32 v1, 63, v0
    v_lshlrev_b32_e32 v1, 2, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v1, s[6:7]
    global_load_dword v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v3, s[6:7] offset:256
    """


def test_equal_writes_that_each_wave_reads_back_do_not_race():
    assert launch(REPLICATED, waves=2).view(np.uint32)[64:128].tolist() == list(range(0, 256, 4))


def test_a_descriptor_hides_what_is_beyond_its_range():
    lines = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        s_mov_b32 s10, 64
        s_mov_b32 s11, 0x27000
        s_waitcnt lgkmcnt(0)
        s_mov_b64 s[8:9], s[6:7]
        buffer_store_dword v0, v1, s[8:11], 0 offen offset:8
        """
    assert launch(lines).view(np.uint32)[:20].tolist() == [0, 0, *range(14), 0, 0, 0, 0]


def test_a_mode_that_the_machine_does_not_have_is_refused():
    one = program("s_nop 0")
    one.descriptor["float_denorm_mode_32"] = 0
    from amdgcn.machine import Machine

    with pytest.raises(LaunchError, match="float_denorm_mode_32"):
        Machine(translate(one), Memory(), 0)


def test_an_arch_that_is_not_executed_is_refused():
    with pytest.raises(LaunchError, match="gfx90a"), amdgcn("gfx90a"):
        pass


def test_interpreted_kernels_have_no_machine_code(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(LaunchError, match="TRITON_INTERPRET=0"), amdgcn("gfx942"):
        pass


USES = {  # of v9 or s20, which nobody wrote
    "a maximum": "v_max_f32_e32 v2, v3, v9",
    "a maximum of three": "v_max3_f32 v2, v3, v3, v9",
    "a median": "v_med3_f32 v2, 0, 1.0, v9",
    "a minimum of integers": "v_min_u32_e32 v2, v4, v9",
    "a mask of one bit": "v_and_b32_e32 v2, 1, v9",
    "another bit": "v_and_b32_e32 v2, 4, v9",
    "beside 0": "v_cmp_eq_u32_e32 vcc, 0, v9\nv_cndmask_b32_e32 v2, v3, v4, vcc",
    "beside a number": "v_cmp_eq_u32_e32 vcc, v9, v4\nv_cndmask_b32_e32 v2, v3, v4, vcc",
    "a bound": "v_cmp_gt_u32_e32 vcc, 64, v9\nv_cndmask_b32_e32 v2, v3, v4, vcc",
    "a sign": "v_lshrrev_b32_e32 v2, 31, v9",
    "whether it is a number": "v_cmp_o_f32_e32 vcc, v9, v9\nv_cndmask_b32_e32 v2, v3, v4, vcc",
    "a scalar beside 0": "s_cmp_lg_u32 s20, 0\ns_cselect_b32 s21, 1, 2\nv_mov_b32_e32 v2, s21",
    "a copy": "v_mov_b32_e32 v2, v9",
    "a sum": "v_add_f32_e32 v2, v3, v9",
}
UNSEEN = {"beside a number"}
"""Neither pair holds the number 7; a third would have to."""


def test_one_arch_or_the_other_sees_a_use_of_what_is_undefined():
    seen = {arch: {name for name, lines in USES.items() if is_seen(lines, arch)} for arch in ("gfx942", "gfx950")}
    assert seen["gfx942"] | seen["gfx950"] == USES.keys() - UNSEEN
    assert not seen["gfx942"] >= USES.keys() - UNSEEN, "then one pair would be enough"


def is_seen(lines, arch):
    memory = Memory()
    base = memory.add("out", np.zeros(256, np.uint8))
    text = f"""
        v_lshlrev_b32_e32 v1, 2, v0
        s_mov_b32 s8, 0
        s_mov_b32 s9, {base >> 32}
        v_mov_b32_e32 v3, 2.0
        v_mov_b32_e32 v4, 7
        {lines}
        global_store_dword v1, v2, s[8:9]
        """
    try:
        machine(text, arch=arch, memory=memory, twins=2).run((1, 1, 1), 1, 0)
    except ProgramFault as fault:
        return "undefined" in str(fault)
    return False
