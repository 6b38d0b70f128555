# SPDX-License-Identifier: Apache-2.0
"""vLLM's copies of Mamba states between blocks, for the prefix cache of hybrids: every byte of the pools is compared.

What nobody owns is NaN in every dtype (all bits set), what somebody owns is random bits, so a copy from a wrong place,
of a wrong length or to a wrong place shows up, wherever it lands. Pools are reached through addresses in memory.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.machine_code import SESSION
from support.pools import assert_same_bits

from pagedkv.audit import imports

pytestmark = pytest.mark.device

BLOCK_SIZE = 8
"""Tokens of a Mamba block."""
DRAFTS = 3
COLUMNS = 6
REQUESTS = 9
NOBODY = 2
"""Blocks in front that are in no table."""
BLOCKS = NOBODY + REQUESTS * COLUMNS


@dataclass(frozen=True)
class Layer:
    """States of one layer, side by side in a page: a convolution's tokens, then a recurrent state or none."""

    kind: str
    channels: int
    dtype: torch.dtype
    state: tuple[int, ...] = ()
    state_dtype: torch.dtype = torch.float32
    padding: int = 0
    tokens: int = 3 + DRAFTS

    @property
    def conv_bytes(self) -> int:
        return self.tokens * self.channels * self.dtype.itemsize

    @property
    def page(self) -> int:
        return self.conv_bytes + math.prod(self.state) * self.state_dtype.itemsize * bool(self.state) + self.padding

    def views(
        self, storage: torch.Tensor, *, dim_first: bool, page: int = 0, blocks: int = BLOCKS
    ) -> list[torch.Tensor]:
        """The convolution's [blocks, tokens, channels], or with channels first, and [blocks, *state]."""
        page = page or self.page
        inner = (self.channels, self.tokens) if dim_first else (self.tokens, self.channels)
        found = [strided(storage, self.dtype, 0, page, (blocks, *inner))]
        if self.state:
            found.append(strided(storage, self.state_dtype, self.conv_bytes, page, (blocks, *self.state)))
        return found


def strided(storage: torch.Tensor, dtype: torch.dtype, offset: int, page: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor in each page."""
    size = dtype.itemsize
    dense = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
    return storage.view(dtype).as_strided(shape, (page // size, *dense), offset // size)


LAYERS = (
    # A state of 135,340 bytes: 16 tiles of 2 turns of 1024 words, the last ones cut off; 1030 channels: 2 turns too.
    Layer("MAMBA2", 1030, torch.bfloat16, (5, 67, 101), padding=48),
    # Pages of 274 bytes, so that source and destination are aligned alike or not, and neither may be.
    Layer("GDN_ATTN", 9, torch.float16, (3, 5, 5), torch.float16, padding=16),
    Layer("SHORT_CONV", 12, torch.float32),
)
"""One of each group: groups have tables of their own, and the last has no recurrent state."""


class Pools:
    """The layers' pools and tables, what vLLM's workers keep of them, and what they must hold in the end."""

    def __init__(self, module, device: str, reach, *, dim_first: bool) -> None:
        torch.manual_seed(5)
        self.module, self.device = module, device
        self.storages = [torch.full(((BLOCKS + 1) * each.page,), 255, dtype=torch.uint8) for each in LAYERS]
        order = [torch.randperm(REQUESTS * COLUMNS).int() + NOBODY for _ in LAYERS]
        for layer, storage in zip(LAYERS, self.storages, strict=True):
            for view in layer.views(storage, dim_first=dim_first):
                view[NOBODY:] = (
                    torch.randint(256, (view[NOBODY:].nbytes,), dtype=torch.uint8)
                    .view(view.dtype)
                    .view(view[NOBODY:].shape)
                )
        self.storages = [storage.to(device) for storage in self.storages]
        self.tables = [ids.view(REQUESTS, COLUMNS).to(device) for ids in order]
        self.golden = [storage.clone() for storage in self.storages]
        self.was = [
            layer.views(each.clone(), dim_first=dim_first) for layer, each in zip(LAYERS, self.storages, strict=True)
        ]
        self.views = [layer.views(each, dim_first=dim_first) for layer, each in zip(LAYERS, self.storages, strict=True)]
        self.expected = [
            layer.views(each, dim_first=dim_first) for layer, each in zip(LAYERS, self.golden, strict=True)
        ]
        self.dim_first = dim_first
        reach(*(view for views in self.views for view in views), *self.tables)
        self.config, self.copy_funcs = configuration(module)
        self.layers = {
            each.kind: SimpleNamespace(kv_cache=views) for each, views in zip(LAYERS, self.views, strict=True)
        }
        self.context = module.MambaSpecDecodeGPUContext.create(
            REQUESTS,
            self.config,
            self.copy_funcs,
            torch.device(device),
            lambda size, dtype: SimpleNamespace(gpu=torch.zeros(size, dtype=dtype, device=device)),
        )
        self.context.initialize_from_forward_context(self.config, self.layers, self.copy_funcs, self.tables)

    def int32(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def must_copy(self, row: int, source: int, target: int, bias: int) -> None:
        """Column `source` of a request becomes column `target`, `bias` drafts of it accepted."""
        for (conv, *state), (old_conv, *old_state), table in zip(self.expected, self.was, self.tables, strict=True):
            ids = table[row].tolist()
            kept = slice(None, conv.shape[-1 if self.dim_first else 1] - bias)
            if self.dim_first:
                conv[ids[target], :, kept] = old_conv[ids[source], :, bias:]
            else:
                conv[ids[target], kept] = old_conv[ids[source], bias:]
            for new, old in zip(state, old_state, strict=True):
                new[ids[target]] = old[ids[source + bias]]

    def check(self) -> None:
        for layer, storage, golden in zip(LAYERS, self.storages, self.golden, strict=True):
            pages = (each.view(BLOCKS + 1, -1).cpu() for each in (storage, golden))
            assert_same_bits(*pages, f"blocks of {layer.kind}")


def configuration(module):
    """vLLM's description of the layers, a group each, and how the states of each kind are copied."""
    kinds = sys.modules["vllm.v1.kv_cache_interface"]
    backend = kinds.MambaAttentionBackendEnum
    groups = [
        kinds.KVCacheGroupSpec(
            [layer.kind],
            kinds.MambaSpec(
                block_size=BLOCK_SIZE,
                shapes=((layer.tokens, layer.channels), *([layer.state] if layer.state else [])),
                dtypes=(layer.dtype, layer.state_dtype),
                mamba_type=backend[layer.kind],
                mamba_cache_mode="align",
                num_speculative_blocks=DRAFTS,
            ),
        )
        for layer in LAYERS
    ]
    both = (module.get_conv_copy_spec, module.get_temporal_copy_spec)
    functions = {backend[layer.kind]: both[: 1 + bool(layer.state)] for layer in LAYERS}
    return kinds.KVCacheConfig(BLOCKS, [], groups), functions


@pytest.fixture
def reach(request):
    """reach(*tensors): kernels find these through addresses; a real GPU and the interpreter need not be told."""

    def reached(*tensors: torch.Tensor) -> None:
        if request.config.getoption("amdgcn"):
            request.node.stash[SESSION].reached += tensors

    return reached


@pytest.fixture
def utils():
    return imports.vllm_worker("mamba_utils")


@pytest.fixture(params=[False, True], ids=["tokens-first", "channels-first"])
def dim_first(request, utils, monkeypatch):
    """How a page holds a convolution's tokens (VLLM_SSM_CONV_STATE_LAYOUT)."""
    monkeypatch.setattr(utils, "is_conv_state_dim_first", lambda: request.param)
    return request.param


PRECOPIES = {  # column before, column now, drafts accepted
    "new": (-1, 0, 0),
    "stays": (1, 1, 2),
    "next": (0, 1, 0),
    "one-accepted": (1, 2, 1),
    "source-is-target": (0, 1, 1),  # of the recurrent state, which is copied onto itself
    "last-column": (2, 5, 3),
    "chunk-of-many-blocks": (0, 4, 0),
}


def precopy(pools: Pools, *, mapped: bool) -> None:
    """Each request in a slot; the runner's second version names them by an index, -1 for a row of nobody's."""
    slots = [8, 0, 5, 3, 1, 7, 4] if mapped else range(len(PRECOPIES))
    before, now, drafts = torch.full((3, REQUESTS), 77, dtype=torch.int32)
    for slot, (source, target, bias) in zip(slots, PRECOPIES.values(), strict=True):
        before[slot], now[slot], drafts[slot] = source, target, bias
        if source >= 0 and source != target:
            pools.must_copy(slot, source, target, bias)
    mapping = pools.int32(*slots, -1) if mapped else None
    pools.context.run_fused_precopy(
        len(PRECOPIES) + mapped, *(each.to(pools.device) for each in (now, before, drafts)), mapping
    )
    pools.check()


@pytest.mark.parametrize("mapped", [True, False], ids=["v2", "v1"])
def test_precopy_mamba_align(mapped, dim_first, utils, device, reach):
    precopy(Pools(utils, device, reach, dim_first=dim_first), mapped=mapped)


STEPS = {  # tokens computed before, scheduled, drafts among them, accepted (with the one that is sampled)
    "inside-a-block": (1, 4, 3, 2),
    "boundary-not-reached": (4, 4, 3, 3),
    "boundary-in-drafts": (5, 4, 3, 3),
    "all-accepted": (5, 4, 3, 4),
    "moved-in-its-block": (4, 4, 3, 4),
    "boundary-at-the-sampled": (7, 1, 0, 1),
    "second-boundary": (14, 4, 3, 4),
    "prompt-of-two-blocks": (0, 16, 0, 1),
    "boundary-before": (8, 4, 3, 4),
}


def postprocess(pools: Pools, *, mapped: bool) -> None:
    """After the step: states of the last full block are put where a later request with its prefix looks for them."""
    slots = [8, 0, 5, 3, 1, 7, 4, 2, 6] if mapped else range(REQUESTS)
    computed, scheduled, drafts, accepted = torch.tensor(list(STEPS.values())).int().T
    column, neutral = -(-(computed + scheduled) // BLOCK_SIZE) - 1, accepted.clone()
    after = computed + scheduled - drafts + accepted - 1
    for row, slot in enumerate(slots):
        running, boundary = after[row] - accepted[row] + 1, after[row] // BLOCK_SIZE * BLOCK_SIZE
        if boundary < running:
            continue
        source, target, bias = int(column[row]), int(boundary) // BLOCK_SIZE - 1, int(boundary - running)
        if source == target:
            neutral[row] = 1
        if source != target or bias:
            pools.must_copy(slot, source, target, bias)

    def by_slot(values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values).index_copy_(0, torch.tensor(slots), values).to(pools.device)

    given = by_slot(accepted)
    if mapped:
        pools.context.run_fused_postprocess_align(REQUESTS, given, by_slot(column), by_slot(after), pools.int32(*slots))
    else:
        pools.context.run_fused_postprocess(
            REQUESTS, given, by_slot(column), by_slot(scheduled), by_slot(computed), by_slot(drafts)
        )
        given = pools.context.num_accepted_tokens_out
    pools.check()
    assert given.tolist() == by_slot(neutral).tolist()


@pytest.mark.parametrize("mapped", [True, False], ids=["v2", "v1"])
def test_postprocess_mamba(mapped, dim_first, utils, device, reach):
    postprocess(Pools(utils, device, reach, dim_first=dim_first), mapped=mapped)


def test_no_request_is_no_copy(dim_first, utils, device, reach):
    pools = Pools(utils, device, reach, dim_first=dim_first)
    nothing = pools.int32(*[0] * REQUESTS)
    pools.context.run_fused_precopy(0, nothing, nothing, nothing, None)
    pools.context.run_fused_precopy(2, nothing, nothing - 1, nothing, pools.int32(-1, 3))
    pools.context.run_fused_postprocess_align(0, nothing, nothing, nothing, nothing[:0])
    buffers = SimpleNamespace(offset=0)
    utils.do_mamba_copy_block(buffers)
    pools.check()


def copy_of_a_block(pools: Pools, utils) -> None:
    """The first runner's way without drafts: addresses and sizes on the host, one program a copy."""
    moves = [(0, 0, 1, 0), (3, 1, 1, 0), (4, 4, 5, 0), (2, 2, 2, 2), (7, 1, 3, 1)]  # slot, source, target, bias
    if pools.dim_first:
        moves = moves[:3]  # vLLM refuses drafts there
    entries = len(moves) * sum(1 + bool(layer.state) for layer in LAYERS)
    arrays = [torch.zeros(entries, dtype=kind) for kind in (torch.uint64, torch.uint64, torch.int32)]
    buffers = [
        SimpleNamespace(np=each.numpy(), copy_to_gpu=lambda n, each=each: each[:n].to(pools.device)) for each in arrays
    ]
    kept = SimpleNamespace(src_ptrs=buffers[0], dst_ptrs=buffers[1], sizes=buffers[2], offset=0)
    for slot, source, target, bias in moves:
        state = SimpleNamespace(block_ids=[table[slot].tolist() for table in pools.tables])
        utils.collect_mamba_copy_meta(
            kept, pools.config, pools.copy_funcs, [0, 1, 2], source, target, bias, state, pools.layers
        )
        if source != target or bias:
            pools.must_copy(slot, source, target, bias)
    utils.do_mamba_copy_block(kept)
    pools.check()


def test_collect_and_batch_memcpy(dim_first, utils, device, reach):
    copy_of_a_block(Pools(utils, device, reach, dim_first=dim_first), utils)


def test_batch_memcpy_of_any_bytes(utils, device, reach):
    """Sizes around its 1024 bytes, none, unaligned, onto itself, and to the left over the source."""
    torch.manual_seed(3)
    memory = torch.randint(256, (40_000,), dtype=torch.uint8, device=device)
    copies = [  # from, to, bytes
        (0, 20_000, 0),
        (1, 20_001, 1),
        (10, 20_010, 1023),
        (1100, 21_103, 1024),
        (3001, 23_000, 1025),
        (5000, 5000, 700),
        (6001, 6000, 1500),
        (8003, 8000, 4099),
        (14_000, 12_500, 3000),
    ]
    golden, before = memory.clone(), memory.clone()
    for source, target, size in copies:
        golden[target : target + size] = before[source : source + size]
    reach(memory)
    sources, targets = (
        torch.tensor([memory.data_ptr() + each[side] for each in copies], dtype=torch.uint64) for side in (0, 1)
    )
    sizes = torch.tensor([each[2] for each in copies], dtype=torch.int32)
    utils.batch_memcpy(*(each.to(device) for each in (sources, targets, sizes)))
    assert_same_bits(memory, golden, "bytes")


def aligned(pools: Pools, lengths: tuple[int, ...]) -> None:
    """The block of each request's last token and those of its drafts, for each group; launched as vLLM does on GPUs."""
    context, module = pools.context, pools.module
    given, out = pools.int32(*lengths), context.aligned_state_indices.fill_(-7)
    module.get_aligned_state_indices_multi_group_kernel[(1,)](
        context.aligned_index_block_table_ptrs,
        given,
        out,
        COLUMNS,
        1,
        *out.stride(),
        len(lengths),
        CACHE_BLOCK_SIZE=BLOCK_SIZE,
        NUM_GROUPS=3,
        BLOCK_GROUPS=4,
        NUM_STATE_SLOTS=1 + DRAFTS,
        BLOCK_STATE_SLOTS=4,
        BLOCK_ROWS=32,
        num_warps=1,
    )
    golden = torch.full_like(out, -7)
    for group, table in enumerate(pools.tables):
        for row, length in enumerate(lengths):
            first = max(0, (length - 1) // BLOCK_SIZE)
            golden[group, row] = table[row, first : first + 1 + DRAFTS]
    assert_same_bits(out, golden, "block ids")


def test_aligned_state_indices(utils, device, reach):
    aligned(Pools(utils, device, reach, dim_first=False), (0, 1, 8, 9, 16, 17, 24))


def test_preprocess_mamba_align(utils, device):
    """Which column a request copies from and to, and that its count of accepted tokens is then neutral."""
    slots, lengths = [4, 0, 7, 2], [3, 1, 9, 4]
    state, computed, accepted = (torch.full((REQUESTS,), 55, dtype=torch.int32) for _ in range(3))
    for slot, at, done, took in zip(slots, (-1, 0, 1, 0), (0, 8, 8, 4), (1, 3, 2, 4), strict=True):
        state[slot], computed[slot], accepted[slot] = at, done, took
    golden = [state.clone(), accepted.clone(), torch.full_like(state, -5), torch.full_like(state, -5)]
    for row, slot in enumerate(slots):
        golden[2][slot], golden[3][slot] = state[slot], accepted[slot] - 1
        golden[0][slot] = -(-(computed[slot] + lengths[row]) // BLOCK_SIZE) - 1
        if state[slot] >= 0 and state[slot] != golden[0][slot]:
            golden[1][slot] = 1
    assert (golden[1][[0, 2]] == torch.tensor([1, 4])).all()
    made = [
        each.clone().to(device) for each in (state, accepted, torch.full_like(state, -5), torch.full_like(state, -5))
    ]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    mapping = torch.tensor(slots).int().to(device)
    utils.preprocess_mamba_align_fused_kernel[(1,)](
        mapping,
        made[0],
        computed.to(device),
        starts,
        made[1],
        made[2],
        made[3],
        len(slots),
        BLOCK_SIZE=256,
        MAMBA_BLOCK_SIZE=BLOCK_SIZE,
    )
    for got, want in zip(made, golden, strict=True):
        assert_same_bits(got.cpu(), want, "columns, counts, sources, drafts")


def test_counts_of_accepted_tokens(device):
    """At least 1 for each request that is there; a state that was recovered is in its last block, with a count of 1."""
    hybrid, recover = (imports.vllm_worker(f"gpu.model_states.{name}") for name in ("mamba_hybrid", "recoverssm"))
    slots, sampled = torch.tensor([3, -1, 0, 4]).int().to(device), torch.tensor([0, 9, 2, 1]).int().to(device)
    counts, columns = torch.full((2, 6), 7, dtype=torch.int32, device=device)
    hybrid._scatter_num_accepted_kernel[(4,)](slots, sampled, counts)
    assert counts.tolist() == [2, 7, 7, 1, 1, 7]
    hybrid._fill_num_accepted_kernel[(4,)](slots, counts, 5)
    assert counts.tolist() == [5, 7, 7, 5, 5, 7]
    rows, computed = torch.tensor([3, 1, 0]).int().to(device), torch.tensor([16, 5, 99, 7]).int().to(device)
    recover._postprocess_recoverssm_align_kernel[(3,)](
        slots, sampled, rows, computed, columns, counts, MAMBA_BLOCK_SIZE=BLOCK_SIZE, BLOCK_TABLE_WIDTH=COLUMNS
    )
    assert columns.tolist() == [7, 7, 7, 1, 0, 7]
    assert counts.tolist() == [5, 7, 7, 1, 1, 7]


def test_store_prefill_checkpoint(device, vllm_ops):
    """A state in the midst of a prompt: of the convolution its last inputs, of the chunks the one that ends there."""
    torch.manual_seed(9)
    layer, starts, offsets, targets, chunks = (
        Layer("MAMBA2", 300, torch.float16, (2, 5, 70)),
        [0, 20, 29, 61],
        [16, 0, 24],
        [3, 9, 5],
        [1, 0, 3],
    )
    storage = torch.full((8 * layer.page,), 255, dtype=torch.uint8, device=device)
    conv, state = layer.views(storage, dim_first=False, blocks=8)
    conv = conv.transpose(1, 2)
    x = torch.full((61, 320), float("nan"), dtype=torch.float16, device=device)
    x[:, :300] = torch.randn(61, 300)
    behind = torch.full((4, 800), float("nan"), device=device)
    behind[:, :700] = torch.randn(4, 700)
    behind = behind[:, :700].view(4, 2, 5, 70)
    golden = storage.clone()
    wanted_conv, wanted_state = layer.views(golden, dim_first=False, blocks=8)
    for row, (offset, target, chunk) in enumerate(zip(offsets, targets, chunks, strict=True)):
        if offset:
            end = starts[row] + offset
            wanted_conv[target, :3] = x[end - 3 : end, :300]
            wanted_state[target] = behind[chunk]
    on_device = [torch.tensor(each).int().to(device) for each in (offsets, targets, chunks, starts)]
    vllm_ops("ssd_checkpoint").store_prefill_checkpoint(
        SimpleNamespace(checkpoint_offsets=on_device[0], state_indices=on_device[1]),
        on_device[2],
        x[:, :300].T,
        conv,
        behind,
        state,
        on_device[3],
        state_len=3,
    )
    assert_same_bits(storage.view(8, -1), golden.view(8, -1), "blocks")


@pytest.mark.parametrize("row", [1024, 2100, 96], ids=lambda row: f"row{row}")
def test_gather_and_scatter_states(row, device, vllm_ops):
    """Rows of a prefill from the pool and back; a new sequence gets zeros and its block is not looked at."""
    torch.manual_seed(row)
    pool = torch.full((8, row + 16), float("nan"), device=device)[:, :row]
    slots, known = [5, 9, 2, 7], [True, False, True, True]
    pool[[5, 2, 7]] = torch.randn(3, row, device=device)
    golden = torch.stack(
        [pool[slot] if there else torch.zeros_like(pool[0]) for slot, there in zip(slots, known, strict=True)]
    )
    sizes = {"row_size": row, "BLOCK_SIZE": min(1 << (row - 1).bit_length(), 1024), "num_warps": 8, "launch_pdl": False}
    grid, ids = (-(-row // sizes["BLOCK_SIZE"]), 4), torch.tensor(slots).int().to(device)
    rows = torch.full((4, row), float("nan"), device=device)
    vllm_ops("gather_initial_states")._gather_initial_states_kernel[grid](
        pool, ids, torch.tensor(known).to(device), rows, pool.stride(0), 1, 1, **sizes
    )
    assert_same_bits(rows, golden, "rows")
    before, ids = pool.clone(), torch.tensor([6, 1, 3, 0]).int().to(device)
    vllm_ops("scatter_states")._scatter_states_kernel[grid](pool, rows, ids, pool.stride(0), row, 1, **sizes)
    before[[6, 1, 3, 0]] = golden
    assert_same_bits(pool, before, "pool")


def test_copies_beyond_int32(utils, device, reach, tmp_path):
    """Blocks 1.5 GiB apart, so that the second is beyond 2^31 bytes and the third beyond 2^32."""
    page, layer = 3 << 29, LAYERS[0]
    size = 3 * page + layer.page
    storage = (
        torch.empty(size, dtype=torch.uint8, device=device)
        if device != "cpu"
        else torch.from_file(str(tmp_path / "far"), shared=True, size=size, dtype=torch.uint8)
    )
    views = layer.views(storage, dim_first=False, page=page, blocks=4)
    for view in views:
        view[:] = torch.randn(view.shape).to(view)
    was = [view.clone() for view in views]
    tables = [torch.tensor([[3, 0, 2, 1]], dtype=torch.int32, device=device) for _ in LAYERS]
    pools = Pools(utils, device, reach, dim_first=False)
    reach(*views, *tables)
    pools.context.is_initialized = False
    pools.context.initialize_from_forward_context(
        pools.config, pools.layers | {layer.kind: SimpleNamespace(kv_cache=views)}, pools.copy_funcs, tables
    )
    one = pools.int32(1)
    pools.context.run_fused_precopy(1, one + 1, one - 1, one, None)  # column 0 (and 1 of the drafts) to column 2
    was[0][2, :-1], was[1][2] = was[0][3, 1:], was[1][0]
    for view, golden in zip(views, was, strict=True):
        assert_same_bits(view, golden, "far blocks")


MUTANTS = {
    "block-off-by-one": (postprocess, "aligned_new_computed // block_size - 1", "aligned_new_computed // block_size"),
    "drafts-forgotten": (postprocess, "block_table_base + src_col + token_bias", "block_table_base + src_col"),
    "page-for-state": (precopy, "copy_size = state_inner_size * state_elem_size", "copy_size = state_block_stride"),
    "tail-dropped": (precopy, "tail_off < tail_bytes", "tail_off < 0"),
    "window-not-moved": (postprocess, "src_block_addr + token_bias.to(tl.int64) * token_bytes", "src_block_addr + 0"),
    "group-of-another": (precopy, "block_table_ptrs_ptr + group_idx", "block_table_ptrs_ptr"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name, utils, device, reach, tmp_path):
    check, old, new = MUTANTS[name]
    text = Path(utils.__file__).read_text()
    assert old in text
    path = tmp_path / "mutated_utils.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutated_{name}".replace("-", "_"), path)
    sys.modules[spec.name] = mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    pools = Pools(mutated, device, reach, dim_first=False)
    with pytest.raises(Exception, match=r"elements differ|of \d+ bytes at"):
        check(pools, mapped=True)
