# SPDX-License-Identifier: Apache-2.0
"""What launch data may change of how a tile is loaded: V before the scores, a packed K token by token."""

from dataclasses import replace

import pytest
from support.attending import HALF, attend, check, expected, small

from pagedkv import prepared
from pagedkv.attention import paged

pytestmark = pytest.mark.device

STEPS = {"prefill": ([40, 3, 70], [40, 90, 133]), "decode": ([1, 1], [17, 90])}
POOLS = {
    "rows": {},
    "native": {"layout_name": "native"},
    "native of odd blocks": {"layout_name": "native", "block_size": 13},
    "shuffle": {"layout_name": "shuffle"},
    "padded channels": {"layout_name": "native", "head_size": 80},
    "native fp8": {"layout_name": "native", "quantised": "e4m3fn"},
    "fp8": {"quantised": "e4m3fn"},
    "fp8, scales of tokens": {"quantised": "e4m3fn", "scales": "token"},
}


@pytest.fixture
def forced(monkeypatch):
    """forced(...): launches with these fields; returns what they were without them."""

    def force(**fields):
        chosen, found = paged.choose, []

        def choose(*args, **shape):
            found.append(chosen(*args, **shape))
            return replace(found[-1], **fields)

        monkeypatch.setattr(prepared, "_calls", {})
        monkeypatch.setattr(paged, "choose", choose)
        return found

    return force


@pytest.mark.parametrize("option", ["pre_load_v", "load_k_by_token"])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_right_however_a_tile_is_loaded(step, pool, splits, option, forced, device, record_property):
    data = small(device, *STEPS[step], **({"dtype": HALF} | POOLS[pool]))
    launches = forced(**{option: True})
    check(attend(data, num_splits=splits), expected(data), record_property)
    assert launches


@pytest.mark.parametrize("option", ["pre_load_v", "load_k_by_token"])
def test_a_window_with_a_cap_is_right_however_a_tile_is_loaded(option, forced, device, record_property):
    data = small(device, [40, 70], [90, 133], dtype=HALF, layout_name="native", window=20)
    forced(**{option: True})
    options = {"sliding_window": 20, "softcap": 3.0}
    check(attend(data, **options), expected(data, **options), record_property)
