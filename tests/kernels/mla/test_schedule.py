# SPDX-License-Identifier: Apache-2.0
"""The MLA schedule is pure integers: properties over random steps, planted wrong schedules, and the device's tables."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.planted import complaint, instead, must_be_noticed, planted

from pagedkv.arch import ARCHES, UnsupportedArchError, limits, next_power_of_two
from pagedkv.mla import launch as mla_launch
from pagedkv.mla import schedule as mla_schedule
from pagedkv.mla.schedule import Schedule, ScheduleError, Work, check, plan
from pagedkv.mla.tables import allocate, fill

length = st.one_of(st.sampled_from([0, 1, 15, 16, 17]), st.integers(0, 5000))
steps = st.lists(st.tuples(length, st.sampled_from([0, 1, 1, 1, 4])), min_size=1, max_size=20)
knobs = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 60),
        "granularity": st.sampled_from([16, 32, 64]),
        "fixed": st.integers(0, 6),
        "least": st.integers(0, 9),
    }
)


@given(steps, knobs)
def test_a_schedule_covers_every_token_once_within_its_bounds(step, knobs):
    seq_lens, query_lens = zip(*step, strict=True)
    schedule = plan(seq_lens, query_lens, **knobs)
    check(schedule, seq_lens, query_lens, granularity=knobs["granularity"])
    assert {work.seq for work in schedule.works} == {s for s, (n, q) in enumerate(step) if n and q}


@given(steps, knobs)
def test_no_group_has_more_than_its_share(step, knobs):
    """A share of the line, one work item that another group began, and one remainder that was not worth its own."""
    seq_lens, query_lens = zip(*step, strict=True)
    granularity, fixed = knobs["granularity"], knobs["fixed"]
    schedule = plan(seq_lens, query_lens, **knobs)
    line = sum(-(-n // granularity) + fixed for n, q in step if n and q)
    share = max(-(-line // knobs["groups"]), knobs["least"], 1)
    for begin, end in pairwise(schedule.work_indptr):
        works = schedule.works[begin:end]
        assert sum(-(-(w.kv_end - w.kv_begin) // granularity) + fixed for w in works) <= share + 2 * fixed


@pytest.mark.parametrize(
    ("step", "knobs", "works", "work_indptr", "reduce_indptr"),
    [
        # 100 tokens are 7 units, 30 are 2: a line of 9, cut after 5.
        (([100, 30], [1, 1]), {"groups": 2}, [(0, 0, 80, 0), (0, 80, 100, 1), (1, 0, 30, -1)], [0, 1, 3], [0, 2, 2]),
        # With 2 units for each work item the line is 13, cut after 7, where 5 units of sequence 0 are done: the other 2
        # are worth a work item, with 3 units of fixed cost they are not (15, cut after 8).
        (
            ([100, 30], [1, 1]),
            {"groups": 2, "fixed": 2},
            [(0, 0, 80, 0), (0, 80, 100, 1), (1, 0, 30, -1)],
            [0, 1, 3],
            [0, 2, 2],
        ),
        (([100, 30], [1, 1]), {"groups": 2, "fixed": 3}, [(0, 0, 100, -1), (1, 0, 30, -1)], [0, 1, 2], [0, 0, 0]),
        # Not worth more than one group of the four.
        (([100, 30], [1, 1]), {"groups": 4, "least": 9}, [(0, 0, 100, -1), (1, 0, 30, -1)], [0, 2, 2, 2, 2], [0] * 3),
        (([0, 40, 9], [1, 0, 1]), {"groups": 2}, [(2, 0, 9, -1)], [0, 1, 1], [0] * 4),
        (([], []), {"groups": 3}, [], [0] * 4, [0]),
    ],
)
def test_schedules_worked_out_by_hand(step, knobs, works, work_indptr, reduce_indptr):
    expected = Schedule(tuple(Work(*work) for work in works), tuple(work_indptr), tuple(reduce_indptr))
    assert plan(*step, **knobs) == expected


GOOD = plan([100, 30, 0], [1, 1, 1], groups=2)
"""Works (0, 0, 80, 0), (0, 80, 100, 1), (1, 0, 30, -1); work_indptr 0 1 3; reduce_indptr 0 2 2 2."""


def changed(index, **fields):
    works = list(GOOD.works)
    works[index] = dataclasses.replace(works[index], **fields)
    return dataclasses.replace(GOOD, works=tuple(works))


COVERAGE = re.compile("expected (a partition of|0 <= seq)")
REDUCE = re.compile("got partial results .* expected")
BOUND = re.compile("^(work|reduce)_indptr: got .* expected")
WRONG = {
    "a gap": (changed(0, kv_end=64), COVERAGE),
    "an overlap": (changed(1, kv_begin=64), COVERAGE),
    "the last token is lost": (changed(1, kv_end=99), COVERAGE),
    "beyond the sequence": (changed(1, kv_end=112), COVERAGE),
    "nothing to do": (changed(2, kv_begin=30), COVERAGE),
    "work for an empty sequence, none for another": (changed(2, seq=2), COVERAGE),
    "no such sequence": (changed(2, seq=3), COVERAGE),
    "one part of two writes the output": (changed(1, partial=-1), REDUCE),
    "two results in one place": (changed(1, partial=0), REDUCE),
    "a result that is not merged": (changed(1, partial=2), REDUCE),
    "a single work item that does not write the output": (changed(2, partial=2), REDUCE),
    "merged into another sequence": (dataclasses.replace(GOOD, reduce_indptr=(0, 0, 2, 2)), REDUCE),
    "a sequence without bounds": (dataclasses.replace(GOOD, reduce_indptr=(0, 2, 2)), BOUND),
    "more partial results than bound": (dataclasses.replace(GOOD, reduce_indptr=(0, 3, 3, 3)), BOUND),
    "the last work item has no group": (dataclasses.replace(GOOD, work_indptr=(0, 1, 2)), BOUND),
    "work items that are not there": (dataclasses.replace(GOOD, work_indptr=(0, 4, 3)), BOUND),
    "all work twice": (dataclasses.replace(GOOD, works=GOOD.works * 2, work_indptr=(0, 3, 6)), BOUND),
}


@planted(WRONG)
def test_a_wrong_schedule_is_refused(fault):
    look = lambda schedule: complaint(ScheduleError, check, schedule, [100, 30, 0], [1, 1, 1])  # noqa: E731
    must_be_noticed(fault, look, instead(fault.change), GOOD)


def test_cuts_off_the_granularity_are_refused():
    with pytest.raises(ScheduleError, match="multiples of 32"):
        check(GOOD, [100, 30, 0], [1, 1, 1], granularity=32)


def deepseek(element_bytes: int, num_heads: int, max_query_len: int) -> mla_launch.MlaShape:
    sizes = {"latent_size": 512, "rope_size": 64, "element_bytes": element_bytes}
    return mla_launch.MlaShape(**sizes, num_heads=num_heads, max_query_len=max_query_len)


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.matrix != "wmma"])
@pytest.mark.parametrize("max_query_len", [1, 2, 4])
def test_every_row_has_a_place_for_1_to_128_heads(arch, max_query_len):
    """Sizes come from the rows that are launched, padded and folded, whatever the number of heads."""
    for num_heads in range(1, 129):
        launch = mla_launch.choose(limits(arch), deepseek(2, num_heads, max_query_len))
        rows = num_heads * max_query_len
        assert launch.block_m >= 16
        assert launch.block_m == next_power_of_two(launch.block_m)
        assert launch.block_m * (launch.row_tiles - 1) < rows <= launch.block_m * launch.row_tiles
        assert launch.groups >= 1
        assert launch.block_n % mla_schedule.GRANULARITY == 0
        bound = mla_schedule.sizes(64, launch.groups)
        schedule = plan([8192] * 64, [max_query_len] * 64, groups=launch.groups, granularity=launch.block_n)
        assert len(schedule.works) <= bound.works
        # Partial results grow with the programs and not with programs times sequences.
        assert bound.partials * launch.row_tiles <= 2 * launch.groups * launch.row_tiles


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_rdna_is_refused_by_name(arch):
    with pytest.raises(UnsupportedArchError, match=f"MLA decode does not run on {arch}: .* gfx942"):
        mla_launch.choose(limits(arch), deepseek(2, 16, 1))


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if arch.matrix not in ("none", "wmma")])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_an_mla_tile_fits_the_arch(arch, element_bytes, rows):
    """What must lie in LDS and in registers, counted from below: a staged tile and the accumulator."""
    unit = limits(arch)
    shape = deepseek(element_bytes, 16, 1)
    for stages in (1, 2, 3):
        for occupancy in (1, 2):
            bounds = {"rows": rows, "waves": 8, "stages": stages, "occupancy": occupancy}
            tile = mla_launch.tile_tokens(unit, shape, **bounds, most=1 << 20)
            assert tile == 0 or (tile >= 16 and tile & (tile - 1) == 0)
            assert occupancy * (stages - 1) * tile * 576 * element_bytes <= unit.lds_bytes
            assert tile == 0 or rows * 512 // (unit.lanes * 8) < unit.registers // occupancy


@pytest.mark.device
@pytest.mark.parametrize("programs", [1, 7, 24])
@pytest.mark.parametrize("fixed", [0, 3])
def test_device_tables_equal_the_plan(programs, fixed, device):
    """More sequences than one chunk, empty ones among them; rows of the table that no work item owns stay untouched."""
    gen = torch.Generator().manual_seed(programs)
    for num_seqs, longest in ((1, 3000), (5, 4000), (300, 200)):
        seq_lens = torch.randint(0, longest, (num_seqs,), generator=gen, dtype=torch.int32)
        seq_lens[torch.rand(num_seqs, generator=gen) < 0.2] = 0
        query_lens = torch.randint(0, 4, (num_seqs,), generator=gen)
        starts = torch.tensor([0, *query_lens.tolist()]).cumsum(0).int()
        like = torch.empty(1, device=device)
        sizes = {"latent_size": 64, "rope_size": 16, "element_bytes": 4, "num_heads": 2, "max_query_len": 3}
        tables = allocate(like, mla_launch.MlaShape(**sizes, programs=programs), num_seqs)
        launch = dataclasses.replace(tables.launch, block_n=16, fixed_tiles=fixed, min_tiles=4)
        tables = dataclasses.replace(tables, launch=launch)
        for table in (tables.works, tables.work_indptr, tables.reduce_indptr):
            table.fill_(-7)
        fill(tables, seq_lens.to(device), starts.to(device))
        got, lists = tables.schedule(), (seq_lens.tolist(), query_lens.tolist())
        assert got == plan(*lists, groups=launch.groups, fixed=fixed, least=4)
        check(got, *lists)
        assert (tables.works[got.work_indptr[-1] :] == -7).all()
