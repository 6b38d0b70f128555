# SPDX-License-Identifier: Apache-2.0
"""The setting that chooses a packing, and what the plugin then asks of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs package:vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import derive_canonical_mappings
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pagedkv.cache.write import write_kv_cache
from pagedkv.routing import CacheLayout
from pagedkv.vllm_plugin import backend, errors, impl, inspect, pages, settings

pytestmark = pytest.mark.usefixtures("deployment")

BLOCKS = 3
SPEC = {"block_size": 32, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
"""Not two heads: pages of rows and of two parts would then have the same axes."""


@pytest.fixture
def set_packing(monkeypatch):
    def choose(value):
        settings.packing.cache_clear()
        monkeypatch.setenv(settings.PACKING_VARIABLE, value)

    yield choose
    settings.packing.cache_clear()


def test_rows_unless_told_otherwise(monkeypatch, set_packing):
    set_packing("native")
    monkeypatch.delenv(settings.PACKING_VARIABLE)
    assert settings.packing() == "rows"
    monkeypatch.setenv(settings.PACKING_VARIABLE, "native")
    assert settings.packing() == "rows", "it is read once"
    spec = FullAttentionSpec(**SPEC)
    assert backend.PagedKVBackend.customize_spec(spec) == spec
    assert backend.PagedKVBackend.supported_kv_cache_layouts() is None


@pytest.mark.parametrize("packing", ["native", "shuffle"])
def test_pages_of_two_parts(packing, set_packing):
    set_packing(packing)
    spec = backend.PagedKVBackend.customize_spec(FullAttentionSpec(**SPEC))
    assert (spec.num_heads, spec.state_content_size_bytes) == (2, 4 * 64 * 2)
    assert spec.page_size_bytes == FullAttentionSpec(**SPEC).page_size_bytes
    assert backend.PagedKVBackend.customize_spec(spec) == spec, "asked twice, the answer stays"
    layouts = backend.PagedKVBackend.supported_kv_cache_layouts()
    assert layouts[0] is KVCacheLayout.LHBNC, "planes, where there is no state layer"
    assert {layout.value[-2:] for layout in layouts} == {(3, 4)}, "a part must be one run"


@pytest.mark.parametrize(
    "start", [lambda: impl.PagedKVImpl(num_heads=4, head_size=64, scale=1.0), lambda: inspect.build_llm("no model")]
)
def test_an_unknown_packing_stops_layers_and_engines_early(set_packing, start):
    set_packing("shuffled")
    with pytest.raises(
        errors.SettingError, match="PAGEDKV_PACKING: got 'shuffled'; expected one of rows, native, shuf"
    ):
        start()


@pytest.mark.parametrize("packing", ["native", "shuffle"])
def test_blocks_of_two_parts_are_handed_to_no_connector(packing, set_packing, deployment):
    """vLLM's CPU platform asks no backend whether it has connectors: the first layer refuses."""
    deployment.kv_transfer_config = object()
    set_packing("rows")
    impl.PagedKVImpl(num_heads=4, head_size=64, scale=1.0)
    set_packing(packing)
    with pytest.raises(
        errors.UnsupportedFeatureError, match=f"KV connectors with PAGEDKV_PACKING={packing}: .*unset PAGEDKV_PACKING"
    ):
        impl.PagedKVImpl(num_heads=4, head_size=64, scale=1.0)


@pytest.mark.parametrize("packing", ["rows", "native", "shuffle"])
@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC"])
def test_both_groups_of_an_encoder_decoder_share_bytes(packing, layout, set_packing):
    """Block id b of self-attention and of cross attention are one page: vLLM overlays the groups."""
    set_packing(packing)
    order = KVCacheLayout[layout]
    asked = [backend.PagedKVBackend.customize_spec(kind(**SPEC)) for kind in (FullAttentionSpec, CrossAttentionSpec)]
    raw = torch.zeros(2 * BLOCKS * asked[0].page_size_bytes, dtype=torch.int8)
    views = []
    for spec in asked:
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, 2, order)
        tensor = KVCacheTensor(raw.numel(), ["0", "1"], layer_stride, block_stride)
        views.append(create_kv_cache_views(raw, spec, BLOCKS, order, tensor)[1])
    page = pages.Page(CacheLayout(packing, pages.sides(packing, order), 32, 4, 64, element_bytes=2))
    self_attention, cross_attention = (page.cache(view) for view in views)
    for side in ("key", "value"):
        ours, theirs = getattr(self_attention, side), getattr(cross_attention, side)
        assert (ours.shape, ours.stride(), ours.data_ptr()) == (theirs.shape, theirs.stride(), theirs.data_ptr())


@pytest.mark.parametrize("kind", [FullAttentionSpec, SlidingWindowSpec])
@pytest.mark.parametrize("packing", ["rows", "native"])
def test_keys_and_values_of_unlike_sizes_are_refused(kind, packing):
    spec = kind(**SPEC, head_size_v=32, **({"sliding_window": 8} if kind is SlidingWindowSpec else {}))
    with pytest.raises(errors.UnsupportedFeatureError, match="keys with 64 and values with 32 channels"):
        pages.complete_spec(spec, packing)


@pytest.mark.parametrize("packing", ["native", "shuffle"])
def test_fp8_heads_that_16_bytes_do_not_divide_are_refused(packing, set_packing):
    set_packing(packing)
    impl.PagedKVImpl(num_heads=4, head_size=72, scale=1.0)
    with pytest.raises(errors.UnsupportedFeatureError, match=r"head_size 72, takes a multiple of 16 .*packing 'rows'"):
        impl.PagedKVImpl(num_heads=4, head_size=72, scale=1.0, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("packing", "sides", "view", "what"),
    [
        ("rows", "interleaved", torch.zeros(3, 2, 32, 96), "axes"),
        ("native", "interleaved", torch.zeros(3, 2, 32, 64 + 64 + 1), "axes"),
        ("native", "interleaved", torch.zeros(3, 4, 32, 32), "axes"),
        ("rows", "interleaved", torch.zeros(3, 2, 48, 128), "axes"),  # blocks of another size than the route's
        # K and V of a token side by side
        ("native", "interleaved", torch.zeros(3, 32, 2, 128).transpose(1, 2), "strides"),
        ("rows", "interleaved", torch.zeros(3, 2, 128, 32).transpose(2, 3), "strides"),
        ("native", "planes", torch.zeros(3, 2, 32, 128), "strides"),  # K and V of a block side by side
    ],
)
def test_a_pool_that_is_not_as_asked_for_is_refused(packing, sides, view, what):
    layout = CacheLayout(packing, sides, block_size=32, num_kv_heads=2, head_size=64, element_bytes=4)
    with pytest.raises(errors.PageError, match=f"KV pool: got {what} .*PAGEDKV_PACKING"):
        pages.Page(layout).cache(view)


class Rank:
    """One of some tensor-parallel ranks: a pool of its share of the heads, block after block."""

    def __init__(self, packing, index, ranks):
        self.heads, own = slice(index * 4 // ranks, (index + 1) * 4 // ranks), 4 // ranks
        spec = pages.complete_spec(FullAttentionSpec(**(SPEC | {"num_kv_heads": own})), packing)
        order, size = KVCacheLayout.LBHNC, BLOCKS * spec.page_size_bytes  # what vLLM's offloading asks for
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, 1, order)
        tensor = KVCacheTensor(size, ["0"], layer_stride, block_stride)
        raw = torch.zeros(size, dtype=torch.int8)
        [view] = create_kv_cache_views(raw, spec, BLOCKS, order, tensor)
        self.cache = pages.Page(CacheLayout(packing, "interleaved", 32, own, 64, element_bytes=2)).cache(view)
        self.blocks = raw.view(BLOCKS, -1)
        parallel = {
            "tensor_parallel_size": ranks,
            "world_size": ranks,
            "rank": index,
            "prefill_context_parallel_size": 1,
        }
        parallel |= {"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
        config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model)
        groups = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(["0"], spec)])
        self.mapping = derive_canonical_mappings(config, groups, {"0": view})["0"]

    def write(self, block, rows):
        mine = rows[:, :, self.heads]
        write_kv_cache(*mine, self.cache, torch.arange(block * 32, block * 32 + mine.shape[1]))

    def move(self, block, outside, *, load):
        """Copy the bytes of a block to where vLLM keeps them outside the pool, or from there."""
        for run in self.mapping.runs:
            for i in range(run.num_fragments):
                here, there = run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride
                ours = self.blocks[block, here : here + run.fragment_size]
                theirs = outside[there : there + run.fragment_size]
                ours.copy_(theirs) if load else theirs.copy_(ours)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("packing", ["rows", "native", "shuffle"])
def test_a_block_that_one_rank_has_offloaded_serves_two(packing, set_packing, device):
    """vLLM takes head slots for KV heads and divides them among ranks: true of rows alone, so others are refused."""
    set_packing(packing)
    rows = torch.randn(2, 32, 4, 64, generator=torch.Generator(device).manual_seed(3)).half()
    one, two, wanted = Rank(packing, 0, 1), [Rank(packing, i, 2) for i in (0, 1)], [Rank(packing, i, 2) for i in (0, 1)]
    one.write(1, rows)
    outside = torch.zeros(one.mapping.canonical_page_size_bytes, dtype=torch.int8)
    one.move(1, outside, load=False)
    for got, want in zip(two, wanted, strict=True):
        got.move(2, outside, load=True)
        want.write(2, rows)
        assert want.blocks[2].count_nonzero()
        assert torch.equal(got.blocks, want.blocks) is (packing == "rows")
