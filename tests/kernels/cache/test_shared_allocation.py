# SPDX-License-Identifier: Apache-2.0
"""Two KV cache groups in one raw allocation: a decoder's self-attention and its cross attention.

An engine gives both groups block ids from one pool, each id to one group at a time. That is sound only if both groups
mean the same bytes by block id `b`; vLLM once laid out one group K/V-first and the other blocks-first (PR #43945), and
what cross attention wrote to its block destroyed another block's self-attention.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.pools import assert_same_bits

from pagedkv import layout
from pagedkv.cache.cache import PagedCache
from pagedkv.cache.write import write_kv_cache

pytestmark = pytest.mark.device

SHAPE = BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE = 10, 16, 2, 32
X = layout.vector_elements(torch.float32.itemsize)
GROUPS = ("self", "cross")


def elements(plan: layout.Layout) -> torch.Tensor:
    """Which element of the raw allocation holds what: [2, *SHAPE] int64, K and V."""
    axes = torch.meshgrid(*map(torch.arange, SHAPE), indexing="ij")
    return torch.stack([side.element(*axes) for side in (plan.key, plan.value)])


class Engine:
    """Both groups over one raw allocation, and beside it what each block must hold, kept block by block."""

    def __init__(self, names: dict[str, str], device: str, seed: int):
        plans = {group: layout.describe(names[group], *SHAPE, x=X) for group in GROUPS}
        size = max(plan.elements for plan in plans.values())
        self.raw = torch.full((size,), float("nan"), device=device)
        self.caches = {
            group: PagedCache(
                *(self.raw.as_strided(side.shape, side.strides, side.offset) for side in (plan.key, plan.value)),
                plan.packing,
            )
            for group, plan in plans.items()
        }
        self.elements = {group: elements(plan).to(device) for group, plan in plans.items()}
        self.device = device
        self.random = random.Random(seed)
        self.free = self.random.sample(range(BLOCKS), BLOCKS)
        self.owned: dict[int, tuple[str, torch.Tensor]] = {}  # block: group, [2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE]

    def allocate(self) -> None:
        block = self.free.pop()
        self.owned[block] = (self.random.choice(GROUPS), torch.full((2, *SHAPE[1:]), float("nan"), device=self.device))
        self.raw[self.elements[self.owned[block][0]][:, block]] = float("nan")

    def release(self) -> None:
        block = self.random.choice(list(self.owned))
        del self.owned[block]
        self.free.append(block)

    def write(self) -> None:
        """One step of one group: some tokens of some of its blocks, in any order, and one that is not written."""
        group = self.random.choice(GROUPS)
        mine = [block for block, (owner, _) in self.owned.items() if owner == group]
        places = [(block, token) for block in mine for token in range(BLOCK_SIZE)]
        places = self.random.sample(places, min(len(places), self.random.randint(0, 20)))
        slots = torch.tensor([-1] + [block * BLOCK_SIZE + token for block, token in places], device=self.device)
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        rows = torch.randn(2, len(slots), KV_HEADS, HEAD_SIZE, generator=generator).to(self.device)
        write_kv_cache(*rows, self.caches[group], slots)
        for n, (block, token) in enumerate(places, start=1):
            self.owned[block][1][:, token] = rows[:, n]

    def check(self) -> None:
        for block, (group, want) in self.owned.items():
            got = self.raw[self.elements[group][:, block]]
            assert_same_bits(got, want, f"block {block}, which {group}-attention owns")


def run(names: dict[str, str], device: str, seed: int) -> Engine:
    """30 steps; each is checked, so that the first disturbance is the one that is reported."""
    engine = Engine(names, device, seed)
    for _ in range(30):
        todo = engine.random.random()
        if engine.free and (todo < 0.3 or not engine.owned):
            engine.allocate()
        elif todo < 0.4 and engine.owned:
            engine.release()
        else:
            engine.write()
        engine.check()
    return engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", layout.NAMES)
def test_groups_of_one_layout_never_disturb_each_other(name, seed, device):
    engine = run({"self": name, "cross": name}, device, seed)
    held = {group for group, _ in engine.owned.values()}
    assert held == set(GROUPS), "both groups must have held blocks for this to mean anything"


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_unlike_layouts_are_noticed(seed, device):
    """The historic defect, planted: K/V-first for one group, blocks-first for the other."""
    with pytest.raises(AssertionError, match=r"block \d+, which \w+-attention owns"):
        run({"self": "nhd", "cross": "interleaved"}, device, seed)
