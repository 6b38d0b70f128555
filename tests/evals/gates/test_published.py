# SPDX-License-Identifier: Apache-2.0
"""Failures that were published, replayed as outcome vectors: each must fail, and for the right reason."""

import numpy as np
import pytest
from support.gates import declared, resolved

from hileval.gates.judge import judge_answers
from hilgate.model.record import Outcome

N = 1319
RULES = declared().rules
DEGENERATE = "!" * 64


def toss(rng, share, n=N):
    return (rng.random(n) < share).tolist()


def replay(plant, gate, right, texts, baseline, rule="release"):
    run = plant.run(right, texts=texts)
    stored = plant.baseline(*baseline)
    checks = judge_answers(resolved(gate, rule=RULES[rule], baseline=stored), plant.asked(stored, run), None)
    return {check.id.split("/")[1]: check for check in checks}


def test_fp8_with_285_degenerate_answers_is_broken_and_a_drop(plant, gate):
    """Kimi-K3, FP8 KV cache, AITER MLA, TP8: 74.00 % instead of 97.19 %, 285 of 1319 degenerate (vllm#51011)."""
    rng = np.random.default_rng(51011)
    before = [toss(rng, 0.9719) for _ in range(5)]
    degenerate = dict.fromkeys(rng.permutation(N)[:285].tolist(), DEGENERATE)
    right = [i not in degenerate and good for i, good in enumerate(toss(rng, 0.944))]
    assert np.mean(right) == pytest.approx(0.74, abs=0.01)
    found = replay(plant, gate, right, degenerate, before)
    assert found["broken-output"].outcome is Outcome.FAIL
    assert "285 repeat" in found["broken-output"].message
    assert found["accuracy"].outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("share", "n", "text", "rule", "broken"),
    [
        pytest.param(
            0.96,
            N,
            "and " * 72,
            "release",
            Outcome.FAIL,
            id="Qwen3.5-397B with the SHUFFLE layout: 0.0038 flexible, 0 strict (vllm#39192)",
        ),
        pytest.param(
            0.3563,
            100,
            None,
            "pre-merge",
            Outcome.PASS,
            id="Bamba-9B, 0.0 and 0.0 of --limit 100 (vllm#14848): nothing is degenerate, everything is wrong",
        ),
    ],
)
def test_a_model_that_gets_nothing_right(plant, gate, share, n, text, rule, broken):
    rng = np.random.default_rng(39192)
    texts = dict.fromkeys(range(n), text) if text else {}
    found = replay(plant, gate, [False] * n, texts, [toss(rng, share) for _ in range(5)], rule=rule)
    assert found["broken-output"].outcome is broken
    assert ("repeat" in found["broken-output"].message) is bool(text)
    assert found["accuracy"].outcome is found["floor"].outcome is Outcome.FAIL


def test_six_runs_that_a_threshold_failed_at_random_pass(plant, gate):
    """Qwen3-235B-FP8 on MI355X: six runs from .8666 to .8779, the threshold .87, d 4.2 % (ROCm/aiter#3715)."""
    rng = np.random.default_rng(3715)
    chance = np.concatenate([np.full(round(0.084 * N), 0.5), np.ones(round(0.83 * N))])
    chance = rng.permutation(np.concatenate([chance, np.zeros(N - len(chance))]))
    runs = [(rng.random(N) < chance).tolist() for _ in range(6)]
    shares = [np.mean(run) for run in runs]
    assert max(shares) - min(shares) > 0.005
    for i in range(6):
        others = runs[:i] + runs[i + 1 :]
        assert replay(plant, gate, runs[i], {}, others)["accuracy"].outcome is not Outcome.FAIL
