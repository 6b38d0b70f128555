# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own head (MTP): of its texts it drafts half right, and drafts that are not its own are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from families import checkpoints, mtp
from families.drive import PREDICTED
from families.family import FAMILIES
from families.mtp import Head, WrongDraftError
from families.oracle import Oracle
from families.probe import Verified
from families.schedule import prompt

DRAFTING = [name for name, family in FAMILIES.items() if family.drafter]


class Blind(Head):
    """The head, of which the first tokens are lost to whoever comes after them."""

    def _attend(self, stream):
        return super()._attend(stream[:, 16:] if stream.shape[1] > 18 else stream)


def steps(head, text, begin):
    """What an engine verifies that answers `text` and drafts as `head` does."""
    place, seen = begin + 1, []
    while place < len(text):
        count = min(PREDICTED, len(text) - place)
        with torch.inference_mode():
            drafts = [int(head.log_probs(text, place, n + 1)[n].argmax()) for n in range(count)]
        right = [draft == token for draft, token in zip(drafts, text[place:], strict=False)]
        taken = next((n for n, one in enumerate(right) if not one), count)
        seen.append(Verified(tuple(text[:begin]), place - begin, count, taken))
        place += taken + 1
    return seen


def answered(oracle, length, seed):
    """A prompt and what the model answers to it, as tokens."""
    with torch.inference_mode():
        return mtp._answered(oracle.working, prompt(length, seed, 128))[0].tolist()


@pytest.fixture(scope="module", params=DRAFTING)
def drafting(request, tmp_path_factory):
    """An oracle, its heads, one text that the head has learnt, and what an engine verifies that is right."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    checkpoints.save(family, folder, torch.float32)
    oracle = Oracle.load(family, folder, torch.float32)
    heads = tuple(Head.read(family, model, folder, oracle.attention) for model in (oracle.exact, oracle.working))
    length, seed = mtp.LEARNT[0]
    text = answered(oracle, length, seed)
    return oracle, heads, text, steps(heads[1], text, length)


def test_right_drafts_are_right_and_of_both_kinds(drafting):
    oracle, heads, text, seen = drafting
    numbers = mtp.compare(oracle, heads, {seen[0].prompt: text}, seen)
    assert numbers["due"] >= 5
    assert numbers["taken"] >= 5
    assert numbers["parted"] >= 1
    assert any(one.taken == 0 for one in seen)
    assert any(one.taken == PREDICTED for one in seen)


def test_drafts_of_a_head_that_lost_a_block_are_found(drafting):
    """In one of the texts that it has learnt: over an FP8 cache rounding may decide the few drafts of one."""
    oracle, heads, text, right = drafting
    working = heads[1]
    blind = Blind(working.model, working.twin, working.of_embedding, working.of_hidden, working.joined)
    texts, wrong = {right[0].prompt: text}, steps(blind, text, len(right[0].prompt))
    assert wrong != right
    for length, seed in mtp.LEARNT[1:]:
        other = answered(oracle, length, seed)
        texts[tuple(other[:length])] = other
        wrong += steps(blind, other, length)
    with pytest.raises(WrongDraftError, match="although transformers' own differs by"):
        mtp.compare(oracle, heads, texts, wrong)


def test_a_drafter_of_which_nothing_is_taken_is_found(drafting):
    oracle, heads, text, right = drafting
    none = [replace(one, taken=0) for one in right]
    with pytest.raises(WrongDraftError, match="was thrown away"):
        mtp.compare(oracle, heads, {right[0].prompt: text}, none)


def test_one_rounded_draft_does_not_excuse_the_others(drafting):
    """The effect of a router that sends one token to another expert."""
    oracle, (exact, working), text, right = drafting
    where = len(right[0].prompt) + right[1].answered

    class Thrown(Head):
        def log_probs(self, tokens, place, count):
            return super().log_probs(tokens, place, count).roll(1 if place == where else 0, -1)

    thrown = Thrown(working.model, working.twin, working.of_embedding, working.of_hidden, working.joined)
    mtp.compare(oracle, (exact, thrown), {right[0].prompt: text}, right)
    none = [replace(one, taken=0) for one in right]
    with pytest.raises(WrongDraftError, match=r"of \d+ drafts that transformers has right 0 were taken"):
        mtp.compare(oracle, (exact, thrown), {right[0].prompt: text}, none)


def test_no_draft_is_no_evidence(drafting):
    oracle, heads, text, right = drafting
    for seen in ([], [replace(right[0], answered=0)]):
        with pytest.raises(WrongDraftError, match="no draft was verified"):
            mtp.compare(oracle, heads, {right[0].prompt: text}, seen)
