# SPDX-License-Identifier: Apache-2.0
"""What vLLM's kernels do wrong (declared.toml): each fault shows, and what comes of it is what the fault predicts."""

from __future__ import annotations

import re
import tomllib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support import vllm_kernels
from support.attending import HALF, attend, check, expected
from support.mla_steps import step
from support.pools import FLOAT8, assert_same_bits, batch, pool

from pagedkv.attention import reference
from pagedkv.cache import reference as cache_reference
from pagedkv.cache.cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).with_name("declared.toml")
ADDRESS = re.compile(r"https://github\.com/(vllm-project/vllm|ROCm/aiter)/(issues|pull)/\d+")


@dataclass(frozen=True)
class Fault:
    """An entry of declared.toml."""

    kernel: str
    does: str
    raises: str
    """Name of the exception, or several with | between them."""
    says: str
    """Regular expression of its message; {names} are filled in by the test."""
    address: str = ""
    """Upstream's; empty where the test itself is the reproduction."""


def faults() -> dict[str, Fault]:
    """Name -> fault."""
    return {name: Fault(**entry) for name, entry in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


@contextmanager
def declared(name: str, **facts: object) -> Iterator[None]:
    """A block that must raise what the fault declares; any other exception goes on, and none is a failure."""
    fault = faults()[name]
    says = re.sub(r"\{(\w+)\}", lambda found: re.escape(str(facts[found[1]])), fault.says)
    try:
        yield
    except Exception as error:
        # Triton says where in a kernel it failed, and has what Python raised as the cause.
        words = f"{error}\n{error.__cause__ or ''}"
        if type(error).__name__ not in fault.raises.split("|") or not re.search(says, words, re.MULTILINE):
            raise
    else:
        pytest.fail(f"{fault.kernel} is right where it is declared wrong: take {name} out of {TABLE.name} and its test")


def unrecorded(*_: object) -> None:
    """Stand-in for `record_property`: figures of a wrong answer are no figures of the kernel."""


def on_machine_code(request) -> bool:
    return bool(request.config.getoption("amdgcn"))


def check_nan(out, golden, wrong, name, op="attention") -> None:
    """Tokens `wrong` are NaN in all heads, as the fault predicts, and all others right."""
    rows = [[int(token), head] for token in wrong.nonzero() for head in range(out.shape[1])]
    facts = {"rows": len(rows), "total": out.shape[0] * out.shape[1], "first": rows[:5]}
    with declared(name, **facts):
        check(out, golden, unrecorded, op)
    assert out[wrong].isnan().all()
    check(out[~wrong], golden[~wrong.cpu()], unrecorded, op)


@pytest.mark.device
@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("kernel", ["paged-attention", "prefix-prefill"])
def test_window_over_freed_blocks(kernel, window, device):
    """Keys that no query sees are NaN, as are the blocks that hold nothing else."""
    call, queries, seq_lens = {
        "paged-attention": (vllm_kernels.paged_attention, [1, 1, 1], [7, 150, 65]),
        "prefix-prefill": (vllm_kernels.prefix_prefill, [19, 7, 3], [19, 150, 65]),
    }[kernel]
    data = batch(
        layout_name="native-interleaved",
        dtype=HALF,
        device=device,
        num_q_heads=8,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        query_lens=queries,
        seq_lens=seq_lens,
        window=window,
    )
    out = attend(data, call=call, sliding_window=window)
    freed = torch.tensor([seq_len - query - window + 1 > 0 for seq_len, query in zip(seq_lens, queries, strict=True)])
    wrong = freed.repeat_interleave(torch.tensor(queries)).to(device)
    check_nan(out, expected(data, sliding_window=window), wrong, f"{kernel}-window")


@pytest.mark.device
def test_block_table_that_ends_with_its_last_block(device, request):
    """Tiles of 32 tokens, blocks of 48: the last tile of 129 tokens ends in a fourth block, and the table has three.

    What it reads there it does not use, so only the executor, which knows where a tensor ends, sees it.
    """
    data = batch(
        layout_name="native",
        dtype=HALF,
        device=device,
        num_q_heads=4,
        num_kv_heads=4,
        head_size=128,
        block_size=48,
        query_lens=[1, 1],
        seq_lens=[1, 129],
    )
    seen = nullcontext()
    if on_machine_code(request):
        seen = declared("paged-attention-block-table", offset=data.block_table.numel() * 4)
    with seen:
        check(attend(data, call=vllm_kernels.paged_attention), expected(data), unrecorded)


@pytest.mark.device
def test_flash_write_with_strides_of_its_own_for_v(device, request):
    """V head-first, K token-first, and V's blocks so far apart that what goes wrong stays in its pool."""
    key_side = pool("nhd", (4, 16, 3, 48), "float16", device)
    value_side = pool("hnd", (4, 16, 3, 48), "float16", device, padding=40)
    want, predicted = value_side.clone(), value_side.clone()
    key, value = torch.randn(2, 20, 3, 48, device=device, dtype=torch.float16)
    slots = torch.randperm(64)[:20].to(device)
    want.value[slots // 16, slots % 16] = value
    wrong = predicted.value.as_strided(predicted.value.shape, key_side.key.stride())
    wrong[slots // 16, slots % 16] = value
    with declared("flash-write-value-strides", total=want.storage.numel()):
        vllm_kernels.write(key, value, PagedCache(key_side.key, value_side.value), slots)
        assert_same_bits(value_side.storage, want.storage, "storage of V")
    if on_machine_code(request):  # which stops at the first write between two heads
        return
    assert_same_bits(value_side.storage, predicted.storage, "storage of V, as declared")
    assert torch.equal(key_side.key[slots // 16, slots % 16], key)


@pytest.mark.device
@pytest.mark.parametrize("layout", ["shuffle", "shuffle-interleaved"])
def test_shuffle_gather_of_a_quantised_cache(layout, device):
    kind = vllm_kernels.fp8_format()
    shape = {"num_q_heads": 2, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
    data = batch(
        layout_name=layout, dtype="float16", device=device, query_lens=[1], seq_lens=[33], quantised=kind, **shape
    )
    outs = [torch.full((33, 2, 64), float("nan"), dtype=torch.float16, device=device) for _ in range(6)]
    asked = {
        "cu_seq_lens": torch.tensor([0, 33], dtype=torch.int32, device=device),
        "token_to_seq": torch.zeros(33, dtype=torch.int32, device=device),
        "seq_starts": torch.zeros(1, dtype=torch.int32, device=device),
    }
    vllm_kernels.gather(data.pool.cache, *outs[:2], data.block_table, **asked)
    sides = {side: data.pool.rows(side).float() for side in ("key", "value")}
    cache_reference.gather(*sides.values(), *outs[2:4], data.block_table, **asked)
    with declared("shuffle-gather-scale", total=outs[0].numel()):
        assert_same_bits(outs[0], outs[2], "key")
    scales = {side: getattr(data.pool.quantisation, f"{side}_scale").double() for side in sides}
    codes = [(data.pool.rows(side) / scales[side]).float() for side in sides]
    cache_reference.gather(*codes, *outs[4:], data.block_table, **asked)
    assert_same_bits(outs[0], outs[4], "key, as declared")
    assert_same_bits(outs[1], outs[5], "value, as declared")


@pytest.mark.device
@pytest.mark.parametrize("layout", ["shuffle", "shuffle-interleaved"])
def test_shuffle_write_to_a_quantised_cache(layout, device):
    """Powers of two, which FP8 holds exactly: nothing is rounded, so that the scale alone can be wrong."""
    kind = vllm_kernels.fp8_format()
    got = pool(layout, (3, 16, 2, 64), "float16", device, quantised=kind)
    got.quantisation.key_scale.fill_(0.25)
    got.quantisation.value_scale.fill_(0.5)
    want, predicted = got.clone(), got.clone()
    predicted.quantisation.key_scale.fill_(1)
    predicted.quantisation.value_scale.fill_(1)
    gen = torch.Generator().manual_seed(0)
    exponents = torch.randint(-2, 3, (2, 20, 2, 64), generator=gen)
    key, value = (2.0**exponents).to(device, torch.float16)
    slots = torch.randperm(48, generator=gen)[:20].to(device)
    vllm_kernels.write(key, value, got.cache, slots)
    for pages in (want, predicted):
        pages.put("key", slots // 16, slots % 16, key)
        pages.put("value", slots // 16, slots % 16, value)
    with declared("shuffle-write-scale", wrong=key.numel() + value.numel(), total=got.storage.numel()):
        assert_same_bits(got.storage, want.storage, "storage of the pool")
    assert_same_bits(got.storage, predicted.storage, "storage of the pool, as declared")
    assert got.storage.view(FLOAT8[kind]).float().isnan().sum() == got.storage.numel() - key.numel() - value.numel()


@pytest.mark.device
@pytest.mark.parametrize("head_size", [80, 96, 192])
def test_head_size_that_is_no_power_of_two(head_size, device):
    got = pool("shuffle", (3, 16, 2, head_size), "float16", device)
    key, value = torch.randn(2, 5, 2, head_size, device=device, dtype=torch.float16)
    with declared("shuffle-write-head-size"):
        vllm_kernels.write(key, value, got.cache, torch.arange(5, device=device))
    rows = pool("nhd", (3, 16, 2, head_size), "float16", device)
    numbers = {"dtype": torch.int32, "device": device}
    with declared("gather-head-size"):
        vllm_kernels.gather(
            rows.cache,
            key,
            value,
            torch.zeros(1, 1, **numbers),
            cu_seq_lens=torch.tensor([0, 5], **numbers),
            token_to_seq=torch.zeros(5, **numbers),
            seq_starts=torch.zeros(1, **numbers),
        )


def test_paged_attention_has_no_soft_cap():
    launcher = vllm_kernels.find(f"{vllm_kernels.OPS}.chunked_prefill_paged_decode:chunked_prefill_paged_decode")
    with declared("paged-attention-cap"):
        launcher(softcap=5.0)


@pytest.mark.device
def test_mla_decode_of_an_empty_sequence(device):
    data = step(device, 16, [17, 0, 33], query_lens=[1, 1, 1], rope=64, dtype=HALF)
    out, _ = vllm_kernels.mla_decode(data, splits=4, fill=7.0)
    rows = data.cache.unsqueeze(2)
    golden, _ = reference.attention(data.query, rows, rows[..., : data.latent], **data.metadata, scale=data.scale)
    wrong = torch.tensor([False, True, False], device=device)
    check_nan(out, golden, wrong, "mla-empty-sequence", "mla")


def test_every_fault_has_an_address_or_the_test_that_shows_it():
    """Each is met by a test here; an address is an issue or a pull request of vLLM or aiter."""
    source = Path(__file__).read_text(encoding="utf-8")
    for name, fault in faults().items():
        assert f'"{name}"' in source or name.endswith("-window"), name
        assert not fault.address or ADDRESS.fullmatch(fault.address), name
        re.compile(fault.says)


def test_a_fault_that_is_gone_is_red():
    with (
        pytest.raises(pytest.fail.Exception, match="is right where it is declared wrong"),
        declared("gather-head-size"),
    ):
        pass


@pytest.mark.parametrize("error", [ValueError("arange's range must be a power of 2"), AssertionError("12 elements")])
def test_another_reason_than_the_declared_one_is_red(error):
    with pytest.raises(type(error)), declared("gather-head-size"):
        raise error
