# SPDX-License-Identifier: Apache-2.0
"""Read what a step left behind as checks. Each kind of evidence is one class; every stage asks it, never its name.

Evidence is never believed halfway: whatever cannot be read becomes a `problem`, and a step with a problem is not a
pass. The checks that could be read are kept, because a failure among them stays a failure.
"""

from __future__ import annotations

import abc
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import ValidationError

from hilgate.errors import EXIT_MEANINGS, Exit, RecordsError
from hilgate.model import FINDINGS_FILE, Number, first_problem
from hilgate.model.declaration import EVIDENCE_KINDS
from hilgate.model.record import Check, ImageRecord, Outcome, severity
from hilgate.text import pytest_word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from xml.etree.ElementTree import Element

    from hilgate.model.plan import Plan, PlannedStep

IMAGE_FILE = "image.json"
LOG_FILE = "log.txt"
"""What the step printed, beside its evidence."""
EVIDENCE_CHECK = "(the evidence is whole)"
"""Id of the check that stands for lost evidence; no test can be called so."""

DEEPEST = 50
"""Levels of elements in a JUnit file; pytest writes five."""
PYTEST_PLUGIN, COLLECTED, SUBTESTS = "hilgate.pytest_plugin", "collected", "subtest_reports"
DESELECTED = "deselected"
"""The plugin that says what pytest counted, the property of a suite for tests, and that of a case for its subtests."""
LISTING_PLUGIN = "hilgate.pytest_listing"
"""The plugin that writes which tests began."""

RAN = frozenset({"run", "completed", "pass", "passed", "success", "successful", "ok"})
NOT_RUN = frozenset(
    {"notrun", "not_run", "not run", "suppressed", "skip", "skipped", "disabled", "ignored", "pending", "todo"}
)
FAILED = frozenset({"fail", "failed", "failure", "error", "errored", "timeout", "timedout", "panicked", "aborted"})
"""What googletest, CTest, Bazel, Ginkgo and others write as `status` or `result` of a test case; pytest writes neither.
"""

MOST_IDS = 20
"""More failing tests than this are no flake, and running them again would only cost time on scarce nodes."""

WITH_VALUE = frozenset(
    {
        "-k",
        "-m",
        "-p",
        "-c",
        "-o",
        "-W",
        "-n",
        "--ignore",
        "--ignore-glob",
        "--deselect",
        "--rootdir",
        "--basetemp",
        "--confcutdir",
        "--timeout",
        "--maxfail",
        "--durations",
        "--tb",
        "--junitxml",
        "--junit-prefix",
        "--dist",
        "--import-mode",
        "--color",
        "--capture",
        "--log-level",
        "--override-ini",
        "--config-file",
        "--pyargs",
    }
)
"""Options of pytest and the plugins used here whose value may be the next word, which is then no test path."""

_FRAME = re.compile(r"^(\S+\.py:\d+): ?(\S*)$", re.MULTILINE)
_NODE_ID = re.compile(r"[\w./-]+\.py::\S.*", re.DOTALL)


@dataclass(frozen=True)
class Collected:
    """The checks of one step and what is wrong with the evidence as a whole (empty: nothing).

    Attributes:
        counted: Whether the evidence itself says how many checks there must be, and there are as many.
        deselected: How many more there were, which an option or a hook has taken out.
    """

    checks: tuple[Check, ...]
    problem: str = ""
    counted: bool = False
    deselected: int = 0

    def with_problem_as_failure(self) -> Collected:
        """The same, with the problem as a failing check of its own where another check failed.

        A record keeps the first reason only, and a failure that is in quarantine must not hide lost evidence.
        """
        if not self.problem or all(check.outcome is not Outcome.FAIL for check in self.checks):
            return self
        lost = Check(id=EVIDENCE_CHECK, outcome=Outcome.FAIL, message=self.problem)
        return Collected((*self.checks, lost), self.problem)


class EvidenceKind(abc.ABC):
    """What a step must leave in its output folder (`$HILGATE_OUT`) besides an exit status.

    A kind that can run single checks again says how: `failing_ids`, `narrow` and `selector` go together.
    """

    name: ClassVar[str]
    """The kind of evidence, as areas write it."""
    file: ClassVar[str]
    exits: ClassVar[Mapping[int, str]] = {status.value: meaning for status, meaning in EXIT_MEANINGS.items()}
    """Exit status of its steps -> what it means."""
    no_checks: ClassVar[Exit | int] = Exit.PASS
    """Exit status of a step that found nothing to check."""

    def arguments(self, command: str, folder: Path) -> list[str]:  # noqa: ARG002
        """What to add to a command, so that it leaves its evidence in `folder`, beside `$HILGATE_OUT`."""
        return []

    def collect(self, folder: Path, root: Path, command: str = "") -> Collected:  # noqa: ARG002
        """Read the evidence in an output folder; `root` is the repository, whose files ids may name.

        `command` is the step's, where its evidence must be all that this command leaves.
        """
        path = folder / self.file
        if not path.exists():
            return Collected((), f"it left no {path.name}")
        if not path.stat().st_size:
            return Collected((), f"its {path.name} is empty")
        return self.read(path, root)

    @abc.abstractmethod
    def read(self, path: Path, root: Path) -> Collected:
        """Read a file that is there and not empty."""

    def exit_meaning(self, status: int) -> str:
        """An exit status in words, e.g. `exit 5 (no tests were collected)`."""
        if status < 0:
            try:
                return f"killed by {signal.Signals(-status).name}"
            except ValueError:
                return f"killed by signal {-status}"
        return f"exit {status} ({self.exits[status]})" if status in self.exits else f"exit {status}"

    def cannot_run_here(self, status: int | None) -> bool:
        """Whether an exit status says that this environment cannot run the step."""
        return status is not None and self.exits.get(status) == EXIT_MEANINGS[Exit.CANNOT_RUN_HERE]

    def failing_ids(self, checks: Iterable[Check]) -> tuple[str, ...]:  # noqa: ARG002
        """Ids of failing checks that `narrow` can be given; empty when there are too many for flakes, or no way."""
        return ()

    def reaches(self, command: str, check: str) -> bool:  # noqa: ARG002
        """Whether a command can have made a check of this id, as far as the id tells."""
        return True

    def tests(self, command: str) -> tuple[str, ...]:  # noqa: ARG002
        """Files, folders and ids of tests that a command names; empty where it is no run of tests."""
        return ()

    def over_other_tree(self, command: str, here: Path, there: Path) -> str:  # noqa: ARG002
        """The command without the tests that another tree lacks; empty where it has none of them."""
        return ""

    def narrow(self, command: str, ids: tuple[str, ...], root: Path) -> str:  # noqa: ARG002
        """The command that runs these checks alone; empty where there is none."""
        return ""

    def selector(self, check: str) -> str:  # noqa: ARG002
        """Arguments of `hilgate run STEP -- ` that run this check alone; empty where none do."""
        return ""


class JunitEvidence(EvidenceKind):
    """`junit.xml`, one test case per check (pytest --junitxml)."""

    name = "junit"
    file = "junit.xml"
    exits: ClassVar[Mapping[int, str]] = {
        1: "tests failed",
        2: "the test run was interrupted",
        3: "pytest met an internal error",
        4: "pytest was called wrongly",
        5: "no tests were collected",
    }
    """`pytest.ExitCode`; its 5 is not our 5 (this environment cannot run it)."""
    no_checks = 5

    def arguments(self, command: str, folder: Path) -> list[str]:
        """Tell pytest where to write; in this Python also what it collected, what began, and what its tests need."""
        plugins = ["-p", PYTEST_PLUGIN, "-p", LISTING_PLUGIN] if _loads_the_plugin(command) else []
        return [*plugins, f"--junitxml={folder / self.file}"]

    def collect(self, folder: Path, root: Path, command: str = "") -> Collected:
        """Read `junit.xml`; pytest with our plugin must have said in it how many tests it collected."""
        found = super().collect(folder, root, command)
        if found.problem or found.counted or not _loads_the_plugin(command):
            return found
        what = f"its {self.file} does not say how many tests pytest collected; {PYTEST_PLUGIN} must run in it"
        return Collected(found.checks, what)

    def read(self, path: Path, root: Path) -> Collected:
        """Cases of all suites, under their pytest node ids."""
        try:
            document = _parse(path)
        except (ValueError, SyntaxError) as error:
            return Collected((), f"its {path.name} cannot be read: {error}")
        checks: dict[str, Check] = {}
        refused = ""
        for case in _elements(document, "testcase"):
            try:
                check = _check_of_case(case, root)
            except ValidationError as error:
                refused = f"holds a test that cannot be recorded: {first_problem(error)}"
                continue
            # A test that fails and then fails in its teardown is written as two cases: the worse one counts.
            seen = checks.get(check.id, check)
            checks[check.id] = max(seen, check, key=severity)
        collected, deselected = _numbers(document, COLLECTED), sum(_numbers(document, DESELECTED))
        if not checks and not refused:
            return Collected((), f"its {path.name} holds no tests")
        contradictions = _contradictions(document, counted=bool(collected))
        problem = refused or _ended_early(path.with_name(LOG_FILE)) or next(contradictions, "")
        found = tuple(checks.values())
        if problem:
            return Collected(found, f"its {path.name} {problem}")
        if (expected := sum(collected)) > len(checks):
            return Collected(found, f"pytest collected {expected} tests, and its {path.name} reports {len(checks)}")
        return Collected(found, counted=bool(collected), deselected=deselected)

    def failing_ids(self, checks: Iterable[Check]) -> tuple[str, ...]:
        """Node ids of failing tests that pytest can be given back."""
        failed = [check.id for check in checks if check.outcome is Outcome.FAIL]
        if len(failed) > MOST_IDS:
            return ()
        return tuple(name for name in failed if _NODE_ID.fullmatch(name) and not name.startswith(("-", "/")))

    def reaches(self, command: str, check: str) -> bool:
        """Whether a pytest command names the file of this node id, or a folder above it, and does not ignore it."""
        file, colons, _ = check.partition("::")
        return not (file.endswith(".py") and colons) or _pytest_reaches(command, file)

    def tests(self, command: str) -> tuple[str, ...]:
        """What stands where paths do in a command of this Python's pytest; its own default where nothing does."""
        words, places = _pytest_words(command)
        return tuple(words[place] for place in places) or (".",) if _loads_the_plugin(command) else ()

    def over_other_tree(self, command: str, here: Path, there: Path) -> str:
        """A pytest command with those of its paths that are there; a path that is in neither tree is an option's."""
        words, places = _pytest_words(command)
        files = {place: words[place].partition("::")[0] for place in places}
        named = {place for place, file in files.items() if (here / file).exists() or (there / file).exists()}
        gone = {place for place in named if not (there / files[place]).exists()}
        return "" if named and named == gone else shlex.join(w for n, w in enumerate(words) if n not in gone)

    def narrow(self, command: str, ids: tuple[str, ...], root: Path) -> str:
        """A pytest command with its test paths replaced by the files of these ids, and its options kept.

        The whole file, because a test may fail only after another one of it: alone it would pass, and be called flaky.

        Returns:
            The command, or empty when it is not pytest's or names no test path, so that the files would only add to it.
        """
        words, places = _pytest_words(command)
        replaced = [place for place in places if (root / words[place].partition("::")[0]).exists()]
        kept = [word for place, word in enumerate(words) if place not in replaced]
        named = [words[place] for place in replaced if "::" in words[place]]
        files = dict.fromkeys(name.partition("::")[0] for name in ids)
        again = [word for file in files for word in ([one for one in named if one.startswith(f"{file}::")] or [file])]
        return shlex.join([*kept, *again]) if replaced and ids else ""

    def selector(self, check: str) -> str:
        """Pytest's -k, where a word of the id can do it."""
        word = pytest_word(check) if "::" in check else ""
        return f"-k {shlex.quote(word)}" if word else ""


class FindingsEvidence(EvidenceKind):
    """`findings.jsonl`, one `Check` per line."""

    name = "findings"
    file = FINDINGS_FILE

    def read(self, path: Path, root: Path) -> Collected:  # noqa: ARG002
        """A check of each line; of a check that appears twice the worse one."""
        checks: dict[str, Check] = {}
        problems = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                check = Check.model_validate_json(line)
            except ValidationError as error:
                problems.append(f"{path.name}:{number}: {first_problem(error)}")
                continue
            if twice := _repeated_key(line):
                problems.append(f"{path.name}:{number}: the key {twice!r} appears twice")
            if check.id in checks:
                problems.append(f"{path.name}:{number}: the check {check.id!r} appears twice")
                check = max(checks[check.id], check, key=severity)
            checks[check.id] = check
        if not problems:
            return Collected(tuple(checks.values()))
        first, *others = problems
        return Collected(tuple(checks.values()), first + (f" (and {len(others)} more lines)" if others else ""))


KINDS: dict[str, EvidenceKind] = {}
"""Name -> kind of evidence."""


def register(kind: EvidenceKind) -> None:
    """Make a kind of evidence known; areas and plans may name it from then on."""
    KINDS[kind.name] = kind
    EVIDENCE_KINDS.setdefault(kind.name, False)


register(JunitEvidence())
register(FindingsEvidence())


def kind_of(step: PlannedStep) -> EvidenceKind:
    """The kind of evidence that a step leaves.

    Raises:
        RecordsError: The plan names a kind that is not registered here.
    """
    try:
        return KINDS[step.step.evidence]
    except KeyError:
        what = f"step {step.key} leaves evidence of the kind {step.step.evidence!r}, which is unknown here"
        raise RecordsError(what, remedy=f"plan again; known are {', '.join(sorted(KINDS))}") from None


def collect_image(step: PlannedStep, plan: Plan, folder: Path) -> tuple[ImageRecord | None, str]:
    """The image that a step built, as its `image.json` says, and why that is not the one it should have built.

    Returns:
        (record, ""), (None, why), or (None, "") for a step that builds none.
    """
    image = step.step.provides
    if image is None:
        return None, ""
    try:
        fields = json.loads((folder / IMAGE_FILE).read_bytes())
        record = ImageRecord.model_validate({"kind": "image", "step": step.key} | fields)
    except FileNotFoundError:
        return None, f"it left no {IMAGE_FILE}, and it builds the image {image!r}"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return None, f"its {IMAGE_FILE} is not a record of an image: {str(error).splitlines()[0]}"
    planned = plan.images.get(image, "(nothing: the plan does not name it)")
    if (record.step, record.image, record.content) != (step.key, image, planned):
        return None, f"its {IMAGE_FILE} is of {record.image} of {record.content}; planned: {image} of {planned}"
    return record, ""


# mutant RemoveDecorator, NumberReplacer, ReplaceBinaryOperator: a cache changes no answer
@functools.lru_cache(1 << 16)
def _pytest_reaches(command: str, file: str) -> bool:
    words, places = _pytest_words(command)
    named = [words[place].partition("::")[0] for place in places] or ["."] * bool(words)
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    ignored += [word for before, word in itertools.pairwise(words) if before == "--ignore"]
    return any(_is_in(file, one) for one in named) and not any(_is_in(file, one) for one in ignored)


def _is_in(file: str, named: str) -> bool:
    """Whether a file is the named one or lies below it; as text."""
    folder = named.removeprefix("./").rstrip("/")
    return not file.startswith("/") if folder in ("", ".") else f"{file}/".startswith(f"{folder}/")


# mutant RemoveDecorator: a cache changes no answer
@functools.lru_cache
def _pytest_words(command: str) -> tuple[list[str], list[int]]:
    """The words of a pytest command, none of another one, and which of them stand where paths of tests do."""
    words = shlex.split(command)
    begin = next((place for place, word in enumerate(words) if Path(word).name in {"pytest", "py.test"}), None)
    if begin is None:
        return [], []
    later = range(begin + 1, len(words))
    return words, [n for n in later if not words[n].startswith("-") and words[n - 1] not in WITH_VALUE]


def _loads_the_plugin(command: str) -> bool:
    """Whether a command is pytest of the Python that runs hilgate, in which our plugin can be imported."""
    return shlex.split(command)[:3] == ["python", "-m", "pytest"]


def _numbers(document: Element, name: str) -> list[int]:
    """Numbers of tests that pytest says of its suites (`hilgate.pytest_plugin`); empty where it does not say."""
    suites = _elements(document, "testsuite")
    numbers = [_count(value) for suite in suites for own, value in _properties(suite) if own == name]
    return [number for number in numbers if number is not None]


def _count(text: str) -> int | None:
    """A number of tests; None for anything else."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


_SUITE_HOLDS = frozenset({"testsuite", "testcase", "properties", "system-out", "system-err"})
_CASE_HOLDS = frozenset({"failure", "error", "skipped", "properties", "system-out", "system-err"})
ANNOUNCED = ("tests", "failures", "errors", "skipped", "disabled")
"""Counts of a suite in its attributes."""
_EXIT = re.compile(rb"^!+ _pytest\.outcomes\.Exit(?:: (.*?))? !+$", re.MULTILINE)
"""What pytest prints where a test or a fixture ended the session (`pytest.exit`), whatever the exit status."""


def _parse(path: Path) -> Element:
    """The root of a JUnit file without a DOCTYPE, whose suites are nested no deeper than any writer nests them.

    The entities of a DOCTYPE can grow to gigabytes, and no writer of JUnit needs one.

    Raises:
        ValueError: It is another file.
    """
    from xml.etree import ElementTree

    class Builder(ElementTree.TreeBuilder):
        depth = 0

        def start(self, tag: str, attributes: dict[str, str]) -> Element:
            self.depth += 1
            if self.depth > DEEPEST:
                raise ValueError(f"its elements are nested more than {DEEPEST} deep")
            return super().start(tag, attributes)

        def end(self, tag: str) -> Element:
            self.depth -= 1
            return super().end(tag)

        def doctype(self, *_: str | None) -> None:
            raise ValueError("it has a DOCTYPE")

    root = ElementTree.parse(path, ElementTree.XMLParser(target=Builder())).getroot()  # noqa: S314 - as said above
    if _name(root) not in {"testsuites", "testsuite"}:
        raise ValueError(f"it begins with <{_name(root)}>, and JUnit with <testsuites>")
    return root


def _name(element: Element) -> str:
    """The tag of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _elements(root: Element, name: str) -> Iterator[Element]:
    """All elements of a name, at any depth."""
    return (element for element in root.iter() if _name(element) == name)


def _properties(element: Element) -> list[tuple[str, str]]:
    """(name, value) of the properties of a suite or a case."""
    groups = [inside for inside in element if _name(inside) == "properties"]
    return [(one.get("name", ""), one.get("value", "")) for group in groups for one in group]


def _contradictions(root: Element, *, counted: bool) -> Iterator[str]:
    """What a JUnit file announces and does not hold, and what it holds that is no result of a test.

    `counted` says that lost tests show by another number: then `tests` may include as many subtests as were reported.
    """
    for element in root.iter():
        known = {"testsuites": _SUITE_HOLDS, "testsuite": _SUITE_HOLDS, "testcase": _CASE_HOLDS}.get(_name(element))
        if known is None:
            continue
        if strange := [_name(inside) for inside in element if _name(inside) not in known]:
            yield f"has <{strange[0]}> in a {_name(element)}, which is no result of a test"
        if known is _CASE_HOLDS:
            yield from _strange_in(element)
        else:
            yield from _wrong_counts(element, counted=counted)


def _strange_in(case: Element) -> Iterator[str]:
    """What attributes of a case say that is not understood."""
    if not case.get("name"):  # pytest writes it so where a test ended the session
        yield "has a testcase without a name, which did not end"
    if _seconds(case) is None:
        yield f"has a testcase whose time is {case.get('time', '')[:60]!r}"
    for attribute, value in _states(case).items():
        if value not in RAN.union(NOT_RUN, FAILED):
            yield f"has a testcase whose {attribute} is {value[:60]!r}, of which nothing is known"


def _wrong_counts(element: Element, *, counted: bool) -> Iterator[str]:
    """What a suite announces and does not hold."""
    cases = list(_elements(element, "testcase"))
    failing = sum(_name(inside) in {"failure", "error"} for case in cases for inside in case)
    not_run = sum(map(_not_run, cases))
    announced = {word: _count(element.get(word, "0")) for word in ANNOUNCED}
    if wrong := [word for word, number in announced.items() if number is None]:
        yield f"announces {wrong[0]}={element.get(wrong[0], '')[:60]}"
        return
    tests, failures, errors, skipped, disabled = (number or 0 for number in announced.values())
    if tests > len(cases) + (sum(map(_subtests, cases)) if counted else 0):
        yield f"announces {tests} tests and holds {len(cases)}"
    if failures + errors > failing:
        yield f"announces {failures + errors} failures and holds {failing}"
    if skipped + disabled > not_run:
        yield f"announces {skipped + disabled} tests that did not run and holds {not_run}"


def _not_run(case: Element) -> int:
    """How often a case says that it, or a subtest of it, did not run."""
    return sum(_name(one) == "skipped" for one in case) or int(not NOT_RUN.isdisjoint(_states(case).values()))


def _states(case: Element) -> dict[str, str]:
    """What a case says of itself in attributes, in lower case."""
    return {name: case.get(name, "").strip().lower() for name in ("status", "result") if name in case.attrib}


def _subtests(case: Element) -> int:
    """How many subtests of a case pytest counted as tests (`hilgate.pytest_plugin`).

    Said of each case, so the subtests of a lost test excuse nothing. Said twice, the test itself has written it too.
    """
    counts = [value for name, value in _properties(case) if name == SUBTESTS]
    return (_count(counts[0]) or 0) if len(counts) == 1 else 0


def _ended_early(log: Path) -> str:
    """How a test ended the whole session, so that those after it never ran; empty where none did."""
    exit_line = _EXIT.search(log.read_bytes()) if log.is_file() else None
    if not exit_line:
        return ""
    reason = (exit_line[1] or b"no reason given").decode(errors="replace")
    return f"is of a session that a test ended (pytest.exit: {reason})"


def _repeated_key(line: bytes) -> str:
    """A key that stands twice in an object of a line of JSON, where the last one would win; empty for none."""
    twice: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        kept: dict[str, object] = {}
        for name, value in items:
            if name in kept:
                twice.append(name)
            kept[name] = value
        return kept

    json.loads(line, object_pairs_hook=pairs)
    return twice[0] if twice else ""


def _check_of_case(case: Element, root: Path) -> Check:
    """The check of one test case of JUnit XML, with the assertion that failed as its message."""
    outcome, message = Outcome.PASS, ""
    node_id = _node_id(case.get("classname", ""), case.get("name") or "(no name)", root)
    for result in case:
        kind, said, text = _name(result), result.get("message", "").strip(), result.text or ""
        if kind in {"failure", "error"}:
            outcome, explained = Outcome.FAIL, _explained(text)
            if explained and said and kind == "error":
                # It begins `failed on setup with "...`, or is `collection failure`.
                explained = f"{said.partition(' with ')[0]}: {explained}"
            message = explained or said or text.strip() or f"{kind} without a message"
            message += _failing_place(text, node_id.partition("::")[0])
            break
        if kind == "skipped":
            outcome = Outcome.DID_NOT_RUN
            prefix = "expected to fail: " if result.get("type") == "pytest.xfail" else ""
            message = prefix + (said or "skipped without a reason")
    for attribute, value in _states(case).items():
        said = f"its {attribute} is {value[:60]!r}"
        if value in FAILED and outcome is not Outcome.FAIL:
            outcome, message = Outcome.FAIL, f"{said}, and nothing says why"
        elif value not in RAN and outcome is Outcome.PASS:
            outcome, message = Outcome.DID_NOT_RUN, said
    numbers: dict[str, Number] = {}
    labels: dict[str, str] = {}
    for name, value in _properties(case):
        number = _as_number(value)
        if number is None:
            labels[name or "(no name)"] = value
        else:
            numbers[name or "(no name)"] = number
    seconds = max(0.0, _seconds(case) or 0.0)
    return Check(id=node_id, outcome=outcome, seconds=seconds, message=message, labels=labels, numbers=numbers)


def _seconds(case: Element) -> Number | None:
    """What a case took; None where it says something that is no number."""
    return _as_number((case.get("time") or "0").replace(",", ""))


_CRASH = re.compile(
    r"^(?:>(?P<statement>.*(?:\n(?!>|E(?: |$)).*)*)\n)?"  # the line that failed, and what it goes on with
    r"(?P<said>E(?: .*)?(?:\nE(?: .*)?)*)$",
    re.MULTILINE,
)
"""Where pytest shows a failure: the statement after `>`, then what it says of it after `E`."""
_COMPARES = re.compile(r" (?:==|!=|<=?|>=?|in|is) ")
_INSIDE_BRACKETS = re.compile(r"(?<=[(\[{]) |,? (?=[)\]}])")


def _explained(text: str) -> str:
    """What pytest says of a failure in its body, without the place; empty where it marks nothing there.

    The attribute `message` says it too, but pytest 9 cuts that after 500 characters. Where pytest shows a bare value
    (`assert False`), the assertion as it was written stands first: `assert torch.equal(add(x, y), x + y)`.
    """
    shown = list(_CRASH.finditer(text))
    # A line of pytest's --showlocals can begin with E too, and no statement stands above it.
    shown = [one for one in shown if one["statement"]] or shown
    if not shown:
        return ""
    crash = shown[-1]
    marked = crash["said"].splitlines()
    indent = len(marked[0]) - len(marked[0].removeprefix("E").lstrip())
    said, *more = [line[indent:].rstrip() for line in marked]
    if said.startswith("AssertionError: assert "):  # pytest leaves its prefix to some, and takes it from others
        said = said.removeprefix("AssertionError: ")
    statement = _INSIDE_BRACKETS.sub("", " ".join((crash["statement"] or "").split()))
    bare = said.startswith("assert ") and not _COMPARES.search(said)
    if bare and statement.startswith("assert ") and statement != said:
        return "\n".join([statement, *(line for line in (said, *more) if line != "assert False")])
    return "\n".join([said, *more])


def _failing_place(text: str, test_file: str) -> str:
    """The innermost line of the test's own file, which an engineer opens first, and the helper's in which it ended.

    pytest ends each frame of a failure with `file:line: ` and the innermost one with `file:line: Error`.
    """
    frames = _FRAME.findall(text)
    if not frames or not frames[-1][1]:
        return ""
    place, error = frames[-1]
    own = next((one for one, _ in reversed(frames) if one.startswith(f"{test_file}:")), place)
    return f"\n{own}: {error}" + (f" ({place})" if own != place else "")


def _as_number(value: str) -> Number | None:
    """An int or a finite float; None for text, and for nan and inf, which JSON cannot hold and a label can."""
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    try:
        return int(value)
    except ValueError:
        return number


def _node_id(class_name: str, name: str, root: Path) -> str:
    """The pytest node id of a JUnit case, which can be pasted back.

    pytest writes `tests/ci/run/test_runner.py::TestRun::test_x[a]` as class name `tests.ci.test_run.TestRun` and name
    `test_x[a]`; the longest dotted prefix that is a file of ours is the file.
    """
    parts = class_name.split(".") if class_name else []
    for cut in range(len(parts), 0, -1):
        file = Path(f"{Path(*parts[:cut])}.py")
        if os.path.isfile(root / file):  # noqa: PTH113 - false, and no error, where a name is too long
            return "::".join([file.as_posix(), *parts[cut:], name])
    return f"{class_name}::{name}" if class_name else name
