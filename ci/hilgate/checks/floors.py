# SPDX-License-Identifier: Apache-2.0
"""Compare the `minimum` of every pytest step with what pytest collects: `python -m hilgate.checks.floors [--write]`.

A step must report every test that pytest collected (`hilgate.evidence`), so a test that is skipped or lost is noticed
by itself. Tests that are not even collected, because a folder was renamed, only a number can miss: each step's
`minimum` must be within 5 % of what is collected, on any machine. `--write` writes the numbers into `ci/areas`.
Collecting imports what the tests import, once for all steps that pytest can collect in one process. Under the runner
(`HILGATE_OUT` set) each number is a check of `findings.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.checks import conclude
from hilgate.declare.load import find_root, load
from hilgate.errors import DeclarationError, NothingSelectedError, ending
from hilgate.evidence import WITH_VALUE
from hilgate.model.declaration import CPU
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pytest

    from hilgate.declare.load import Declarations

SLACK = 0.05
"""Share of the collected tests by which a minimum may be too low."""

PRELOADED = ("pytest", "hypothesis", "numpy", "torch")
"""Imported once for all processes that collect. None of them asks for what steps set in their environment."""

COLLECT_SECONDS = 300
PYTEST = ["python", "-m", "pytest"]
SELECTING = {"-k": "keyword", "-m": "mark"}
"""Options that choose among collected tests -> the field of `Floor` that holds them."""


@dataclass(frozen=True)
class Floor:
    """A number that a declaration promises, and the tests that it is about.

    Attributes:
        step: Key of the declared step.
        smoke: Whether it is the promise of its smoke subset.
        area: Key of its area.
        minimum: As declared.
        environment: Of the step, beyond this process's own.
        options: Of pytest, which all that is collected in one process shares.
        paths: Files, folders and node ids that pytest is given; `ignored` are left out.
        keyword: As behind -k; `mark`: as behind -m.
    """

    step: str
    smoke: bool
    area: str
    minimum: int
    environment: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    paths: tuple[str, ...]
    ignored: tuple[str, ...]
    keyword: str
    mark: str

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.step} (smoke)" if self.smoke else self.step

    def has(self, node: str) -> bool:
        """Whether a test, by its node id, stands below one of its paths."""
        return any(_below(node, path) for path in self.paths) and not any(_below(node, path) for path in self.ignored)

    def check(self, collected: int | str, seconds: float) -> Check:
        """Whether the declared number fits what is collected; text says why nothing was."""
        if isinstance(collected, str):
            return Check(id=self.name, outcome=Outcome.DID_NOT_RUN, message=collected, seconds=seconds)
        fits = least(collected) <= self.minimum <= collected
        said = f"at least {self.minimum} of {collected} collected tests"
        remedy = "; run `python -m hilgate.checks.floors --write`"
        return Check(
            id=self.name,
            outcome=Outcome.PASS if fits else Outcome.FAIL,
            message=said if fits else f"it promises {said}, and must promise at least {least(collected)}{remedy}",
            numbers={"minimum": self.minimum, "collected": collected},
            seconds=seconds,
        )


def least(collected: int) -> int:
    """The lowest minimum that a step with so many tests may declare."""
    return max(1, math.ceil(collected * (1 - SLACK)))


def written(collected: int) -> int:
    """What `--write` declares: in the middle, so that a test more or less changes no declaration."""
    return max(1, round(collected * (1 - SLACK / 2)))


def floors(declarations: Declarations) -> Iterator[Floor]:
    """The promises of each step that pytest runs on the cpu, and of its smoke subset."""
    path = list(declarations.project.python_path)
    for area, step in declarations.steps():
        if step.evidence != "junit" or CPU not in step.devices or shlex.split(step.command)[:3] != PYTEST:
            continue
        device = declarations.agents.devices[CPU]
        own = [*path, *filter(None, step.env.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**device.env, **step.env, "PYTHONPATH": os.pathsep.join(own)}
        whole = replace(
            _parse(shlex.split(step.command)[3:]),
            step=step.key,
            area=area.area,
            minimum=step.minimum,
            environment=tuple(sorted(environment.items())),
        )
        yield whole
        if step.smoke:
            part = _parse(shlex.split(f"{step.command} {step.smoke.arguments}")[3:])
            yield replace(
                whole,
                smoke=True,
                minimum=step.smoke.minimum,
                options=part.options,
                paths=part.paths,
                ignored=part.ignored,
                keyword=part.keyword,
                mark=part.mark,
            )


def _parse(words: list[str]) -> Floor:
    """Of the words behind `python -m pytest`: options, paths, and what chooses among tests; the rest stays empty."""
    options: list[str] = []
    paths: list[str] = []
    ignored: list[str] = []
    chosen = {"keyword": "", "mark": ""}
    rest = iter(words)
    for word in rest:
        if word in SELECTING:
            value, before = next(rest, ""), chosen[SELECTING[word]]
            chosen[SELECTING[word]] = f"({before}) and ({value})" if before and word == "-m" else value
        elif word.startswith("--ignore="):
            ignored.append(word.removeprefix("--ignore="))
        elif word.startswith("-"):
            takes_value = word in WITH_VALUE or (word.startswith("--") and "=" not in word)
            options += [word, next(rest, "")] if takes_value else [word]
        else:
            paths.append(word)
    return Floor("", False, "", 1, (), tuple(options), tuple(paths), tuple(ignored), **chosen)


def collect(root: Path, wanted: Iterable[Floor]) -> dict[str, int | str]:
    """Name of a floor -> how many tests pytest collects for it, or why it collects none.

    Those that share options and environment are collected in one process. Where pytest refuses them together, because
    one process cannot import the tests of all, either half of their areas has its own.
    """
    groups = defaultdict(list)
    for floor in wanted:
        groups[floor.environment, floor.options].append(floor)
    found: dict[str, int | str] = {}
    waiting = list(groups.values())
    while waiting:
        group = waiting.pop()
        counts, refused = _collect(root, group)
        areas = list(dict.fromkeys(floor.area for floor in group))
        if refused and len(areas) > 1:
            first = areas[: len(areas) // 2]
            waiting.append([floor for floor in group if floor.area in first])
            waiting.append([floor for floor in group if floor.area not in first])
        else:
            found |= counts
    return found


def _preload(declarations: Declarations) -> None:
    """Import what most tests import, where steps declare it, once for all processes."""
    declared = {package for _, step in declarations.steps() for package in step.packages}
    for name in declared.intersection(PRELOADED):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _collect(root: Path, group: list[Floor]) -> tuple[Mapping[str, int | str], bool]:
    """What one process of pytest collects, and whether it refuses the command line."""
    names = [floor.name for floor in group]
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(root, group, answer, log))
        child.start()
        child.join(COLLECT_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
            return dict.fromkeys(names, f"nothing was collected in {COLLECT_SECONDS} s"), False
        if child.exitcode == 0 and answer.exists():
            return json.loads(answer.read_text(encoding="utf-8")), False
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = next((line for line in lines if line.startswith(("ERROR", "E "))), lines[-1] if lines else "no word")
    return dict.fromkeys(
        names, f"pytest collects nothing, exit {child.exitcode}: {said}"
    ), child.exitcode == USAGE_ERROR


USAGE_ERROR = 4
"""`pytest.ExitCode`."""


class _Counter:
    """Counts what pytest collects for each floor, as a plugin of one session."""

    def __init__(self, wanted: list[Floor]) -> None:
        self.wanted = wanted
        self.counts: dict[str, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from _pytest.mark import deselect_by_keyword, deselect_by_mark

        for floor in self.wanted:
            items = [item for item in session.items if floor.has(item.nodeid)]
            session.config.option.keyword, session.config.option.markexpr = floor.keyword, floor.mark
            deselect_by_keyword(items, session.config)
            deselect_by_mark(items, session.config)
            self.counts[floor.name] = len(items)


def _in_child(root: Path, wanted: list[Floor], answer: Path, log: Path) -> None:
    """In a process of its own: let pytest collect, write the counts, and end with pytest's status."""
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.chdir(root)
    os.environ.update(wanted[0].environment)
    sys.path[:0] = [str(root / folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep)]
    import pytest

    counter = _Counter(wanted)
    paths = list(dict.fromkeys(path for floor in wanted for path in floor.paths))
    # What one of them names itself is ignored by no other; `Floor.has` leaves it out there.
    ignored = set.intersection(*(set(floor.ignored) for floor in wanted))
    arguments = [*wanted[0].options, *(f"--ignore={path}" for path in sorted(ignored)), *paths]
    status = pytest.main([*arguments, "--collect-only", "-q", "-q", "-p", "no:cacheprovider"], plugins=[counter])
    if status == pytest.ExitCode.OK:
        answer.write_text(json.dumps(counter.counts), encoding="utf-8")
    sys.exit(int(status))


def _below(node: str, path: str) -> bool:
    """Whether a node id is the named file, folder or test, or lies below it."""
    name = path.removeprefix("./").rstrip("/")
    return node == name or node.startswith((f"{name}/", f"{name}::", f"{name}["))


def rewrite(text: str, floor: Floor, minimum: int) -> str:
    """The text of an area with this minimum in place of the declared one.

    Raises:
        DeclarationError: The step has no line with its minimum.
    """
    begin = re.search(rf"^ *- key: {re.escape(floor.step)}\s*$", text, re.MULTILINE)
    end = re.compile(r"^ *- key: ", re.MULTILINE).search(text, begin.end()) if begin else None
    own = text[begin.end() : end.start() if end else len(text)] if begin else ""
    whole, smoke, rest = own.partition("\n    smoke:")
    part, count = re.subn(r"(?<=\bminimum: )\d+", str(minimum), rest if floor.smoke else whole, count=1)
    if begin is None or count != 1:
        raise DeclarationError(
            f"{floor.name} has no minimum to replace", where=f"area {floor.area}", remedy=f"write minimum: {minimum}"
        )
    new = f"{whole}{smoke}{part}" if floor.smoke else f"{part}{smoke}{rest}"
    return text[: begin.end()] + new + text[begin.end() + len(own) :]


def _write(root: Path, wanted: list[Floor], found: Mapping[str, int | str]) -> None:
    files = {area.stem: area for area in (root / "ci/areas").glob("*.yaml")}
    for floor in wanted:
        collected = found[floor.name]
        if isinstance(collected, int) and not least(collected) <= floor.minimum <= collected:
            path = files[floor.area]
            path.write_text(rewrite(path.read_text(encoding="utf-8"), floor, written(collected)), encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(root)}: {floor.name}: {floor.minimum} -> {written(collected)}\n")


@ending
def main(arguments: list[str] | None = None) -> int:
    """Check or write the numbers; exit status 0, 1 (a number does not fit) or 5 (something cannot be collected)."""
    parser = argparse.ArgumentParser(
        prog="python -m hilgate.checks.floors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="write corrected numbers into ci/areas")
    options = parser.parse_args(arguments)
    root, began = find_root(Path.cwd()), time.monotonic()
    declarations = load(root)
    wanted = list(floors(declarations))
    if not wanted:
        raise NothingSelectedError("no step of pytest", where="ci/areas", remedy="none needed")
    _preload(declarations)
    found = collect(root, wanted)
    if options.write:
        _write(root, wanted, found)
        wanted = list(floors(load(root)))
    seconds = (time.monotonic() - began) / len(wanted)
    return conclude(floor.check(found[floor.name], seconds) for floor in wanted)


if __name__ == "__main__":
    sys.exit(main())
