# SPDX-License-Identifier: Apache-2.0
"""On Hopper no kernel of ours writes registers that a pending product of the tensor cores still reads."""

from __future__ import annotations

import pytest
import torch
import triton
from support.hopper import compiled, compiled_by
from support.wgmma import disassemble, overwritten, parse
from triton import language as tl

from pagedkv.audit.budgets import load_budgets

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
