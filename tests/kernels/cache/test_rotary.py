# SPDX-License-Identifier: Apache-2.0
"""Rotation and write in one launch: Q and K against float64, the cache bit by bit against the plain write."""

from __future__ import annotations

import pytest
import torch
from support.mistakes import cache, check, ints
from support.pools import assert_same_bits, pool
from support.tolerances import UNIT_ROUNDOFF

from pagedkv import prepared
from pagedkv.cache import reference
from pagedkv.cache.rotary import rotate_and_write
from pagedkv.cache.warm_up import warm_up
from pagedkv.cache.write import write_kv_cache
from pagedkv.configurations import promised
from pagedkv.device import INTERPRETED, current
from pagedkv.launch import tuning

pytestmark = pytest.mark.device

CASES = [case for case in promised("write") if not (INTERPRETED and case.dtype == "bfloat16")]
STYLES = {"neox": (True, 1.0), "neox-half": (True, 0.5), "gptj": (False, 1.0), "gptj-quarter": (False, 0.25)}
"""Style of the pairs, and the part of a head that turns."""


def angles(max_position: int, rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines as a slice of wider rows, NaN around it."""
    frequency = 10000.0 ** -torch.linspace(0, 1, rotary_dim // 2 + 1)[:-1]
    angle = torch.arange(max_position)[:, None] * frequency
    wide = torch.full((max_position, rotary_dim + 24), float("nan"), dtype=dtype)
    wide[:, 8 : 8 + rotary_dim] = torch.cat((angle.cos(), angle.sin()), 1)
    return wide[:, 8 : 8 + rotary_dim]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_rotate_and_write(case, style, device):
    """Some tokens have no slot, or -1; Q, K and V are slices of one projection with NaN after it."""
    torch.manual_seed(case.head_size)
    neox, part = STYLES[style]
    rotary_dim = int(case.head_size * part) // 2 * 2
    heads, dtype = case.num_kv_heads, getattr(torch, case.dtype)
    got = pool(
        case.layout,
        (7, case.block_size, heads, case.head_size),
        case.dtype,
        device,
        quantised=case.quantised,
        scales=case.scales,
    )
    want = got.clone()
    fused = torch.randn(21, heads * 4 + 1, case.head_size).to(device, dtype)
    fused[:, -1] = float("nan")
    before = fused.clone()
    query, key, value, _ = fused.split([2 * heads, heads, heads, 1], 1)
    cos_sin = angles(50, rotary_dim, dtype if neox else torch.float32).to(device)
    positions = torch.randint(0, 50, (21, 2), device=device)[:, 0]
    slots = torch.randperm(7 * case.block_size)[:19].to(device)
    slots[::5] = -1
    rotate_and_write(query, key, value, got.cache, positions, cos_sin, slots, neox=neox, debug=True)

    turned = slice(0, 3 * heads)
    expected = reference.rotate(before[:, turned], positions, cos_sin, neox=neox)
    # Two products and their sum are rounded in fp32, each by no more than u of the products' sizes, then the result.
    sines = torch.arange(rotary_dim, device=device) >= rotary_dim // 2
    both = [cos_sin.abs(), torch.where(sines, -cos_sin.abs(), cos_sin.abs())]
    sizes = [reference.rotate(before[:, turned].abs(), positions, each, neox=neox) for each in both]
    bound = 2.01 * UNIT_ROUNDOFF["float32"] * torch.maximum(*sizes)
    bound += UNIT_ROUNDOFF[case.dtype] * expected.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    assert ((fused[:, turned].double() - expected).abs() <= bound).all()
    assert_same_bits(fused[..., rotary_dim:], before[..., rotary_dim:], "channels that do not turn")
    assert_same_bits(fused[:, 3 * heads :], before[:, 3 * heads :], "V and what lies after it")
    write_kv_cache(key, value, want.cache, slots)
    assert_same_bits(got.storage, want.storage, "storage of the pool")
    if case.quantised:
        for side in ("key_scale", "value_scale"):
            scales = (getattr(each.quantisation, side) for each in (got, want))
            assert_same_bits(*scales, side)


def test_a_warm_up_touches_nothing(device):
    """Every number of tokens that makes other code is launched, once, on rows of no sequence."""
    prepared.clear()
    case = CASES[0]
    kind = getattr(torch, case.dtype)
    cache = pool(case.layout, (7, case.block_size, case.num_kv_heads, case.head_size), case.dtype, device)
    heads = [case.num_kv_heads] * 3
    rows = torch.randn(5, sum(heads), case.head_size).to(device, kind)
    before = cache.clone(), rows.clone()
    places = torch.zeros(5, dtype=torch.int64, device=device)
    layer = (*rows.split(heads, 1), cache.cache, places, angles(50, case.head_size, kind).to(device))
    launches = warm_up(*layer, neox=True)
    assert 16 << (launches - 1) == max(16, tuning(current(rows).name).write.block_m)
    assert warm_up(*layer, neox=True) == 0, "a layer that looks the same"
    assert torch.equal(rows, before[1])
    assert_same_bits(cache.storage, before[0].storage, "storage of the pool")


def test_one_token_and_none(device):
    """A captured graph is padded: no token of it has a slot."""
    got = pool("nhd", (2, 16, 1, 32), "float32", device)
    cos_sin = torch.tensor([[0.0, 1.0]], device=device)
    for count in (0, 1):
        query, key = torch.ones(2, count, 1, 32, device=device)
        positions, none = torch.zeros(2, count, dtype=torch.int64, device=device)
        rotate_and_write(query, key, key.clone(), got.cache, positions, cos_sin, none[:0], neox=False)
    assert query[0, 0, :3].tolist() == key[0, 0, :3].tolist() == [-1.0, 1.0, 1.0]
    assert got.storage.isnan().all()


# Wrong arguments, the kind of the mistake, what its message names.
MISTAKES = {
    "tokens with fewer heads than the cache": ({"key": torch.zeros(5, 1, 64)}, "shape", "key"),
    "fewer queries than keys": ({"query": torch.zeros(4, 4, 64)}, "shape", "query"),
    "queries in another dtype": ({"query": torch.zeros(5, 4, 64).half()}, "dtype", "query"),
    "transposed queries": ({"query": torch.zeros(5, 64, 4).mT}, "stride", "query"),
    "32-bit positions": ({"positions": ints(0, 1, 2, 3, 4)}, "dtype", "positions"),
    "positions of three kinds": ({"positions": torch.zeros(3, 5, dtype=torch.int64)}, "shape", "positions"),
    "angles of uneven width": ({"cos_sin": torch.zeros(9, 63)}, "shape", "rotary_dim 63"),
    "angles wider than a head": ({"cos_sin": torch.zeros(9, 66)}, "shape", r"2 \.\. 64, the head size"),
    "no angles": ({"cos_sin": torch.zeros(9, 0)}, "shape", "rotary_dim 0"),
    "integer angles": ({"cos_sin": torch.zeros(9, 64).int()}, "dtype", "cos_sin"),
    "transposed angles": ({"cos_sin": torch.zeros(64, 9).T}, "stride", "cos_sin"),
    "angles elsewhere": ({"cos_sin": torch.zeros(9, 64, device="meta")}, "device", "cos_sin"),
    "position beyond the angles": (
        {"positions": torch.tensor([0, 8, 9, 1, 2]), "debug": True},
        "length",
        r"9 at index 2.*max_position",
    ),
    "scale below nothing": (
        {"cache": cache(dtype=torch.uint8, scales={"key_scale": -torch.ones(1)}), "debug": True},
        "scale",
        "key_scale: got -1.0",
    ),
    "slot beyond the pool": ({"slot_mapping": torch.tensor([0, -1, 48]), "debug": True}, "slot", "48 for token 2"),
}
if INTERPRETED:
    MISTAKES["bf16 under the interpreter"] = (
        {
            "query": torch.zeros(5, 4, 64).bfloat16(),
            "key": torch.zeros(5, 2, 64).bfloat16(),
            "value": torch.zeros(5, 2, 64).bfloat16(),
            "cache": cache(dtype=torch.bfloat16),
        },
        "dtype",
        "computes bf16 wrongly",
    )


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_rotate_and_write_refuses(case, device):
    right = {
        "query": torch.randn(5, 4, 64, device=device),
        "key": torch.randn(5, 2, 64, device=device),
        "value": torch.randn(5, 2, 64, device=device),
        "cache": cache(device),
        "positions": torch.arange(5, device=device),
        "cos_sin": torch.randn(9, 64, device=device),
        "slot_mapping": torch.arange(5, device=device),
        "neox": True,
    }
    check(lambda **wrong: rotate_and_write(**(right | wrong)), case, device)
