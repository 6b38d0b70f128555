# SPDX-License-Identifier: Apache-2.0
"""The parts of the table that need no engine: schedules, the judge, the search for company, cells, declarations."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch

from families import behaviours, cell, drive, family, judge, schedule
from families.family import FAMILIES, FamilyLimit
from families.judge import Tolerance, WrongAnswerError
from families.schedule import FamilyAnswer, ScheduledRequest, ScheduleLimits

VOCABULARY = 16
LIMITS = ScheduleLimits(schedule.awkward_lengths(16, 37, 90), VOCABULARY)


def distributions(tokens):
    """Stands for a model: every distribution depends on all tokens before it."""
    rows = []
    for end in range(1, len(tokens) + 1):
        rng = Random(str(tokens[:end]))
        rows.append([rng.gauss(0, 3) for _ in range(VOCABULARY)])
    return torch.tensor(rows).double().log_softmax(-1)


class Truth:
    def log_probs(self, tokens, *, audio=None):
        assert audio is None
        return distributions(list(tokens))

    def tolerance(self, tokens, *, audio=None, errors):
        assert tokens
        assert len(errors) <= len(tokens)
        assert audio is None
        return Tolerance(torch.full((len(tokens),), 1e-3, dtype=torch.float64), typical=5e-4, widest=1e-3)


def answered(request, *, change=None):
    """What an engine that is right would answer; `change` spoils its rows."""
    tokens = list(request.prompt)
    for _ in range(request.answers):
        tokens.append(int(distributions(tokens)[-1].argmax()))
    rows = distributions(tokens[:-1])[-request.answers :]
    best = rows.topk(2).values
    gaps = tuple((best[:, 0] - best[:, 1]).tolist())
    if change is not None:
        rows = change(rows.clone())
    return FamilyAnswer(tuple(tokens[len(request.prompt) :]), rows, gaps, 0)


REQUEST = ScheduledRequest((3, 4, 5), 9)


def test_the_right_answer_is_right():
    closeness = judge.compare((REQUEST,), [answered(REQUEST)], Truth())
    assert (closeness.max_abs_err, closeness.positions, closeness.tolerance) == (0, 9, 1e-3)


def test_what_few_answers_do_not_show_many_requests_do():
    """Four answers each: too few for a median of their own."""
    fuzz = (ScheduledRequest((3, 4, 5), 4), ScheduledRequest((6, 7), 4))
    right = [answered(request) for request in fuzz]
    judge.compare(fuzz, right, Truth())
    off = [answered(request, change=lambda rows: rows + 7e-4) for request in fuzz]
    with pytest.raises(WrongAnswerError, match=r"2 requests: .*off by 1\.4 times .*at half of 8 positions"):
        judge.compare(fuzz, off, Truth())
    judge.compare(fuzz, [right[0], *off[1:]], Truth())


def spoil(row, column, by):
    def change(rows):
        rows[row, column] += by
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (spoil(4, 2, 2e-3), r"off by 0\.002 at position 6 \(at worst by 0\.002, .*\); rounding explains 0\.001"),
        (spoil(5, 1, float("nan")), "not finite from position 7 on"),
        (lambda rows: rows + 7e-4, r"off by 0\.0007 at half of 9 positions"),
    ],
)
def test_wrong_distributions_are_found(change, problem):
    with pytest.raises(WrongAnswerError, match=problem) as caught:
        judge.compare((REQUEST,), [answered(REQUEST, change=change)], Truth())
    assert caught.value.tokens[:3] == (3, 4, 5)


def test_a_wrong_token_with_right_distributions_is_found():
    good = answered(REQUEST)
    other = (good.tokens[-1] + 1) % VOCABULARY
    wrong = FamilyAnswer((*good.tokens[:-1], other), good.rows, good.gaps, 0)
    with pytest.raises(WrongAnswerError, match="answer token 8 is not the most probable"):
        judge.compare((REQUEST,), [wrong], Truth())


@pytest.mark.parametrize("cut", ["tokens", "rows"])
def test_missing_answers_are_found(cut):
    good = answered(REQUEST)
    short = (
        FamilyAnswer(good.tokens[:-1], good.rows, good.gaps, 0)
        if cut == "tokens"
        else FamilyAnswer(good.tokens, None, (), 0)
    )
    with pytest.raises(WrongAnswerError, match="8 of 9 tokens" if cut == "tokens" else "without distributions"):
        judge.compare((REQUEST,), [short], Truth())


def test_who_leaves_need_not_be_answered_to_the_end():
    left = ScheduledRequest((3, 4, 5), 9, leaves=2)
    got = answered(ScheduledRequest((3, 4, 5), 3))
    assert schedule.difference((left,), [got], [answered(REQUEST)], 0.0) == ""
    assert "1 of 2 tokens" in schedule.difference(
        (left,), [answered(ScheduledRequest((3, 4, 5), 1))], [answered(REQUEST)], 0.0
    )


def test_a_tie_excuses_a_token_and_what_follows_it():
    good = answered(REQUEST)
    other = FamilyAnswer(((good.tokens[0] + 1) % VOCABULARY, *good.tokens[1:]), None, (), 0)
    assert "request 0 (3 prompt tokens)" in schedule.difference((REQUEST,), [other], [good], good.gaps[0] / 2)
    assert schedule.difference((REQUEST,), [other], [good], 2 * good.gaps[0]) == ""


def test_a_seed_means_one_schedule():
    first, second, other = (schedule.draw(LIMITS, Random(seed)) for seed in (7, 7, 8))
    assert first == second != other
    drawn = [request for seed in range(50) for request in schedule.draw(LIMITS, Random(seed))]
    assert {len(request.prompt) for request in drawn} == set(LIMITS.lengths)
    assert {request.leaves is None for request in drawn} == {True, False}
    assert max(request.arrives for request in drawn) == LIMITS.steps


def test_prompts_of_one_text_share_their_beginning():
    short, long = (schedule.prompt(length, 3, VOCABULARY) for length in (20, 70))
    assert long[:20] == short
    assert len(set(long)) > 5


def test_shrinking_ends_at_the_smallest_schedule_that_fails():
    """The fault: whoever comes beside somebody with more than 36 prompt tokens."""

    def fails(drawn):
        return "crowded" if len(drawn) > 1 and max(len(request.prompt) for request in drawn) > 36 else ""

    start = next(s for s in (schedule.draw(LIMITS, Random(seed)) for seed in range(99)) if fails(s) and len(s) > 4)
    smallest, why = schedule.shrink(start, "crowded", fails)
    assert why == "crowded"
    assert sorted(len(request.prompt) for request in smallest) == [1, 37]
    assert {(request.answers, request.arrives, request.leaves) for request in smallest} == {(1, 0, None)}


def engine_with(fault):
    def answer(drawn, index):
        request = drawn[index]
        if fault(drawn, index):
            return answered(ScheduledRequest((*request.prompt[:-1], 3 + request.prompt[-1] % 5), request.answers))
        return answered(ScheduledRequest(request.prompt, min(request.answers, request.leaves or request.answers)))

    def ask(drawn):
        return [answer(drawn, index) for index in range(len(drawn))]

    return ask


def test_a_search_finds_answers_that_depend_on_the_batch():
    limits = ScheduleLimits((4, 5, 9), VOCABULARY)
    how = {"seed": 1, "examples": 3, "alone": lambda request: answered(ScheduledRequest(request.prompt, 9)), "tie": 0.0}
    requests = schedule.search(limits, ask=engine_with(lambda *_: False), **how)
    assert requests >= 6
    with pytest.raises(
        schedule.CompanyError, match=r"schedule 0 of seed 1, shrunk to: 1 tokens for 1 at step 0, \d tok"
    ):
        schedule.search(limits, ask=engine_with(lambda drawn, i: len(drawn) > 1 and i == 1), **how)


def test_declarations_end_with_what_they_describe():
    passed, failed = cell.FamilyCell("pass"), cell.FamilyCell("fail", "IndexError: index 3 is out of bounds")
    assert cell.settled(passed, None) is passed
    assert cell.settled(failed, None) is failed
    index = FamilyLimit(re.compile(r"index \d+ is out"), "device:cuda,rocm")
    excused = cell.settled(failed, index)
    assert (excused.outcome, excused.reason) == ("did not run", f"vLLM here: {failed.reason}")
    assert excused.needs == "device:cuda,rocm"
    assert cell.settled(failed, FamilyLimit(re.compile("another error"), "device:cuda,rocm")).outcome == "fail"
    raised_by_us = cell.FamilyCell("fail", failed.reason, ours=True)
    assert cell.settled(raised_by_us, index) is raised_by_us, "an error of our code is no limit of vLLM"
    stale = cell.settled(passed, index)
    assert stale.outcome == "fail"
    assert "remove it from the declaration" in stale.reason
    # Of another model than it was measured on, a declaration excuses and demands nothing.
    assert cell.settled(passed, index, measured=False) is passed
    assert cell.settled(failed, index, measured=False).outcome == "did not run"


def test_a_cell_names_its_declared_excuse_only():
    """The prefix cache of MLA on the CPU: hilgate asks for AMX, here it is only named, whatever became of the cell."""
    known = FAMILIES["deepseek-v3"].limit("cpu", "prefix")
    assert (known.needs, known.everywhere) == ("cpu:amx_tile", False)
    off = cell.FamilyCell("did not run", "vLLM turns the prefix cache off here")
    assert cell.settled(off, known) == cell.FamilyCell("did not run", off.reason, needs="cpu:amx_tile")
    assert cell.settled(cell.FamilyCell("pass", numbers={"n": 1}), known) == cell.FamilyCell(
        "pass", numbers={"n": 1}, needs="cpu:amx_tile"
    )
    assert cell.settled(off, None).needs == "", "not declared: its step did not run"
    other = cell.FamilyCell("did not run", "vLLM keeps states in float32 here")
    assert cell.settled(other, known).needs == "", "another reason than the declared one"


def test_of_several_engines_the_worst_counts():
    cells = {outcome: cell.FamilyCell(outcome, outcome, 1.0) for outcome in ("pass", "did not run", "fail")}
    assert cell.worse(None, cells["pass"]) is cells["pass"]
    for worse, better in (("fail", "pass"), ("fail", "did not run"), ("did not run", "pass")):
        for one, other in ((worse, better), (better, worse)):
            assert cell.worse(cells[one], cells[other]) == cell.FamilyCell(worse, worse, 2.0)


def test_every_behaviour_is_driven_by_an_engine_of_every_family():
    assert set(behaviours.DRIVEN) == set(family.BEHAVIOURS)
    for name, each in FAMILIES.items():
        for platform in ("cpu", "cuda", "rocm"):
            driven = [one for plan in drive.tiny_plans(each, platform) for one in plan.behaviours]
            assert set(family.columns(name, [])) <= set(driven)


@pytest.mark.parametrize("chosen", [["prefil"], ["prefill", "nothing"]])
def test_unknown_names_are_refused(chosen):
    with pytest.raises(family.UnknownNameError, match="there are prefill, decode"):
        family.columns("jamba", chosen)
    with pytest.raises(family.UnknownNameError, match="there are jamba, zamba2"):
        family.rows(["jambo"])


def test_vllm_has_no_cache_mode_of_all_states():
    """ "all" of other versions is refused here; were it not, the column *production* would have to drive it too."""
    from pydantic import ValidationError
    from vllm.config import CacheConfig

    assert CacheConfig(mamba_cache_mode="align").mamba_cache_mode == "align"
    with pytest.raises(ValidationError, match="'align' or 'none'"):
        CacheConfig(mamba_cache_mode="all")
