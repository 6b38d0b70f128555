# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 - constants of kernels
"""Triton's atomics, as the compiler writes them: sums, counters and bits that lanes of all workgroups share."""

import pytest
import torch
import triton
import triton.language as tl

from amdgcn.errors import ProgramFault
from amdgcn.launch import amdgcn

BLOCK = 128


@triton.jit
def add_kernel(
    x,  # [rows]
    y,  # [words]
    at,  # [rows] int64, which word of y
    rows,
    BLOCK: tl.constexpr,
    SEM: tl.constexpr,
):
    """y[at[k]] += x[k]"""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y + tl.load(at + k, k < rows, 0), tl.load(x + k, k < rows), mask=k < rows, sem=SEM)


@triton.jit
def split_kernel(x, y, columns, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    """y[k] = sum of x[:, k]: as splits of a product are added up."""
    k = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * columns + k, k < columns)
    if ATOMIC:
        tl.atomic_add(y + k, part, mask=k < columns, sem="relaxed")
    else:
        tl.store(y + k, tl.load(y + k, k < columns) + part, mask=k < columns)


@triton.jit
def number_kernel(counter, out):
    """out[program] = how many were before it."""
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


@triton.jit
def bits_kernel(tokens, seen, count, largest, BLOCK: tl.constexpr):
    """A bit of each token, how often each came, and the largest."""
    token = tl.load(tokens + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_or(seen + token // 32, tl.full((BLOCK,), 1, tl.int32) << (token % 32))
    tl.atomic_add(count + token, 1)
    tl.atomic_max(largest + token * 0, token)


@pytest.fixture
def arch(request):
    return request.config.getoption("amdgcn")


def instructions(session):
    return "\n".join(text.partition(".amdhsa_kernel")[0] for text in session.texts.values())


@pytest.mark.parametrize("sem", ["acq_rel", "relaxed"])
@pytest.mark.parametrize(
    ("dtype", "instruction"),
    [
        (torch.float32, "atomic_add_f32"),
        (torch.int32, "atomic_add "),
        (torch.bfloat16, "atomic_pk_add_bf16"),
        (torch.float16, "atomic_pk_add_f16"),
    ],
)
def test_rows_are_added_where_they_belong(dtype, instruction, sem, arch):
    """Small integers, so that every order of a sum gives the same float."""
    torch.manual_seed(1)
    rows = 300
    x, y = torch.randint(-4, 5, (rows,)).to(dtype), torch.randint(-4, 5, (40,)).to(dtype)
    at = torch.randint(0, 40, (rows,))
    want = y.double().index_add(0, at, x.double())
    with amdgcn(arch) as session:
        add_kernel[(3,)](x, y, at, rows, BLOCK=BLOCK, SEM=sem, num_warps=2)
    assert y.double().tolist() == want.tolist()
    assert instruction in instructions(session)


def test_splits_are_added_up_in_any_order(arch):
    torch.manual_seed(2)
    x, y = torch.randn(5, 100), torch.zeros(100)
    with amdgcn(arch):
        split_kernel[(5,)](x, y, 100, BLOCK=BLOCK, ATOMIC=True)
    assert (y - x.double().sum(0)).abs().max() <= 5 * x.abs().sum(0).max() * 2**-24


def test_splits_that_are_added_up_without_atomics_race(arch):
    x, y = torch.randn(5, 100), torch.zeros(100)
    with pytest.raises(ProgramFault, match="global race: two workgroups meet"), amdgcn(arch):
        split_kernel[(5,)](x, y, 100, BLOCK=BLOCK, ATOMIC=False)


def test_programs_take_numbers(arch):
    counter, out = torch.tensor([7], dtype=torch.int32), torch.full((70,), -1, dtype=torch.int32)
    with amdgcn(arch):
        number_kernel[(70,)](counter, out)
    assert sorted(out.tolist()) == list(range(7, 77))
    assert counter.item() == 77


def test_bits_counts_and_the_largest(arch):
    torch.manual_seed(3)
    tokens = torch.randint(0, 200, (2 * BLOCK,), dtype=torch.int32)
    seen, count, largest = (torch.zeros(size, dtype=torch.int32) for size in (7, 200, 1))
    with amdgcn(arch):
        bits_kernel[(2,)](tokens, seen, count, largest, BLOCK=BLOCK)
    assert count.tolist() == torch.bincount(tokens, minlength=200).tolist()
    assert [(seen[k // 32].item() >> k % 32) & 1 for k in range(200)] == [int(n > 0) for n in count]
    assert largest.item() == tokens.max()
