"""What a step left behind, as checks: `junit.xml` (pytest) or `findings.jsonl` (everything else).

Evidence is never believed halfway: whatever cannot be read becomes a `problem`, and a step with a problem is not a
pass. The checks that could be read are kept, because a failure among them stays a failure.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hilgate.model import Check, Evidence, ImageRecord, Number, Outcome
from hilgate.run.outcome import SEVERITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from junitparser.xunit2 import TestCase

    from hilgate.model import Plan, PlannedStep

JUNIT_FILE = "junit.xml"
FINDINGS_FILE = "findings.jsonl"
IMAGE_FILE = "image.json"
EVIDENCE_CHECK = "(the evidence is whole)"
"""Id of the check that stands for lost evidence; no test can be called so."""


@dataclass(frozen=True)
class Collected:
    """The checks of one step and what is wrong with the evidence as a whole (empty: nothing)."""

    checks: tuple[Check, ...]
    problem: str = ""

    def with_problem_as_failure(self) -> Collected:
        """The same, with the problem as a failing check of its own where another check failed.

        A record keeps the first reason only, and a failure that is in quarantine must not hide lost evidence.
        """
        if not self.problem or all(check.outcome is not Outcome.FAIL for check in self.checks):
            return self
        lost = Check(id=EVIDENCE_CHECK, outcome=Outcome.FAIL, message=self.problem)
        return Collected((*self.checks, lost), self.problem)


def collect(kind: Evidence, folder: Path, root: Path) -> Collected:
    """Read the evidence in a step's output folder.

    Args:
        kind: What the step declared to leave.
        folder: Its output folder (`$HILGATE_OUT`).
        root: The repository root, to turn class names of JUnit back into paths.
    """
    path = folder / (JUNIT_FILE if kind is Evidence.JUNIT else FINDINGS_FILE)
    if not path.exists():
        return Collected((), f"it left no {path.name}")
    if path.stat().st_size == 0:
        return Collected((), f"its {path.name} is empty")
    return _read_junit(path, root) if kind is Evidence.JUNIT else _read_findings(path)


def collect_image(step: PlannedStep, plan: Plan, folder: Path) -> tuple[ImageRecord | None, str]:
    """The image that a step built, as its `image.json` says, and why that is not the one it should have built.

    Returns:
        (record, ""), (None, why), or (None, "") for a step that builds none.
    """
    image = step.step.provides
    if image is None:
        return None, ""
    try:
        told = json.loads((folder / IMAGE_FILE).read_bytes())
        record = ImageRecord.model_validate({"kind": "image", "step": step.key} | told)
    except FileNotFoundError:
        return None, f"it left no {IMAGE_FILE}, and it builds the image {image!r}"
    except (OSError, ValueError, TypeError) as error:
        return None, f"its {IMAGE_FILE} is not a record of an image: {str(error).splitlines()[0]}"
    planned = plan.images.get(image, "(nothing: the plan does not name it)")
    if (record.step, record.image, record.content) != (step.key, image, planned):
        return (
            None,
            f"its {IMAGE_FILE} is of {record.image} of {record.content}; planned: {image} of {planned}",
        )
    return record, ""


def _read_findings(path: Path) -> Collected:
    checks: dict[str, Check] = {}
    problems = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            check = Check.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            problems.append(f"{path.name}:{number}: {place + ': ' if place else ''}{first['msg']}")
            continue
        if check.id in checks:
            problems.append(f"{path.name}:{number}: the check {check.id!r} appears twice")
            check = max(checks[check.id], check, key=lambda c: SEVERITY[c.outcome])
        checks[check.id] = check
    more = f" (and {len(problems) - 1} more lines)" if len(problems) > 1 else ""
    return Collected(tuple(checks.values()), problems[0] + more if problems else "")


def _read_junit(path: Path, root: Path) -> Collected:
    from xml.etree.ElementTree import ParseError

    from junitparser import JUnitXmlError, xunit2

    try:
        document = xunit2.JUnitXml.fromfile(str(path))
    except (ParseError, JUnitXmlError, ValueError, SyntaxError) as error:
        return Collected((), f"its {path.name} cannot be read: {error}")
    checks: dict[str, Check] = {}
    announced = held = 0
    for suite in document if isinstance(document, xunit2.JUnitXml) else [document]:
        announced += suite.tests or 0
        for case in _cases(suite):
            held += 1
            check = _check_of_case(case, root)
            # A test that fails and then fails in its teardown is written as two cases: the worse one counts.
            seen = checks.get(check.id, check)
            checks[check.id] = max(seen, check, key=lambda c: SEVERITY[c.outcome])
    if not checks:
        return Collected((), f"its {path.name} holds no tests")
    if announced > held:
        return Collected(tuple(checks.values()), f"its {path.name} announces {announced} tests and holds {held}")
    return Collected(tuple(checks.values()))


def _cases(suite: Iterable[object]) -> Iterator[TestCase]:
    """All cases of a suite, those of the suites inside it included."""
    from junitparser import xunit2

    for inside in suite:
        if isinstance(inside, xunit2.TestSuite):
            yield from _cases(inside)
        elif isinstance(inside, xunit2.TestCase):
            yield inside


def _check_of_case(case: TestCase, root: Path) -> Check:
    from junitparser import Error, Failure, Skipped

    outcome, message = Outcome.PASS, ""
    for result in case.result:
        if isinstance(result, Failure | Error):
            kind = "error" if isinstance(result, Error) else "failure"
            outcome = Outcome.FAIL
            message = (result.message or "").strip() or (result.text or "").strip() or f"{kind} without a message"
            message += _failing_place(result.text or "")
            break
        if isinstance(result, Skipped):
            outcome = Outcome.DID_NOT_RUN
            prefix = "expected to fail: " if result.type == "pytest.xfail" else ""
            message = prefix + ((result.message or "").strip() or "skipped without a reason")
    numbers: dict[str, Number] = {}
    labels: dict[str, str] = {}
    for name, value in _properties(case):
        number = _as_number(value)
        if number is None:
            labels[name] = value
        else:
            numbers[name] = number
    seconds = case.time if case.time is not None and math.isfinite(case.time) else 0.0
    return Check(
        id=_node_id(case.classname or "", case.name or "(no name)", root),
        outcome=outcome,
        seconds=max(0.0, seconds),
        message=message,
        labels=labels,
        numbers=numbers,
    )


def _properties(case: TestCase) -> Iterator[tuple[str, str]]:
    for found in case.properties():  # type: ignore[no-untyped-call]  # junitparser 5.0.3 left it untyped
        yield found.name or "(no name)", "" if found.value is None else str(found.value)


def _failing_place(text: str) -> str:
    """Return the place: pytest ends a failure with `file:line: Error`; that line is what an engineer opens first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"\n{lines[-1]}" if lines and ": " in lines[-1] and ".py:" in lines[-1] else ""


def _as_number(value: str) -> Number | None:
    """An int or a finite float; None for text, and for nan and inf, which JSON cannot hold and a label can."""
    try:
        return int(value)
    except ValueError:
        pass
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _node_id(class_name: str, name: str, root: Path) -> str:
    """The pytest node id of a JUnit case, which can be pasted back.

    pytest writes `tests/ci/run/test_runner.py::TestRun::test_x[a]` as class name `tests.ci.test_run.TestRun` and name
    `test_x[a]`; the longest dotted prefix that is a file of ours is the file.
    """
    parts = class_name.split(".") if class_name else []
    for cut in range(len(parts), 0, -1):
        file = Path(*parts[:cut]).with_suffix(".py") if "." not in parts[cut - 1] else None
        if file is not None and (root / file).is_file():
            return "::".join([file.as_posix(), *parts[cut:], name])
    return f"{class_name}::{name}" if class_name else name
