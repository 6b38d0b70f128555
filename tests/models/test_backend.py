# SPDX-License-Identifier: Apache-2.0
"""The border to vLLM without an engine: what is refused and what is passed on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models.batches import common_metadata
from support.pools import assert_same_bits

pytest.importorskip("vllm", reason="needs package:vllm")

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedkv.vllm_plugin import errors, impl, metadata

pytestmark = pytest.mark.usefixtures("inflated_blocks")

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 32, 48, 5


def make_impl(**features):
    defaults = {"num_heads": HEADS, "head_size": HEAD_SIZE, "scale": 0.25, "num_kv_heads": KV_HEADS}
    return impl.PagedKVImpl(**(defaults | features))


def packed_cache():
    """vLLM's packed layout: K and V of one token and head side by side."""
    numbers = torch.arange(BLOCKS * KV_HEADS * BLOCK_SIZE * 2 * HEAD_SIZE, dtype=torch.float32)
    return numbers.view(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)


def metadata_of(query_lens=(3,), **changes):
    """Sequence i has 60 + i tokens, in blocks 2 i and 2 i + 1."""
    starts, sequences = torch.tensor([0, *query_lens]).cumsum(0).int(), len(query_lens)
    blocks = torch.arange(2 * sequences, dtype=torch.int32).view(sequences, 2)
    return common_metadata(starts, torch.arange(60, 60 + sequences, dtype=torch.int32), blocks, **changes)


@pytest.fixture
def inflated_blocks(deployment):
    deployment.cache_config.block_size = BLOCK_SIZE


@pytest.fixture
def builder(builder_of):
    return builder_of(BLOCK_SIZE)


@pytest.fixture
def drafts(deployment):
    """Three drafted tokens a step, by our backend."""
    deployment.speculative_config = SimpleNamespace(
        num_speculative_tokens=3,
        parallel_drafting=False,
        attention_backend=AttentionBackendEnum.CUSTOM,
        uses_draft_kv_cache=lambda: True,
    )
    deployment.use_v2_model_runner = True
    return deployment.speculative_config


@pytest.fixture
def calls(monkeypatch):
    """Records what reaches the kernels."""
    seen = []
    monkeypatch.setattr(impl, "paged_attention", lambda *args, **kwargs: seen.append((args, kwargs)))
    monkeypatch.setattr(impl, "write_kv_cache", lambda *args: seen.append((args, {})))
    return seen


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"kv_cache_dtype": "fp8_ds_mla"}, "KV cache dtype 'fp8_ds_mla'"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "KV cache dtype 'int8_per_token_head'"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type encoder_only, takes decoder or encoder_decoder only"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type encoder, takes"),
        (
            {"attn_type": AttentionType.ENCODER_DECODER, "sliding_window": 8},
            "window 8, takes None where causal is False",
        ),
        ({"attn_type": AttentionType.ENCODER_DECODER, "alibi_slopes": [0.5] * HEADS}, "ALiBi in cross attention"),
        ({"head_size": 512}, "head_size 512"),
        ({"head_size": 16}, "head_size 16"),
        ({"chunk_lookback": 1}, "attention argument 'chunk_lookback'"),
        ({"kv_cache_dtype": "float16"}, "KV cache dtype 'float16' of a model in float32"),
    ],
)
def test_layer_refuses_what_is_not_served(features, named):
    with pytest.raises(errors.UnsupportedFeatureError, match=f"does not serve {named}"):
        make_impl(**features)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"causal": torch.tensor([True])}, "a mix of causal and non-causal sequences"),
        ({"mm_req_doc_ranges": {0: [(0, 2)]}}, "bidirectional prefixes"),
        ({"rswa_prefix_lens": torch.tensor([2])}, "reference sliding window"),
        ({"dcp_local_seq_lens": torch.tensor([30])}, "decode context parallelism"),
    ],
)
def test_batch_refuses_what_is_not_served(builder, change, named):
    with pytest.raises(errors.UnsupportedFeatureError, match=named):
        builder.build(0, metadata_of(**change))


def test_what_is_not_asked_for_is_not_refused():
    make_impl(chunk_lookback=-1, another=None)
    torch.set_default_dtype(torch.float16)
    try:
        assert make_impl(kv_cache_dtype="float16").route == make_impl().route
    finally:
        torch.set_default_dtype(torch.float32)


def test_diffusion_is_refused_at_the_start(builder_of, deployment):
    deployment.diffusion_config = object()
    with pytest.raises(errors.UnsupportedFeatureError, match="diffusion models"):
        builder_of(BLOCK_SIZE)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, True),
        ({"num_speculative_tokens": 1}, False),
        ({"parallel_drafting": True}, False),
        ({"attention_backend": None}, False),
        ({"attention_backend": AttentionBackendEnum.TRITON_ATTN}, False),
    ],
)
@pytest.mark.parametrize(("rocm", "runner"), [(True, "V1"), (True, "V2"), (False, "V1")])
def test_drafts_that_vllm_refuses_later_are_refused_early(
    monkeypatch, builder_of, deployment, drafts, change, refused, rocm, runner
):
    """On ROCm model runner V1 has a list of metadata classes, which it reads after the first draft."""
    monkeypatch.setattr(metadata, "current_platform", SimpleNamespace(is_rocm=lambda: rocm, is_cpu=lambda: False))
    drafts.__dict__.update(change)
    deployment.use_v2_model_runner = runner == "V2"
    if not (refused and rocm and runner == "V1"):
        assert builder_of(BLOCK_SIZE)
        return
    with pytest.raises(errors.UnsupportedFeatureError, match=r"drafts a step on ROCm .*leave attention_backend out of"):
        builder_of(BLOCK_SIZE)


def test_quantised_output_is_refused(calls):
    output = torch.zeros(3, HEADS, HEAD_SIZE)
    with pytest.raises(errors.UnsupportedFeatureError, match="output quantisation"):
        make_impl().forward(None, output, None, None, packed_cache(), None, output, output_scale=torch.ones(1))
    assert calls == []


@pytest.mark.parametrize("window", [None, 7])
def test_forward_passes_on_options_views_and_actual_tokens(builder, calls, window):
    sinks = torch.nn.Parameter(torch.full((HEADS,), torch.nan, dtype=torch.bfloat16))
    layer, cache = (
        make_impl(sliding_window=window, logits_soft_cap=30, alibi_slopes=[0.5] * 4, sinks=sinks),
        packed_cache(),
    )
    sinks.data.fill_(1.5)  # vLLM loads weights after it has made the layers
    layer.process_weights_after_loading(torch.bfloat16)
    query, output = torch.zeros(8, HEADS, HEAD_SIZE), torch.full((8, HEADS, HEAD_SIZE), torch.nan)
    assert layer.forward(None, query, None, None, cache, builder.build(0, metadata_of()), output) is output
    [((got_query, paged, got_output), named)] = calls
    keys, values = paged.key, paged.value
    assert got_query.shape[0] == got_output.shape[0] == 3, "padding rows must not reach the kernel"
    assert got_output.data_ptr() == output.data_ptr()
    for block, token, head in ((0, 0, 0), (4, 47, 1), (2, 15, 0)):
        torch.testing.assert_close(keys[block, token, head], cache[block, head, token, :HEAD_SIZE])
        torch.testing.assert_close(values[block, token, head], cache[block, head, token, HEAD_SIZE:])
    assert keys.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr(), "a copy would hide the strides"
    assert named["sliding_window"] == window
    assert named["scale"] == 0.25
    assert named["softcap"] == 30
    assert named["causal"]
    assert named["alibi_slopes"].tolist() == [0.5] * HEADS
    assert named["sinks"].tolist() == [1.5] * HEADS
    assert named["alibi_slopes"].dtype == named["sinks"].dtype == torch.float32
    assert (named["max_query_len"], named["max_seq_len"]) == (3, 60)
    assert named["block_table"].tolist() == [[0, 1]]
    assert (layer.writes, layer.attentions) == (0, 1)


@pytest.fixture
def compiled(monkeypatch):
    """Records what a layer compiles before it serves, as on a GPU."""
    seen = []
    monkeypatch.setattr(impl, "INTERPRETED", False)
    monkeypatch.setattr(impl, "warm_up", lambda *args, **options: seen.append((args, options)) or 7)
    return seen


def test_a_layer_compiles_once_at_the_first_step_on_a_cache(builder_of, calls, compiled):
    layer, rows = make_impl(sliding_window=7), torch.zeros(3, HEADS, HEAD_SIZE)
    builder = builder_of(BLOCK_SIZE, {"layer": layer})
    sides = rows[:, :KV_HEADS], rows[:, :KV_HEADS]
    layer.forward(None, rows, *sides, torch.empty(0), None, rows)  # vLLM measures memory: no cache yet
    assert compiled == []
    for _ in range(2):
        layer.forward(None, rows, *sides, packed_cache(), builder.build(0, metadata_of()), rows)
    [((query, key, value, cache, out, service), options)] = compiled
    assert (query is rows, key is sides[0], value is sides[1], out is rows) == (True,) * 4
    assert cache.block_size == BLOCK_SIZE
    assert (service.max_seqs, service.max_tokens, service.max_seq_len, service.batch_invariant) == (4, 64, 256, False)
    assert (options["sliding_window"], options["scale"], options["causal"]) == (7, 0.25, True)
    assert len(calls) == 2


@pytest.mark.parametrize(("encoder", "longest"), [({"max_source_positions": 1500}, 1500), ({}, 900)])
def test_cross_attention_compiles_for_its_encoder_without_a_key(
    builder_of, deployment, calls, compiled, encoder, longest
):
    """vLLM's own steps have no encoder, so that no key comes; and an encoder hears more than a decoder says."""
    deployment.model_config.hf_config = SimpleNamespace(**encoder)
    deployment.scheduler_config.max_num_encoder_input_tokens = 900
    layer, rows = make_impl(attn_type=AttentionType.ENCODER_DECODER), torch.zeros(3, HEADS, HEAD_SIZE)
    builder_of(BLOCK_SIZE, {"layer": layer})
    layer.forward(None, rows, None, None, packed_cache(), None, rows)
    [((_, key, value, *_, service), options)] = compiled
    for side in (key, value):
        assert side.shape == (3, KV_HEADS, HEAD_SIZE)
        assert side.stride() == (2 * KV_HEADS * HEAD_SIZE, HEAD_SIZE, 1)
    assert (service.max_seq_len, options["causal"]) == (longest, False)
    assert calls == []


def test_a_step_without_encoder_input_is_served(builder, calls):
    """vLLM then bounds the encoder by 0 tokens: every query sees nothing, and gets 0."""
    layer, query = make_impl(attn_type=AttentionType.ENCODER_DECODER), torch.zeros(3, HEADS, HEAD_SIZE)
    batch = metadata_of(causal=False, max_seq_len=0)
    batch.seq_lens.zero_()
    layer.forward(None, query, None, None, packed_cache(), builder.build(0, batch), query)
    [(_, named)] = calls
    assert (named["max_seq_len"], named["seq_lens"].tolist()) == (1, [0])


def test_vllms_own_step_before_it_serves_is_enough(builder_of, calls, compiled):
    """A dummy step without metadata, with the cache there: what vLLM runs where it captures no graphs."""
    layer, rows = make_impl(), torch.zeros(3, HEADS, HEAD_SIZE)
    builder_of(BLOCK_SIZE, {"layer": layer})
    layer.forward(None, rows, rows[:, :KV_HEADS], rows[:, :KV_HEADS], packed_cache(), None, rows)
    assert len(compiled) == 1
    assert calls == []


def test_options_that_are_off_are_none(builder, calls):
    """vLLM passes 0 for "no soft cap" in places, which as a cap would make all weights equal."""
    layer, query = make_impl(logits_soft_cap=0), torch.zeros(3, HEADS, HEAD_SIZE)
    layer.process_weights_after_loading(torch.float32)
    layer.forward(None, query, None, None, packed_cache(), builder.build(0, metadata_of()), query)
    [(_, named)] = calls
    assert [named[name] for name in ("softcap", "alibi_slopes", "sinks", "sliding_window")] == [None] * 4


def test_cross_attention_sees_the_whole_encoder(builder, calls):
    """Keys and values come with the first step only; later ones find them in the cache."""
    layer, query = make_impl(attn_type=AttentionType.ENCODER_DECODER), torch.zeros(3, HEADS, HEAD_SIZE)
    layer.forward(None, query, None, None, packed_cache(), builder.build(0, metadata_of(causal=False)), query)
    [(_, named)] = calls
    assert named["causal"] is False
    assert (named["max_query_len"], named["seq_lens"].tolist()) == (3, [60])


@pytest.mark.parametrize(
    ("query_lens", "parts"),
    [
        ((1, 1, 1), [(0, 3, 1)]),
        ((4, 2), [(0, 2, 4)]),
        ((1, 1, 5, 2), [(0, 2, 1), (2, 4, 5)]),
        ((5, 1, 2), [(0, 3, 5)]),  # not reordered: right, though slower
        ((1, 0), [(0, 2, 1)]),  # a padding sequence of a captured graph
    ],
)
def test_a_mixed_batch_is_a_decode_call_and_another(query_lens, parts, builder, calls):
    batch = metadata_of(query_lens)
    starts = batch.query_start_loc
    layer, query = make_impl(), torch.zeros(batch.num_actual_tokens, HEADS, HEAD_SIZE)
    layer.forward(None, query, None, None, packed_cache(), builder.build(0, batch), query)
    assert layer.attentions == 1, "one layer call, however many kernel calls"
    for (first, end, longest), (_, named) in zip(parts, calls, strict=True):
        assert named["max_query_len"] == longest
        assert named["query_start_loc"].tolist() == starts[first : end + 1].tolist()
        assert named["seq_lens"].tolist() == list(range(60 + first, 60 + end))
        assert named["block_table"].tolist() == [[2 * i, 2 * i + 1] for i in range(first, end)]


@pytest.mark.parametrize(
    ("query_lens", "parts"),
    [
        ((1, 4, 2, 1, 9), [(0, 1, 1), (1, 4, 4), (4, 5, 9)]),
        ((4, 4, 0), [(0, 3, 4)]),
        ((3, 2), [(0, 2, 3)]),
        ((1, 1), [(0, 2, 1)]),
        ((7, 4), [(0, 2, 7)]),
    ],
)
@pytest.mark.usefixtures("drafts")
def test_draft_verification_comes_first_in_its_own_call(query_lens, parts, builder_of):
    builder = builder_of(BLOCK_SIZE)
    assert builder.reorder_batch_threshold == 4
    batch = metadata_of(query_lens)
    for (first, end, longest), part in zip(parts, builder.build(0, batch).parts, strict=True):
        assert part["max_query_len"] == longest
        assert part["query_start_loc"].tolist() == batch.query_start_loc[first : end + 1].tolist()


def test_a_draft_on_the_device_needs_no_new_metadata(builder, calls):
    batch = metadata_of((1, 1, 0))
    described = builder.build(0, batch)
    batch.seq_lens += 1
    batch.block_table_tensor += 1
    builder.update_draft_decode_metadata(described)
    layer, query = make_impl(), torch.zeros(2, HEADS, HEAD_SIZE)
    layer.forward(None, query, None, None, packed_cache(), described, query)
    [(_, named)] = calls
    assert named["seq_lens"].tolist() == [61, 62, 63]
    assert named["block_table"][0].tolist() == [1, 2]


CACHED, LENGTH = 640, 61  # long enough for decode steps of their own to split the context
COMPANIES = {
    "in chunks, the last of one token": [[(0, 0, 37), (1, 3, 61)], [(2, 0, 9), (0, 37, 60)], [(0, 60, 61)]],
    "decoded": [[(0, 0, 59)], [(1, 60, 61), (0, 59, 60), (2, 40, 41)], [(0, 60, 61)]],
    "among drafts": [[(1, 60, 61), (0, 0, 55)], [(0, 55, 59), (2, 0, 61)], [(1, 57, 61), (0, 59, 61)]],
}


@pytest.mark.device
@pytest.mark.usefixtures("products_of_any_place")
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("window", [None, 600])
def test_batch_invariant_mode_gives_the_same_bits_in_any_step(monkeypatch, builder_of, device, company, window):
    """What follows a cached prefix in one step alone, and however the scheduler divides and mixes the same tokens."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    builder, layer = builder_of(BLOCK_SIZE), make_impl(sliding_window=window)
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(45, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, generator=generator).to(device)
    queries = torch.randn(3, LENGTH, HEADS, HEAD_SIZE, generator=generator).to(device)

    def step(*parts):
        starts = torch.tensor([0, *(end - first for _, first, end in parts)]).cumsum(0).int()
        lens = torch.tensor([CACHED + end for *_, end in parts], dtype=torch.int32)
        blocks = torch.arange(45, dtype=torch.int32).view(3, 15)[[sequence for sequence, *_ in parts]]
        query = torch.cat([queries[sequence, first:end] for sequence, first, end in parts])
        common = common_metadata(starts.to(device), lens.to(device), blocks.to(device), query_start_loc_cpu=starts)
        described = builder.build(0, common)
        out = layer.forward(None, query, None, None, cache, described, torch.empty_like(query))
        return {parts[i][0]: out[starts[i] : starts[i + 1]] for i in range(len(parts))}

    want = step((0, 0, LENGTH))[0]
    got = torch.cat([step(*parts)[0] for parts in COMPANIES[company]])
    assert_same_bits(got, want, company)


def test_write_leaves_padding_rows_out(calls):
    layer = make_impl()
    key, value = torch.zeros(2, 8, KV_HEADS, HEAD_SIZE)
    layer.do_kv_cache_update(None, key, value, packed_cache(), torch.tensor([9, -1, 50]))
    [((got_key, got_value, paged, slots), _)] = calls
    assert got_key.shape == got_value.shape == (3, KV_HEADS, HEAD_SIZE)
    assert paged.key.shape == paged.value.shape == (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    assert slots.tolist() == [9, -1, 50]
    assert (layer.writes, layer.attentions) == (1, 0)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("neox", [True, False])
def test_rotation_and_write_are_one_call(neox):
    """Against vLLM's rotation of the whole step, padding rows too, and our write; half of a head turns."""
    layer = make_impl()
    assert layer.fused_rope_kvcache_supported()
    assert not make_impl(attn_type=AttentionType.ENCODER_DECODER).fused_rope_kvcache_supported()
    query, key, value = torch.randn(8, HEADS + 2 * KV_HEADS, HEAD_SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
    positions, slots = torch.randint(0, 40, (8,)), torch.tensor([9, -1, 50])
    cos_sin = torch.randn(40, HEAD_SIZE // 2)
    turned = RotaryEmbedding.forward_static(
        positions, query.flatten(1), key.flatten(1), HEAD_SIZE, HEAD_SIZE // 2, cos_sin, neox
    )
    want, got = packed_cache(), packed_cache()
    layer.do_kv_cache_update(None, turned[1].view(key.shape), value, want, slots)

    layer.do_rope_and_kv_cache_update(None, query, key, value, positions, cos_sin, neox, got, slots)
    for mine, theirs in ((query.flatten(1), turned[0]), (key.flatten(1), turned[1]), (got, want)):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert (got != packed_cache()).any(-1).sum() == 2 * KV_HEADS
    assert layer.writes == 2


def test_the_rotation_compiles_once_at_its_first_step(monkeypatch):
    """The first step on a GPU is vLLM's own, before it serves."""
    seen = []
    monkeypatch.setattr(impl, "INTERPRETED", False)
    monkeypatch.setattr(impl, "warm_up_rotation", lambda *args, **options: seen.append((args, options)))
    monkeypatch.setattr(impl, "rotate_and_write", lambda *_args, **_options: None)
    layer, rows = make_impl(), torch.zeros(3, HEADS, HEAD_SIZE)
    step = (rows, rows[:, :KV_HEADS], rows[:, :KV_HEADS], torch.zeros(3, dtype=torch.int64), torch.zeros(40, 8))
    for _ in range(2):
        layer.do_rope_and_kv_cache_update(None, *step, False, packed_cache(), torch.tensor([9]))
    [((query, key, value, cache, positions, cos_sin), options)] = seen
    assert all(got is given for got, given in zip((query, key, value, positions, cos_sin), step, strict=True))
    assert (cache.block_size, options) == (BLOCK_SIZE, {"neox": False})


def test_memory_profiling_gives_zeros_and_counts_nothing(calls):
    layer, output = make_impl(), torch.full((8, HEADS, HEAD_SIZE), torch.nan)
    layer.forward(None, output, None, None, torch.tensor([]), None, output)
    assert output.count_nonzero() == 0
    assert calls == []
    assert layer.attentions == 0
