# SPDX-License-Identifier: Apache-2.0
"""One entry for each cause: failures that look alike are shown once, with their number and smallest case. Pure.

Two failures look alike when they have one signature: the shape of the message (numbers and the case's own parameters
taken out), the place in the repository's code, the device and the shape of the kernel log. Failures of one test at one
place are one entry, whatever they say.

A step without a failing check is a failure itself, and one that was not started belongs to the step it waited for.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hilgate.model.record import SEVERITY, Outcome
from hilgate.model.verdict import Ruling
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
        place: Where it failed in the repository, `test.py:12 (helper.py:80)`; empty where unknown.
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
        extent: `every case of test_x`, or `6 of 12 cases of test_x`; empty where no test has parameters.
        waiting: Keys of the steps that were not started because of it.
    """

    failures: tuple[Failure, ...]
    extent: str = ""
    waiting: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        """Keys of the steps that it shows in, those not started left out."""
        return tuple(dict.fromkeys(failure.step.key for failure in self.failures))


def causes(plan: Plan, recorded: Recorded, verdict: Verdict) -> tuple[Cause, ...]:
    """Everything that is not green, one entry for each cause; the worst outcome first, then the largest number."""
    devices = {step.key: step.device for step in plan.steps}
    cases: Counter[tuple[str, str]] = Counter()
    failures: list[Failure] = []
    waiting: dict[str, list[str]] = {}
    for step in verdict.steps:
        attempt = recorded.last(step.key)
        log = kernel_log(recorded, step.key)
        checks = attempt.checks if attempt else ()
        cases.update((step.key, test_of(one.id)) for one in checks if one.outcome is not Outcome.DID_NOT_RUN)
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
    found = [_cause(group, cases) for group in _alike(failures)]
    return tuple(sorted(_with_waiting(found, waiting, verdict, devices), key=_rank))


_NEEDS = re.compile(r"not started: it needs ([a-z0-9][a-z0-9_.-]*), which ")


def _rank(cause: Cause) -> tuple[bool, int, int]:
    first = cause.failures[0]
    counts = any(not failure.step.report_only for failure in cause.failures)
    return not counts, -SEVERITY[first.step.outcome] * 4 - SEVERITY[first.signature.outcome], -len(cause.failures)


def _alike(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Failures of one signature, or of one test at one place."""
    groups: dict[Signature, list[Failure]] = {}
    for one in failures:
        groups.setdefault(one.signature, []).append(one)
    joined: list[list[Failure]] = []
    homes: dict[tuple[str, Signature], list[Failure]] = {}
    for group in sorted(groups.values(), key=len, reverse=True):
        # The values of a case decide what its test says at one place: `got nan`, `got 0.5`.
        places = [(test_of(one.id), replace(one.signature, shape="")) for one in group if one.signature.place]
        home = next((homes[place] for place in places if place in homes), None)
        if home is None:
            home = []
            joined.append(home)
        home += group
        homes |= dict.fromkeys(places, home)
    return joined


def test_of(check: str) -> str:
    """The id of a test without its parameters."""
    return check.partition("[")[0]


def _cause(group: Sequence[Failure], cases: Counter[tuple[str, str]]) -> Cause:
    """The entry of failures that look alike, the smallest case first; `cases` has the number of each step's test."""
    group = sorted(group, key=_size)
    if len(group) == 1 or any(one.check is None or "[" not in one.id for one in group):
        return Cause(tuple(group))
    tests = {(one.step.key, test_of(one.id)) for one in group}
    total = sum(cases[test] for test in tests)
    names = sorted({test.rpartition("::")[2] for _, test in tests})
    of = names[0] if len(names) == 1 else f"{len(names)} tests"
    number = "every case" if len(group) == total else f"{len(group)} of {total} cases"
    return Cause(tuple(group), f"{number} of {of}")


def _with_waiting(
    found: Sequence[Cause], waiting: dict[str, list[str]], verdict: Verdict, devices: dict[str, str]
) -> list[Cause]:
    """The entries with the steps that wait for theirs, at any distance; those of no entry are one of their own."""

    def waiting_for(keys: Iterable[str]) -> list[str]:
        return [name for key in keys for step in waiting.pop(key, []) for name in (step, *waiting_for([step]))]

    causes = [Cause(cause.failures, cause.extent, tuple(waiting_for(cause.steps))) for cause in found]
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
_QUANTITY = re.compile(r"(?<![\w.])(?!(?:b?float|u?int|fp|bf|f|tf|gfx)\d)[a-z]*(\d+(?:\.\d+)?)")
"""A number of a parameter (`bs48`, `0.5`) that is no part of the name of a type or an architecture."""


def _size(failure: Failure) -> tuple[float, float, int, str]:
    """Sort key: the case that is quickest to look at comes first (fewest elements, smallest numbers in its id)."""
    elements = 1.0
    shape = failure.check.labels.get("shape", "") if failure.check else ""
    for extent in shape.split("x") if _SHAPE.fullmatch(shape) else ():
        elements *= float(extent)
    parameters = failure.id.partition("[")[2]
    return elements, sum(map(float, _QUANTITY.findall(parameters))), len(failure.id), failure.id


_VALUE = r"[-+]?(?:0x[0-9a-fA-F]++|(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?(?![A-Za-z_])|nan\b|[-+]?inf\b)"
_LIST = re.compile(
    rf"(?<![\[(])[\[(]++\s*+{_VALUE}(?:(?:[\])]*+\s*+,\s*+[\[(]*+{_VALUE})+(?:\s*+,?\s*+[\])]++)?|\s*+,?\s*+[\])]++)"
    r"(?:\s*+,\s*+[\[(]++[^\[\]()]*+[\])]++)*"
)
"""A list of numbers, also one that is cut off: else hostile text could be read again and again. For the same reason a
match begins where a run of brackets does, and a character's quantifier is possessive (one of a group is wrong before
Python 3.11.5)."""
_HEX = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}(?![\w.])")
_DRAWN = re.compile(r"(?<!\w)(?:tmp[a-z0-9_]{8}|[A-Z2-7]{52})(?!\w)")
"""What `tempfile` calls a file, and Triton a folder of its cache: other names in each run."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)*\.?|\.\d+)(?:[eE][-+]?\d+)?")
_NAN = re.compile(r"\bnan\b")


SHAPED, MOST_WORDS = 2000, 20
"""Characters of a message and of a name that make a shape; parameters of a name that are looked for."""


def shape_of(message: str, name: str = "") -> str:
    """A message without what differs between cases: numbers, addresses, drawn names, the parameters and key in `name`.

    Lists of numbers are `[#]` whatever their length, and `[nan]` where one is no number: that is another symptom.
    """
    message, name = message[:SHAPED], name[:SHAPED]
    words = {name, *name.rpartition("[")[2].removesuffix("]").split("-")}
    case_words = [word for word in words if len(word) > 2 and any(map(str.isdigit, word)) and not word.isdecimal()]
    for word in sorted(case_words, key=len, reverse=True)[:MOST_WORDS]:
        # Compiling an expression costs more than all else here, and most messages hold no word of their test's name.
        if word in message:
            message = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", "@", message)
    message = _LIST.sub(lambda found: "[nan]" if _NAN.search(found[0]) else "[#]", message)
    return " ".join(_NUMBER.sub("#", _HEX.sub("#", _DRAWN.sub("#", message))).split())


def kernel_log(recorded: Recorded, key: str) -> str:
    """The shape of the first line that the kernel logged about GPUs while a step ran; empty where it logged none."""
    lines = [line for health in recorded.health.get(key, ()) for line in health.dmesg]
    return shape_of(lines[0]) if lines else ""
