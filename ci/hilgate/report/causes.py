# SPDX-License-Identifier: Apache-2.0
"""One entry for each cause: failures that look alike are said once, with their number, smallest case and factor. Pure.

Two failures look alike when they have one signature: the shape of the message (numbers and the case's own parameters
taken out), the place in the repository's code, the device and the shape of the kernel log. Failures of one test at one
place are one entry whatever they say, unless several factors tell them apart; tests that fail at places of their own
inside one helper are joined only where one factor holds for all of them and no other case of any contradicts it.

A step without a failing check is a failure itself, and one that was not started belongs to the step it waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hilgate.model.record import SEVERITY, Outcome
from hilgate.model.verdict import Ruling
from hilgate.report.factors import EVERY, case_of, common, split
from hilgate.run import outcome
from hilgate.run.outcome import place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hilgate.model.plan import Plan
    from hilgate.model.record import Check
    from hilgate.model.verdict import StepVerdict, Verdict
    from hilgate.run.results import Recorded


@dataclass(frozen=True)
class Signature:
    """What failures of one cause have in common before their parameters are looked at.

    Attributes:
        shape: The message without its numbers.
        place: Where it failed in the repository, `test.py:12 (helper.py:80)`; empty where nobody knows.
        device: What it ran on.
        kernel_log: The first line of the node's kernel log, without its numbers; empty where it says nothing.
    """

    shape: str
    place: str
    device: str
    kernel_log: str
    outcome: Outcome


@dataclass(frozen=True)
class Failure:
    """A check that failed or was inconclusive, or a step that is not green without one (`check` is None)."""

    step: StepVerdict
    check: Check | None
    signature: Signature

    @property
    def id(self) -> str:
        """Id of the check, or the key of the step."""
        return self.check.id if self.check else self.step.key


@dataclass(frozen=True)
class Cause:
    """One entry.

    Attributes:
        failures: All that look alike, the smallest case first.
        factor: What all share and no other case of their tests has, whether it passed or failed in another way
            (`factors`); empty where nothing was found, or one failed.
        waiting: Keys of the steps that were not started because of it.
    """

    failures: tuple[Failure, ...]
    factor: str = ""
    waiting: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        """Keys of the steps that it shows in, those not started left out."""
        return tuple(dict.fromkeys(one.step.key for one in self.failures))


def causes(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Cause, ...]:
    """Everything that is not green, one entry for each cause; the worst outcome first, then the largest number."""
    devices = {step.key: step.device for step in plan.steps}
    cases: dict[str, list[str]] = {}
    failures: list[Failure] = []
    waiting: dict[str, list[str]] = {}
    for step in verdict.steps:
        attempt = recorded.last(step.key)
        log = kernel_log(recorded, step.key)
        checks = attempt.checks if attempt else ()
        cases[step.key] = [one.id for one in checks if one.outcome is not Outcome.DID_NOT_RUN]
        if step.outcome is Outcome.PASS:
            continue
        wrong = [one for one in checks if one.outcome in {Outcome.FAIL, Outcome.INCONCLUSIVE}]
        wrong = [one for one in wrong if one.id not in step.quarantined]
        for check in wrong:
            shape = shape_of(outcome.summary(check.message), check.id)
            signature = Signature(shape, place(check), devices[step.key], log, check.outcome)
            failures.append(Failure(step, check, signature))
        needed = _NEEDS.match(step.why) if step.ruling is Ruling.NOT_STARTED else None
        if needed:
            waiting.setdefault(needed[1], []).append(step.key)
        elif not wrong:
            shape = shape_of(step.why, step.key)
            failures.append(Failure(step, None, Signature(shape, "", devices[step.key], log, step.outcome)))
    found = [cause for group in _alike(failures, cases) for cause in _divided(group, cases)]
    return tuple(sorted(_with_waiting(found, waiting, verdict, devices), key=_rank))


_NEEDS = re.compile(r"not started: it needs ([a-z0-9][a-z0-9_.-]*), which ")


def _rank(cause: Cause) -> tuple[int, int]:
    first = cause.failures[0]
    return -SEVERITY[first.step.outcome] * 4 - SEVERITY[first.signature.outcome], -len(cause.failures)


def _alike(failures: Iterable[Failure], cases: dict[str, list[str]]) -> list[list[Failure]]:
    """Failures of one signature or of one test and place; of one helper, where a factor holds for all their tests."""
    groups: dict[Signature, list[Failure]] = {}
    for one in failures:
        groups.setdefault(one.signature, []).append(one)
    joined: list[list[Failure]] = []
    homes: dict[tuple[str, Signature], list[Failure]] = {}
    for group in sorted(groups.values(), key=len, reverse=True):
        # A value decides what a test says at one place: `got nan`, `got 0.5`.
        places = [(case_of(one.id).test, replace(one.signature, shape="")) for one in group if one.signature.place]
        home = next((homes[one] for one in places if one in homes), None) or next(
            (other for other in joined if _same_helper(group, other) and _shared(group, other, cases)), None
        )
        if home is None:
            home = []
            joined.append(home)
        home += group
        homes |= dict.fromkeys(places, home)
    return joined


def _same_helper(one: Sequence[Failure], other: Sequence[Failure]) -> bool:
    """Whether two groups differ only in a value that is no number, or in the line of the test that called a helper."""
    first, second = (group[0].signature for group in (one, other))
    places = {found[0] if (found := _HELPER.search(one.place)) else one.place for one in (first, second)}
    shapes = {_NAN.sub("#", one.shape) for one in (first, second)}
    rest = {(one.device, one.kernel_log, one.outcome) for one in (first, second)}
    return "" not in places and len(places) == len(shapes) == len(rest) == 1


_HELPER = re.compile(r"\(\S+\)$")


def _shared(one: Sequence[Failure], other: Sequence[Failure], cases: dict[str, list[str]]) -> bool:
    """Whether one factor holds in both groups, and other cases of the tests of each could have contradicted it."""
    ids = [failure.id for failure in (*one, *other)]
    beside = [set(_beside(group, cases)).difference(ids) for group in (one, other)]
    one_test = one[0].signature.place == other[0].signature.place
    return all(beside) and common(ids, sorted(beside[0] | beside[1]), plain=not one_test) is not None


def _beside(failures: Sequence[Failure], cases: dict[str, list[str]]) -> list[str]:
    """Ids of the other cases of the tests that failed, in the steps where they failed."""
    tests = {(one.step.key, case_of(one.id).test) for one in failures}
    own = {(one.step.key, one.id) for one in failures}
    return [
        name
        for key in {key for key, _ in tests}
        for name in cases[key]
        if (key, case_of(name).test) in tests and (key, name) not in own
    ]


def _divided(group: Sequence[Failure], cases: dict[str, list[str]]) -> list[Cause]:
    """The entries of failures with one signature: one with its factor, or one for each of several factors."""
    group = sorted(group, key=_size)
    if len(group) == 1 or any(one.check is None or "[" not in one.id for one in group):
        return [Cause(tuple(group))]
    ids, beside = [one.id for one in group], _beside(group, cases)
    if whole := common(ids, beside):
        tests = dict.fromkeys(case_of(name).test.rpartition("::")[2] for name in ids)
        of = f" of {' and '.join(tests)}" if whole.words == EVERY else ""
        return [Cause(tuple(group), whole.words + of)]
    parts = split(ids, beside)
    if len(parts) < 2:
        return [Cause(tuple(group))]
    taken: set[int] = set()
    found = []
    for part in parts:
        members = tuple(one for place, one in enumerate(group) if place in part.covers - taken)
        taken |= part.covers
        found.append(Cause(members, part.words if len(members) > 1 else ""))
    return found


def _with_waiting(
    found: Sequence[Cause], waiting: dict[str, list[str]], verdict: Verdict, devices: dict[str, str]
) -> list[Cause]:
    """The entries with the steps that wait for theirs, at any distance; those of no entry are one of their own."""

    def behind(keys: Iterable[str]) -> list[str]:
        return [name for key in keys for one in waiting.pop(key, []) for name in (one, *behind([one]))]

    causes = [Cause(one.failures, one.factor, tuple(behind(one.steps))) for one in found]
    steps = {step.key: step for step in verdict.steps}
    for keys in waiting.values():
        own = [steps[key] for key in keys]
        causes.append(
            Cause(
                tuple(
                    Failure(one, None, Signature(shape_of(one.why, one.key), "", devices[one.key], "", one.outcome))
                    for one in own
                )
            )
        )
    return causes


_SHAPE = re.compile(r"x".join([r"\d+"] * 2) + r"(?:x\d+)*")


def _size(failure: Failure) -> tuple[float, float, int, str]:
    """Sorts the case first that is quickest to look at: fewest elements, then the smallest numbers in its id."""
    elements = 1.0
    shape = failure.check.labels.get("shape", "") if failure.check else ""
    for extent in shape.split("x") if _SHAPE.fullmatch(shape) else ():
        elements *= float(extent)
    case = case_of(failure.id)
    return elements, sum(case.numbers.values()), len(failure.id), failure.id


_VALUE = r"[-+]?(?:0x[0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![A-Za-z_])|nan\b|[-+]?inf\b)"
_LIST = re.compile(
    rf"[\[(]+\s*{_VALUE}(?:[\])]*\s*,\s*[\[(]*{_VALUE})*\s*,?\s*[\])]+(?:\s*,\s*[\[(]+[^\[\]()]*[\])]+)*"
)
_HEX = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}(?![\w.])")
_DRAWN = re.compile(r"(?<!\w)(?:tmp[a-z0-9_]{8}|[A-Z2-7]{52})(?!\w)")
"""What `tempfile` calls a file, and Triton a folder of its cache: other names in each run."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)*\.?|\.\d+)(?:[eE][-+]?\d+)?")
_NAN = re.compile(r"\bnan\b")


def shape_of(message: str, name: str = "") -> str:
    """A message without what differs between cases: numbers, addresses, drawn names, the parameters and key in `name`.

    Lists of numbers are `[#]` whatever their length, and `[nan]` where one is no number: that is another symptom.
    """
    for word in sorted({name, *name.rpartition("[")[2].removesuffix("]").split("-")}, key=len, reverse=True):
        # Compiling an expression costs more than all else here, and most messages hold no word of their test's name.
        if word in message and len(word) > 2 and any(letter.isdigit() for letter in word) and not word.isdecimal():
            message = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", "@", message)
    message = _LIST.sub(lambda found: "[nan]" if _NAN.search(found[0]) else "[#]", message)
    return " ".join(_NUMBER.sub("#", _HEX.sub("#", _DRAWN.sub("#", message))).split())


def kernel_log(recorded: Recorded, key: str) -> str:
    """The shape of the first line that the kernel logged about GPUs while a step ran; empty where it logged none."""
    lines = [line for health in recorded.health.get(key, ()) for line in health.dmesg]
    return shape_of(lines[0]) if lines else ""
