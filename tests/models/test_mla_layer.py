# SPDX-License-Identifier: Apache-2.0
"""MLA between vLLM and our kernel, without an engine: what is refused, the metadata, and captured graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs package:vllm")

from models.batches import computes
from support.mla_steps import step
from support.tolerances import LSE_ABSOLUTE, ROW_RELATIVE
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from pagedkv import prepared
from pagedkv.arch import limits
from pagedkv.attention import reference
from pagedkv.device import INTERPRETED
from pagedkv.mla.warm_up import warm_up
from pagedkv.vllm_plugin import errors, mla_backend, routes
from pagedkv.vllm_plugin.errors import ScaleError

HEADS, LATENT, ROPE = 4, 256, 64  # vLLM's metadata knows latent rows of 320, 512 and 576 channels
SCALE = 0.11
CONSTANTS = {
    "num_heads": HEADS,
    "head_size": LATENT + ROPE,
    "scale": SCALE,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": ROPE,
    "qk_head_dim": 32 + ROPE,
    "v_head_dim": 32,
    "kv_b_proj": None,
}
pytestmark = pytest.mark.usefixtures("on_device")

IMPLS = {"cpu": mla_backend.PagedKVMLAImpl, "gpu": mla_backend.PagedKVGPUMLAImpl}


def sequences(seq_lens, query_lens=None):
    """Sequences of these lengths, where kernels run."""
    device = torch.get_default_device()
    with torch.device("cpu"):  # which draws the numbers
        return step(device, HEADS, seq_lens, query_lens, latent=LATENT, rope=ROPE)


class Layer(AttentionLayerBase):
    """Just enough of a layer for the metadata builder."""

    def __init__(self, impl, scale=None):
        self.impl, self._k_scale = impl, scale
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            setattr(self, name, CONSTANTS[name])
        self.prefill_backend = SimpleNamespace(clone=lambda: None)

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.fixture
def parallel(monkeypatch):
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
    )
    compilation = SimpleNamespace(inductor_compile_config={})
    config = SimpleNamespace(parallel_config=parallel, compilation_config=compilation)
    for module in (mla_attention, routes):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    return parallel


@pytest.fixture
def make(parallel):  # noqa: ARG001 - vLLM's configuration, in force
    return lambda where="gpu", **features: IMPLS[where](**(CONSTANTS | features))


def build(layer, parallel, *, drafted=0, dtype=torch.float32, most_seqs=8, largest_capture=8, scale=None):
    """The metadata builder of a group of one layer."""
    speculative = SimpleNamespace(num_speculative_tokens=drafted, parallel_drafting=False, method="mtp")
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, max_model_len=256, get_head_size=lambda: LATENT + ROPE),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_seqs=most_seqs),
        cache_config=SimpleNamespace(block_size=16, cache_dtype=layer.kv_cache_dtype),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=speculative if drafted else None,
        use_v2_model_runner=True,
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": Layer(layer, scale)}, max_cudagraph_capture_size=largest_capture
        ),
    )
    spec = SimpleNamespace(block_size=16)
    return mla_backend.PagedKVGPUMLABackend.get_builder_cls()(spec, ["layer"], config, torch.get_default_device())


def common(data, max_query_len=1):
    return CommonAttentionMetadata(
        query_start_loc=data.query_start_loc,
        query_start_loc_cpu=data.query_start_loc.cpu().clone(),
        seq_lens=data.seq_lens,
        num_reqs=len(data.seq_lens),
        num_actual_tokens=int(data.query_start_loc[-1]),
        max_query_len=max_query_len,
        max_seq_len=256,
        block_table_tensor=data.block_table,
        slot_mapping=torch.zeros(len(data.query), dtype=torch.int64),
    )


def check(got, data, cache=None, dtype="float32"):
    tokens = int(data.query_start_loc[-1])
    out, lse = (rows[:tokens].double().cpu() for rows in got)
    keys = (data.cache if cache is None else cache)[:, :, None]
    want, want_lse = reference.attention(data.query[:tokens], keys, keys[..., :LATENT], **data.metadata, scale=SCALE)
    error, norm = (out - want).norm(dim=-1), want.norm(dim=-1)
    assert (error <= ROW_RELATIVE["mla", dtype] * norm).all(), (error / norm).max()
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=LSE_ABSOLUTE)
    assert got[0][tokens:].count_nonzero() == 0, "padding rows"


@pytest.mark.parametrize("where", IMPLS)
@pytest.mark.parametrize("as_tuple", [True, False])
@pytest.mark.parametrize(("drafted", "query_lens"), [(0, (1, 1, 1)), (2, (3, 3, 3)), (2, (1, 3, 2))])
def test_decode_of_a_step(make, parallel, where, as_tuple, drafted, query_lens):
    layer = make(where)
    data = sequences((33, 1 + drafted, 70), query_lens)
    metadata = build(layer, parallel, drafted=drafted).build(0, common(data, max(query_lens)))
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    query = data.query.split([LATENT, ROPE], dim=-1) if as_tuple else data.query
    check(layer.forward_mqa(query, data.cache, metadata, None), data)
    assert (layer.writes, layer.attentions) == (0, 1)


@pytest.mark.parametrize("drafted", [0, 3])
def test_a_layer_compiles_every_bound_at_its_first_decode(monkeypatch, make, parallel, drafted):
    """Each bound of the query lengths that drafts can make is a launch of its own on a GPU."""
    seen = []
    monkeypatch.setattr(mla_backend, "INTERPRETED", False)
    monkeypatch.setattr(mla_backend, "warm_up", lambda *args, **named: seen.append((args, named)))
    layer = make()
    data = sequences((33, 40), (1, 1))
    metadata = build(layer, parallel, drafted=drafted).build(0, common(data))
    layer.forward_mqa(data.query[:0], data.cache, metadata, None)  # nothing decodes: no query to take strides from
    assert seen == []
    for _ in range(2):
        check(layer.forward_mqa(data.query, data.cache, metadata, None), data)
    [((query, cache, out, lse), named)] = seen
    assert (query is data.query, cache is data.cache) == (True, True)
    assert (out.shape, lse.shape) == ((2, HEADS, LATENT), (2, HEADS))
    assert (named["most_queries"], named["scale"], named["cache_format"]) == (1 + drafted, SCALE, None)
    assert named["block_table"] is metadata.decode.block_table


def test_a_warm_up_touches_nothing(make, parallel):
    """On sequences without tokens: no row of the cache, of the query or of the output changes."""
    layer = make()
    data = sequences((33, 40), (1, 1))
    build(layer, parallel)
    out, lse = torch.full((2, HEADS, LATENT), 7.0), torch.full((2, HEADS), 7.0)
    before = data.cache.clone(), data.query.clone()
    given = {"block_table": torch.full((2, 4), 2**31 - 1, dtype=torch.int32), "most_queries": 3, "scale": SCALE}
    prepared.clear()
    assert warm_up(data.query, data.cache, out, lse, **given) == 3
    assert warm_up(data.query, data.cache, out, lse, **given) == 0, "a layer that looks the same"
    torch.testing.assert_close((data.cache, data.query), before, rtol=0, atol=0, equal_nan=True)
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize(("fnuz", "name"), [(False, "e4m3fn"), (True, "e4m3fnuz")])
def test_codes_of_a_quantised_cache(monkeypatch, make, parallel, fnuz, name):
    platform = SimpleNamespace(is_fp8_fnuz=lambda: fnuz)
    monkeypatch.setattr("pagedkv.vllm_plugin.routes.current_platform", platform)
    monkeypatch.setattr(mla_attention, "backend_supports_prefill_query_quantization", lambda: False)
    if not computes(name):
        with pytest.raises(errors.UnsupportedFeatureError, match=f"in the format {name} on "):
            make(kv_cache_dtype="fp8")
        return
    layer = make(kv_cache_dtype="fp8")
    assert (layer.cache_format, layer.supports_quant_query_input) == (name, False)
    data = sequences((33, 1, 70))
    kind, scale = getattr(torch, f"float8_{name}"), torch.tensor(0.03)
    codes = (data.cache / scale).clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
    metadata = build(layer, parallel).build(0, common(data))
    got = layer.forward_mqa(data.query, codes, metadata, SimpleNamespace(_k_scale=scale))
    check(got, data, codes.double() * scale.double())
    with pytest.raises(ScaleError, match=r"layer layer: _k_scale is 0.0; expected finite and > 0"):
        build(layer, parallel, scale=torch.tensor(0.0))


def test_a_captured_step_serves_later_ones(make, parallel):
    """The graph keeps the metadata of its capture; before each replay the builder is run on the same buffers."""
    layer, seqs = make(), 8
    builder = build(layer, parallel, most_seqs=4, largest_capture=seqs)
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    data = sequences((1,) * seqs)
    buffers = common(data)
    frozen = builder.build_for_cudagraph_capture(buffers)
    for lens in ((33, 200, 64), (250, 16, 17, 100, 5)):
        later = sequences(lens)
        padding = seqs - len(lens)
        data.seq_lens[:] = torch.tensor([*lens, *(0,) * padding])
        data.query_start_loc[:] = torch.tensor([*range(len(lens) + 1), *(len(lens),) * padding])
        table = torch.full((seqs, 16), 2**30, dtype=torch.int32)
        table[: len(lens), : later.block_table.shape[1]] = later.block_table
        frozen.decode.block_table = table
        # Other steps in between must not matter.
        builder.build(0, common(sequences((90, 3))))
        builder.build(0, buffers)
        query = torch.cat([later.query, torch.full((padding, *later.query.shape[1:]), torch.nan)])
        check(layer.forward_mqa(query, later.cache, frozen, None), later)


def test_a_draft_on_the_device_fills_the_tables_anew(make, parallel):
    layer = make()
    builder = build(layer, parallel, drafted=2)
    data = sequences((250, 33, 170))
    lens = data.seq_lens.clone()
    data.seq_lens[:] = torch.tensor([1, 1, 1])
    metadata = builder.build(0, common(data))
    data.seq_lens.copy_(lens)
    builder.update_draft_decode_metadata(metadata)
    check(layer.forward_mqa(data.query, data.cache, metadata, None), data)


@pytest.mark.parametrize("where", IMPLS)
def test_the_dtype_of_the_model_may_be_named(make, where):
    torch.set_default_dtype(torch.float16)
    try:
        assert make(where, kv_cache_dtype="float16").cache_format is None
        with pytest.raises(errors.UnsupportedFeatureError, match="KV cache dtype 'bfloat16' of a model in float16"):
            make(where, kv_cache_dtype="bfloat16")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", IMPLS)
def test_bfloat16_under_the_interpreter_is_refused_early(make, where, lacks):
    if not INTERPRETED:
        lacks("device:cpu", "compiled kernels compute bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(errors.UnsupportedFeatureError, match=r"bfloat16 under .* --dtype float32"):
            make(where)
    finally:
        torch.set_default_dtype(torch.float32)


def test_tables_of_every_step_are_the_same_memory(make, parallel):
    builder = build(make(), parallel, drafted=1)
    data = {n: sequences((40,) * n) for n in (2, 5)}
    tables = [builder.build(0, common(data[n])).decode.tables for n in (2, 5)]
    for name in ("works", "work_indptr", "reduce_indptr"):
        assert len({getattr(t, name).data_ptr() for t in tables}) == 1
    assert [len(t.reduce_indptr) for t in tables] == [3, 6]
    other = builder.build(0, common(data[2], max_query_len=2)).decode.tables
    assert other.works.data_ptr() != tables[0].works.data_ptr(), "another bound, another launch"


@pytest.mark.parametrize("where", IMPLS)
@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"kv_lora_rank": 640}, "a latent size of 640"),
        ({"qk_rope_head_dim": 0}, "0 rope channels"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV cache dtype 'fp8_e5m2' of MLA"),
        ({"indexer": object()}, "sparse MLA"),
        ({"sliding_window": 128}, "a sliding window in MLA"),
        ({"logits_soft_cap": 30.0}, "a soft cap in MLA"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi in MLA"),
        ({"attn_type": "encoder_only"}, "attention type 'encoder_only' in MLA"),
    ],
)
def test_layer_refuses_what_is_not_served(make, where, features, named):
    with pytest.raises(errors.UnsupportedFeatureError, match=f"does not serve {named}"):
        make(where, **features)


@pytest.mark.parametrize("where", IMPLS)
def test_rdna_is_refused_by_name(monkeypatch, make, where):
    monkeypatch.setattr(mla_backend, "current", lambda: limits("gfx1100"))
    with pytest.raises(errors.UnsupportedFeatureError, match="does not serve MLA on gfx1100"):
        make(where)


def test_context_parallelism_is_refused(make, parallel):
    parallel.decode_context_parallel_size = 2
    with pytest.raises(errors.UnsupportedFeatureError, match="decode context parallelism"):
        make()


def test_writes_are_vllm_s_on_a_gpu_and_counted(monkeypatch, make):
    seen = []
    monkeypatch.setattr("vllm._custom_ops.concat_and_cache_mla", lambda *a, **k: seen.append((a, k)), raising=False)
    layer, rows = make(), torch.zeros(2, LATENT)
    cache, slots = torch.zeros(3, 16, LATENT + ROPE), torch.tensor([5, -1])
    layer.do_kv_cache_update(rows, torch.zeros(2, 1, ROPE), cache, slots, "auto", torch.ones(()))
    [(arguments, _)] = seen
    assert arguments[0] is rows
    assert arguments[2] is cache
    assert layer.writes == 1


def test_backends_name_the_class_that_runs_a_layer():
    assert mla_backend.PagedKVGPUMLABackend.get_impl_cls() is IMPLS["gpu"]
    assert mla_backend.PagedKVMLABackend.get_impl_cls() is IMPLS["cpu"]
