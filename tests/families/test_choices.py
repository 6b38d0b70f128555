# SPDX-License-Identifier: Apache-2.0
"""Rounding that sends a token to another expert excuses the rows that this moves, and no others."""

from __future__ import annotations

import pytest
import torch

from families import judge
from families.choices import Choices, OpenChoice, moved_leads, open_choices
from families.family import FAMILIES
from families.judge import WrongAnswerError
from families.oracle import SLACK, prompt
from families.schedule import FamilyAnswer, ScheduledRequest

TOKENS = prompt(140, seed=2)
BLOCK = range(48, 96)
ROUTED = ["jamba", "granite-4.0-h", "qwen3-moe", "deepseek-v3", "kimi-linear", "qwen3-next"]
FEW = ROUTED[:4]
"""Families whose open choices in float16, 5 to 13 over these tokens, move at most half of the rows. The other two have
18 and 61, which move 136 and 129 of the 140 rows."""

SCORES = torch.tensor([[0.1, 0.5, 0.4, 0.39], [3.0, 1.0, 2.0, 0.0]])


def test_a_choice_is_noted_with_its_lead():
    with Choices() as choices:
        values, chosen = SCORES.topk(2)
    assert chosen.tolist() == [[1, 2], [0, 2]]
    assert values.flatten().tolist() == pytest.approx([0.5, 0.4, 3, 2])
    [seen] = choices.seen
    assert seen.next.tolist() == [3, 1]
    assert seen.lead.tolist() == pytest.approx([0.01, 1], rel=1e-4)
    assert open_choices(choices.seen, [0.02]) == [OpenChoice(0, 0)]
    assert open_choices(choices.seen, [0.009]) == []


def test_a_choice_is_repeated_though_scores_have_moved():
    with Choices() as first:
        SCORES.topk(2)
    moved = SCORES + torch.tensor([0, 0, 0, 0.02])
    assert moved.topk(2).indices[0].tolist() == [1, 3]
    with Choices(repeat=first.seen) as second:
        values, chosen = torch.topk(moved, k=2, dim=-1, sorted=False)
    assert chosen.tolist() == [[1, 2], [0, 2]]
    assert values.flatten().tolist() == pytest.approx([0.5, 0.4, 3, 2])
    assert moved_leads(first.seen, second.seen) == pytest.approx([0.02], rel=1e-4)


def test_one_choice_is_made_otherwise():
    with Choices(other=OpenChoice(1, 0)):
        first, second = SCORES.topk(2), SCORES.topk(2)
    assert torch.equal(first.indices, torch.tensor([[1, 2], [0, 2]]))
    assert torch.equal(second.indices, torch.tensor([[1, 3], [0, 2]]))
    assert second.values.flatten().tolist() == pytest.approx([0.5, 0.39, 3, 2])


@pytest.mark.parametrize("arguments", [{"k": 4}, {"k": 1, "dim": 0}, {"k": 1, "largest": False}])
def test_what_no_router_asks_is_passed_on(arguments):
    with Choices() as choices:
        found = SCORES.topk(**arguments)
    assert torch.equal(found.values, SCORES.topk(**arguments).values)
    assert not choices.seen


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_routers_are_known(name, oracle_of):
    if not FAMILIES[name].config_class:
        assert name not in ROUTED
        return
    heard = {"audio": 1} if FAMILIES[name].attention == "cross" else {}
    with Choices() as choices:
        oracle_of(name).log_probs(TOKENS[:20], exact=True, **heard)
    assert bool(choices.seen) is (name in (*ROUTED, "qwen3-moe-fp8", "kimi-delta"))


@pytest.mark.parametrize("name", FEW)
def test_in_16_bits_most_rows_resolve_a_lost_block(name, oracle_of):
    oracle = oracle_of(name, "float16")
    tolerance = oracle.tolerance(TOKENS)
    lost = (oracle.without_keys(TOKENS, BLOCK) - oracle.log_probs(TOKENS)).abs().amax(-1)[BLOCK.stop :]
    assert (lost > tolerance.rows[BLOCK.stop :]).double().mean() > 0.75


@pytest.mark.parametrize("name", FEW)
def test_an_open_choice_is_excused_and_a_decided_one_is_not(name, oracle_of, monkeypatch):
    oracle = oracle_of(name, "float16")
    tolerance, exact = oracle.tolerance(TOKENS), oracle.log_probs(TOKENS)
    with Choices() as choices:
        oracle.log_probs(TOKENS, exact=True)
    reach = [SLACK * each for each in oracle.rounding(TOKENS).reach]

    def other(place):
        with Choices(other=place):
            return (oracle.log_probs(TOKENS, exact=True) - exact).abs().amax(-1)

    with monkeypatch.context() as none_tried:
        for further in ("_unsteady", "_moved_by"):
            none_tried.setattr(oracle, further, None)
        assert (oracle.tolerance(TOKENS, errors=torch.zeros(1)).rows <= tolerance.rows).all()
    for place in open_choices(choices.seen, reach):
        moved, limit = other(place), tolerance.rows
        assert ((moved <= limit) | (limit >= tolerance.widest)).all()
        if (moved <= limit).all():
            tried = oracle.tolerance(TOKENS, errors=moved).rows
            assert ((moved <= tried) & (tried <= limit)).all()
    decided = [
        OpenChoice(call, int(choice.lead.argmax()))
        for call, choice in enumerate(choices.seen)
        if choice.lead.max() > 20 * reach[call]
    ]
    assert decided
    assert any((other(place) > tolerance.rows).any() for place in decided)


def test_in_16_bits_most_answers_are_decided(oracle_of):
    """What `tests/models/test_deployed.py` demands of its batches on a GPU."""
    oracle = oracle_of("granite-4.0-h", "float16")
    undecided = {}
    for length, seed, answers in ((29, 1, 1), (140, 2, 8), (47, 47, 12)):
        tokens = prompt(length, seed)
        for _ in range(answers):
            tokens = [*tokens, int(oracle.log_probs(tokens)[-1].argmax())]
        request = ScheduledRequest(tuple(tokens[:length]), answers)
        rows = oracle.log_probs(tokens[:-1])
        answer = FamilyAnswer(tuple(tokens[length:]), rows, (), 0)
        undecided[length] = judge.compare((request,), [answer], oracle).undecided
        spoilt = rows.clone()
        spoilt[length - 1] += torch.linspace(-0.3, 0.3, rows.shape[-1])
        with pytest.raises(WrongAnswerError, match=f"position {length - 1}"):
            judge.compare((request,), [FamilyAnswer(answer.tokens, spoilt, (), 0)], oracle)
    assert undecided[29] == 0
    assert undecided[140] <= 4
    assert undecided[47] <= 6
