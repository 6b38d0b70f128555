# SPDX-License-Identifier: Apache-2.0
"""The oracle of a family with an FP8 cache: what it rounds, and which faults its tolerance still sees."""

from __future__ import annotations

import pytest
import torch

from families import plain_attention
from families.behaviours import NotDrivenError, require_codes
from families.family import FAMILIES
from families.judge import Error
from families.oracle import prompt

FAMILY = FAMILIES["qwen3-moe-fp8"]
HYBRIDS = ("falcon-h1-fp8", "qwen3.5-fp8")
TOKENS = prompt(140, seed=2)


@pytest.fixture(scope="module")
def oracle(oracle_of):
    return oracle_of(FAMILY.name)


@pytest.mark.parametrize("kind", ["e4m3fn", "e4m3fnuz"])
def test_values_go_to_the_nearest_code(kind):
    """Between two codes to the nearer, halfway to the even one, beyond the largest to the largest."""
    codes = torch.arange(0, 127 if kind == "e4m3fn" else 128, dtype=torch.uint8)
    values = codes.view(getattr(torch, f"float8_{kind}")).double()
    between = (values[1:] + values[:-1]) / 2
    for sign in (1, -1):
        assert torch.equal(plain_attention.rounded(sign * values, kind=kind), sign * values)
        even = torch.where(codes[1:] % 2 == 0, values[1:], values[:-1])
        assert torch.equal(plain_attention.rounded(sign * between, kind=kind), sign * even)
        assert torch.equal(plain_attention.rounded(sign * between * (1 + 1e-6), kind=kind), sign * values[1:])
        assert torch.equal(plain_attention.rounded(sign * between * (1 - 1e-6), kind=kind), sign * values[:-1])
        assert plain_attention.rounded(torch.tensor([sign * 1e9]), kind=kind).item() == sign * values[-1]


def test_rounding_to_the_other_code_is_part_of_the_tolerance(oracle):
    """Nudges reach as far as float32's own error, and what they do is far more than that error does by itself."""
    exact = oracle.log_probs(TOKENS)
    assert 2**-24 < oracle._noise() < 2**-17
    own, *others = (Error.of(oracle.log_probs(TOKENS, **way), exact) for way in oracle.rough)
    assert len(others) == 2
    assert own.worst < 1e-5
    assert all(other.worst > 100 * own.worst for other in others)
    assert oracle.tolerance(TOKENS).worst >= 2 * max(other.worst for other in others)


def cut(rows):
    """Towards zero, as a cast that does not round."""
    nearest = plain_attention.rounded(rows)
    return torch.where(nearest.abs() > rows.abs(), plain_attention.rounded(nearest * (1 - 2**-4 - 2**-6)), nearest)


FAULTS = {
    "no FP8 at all": lambda rows: rows,
    "e5m2": lambda rows: plain_attention.rounded(rows, kind="e5m2"),
    "half of it": lambda rows: plain_attention.rounded(rows) / 2,  # e4m3fn read as e4m3fnuz
    "cut": cut,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tolerance_resolves_another_cache(fault, oracle):
    """The typical error does; the worst is that of a token which one code sends to another expert."""
    other = oracle.log_probs(
        TOKENS, attention=plain_attention.register("faulty", plain_attention.through(FAULTS[fault]))
    )
    assert Error.of(other, oracle.log_probs(TOKENS)).typical > 5 * oracle.tolerance(TOKENS).typical


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_tolerance_of_a_hybrid_resolves_another_cache(fault, hybrid, oracle_of):
    """Half of each layer or more is no attention, so a fault shows less: 3.6 times the admissible at least, not 7."""
    oracle = oracle_of(hybrid)
    attention = plain_attention.register("faulty", plain_attention.through(FAULTS[fault]))
    other = Error.of(oracle.log_probs(TOKENS, attention=attention), oracle.log_probs(TOKENS))
    assert other.typical > 3 * oracle.tolerance(TOKENS).typical


def test_tolerance_resolves_newest_keys_that_are_not_rounded(oracle):
    """An engine that attends to a prompt's keys and values before it rounds them, and rounds them for decode alone."""
    prompts = len(TOKENS) - 20
    mixed = plain_attention.register("unrounded prompt", _unrounded_rows(prompts))
    error = Error.of(oracle.log_probs(TOKENS, attention=mixed)[:prompts], oracle.log_probs(TOKENS)[:prompts])
    assert error.typical > 5 * oracle.tolerance(TOKENS).typical


def _unrounded_rows(prompts):
    plain, rounding = plain_attention.through(lambda rows: rows), plain_attention.through(plain_attention.rounded)

    def attend(*args, **kwargs):
        (early, weights), (late, _) = plain(*args, **kwargs), rounding(*args, **kwargs)
        return torch.cat([early[:, :prompts], late[:, prompts:]], dim=1), weights

    return attend


def layer(kind, form):
    return {"layer": "model.layers.0.attn", "kv_dtype": kind, "fp8_format": form}


def test_the_workers_must_say_that_the_cache_holds_codes():
    plain, other = FAMILIES["qwen3-moe"], "e5m2"
    require_codes(FAMILY, [layer("uint8", plain_attention.E4M3)])
    require_codes(plain, [layer("float32", None)])
    for family, served in (
        (FAMILY, layer("float32", None)),
        (FAMILY, layer("uint8", other)),
        (FAMILY, layer("float32", plain_attention.E4M3)),
        (plain, layer("uint8", plain_attention.E4M3)),
    ):
        with pytest.raises(NotDrivenError, match=r"the cache of model\.layers\.0\.attn holds"):
            require_codes(family, [served])
