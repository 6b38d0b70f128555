# SPDX-License-Identifier: Apache-2.0
"""Programs spread over XCDs, so that each gets neighbours: each runs once, where it should, and results stay right."""

from dataclasses import replace

import pytest
import torch
import triton
from support.attending import attend, check, expected, small

from pagedkv.attention import launch
from pagedkv.attention.kernel import remap_xcd

pytestmark = pytest.mark.device


@triton.jit
def places_kernel(out, programs, NUM_XCDS: triton.language.constexpr):
    """Write which program runs at each place."""
    place = triton.language.program_id(0)
    triton.language.store(out + place, remap_xcd(place, programs, NUM_XCDS))


@pytest.mark.parametrize("programs", [1, 7, 8, 22, 64, 65])
def test_every_program_runs_once_beside_those_of_its_die(programs, device):
    out = torch.full((programs,), -1, dtype=torch.int32, device=device)
    places_kernel[(programs,)](out, programs, NUM_XCDS=8)
    assert sorted(out.tolist()) == list(range(programs))
    each = programs // 8
    for die in range(8):
        assert out[: 8 * each][die::8].tolist() == list(range(die * each, (die + 1) * each))
    assert out[8 * each :].tolist() == list(range(8 * each, programs))


@pytest.fixture
def dies(monkeypatch):
    """dies(n): launches whose programs are spread over n dies."""
    plain = launch.tuning

    def use(count):
        def tuned(arch):
            data = plain(arch)
            decode, prefill = (replace(each, num_xcds=count) for each in (data.decode, data.prefill))
            return replace(data, decode=decode, prefill=prefill)

        monkeypatch.setattr(launch, "tuning", tuned)
        launch.choose.cache_clear()

    yield use
    launch.choose.cache_clear()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("query_lens", [[1] * 11, [5, 1, 130, 40]])
def test_attention_of_programs_on_several_dies_is_right(query_lens, splits, dies, device, record_property):
    data = small(device, query_lens, [40 + 13 * each for each in query_lens])
    dies(8)
    check(attend(data, num_splits=splits), expected(data), record_property)
