# SPDX-License-Identifier: Apache-2.0
"""Layouts are pure integers; properties hold for all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import layout

extents = st.tuples(*(st.integers(1, most) for most in (4, 5, 3, 4)))


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
    """A K plane among others is native though not contiguous, interleaved blocks are not (vLLM PR 38502)."""
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
