# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 - constants of kernels
"""Triton's atomics, as the compiler writes them: sums and counters that lanes of all workgroups share.

What each atomic computes, and what races, is in the tests of single instructions.
"""

import pytest
import torch
import triton
import triton.language as tl

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
def number_kernel(counter, out):
    """out[program] = how many were before it."""
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


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


def test_programs_take_numbers(arch):
    counter, out = torch.tensor([7], dtype=torch.int32), torch.full((70,), -1, dtype=torch.int32)
    with amdgcn(arch):
        number_kernel[(70,)](counter, out)
    assert sorted(out.tolist()) == list(range(7, 77))
    assert counter.item() == 77
