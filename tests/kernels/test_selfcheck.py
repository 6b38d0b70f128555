# SPDX-License-Identifier: Apache-2.0
"""The self-check computes what numpy computes, on any device, and what the agents' host expects of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import triton

from agent_host import gpus
from pagedkv import selfcheck

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.device

CASES = [(seed, 3000) for seed in (0, 1, 12345, (1 << 31) - 1)] + [(7, size) for size in (1, 1023, 1024, 1025, 70000)]
"""Seeds; one word, around a block, beyond the number of weights."""


def mixed(words: np.ndarray) -> np.ndarray:
    words = words.astype(np.uint64)
    for _ in range(3):
        words = (words ^ words >> 16) * 0x45D9F3B % 2**32
    return words ^ words >> 16


def by_numpy(seed: int, elements: int) -> tuple[int, int]:
    index = np.arange(elements, dtype=np.uint64)
    words = int(np.sum(mixed(index ^ seed).astype(object) * (index % 65521 + 1).astype(object)))
    entries = mixed(np.arange(2048, dtype=np.uint64) ^ seed).astype(np.int64) % 17 - 8
    product = entries[:1024].reshape(32, 32) @ entries[1024:].reshape(32, 32)
    return words % 2**64, int(np.sum(product.ravel() * np.arange(1, 1025))) % 2**64


@pytest.mark.parametrize("case", CASES)
def test_every_seed_and_size(case: tuple[int, int], device: str) -> None:
    wanted = by_numpy(*case)
    assert selfcheck.checksums(device, *case) == selfcheck.expected(*case) == gpus.expected_checksums(*case) == wanted


def test_a_lost_store_changes_the_checksum(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are poisoned, so what is not written is seen."""
    for kernel, wrong in (("_mix_kernel", 0), ("_product_kernel", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(selfcheck, kernel, {(1,): lambda *_, **__: None})
            found = selfcheck.checksums(device, 7, 1000)
        right = gpus.expected_checksums(7, 1000)
        assert [a == b for a, b in zip(found, right, strict=True)] == [index != wrong for index in (0, 1)]


@pytest.mark.parametrize(("seed", "elements"), [(-1, 10), (1 << 31, 10), (1, 0), (1, 1 << 31)])
def test_out_of_range_is_refused(seed: int, elements: int, device: str) -> None:
    with pytest.raises(ValueError, match="expected 0 <= seed"):
        selfcheck.checksums(device, seed, elements)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert selfcheck.main([*arguments, "--seed=9", "--elements=2000"]) == 0
        return capsys.readouterr().out

    return run


def test_the_command_prints_a_line_for_each_gpu(printed: Callable[..., str]) -> None:
    words, product = (f"{value:016x}" for value in gpus.expected_checksums(9, 2000))
    answer = json.loads(printed("--json"))
    count = 1 if triton.knobs.runtime.interpret else torch.cuda.device_count()
    assert [(d["index"], d["words"], d["product"]) for d in answer["devices"]] == [
        (index, words, product) for index in range(count)
    ]
    assert printed().count(": computes correctly\n") == count


def test_a_wrong_number_is_said_and_red(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words, product = gpus.expected_checksums(9, 2000)
    monkeypatch.setattr(selfcheck, "checksums", lambda *_: (words, product ^ 1))
    assert selfcheck.main(["--seed=9", "--elements=2000"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("WRONG: ")
    assert (
        f"a product on the matrix cores came out as {product ^ 1:016x}, expected {product:016x}. Serve nothing" in said
    )
    assert "words through" not in said


def test_without_torch_it_says_what_to_do() -> None:
    """`-S` hides what is installed, `-I` the checkout."""
    command = [sys.executable, "-I", "-S", selfcheck.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("error: torch is not installed beside this Python (")
    assert "\n  to do: " in done.stderr
