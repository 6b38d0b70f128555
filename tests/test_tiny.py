# SPDX-License-Identifier: Apache-2.0
"""One second that says whether the kernels work here at all: write a sequence, attend to it, gather it back."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton import language
from triton.runtime import interpreter

from pagedkv.device import INTERPRETED


def test_write_attend_gather(device):
    from pagedkv.attention.paged import paged_attention
    from pagedkv.cache.cache import PagedCache
    from pagedkv.cache.gather import gather_kv_cache
    from pagedkv.cache.write import write_kv_cache

    torch.manual_seed(0)
    pool = torch.full((3, 2, 16, 1, 32), float("nan"), device=device)
    cache = PagedCache(*pool.unbind(1))
    key, value = torch.randn(2, 20, 1, 32, device=device)
    slots = torch.cat([torch.arange(32, 48), torch.arange(0, 4)]).to(device)
    write_kv_cache(key, value, cache, slots)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    out = torch.full((1, 2, 32), float("nan"), device=device)
    query = torch.randn(1, 2, 32, device=device)
    lengths = {"seq_lens": ints(20), "query_start_loc": ints(0, 1), "max_query_len": 1, "max_seq_len": 20}
    table = ints(2, 0)[None]
    paged_attention(query, cache, out, block_table=table, **lengths, scale=0.2)
    weights = torch.softmax(torch.einsum("hd,kd->hk", query[0], key[:, 0]) * 0.2, dim=1)
    assert torch.allclose(out[0], weights @ value[:, 0], atol=1e-5, rtol=0)

    gathered = torch.full((2, 20, 1, 32), float("nan"), device=device)
    gather_kv_cache(
        cache,
        *gathered,
        table,
        ints(0, 20),
        torch.zeros(20, dtype=torch.int32, device=device),
        ints(0),
    )
    assert torch.equal(gathered, torch.stack([key, value]))


if INTERPRETED:  # elsewhere nothing is replaced

    def test_the_interpreter_replaces_the_language_per_launch(device, monkeypatch):
        """Not at each call of a device function, as Triton 3.6 does."""
        before, replaced, launched = dict(vars(language)), [], []
        replace, launch = interpreter._patch_builtin, interpreter.GridExecutor.__call__
        monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: (replaced.append(args[0]), replace(*args)))
        monkeypatch.setattr(
            interpreter.GridExecutor, "__call__", lambda *args, **more: (launched.append(1), launch(*args, **more))[1]
        )
        for _ in range(2):
            test_write_attend_gather(device)
            assert vars(language) == before
        assert 6 <= len(launched) <= replaced.count(language) <= 2 * len(launched)

    def test_what_the_interpreter_leaves_out_changes_no_bit():
        """Triton's own interpreter, in a process of its own, answers the same; what it refuses is refused."""
        as_it_comes = "from pagedkv import interpreter; interpreter.speed_up = lambda: None; "
        program = f"import sys; sys.path.append('tests'); {as_it_comes}import test_tiny; print(test_tiny.digest())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == digest()
        assert not interpreter.interpreter_builder.options.debug, "else its checks of overflow are read"
        block = language.core.block_type(language.float32, [4, 1])
        assert str(block) == "<['4', '1'], fp32>"
        assert block == language.core.block_type(language.float32, [4, 1])
        assert block != language.core.block_type(language.float32, [1, 4])
        for shape, error in (([], TypeError), ([3], ValueError), ([1.5], TypeError)):
            with pytest.raises(error):
                language.core.block_type(language.float32, shape)


def digest() -> str:
    """sha256 of what attention writes of plain, bent and quantised batches."""
    from support.attending import attend, small

    made = hashlib.sha256()
    for data, more in (
        ({}, {"num_splits": 3}),
        ({"dtype": "float16", "window": 20}, {"softcap": 5.0, "sliding_window": 20}),
        ({"quantised": "e4m3fn", "scales": "token", "layout_name": "shuffle"}, {}),
    ):
        lse = torch.full((43, 4), float("nan"))
        made.update(attend(small("cpu", [1, 5, 37], [40, 5, 90], **data), lse=lse, **more).numpy().tobytes())
        made.update(lse.numpy().tobytes())
    kinds = (torch.float32, torch.float16, torch.int8, torch.int32, torch.int64, torch.uint8)
    for first, second, number in itertools.product(kinds, kinds, (3, -3, 200, 2.5)):
        out = torch.zeros(4, 4)
        try:
            promote_kernel[(1,)](out, torch.arange(4).to(first), torch.arange(4).to(second), number)
        except interpreter.InterpreterError as error:  # a number that a type does not hold is refused
            made.update(str(error).encode())
        made.update(out.numpy().tobytes())
    return made.hexdigest()


@triton.jit
def promote_kernel(
    out_ptr,  # [4, 4], float32
    a_ptr,  # [4]
    b_ptr,  # [4]
    number: tl.constexpr,
):
    """Add, multiply, divide and compare operands of two types and shapes, and a number."""
    row = tl.arange(0, 4)
    a, b = tl.load(a_ptr + row), tl.load(b_ptr + row)
    both = a[:, None] * b[None, :] + tl.where(a[:, None] < b, a[:, None] - b, (b / (a + 1)).to(b.dtype))
    out = (both + (a * number)[:, None] + (number - b) + (a / number) + (row % 3)).to(tl.float32)
    tl.store(out_ptr + row[:, None] * 4 + row, out)
