# SPDX-License-Identifier: Apache-2.0
"""Cache of checked calls: what a hit skips and launches, and everything that makes a miss."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref

import pytest
import torch

from pagedkv import prepared
from pagedkv.arch import limits
from pagedkv.attention import paged
from pagedkv.cache import write
from pagedkv.cache.cache import PagedCache, Quantisation
from pagedkv.errors import ArgumentError
from pagedkv.gdn import decode as gdn_step
from pagedkv.gdn import prefill as gdn
from pagedkv.mla import decode, tables
from pagedkv.mla.launch import MlaShape
from pagedkv.ssd import prefill as scan

SEQS, BLOCKS, BLOCK, HEADS, KV_HEADS, SIZE = 3, 8, 16, 4, 2, 32


class Compiled:
    """Stand-in for a kernel: notes what it is launched with, at first as Triton is, then as machine code is."""

    def __init__(self, kernel) -> None:
        self.arg_names = [*inspect.signature(kernel.fn).parameters]
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append(("compile" if constants else "run", (*grid, 1, 1)[:3], arguments))
            return self

        return launch


@pytest.fixture
def kernels(monkeypatch) -> dict[str, Compiled]:
    """The kernels of all prepared calls, replaced; an H200 runs them."""
    found = {}
    places = {
        paged: ("attention_kernel", "reduce_kernel"),
        write: ("_write_kernel", "packed_write_kernel"),
        decode: ("mla_decode_kernel", "mla_reduce_kernel"),
        tables: ("mla_schedule_kernel",),
        scan: ("ssd_prefill_kernel", "ssd_carry_kernel"),
        gdn: ("gdn_chunks_kernel", "gdn_carry_kernel", "gdn_join_kernel", "gdn_prefill_kernel"),
        gdn_step: ("gdn_decode_kernel",),
    }
    for module, names in places.items():
        monkeypatch.setattr(module, "current", lambda *_: limits("sm_90"))
        for name in names:
            found[name] = Compiled(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


def _cache(**more) -> PagedCache:
    pool = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, SIZE, dtype=torch.float16)
    return PagedCache(*pool, **more)


def _attention(cache: PagedCache, **more) -> dict:
    query = torch.zeros(SEQS, HEADS, SIZE, dtype=torch.float16)
    return {
        "query": query,
        "cache": cache,
        "out": torch.empty_like(query),
        "block_table": torch.zeros(SEQS, 4, dtype=torch.int32),
        "seq_lens": torch.full((SEQS,), 40, dtype=torch.int32),
        "query_start_loc": torch.arange(SEQS + 1, dtype=torch.int32),
        "max_query_len": 1,
        "max_seq_len": 64,
        "scale": 0.1,
        **more,
    }


def _mla(**more) -> dict:
    given = _attention(_cache(), **more)
    given["query"] = torch.zeros(SEQS, 16, 80, dtype=torch.float16)
    given["cache"] = torch.zeros(BLOCKS, BLOCK, 80, dtype=torch.float16)
    given["out"] = torch.zeros(SEQS, 16, 64, dtype=torch.float16)
    del given["max_seq_len"]
    return given


def _scan(**more) -> dict:
    f16, f32 = torch.float16, torch.float32
    return {
        "x": torch.zeros(20, 2, 16, dtype=f16),
        "dt": torch.zeros(20, 2, dtype=f16),
        "A": torch.zeros(2),
        "B": torch.zeros(20, 1, 16, dtype=f16),
        "C": torch.zeros(20, 1, 16, dtype=f16),
        "out": torch.zeros(20, 2, 16, dtype=f16),
        "states": torch.zeros(2, 2, 16, 16, dtype=f32),
        "starts": torch.tensor([0, 16, 20], dtype=torch.int32),
        **more,
    }


def _delta(**more) -> dict:
    rows = torch.zeros(20, 4, 64, dtype=torch.float16)
    a, b = torch.zeros(2, 20, 2, dtype=torch.float16)
    return {
        "q": rows[:, :1],
        "k": rows[:, 1:2],
        "v": rows[:, 2:],
        "a": a,
        "b": b,
        "out": torch.zeros(20, 2, 64, dtype=torch.float16),
        "states": torch.zeros(3, 2, 64, 64),
        "A_log": torch.zeros(2),
        "dt_bias": torch.zeros(2),
        "starts": torch.tensor([0, 16, 20], dtype=torch.int32),
        "sources": torch.arange(2, dtype=torch.int32),
        "targets": torch.arange(2, dtype=torch.int32),
        **more,
    }


def _gdn(**more) -> dict:
    f16 = torch.float16
    return {
        "q": torch.zeros(SEQS, 1, 64, dtype=f16),
        "k": torch.zeros(SEQS, 1, 64, dtype=f16),
        "v": torch.zeros(SEQS, 2, 64, dtype=f16),
        "a": torch.zeros(SEQS, 2, dtype=f16),
        "b": torch.zeros(SEQS, 2, dtype=f16),
        "out": torch.zeros(SEQS, 2, 64, dtype=f16),
        "states": torch.zeros(SEQS, 2, 64, 64),
        "A_log": torch.zeros(2),
        "dt_bias": torch.zeros(2),
        "state_indices": torch.arange(SEQS, dtype=torch.int32),
        **more,
    }


def _write(cache: PagedCache) -> dict:
    rows = torch.zeros(2, 5, KV_HEADS, SIZE, dtype=torch.float16)
    return {"key": rows[0], "value": rows[1], "cache": cache, "slot_mapping": torch.arange(5)}


CALLS = {
    "attention": (paged.paged_attention, lambda: _attention(_cache()), ("attention_kernel",)),
    "split": (
        paged.paged_attention,
        lambda: _attention(_cache(), num_splits=2),
        ("attention_kernel", "reduce_kernel"),
    ),
    "write": (write.write_kv_cache, lambda: _write(_cache()), ("_write_kernel",)),
    "mla": (decode.mla_decode, _mla, ("mla_decode_kernel", "mla_reduce_kernel")),
    "scan": (scan.ssd_prefill, lambda: _scan(num_segments=2), ("ssd_prefill_kernel", "ssd_carry_kernel")),
    "delta": (gdn.gdn_prefill, _delta, ("gdn_chunks_kernel", "gdn_prefill_kernel")),
    "delta in segments": (
        gdn.gdn_prefill,
        lambda: _delta(num_segments=3),
        ("gdn_chunks_kernel", "gdn_carry_kernel", "gdn_join_kernel", "gdn_prefill_kernel"),
    ),
    "delta step": (gdn_step.gdn_decode, _gdn, ("gdn_decode_kernel",)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_launches_the_same_on_its_tensors(kernels, name):
    operation, make, names = CALLS[name]
    first, second = make(), make()
    operation(**first)
    operation(**second)
    for kernel in names:
        (how, grid, arguments), (again, same_grid, passed) = kernels[kernel].launches
        assert (how, again) == ("compile", "run")
        assert grid == same_grid
        assert len(passed) == len(kernels[kernel].arg_names)
        assert not any(value is not None for value in passed[len(arguments) :])
        for one, other in zip(arguments, passed, strict=False):
            if isinstance(one, torch.Tensor):
                assert prepared.signature(one) == prepared.signature(other)
                assert one is not other
            else:
                assert one == other


def test_prepared_calls_keep_no_tensor(kernels):
    held = []
    for name, (operation, make, _) in CALLS.items():
        given = make()
        operation(**given)
        held += [(name, weakref.ref(value)) for value in given.values() if isinstance(value, torch.Tensor)]
    for kernel in kernels.values():
        kernel.launches.clear()
    del given
    gc.collect()
    assert len(prepared._calls) == len(CALLS)
    assert {name for name, tensor in held if tensor() is not None} == set()


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that is no multiple of 16."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same with rows twice as far apart."""
    return torch.zeros(tensor.shape[0], 2, *tensor.shape[1:], dtype=tensor.dtype)[:, 0]


OTHERS = {
    "address": lambda given: {"query": _shifted(given["query"])},
    "address of the cache": lambda given: {"cache": PagedCache(_shifted(given["cache"].key), given["cache"].value)},
    "stride": lambda given: {"out": _strided(given["out"])},
    "stride of the cache": lambda given: {"cache": PagedCache(given["cache"].key, _strided(given["cache"].value))},
    "dtype": lambda given: {"out": given["out"].float()},
    "tokens": lambda given: {"query": given["query"][:2], "out": given["out"][:2]},
    "storage beyond 2 GiB": lambda _: {"query": torch.empty(1 << 30, dtype=torch.float16)[: 3 * 128].view(3, 4, 32)},
    "query length": lambda _: {"max_query_len": 2},
    "length": lambda _: {"max_seq_len": 65},
    "scale": lambda _: {"scale": 0.2},
    "causal": lambda _: {"causal": False},
    "window": lambda _: {"sliding_window": 8},
    "softcap": lambda _: {"softcap": 3.0},
    "splits": lambda _: {"num_splits": 3},
    "batch invariance": lambda _: {"batch_invariant": True},
    "slopes": lambda _: {"alibi_slopes": torch.zeros(HEADS)},
    "sinks": lambda _: {"sinks": torch.zeros(HEADS)},
    "lse": lambda _: {"lse": torch.zeros(SEQS, HEADS)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_different_is_prepared_anew(kernels, name):
    given = _attention(_cache())
    paged.paged_attention(**given)
    paged.paged_attention(**given | OTHERS[name](given))
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile", "compile"]


@pytest.mark.usefixtures("kernels")
def test_a_wrong_call_is_refused_after_a_right_one():
    given = _attention(_cache())
    paged.paged_attention(**given)
    with pytest.raises(ArgumentError, match=r"seq_lens: got torch\.int64"):
        paged.paged_attention(**given | {"seq_lens": given["seq_lens"].long()})
    unlike = _cache(quantisation=Quantisation("e4m3fn", torch.ones(()), torch.ones(())))
    with pytest.raises(ArgumentError, match="cache"):
        paged.paged_attention(**given | {"cache": unlike})


@pytest.mark.usefixtures("kernels")
def test_debug_checks_each_time_and_keeps_nothing():
    given = _attention(_cache(), debug=True)
    paged.paged_attention(**given)
    given["seq_lens"][0] = 1000
    with pytest.raises(ArgumentError, match="seq_lens: got 1000"):
        paged.paged_attention(**given)
    assert not prepared._calls


@pytest.mark.usefixtures("kernels")
def test_other_tables_of_mla_are_other_calls():
    given = _mla()
    shape = MlaShape(latent_size=64, rope_size=16, element_bytes=2, num_heads=16, max_query_len=1)
    own = tables.allocate(given["query"], shape, SEQS)
    decode.mla_decode(**given, tables=own)
    wrong = dataclasses.replace(own, launch=dataclasses.replace(own.launch, fixed_tiles=7))
    with pytest.raises(ArgumentError, match="tables: got"):
        decode.mla_decode(**given, tables=wrong)


def test_what_is_kept_has_a_bound_and_the_oldest_makes_room(kernels, monkeypatch):
    monkeypatch.setattr(prepared, "MOST", 2)
    for length in range(40, 45):
        paged.paged_attention(**_attention(_cache(), max_seq_len=length))
        assert len(prepared._calls) <= 2
    paged.paged_attention(**_attention(_cache(), max_seq_len=43))
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile"] * 5 + ["run"]


def test_a_growing_sequence_is_prepared_at_few_lengths(kernels):
    """A service has another bound at each step: of every power of two the eighths are calls of their own."""
    for length in range(1025, 2049):
        paged.paged_attention(**_attention(_cache(), max_seq_len=length))
    assert [how for how, *_ in kernels["attention_kernel"].launches].count("compile") == 8


def test_prompts_of_other_lengths_share_a_call(kernels):
    """Chunks of a prompt: so many tokens of so many sequences, whatever the longest of them has."""
    given = _attention(_cache())
    for longest in range(17, 33):
        paged.paged_attention(**given | {"max_query_len": longest})
    assert [how for how, *_ in kernels["attention_kernel"].launches].count("compile") == 1


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_cache_that_is_pointed_elsewhere_is_looked_at_anew(kernels, side):
    """A server that sleeps and wakes up has the same tensor in other memory, here 4 bytes off a 16-byte boundary."""
    cache = _cache()
    paged.paged_attention(**_attention(cache))
    tensor = getattr(cache, side)
    other = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
    tensor.set_(other.untyped_storage(), 2, tensor.shape, tensor.stride())
    paged.paged_attention(**_attention(cache))
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile", "compile"]


@pytest.mark.usefixtures("kernels")
def test_a_cache_that_is_pointed_at_a_wrong_shape_is_refused():
    cache = _cache()
    paged.paged_attention(**_attention(cache))
    cache.value.set_(torch.zeros(BLOCKS, BLOCK, KV_HEADS, SIZE + 8, dtype=torch.float16))
    with pytest.raises(ArgumentError, match=r"cache\.value"):
        paged.paged_attention(**_attention(cache))


def test_settings_of_triton_that_change_are_other_calls(kernels, monkeypatch):
    def call():
        paged.paged_attention(**_attention(_cache()))

    call()
    monkeypatch.setenv("TRITON_HIP_USE_ASYNC_COPY", "1")
    call()
    monkeypatch.setenv("UNRELATED", "1")
    call()
    monkeypatch.delenv("TRITON_HIP_USE_ASYNC_COPY")
    call()
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile", "compile", "run", "run"]


def test_another_driver_makes_other_calls(kernels, monkeypatch):
    """Two archs in one process, on tensors of one device: what the first compiled is not run on the second."""
    for name in ("gfx942", "gfx950", "gfx942"):
        monkeypatch.setattr(prepared, "_driver", lambda name=name: name)
        paged.paged_attention(**_attention(_cache()))
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile", "compile", "run"]


def test_hooks_that_want_each_launch_get_each(kernels):
    kernels["attention_kernel"].pre_run_hooks = [print]
    for _ in range(2):
        paged.paged_attention(**_attention(_cache()))
    assert [how for how, *_ in kernels["attention_kernel"].launches] == ["compile", "compile"]


def test_without_a_gpu_the_interpreter_is_named(monkeypatch):
    """Triton's own words there are `0 active drivers ([])`."""

    class NoDriver:
        @property
        def active(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(prepared, "driver", NoDriver())
    monkeypatch.setattr(prepared.knobs.runtime, "interpret", False)
    with pytest.raises(ArgumentError, match=r"got no GPU.*set TRITON_INTERPRET=1"):
        prepared.compiler_settings()
