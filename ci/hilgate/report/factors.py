# SPDX-License-Identifier: Apache-2.0
"""What failing cases of a test have in common and no passing one has, from the parameters in their ids. Pure.

A factor is one to three conditions on parameters: a word that is there (`decode`), a number that is none of the powers
of two or lies beyond a bound (`bs48` is block size 48), and last a word that is not there. No case that passed may meet
all of them, whatever they are worth otherwise: a wrong factor costs its reader more than none.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EVERY = "every case"
"""How the words of a factor begin; alone where no case passed."""
MOST_CONDITIONS = 3
"""Conditions of one factor; more describe the cases and no cause."""
MOST_PARTS = 4
"""Factors that failures of one signature are split into; more are no causes but a list."""
_ABSENT = 5
"""Cost of a word that is not there: the last that is tried."""
MOST_TRIED = 80
"""Conditions that are combined, those that most failing cases meet: all pairs and threes of them are looked at."""
MOST_SAME = 2
"""Other words that mark the same cases, named beside a factor of one condition."""

_POSITION = " as parameter "
_NAMED = re.compile(r"(?:[a-z]+\d+(?:\.\d+)?)+")
_PAIR = re.compile(r"([a-z]+)(\d+(?:\.\d+)?)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BETWEEN = re.compile(r"(?<=[^-])-")
"""What joins parameters; the second of two is a minus."""
_TYPES = frozenset({"float", "bfloat", "int", "uint", "fp", "bf", "f", "tf", "gfx", "e"})
"""What stands before a number that names a type or an arch: 16 of float16 is no quantity."""


@dataclass(frozen=True)
class NamedCase:
    """A case as its id tells it.

    Attributes:
        test: The id without its parameters.
        words: Its parameters, and the parts of those that join names and numbers (`q8kv2`: also `q8` and `kv2`).
        numbers: Name of a quantity -> its value; a bare number is named by its place, `parameter 1`.
    """

    test: str
    words: frozenset[str]
    numbers: dict[str, float]


def case_of(check: str) -> NamedCase:
    """Read the parameters of an id; other text than a pytest id has none."""
    test, bracket, rest = check.partition("[")
    words: list[str] = []
    numbers: dict[str, float] = {}
    for place, word in enumerate(_BETWEEN.split(rest.removesuffix("]")) if bracket else (), start=1):
        if _NUMBER.fullmatch(word):
            numbers[f"parameter {place}"] = float(word)
            words.append(f"{word}{_POSITION}{place}")
            continue
        words += [word] if word else []
        pairs = _PAIR.findall(word) if _NAMED.fullmatch(word) else []
        numbers |= {name: float(value) for name, value in pairs if name not in _TYPES}
        words += [name + value for name, value in pairs] if len(pairs) > 1 else []
    return NamedCase(test, frozenset(words), numbers)


@dataclass(frozen=True)
class Condition:
    """A condition on parameters; `cost` orders those that fit as well, the plainest first."""

    words: str
    cost: int
    cases: int
    """A bit for each case that meets it."""


@dataclass(frozen=True)
class Factor:
    """What failing cases share, in words, and the places of the failing cases that it covers."""

    words: str
    covers: frozenset[int]


def common(failing: Sequence[str], passing: Sequence[str], *, plain: bool = False) -> Factor | None:
    """The factor of all these failing ids; None where no few conditions tell them from the passing ones.

    A `plain` one is made of words that are there and bare numbers of no test: what several tests can share.
    """
    found = _Cases(failing, passing)
    if plain:
        found.conditions = [one for one in found.conditions if one.cost == 0 and _POSITION not in one.words]
    return found.factor(found.failing, whole=True)


def split(failing: Sequence[str], passing: Sequence[str]) -> tuple[Factor, ...]:
    """Several factors that cover every failing id together, the widest first; empty where there are none.

    Each covers two or more, so a case that fails for a reason of its own leaves the failures whole rather than named
    after what happens to be its own.
    """
    found = _Cases(failing, passing)
    rest, parts = found.failing, list[Factor]()
    while rest and len(parts) < MOST_PARTS:
        part = found.factor(rest, whole=False)
        if part is None:
            return ()
        parts.append(part)
        rest &= ~_bits(part.covers, len(found.cases))
    return () if rest else tuple(parts)


class _Cases:
    """Failing cases, then passing ones of the same tests, as bits of a number."""

    def __init__(self, failing: Sequence[str], passing: Sequence[str]) -> None:
        self.cases = [case_of(one) for one in (*failing, *passing)]
        self.count = len(failing)
        self.failing = (1 << self.count) - 1
        self.passing = ((1 << len(self.cases)) - 1) & ~self.failing
        self.conditions = sorted(self._conditions(), key=lambda one: (one.cost, one.words))

    def factor(self, wanted: int, *, whole: bool) -> Factor | None:
        """The widest factor over the wanted failing cases with the fewest conditions.

        `whole` takes none that leaves one out; else two cases are enough.
        """
        if not self.passing and whole:
            return Factor(EVERY, frozenset(_places(wanted)))
        useful = [one for one in self.conditions if one.cases & wanted and (not whole or wanted & ~one.cases == 0)]
        useful = [one for one in useful if self.passing & ~one.cases]
        plainest = {one.cases: one for one in reversed(useful)}.values()  # of those that the same cases meet
        useful = sorted(plainest, key=lambda one: (one.cost == _ABSENT, -(one.cases & wanted).bit_count()))
        useful = useful[:MOST_TRIED]
        least = wanted.bit_count() if whole else 2
        best: tuple[int, int, tuple[Condition, ...]] | None = None
        for size in range(1, MOST_CONDITIONS + 1 if whole else MOST_CONDITIONS):
            for chosen in itertools.combinations(useful, size):
                met = -1
                for one in chosen:
                    met &= one.cases
                width = (met & wanted).bit_count()
                if met & self.passing or width < least:
                    continue
                rank = (width, -sum(one.cost for one in chosen))
                if best is None or rank > best[:2]:
                    best = (*rank, chosen)
            if best:
                break
        return self._worded(best[2], wanted) if best else None

    def _worded(self, chosen: tuple[Condition, ...], wanted: int) -> Factor:
        met = wanted
        for one in chosen:
            met &= one.cases
        chosen = tuple(sorted(chosen, key=lambda one: (one.cost, one.words)))
        there = [one.words for one in chosen if one.cost < _ABSENT]
        absent = [one.words for one in chosen if one.cost == _ABSENT]
        words = (f" with {' and '.join(there)}" if there else "") + (
            f" without {' or '.join(map(repr, absent))}" if absent else ""
        )
        if len(chosen) == 1:
            alike = [one for one in self.conditions if one.cost == chosen[0].cost == 0 and one is not chosen[0]]
            same = [one.words for one in alike if one.cases == chosen[0].cases]
            words += f" (no case tells it from {' or '.join(same[:MOST_SAME])})" if same else ""
        return Factor(f"{EVERY}{words}", frozenset(_places(met)))

    def _conditions(self) -> Iterable[Condition]:
        """Conditions that two failing cases meet, and words that only passing ones have."""
        failing: dict[str, list[int]] = {}
        passing: dict[str, list[int]] = {}
        for place, case in enumerate(self.cases):
            for word in sorted(case.words):
                (failing if place < self.count else passing).setdefault(word, []).append(place)
        whole = (1 << len(self.cases)) - 1
        for word, places in failing.items():
            if len(places) > 1 or self.count == 1:
                yield Condition(word, 0, self._bits([*places, *passing.get(word, ())]))
        for word in sorted(passing, key=lambda word: -len(passing[word]))[:MOST_TRIED]:
            yield Condition(word, _ABSENT, whole & ~self._bits([*failing.get(word, ()), *passing[word]]))
        for name in dict.fromkeys(name for case in self.cases[: self.count] for name in case.numbers):
            yield from self._of_number(name)

    def _of_number(self, name: str) -> Iterable[Condition]:
        values = {place: case.numbers[name] for place, case in enumerate(self.cases) if name in case.numbers}
        if len(set(values.values())) < 3:
            return
        bad = [value for place, value in values.items() if place < self.count]
        least, most = min(bad), max(bad)
        for words, cost, holds in (
            ("no power of two", 1, lambda value: not _power_of_two(value)),
            ("a power of two", 2, _power_of_two),
            (f"{least:g} or more", 3, lambda value: value >= least),
            (f"{most:g} or less", 3, lambda value: value <= most),
        ):
            yield Condition(f"{name} {words}", cost, self._bits([p for p, value in values.items() if holds(value)]))

    def _bits(self, places: Iterable[int]) -> int:
        return _bits(places, len(self.cases))


def _bits(places: Iterable[int], number: int) -> int:
    found = bytearray(number // 8 + 1)
    for place in places:
        found[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(found, "little")


def _places(bits: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


def _power_of_two(value: float) -> bool:
    return value >= 1 and value == int(value) and int(value) & (int(value) - 1) == 0
