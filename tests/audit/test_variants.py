# SPDX-License-Identifier: Apache-2.0
"""Nothing compiles while a service runs: how many kernels a layer launches over every batch that a service has."""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
from support.hopper import OfflineCudaDriver

from pagedkv import prepared
from pagedkv.attention import paged
from pagedkv.attention import warm_up as warm_up_module
from pagedkv.attention.paged import paged_attention
from pagedkv.attention.warm_up import ServiceBounds, warm_up
from pagedkv.audit.compile import specialisations
from pagedkv.audit.machine import CDNA
from pagedkv.audit.tensors import Batch
from pagedkv.cache import warm_up as turned
from pagedkv.cache.rotary import rotate_and_write
from pagedkv.cache.write import write_kv_cache
from pagedkv.mla import warm_up as latent
from pagedkv.mla.decode import mla_decode
from pagedkv.ssd.prefill import ssd_prefill

LENGTHS = (1, 64, 65, 127, 200, 1000, 1025, 2048, 2049, 5000, 16_384, 32_640, 100_001, 131_072)
DECODES = (1, 2, 3, 8, 16, 33, 64, 127, 256)
EXTENDS = ((1, 2), (3, 2), (2, 4), (5, 7), (1, 16), (2, 31), (1, 100), (4, 128), (1, 2048), (16, 512))
"""(sequences, query tokens of each)."""

CACHES = {
    "d128": (Batch(torch.bfloat16, 128, num_heads=32, num_kv_heads=8, block_size=16), "nhd", None),
    "d128-784": (Batch(torch.bfloat16, 128, num_heads=32, num_kv_heads=8, block_size=784), "interleaved", None),
    "d256-784": (Batch(torch.bfloat16, 256, num_heads=16, num_kv_heads=2, block_size=784), "interleaved", None),
    "d64-native": (Batch(torch.bfloat16, 64, num_heads=32, num_kv_heads=8, block_size=544), "native", None),
    "d128-fp8": (Batch(torch.bfloat16, 128, num_heads=32, num_kv_heads=8, block_size=16), "nhd", "e4m3fn"),
}


def _service(batch: Batch, layout: str, quantised: str | None, *, window: int | None = None) -> None:
    """Every batch that a service has: decode steps, drafts, chunks of prompts, and parts of batches that mix them."""
    cache = batch.paged_cache(layout, quantised)
    most = max(seqs * tokens for seqs, tokens in EXTENDS)
    query = torch.empty(most, batch.num_heads, batch.head_size, dtype=batch.dtype)
    rows = torch.empty(most, 2 * batch.num_kv_heads, batch.head_size, dtype=batch.dtype)
    table = torch.zeros(300, 131_072 // batch.block_size + 3, dtype=torch.int32)
    index = torch.zeros(301, dtype=torch.int32)
    for first, (seqs, tokens) in enumerate((*((seqs, 1) for seqs in DECODES), *EXTENDS)):
        at = first % 4  # after so many other sequences, where addresses are no multiple of 16
        sequences = {
            "block_table": table[at : at + seqs],
            "seq_lens": index[at : at + seqs],
            "query_start_loc": index[at : at + seqs + 1],
        }
        used = query[: seqs * tokens]
        for length in LENGTHS:
            bounds = {"max_query_len": tokens, "max_seq_len": max(length, tokens)}
            paged_attention(used, cache, used, **sequences, **bounds, scale=0.1, sliding_window=window)
        slots = torch.zeros(seqs * tokens, dtype=torch.int64)
        write_kv_cache(rows[: len(slots), : batch.num_kv_heads], rows[: len(slots), batch.num_kv_heads :], cache, slots)


def _warm_up(batch: Batch, layout: str, quantised: str | None, *, window: int | None = None) -> None:
    """Choose as the plugin does, from any step of the layer, here one of 24 tokens."""
    query = torch.empty(24, batch.num_heads, batch.head_size, dtype=batch.dtype)
    rows = torch.empty(24, 2 * batch.num_kv_heads, batch.head_size, dtype=batch.dtype)
    sides = rows[:, : batch.num_kv_heads], rows[:, batch.num_kv_heads :]
    service = ServiceBounds(max_seqs=256, max_tokens=8192, max_seq_len=131_072, batch_invariant=False)
    warm_up(query, *sides, batch.paged_cache(layout, quantised), query, service, scale=0.1, sliding_window=window)


ENCODED = 1500
"""What Whisper's encoder makes of half a minute: more tokens than its decoder says."""
CROSS = Batch(torch.float16, 64, num_heads=20, num_kv_heads=20, block_size=16)
"""Whisper's largest."""


def _cross(longest: int = ENCODED) -> None:
    """A warm-up of cross attention, from a step without keys: what stands in for them is two halves of one tensor."""
    query = torch.empty(24, 20, 64, dtype=torch.float16)
    sides = torch.empty(24, 40, 64, dtype=torch.float16).split(20, dim=1)
    service = ServiceBounds(max_seqs=256, max_tokens=8192, max_seq_len=longest, batch_invariant=False)
    warm_up(query, *sides, CROSS.paged_cache("interleaved", None), query, service, scale=0.125, causal=False)


def _heard() -> None:
    """What the requests of a service ask of it: prompts and answers beside an encoder, drafts, and no encoder."""
    cache, table = CROSS.paged_cache("interleaved", None), torch.zeros(256, 94, dtype=torch.int32)
    index = torch.zeros(257, dtype=torch.int32)
    for seqs, tokens in (
        *((seqs, 1) for seqs in DECODES),
        *((seqs, most) for seqs in (1, 3, 16) for most in (3, 4, 448)),
    ):
        query = torch.empty(seqs * tokens, 20, 64, dtype=torch.float16)
        for length in (1, 50, 700, ENCODED):
            step = {"block_table": table[:seqs], "seq_lens": index[:seqs], "query_start_loc": index[: seqs + 1]}
            bounds = {"max_query_len": tokens, "max_seq_len": length}
            paged_attention(query, cache, torch.empty_like(query), **step, **bounds, scale=0.125, causal=False)
    for written in (50, ENCODED, 2 * ENCODED):
        key, value = torch.empty(written, 40, 64, dtype=torch.float16).split(20, dim=1)
        write_kv_cache(key, value, cache, torch.zeros(written, dtype=torch.int64))


@pytest.fixture(autouse=True)
def nothing_warmed():
    """A process as it begins."""
    prepared.clear()


@pytest.fixture(params=[*CDNA, "gfx1201", "sm_90"])  # the launches of other RDNA are those of gfx1201
def arch(request, monkeypatch) -> str:
    """Every arch with a compiler here."""
    if request.param == "sm_90":
        monkeypatch.setitem(specialisations.__globals__, "OfflineHipDriver", OfflineCudaDriver)
    return request.param


@pytest.mark.parametrize("name", CACHES)
def test_a_service_compiles_at_most_eight_of_each_kernel(arch, name):
    served = specialisations(arch, lambda: _service(*CACHES[name]))
    counts = Counter(each.kernel for each in served)
    assert {"attention_kernel", "reduce_kernel"} < set(counts)
    assert max(counts.values()) <= 8, counts


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("name", CACHES)
def test_a_warm_up_compiles_all_that_a_service_launches(arch, name, window):
    ready = {each.key for each in specialisations(arch, lambda: _warm_up(*CACHES[name], window=window))}
    missing = [
        (each.kernel, each.constants)
        for each in specialisations(arch, lambda: _service(*CACHES[name], window=window))
        if each.key not in ready
    ]
    assert not missing
    assert len(ready) <= 3 * 8 + 2


def test_warm_up_of_cross_attention_compiles_all(arch):
    ready = {each.key for each in specialisations(arch, _cross)}
    served = specialisations(arch, _heard)
    assert {"attention_kernel", "reduce_kernel"} < {each.kernel for each in served}
    assert not [(each.kernel, each.constants) for each in served if each.key not in ready]
    prepared.clear()
    for_text = {each.key for each in specialisations(arch, lambda: _cross(16))}
    assert not {each.key for each in served} <= for_text, "the comparison compares"


def test_layers_that_look_alike_are_warmed_up_once():
    def launched(*windows: int | None) -> int:
        """Launches of attention of the warm-ups of so many layers in one process."""
        with mock.patch.object(warm_up_module, "paged_attention") as attends:
            specialisations("gfx942", lambda: [_warm_up(*CACHES["d128"], window=window) for window in windows])
        return attends.call_count

    assert launched(None) == launched(None, None) > 4
    assert launched(None, 4096) == launched(None) + launched(4096)


LATENT = Batch(torch.bfloat16, 576, num_heads=16, num_kv_heads=1, block_size=64)
"""DeepSeek's shape on eight ranks: 16 heads, 512 channels and 64 rotated ones."""
DRAFTED = 3


def _latent_cache() -> torch.Tensor:
    return LATENT.pool(LATENT.num_blocks, 64, 576)


def _latent_table() -> torch.Tensor:
    return torch.zeros(300, 2048, dtype=torch.int32)


def _latent_service() -> None:
    """Decode steps and verified drafts, as the plugin calls for them."""
    cache, table, index = _latent_cache(), _latent_table(), torch.zeros(301, dtype=torch.int32)
    for seqs, tokens in itertools.product(DECODES, range(1, DRAFTED + 2)):
        query = torch.empty(seqs * tokens, 16, 576, dtype=torch.bfloat16)
        out = torch.empty(seqs * tokens, 16, 512, dtype=torch.bfloat16)
        lse = torch.empty(seqs * tokens, 16)
        step = {"seq_lens": index[:seqs], "query_start_loc": index[: seqs + 1], "block_table": table[:seqs]}
        mla_decode(query, cache, out, **step, max_query_len=tokens, scale=0.1, lse=lse)


def _latent_warm_up(most_queries: int = DRAFTED + 1) -> None:
    """From any decode step of the layer, here one of 5 tokens."""
    query, out = (torch.empty(5, 16, channels, dtype=torch.bfloat16) for channels in (576, 512))
    given = {"block_table": _latent_table(), "most_queries": most_queries}
    latent.warm_up(query, _latent_cache(), out, torch.empty(5, 16), **given, scale=0.1)


@pytest.mark.parametrize("arch", [*CDNA, "sm_90"], indirect=True)
def test_latent_attention_compiles_at_most_eight_of_each_kernel(arch):
    counts = Counter(each.kernel for each in specialisations(arch, _latent_service))
    assert {"mla_decode_kernel", "mla_reduce_kernel", "mla_schedule_kernel"} == set(counts)
    assert max(counts.values()) <= 8, counts


@pytest.mark.parametrize("arch", [*CDNA, "sm_90"], indirect=True)
def test_warm_up_of_latent_attention_compiles_all(arch):
    ready = {each.key for each in specialisations(arch, _latent_warm_up)}
    served = specialisations(arch, _latent_service)
    assert not [(each.kernel, each.constants) for each in served if each.key not in ready]
    without_drafts = {each.key for each in specialisations(arch, lambda: _latent_warm_up(1))}
    assert not {each.key for each in served} <= without_drafts, "the comparison compares"


def _turned(name: str) -> dict[str, object]:
    """What vLLM gives the fused rotation: slices of one projection, a cache, positions and angles."""
    batch, layout, quantised = CACHES[name]
    heads, others = batch.num_heads, batch.num_kv_heads
    rows = torch.empty(64, heads + 2 * others, batch.head_size, dtype=batch.dtype)
    query, key, value = rows.split([heads, others, others], dim=1)
    cache, places = batch.paged_cache(layout, quantised), torch.empty(64, dtype=torch.int64)
    angles = torch.empty(256, batch.head_size, dtype=batch.dtype)
    return {"query": query, "key": key, "value": value, "cache": cache, "positions": places, "cos_sin": angles}


def _turns(name: str) -> None:
    """Steps of a service; some tokens are padding, which is written nowhere."""
    layer, slots = _turned(name), torch.empty(64, dtype=torch.int64)
    for tokens in (1, 3, 15, 16, 17, 31, 33, 64):
        step = {each: layer[each][:tokens] for each in ("query", "key", "value", "positions")}
        for written in {tokens, max(1, tokens - 3)}:
            rotate_and_write(**layer | step, slot_mapping=slots[:written], neox=True)


@pytest.mark.parametrize("name", ["d128", "d64-native", "d128-fp8"])
def test_warm_up_of_the_rotation_compiles_all(arch, name):
    launches: list[int] = []

    def warmed() -> None:
        layer = _turned(name)
        launches.extend(turned.warm_up(**layer, neox=True) for _ in range(2))

    ready = {each.key for each in specialisations(arch, warmed)}
    served = specialisations(arch, lambda: _turns(name))
    assert served
    assert not [(each.kernel, each.constants) for each in served if each.key not in ready]
    assert launches == [len(ready), 0], "a layer that looks the same has nothing to do"


def _scan(tokens: int, pieces: int | None, *, resumes: bool, sliced: bool, segments: int | None = None) -> None:
    """A prefill of Mamba-2 in vLLM; `sliced` as in a service, where inputs are parts of one tensor."""
    heads, size, state = 16, 64, 128
    rows = torch.empty(tokens, heads * size + 2 * state, dtype=torch.bfloat16)
    parts = (rows[:, -2 * state :].unflatten(1, (2, state)), rows[:, : heads * size].unflatten(1, (heads, size)))
    projections, x = parts if sliced else (part.contiguous() for part in parts)
    dt = torch.empty(tokens, heads + 5 * sliced, dtype=torch.bfloat16)[:, 3 * sliced :][:, :heads]
    ssd_prefill(
        x,
        dt,
        torch.empty(heads),
        projections[:, :1],
        projections[:, 1:],
        torch.empty(tokens, heads, size, dtype=torch.bfloat16),
        torch.empty(pieces or 3, heads, size, state),
        starts=torch.zeros((pieces or 3) + 1, dtype=torch.int32),
        last_pieces=torch.zeros(3, dtype=torch.int32) if pieces else None,
        D=torch.empty(heads),
        dt_bias=torch.empty(heads),
        dt_softplus=True,
        initial_states=torch.empty(3, heads, size, state) if resumes else None,
        num_segments=segments,
    )


def test_vllms_warm_up_of_mamba_2_compiles_all_of_the_scan(arch):
    """vLLM runs each layer's scan on one chunk, without and with initial states, before it serves."""

    def warmed(*kinds: bool) -> set[str]:
        return {
            each.key
            for each in specialisations(
                arch,
                lambda: [_scan(64, pieces, resumes=kind, sliced=False) for kind in kinds for pieces in (None, 1)],
            )
        }

    served = specialisations(
        arch,
        lambda: [
            _scan(tokens, pieces, resumes=resumes, sliced=True, segments=segments)
            for tokens, pieces, segments in ((1, None, None), (37, 1, 2), (65, None, 3), (300, 8, None), (90, None, 16))
            for resumes in (False, True)
        ],
    )
    assert {each.key for each in served} <= warmed(False, True)
    assert not {each.key for each in served} <= warmed(False), "the comparison compares"


def test_a_number_of_splits_that_is_compiled_is_seen():
    """The count counts: with the number as a constant of the kernel there are as many kernels as numbers."""
    batch, layout, quantised = CACHES["d128"]
    cache, query = batch.paged_cache(layout, quantised), batch.query()
    given = {**batch.sequences(), "max_seq_len": 8192, "scale": 0.1}
    plain = paged.Launch.__init__

    def constant(self, kernel, grid, **more):
        if kernel is paged.attention_kernel:
            more["OPTIONS"] = more["OPTIONS"]._replace(TILES_PER_SPLIT=grid[1])
        plain(self, kernel, grid, **more)

    def sizes():
        for splits in range(2, 12):
            paged_attention(query, cache, query, **given, num_splits=splits)

    def attentions() -> int:
        return [each.kernel for each in specialisations("gfx942", sizes)].count("attention_kernel")

    assert attentions() == 1
    with mock.patch.object(paged.Launch, "__init__", constant):
        assert attentions() == 10
