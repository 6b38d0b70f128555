# SPDX-License-Identifier: Apache-2.0
"""Faults planted in reader and judge: among the builds of `test_any_build.py`, each is noticed for what it is."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from ci.judge.test_any_build import ALONE, BLOCKED, FALSE_PASS, LOST, on_any_build, wrong
from hypothesis import Phase

from hilgate import evidence
from hilgate.judge import verdict
from hilgate.judge.verdict import StepResult
from hilgate.model.plan import plan_digest
from hilgate.model.record import Outcome
from hilgate.model.verdict import Ruling
from hilgate.run import results, rules

if TYPE_CHECKING:
    from collections.abc import Callable

parsed, judge, judge_step, Entries = results._parsed, verdict.judge, verdict.judge_step, verdict.Entries
contradictions = evidence._contradictions


def records_of(text: bytes) -> list[dict[str, Any]]:
    """The records of a file; none of one that is damaged."""
    *lines, end = text.splitlines(keepends=True) or [b""]
    whole = hashlib.sha256(b"".join(lines)).hexdigest().encode() in end
    return [json.loads(line) for line in lines] if whole else []


def signed(records: list[dict[str, Any]]) -> bytes:
    return results.with_digest(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def reading(kind: str, **changes: Callable[[dict[str, Any], Any], Any]) -> tuple[object, str, object]:
    """A reader that sees other fields in each record of this kind: `change(record, plan)`."""

    def mutant(text: bytes, plan: Any, *args: Any, **more: Any) -> Any:
        records = records_of(text)
        for record in records:
            if record["kind"] == kind:
                record.update({name: change(record, plan) for name, change in changes.items()})
        return parsed(signed(records) if records else text, plan, *args, **more)

    return results, "_parsed", mutant


def uncounted(text: bytes, *args: Any, **more: Any) -> Any:
    """A reader to whom a step announces as many checks as are there."""
    records, checks = records_of(text), 0
    for record in records:
        checks += record["kind"] == "check"
        if record["kind"] == "step":
            record["checks"], checks = checks, 0
    return parsed(signed(records) if records else text, *args, **more)


def whatever_the_digest(text: bytes, *args: Any, **more: Any) -> Any:
    """A reader that does not look at the last line."""
    return parsed(results.with_digest(b"".join(text.splitlines(keepends=True)[:-1])), *args, **more)


def forgiving(forgiven: Callable[[Any, Any], object]) -> tuple[object, str, object]:
    """A judge that passes each step which `forgiven(step verdict, attempt)` excuses."""

    def mutant(step: Any, plan: Any, recorded: Any, entries: Any) -> Any:
        given = judge_step(step, plan, recorded, entries)
        return given.model_copy(update={"outcome": Outcome.PASS}) if forgiven(given, recorded.last(step.key)) else given

    return verdict, "judge_step", mutant


def without_rule(name: str) -> tuple[object, str, object]:
    """The table that decides, without one of its rules."""
    fewer = tuple(rule for rule in rules.RULES if rule.name != name)
    assert len(fewer) == len(rules.RULES) - 1
    return rules, "RULES", fewer


def approved_by_anybody(*args: Any, **more: Any) -> Any:
    return judge(*args, **more | {"approved_by": "anybody"})


def without_doubts(*args: Any, **more: Any) -> Any:
    return judge(*args, **more | {"doubts": ()})


def of_no_day(tests: Any, _day: dt.date) -> Any:
    return Entries(tuple(one.model_copy(update={"added": one.expires - dt.timedelta(1)}) for one in tests), dt.date.min)


def of_any_device(tests: Any, day: dt.date) -> Any:
    return Entries(tuple(one.model_copy(update={"devices": ()}) for one in tests), day)


def of_any_step(tests: Any, day: dt.date) -> Any:
    return Entries(tuple(replace_step(one, name) for one in tests for name in "abc"), day)


def replace_step(one: Any, name: str) -> Any:
    return one.model_copy(update={"step": name})


def without_nameless(*args: Any, **more: Any) -> Any:
    return (words for words in contradictions(*args, **more) if "without a name" not in words)


def nothing(*_args: Any, **_more: Any) -> str:
    return ""


def none(*_args: Any, **_more: Any) -> tuple[()]:
    return ()


def no_words(*_args: Any, **_more: Any) -> Any:
    return iter(())


def always(*_args: Any, **_more: Any) -> bool:
    return True


def nowhere(*_args: Any) -> frozenset[str]:
    return frozenset()


def did_not_finish(_: Any, attempt: Any) -> bool:
    return attempt is None


def says_pass(_: Any, attempt: Any) -> bool:
    return attempt is not None and attempt.record.outcome is Outcome.PASS


def ended_well(_: Any, attempt: Any) -> bool:
    return attempt is not None and attempt.record.exit_status == 0


def is_flaky(step: Any, _: Any) -> bool:
    return step.ruling is Ruling.FLAKY


def plan_of(_: Any, plan: Any) -> str:
    return plan_digest(plan)


def commit_of(_: Any, plan: Any) -> str:
    return plan.commit


def same_tree(*_: Any) -> str:
    return "t" * 64


def packages_of(_: Any, plan: Any) -> Any:
    return plan.packages


def content_of(record: dict[str, Any], plan: Any) -> str:
    return plan.images[record["image"]]


def no_note(_: Any) -> tuple[tuple[()], str]:
    return (), ""


def one_alone(_: Any, name: str) -> list[int]:
    return [1] if name == evidence.COLLECTED else []


def planned_command(record: dict[str, Any], plan: Any) -> str:
    return next(step.step.command for step in plan.steps if step.key == record["key"])


FAULTS: dict[str, tuple[tuple[object, str, object], str]] = {
    # What the results are of.
    "another plan is as good": (reading("build", plan_digest=plan_of), "results of another plan"),
    "another commit is as good": (reading("build", commit=commit_of), "results of another commit"),
    "another tree is as good": (reading("build", tree=same_tree), "results of another tree"),
    "packages of another tree are as good": (reading("step", imported=packages_of), "packages of another tree"),
    "another command is as good": (reading("step", command=planned_command), "another command"),
    "another image is as good": ((StepResult, "other_image", ""), "another image"),
    "an image of anything is as good": (reading("image", content=content_of), "the image is of other contents"),
    "no record of an image is needed": ((StepResult, "unbuilt", ""), "the image is not recorded"),
    "another step's tests are as good": ((StepResult, "stray", ""), "it holds a test of another step"),
    "results lie in any folder": ((results, "_misplaced", nothing), "results of another step"),
    # Files.
    "lost lines are not counted": ((results, "_parsed", uncounted), "a line is removed"),
    "a damaged file is read all the same": ((results, "_parsed", whatever_the_digest), "a flipped bit"),
    "a corrupt note is none": ((results, "read_restored", no_note), "a note of restored files that is none"),
    # Evidence.
    "a report need not say what was collected": (
        (evidence.JunitEvidence, "collect", evidence.EvidenceKind.collect),
        "junit without `collected`",
    ),
    "a nameless testcase is taken": ((evidence, "_contradictions", without_nameless), "junit with a nameless testcase"),
    "a report may contradict itself": ((evidence, "_contradictions", no_words), "junit announces more than it holds"),
    "fewer than were collected will do": (
        (evidence, "_numbers", one_alone),
        "junit reports fewer tests than were collected",
    ),
    "a session may end early": ((evidence, "_ended_early", nothing), "a test ended the session"),
    "a key may stand twice": ((evidence, "_repeated_key", nothing), "findings with a key twice"),
    # Nodes.
    "every node is well": ((verdict, "trouble", none), "the node is sick by the end"),
    "no preflight is well": ((verdict, "missing", nothing), "no health of a GPU's node"),
    # Steps.
    "a missing step is forgotten": (forgiving(did_not_finish), "nothing arrives"),
    "the record is trusted": (forgiving(says_pass), "a record claims more than it shows"),
    "exit 0 is enough": (forgiving(ended_well), "exit 0 without evidence"),
    "exit 0 is enough, skips or not": (forgiving(ended_well), "everything is skipped"),
    "flaky is a pass": (forgiving(is_flaky), "flaky"),
    "a pass makes a failure good": ((StepResult, "earlier", ()), "an earlier attempt failed"),
    "a record is believed about its device": (
        (verdict, "not_lacking", nowhere),
        "a test is skipped without a true excuse",
    ),
    # The quarantine, approvals, doubts.
    "quarantine never ends": ((verdict, "Entries", of_no_day), "a quarantine has expired"),
    "quarantine holds everywhere": ((verdict, "Entries", of_any_device), "a test fails that is quarantined elsewhere"),
    "quarantine holds in every step": ((verdict, "Entries", of_any_step), "a test fails that is quarantined elsewhere"),
    "nobody need approve": ((verdict, "judge", approved_by_anybody), "a protected change"),
    "a test may vanish": ((verdict, "vanished", none), "a test of the merge base is gone"),
    "nobody need list tests": ((StepResult, "unlisted", ""), "nobody listed the merge base's tests"),
    "doubts do not count": ((verdict, "judge", without_doubts), "files changed since the steps ran"),
}
"""What is planted, and the kind of fault in a build that then passes."""
RULES_THAT_DECIDE = {
    "another command": "another command",
    "another image": "another image",
    "packages of another tree": "packages of another tree",
    "a check failed": "a test is in the evidence twice",
    "node in doubt": "the node is sick by the end",
    "failed earlier": "an earlier attempt failed",
    "open earlier": "an earlier attempt failed",
    "image not built": "the image is not recorded",
    "tests of another step": "it holds a test of another step",
    "tests not listed": "nobody listed the merge base's tests",
    "recorded as failed": "a record claims less than it shows",
    "recorded as not run": "a record claims less than it shows",
    "recorded as inconclusive": "a record claims less than it shows",
    "evidence unreadable": "a test ended the session",
    "a check ran without what it needs": "a test ran without what it needs",
    "a check did not run": "a test is skipped without a true excuse",
    "too many checks excused": "more tests are excused than may be",
    "fewer checks than promised": "fewer checks than promised",
    "inconclusive": "a test is undecided",
}
"""Rules without which a build passes that must not, and the kind; without another one a later rule says so too."""
FAULTS |= {f"without the rule: {name}": (without_rule(name), kind) for name, kind in RULES_THAT_DECIDE.items()}
OTHERWISE_WRONG = {
    "every step is on a GPU": ((verdict, "is_demanded", always), "no health of a node without GPUs", BLOCKED),
    "nothing is ever lacking": ((rules.StepFacts, "lacking", nothing), "its machine cannot run a test", BLOCKED),
    "an excused failure is not listed": ((StepResult, "excused", ()), "a quarantined test fails", LOST),
}


@pytest.mark.parametrize("name", [*FAULTS, *OTHERWISE_WRONG])
def test_each_planted_fault_is_noticed(name):
    (owner, attribute, instead), kind, expected = OTHERWISE_WRONG.get(name) or (*FAULTS[name], FALSE_PASS)
    builds = [build for build in ALONE if build.faults[0].kind == kind]
    assert [wrong(build) for build in builds] == [""] * len(builds)
    with mock.patch.object(owner, attribute, instead):
        assert any(wrong(build).startswith(expected) for build in builds)


def test_builds_that_are_drawn_meet_a_planted_fault_as_well():
    with mock.patch.object(*forgiving(ended_well)), pytest.raises(AssertionError, match=FALSE_PASS):
        on_any_build(must_be_right, Phase.generate)()


def must_be_right(build):
    assert wrong(build) == ""
