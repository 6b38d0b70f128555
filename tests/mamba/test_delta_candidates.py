# SPDX-License-Identifier: Apache-2.0
"""Every configuration that an autotuner may choose of the delta rules, run as machine code under the race detector.

    python -m pytest --amdgcn gfx942 tests/mamba/test_delta_candidates.py

A user's autotuner times them all and takes the fastest, right or wrong (vLLM PR 50649: four stages overwrote what was
still read, and gave 1e38 without a word). In round n each kernel takes the n-th of those that fit the LDS. `amdgcn`
looks for races, undefined values and missing waits, and results are held against the recurrence.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
from mamba import test_delta_rules as rules
from mamba.conftest import TUNED_DELTA

pytestmark = pytest.mark.device

ROUNDS = 36
"""As many as the kernel with the most configurations has."""
FEWEST = 5
"""Autotuned kernels of a chain."""


def autotuned(load):
    """(name, tuner) of every kernel with configurations."""
    from triton.runtime import Autotuner

    found = {}
    for module in TUNED_DELTA:
        for kernel in vars(load(module)).values():
            tuner = kernel if isinstance(kernel, Autotuner) else getattr(kernel, "fn", None)
            if isinstance(tuner, Autotuner):
                found[id(tuner)] = (f"{module}.{tuner.base_fn.__name__}", tuner)
    return list(found.values())


class Choice:
    """Stands for the `run` of an autotuner: takes the configuration of a number, or the next one that fits."""

    def __init__(self, tuner, number: int) -> None:
        self.tuner, self.numbers = tuner, [(number + k) % len(tuner.configs) for k in range(len(tuner.configs))]
        self.ran, self.too_large = set(), set()

    def __call__(self, *args, **options):
        from triton.runtime.errors import OutOfResources

        for number in self.numbers:
            try:
                done = self.tuner.fn.run(*args, **options, **self.tuner.configs[number].all_kwargs())
            except OutOfResources:  # the autotuner drops it
                self.too_large.add(number)
                continue
            self.ran.add(number)
            return done
        raise AssertionError("no configuration fits")


@pytest.fixture(params=range(ROUNDS))
def candidates(request):
    """candidates(module): a module of vLLM's delta rules, whose kernels take their configuration of this round."""
    from pagedkv.audit import imports

    with contextlib.ExitStack() as stack:
        choices = [Choice(tuner, request.param) for _, tuner in autotuned(imports.vllm_delta)]
        for choice in choices:
            stack.enter_context(mock.patch.object(choice.tuner, "run", choice))
        yield imports.vllm_delta
    used = [choice for choice in choices if choice.ran or choice.too_large]
    assert len(used) >= FEWEST, f"{len(used)} autotuned kernels ran"
    assert all(choice.numbers[0] in choice.ran | choice.too_large for choice in used)


def test_there_are_as_many_rounds_as_candidates():
    from pagedkv.audit import imports

    assert max(len(tuner.configs) for _, tuner in autotuned(imports.vllm_delta)) == ROUNDS


def test_candidates_of_the_gated_delta_rule(candidates, device, record_property):
    rules.test_chunk_gated_delta_rule((1, 2, 128, 128), "bfloat16", True, device, candidates, record_property)


def test_candidates_of_kimi_delta_attention(candidates, device, record_property):
    rules.test_chunk_kda("bfloat16", True, device, candidates, record_property)


@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
def test_candidates_of_kimi_on_rocm(bound, candidates, device, record_property):
    rules.test_chunk_kda_of_kimi("bfloat16", True, bound, device, candidates, record_property)
