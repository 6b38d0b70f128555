# SPDX-License-Identifier: Apache-2.0
"""On Hopper no kernel of ours writes registers that a pending product of the tensor cores still reads.

`wgmma.mma_async` takes its first factor from shared memory or from registers, and goes on after it has been issued.
Until a wait covers it, nothing may write these registers (PTX ISA, wgmma.mma_async). Before CUDA 13.3 ptxas does so in
loops that Triton has pipelined (Triton 9433): whole rows are then wrong, or NaN, now and then. vLLM leaves out such
configurations of its Mamba-2 kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import triton
from support.hopper import compiled, compiled_by, printed_of
from triton import knobs
from triton import language as tl

from pagedkv.audit.budgets import load_budgets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASES = {
    "prefill 4 x 4k": {"attention_kernel"},
    "prefill 4 x 4k fp8": {"attention_kernel"},
    "prefill 4 x 4k native 784": {"attention_kernel"},
    "prefill 4 x 4k d256": {"attention_kernel"},
    "prefill 4 x 4k d64 block 544": {"attention_kernel"},
    "prefill 16 x 512": {"attention_kernel"},
    "extend 512 on 16k d256 block 784": {"attention_kernel"},
    "mla 128 heads bs32 8k": {"mla_decode_kernel"},
    "scan 16 x 512 64 heads d64 n64": {"ssd_prefill_kernel", "ssd_carry_kernel"},
    "scan 16 x 512 128 heads d64 n128": {"ssd_prefill_kernel", "ssd_carry_kernel"},
    "scan 16 x 512 24 heads d128 n256": {"ssd_prefill_kernel", "ssd_carry_kernel"},
    "gdn 1 x 8192 2 k 8 v heads": {"gdn_prefill_kernel", "gdn_carry_kernel"},
    "gdn 16 x 512 16 k 32 v heads": {"gdn_prefill_kernel"},
    "kda 1 x 8192 32 heads": {"kda_chunks_kernel", "gdn_prefill_kernel", "gdn_carry_kernel"},
    "kda 16 x 512 32 heads": {"kda_chunks_kernel", "gdn_prefill_kernel"},
}
"""Kernels of each case of the benchmarks that multiply what they have in registers: weights, or decayed scores."""
FROM_SHARED_MEMORY = {"gdn_chunks_kernel", "gdn_join_kernel"}
"""Kernels whose products take both factors from shared memory. They are looked at too."""


FACTOR = 4
"""Registers of a thread that hold a first factor of 64 rows and 32 bytes of each."""

WRITES_NONE = re.compile(
    "BAR|BRA|BREAK|BSSY|BSYNC|CCTL|DEPBAR|ERRBAR|EXIT|FENCE|FSETP|HSETP2|ISETP|LDGDEPBAR|LDGSTS|MEMBAR|NOP|PLOP3|R2UR|RED|"
    "ST|STG|STS|SYNCS|UTMALDG|WARPGROUP|WARPSYNC|YIELD"
)
"""Instructions whose first register, if they name one, is read. Any other writes it."""

NOT_FOLLOWED = frozenset({"BRX", "CALL", "JMP", "JMX", "RET"})

MOST_GROUPS = 8
"""Pending groups that are kept apart; the oldest of more are merged."""


class Instruction(NamedTuple):
    """One line of nvdisasm."""

    address: str
    guarded: bool
    """Whether a predicate decides that it runs."""
    name: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """Code of one kernel."""

    code: list[Instruction]
    labels: dict[str, int]
    """Place in `code` by name."""

    @property
    def factors_in_registers(self) -> int:
        """How many products take their first factor from registers."""
        return sum(bool(_factor(each)) for each in self.code)


def disassemble(cubin: bytes, folder: Path) -> Listing:
    """Read a compiled kernel with nvdisasm, which comes with Triton.

    Args:
        cubin: What `ptxas` made.
        folder: Where it may be written.
    """
    return parse(printed_of(cubin, folder, knobs.nvidia.nvdisasm.path, "-c"))


def parse(text: str) -> Listing:
    """Read what nvdisasm prints.

    Raises:
        ValueError: It holds no instructions.
    """
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            operands = tuple(each.strip() for each in found[4].split(",") if each.strip())
            code.append(Instruction(found[1], bool(found[2]), found[3], operands))
    if not code:
        raise ValueError("no instructions in what nvdisasm printed")
    return Listing(code, labels)


def overwritten(listing: Listing) -> list[str]:
    """Say which instructions write registers that a pending product reads, on any path; empty where none does.

    Raises:
        ValueError: The code goes on at a place that the text does not name.
    """
    found: dict[int, str] = {}
    seen: set[tuple[int, tuple[frozenset[int], ...], frozenset[int]]] = set()
    paths: list[tuple[int, tuple[frozenset[int], ...], frozenset[int]]] = [(0, (), frozenset())]
    while paths:
        state = paths.pop()
        if state in seen or state[0] >= len(listing.code):
            continue
        seen.add(state)
        place, groups, group = state
        one = listing.code[place]
        if spoilt := _written(one) & frozenset().union(group, *groups):
            registers = ", ".join(f"R{number}" for number in sorted(spoilt))
            found[place] = f"{one.address}: {one.name} {', '.join(one.operands)} writes {registers}"
        if one.name.startswith("HGMMA"):
            group |= _factor(one)
            if "gsb0" in one.operands:
                groups, group = (*groups, group), frozenset()
        elif one.name.startswith("WARPGROUP.DEPBAR"):
            left = int(one.operands[-1], 0)
            groups = groups[len(groups) - left :] if left else ()
        if len(groups) > MOST_GROUPS:
            groups = (groups[0] | groups[1], *groups[2:])
        paths += [(after, groups, group) for after in _following(listing, place)]
    return [found[place] for place in sorted(found)]


def _following(listing: Listing, place: int) -> Iterator[int]:
    """Where the code may go on."""
    one = listing.code[place]
    kind = one.name.partition(".")[0]
    if kind in NOT_FOLLOWED:
        raise ValueError(f"{one.address}: {one.name}: which way the code goes on is not in the text")
    conditional = one.guarded or any(re.fullmatch(r"!?U?P\w+", each) for each in one.operands)
    if kind == "BRA":
        target = re.search(r"\.L_x_\d+", one.operands[-1])
        if target is None:
            raise ValueError(f"{one.address}: {one.name} {one.operands[-1]}: no label")
        yield listing.labels[target[0]]
    if kind not in ("BRA", "EXIT") or conditional:
        yield place + 1


def _factor(one: Instruction) -> frozenset[int]:
    """Registers that hold the first factor of a product; none where it lies in shared memory."""
    if not one.name.startswith("HGMMA"):
        return frozenset()
    return _registers(one.operands[1], FACTOR)


def _written(one: Instruction) -> frozenset[int]:
    """Registers that an instruction writes."""
    kind, *kinds = one.name.split(".")
    if WRITES_NONE.fullmatch(kind):
        return frozenset()
    first = next((each for each in one.operands if not re.fullmatch(r"!?U?P\w+", each)), "")
    return _registers(first, _width(kind, kinds))


def _width(kind: str, kinds: list[str]) -> int:
    """How many registers an instruction writes, from the first on."""
    if kind == "HGMMA":
        columns = int(kinds[0].split("x")[1])
        return columns // (2 if "F32" in kinds else 4)
    if kind == "HMMA":
        return 4 if "F32" in kinds else 2
    if "128" in kinds or (kind == "LDSM" and "4" in kinds):
        return 4
    if {"64", "WIDE"} & set(kinds) or (kind == "LDSM" and "2" in kinds) or kind in ("DADD", "DMUL", "DFMA"):
        return 2
    return 1


def _registers(name: str, number: int) -> frozenset[int]:
    """`number` registers from `name` on; none where it is no general register."""
    first = re.match(r"R(\d+)(?:\.|$)", name)
    return frozenset(range(int(first[1]), int(first[1]) + number)) if first else frozenset()


@triton.jit
def weighted_kernel(
    scores, decays, values, out, tiles, height: tl.constexpr, length: tl.constexpr, width: tl.constexpr
):
    """Scores times a decay, times values: what a chunked scan does, and no more."""
    rows, tokens, channels = tl.arange(0, height), tl.arange(0, length), tl.arange(0, width)
    total = tl.zeros((height, width), tl.float32)
    own = tl.load(decays + rows)
    for tile in range(tiles):
        at = tile * length + tokens
        weights = tl.load(scores + rows[:, None] * tiles * length + at[None, :])
        weights *= tl.exp2(tl.minimum(own[:, None] - tl.load(decays + at)[None, :], 0.0))
        total += tl.dot(weights.to(tl.bfloat16), tl.load(values + at[:, None] * width + channels[None, :]))
    tl.store(out + rows[:, None] * width + channels[None, :], total)


@pytest.mark.parametrize(("case", "names"), CASES.items(), ids=CASES)
def test_no_register_is_written_while_it_is_read(case, names, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    listings = {kernel: disassemble(made.cubin, tmp_path) for kernel, made in compiled(case).items()}
    assert {kernel for kernel, listing in listings.items() if listing.factors_in_registers} == names
    assert {kernel: overwritten(listing) for kernel, listing in listings.items()} == {kernel: [] for kernel in listings}


def test_every_kernel_with_products_is_looked_at():
    with_products = {kernel for kernel, budget in load_budgets().kernels.items() if budget.mfma}
    assert with_products == set().union(*CASES.values(), FROM_SHARED_MEMORY)


@pytest.mark.parametrize(("stages", "wrong"), [(1, False), (2, not triton.__version__.startswith("3.9."))])
def test_a_pipelined_loop_that_writes_them_is_found(stages, wrong, tmp_path, monkeypatch):
    """The loop is that of vLLM's `_chunk_scan_fwd_kernel`, which Triton 3.6 and 3.8 compile so, and 3.9 does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats, values = torch.zeros(128 * 128), torch.zeros(128 * 128, dtype=torch.bfloat16)
    arguments = [floats, floats, values, floats, 4]
    sizes = {"height": 128, "length": 32, "width": 128}
    kernels = compiled_by(lambda: weighted_kernel[(1,)](*arguments, **sizes, num_warps=4, num_stages=stages))
    listing = disassemble(kernels["weighted_kernel"].cubin, tmp_path)
    assert listing.factors_in_registers
    assert bool(overwritten(listing)) is wrong


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
SHARED = "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR8], R64, gsb0"
WAIT, WAIT_FOR_OLDER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE, ELSEWHERE = "FADD R5, R60, R61", "FADD R60, R5, R61"


def listed(*lines: str) -> str:
    """Lines as nvdisasm prints them; labels end with a colon."""
    code = (
        line if line.endswith(":") else f"        /*{16 * i:04x}*/               {line} ;"
        for i, line in enumerate(lines)
    )
    return "\n".join(code)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([PRODUCT, WRITE, WAIT], 1),
        ([PRODUCT, WAIT, WRITE], 0),
        ([PRODUCT, ELSEWHERE, WAIT], 0),
        ([PRODUCT, "STS.128 [R5], R4", WAIT], 0),
        ([PRODUCT, "LDS.128 R0, [R60]", "LDS.128 R8, [R60]", WAIT], 0),
        ([PRODUCT, "LDS.128 R1, [R60]", WAIT], 1),
        ([PRODUCT, "IMAD.WIDE R2, R60, 0x4, R62", "IMAD.WIDE R3, R60, 0x4, R62", WAIT], 1),
        ([PRODUCT, "SHFL.BFLY PT, R6, R60, 0x1, 0x1f", WAIT], 1),
        ([PRODUCT, "@!P0 MOV R7, R60", WAIT], 1),
        ([PRODUCT, "HGMMA.64x64x16.F32.BF16 R0, gdesc[UR8], R0, gsb0", WAIT], 1),
        # Of two groups the wait leaves the younger pending.
        ([PRODUCT, SHARED, WAIT_FOR_OLDER, WRITE, WAIT], 0),
        ([SHARED, PRODUCT, WAIT_FOR_OLDER, WRITE, WAIT], 1),
        # Along the back edge of a loop, and along the way that skips the wait.
        ([".L_x_0:", WRITE, PRODUCT, "@P0 BRA `(.L_x_0)", WAIT], 1),
        ([".L_x_0:", WRITE, PRODUCT, WAIT, "@P0 BRA `(.L_x_0)"], 0),
        ([PRODUCT, "@P0 BRA `(.L_x_0)", WAIT, ".L_x_0:", WRITE], 1),
        # BREAK takes lanes out of a barrier of convergence; where they go on, a branch says.
        ([PRODUCT, "@P0 BREAK B0", "@P0 BRA `(.L_x_0)", WAIT, ".L_x_0:", WRITE], 1),
        ([PRODUCT, "BREAK B0", WAIT, WRITE], 0),
        ([PRODUCT, WAIT, "BRA `(.L_x_0)", WRITE, ".L_x_0:", PRODUCT, "EXIT", WRITE], 0),
    ],
)
def test_writes_are_found_on_every_path(lines, wrong):
    found = overwritten(parse(listed(*lines)))
    assert len(found) == wrong, found


@pytest.mark.parametrize("line", ["BRX R2 -0x10", "RET.REL.NODEC R2 `(somewhere)", "BRA 0x100"])
def test_code_that_goes_on_elsewhere_is_not_called_right(line):
    with pytest.raises(ValueError, match=r"^0000: "):
        overwritten(parse(listed(line)))


def test_a_text_without_code_is_not_called_right():
    with pytest.raises(ValueError, match="no instructions"):
        parse("nothing of the kind")
