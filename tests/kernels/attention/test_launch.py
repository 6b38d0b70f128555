# SPDX-License-Identifier: Apache-2.0
"""Launches are pure integers: tiles fit the arch, and every promised case has a launch on every arch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedkv import device
from pagedkv.arch import ARCHES, UnsupportedArchError, copies_past_registers, limits, next_power_of_two
from pagedkv.attention import launch, merge
from pagedkv.attention.launch import reading_waves, tile_tokens
from pagedkv.configurations import CONFIGURATIONS
from pagedkv.errors import InvalidFileError
from pagedkv.launch import Tuning, parse, tuning

GPUS = [name for name in ARCHES if name != "interpreter"]

shapes = st.fixed_dictionaries(
    {
        "head_size": st.integers(4, 32).map(lambda n: 8 * n),
        "element_bytes": st.sampled_from([2, 4]),
        "rows": st.sampled_from([16, 32, 64]),
        "waves": st.sampled_from([4, 8]),
        "stages": st.integers(1, 4),
    }
)


@given(st.sampled_from(GPUS), shapes, st.integers(1, 3))
def test_a_tile_fits_the_arch(arch, shape, occupancy):
    """What must lie in LDS and in registers, counted from below: the tiles themselves and the accumulator."""
    unit = limits(arch)
    tile = tile_tokens(unit, **shape, occupancy=occupancy, most=1 << 20)
    assert tile == 0 or (tile >= 16 and tile & (tile - 1) == 0)
    row_bytes = next_power_of_two(shape["head_size"]) * shape["element_bytes"]
    assert occupancy * max(1, shape["stages"] - 1) * 2 * tile * row_bytes <= unit.unit_lds_bytes
    accumulator = shape["rows"] * next_power_of_two(shape["head_size"]) // (unit.lanes * shape["waves"])
    assert tile == 0 or accumulator < unit.registers
    # Less to hold never gives a smaller tile; a single stage has no loads in flight that could pass the registers by.
    fewer = shape | ({} if unit.async_copies else {"stages": 1})
    assert tile_tokens(unit, **fewer, occupancy=occupancy, most=1 << 20) >= tile
    assert tile_tokens(unit, **(shape | {"head_size": 32}), occupancy=occupancy, most=1 << 20) >= tile
    assert tile_tokens(unit, **shape, occupancy=occupancy, most=64) == min(tile, 64)


def test_tiles_worked_out_by_hand():
    """LDS binds: K and V of 128 tokens x 128 channels x 2 bytes are 64 KiB; gfx950 has 160."""
    shape = {"rows": 16, "waves": 8, "stages": 2, "occupancy": 1, "most": 4096, "head_size": 128}
    assert tile_tokens(limits("gfx942"), **shape, element_bytes=2) == 64  # 128 tokens fill 64 KiB and leave no weights
    assert tile_tokens(ARCHES["gfx950"], **shape, element_bytes=2) == 256
    assert tile_tokens(limits("gfx942"), **shape, element_bytes=4) == 32
    assert tile_tokens(limits("gfx942"), **(shape | {"head_size": 80}), element_bytes=2) == 64  # padded to 128


@pytest.mark.parametrize(
    ("arch", "version", "chosen", "past"),
    [
        ("gfx950", "3.6.0", False, False),
        ("gfx950", "3.6.0", True, True),
        ("gfx950", "3.8.0", None, True),
        ("gfx950", "3.10.1+git", None, True),
        ("gfx950", "3.8.0", False, False),
        ("gfx942", "3.8.0", None, False),
        ("gfx90a", "3.8.0", True, False),
    ],
)
def test_async_copies_depend_on_arch_and_triton(arch, version, chosen, past):
    assert copies_past_registers(arch, version, chosen) is past


def test_copies_past_the_registers_take_lds_for_every_stage():
    """LDS binds: two stages of K and V of 128 x 128 x 2 bytes are 128 KiB of 160."""
    shape = {"rows": 16, "waves": 8, "stages": 2, "occupancy": 1, "most": 4096, "head_size": 128, "element_bytes": 2}
    copying, plain = (dataclasses.replace(ARCHES["gfx950"], async_copies=each) for each in (True, False))
    assert (tile_tokens(copying, **shape), tile_tokens(plain, **shape)) == (128, 256)


@pytest.mark.parametrize(
    ("name", "version", "fewest"), [("gfx1201", "3.6.0", 1), ("gfx1201", "3.8.0", 2), ("gfx942", "3.8.0", 1)]
)
def test_no_program_of_one_wave_where_triton_aborts_on_it(monkeypatch, name, version, fewest):
    target = SimpleNamespace(backend="hip", arch=name)
    there = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(device.triton, "__version__", version)
    monkeypatch.setattr(device.triton.runtime.driver, "_active", there)
    step = {"num_tokens": 8, "num_seqs": 8, "max_query_len": 1, "max_kv_len": 4096, "num_splits": None}
    chosen = launch.choose(device._target(), head_size=64, element_bytes=2, num_q_heads=8, num_kv_heads=8, **step)
    assert chosen.waves == fewest


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [c for c in CONFIGURATIONS if c.op == "attention"], ids=lambda c: c.id)
def test_every_promised_case_has_a_launch(arch, case):
    chosen = launch.choose(
        limits(arch),
        head_size=case.head_size,
        element_bytes=4 if case.dtype == "float32" else 2,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        num_tokens=64,
        num_seqs=64 if case.phase == "decode" else 2,
        max_query_len=1 if case.phase == "decode" else 40,
        max_kv_len=8192,
        num_splits=case.splits,
    )
    assert chosen.block_n >= 16
    assert chosen.block_m >= chosen.block_q * case.num_q_heads // case.num_kv_heads
    assert chosen.num_splits == case.splits or case.splits is None


@given(
    st.sampled_from(GPUS),
    st.sampled_from([64, 128, 192, 256]),
    st.sampled_from([2, 4]),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 160),
)
@example("gfx942", 256, 4, None, True, 1)  # too much for the one wave of 16 rows
def test_any_number_of_query_heads_has_a_launch(arch, head_size, element_bytes, cache_bytes, packed, group):
    """What routing/candidates/pagedkv.toml says of `gqa`: those of one KV head that do not fit a program are shared."""
    for max_query_len in (1, 40):
        chosen = launch.choose(
            limits(arch),
            head_size=head_size,
            element_bytes=element_bytes,
            cache_bytes=cache_bytes,
            packing="native" if packed else "rows",
            num_q_heads=2 * group,
            num_kv_heads=2,
            num_tokens=80,
            num_seqs=2,
            max_query_len=max_query_len,
            max_kv_len=8192,
            num_splits=None,
        )
        assert group % chosen.head_tiles == 0
        assert chosen.block_m >= chosen.block_q * group // chosen.head_tiles


@pytest.mark.parametrize(
    ("changes", "tile", "rows", "waves", "stages"),
    [
        ({}, 128, 128, 8, 3),
        ({"block_size": 16}, 64, 64, 4, 3),
        ({"packing": "shuffle"}, 64, 64, 4, 2),
        ({"packing": "native"}, 128, 128, 8, 2),
        ({"cache_bytes": 1}, 128, 128, 8, 2),
        ({"element_bytes": 4}, 32, 64, 4, 3),  # nothing is measured with elements of four bytes
        ({"head_size": 96}, 128, 128, 8, 3),  # padded to 128 channels
        ({"head_size": 192}, 64, 128, 8, 2),
        ({"head_size": 256, "block_size": 16}, 64, 128, 8, 2),
        ({"head_size": 64}, 64, 128, 4, 3),
        ({"max_kv_len": 2048}, 32, 128, 8, 3),
        ({"max_kv_len": 1024, "num_tokens": 1024, "num_seqs": 1}, 128, 128, 8, 3),
        ({"max_kv_len": 2048, "batch_invariant": True}, 128, 128, 8, 3),  # what a sequence gets follows from no bound
        ({"max_query_len": 8}, 64, 32, 4, 3),
        ({"max_query_len": 8, "batch_invariant": True}, 128, 128, 8, 3),
        ({"max_query_len": 9}, 128, 128, 8, 3),
        ({"max_query_len": 1}, 64, 16, 4, 2),
        ({"max_query_len": 1, "num_tokens": 64, "num_seqs": 64}, 32, 16, 4, 5),
        ({"max_query_len": 1, "batch_invariant": True}, 32, 16, 4, 5),
        ({"max_query_len": 1, "num_splits": 4}, 32, 16, 4, 5),
        ({"max_query_len": 1, "packing": "native"}, 128, 16, 4, 2),
        ({"max_query_len": 1, "packing": "native", "block_size": 16}, 32, 16, 4, 5),
        ({"max_query_len": 1, "head_size": 256}, 32, 16, 2, 5),
    ],
    ids=str,
)
def test_a_measured_launch_is_taken_where_its_conditions_hold(changes, tile, rows, waves, stages):
    shape = {"head_size": 128, "element_bytes": 2, "block_size": 784, "max_query_len": 4096, "max_kv_len": 16384}
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "num_tokens": 4096, "num_seqs": 4, "num_splits": None}
    chosen = launch.choose(limits("sm_90"), **(heads | shape | changes))
    assert (chosen.block_n, chosen.block_m, chosen.waves, chosen.stages) == (tile, rows, waves, stages)
    assert chosen.head_tiles == 1


@pytest.mark.parametrize(
    ("changes", "maxnreg", "pre_load_v", "load_k_by_token"),
    [
        ({"max_kv_len": 512, "max_query_len": 512, "num_tokens": 8192, "num_seqs": 16}, 128, False, False),
        ({"cache_bytes": 1}, 0, True, False),
        ({"packing": "native", "block_size": 784}, 0, False, True),
        ({"packing": "shuffle", "block_size": 784}, 0, False, False),
        ({}, 0, False, False),
    ],
    ids=str,
)
def test_a_measured_launch_decides_loads_and_registers(changes, maxnreg, pre_load_v, load_k_by_token):
    shape = {"head_size": 128, "element_bytes": 2, "block_size": 16, "max_query_len": 4096, "max_kv_len": 4096}
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "num_tokens": 16384, "num_seqs": 4, "num_splits": None}
    arch = limits("sm_90")
    chosen = launch.choose(arch, **(heads | shape | changes))
    assert (chosen.pre_load_v, chosen.load_k_by_token) == (pre_load_v, load_k_by_token)
    assert dict(chosen.compiler_options) == ({"maxnreg": maxnreg} if maxnreg else {})


LAYERS = [
    {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 2048},
    {"num_q_heads": 16, "num_kv_heads": 2, "head_size": 256, "block_size": 784},
    {"num_q_heads": 24, "num_kv_heads": 4, "head_size": 64, "block_size": 544},
    {"num_q_heads": 32, "num_kv_heads": 32, "head_size": 80, "block_size": 16},
    {"num_q_heads": 64, "num_kv_heads": 1, "head_size": 192, "block_size": 16},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 784, "packing": "native"},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 784, "packing": "shuffle"},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, "cache_bytes": 1},
    {"num_q_heads": 16, "num_kv_heads": 2, "head_size": 256, "block_size": 784, "cache_bytes": 1},
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "-".join(map(str, layer.values())))
@pytest.mark.parametrize("arch", GPUS)
def test_a_layer_has_at_most_eight_launches_whatever_the_batch(arch, layer):
    """Each is compiled: what differs in nothing but how many partitions there are is one."""
    found = set()
    lengths = [1, 16, *(n + more for n in (1 << k for k in range(6, 18)) for more in (-1, 0, 1))]
    for seqs, queries in itertools.product(
        (1, 2, 3, 7, 8, 33, 64, 256), (1, 2, 3, 4, 5, 8, 13, 16, 32, 100, 512, 8192)
    ):
        for length in lengths:
            bounds = {"max_query_len": next_power_of_two(queries) if queries > 1 else 1, "num_seqs": seqs}
            asked = bounds | {"num_tokens": seqs * queries, "max_kv_len": launch.bound(length), "num_splits": None}
            chosen = launch.choose(limits(arch), element_bytes=2, **layer, **asked)
            found.add((queries == 1, dataclasses.replace(chosen, num_splits=min(chosen.num_splits, 2))))
    assert 2 <= len(found) <= 8


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_bound_holds_and_is_close_and_few(length, other):
    found = launch.bound(length)
    assert length <= found <= length * 1.125
    assert launch.bound(found) == found
    assert length > other or found <= launch.bound(other)


def test_bounds_are_few():
    assert len({launch.bound(n) for n in range(1, (1 << 17) + 1)}) == 64 + 8 * 11


@pytest.mark.parametrize("splits", [1, 7, 8, 9, 64, 65, 128])
def test_what_a_reduce_loads_at_once_takes_few_values(splits):
    at_once = merge.reduced_at_once(splits, 64, decode=True, batch_invariant=False)
    assert at_once in {8, 16, 32, 64}
    assert at_once >= min(splits, 64)
    assert merge.reduced_at_once(splits, 64, decode=False, batch_invariant=False) == 8
    assert merge.reduced_at_once(splits, 4, decode=True, batch_invariant=False) == 4


@pytest.mark.parametrize(
    ("arch", "at_once", "channels", "waves"),
    [("sm_90", 8, 256, 1), ("sm_90", 16, 256, 4), ("sm_90", 64, 128, 2), ("sm_90", 64, 32, 1), ("gfx942", 32, 256, 4)],
)
def test_a_wide_reduce_has_waves_for_its_channels(arch, at_once, channels, waves):
    """One wave would hold 64 partitions of 256 channels in 512 registers a lane (H200: 11.4 us instead of 2.5)."""
    assert tuning(arch).reduce.waves_of(at_once, channels) == waves


def test_the_device_of_a_tensor_is_asked_and_not_the_current_one(monkeypatch):
    """A host with an MI308X and an MI355X: the launch of a tensor takes its device's arch and compute units."""
    units = (80, 256)
    at = [0]

    @contextlib.contextmanager
    def on(index):
        at.append(index)
        yield
        at.pop()

    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(device, "_target", lambda: limits(("gfx942", "gfx950")[at[-1]]))
    monkeypatch.setattr(device.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(device.torch.cuda, "current_device", lambda: 0)
    properties = [SimpleNamespace(multi_processor_count=each) for each in units]
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(device.torch.cuda, "device", on)
    device._installed.cache_clear()
    found = device.current(SimpleNamespace(is_cuda=True, get_device=lambda: 1))
    assert (found.name, found.compute_units) == ("gfx950", 256)
    assert device.current() == dataclasses.replace(limits("gfx942"), compute_units=80)
    device._installed.cache_clear()


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30), st.sampled_from([1, 2, 4, 16]), st.integers(0, 9))
def test_query_tiles_cover_every_query_once(query_lens, tokens, padding):
    starts = [0, *itertools.accumulate(query_lens)]
    first = [start // tokens + seq for seq, start in enumerate(starts)]
    assert first[-1] <= launch.query_tiles(starts[-1] + padding, len(query_lens), tokens, decode=False)
    for seq, query_len in enumerate(query_lens):
        assert first[seq + 1] - first[seq] >= -(-query_len // tokens)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30), st.sampled_from([1, 2, 4, 16]), st.integers(0, 70))
def test_no_more_tiles_than_are_live_have_a_query(query_lens, tokens, loose):
    live = launch.live_tiles(sum(query_lens), len(query_lens), max(query_lens) + loose, tokens, decode=False)
    assert sum(-(-each // tokens) for each in query_lens) <= live
    assert live <= launch.query_tiles(sum(query_lens), len(query_lens), tokens, decode=False)


@pytest.mark.parametrize(("arch", "splits"), [("sm_90", 2), ("gfx90a", 2), ("gfx942", 4), ("gfx950", 4)])
def test_programs_without_a_query_do_not_fill_the_device(arch, splits):
    """Two tokens of each sequence are one tile, of two that the grid has for it (a tile may begin anywhere)."""
    shape = {"head_size": 256, "element_bytes": 2, "block_size": 784, "max_query_len": 2, "max_kv_len": 8192}
    heads = {"num_q_heads": 16, "num_kv_heads": 2, "num_tokens": 64, "num_seqs": 32, "num_splits": None}
    assert launch.choose(limits(arch), **shape, **heads).num_splits == splits


@given(st.integers(1, 10_000), st.integers(1, 5_000), st.integers(1, 304), st.integers(1, 8), st.integers(1, 16))
def test_splits_never_exceed_what_there_is_to_split(programs, max_tiles, units, per_unit, fewest):
    splits = launch.choose_splits(programs, max_tiles, units=units, per_unit=per_unit, fewest_tiles=fewest)
    assert splits == 1 or splits * fewest <= max_tiles
    assert splits == 1 or programs * (splits - 1) < units * per_unit


@pytest.mark.parametrize(
    ("programs", "per_unit", "at_once", "splits"),
    [
        (8, 3, 128, 49),  # 392 of 396 places; 50 would be 400, a second round for four programs
        (64, 3, 128, 6),
        (240, 3, 128, 2),  # one partition would leave four of ten places empty
        (256, 3, 128, 1),
        (396, 3, 128, 1),
        (5000, 3, 128, 1),
        (8, 4, 64, 64),  # 512 of 528 places, and the reduce loads all at once; 66 would be all places
        (4, 4, 64, 128),  # 64 would leave half of the places empty
        (9, 4, 64, 58),
    ],
)
def test_partitions_fit_one_round_and_one_load_of_the_reduce(programs, per_unit, at_once, splits):
    knobs = {"units": 132, "per_unit": per_unit, "fewest_tiles": 1, "at_once": at_once}
    assert launch.choose_splits(programs, 10_000, **knobs) == splits


def test_an_arch_without_data():
    with pytest.raises(UnsupportedArchError, match=r"tuning/gfx1030\.toml"):
        tuning("gfx1030")


TABLES = "".join(f"[{field.name}]\n" for field in dataclasses.fields(Tuning) if field.name != "write")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[write", "t.toml is not TOML"),
        ("[write]\nblock_m = 1\n", "got the tables write; expected every one of write, gather"),
        (
            f"[write]\nblock_m = 1\nwave = 2\n{TABLES}",
            r"\[write\]: expected the keys block_d, block_m, waves; got block_m, wave",
        ),
        (
            f"[write]\nblock_m = 0\nblock_d = 1\nwaves = 1\n{TABLES}",
            r"\[write\]: block_m: got 0; expected int of at least 1",
        ),
        (f"[write]\n{TABLES}[decode.where]\nblock_m = 1\n", r"\[\[decode.where\]\]: got .*; expected tables in double"),
        (
            f"[write]\n{TABLES}[[prefill.where]]\nblock_m = 1\n",
            r"\[\[prefill.where\]\] 1: expected the keys .*; got block_m",
        ),
    ],
    ids=["not toml", "missing table", "unknown key", "zero", "one table", "no reason"],
)
def test_a_wrong_tuning_file(text, message):
    with pytest.raises(InvalidFileError, match=message):
        parse(text, "t.toml")


@pytest.mark.parametrize(
    ("arch", "tile", "head_size", "element_bytes", "waves"),
    [
        ("gfx950", 32, 32, 2, 2),  # 2048 B of K are 16 B for 128 lanes
        ("gfx950", 32, 128, 2, 4),  # enough for 8 waves; the tuning data asks for 4
        ("gfx942", 16, 32, 2, 1),
        ("sm_90", 32, 40, 2, 4),  # 40 channels are padded to 64
        ("interpreter", 16, 32, 4, 4),
    ],
)
def test_every_lane_of_every_wave_can_read_16_bytes(arch, tile, head_size, element_bytes, waves):
    shape = {"tile": tile, "head_size": head_size, "element_bytes": element_bytes}
    assert reading_waves(limits(arch), **shape, most=4) == waves
