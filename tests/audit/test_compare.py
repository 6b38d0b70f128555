"""Ours beside theirs: worse fails, unknown is no pass, and every shape of theirs has one of ours beside it."""

from dataclasses import replace

import pytest

from pagedkv.audit.budgets import load_budgets
from pagedkv.audit.cases import all_cases
from pagedkv.audit.compare import Rule, compare
from pagedkv.audit.findings import Finding

RULE = Rule("decode", "attend", "their_attend", "waves_per_simd")
LABELS = {
    "arch": "gfx942",
    "operation": "decode",
    "dtype": "bf16",
    "head_size": "64",
    "block_size": "2048",
    "cache": "2GiB+",
    "layout": "interleaved",
}


def mine(waves=4.0, **labels):
    numbers = {} if waves is None else {"waves_per_simd": waves}
    labels = LABELS | {"side": "ours", "kernel": "attend"} | labels
    return Finding("gfx942/ours/decode-bf16-hd64/attend", "pass", labels=labels, numbers=numbers)


def theirs(waves=4.0, **labels):
    labels = {"side": "vllm", "kernel": "their_attend"} | labels
    return replace(mine(waves, **labels), id="gfx942/vllm/decode-bf16-hd64/their_attend")


@pytest.mark.parametrize(("ours", "other", "outcome"), [(4, 4, "pass"), (5, 4, "pass"), (3, 4, "fail")])
def test_ours_must_reach_theirs(ours, other, outcome):
    [finding] = compare([mine(ours), theirs(other)], [RULE])
    assert finding.outcome == outcome
    assert finding.id == "gfx942/compare/decode-bf16-hd64/their_attend"
    assert f"ours {ours}, theirs {other}" in finding.message


def test_what_was_not_compiled_is_not_compared():
    assert compare([mine(None), theirs()], [RULE])[0].outcome == "inconclusive"
    assert compare([mine(), theirs(None)], [RULE])[0].outcome == "inconclusive"


def test_theirs_over_the_lds_limit_cannot_beat_ours():
    stopped = replace(theirs(None), numbers={"lds_bytes": 131072, "lds_limit_bytes": 65536})
    [finding] = compare([mine(), stopped], [RULE])
    assert (finding.outcome, "cannot start" in finding.message) == ("pass", True)


@pytest.mark.parametrize("label", ["arch", "operation", "dtype", "head_size", "block_size"])
def test_different_things_are_not_compared(label):
    assert compare([mine(), theirs(**{label: "other"})], [RULE]) == []


def test_every_shape_of_theirs_has_ours_beside_it():
    cases = all_cases()
    shapes = {case.shape for case in cases if case.side == "ours" and case.batch.big}
    compared = {rule.operation for rule in load_budgets().rules}
    for case in cases:
        if case.side == "vllm" and not case.expected_lds:
            assert case.operation in compared
            assert case.shape in shapes, case.name


def test_a_packed_cache_is_compared_with_what_reads_one():
    packed = mine(3, layout="native-interleaved")
    assert compare([packed, theirs(4, layout="packed")], [RULE]) == []
    [finding] = compare([packed, theirs(4, layout="x-packed")], [RULE])
    assert finding.outcome == "fail"
