# SPDX-License-Identifier: Apache-2.0
"""One second that says whether the kernels work here at all: write a sequence, attend to it, gather it back."""

from __future__ import annotations

import torch
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

    def test_the_interpreter_replaces_the_language_once_a_launch_and_puts_it_back(device, monkeypatch):
        """Not at each call of a device function, as Triton 3.6 does."""
        before, replaced, launched = dict(vars(language)), [], []
        replace, launch = interpreter._patch_builtin, interpreter.GridExecutor.__call__
        monkeypatch.setattr(interpreter, "_patch_builtin", lambda *args: (replaced.append(args[0]), replace(*args)))
        monkeypatch.setattr(
            interpreter.GridExecutor, "__call__", lambda *args, **more: (launched.append(1), launch(*args, **more))
        )
        for _ in range(2):
            test_write_attend_gather(device)
            assert vars(language) == before
        assert 6 <= len(launched) <= replaced.count(language) <= 2 * len(launched)
