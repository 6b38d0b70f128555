# SPDX-License-Identifier: Apache-2.0
"""What failing cases share, from their ids: the plainest words, and never ones that a passing case contradicts."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from hilgate.report import factors
from hilgate.report.factors import case_of, common, split

GRID = [
    f"t.py::test_x[{phase}-{dtype}-bs{block}-{cap}]"
    for phase in ("decode", "prefill")
    for dtype in ("float16", "float32")
    for block in (16, 48, 64, 144, 784)
    for cap in ("plain", "cap5", "w50")
]


def parted(rule):
    """(failing, passing) ids of the grid by a rule over their words and numbers."""
    failing = [one for one in GRID if rule(case_of(one))]
    return failing, [one for one in GRID if one not in failing]


def words_of(rule, **more):
    found = common(*parted(rule), **more)
    return found.words if found else None


def test_an_id_is_read_into_words_and_numbers():
    found = case_of("t.py::test_x[attention-float16-q8kv2-bs48-1.5--0.3-e4m3fn]")
    assert found.test == "t.py::test_x"
    assert {"attention", "float16", "q8", "kv2", "q8kv2", "bs48", "e4m3fn"} <= found.words
    assert found.numbers == {"q": 8, "kv": 2, "bs": 48, "parameter 5": 1.5, "parameter 6": -0.3}
    assert case_of("no parameters") == factors.NamedCase("no parameters", frozenset(), {})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda case: "decode" in case.words, "every case with decode"),
        (lambda case: {"decode", "cap5"} <= case.words, "every case with cap5 and decode"),
        (lambda case: "plain" not in case.words, "every case without 'plain'"),
        (lambda case: case.numbers["bs"] in {48, 144, 784}, "every case with bs no power of two"),
        (lambda case: case.numbers["bs"] >= 64, "every case with bs 64 or more"),
        (
            lambda case: "decode" in case.words and case.numbers["bs"] in {48, 144, 784},
            "every case with decode and bs no power of two",
        ),
        (lambda _: True, "every case"),
    ],
    ids=["word", "two words", "absent", "no power of two", "bound", "decode of odd blocks", "all"],
)
def test_the_plainest_factor_is_said(rule, words):
    assert words_of(rule) == words


def test_a_passing_case_takes_a_factor_away():
    """One decode that passes, and it is no longer every decode."""
    failing, passing = parted(lambda case: "decode" in case.words)
    found = common(failing[1:], [*passing, failing[0]])
    assert found is None or "decode" not in found.words or " and " in found.words


def test_cases_that_have_nothing_in_common_get_no_factor():
    generator = random.Random(7)
    failing = generator.sample(GRID, 9)
    assert common(failing, [one for one in GRID if one not in failing]) is None


def test_words_that_no_case_tells_apart_are_said():
    failing = [f"t[a-b-{n}]" for n in range(4)]
    assert common(failing, [f"t[c-d-{n}]" for n in range(4)]).words == "every case with a (no case tells it from b)"


def test_two_factors_are_two_parts():
    failing, passing = parted(lambda case: {"decode", "cap5"} <= case.words or {"prefill", "w50"} <= case.words)
    assert common(failing, passing) is None
    parts = split(failing, passing)
    assert {part.words for part in parts} == {"every case with cap5 and decode", "every case with prefill and w50"}
    assert sorted(place for part in parts for place in part.covers) == list(range(len(failing)))


def test_no_factor_is_contradicted_whatever_fails():
    """200 sets of failing cases, few of them tidy: each factor is met by all it covers, and by no passing case."""
    generator = random.Random(3)
    said = 0
    for _ in range(200):
        words = [generator.sample(["decode", "prefill", "float16", "bs48", "bs64", "cap5", "w50"], 2) for _ in "ab"]
        few = [one for one in GRID if any(case_of(one).words.issuperset(pair) for pair in words)]
        few += [one for one in generator.sample(GRID, generator.choice([0, 0, 1, 4])) if one not in few]
        few = few or GRID[:1]
        passing = [one for one in GRID if one not in few]
        whole = common(few, passing)
        for found in [*([whole] if whole else []), *split(few, passing)]:
            said += 1
            assert found.covers
            assert not [one for one in passing if meets(found.words, case_of(one))]
            assert all(meets(found.words, case_of(few[place])) for place in found.covers)
    assert said > 50


def meets(words, case):
    """Whether a case meets a factor, by reading the sentence back."""
    words = words.split(" (no case")[0].removeprefix("every case")
    there, _, absent = words.partition(" without ")
    for one in there.removeprefix(" with ").split(" and ") if there else ():
        name, _, rest = one.partition(" ")
        value = case.numbers.get(name, 0)
        power = value in {2**n for n in range(20)}
        holds = {
            "": one in case.words,
            "no power of two": not power,
            "a power of two": power,
            "more": rest.endswith("or more") and value >= float(rest.split()[0] if rest[:1].isdigit() else 0),
            "less": rest.endswith("or less") and value <= float(rest.split()[0] if rest[:1].isdigit() else 0),
        }[rest if rest in {"", "no power of two", "a power of two"} else rest.split()[-1]]
        if not holds:
            return False
    return all(one not in case.words for one in absent.replace("'", "").split(" or ") if one)


def test_many_cases_are_looked_at_in_seconds():
    ids = [f"t[{a}-{b}-bs{n}]" for a, b, n in itertools.product("abcdefgh", "stuvwxyz", range(100))]
    failing = [one for one in ids if "[a-" in one or "-z-" in one]
    began = time.process_time()
    parts = split(failing, [one for one in ids if one not in set(failing)])
    assert {part.words for part in parts} == {"every case with a", "every case with z"}
    assert time.process_time() - began < 10
