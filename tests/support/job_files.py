# SPDX-License-Identifier: Apache-2.0
"""The folder of a job, from what really happened in it: evidence, records, health; and ways in which files are spoilt.

The real code reads the evidence and decides on the record, as where a step runs. Every value can be another one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.jobs import DIGEST, environment, finished, health, opening
from support.plans import changed

from hilgate.evidence import kind_of
from hilgate.model.declaration import Excuse
from hilgate.model.record import Check, Outcome
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hilgate.model.plan import Plan, PlannedStep

PASSES, FAILS, SKIPPED, XFAIL, OPEN = "passes", "fails", "skipped", "xfail", "undecided"
OUTCOMES = {
    PASSES: Outcome.PASS,
    FAILS: Outcome.FAIL,
    SKIPPED: Outcome.DID_NOT_RUN,
    XFAIL: Outcome.DID_NOT_RUN,
    OPEN: Outcome.INCONCLUSIVE,
}


@dataclass
class Job:
    """What a job really did, and how its files are written and then spoilt: evidence, lines of records, whole file."""

    step: PlannedStep
    tests: dict[str, str]
    needs: dict[str, str] = field(default_factory=dict)
    lacked: list[str] = field(default_factory=list)
    status: int | None = 0
    stopped: str = ""
    claims: Outcome | None = None
    arrives: bool = True
    hidden: bool = False
    log: str = ""
    evidence: list[Any] = field(default_factory=list)
    opening: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    earlier: list[Any] = field(default_factory=list)
    more: list[Any] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    whole: list[Any] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    recheck: list[Any] = field(default_factory=list)

    def id(self, test: str) -> str:
        """The id of one of its tests."""
        return f"tests/{self.step.step.key}.py::test_{test}"


def case(job: Job, test: str, ended: str) -> str:
    """A testcase as pytest writes it."""
    file, _, function = (test if "::" in test else job.id(test)).partition("::")
    needs = job.needs.get(test, "")
    inside = f'<properties><property name="needs" value="{needs}"/></properties>' if needs else ""
    inside += {
        PASSES: "",
        FAILS: '<failure message="max_abs_err 0.5">wrong</failure>',
        SKIPPED: '<skipped type="pytest.skip" message="not here"/>',
        XFAIL: '<skipped type="pytest.xfail" message="known"/>',
    }[ended]
    class_name = file.removesuffix(".py").replace("/", ".")
    return f'<testcase classname="{class_name}" name="{function}" time="0.1">{inside}</testcase>'


def finding(job: Job, test: str, ended: str) -> str:
    """A line of findings."""
    labels = {"needs": job.needs[test]} if test in job.needs else {}
    message = "" if ended == PASSES else "why"
    return Check(id=job.id(test), outcome=OUTCOMES[ended], message=message, labels=labels).model_dump_json() + "\n"


def evidence_of(job: Job, tests: dict[str, str]) -> bytes:
    """The evidence as the step leaves it."""
    if job.step.step.evidence == "findings":
        return "".join(finding(job, test, ended) for test, ended in tests.items()).encode()
    counts = f'tests="{len(tests)}" failures="{list(tests.values()).count(FAILS)}" errors="0"'
    collected = f'<properties><property name="collected" value="{len(tests)}"/></properties>'
    cases = "".join(case(job, test, ended) for test, ended in tests.items())
    return f"<testsuites><testsuite {counts}>{collected}{cases}</testsuite></testsuites>".encode()


def attempt(job: Job, folder: Path, ended: tuple[Any, ...], *, last: bool) -> list[Any]:
    """The records of an attempt: the real code reads the evidence and decides, as where a step runs."""
    (tests, status, stopped), declared, reader = ended, job.step.step, kind_of(job.step)
    text: bytes | None = evidence_of(job, tests)
    for spoil in job.evidence if last else ():
        text = spoil(text) if text else text
    (folder / reader.file).unlink(missing_ok=True)
    if text is not None:
        (folder / reader.file).write_bytes(text)
    (folder / "log.txt").write_text(job.log if last else "")
    found = reader.collect(folder, folder, declared.command).with_problem_as_failure()
    # Whoever forges an excuse believes it, so that the record says what he would have it say.
    believed = dict.fromkeys(job.lacked, Excuse(why="forged", most=99)) | declared.may_lack
    written: dict[str, Any] = {"environment": environment(image=DIGEST if job.step.image else "")}
    written |= {"outcome": job.claims, "message": "all is well"} if last and job.claims else {}
    return finished(
        changed(job.step, may_lack=believed),
        *found.checks,
        status=status,
        stopped=stopped,
        problem=found.problem,
        lacked=tuple(sorted(set(job.lacked))),
        **(written | job.record),
    )


def write(plan: Plan, job: Job, folder: Path) -> None:
    """Leave the files of a job, with everything that is wrong with them."""
    (folder / "tests").mkdir(parents=True)
    for name in "abc":
        (folder / "tests" / f"{name}.py").touch()  # ids of tests name files that are there
    tries = [*(attempt(job, folder, one, last=False) for one in job.earlier)]
    tries.append(attempt(job, folder, (job.tests, job.status, job.stopped), last=True))
    text = signed([opening(plan, **job.opening), *(line for one in tries for line in one), *job.more], *job.lines)
    for spoil in job.whole:
        text = spoil(text)
    if job.arrives:
        (folder / results.RESULTS_FILE).write_bytes(text)
    for moment, changes in job.health.items():
        if changes is not None:
            (folder / f"health-{moment}.json").write_text(health(moment, job.step.key, **changes).model_dump_json())
    for name, content in job.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    if job.recheck:
        beside = folder.with_name(f"{folder.name}.recheck")
        beside.mkdir()
        (beside / results.RESULTS_FILE).write_bytes(signed([opening(plan), *job.recheck]))


def signed(records: list[Any], *changes: Callable[[list[bytes]], list[bytes]]) -> bytes:
    """The lines of a file, changed, and the last one with their digest."""
    lines = [record.model_dump_json().encode() for record in records]
    for change in changes:
        lines = change(lines)
    text = b"".join(line + b"\n" for line in lines)
    return text + b'{"kind":"end","sha256":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()


# What is left of a file, or of its lines.
def gone(_text: bytes) -> None:
    """Nothing is left."""


def emptied(_text: bytes) -> bytes:
    """The file is there and empty."""
    return b""


def replaced(old: bytes, new: bytes, text: bytes) -> bytes:
    """The first of these words are others."""
    return text.replace(old, new, 1)


def cut_off(share: float, text: bytes) -> bytes:
    """Only so much of a text is left, never all and never whole lines."""
    return text[: max(0, int(len(text.rstrip()) * share) - 1)].rstrip(b"\n")


def flipped(place: float, bit: int, text: bytes) -> bytes:
    """One bit of a text is another."""
    at = int(len(text) * place)
    return text[:at] + bytes([byte ^ (1 << bit) for byte in text[at : at + 1]]) + text[at + 1 :]


def reordered(text: bytes) -> bytes:
    """Its lines in another order."""
    return b"".join(reversed(text.splitlines(keepends=True)))


def twice_over(text: bytes) -> bytes:
    """The whole file once more."""
    return text * 2


def without_a_line(lines: list[bytes]) -> list[bytes]:
    """Records without the first that is of a check or of the step."""
    place = next((n for n, line in enumerate(lines) if line.startswith((b'{"kind":"check"', b'{"kind":"step"'))), 0)
    return [*lines[:place], *lines[place + 1 :]]


def of_two_builds(lines: list[bytes]) -> list[bytes]:
    """Records that begin again."""
    return [*lines, lines[0]]


def with_number(instead: str, lines: list[bytes]) -> list[bytes]:
    """Other text where the seconds of the step stand."""
    place = next(n for n, line in enumerate(lines) if line.startswith(b'{"kind":"step"'))
    line = json.dumps(json.loads(lines[place]) | {"seconds": "@"}).replace('"@"', instead).encode()
    return [*lines[:place], line, *lines[place + 1 :]]
