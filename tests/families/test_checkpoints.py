# SPDX-License-Identifier: Apache-2.0
"""The families' checkpoints depend on their context, and the tolerance would notice what an engine can lose."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from families import checkpoints, schedule
from families.family import FAMILIES
from families.judge import Error
from families.oracle import DRAWS, VOCABULARY, Oracle, prompt

SAVED = [name for name, family in FAMILIES.items() if family.config_class]
DECODERS = [name for name in SAVED if FAMILIES[name].attention != "cross"]
ATTENDING = [name for name in DECODERS if FAMILIES[name].attention]
STATEFUL = [name for name in DECODERS if FAMILIES[name].states]
TOKENS = prompt(140, seed=2)
RESOLVED = dict.fromkeys(FAMILIES, 1000) | {"qwen3-moe-fp8": 20, "falcon-h1-fp8": 10, "qwen3.5-fp8": 6}
"""How many times the tolerance an early token, a lost block or a lost state must be.

Codes of an FP8 cache that round the other way move a distribution by up to 0.02. Of qwen3-moe-fp8 the least of 16 rows
and of 44 is 21 and 25 times the worst error that is admissible; the median of the 44 is 101 times the typical one.
Beside states attention weighs less: a lost block is 10.7 (falcon-h1-fp8) and 7.3 times that error, a lost state 21 and
147. Which codes round the other way is the processor's: without AVX-512 one has 6.2 in place of 7.3.
"""
NOT_IN_16_BITS = {("qwen3.5-fp8", "bfloat16")}
"""Families whose typical error does not show a lost block, half of what is asked; their cells in float32 do."""
SAME = 1e-12
"""Tolerance in float64; a library's product of the same numbers may round otherwise in another batch of rows, by
2e-15."""
BLOCK = range(48, 96)
RESUMED = 100


@cache
def exact(oracle):
    return oracle.log_probs(TOKENS)


@pytest.mark.parametrize("name", SAVED)
def test_seed_gives_the_same_weights(name, oracle_of, tmp_path):
    torch.rand(3)  # whatever a process has drawn before
    checkpoints.save(FAMILIES[name], tmp_path, torch.float32)
    first, second = (
        o.working.state_dict() for o in (oracle_of(name), Oracle.load(FAMILIES[name], tmp_path, torch.float32))
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert sum(weight.numel() for weight in oracle_of(name).working.parameters()) < 1_000_000, "it is tiny"


@pytest.mark.parametrize("name", DECODERS)
def test_answers_depend_on_their_context(name, oracle_of):
    """The likeliest next tokens are many, and one early token moves every distribution after it."""
    answers = exact(oracle_of(name)).argmax(-1)
    assert len(set(answers.tolist())) > len(TOKENS) / 8
    other = [*TOKENS[:4], (TOKENS[4] + 7) % 100 + 3, *TOKENS[5:]]
    moved = (oracle_of(name).log_probs(other) - exact(oracle_of(name))).abs().amax(-1)
    assert moved[:4].max() < SAME
    assert moved[4:20].min() > RESOLVED[name] * oracle_of(name).tolerance(TOKENS).worst


def test_speech_depends_on_what_is_heard(oracle_of):
    whisper = oracle_of("whisper")
    first, second = (whisper.log_probs([1, 50, 60], audio=seed) for seed in (1, 2))
    assert (first - second).abs().amax(-1).min() > 100 * whisper.tolerance([1, 50, 60], audio=1).worst


@pytest.mark.parametrize("name", ATTENDING)
def test_tolerance_resolves_a_lost_block(name, oracle_of):
    none, lost = (
        (oracle_of(name).without_keys(TOKENS, hidden) - exact(oracle_of(name))).abs().amax(-1)
        for hidden in (range(0), BLOCK)
    )
    assert none.max() < 1e-9, "it measures another attention, not a lost block"
    assert lost[: BLOCK.stop].max() < SAME
    assert lost[BLOCK.stop :].min() > RESOLVED[name] * oracle_of(name).tolerance(TOKENS).worst


@pytest.mark.parametrize("name", STATEFUL)
def test_tolerance_resolves_a_lost_state(name, oracle_of):
    model, tokens = oracle_of(name), TOKENS[: RESUMED + 3]
    want = exact(model)[RESUMED : len(tokens)]
    kept, lost = (model.resumed(tokens, RESUMED, lose_state=lose) for lose in (False, True))
    assert (kept - want).abs().max() < 1e-9
    assert (lost - want).abs().amax(-1).min() > RESOLVED[name] * model.tolerance(TOKENS).worst


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ATTENDING)
def test_typical_error_resolves_a_lost_block_in_16_bits(name, dtype, oracle_of):
    """The worst error does not where a router may send a token to another expert; the typical one does."""
    model = oracle_of(name, dtype)
    rows = slice(BLOCK.stop, None)
    lost = Error.of(model.without_keys(TOKENS, BLOCK)[rows], exact(model)[rows])
    assert (lost.typical > model.tolerance(TOKENS).typical) is ((name, dtype) not in NOT_IN_16_BITS)


def test_tolerance_explains_rounding_of_a_sensitive_row(oracle_of):
    """One computation may leave a row nearly right that the next one moves farther than twice any other row."""
    model, tokens = oracle_of("qwen3.5", "float16"), list(schedule.prompt(179, 7, VOCABULARY))
    limit = model.tolerance(tokens).rows
    for draw in range(DRAWS + 1, 24):
        moved = (model.log_probs(tokens, exact=False, draw=draw) - model.log_probs(tokens)).abs().amax(-1)
        assert (moved <= limit).all(), f"draw {draw}: {(moved / limit).max():.2f} of what is admissible"
    assert (limit > limit.min()).sum() < len(limit) / 8, "other rows keep the bound of the model"


def test_nothing_is_computed_in_float32_by_the_exact_oracle(oracle_of):
    """float64 that passes through float32 on its way is no better than what it judges."""
    for name in DECODERS:
        model = oracle_of(name)
        with torch.inference_mode():
            careless = model.exact(torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)
        assert Error.of(careless, exact(model)).worst > 1e-7, f"{name} needs no help"
        halves = [model.log_probs(TOKENS[:n])[-1] for n in (33, 70)]
        for n, last in zip((33, 70), halves, strict=True):  # other chunks, other order of the same sums
            assert (last - exact(model)[n - 1]).abs().max() < 1e-11, name


def test_error_counts_nan_as_far_and_refuses_other_shapes():
    want = torch.zeros(3, 4)
    got = want.clone()
    got[1, 2] = torch.nan
    assert Error.of(got, want) == Error(worst=torch.inf, typical=0.0)
    assert not Error.of(got, want).within(Error(worst=1e9, typical=1.0))
    with pytest.raises(ValueError, match=r"shape \[3, 4\], expected \[2, 4\]"):
        Error.of(got, want[:2])


def test_family_without_a_class_is_written_as_its_name(tmp_path):
    checkpoints.save(FAMILIES["plamo2"], tmp_path, torch.float32)
    assert '"Plamo2ForCausalLM"' in (tmp_path / "config.json").read_text()
