# SPDX-License-Identifier: Apache-2.0
"""Pages of every packing in every layout of vLLM: each byte lies where it is documented, and attention finds it there.

The pool is allocated and viewed by vLLM's own functions. Where an element must lie is computed here from the view's
strides and from the axes that the packings are defined by (vLLM's paged attention kernels, aiter's).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from models.batches import common_metadata, computes

pytest.importorskip("vllm", reason="needs package:vllm")

from support.pools import assert_same_bits
from support.tolerances import ROW_RELATIVE
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pagedkv.attention import reference
from pagedkv.vllm_plugin import impl, pages, routes
from pagedkv.vllm_plugin.errors import ScaleError, UnsupportedFeatureError

LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 2, 5, 48, 3, 6, 32
SEQ_LENS = [70, 20]


@dataclass(frozen=True)
class Case:
    packing: str
    layout: str
    kv_cache_dtype: str = "auto"
    padding: int = 0  # bytes at the end of a page
    split: int = 1  # kernel blocks of a block
    scales: str = "tensor"
    fnuz: bool = False  # whether the platform's e4m3 is that of gfx942

    @property
    def kind(self):
        if self.kv_cache_dtype == "fp8_e5m2":
            return torch.float8_e5m2
        return torch.float8_e4m3fnuz if self.fnuz else torch.float8_e4m3fn

    @property
    def e4m3(self):
        """The format that vLLM calls e4m3 on the case's platform; "" where the case has no such codes."""
        return "" if self.kv_cache_dtype in {"auto", "fp8_e5m2"} else str(self.kind).removeprefix("torch.float8_")

    @property
    def id(self):
        special = [f"pad{self.padding}"] if self.padding else []
        special += [f"split{self.split}"] if self.split > 1 else []
        special += [self.kv_cache_dtype, self.scales] if self.kv_cache_dtype != "auto" else []
        return "-".join([self.packing, self.layout, *special, *(["fnuz"] if self.fnuz else [])])


CASES = [
    *(Case("rows", layout) for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")),
    *(Case(packing, layout) for packing in ("native", "shuffle") for layout in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")),
    *(Case(packing, layout, padding=64) for packing in ("rows", "native", "shuffle") for layout in ("LBHNC", "BLHNC")),
    *(Case(packing, "LBHNC", split=3) for packing in ("rows", "native", "shuffle")),
    *(Case("rows", "LBNHC", "fp8", scales=scales) for scales in ("tensor", "head")),
    *(Case(packing, "LHBNC", "fp8_e4m3", scales="head") for packing in ("native", "shuffle")),
    *(Case(packing, "BLHNC", "fp8_e5m2") for packing in ("rows", "native", "shuffle")),
    *(Case(packing, "LBHNC", "fp8_per_token_head", scales="token") for packing in ("rows", "native", "shuffle")),
    Case("rows", "BLNHC", "fp8_per_token_head", scales="token", padding=64),
    Case("native", "LBHNC", "fp8_per_token_head", scales="token", split=3),
    *(Case(packing, "LBHNC", "fp8", fnuz=True) for packing in ("rows", "shuffle")),
]


class Pool:
    """A raw allocation, vLLM's view of its second layer, and where in it everything must lie."""

    def __init__(self, case: Case):
        self.quantised = case.kv_cache_dtype != "auto"
        self.per_token = case.scales == "token"
        dtype = torch.uint8 if self.quantised else torch.float32
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=dtype,
            kv_quant_mode=get_kv_quant_mode(case.kv_cache_dtype),
        )
        spec = pages.complete_spec(spec, case.packing)
        if case.padding:
            spec = pages.replace(spec, page_size_padded=spec.page_size_bytes + case.padding)
        layout = KVCacheLayout[case.layout]
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
        size = LAYERS * BLOCKS * spec.page_size_bytes
        self.raw = torch.full((size,), -1, dtype=torch.int8)  # NaN in every format but e4m3fnuz
        if case.fnuz:
            self.raw.fill_(-128)
        names = [f"layer {i}" for i in range(LAYERS)]
        tensor = KVCacheTensor(size, names, layer_stride, block_stride)
        kernel_block_size = BLOCK_SIZE // case.split
        self.view = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor, kernel_block_size)[1]
        self.packing, self.element_bytes = case.packing, dtype.itemsize
        self.blocks, self.tokens = BLOCKS * case.split, kernel_block_size

    def addresses(self, side: int) -> torch.Tensor:
        """Byte of the allocation at which each channel of K (0) or V (1) begins: [blocks, tokens, heads, channels]."""
        d, tokens, x = HEAD_SIZE, self.tokens, 16 // self.element_bytes
        b, t, h, c = torch.meshgrid(*map(torch.arange, (self.blocks, tokens, KV_HEADS, d)), indexing="ij")
        if self.packing == "rows":
            return self.byte(b, h, t, (side * d + c) * self.element_bytes)
        if side == 0:
            flat = h * d * tokens + c // x * tokens * x + t * x + c % x
        elif self.packing == "native":
            flat = h * d * tokens + c * tokens + t
        else:
            flat = h * d * tokens + t // x * d * x + c * x + t % x
        return self.in_part(b, side, flat * self.element_bytes)

    def scale_addresses(self, side: int) -> torch.Tensor:
        """View the fp32 scales of each token and head: [blocks, tokens, heads]."""
        b, t, h = torch.meshgrid(*map(torch.arange, (self.blocks, self.tokens, KV_HEADS)), indexing="ij")
        if self.packing == "rows":
            return self.byte(b, h, t, 2 * HEAD_SIZE + 4 * side)
        codes = KV_HEADS * self.tokens * HEAD_SIZE
        return self.in_part(b, side, codes + 4 * (h * self.tokens + t))

    def in_part(self, block, part, flat):
        content = self.view.shape[3] * self.element_bytes
        return self.byte(block, torch.full_like(block, part), flat // content, flat % content)

    def byte(self, block, slot, state, content):
        block_stride, slot_stride, state_stride, _ = (s * self.element_bytes for s in self.view.stride())
        begin = self.view.storage_offset() * self.element_bytes
        return begin + block * block_stride + slot * slot_stride + state * state_stride + content

    def put(self, where: torch.Tensor, data: torch.Tensor) -> None:
        """Store `data` byte by byte in a copy of the allocation."""
        size = data.element_size()
        self.raw[where.unsqueeze(-1) + torch.arange(size)] = (
            data.contiguous().view(torch.int8).unflatten(-1, (-1, size))
        )

    def get(self, where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.raw[where.unsqueeze(-1) + torch.arange(dtype.itemsize)].view(dtype).squeeze(-1)


def scales_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    if case.scales == "head":
        return torch.tensor([0.02, 0.05, 0.04]), torch.tensor([0.07, 0.03, 0.06])
    return torch.tensor(0.03), torch.tensor([0.05])


def quantised(rows: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(kind).max
    return (rows / scale).clamp(-largest, largest).to(kind)


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("side", ["_k_scale", "_v_scale"])
def test_bad_scales_are_refused_once_the_model_is_loaded(side, number, monkeypatch, builder_of):
    monkeypatch.setattr(routes, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: not computes("e4m3fn")))
    layers = {
        name: impl.PagedKVImpl(HEADS, HEAD_SIZE, 0.3, KV_HEADS, kv_cache_dtype=kind)
        for name, kind in (("model.layers.3", "fp8"), ("model.layers.4", "auto"))
    }
    scales = {"_k_scale": torch.tensor(1.0), "_v_scale": torch.tensor([1.0])}
    builder_of(16, layers, scales)
    with pytest.raises(ScaleError, match=rf"layer model\.layers\.3: {side} is .*expected finite and > 0"):
        builder_of(16, layers, scales | {side: torch.tensor(number)})
    builder_of(16, {"model.layers.4": layers["model.layers.4"]}, scales | {side: torch.tensor(number)})


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_page(case, monkeypatch, deployment, builder_of, device):
    monkeypatch.setattr(impl, "packing", lambda: case.packing)
    monkeypatch.setattr(routes, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: case.fnuz))
    if case.e4m3 and not computes(case.e4m3):
        with pytest.raises(UnsupportedFeatureError, match=f"in the format {case.e4m3} on "):
            impl.PagedKVImpl(HEADS, HEAD_SIZE, 0.3, KV_HEADS, kv_cache_dtype=case.kv_cache_dtype)
        return
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])
    layer = impl.PagedKVImpl(
        HEADS, HEAD_SIZE, 0.3, KV_HEADS, kv_cache_dtype=case.kv_cache_dtype, logits_soft_cap=5.0, sinks=sinks
    )
    layer.process_weights_after_loading(torch.float32)
    module = SimpleNamespace(_k_scale=scales_of(case)[0], _v_scale=scales_of(case)[1])
    pool, generator = Pool(case), torch.Generator(device).manual_seed(5)
    deployment.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout[case.layout]
    builder = builder_of(pool.tokens, {"layer": layer})

    # vLLM's block tables and slots count kernel blocks: block b of a manager is split * b ... split * b + split - 1.
    order = iter(torch.randperm(BLOCKS - 1, generator=generator) + 1)
    tables = [
        torch.cat([next(order) * case.split + torch.arange(case.split) for _ in range(-(-length // BLOCK_SIZE))])
        for length in SEQ_LENS
    ]
    where = [
        (table[torch.arange(length) // pool.tokens], torch.arange(length) % pool.tokens)
        for table, length in zip(tables, SEQ_LENS, strict=True)
    ]
    block, token = (torch.cat(index) for index in zip(*where, strict=True))
    key, value = torch.randn(2, len(block), KV_HEADS, HEAD_SIZE, generator=generator)
    expected = Pool(case)
    logical = []
    for side, rows in enumerate((key, value)):
        stored, meant = rows, rows.double()
        if pool.quantised:
            kind = case.kind
            scale = scales_of(case)[side].expand(KV_HEADS)[:, None]
            if pool.per_token:
                # On the CPU: a GPU's division by a number multiplies with its reciprocal.
                scale = (rows.abs().amax(-1, keepdim=True).cpu() / torch.finfo(kind).max).clamp(min=1e-6).to(device)
                expected.put(expected.scale_addresses(side)[block, token], scale.expand(-1, KV_HEADS, 1)[..., 0])
            stored = quantised(rows, scale, kind)
            meant = stored.double() * scale.double()
        expected.put(expected.addresses(side)[block, token], stored)
        logical.append(torch.full((pool.blocks, pool.tokens, KV_HEADS, HEAD_SIZE), torch.nan, dtype=torch.float64))
        logical[side][block, token] = meant

    layer.do_kv_cache_update(module, key, value, pool.view, block * pool.tokens + token)
    assert_same_bits(pool.raw.view(torch.uint8), expected.raw.view(torch.uint8), "raw allocation, byte by byte")

    table = torch.full((2, max(map(len, tables))), 2**30, dtype=torch.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 3], SEQ_LENS))
    batch = common_metadata(starts, lens, table)
    metadata = builder.build(0, batch)
    query = torch.randn(3, HEADS, HEAD_SIZE, generator=generator)
    output = torch.full_like(query, torch.nan)
    layer.forward(module, query, None, None, pool.view, metadata, output)
    golden, _ = reference.attention(
        query,
        *logical,
        block_table=table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        scale=0.3,
        softcap=5.0,
        sinks=sinks,
    )
    error = (output.double().cpu() - golden).norm(dim=-1) / golden.norm(dim=-1)
    assert error.max() <= ROW_RELATIVE["attention of capped scores", "float32"]
