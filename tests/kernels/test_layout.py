"""Layouts, slots, tile sizes and launches are pure integers; properties hold for all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import launch, layout, slots
from pagedkv.arch import ARCHES, UnsupportedArchError, limits, next_power_of_two, reading_waves, tile_tokens
from pagedkv.configurations import CONFIGURATIONS

extents = st.tuples(*(st.integers(1, most) for most in (4, 5, 3, 4)))
GPUS = [name for name in ARCHES if name != "interpreter"]


@given(st.sampled_from(layout.NAMES), extents, st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_a_layout_gives_every_channel_an_element_of_its_own(name, shape, padding, x):
    num_blocks, block_size, heads, head_size = shape
    shape = (num_blocks, block_size * x, heads, head_size * x)
    plan = layout.describe(name, *shape, padding=padding, x=x)
    cells = list(itertools.product(*map(range, shape)))
    elements = [view.element(*cell) for view in (plan.key, plan.value) for cell in cells]
    assert len(set(elements)) == 2 * len(cells)
    assert min(elements) >= 0
    assert max(elements) < plan.elements
    assert plan.key.strides[-1] == plan.value.strides[-1] == 1


def test_layouts_of_the_field():
    """Strides in the order of the packing's axes and V's offset, worked out by hand for 10 blocks of 16 x 2 x 64."""
    known = {
        "nhd": ((2048, 128, 64, 1), (2048, 128, 64, 1), 20480),
        "hnd": ((2048, 64, 1024, 1), (2048, 64, 1024, 1), 20480),
        "interleaved": ((4096, 128, 64, 1), (4096, 128, 64, 1), 2048),
        "packed": ((4096, 128, 2048, 1), (4096, 128, 2048, 1), 64),
        "native": ((2048, 1024, 128, 8, 1), (2048, 1024, 16, 1), 20480),
        "native-interleaved": ((4096, 1024, 128, 8, 1), (4096, 1024, 16, 1), 2048),
        "shuffle": ((2048, 1024, 128, 8, 1), (2048, 1024, 512, 8, 1), 20480),
        "shuffle-interleaved": ((4096, 1024, 128, 8, 1), (4096, 1024, 512, 8, 1), 2048),
    }
    assert set(known) == set(layout.NAMES)
    for name, (key_strides, value_strides, offset) in known.items():
        plan = layout.describe(name, 10, 16, 2, 64)
        assert (plan.key.offset, plan.key.strides) == (0, key_strides)
        assert (plan.value.offset, plan.value.strides) == (offset, value_strides)


@given(*(st.integers(0, most - 1) for most in (10, 16, 2, 64)))
def test_elements_of_the_packings(block, token, head, channel):
    """The formulas of vLLM's split_kv_cache and of aiter's reshape_and_cache, as the layouts' users state them."""
    native, shuffle = (layout.describe(name, 10, 16, 2, 64) for name in ("native", "shuffle"))
    key = block * 2048 + head * 64 * 16 + channel // 8 * 16 * 8 + token * 8 + channel % 8
    assert native.key.element(block, token, head, channel) == shuffle.key.element(block, token, head, channel) == key
    plane = 20480 + block * 2048 + head * 64 * 16
    assert native.value.element(block, token, head, channel) == plane + channel * 16 + token
    assert shuffle.value.element(block, token, head, channel) == plane + token // 8 * 64 * 8 + channel * 8 + token % 8


def test_native_layout_is_a_matter_of_the_block_stride():
    """Of vLLM PR 38502: a K plane among others is native though not contiguous, interleaved blocks are not."""
    native = {name for name in layout.NAMES if layout.describe(name, 10, 16, 2, 64).has_native_kv_cache_layout}
    assert native == {"nhd", "hnd", "native", "shuffle"}
    assert not layout.describe("native", 10, 16, 2, 64, padding=8).has_native_kv_cache_layout


@pytest.mark.parametrize(
    "wrong",
    [("x-packed", 1, 1, 1, 1), ("nhd", 0, 16, 1, 32), ("native", 1, 16, 1, 36), ("shuffle", 1, 18, 1, 32)],
    ids=["name", "extent", "channels", "tokens"],
)
def test_a_layout_that_does_not_exist(wrong):
    with pytest.raises(ValueError, match=r"expected|splits"):
        layout.describe(*wrong)


@given(st.integers(0, 2**40), st.integers(1, 4096))
def test_slot_round_trip(slot, block_size):
    assert slots.to_slot(*slots.from_slot(slot, block_size), block_size) == slot


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5, unique=True), st.integers(1, 40), st.data())
def test_slot_mapping_is_injective(blocks, block_size, data):
    first = data.draw(st.integers(0, len(blocks) * block_size))
    count = data.draw(st.integers(0, len(blocks) * block_size - first))
    mapping = slots.slot_mapping(blocks, first, count, block_size)
    assert len(set(mapping)) == count
    assert [slots.from_slot(s, block_size) for s in mapping] == [
        (blocks[p // block_size], p % block_size) for p in range(first, first + count)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: slots.from_slot(-1, 16),
        lambda: slots.to_slot(0, 16, 16),
        lambda: slots.to_slot(-1, 0, 16),
        lambda: slots.slot_mapping([4], 10, 7, 16),
    ],
    ids=["negative slot", "token beyond block", "negative block", "row too short"],
)
def test_slots_that_do_not_exist(wrong):
    with pytest.raises(IndexError):
        wrong()


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
    assert occupancy * max(1, shape["stages"] - 1) * 2 * tile * row_bytes <= unit.lds_bytes
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
    assert tile_tokens(limits("gfx950"), **shape, element_bytes=2) == 256
    assert tile_tokens(limits("gfx942"), **shape, element_bytes=4) == 32
    assert tile_tokens(limits("gfx942"), **(shape | {"head_size": 80}), element_bytes=2) == 64  # padded to 128


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [c for c in CONFIGURATIONS if c.op == "attention"], ids=lambda c: c.id)
def test_every_promised_case_has_a_launch(arch, case):
    chosen = launch.attention(
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
    assert chosen.tile >= 16
    assert case.num_kv_heads % chosen.heads == 0
    assert chosen.rows >= chosen.tokens * chosen.seqs * chosen.heads * case.num_q_heads // case.num_kv_heads
    assert chosen.splits == case.splits or case.splits is None


@given(st.lists(st.integers(0, 70), min_size=1, max_size=30), st.sampled_from([1, 2, 4, 16]), st.integers(0, 9))
def test_query_tiles_cover_every_query_once(query_lens, tokens, padding):
    starts = [0, *itertools.accumulate(query_lens)]
    first = [start // tokens + seq for seq, start in enumerate(starts)]
    assert first[-1] <= launch.query_tiles(starts[-1] + padding, len(query_lens), tokens, 1, decode=False)
    for seq, query_len in enumerate(query_lens):
        assert first[seq + 1] - first[seq] >= -(-query_len // tokens)


@given(st.integers(1, 10_000), st.integers(1, 5_000), st.integers(1, 304), st.integers(1, 8), st.integers(1, 16))
def test_splits_never_exceed_what_there_is_to_split(programs, max_tiles, units, per_unit, fewest):
    splits = launch.choose_splits(programs, max_tiles, units=units, per_unit=per_unit, fewest_tiles=fewest)
    assert splits == 1 or splits * fewest <= max_tiles
    assert splits == 1 or programs * (splits - 1) < units * per_unit


@pytest.mark.parametrize(
    ("programs", "splits"),
    [
        (8, 49),  # 392 of 396 places; 50 would be 400, a second round for four programs
        (64, 6),
        (256, 2),  # one partition would leave a third of the places empty
        (396, 1),
        (5000, 1),
    ],
)
def test_partitions_do_not_spill_into_another_round(programs, splits):
    assert launch.choose_splits(programs, 10_000, units=132, per_unit=3, fewest_tiles=1) == splits


def test_an_arch_without_data():
    with pytest.raises(UnsupportedArchError, match=r"tuning/gfx1100\.toml"):
        launch.tuning("gfx1100")


ROWS = "rows = 1\nwaves = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[write", "t.toml"),
        (f"[write]\n{ROWS}", "expected exactly"),
        (
            f"[write]\n{ROWS}wave = 2\n[gather]\n[reduce]\n[decode]\n[prefill]\n[mla]\n[mla_narrow]\n[mla_reduce]\n",
            "expected exactly the keys",
        ),
        (
            (
                "[write]\nrows = 0\nslice = 1\nwaves = 1\n[gather]\n[reduce]\n[decode]\n[prefill]\n"
                "[mla]\n[mla_narrow]\n[mla_reduce]\n"
            ),
            "integers >= 1",
        ),
    ],
    ids=["not toml", "missing table", "unknown key", "zero"],
)
def test_a_wrong_tuning_file(text, message):
    with pytest.raises(launch.TuningError, match=message):
        launch.parse(text, "t.toml")


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
