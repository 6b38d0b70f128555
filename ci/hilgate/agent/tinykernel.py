"""The tiny kernel: run on the GPUs by a command, its checksums computed again here in plain Python.

The seed is new each time, so no answer can be stored. `pagedkv.selfcheck` says what is computed and why a broken GPU
gets it wrong; the two share nothing but that description.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilgate.agent import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMAND = "HILGATE_SELFCHECK"
"""Of the agent: what runs `python3 -m pagedkv.selfcheck` with the agent's GPUs, in a container of a ROCm image where
the host itself has no torch and Triton. Options are appended."""

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
SECONDS = 180.0
"""Import of torch, compilation for one arch and 8 GPUs in turn; a hung GPU never answers."""

ELEMENTS = 1 << 18
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
MULTIPLIER = 0x45D9F3B
ROUNDS = 3
WEIGHTS = 65521
SIDE = 32


def expected(seed: int, elements: int = ELEMENTS) -> tuple[int, int]:
    """The checksums of the words and of the product; see `pagedkv.selfcheck`."""
    words = 0
    for index in range(elements):
        words += _mixed(index ^ seed) * (index % WEIGHTS + 1)
    left = [[_mixed(row * SIDE + column ^ seed) % 17 - 8 for column in range(SIDE)] for row in range(SIDE)]
    right = [
        [_mixed(SIDE * SIDE + row * SIDE + column ^ seed) % 17 - 8 for column in range(SIDE)] for row in range(SIDE)
    ]
    columns = list(zip(*right, strict=True))
    product = 0
    for row in range(SIDE):
        for column in range(SIDE):
            entry = sum(a * b for a, b in zip(left[row], columns[column], strict=True))
            product += entry * (row * SIDE + column + 1)
    return words & MASK64, product & MASK64


def problems(env: Mapping[str, str], gpus: int, *, elements: int = ELEMENTS, seconds: float = SECONDS) -> list[str]:
    """Run it on the agent's GPUs; a sentence for each that did not compute what it should."""
    seed = secrets.randbits(31)
    command = env.get(COMMAND) or "python3 -m pagedkv.selfcheck"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"the tiny kernel: {COMMAND} is no command: {error}"]
    inside = {**env, "PYTHONPATH": str(KERNELS)} if not env.get(COMMAND) else dict(env)
    ran = bounded.run([*words, "--json", f"--seed={seed}", f"--elements={elements}"], seconds, env=inside)
    if ran.problem:
        return [f"the tiny kernel: {ran.problem}"]
    if ran.status != 0:
        return [f"the tiny kernel ended with status {ran.status}: {ran.said() or 'no words'}"]
    lines = [line for line in ran.out.splitlines() if line.strip()]
    try:
        answer: Any = json.loads(lines[-1])
        devices = [
            (int(d["index"]), str(d["name"]), int(d["words"], 16), int(d["product"], 16)) for d in answer["devices"]
        ]
    except (IndexError, KeyError, TypeError, ValueError):
        return [f"the tiny kernel said nothing that is understood: {ran.said()[:80]!r}"]
    right_sums = expected(seed, elements)
    found = [] if len(devices) == gpus else [f"the tiny kernel ran on {len(devices)} GPUs of {gpus}"]
    for index, name, *sums in devices:
        for what, got, right in zip(("integers", "matrix product"), sums, right_sums, strict=True):
            if got != right:
                found.append(
                    f"the tiny kernel: GPU {index} ({name}) computed {got:016x} of its {what}, not {right:016x}"
                )
    return found


def _mixed(word: int) -> int:
    for _ in range(ROUNDS):
        word = (word ^ word >> 16) * MULTIPLIER & MASK32
    return word ^ word >> 16


if __name__ == "__main__":
    found = problems(os.environ, int(sys.argv[1]))
    sys.stdout.write("\n".join(found or ["every GPU computed what it should"]) + "\n")
    sys.exit(75 if found else 0)
