# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU computes: `python -m pagedkv.selfcheck`, in plain words; `--json` for the agents' preflight.

    mixed(w)   = three times  w = (w ^ w >> 16) * 0x45d9f3b mod 2^32,  then  w ^ w >> 16
    word[i]    = mixed(i ^ seed)                                          i < elements
    words      = sum_i word[i] * (i mod 65521 + 1)            mod 2^64
    A[i, j]    = mixed((32 i + j) ^ seed) mod 17 - 8,   B[i, j] = mixed((1024 + 32 i + j) ^ seed) mod 17 - 8
    product    = sum_ij (A B)[i, j] * (32 i + j + 1)          mod 2^64

Integers have no rounding, and the matrices hold whole numbers from -8 to 8, exact in every float format down to fp8 and
in their sums, so each GPU must give these very numbers. The words go through memory between two launches, the sum
across the lanes of a wave, the product through the matrix cores: a dead lane, a lost store or a swapped operand changes
the checksum. Whoever asked computes it again by other means.
"""

from __future__ import annotations

import json
import sys

try:
    import torch
    import triton
    import triton.language as tl
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.stderr.write(
        f"error: {missing.name} is not installed beside this Python ({sys.executable})\n"
        "  to do: run this with the Python that has torch and Triton, say inside vLLM's ROCm image\n"
    )
    sys.exit(5)

from pagedkv.device import INTERPRETED
from pagedkv.errors import Parser

MASK64 = 0xFFFFFFFFFFFFFFFF
BLOCK = 1024
SIDE = 32
WEIGHTS = 65521
"""A prime below 2^16, so that the weights do not repeat with the blocks."""

ELEMENTS = 1 << 18
POISON = -0x21524111
"""Bits of outputs before a launch (0xdeadbeef)."""


@triton.jit
def _mixed(word):
    for _ in tl.static_range(3):
        word = (word ^ (word >> 16)) * 0x45D9F3B
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["seed"])  # a seed of 1 would be a constant, which has no dtype
def _mix_kernel(
    words,  # [num_elements] int32, written
    seed,
    num_elements,
    BLOCK: tl.constexpr,
):
    """One block of words; grid [ceil(num_elements / BLOCK)]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = _mixed(index.to(tl.uint32) ^ seed.to(tl.uint32))
    tl.store(words + index, word.to(tl.int32, bitcast=True), mask=index < num_elements)


@triton.jit
def _sum_kernel(
    sums,  # [num_blocks] int64, written
    words,  # [num_elements] int32
    num_elements,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weighted sum of one block: below 2^32 * 2^16 * 2^10, so it fits; grid as above."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index, mask=index < num_elements, other=0).to(tl.uint32, bitcast=True)
    tl.store(sums + block, tl.sum(word.to(tl.int64) * (index % WEIGHTS + 1).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["seed"])
def _product_kernel(
    product,  # [SIDE, SIDE] fp32, written
    seed,
    SIDE: tl.constexpr,
):
    """One product of two small matrices; one program."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    mask = seed.to(tl.uint32)
    left = (_mixed(at.to(tl.uint32) ^ mask) % 17).to(tl.float32) - 8.0
    right = (_mixed((at + SIDE * SIDE).to(tl.uint32) ^ mask) % 17).to(tl.float32) - 8.0
    tl.store(product + at, tl.dot(left, right))


def checksums(device: str, seed: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """Compute on a device.

    Args:
        device: A torch device; "cpu" under the interpreter.
        seed: 0 <= seed < 2^31.
        elements: Words to mix; each is 4 bytes of memory.

    Returns:
        words and product, 0 <= each < 2^64.

    Raises:
        ValueError: seed or elements is out of range.
    """
    if not 0 <= seed < 1 << 31 or not 0 < elements < 1 << 31:
        raise ValueError(f"got seed {seed} and {elements} elements, expected 0 <= seed < 2^31 and 0 < elements < 2^31")
    blocks = triton.cdiv(elements, BLOCK)
    words = torch.full((elements,), POISON, dtype=torch.int32, device=device)
    sums = torch.full((blocks,), POISON, dtype=torch.int64, device=device)
    product = torch.full((SIDE, SIDE), float("nan"), dtype=torch.float32, device=device)
    _mix_kernel[(blocks,)](words, seed, elements, BLOCK=BLOCK)
    _sum_kernel[(blocks,)](sums, words, elements, WEIGHTS=WEIGHTS, BLOCK=BLOCK)
    _product_kernel[(1,)](product, seed, SIDE=SIDE)
    entries = product.flatten().tolist()
    finite = all(abs(entry) <= 64.0 * SIDE for entry in entries)
    weighted = sum(int(entry) * at for at, entry in enumerate(entries, start=1)) if finite else -1
    return sum(sums.tolist()) & MASK64, weighted & MASK64


def expected(seed: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """Return what `checksums` must return, computed with Python's integers."""

    def mixed(word: int) -> int:
        for _ in range(3):
            word = (word ^ word >> 16) * 0x45D9F3B & 0xFFFFFFFF
        return word ^ word >> 16

    words = sum(mixed(at ^ seed) * (at % WEIGHTS + 1) for at in range(elements))
    entries = [mixed(at ^ seed) % 17 - 8 for at in range(2 * SIDE * SIDE)]
    rows = [entries[at : at + SIDE] for at in range(0, len(entries), SIDE)]
    left, columns = rows[:SIDE], list(zip(*rows[SIDE:], strict=True))
    product = [sum(a * b for a, b in zip(row, column, strict=True)) for row in left for column in columns]
    return words & MASK64, sum(entry * at for at, entry in enumerate(product, start=1)) & MASK64


def in_words(device: dict[str, object], right: tuple[int, int]) -> str:
    """A sentence about a device; it begins with WRONG where a number is."""
    who = "this CPU, by Triton's interpreter" if INTERPRETED else f"GPU {device['index']}, {device['name']}"
    names = ("words through memory and lanes", "a product on the matrix cores")
    found = zip(names, (device["words"], device["product"]), right, strict=True)
    wrong = [f"{name} came out as {got}, expected {want:016x}" for name, got, want in found if got != f"{want:016x}"]
    if wrong:
        return f"WRONG: {who}: {'; '.join(wrong)}. Serve nothing from it: look at its memory, clocks and driver\n"
    return f"{who}: computes correctly\n"


def main(arguments: list[str] | None = None) -> int:
    """Compute on every visible GPU and say whether it is right; with --json what came out, for whoever compares it.

    Returns:
        0; 1 where a number is wrong (never with --json), 5 where no GPU is visible (and where torch is missing).
    """
    parser = Parser(prog="python -m pagedkv.selfcheck", description="Checksums of a tiny kernel on each GPU.")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--seed", type=int, default=1, help="0 <= seed < 2^31")
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    options = parser.parse_args(arguments)
    found = []
    for index in range(1 if INTERPRETED else torch.cuda.device_count()):
        if not INTERPRETED:
            torch.cuda.set_device(index)
        name = "interpreter" if INTERPRETED else torch.cuda.get_device_name(index)
        words, product = checksums("cpu" if INTERPRETED else f"cuda:{index}", options.seed, options.elements)
        found.append({"index": index, "name": name, "words": f"{words:016x}", "product": f"{product:016x}"})
    if options.json:
        sys.stdout.write(json.dumps({"seed": options.seed, "elements": options.elements, "devices": found}) + "\n")
    else:
        right = expected(options.seed, options.elements)
        lines = [in_words(device, right) for device in found]
        sys.stdout.writelines(lines)
        if any(line.startswith("WRONG") for line in lines):
            return 1
    if not found:
        sys.stderr.write("error: no GPU is visible to torch\n  to do: set TRITON_INTERPRET=1 to compute on the CPU\n")
    return 0 if found else 5


if __name__ == "__main__":
    sys.exit(main())
