# SPDX-License-Identifier: Apache-2.0
"""Every test is run by a step, on some machine: `python -m hilgate.checks.collected`.

pytest lists the tests that each step's command takes, and once more without its filters (`-k`, `-m`, `--deselect`). A
test that only the second listings have runs nowhere, and so does a test file that no listing has. Reading the commands
is not enough: what a filter leaves of a file is known to pytest alone. A step for GPUs is listed like any other.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate.checks import conclude
from hilgate.declare.load import find_root, load
from hilgate.errors import DeclarationError, ending
from hilgate.evidence import KINDS
from hilgate.git import tracked_files
from hilgate.model.record import Check, Outcome
from hilgate.plan.machine import detect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hilgate.declare.load import Declarations
    from hilgate.model.declaration import Step
    from hilgate.plan.machine import Machine

TIMEOUT_SECONDS: Final = 400
FILTERS: Final = ("-k", "-m", "--deselect")
"""Options of pytest that leave tests of a file out."""

SHOWN: Final = 25
"""Lost tests that a message names."""

EVERY_TEST: Final = "every test is run by a step"
LACKS: Final = "needs"
_ID = re.compile(r"^\S.*?\.py::\S.*$", re.MULTILINE)
_TEST_FILE = re.compile(r"(?:.*/)?test_[^/]*\.py")


@dataclass(frozen=True)
class CollectedTests:
    """What pytest lists for a command.

    Attributes:
        ids: Node ids of its tests.
        problem: Why they are not known; empty where they are.
    """

    ids: frozenset[str]
    problem: str = ""
    seconds: float = 0.0


def without_filters(words: Sequence[str]) -> list[str]:
    """The words of a pytest command without its `-k`, `-m` and `--deselect`; `python -m` stays."""
    begin = next((place for place, word in enumerate(words) if Path(word).name == "pytest"), len(words))
    kept, words_left = list(words[: begin + 1]), iter(words[begin + 1 :])
    for word in words_left:
        if word in FILTERS:
            next(words_left, None)
        elif not word.startswith(("-k", "-m", "--deselect=")) or word.startswith("--"):
            kept.append(word)
    return [word for word in kept if not word.startswith("--deselect=")]


def listing(words: Sequence[str], root: Path, env: Mapping[str, str]) -> CollectedTests:
    """Have pytest list the tests of a command, and run none."""
    command = [sys.executable if words[0] == "python" else words[0], *words[1:]]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--collect-only", "-q", "-p", "no:cacheprovider", "--color=no"],
            cwd=root,
            env=dict(env),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return CollectedTests(frozenset(), f"pytest did not list its tests: {error}", time.monotonic() - began)
    last = next((line for line in reversed((done.stdout + done.stderr).splitlines()) if line.strip()), "")
    problem = "" if done.returncode == 0 else f"pytest ended with {done.returncode}: {last}"
    return CollectedTests(frozenset(_ID.findall(done.stdout)), problem, time.monotonic() - began)


def lost(taken: Collection[str], listed: Collection[str], files: Iterable[str], exempt: Mapping[str, str]) -> list[str]:
    """Tests and test files that no step runs, and exemptions that are out of date.

    Args:
        taken: Tests that the commands take.
        listed: Tests that they would take without their filters.
        files: All test files.
        exempt: Test file that needs no step -> why not.
    """
    reached = {name.partition("::")[0] for name in taken}
    nowhere = [name for name in files if name not in reached]
    tests = sorted(set(listed) - set(taken))
    return [
        *(f"{name}: no step of ci/areas runs it; name it in one" for name in nowhere if name not in exempt),
        *(f"{name}: filters of every step leave it out" for name in tests if name.partition("::")[0] not in exempt),
        *(f"pyproject.toml: {name} needs no exemption; remove it" for name in exempt if name not in nowhere),
    ]


def environment_of(step: Step, root: Path, declarations: Declarations) -> dict[str, str]:
    """The variables that a step is given on its first device."""
    own = {**declarations.agents.devices[step.devices[0]].env, **step.env}
    folders = [*declarations.project.python_path, *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]
    path = [*(str(root / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def exemptions(root: Path) -> dict[str, str]:
    """`[tool.hilgate.unreached]` of pyproject.toml: test file -> why no step runs it.

    Raises:
        DeclarationError: It is no table of reasons.
    """
    path = root / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}) if path.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise DeclarationError(f"cannot be read: {error}", where=str(path), remedy="correct it") from error
    found = table.get("hilgate", {}).get("unreached", {})
    if not all(isinstance(why, str) and why for why in found.values()):
        raise DeclarationError("an exemption has no reason", where=f"{path} [tool.hilgate.unreached]", remedy="say why")
    return dict(found)


def checks(root: Path) -> list[Check]:
    """One check per pytest step that was listed, and one for the tests that none of them runs.

    A step whose files have all been listed for steps without filters can add nothing, and is not asked.

    Raises:
        InvalidDeclarationsError: A declaration is invalid.
        DeclarationError: An exemption has no reason.
        CannotRunHereError: There is no git to list the files.
    """
    declarations = load(root)
    tests = [name for name in tracked_files(root) if _TEST_FILE.fullmatch(name)]
    steps = [step for _, step in declarations.steps() if step.evidence == "junit"]
    plain = [step for step in steps if not is_filtered(step)]
    machine = detect(package for step in steps for package in step.packages)
    found: list[Check] = []
    taken, listed, whole, problems = set[str](), set[str](), set[str](), False
    for group in (plain, [step for step in steps if is_filtered(step)]):
        open_ = [step for step in group if group is plain or not whole.issuperset(_files(step, tests))]
        with ThreadPoolExecutor(max(1, min(2, machine.cores))) as pool:
            listings = list(pool.map(lambda step: _listings(step, root, declarations, machine), open_))
        for step, (own, all_) in zip(open_, listings, strict=True):
            problem = own.problem or all_.problem or ("" if own.ids else "its command takes no test")
            problems = problems or bool(problem)
            outcome = Outcome.FAIL if problem else Outcome.PASS
            outcome = Outcome.DID_NOT_RUN if own.problem.startswith(LACKS) else outcome
            message, numbers = problem or f"{len(own.ids)} tests", {"tests": len(own.ids)}
            found.append(Check(id=step.key, outcome=outcome, seconds=own.seconds, message=message, numbers=numbers))
            taken |= own.ids
            listed |= all_.ids
            whole |= {name.partition("::")[0] for name in own.ids} if group is plain else set()
    # A step that runs a file as another launch gives its tests other ids; a step without filters runs all of them.
    listed = {name for name in listed if name in taken or name.partition("::")[0] not in whole}
    tops = {name.partition("/")[0] for name in taken | listed}
    lines = lost(taken, listed, [name for name in tests if name.partition("/")[0] in tops], exemptions(root))
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    if problems:
        outcome, message = Outcome.DID_NOT_RUN, "not known while a step cannot be listed"
    else:
        outcome = Outcome.FAIL if lines else Outcome.PASS
        message = "\n".join([*lines[:SHOWN], *more]) or f"{len(taken)} tests of {len(tests)} files"
    return [*found, Check(id=EVERY_TEST, outcome=outcome, message=message, numbers={"tests": len(taken)})]


def is_filtered(step: Step) -> bool:
    """Whether options of its command leave tests of its files out."""
    words = shlex.split(step.command)
    return without_filters(words) != words


def _files(step: Step, tests: Iterable[str]) -> set[str]:
    """The test files that a command names, or that lie below what it names."""
    return {name for name in tests if KINDS["junit"].reaches(step.command, f"{name}::test")}


def _listings(
    step: Step, root: Path, declarations: Declarations, machine: Machine
) -> tuple[CollectedTests, CollectedTests]:
    """What a step's command takes, and what it would take without its filters."""
    if lacks := machine.missing(step.packages):
        problem = CollectedTests(frozenset(), f"{LACKS} {', '.join(lacks)}, not installed here")
        return problem, problem
    words, env = shlex.split(step.command), environment_of(step, root, declarations)
    own = listing(words, root, env)
    return own, listing(without_filters(words), root, env) if is_filtered(step) else own


@ending
def main() -> int:
    """Check the repository around the current folder; exit status 0, 1 (findings) or 5 (a package is missing)."""
    return conclude(checks(find_root(Path.cwd())))


if __name__ == "__main__":
    sys.exit(main())
