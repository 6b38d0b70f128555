# SPDX-License-Identifier: Apache-2.0
"""Two oracles: torch's float8 dtypes, and the definition of the formats in exact fractions (pagedkv.fp8.reference)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedkv.device import INTERPRETED
from pagedkv.fp8 import reference
from pagedkv.fp8.formats import FORMATS, decode, encode

pytestmark = [pytest.mark.device, pytest.mark.parametrize("name", FORMATS)]

FULL_NAN = (0x7FC00000, 0x7F800001, 0x7FFFFFFF)  # quiet, signalling, every bit


@triton.jit
def _decode_kernel(codes, out, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, decode(tl.load(codes + at), FORMAT, out.dtype.element_ty))


@triton.jit
def _encode_kernel(numbers, out, count, FORMAT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, encode(tl.load(numbers + at, mask=at < count, other=0.0), FORMAT), mask=at < count)


def encoded(numbers: torch.Tensor, name: str, device: str) -> torch.Tensor:
    """Codes of `[n]` fp32 numbers by the kernel function, on the CPU."""
    size = 1 << 18 if INTERPRETED else 1024  # few programs, or few elements for each lane
    out = torch.full(numbers.shape, 0x55, dtype=torch.uint8, device=device)
    count = numbers.numel()
    _encode_kernel[(triton.cdiv(count, size),)](numbers.to(device), out, count, FORMAT=name, SIZE=size)
    return out.cpu()


def by_torch(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Codes by torch's cast of the clamped numbers; a clamp keeps NaN."""
    form = FORMATS[name]
    return numbers.clamp(-form.max, form.max).to(form.dtype).view(torch.uint8)


def assert_same_codes(got: torch.Tensor, want: torch.Tensor, numbers: torch.Tensor) -> None:
    wrong = (got != want).nonzero().flatten().tolist()
    shown = [f"{numbers[i].item()!r}: got {got[i]:#04x}, expected {want[i]:#04x}" for i in wrong[:5]]
    assert not wrong, f"{len(wrong)} of {len(numbers)} codes differ: {'; '.join(shown)}"


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def decisive(name: str) -> torch.Tensor:
    """`[n]` fp32: all values, the midpoints between neighbours, the fp32 numbers next to each, and both signs."""
    values = reference.values(name)[:0x80]
    values = values[values.isfinite()]
    beyond = 2 * values[-1] - (values[-1] + values[-2]) / 2  # where an unclamped format would round up
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, beyond[None]]).float()
    assert torch.equal(points[: len(values)].double(), values)
    infinity = torch.tensor(float("inf"))
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    return torch.cat([points, -points])


def special() -> torch.Tensor:
    """`[n]` fp32: zeros, infinities, NaN of several payloads, subnormals, the largest number; both signs."""
    positive = (0, 0x7F800000, *FULL_NAN, 1, 0x400000, 0x7FFFFF, 0x800000, 0x7F7FFFFF)
    return from_bits(*positive, *(bits - 0x80000000 for bits in positive))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decode_every_code(name, dtype, device):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.full((256,), 7.0, dtype=dtype, device=device)
    _decode_kernel[(1,)](codes.to(device), out, FORMAT=name, SIZE=256)
    got = out.cpu().double()
    torch.testing.assert_close(got, reference.values(name), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, codes.view(FORMATS[name].dtype).double(), rtol=0, atol=0, equal_nan=True)
    zeros = got == 0
    assert torch.equal(torch.signbit(got[zeros]), codes[zeros] == 0x80), "a zero has the wrong sign"


def test_encode_where_rounding_decides(name, device):
    numbers = torch.cat([decisive(name), special()])
    got = encoded(numbers, name, device)
    assert_same_codes(got, by_torch(numbers, name), numbers)
    assert_same_codes(got, reference.encode(numbers, name), numbers)


def test_encode_a_million_numbers(name, device):
    """Log-uniform from far below the smallest subnormal to far beyond the largest value, of both signs."""
    generator = torch.Generator().manual_seed(8)
    numbers = torch.exp2(torch.empty(1_000_000).uniform_(-30, 20, generator=generator))
    numbers *= torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
    got = encoded(numbers, name, device)
    assert_same_codes(got, by_torch(numbers, name), numbers)
    assert_same_codes(got, reference.encode(numbers, name), numbers)


def test_formats_table(name):
    """`max` is the largest finite value by definition."""
    assert FORMATS[name].max == reference.largest(name) == torch.finfo(FORMATS[name].dtype).max
