# SPDX-License-Identifier: Apache-2.0
"""Each kind of case, shrunk: our side is right by the oracle, and the oracle sees what the kind is about."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks import cases, operations, oracle, peers, pools

BY_NAME = {case.name: case for case in cases.CASES}
KINDS = (
    "decode bs1 8k",
    "decode bs64 8k block 784",
    "decode bs64 8k native 16",
    "decode bs64 8k native 544",
    "decode bs64 8k shuffle 784",
    "decode bs64 8k fp8",
    "decode bs64 8k fp8 per token",
    "decode bs32 32k window 4k",
    "decode bs64 8k softcap sinks",
    "decode bs64 8k 16 splits",
    "mixed 32 x 8k + prefill 2k",
    "prefill 4 x 4k",
    "gather 262k",
    "gather 262k native",
    "gather 262k shuffle",
    "write 262k block 784",
    "write 262k native",
    "write 262k shuffle",
    "write 262k native runs",
    "decode bs32 8k 4 tokens",
    "mla 8 heads bs32 8k fp8",
    "mla 16 heads bs32 8k block 784",
    "mla 128 heads bs1 8k",
    "scan 16 x 512 128 heads d64 n128",
    "gdn 16 x 512 16 k 32 v heads",
    "gdn decode bs8 48 heads",
    "gdn decode bs8 48 heads 3 drafts",
)


def small(name: str, **changes: object) -> cases.BenchmarkCase:
    return dataclasses.replace(cases.smoke(BY_NAME[name]), **changes)


@pytest.mark.device
@pytest.mark.parametrize("name", KINDS)
def test_our_side_is_right_and_before_it_ran_it_was_not(name):
    work = operations.prepare(small(name), "cpu", torch.float16, 1)
    work.ours.poison()
    assert work.ours.error() > work.bound
    work.ours.run()
    assert work.ours.error() <= work.bound


@pytest.mark.parametrize("scales", ["tensor", "token"])
def test_quantised_pool_is_normal_and_rows_fill_the_format(scales):
    cache = pools.new(small("decode bs64 8k fp8", scales=scales), "cpu", torch.float16, 50)
    key, value = pools.stored(cache)
    assert cache.key.dtype == torch.uint8
    for side in (key, value):
        read = torch.stack([side.read(torch.arange(50), 800, head) for head in range(2)])
        assert 0.95 < read.std().item() < 1.05
        assert (side.scale != 1).all()
        if scales == "token":
            assert (side.elements.view(torch.float8_e4m3fn).float().abs().amax(-1) == 448).all()


@pytest.mark.parametrize("name", ["native", "shuffle"])
def test_packed_and_back_is_the_same(name):
    cache = pools.new(small("decode bs64 8k block 784"), "cpu", torch.float16, 4)
    copy = pools.packed(cache, name)
    assert copy.packing == name
    assert copy.has_native_kv_cache_layout
    for rows, source in zip(pools.rows(copy), pools.rows(cache), strict=True):
        assert torch.equal(rows, source)
    assert pools.packed(copy, name) is copy


def test_a_block_table_has_no_block_twice():
    case = small("mixed 32 x 8k + prefill 2k")
    table = pools.block_table(case, "cpu")
    assert table.shape == (3, 3)
    assert table.unique().numel() == table.numel()


def prompts(name: str) -> operations.MeasuredWork:
    """Whole prompts of a case, as the vendor's library takes them, in what a CPU computes in a moment."""
    case = small(name, seq_len=37, query_len=37)
    assert case.vendor
    return operations.prepare(case, "cpu", torch.float16, 1)


@pytest.mark.parametrize("name", ["prefill 4 x 4k", "prefill 4 x 4k d256 block 784", "prefill 4 x 4k native 784"])
def test_the_vendors_side_is_right_and_its_results_are_poisoned(name):
    work = prompts(name)
    side = work.vendor()
    side.run()
    assert side.error() <= oracle.attention_bound(torch.float16)
    side.poison()
    assert side.error() == math.inf
    side.run()
    assert side.error() <= oracle.attention_bound(torch.float16)


def test_a_vendor_that_sees_the_future_is_wrong(monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, is_causal, **rest: attend(*args, is_causal=not is_causal, **rest),
    )
    side = prompts("prefill 4 x 4k").vendor()
    side.run()
    assert side.error() > 100 * oracle.attention_bound(torch.float16)


class FlashMla:
    """What `peers.vendor_mla` asks of FlashMLA, by plain softmax over blocks of 64."""

    def __init__(self, there: bool = True) -> None:
        self.is_flashmla_dense_supported = lambda: (there, None if there else "no library")
        self.get_mla_metadata = lambda: ("schedule", None)

    def flash_mla_with_kvcache(
        self, *, q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, out, tile_scheduler_metadata
    ):
        assert (k_cache.shape[1:], tile_scheduler_metadata, causal) == ((64, 1, q.shape[-1]), "schedule", True)
        for query, blocks, length, result in zip(q, block_table, cache_seqlens, out, strict=True):
            rows = k_cache[blocks.long()].flatten(0, 2)[:length].double()
            result[0] = (softmax_scale * query[0].double() @ rows.T).softmax(-1) @ rows[:, :head_dim_v]


@pytest.mark.parametrize("name", ["mla 16 heads bs8 8k", "mla 16 heads bs32 8k block 784"])
def test_flash_mla_reads_the_same_rows_in_blocks_of_its_own(name, monkeypatch):
    monkeypatch.setattr(peers, "_module", lambda _: FlashMla())
    case = small(name, seq_len=100, num_seqs=3)
    side = operations.prepare(case, "cpu", torch.float16, 1).vendor()
    side.poison()
    assert side.error() == math.inf
    side.run()
    assert side.error() <= oracle.attention_bound(torch.float16)


def test_without_flash_mla_the_vendors_side_is_missing(monkeypatch):
    monkeypatch.setattr(peers, "_module", lambda _: FlashMla(there=False))
    work = operations.prepare(small("mla 16 heads bs8 8k"), "cpu", torch.float16, 1)
    with pytest.raises(peers.PeerMissingError, match="no library"):
        work.vendor()


@pytest.mark.parametrize(
    "name",
    [
        "decode bs1 8k",
        "extend 512 on 16k",
        "prefill 4 x 4k fp8",
        "prefill 4 x 4k window 1k",
        "mla 16 heads bs32 8k fp8",
    ],
)
def test_what_the_vendors_library_has_not_has_no_column(name):
    assert not BY_NAME[name].vendor
    assert operations.prepare(small(name), "cpu", torch.float16, 1).vendor is None
