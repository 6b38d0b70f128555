# SPDX-License-Identifier: Apache-2.0
"""Mutation tests of the gate: real defects, planted one at a time in a copy of the code, turn it red.

A gate that cannot fail proves nothing. Each bug names the step that must catch it and what the failing check must say,
and its cause must stand on the first screen of a terminal. The same step over the same copy without the patch is the
control, and must pass. The checkout itself is never touched, and neither is an installed package: a bug of one is
planted in a copy that stands before it on the import path.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from hilgate.declare import yaml
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.errors import CannotRunHereError, Exit, MisuseError
from hilgate.judge.verdict import judge
from hilgate.model import Key, StrictModel
from hilgate.model.plan import plan_digest
from hilgate.model.record import EXIT_STATUS, Check, Outcome, worst
from hilgate.plan.make import plan_alone
from hilgate.report.causes import causes
from hilgate.report.terminal import first_screen
from hilgate.report.write import Report
from hilgate.run.outcome import first_line
from hilgate.run.runner import run_plan
from hilgate.text import suggest

PLANTED = Path("tests/bugs")
UNDER_TEST = "kernels"
INSTALLED = "installed"
"""The folder of a copy of an installed package."""


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


class Bug(StrictModel):
    """`tests/bugs/<id>/bug.yaml`: a defect that happened, and how it must be caught; `bug.patch` beside it makes it."""

    id: Key
    """The name of its folder."""
    title: str
    """What the patched kernel does wrong."""
    source: str
    """Where it happened, e.g. vllm-project/vllm#37228."""
    symptom: str
    """What users saw."""
    turns_red: Key
    """The declared step that must fail."""
    arguments: str = ""
    """Added to that step's command, to keep the run small."""
    expect: Annotated[str, AfterValidator(_is_pattern)] = Field(min_length=1)
    """A regular expression that the id or the message of a failing check must match."""
    package: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The installed import package that the patch changes, e.g. vllm; without it, the kernels of this repository."""

    @property
    def copied(self) -> str:
        """The folder beside the results that holds the copy, and stands first on the step's import path."""
        return INSTALLED if self.package else UNDER_TEST


def load_bugs(root: Path, names: tuple[str, ...] = ()) -> tuple[Bug, ...]:
    """The declared bugs, in the order of their names.

    Raises:
        InvalidDeclarationsError: A bug.yaml is invalid, or a bug is not called like its folder.
        MisuseError: A name is no bug, or there are none.
    """
    files = sorted((root / PLANTED).glob("*/bug.yaml"))
    documents = [yaml.read(path, root, Bug) for path in files]
    for path, document in zip(files, documents, strict=True):
        if document.value and document.value.id != path.parent.name:
            document.blame(
                ("id",), f"is {document.value.id!r} in the folder {path.parent.name!r}", "rename one of them"
            )
    mistakes = [mistake for document in documents for mistake in document.mistakes]
    if mistakes:
        raise InvalidDeclarationsError(mistakes)
    bugs = {document.value.id: document.value for document in documents if document.value}
    if any(bug.package is None for bug in bugs.values()) and not (root / UNDER_TEST).is_dir():
        raise MisuseError(
            "there are no kernels to plant bugs in", where=str(root / UNDER_TEST), remedy="put them there"
        )
    if not bugs:
        raise MisuseError(
            "no bug is planted here", where=str(root / PLANTED), remedy="plant a bug: tests/bugs/<name>/bug.yaml"
        )
    for name in names:
        if name not in bugs:
            raise MisuseError(f"no bug is called {name!r}", where=str(PLANTED), remedy=suggest(name, bugs))
    return tuple(bug for bug in bugs.values() if not names or bug.id in names)


def run_bugs(root: Path, bugs: tuple[Bug, ...], folder: Path, *, keep: bool = False) -> tuple[Check, ...]:
    """Run the control of each distinct selection, then each bug; one check per control and per bug.

    With `keep` the checks that a caught bug's step recorded are written beside its patch, as `findings.jsonl`.
    """
    checks: list[Check] = []
    controls: dict[tuple[str, str, str | None], Check] = {}
    for bug in bugs:
        selection = (bug.turns_red, bug.arguments, bug.package)
        if selection not in controls:
            controls[selection] = _check(root, bug, folder / f"control-{len(controls) + 1}", None)
            checks.append(controls[selection])
        checks.append(_check(root, bug, folder / bug.id, controls[selection], keep=keep))
    return tuple(checks)


def status_of(checks: tuple[Check, ...]) -> Exit:
    """0 when every bug was caught and every control passed."""
    return EXIT_STATUS[worst(check.outcome for check in checks)]


def _check(root: Path, bug: Bug, folder: Path, control: Check | None, *, keep: bool = False) -> Check:
    """The check of a bug; without a `control`, that of the control itself."""
    began = time.monotonic()
    try:
        outcome, message = _planted(root, bug, folder, control, keep=keep) if control else _control(root, bug, folder)
    except CannotRunHereError as error:
        outcome, message = Outcome.DID_NOT_RUN, f"{error.what}: {error.where}"
    return Check(
        id=bug.id if control else f"control: {bug.turns_red} {bug.arguments}".rstrip(),
        outcome=outcome,
        seconds=time.monotonic() - began,
        message=message,
        labels={"source": bug.source, "turns_red": bug.turns_red},
    )


def _control(root: Path, bug: Bug, folder: Path) -> tuple[Outcome, str]:
    _copy(root, bug, folder)
    report, _ = _run(root, bug, folder)
    verdict = report.verdict
    why = verdict.steps[0].why
    if verdict.outcome is Outcome.PASS:
        return Outcome.PASS, f"without a bug: {why}"
    outcome = Outcome.FAIL if verdict.outcome is Outcome.FAIL else Outcome.DID_NOT_RUN
    return outcome, f"without a bug it must pass: {verdict.outcome.value}: {why}"


def _planted(root: Path, bug: Bug, folder: Path, control: Check, *, keep: bool) -> tuple[Outcome, str]:
    if control.outcome is not Outcome.PASS:
        return Outcome.DID_NOT_RUN, f"its control did not pass: {control.message}"
    copy = _copy(root, bug, folder)
    if problem := _apply(root / PLANTED / bug.id / "bug.patch", bug, copy):
        return Outcome.FAIL, problem
    report, failures = _run(root, bug, folder)
    verdict = report.verdict
    step = verdict.steps[0]
    if verdict.outcome is not Outcome.FAIL:
        return Outcome.FAIL, f"not caught: {step.key} is {step.outcome.value}: {step.why}"
    match = next((check for check in failures if re.search(bug.expect, f"{check.id}\n{check.message}")), None)
    if match is None:
        return Outcome.FAIL, f"{step.key} failed for another reason; nothing matches {bug.expect!r}: {step.why}"
    if not _shown(report, match):
        return Outcome.FAIL, f"{step.key} caught it, and its cause is not on the first screen: {match.id}"
    if keep:
        last = report.recorded.last(step.key)
        Check.write_all(root / PLANTED / bug.id, [_portable(one, root) for one in last.checks] if last else ())
    return Outcome.PASS, f"caught by {step.key}: {match.id}: {first_line(match.message)}"


def _portable(check: Check, root: Path) -> Check:
    """The check without where this checkout lies."""
    return check.model_copy(update={"message": check.message.replace(f"{root.resolve()}/", "")})


def _copy(root: Path, bug: Bug, folder: Path) -> Path:
    """A fresh copy of what is under test, in a folder of its own.

    Raises:
        CannotRunHereError: The package that the bug patches is not installed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    copy = folder / bug.copied
    if bug.package is None:
        shutil.copytree(root / UNDER_TEST, copy, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
        return copy
    # Links, not copies: vLLM alone is 500 MB. What the patch names becomes a file of its own (_apply).
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_installed(bug.package), copy / bug.package, ignore=ignored, copy_function=os.symlink)
    return copy


def _installed(package: str) -> Path:
    """The folder of an installed import package, without importing it.

    Raises:
        CannotRunHereError: It is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise CannotRunHereError(
            f"the package {package} is not installed",
            where="a bug is planted in a copy of it",
            remedy="install it: requirements/install.sh",
        )
    return Path(spec.origin).resolve().parent


def _apply(patch: Path, bug: Bug, copy: Path) -> str:
    """Apply the patch to the copy; returns what went wrong, with the remedy."""
    if not patch.is_file():
        return f"{patch} is missing: write it with `git diff > {patch.name}`"
    place = copy if bug.package else copy.parent
    before = _own_files(patch, place)
    # Inside a checkout git would take the paths as relative to its root, match nothing here, and succeed.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(place.resolve().parent)}
    # A patch of a package holds the lines that change and no others of theirs.
    context = ["--unidiff-zero"] if bug.package else []
    command = ["git", "apply", "--whitespace=nowarn", *context, str(patch.resolve())]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = first_line(done.stderr)
        today = f"today's {bug.package or 'kernels'}"
        return f"the patch no longer applies ({reason}): rewrite {patch.parent.name}/{patch.name} for {today}"
    if all(path.read_bytes() == content for path, content in before.items()):
        return f"the patch changes nothing under {bug.package or UNDER_TEST}/: correct its paths"
    return ""


def _own_files(patch: Path, place: Path) -> dict[Path, bytes]:
    """The files that the patch names and that lie in the copy, with their contents; links become files."""
    named = re.findall(r"^--- a/(\S+)", patch.read_text(encoding="utf-8"), re.MULTILINE)
    found = [place / name for name in named if (place / name).is_file()]
    contents = {path: path.read_bytes() for path in found}
    for path, content in contents.items():
        path.unlink()
        path.write_bytes(content)
    return contents


def _shown(report: Report, match: Check) -> bool:
    """Whether the smallest case of the failure's cause is on the first screen of a terminal."""
    found = causes(report.plan, report.recorded, report.verdict)
    smallest = [one.failures[0].id for one in found if any(each.id == match.id for each in one.failures)]
    return bool(smallest) and smallest[0] in first_screen(report)


def _run(root: Path, bug: Bug, folder: Path) -> tuple[Report, tuple[Check, ...]]:
    """Run the one step over the copy, with the gate's own runner and judge; what they say, and the failing checks."""
    plan = plan_alone(root, bug.turns_red, folder / bug.copied, arguments=bug.arguments)
    recorded = run_plan(plan, root, folder)
    verdict = judge(plan, recorded, plan_digest(plan), decided=dt.datetime.now(dt.UTC))
    last = recorded.last(plan.steps[0].key)
    report = Report(plan, recorded, verdict, folder / "report.html")
    return report, tuple(check for check in last.checks if check.outcome is Outcome.FAIL) if last else ()
