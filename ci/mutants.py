# SPDX-License-Identifier: Apache-2.0
"""Mutate the code that decides a merge, and count how many mutants its tests kill: `python ci/mutants.py`.

Each mutant is one edit of cosmic-ray's operators at one place of `CORE`, in a clone. Places are drawn first, then one
edit at each, so that an operator with eleven replacements counts no more than an operator with one. Then the test files
that import the mutated module run, those named after it first, until one of them fails. A mutant whose tests do not end
in three times their unmutated time has survived: a slow machine kills none. Edits that change no behaviour are never
drawn: those in annotations that mypy alone reads, `==` or an order for `is`, and edits that do not compile.

A mutant that nothing can kill is argued at its line, or in a comment above it: `# mutant OPERATOR, OPERATOR: why`.
OPERATOR is the beginning of a name of `cosmic-ray operators` without `core/`. Argued mutants are not drawn.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hilgate.declare.imports import build
from hilgate.declare.load import find_root, load
from hilgate.errors import CannotRunHereError, DeclarationError, Exit, MisuseError, NothingSelectedError, Parser, ending
from hilgate.git import clone_at
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CORE = (
    "ci/hilgate/judge/*.py",
    "ci/hilgate/run/rules.py",
    "ci/hilgate/plan/select.py",
    "ci/hilgate/evidence.py",
    "ci/agent_host/job.py",
    "ci/agent_host/container.py",
)
DRAWN = 150
LEAST_KILLED = 0.9
"""Lower end of the rate's 95 % interval (Wilson)."""
MINUTES = 85.0
"""Minutes to run mutants in, of the step's 90: what has not run by then is missing, and the command fails for it."""

_SAME = re.compile("ReplaceComparisonOperator_(Is_(Eq|LtE?|GtE?)|IsNot_(NotEq|LtE?|GtE?))|NoOp")
"""Operators that write `==` or an order for `is`, which the core uses for members of enums and None alone."""
_ARGUED = re.compile(r"#\s*mutant ([\w, ]+): \S")


@dataclass(frozen=True)
class Mutant:
    """One edit: the operator's occurrence of this number, from 0, in a file."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int


def mutants_of(path: str, code: str) -> dict[tuple[int, int], list[Mutant]]:
    """Every mutant of a file that is not argued, by the line and column of its place.

    Raises:
        DeclarationError: A comment argues mutants that are not there.
    """
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = [node for node in _nodes(get_ast(code)) if node.type != "file_input"]
    argued, used = _argued(code), set[tuple[int, str]]()
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    for name in operator_names():
        short = name.removeprefix("core/")
        if get_operator(name).arguments() or _SAME.fullmatch(short):
            continue
        operator, occurrence = get_operator(name)(), -1
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                occurrence += 1
                if _types_only(node):
                    continue
                reasons = {one for one in argued.get(line, ()) if short.startswith(one)}
                used |= {(line, reason) for reason in reasons}
                if not reasons:
                    found[line, column].append(Mutant(path, line, column, short, occurrence))
    if stale := sorted({(line, one) for line, names in argued.items() for one in names} - used):
        line, operator_name = stale[0]
        raise DeclarationError(
            f"a comment argues a mutant of {operator_name}, and there is none",
            where=f"{path}:{line}",
            remedy="name an operator that mutates this line (cosmic-ray operators), or remove the comment",
        )
    return found


def _nodes(node: Any) -> Iterator[Any]:
    """A parso tree from its root, in the order in which cosmic-ray counts occurrences."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _types_only(node: Any) -> bool:
    """Whether mypy alone reads a node: annotations, a bare `*`, `if TYPE_CHECKING`, `frozen=True` of a dataclass."""
    if node.type == "operator" and node.parent.type == "parameters":
        return True
    if node.type == "if_stmt" and node.children[1].get_code().strip() == "TYPE_CHECKING":
        return True
    while parent := node.parent:
        place = {"annassign": 1, "tfpdef": 2}.get(parent.type)
        if place and node is parent.children[place]:
            return True
        if parent.type == "funcdef" and node is parent.annotation:
            return True
        if parent.type == "argument" and parent.children[0].get_code().strip() == "frozen":
            return True
        node = parent
    return False


def _argued(code: str) -> dict[int, tuple[str, ...]]:
    """Line of code -> the operators whose mutants a comment argues there."""
    argued: dict[int, tuple[str, ...]] = {}
    above: tuple[str, ...] = ()
    for number, line in enumerate(code.splitlines(), start=1):
        found = _ARGUED.search(line)
        names = tuple(name.strip() for name in found[1].split(",")) if found else ()
        if line.lstrip().startswith("#"):
            above += names
            continue
        if names or above:
            argued[number] = names + above
        above = ()
    return argued


def mutated(mutant: Mutant, code: str) -> str:
    """The code of its file with the edit; empty where that is the same program, or none."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    changed: str = mutate_code(code, get_operator(f"core/{mutant.operator}")(), mutant.occurrence) or ""
    try:
        with warnings.catch_warnings(action="ignore"):
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(code))
            compile(changed, mutant.path, "exec")
    except (SyntaxError, ValueError):
        return ""
    return "" if same else changed


def draw(
    mutants: dict[tuple[str, int, int], list[Mutant]], codes: dict[str, str], number: int, seed: int
) -> dict[Mutant, str]:
    """One mutant of each of `number` places, with the code of its file."""
    chance = random.Random(seed)
    drawn: dict[Mutant, str] = {}
    for place in chance.sample(sorted(mutants), len(mutants)):
        if len(drawn) == number:
            break
        for mutant in chance.sample(mutants[place], len(mutants[place])):
            if code := mutated(mutant, codes[mutant.path]):
                drawn[mutant] = code
                break
    return drawn


def tests_of(root: Path, python_path: Sequence[str], paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Path of a module -> the test files that import it, directly or through helpers of the tests.

    Raises:
        CannotRunHereError: The imports cannot be read.
        NothingSelectedError: No test imports a module.
    """
    imports = build(root, ["tests", *python_path])
    if imports.problem:
        raise CannotRunHereError(f"imports are not known: {imports.problem}", where=str(root), remedy="see the file")
    files = {imports.packages.any_module(path.relative_to(root)): path for path in (root / "tests").rglob("*.py")}
    found = {}
    for path in paths:
        modules, new = set[str](), {imports.packages.module_of(path)} & imports.graph.modules
        while new:
            importers = {one for module in new for one in imports.graph.find_modules_that_directly_import(module)}
            new = {importer for importer in importers if importer in files} - modules
            modules |= new
        named = [files[one].relative_to(root).as_posix() for one in modules if files[one].name.startswith("test_")]
        if not named:
            raise NothingSelectedError(f"no test file imports {path}", where=str(root), remedy="add one")
        found[path] = tuple(sorted(named))
    return found


class Copies:
    """Clones of the tree, one for each process that runs at once."""

    def __init__(self, root: Path, commit: str, folder: Path, number: int, python_path: Sequence[str]) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._python_path = python_path
        for index in range(number):
            clone_at(root, commit, folder / str(index))
            self._free.put(folder / str(index))

    def run(self, test: str, seconds: float, **changed: str) -> tuple[int | None, str, float]:
        """Run a test file over a copy, in which files have `changed` to this text, until a test fails.

        Returns:
            Exit status of pytest (None: it was ended after `seconds`), what it printed, and how long it took.
        """
        copy = self._free.get()
        try:
            for path, code in changed.items():
                (copy / path).write_text(code, encoding="utf-8")
            return self._pytest(copy, test, seconds)
        finally:
            # What a mutant left behind must not help or hurt the next one: its file, Hypothesis's examples.
            for words in (["checkout", "--quiet", "--", "."], ["clean", "-ffdxq"]):
                subprocess.run(["git", *words], cwd=copy, check=True)
            self._free.put(copy)

    def _pytest(self, copy: Path, test: str, seconds: float) -> tuple[int | None, str, float]:
        """Run a test over a mutant; returns exit status (None at the time limit), output and seconds."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HILGATE_", "BUILDKITE"))}
        env["PYTHONPATH"] = os.pathsep.join(str(copy / one) for one in self._python_path)
        env["PYTHONDONTWRITEBYTECODE"] = (
            "1"  # bytecode of an earlier mutant with the same time and size would run instead
        )
        began = time.monotonic()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as temporary:
            child = subprocess.Popen(
                # Without pytest-timeout's own limit: a test that fails for a slow machine would count as a kill.
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0", test],
                cwd=copy,
                env=env | {"TMPDIR": temporary},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            output.seek(0)
            return status, output.read().decode(errors="replace"), time.monotonic() - began


def _git(root: Path, *words: str) -> str:
    """What git says; empty where it fails. `stash create` makes a commit of the edits to tracked files, if any."""
    return subprocess.run(["git", *words], cwd=root, check=False, capture_output=True, text=True).stdout.strip()


def positive(text: str) -> int:
    """An argument that is a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


@dataclass(frozen=True)
class Draw:
    """Mutants that were drawn, and all that runs their tests.

    Attributes:
        codes: Path of a file of the core -> its text.
        mutants: Each with the text of its file.
        tests: Path of a file of the core -> the test files that import it.
        deadline: When to stop, on the monotonic clock.
        seconds: Test file -> how long it took unmutated.
    """

    copies: Copies
    codes: dict[str, str]
    mutants: dict[Mutant, str]
    tests: dict[str, tuple[str, ...]]
    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, processes: int) -> list[bool | None]:
        """Run the tests of all mutants: whether each was killed, None where there was no time."""
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(self.measure, sorted({test for mutant in self.mutants for test in self.tests[mutant.path]})))
            return list(pool.map(self.kills, self.mutants))

    def measure(self, test: str) -> None:
        """Note how long a test file takes unmutated.

        Raises:
            NothingSelectedError: It fails there, so that no failure would say anything.
        """
        status, output, self.seconds[test] = self.copies.run(test, 600)
        if status != 0:
            sys.stderr.write(output)
            raise NothingSelectedError(f"{test} does not pass unmutated", where=test, remedy="see its output above")

    def kills(self, mutant: Mutant) -> bool | None:
        """Whether the tests of a mutant kill it: files named after its module first, then quick ones."""
        own = f"test_{Path(mutant.path).stem}.py"
        for test in sorted(self.tests[mutant.path], key=lambda name: (Path(name).name != own, self.seconds[name])):
            limit = 3 * self.seconds[test] + 20
            if time.monotonic() + limit > self.deadline:
                return None
            status, _, _ = self.copies.run(test, limit, **{mutant.path: self.mutants[mutant]})
            if status is None or status < 0:  # by a signal: no memory, as far as anybody knows
                self.show(mutant, "hung")
                return False
            if status > 0:
                return True
        self.show(mutant, "survived")
        return False

    def show(self, mutant: Mutant, end: str) -> None:
        """Print where a mutant is, how it ended, its operator and what it changes."""
        before, after = (text.splitlines() for text in (self.codes[mutant.path], self.mutants[mutant]))
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
        head = f"{mutant.path}:{mutant.line}: {end}: {mutant.operator}"
        sys.stdout.write("\n".join([head, *(f"    {line}" for line in lines)]) + "\n")
        sys.stdout.flush()


def kill(root: Path, number: int, seed: int, only: str) -> Check:
    """Draw mutants, run them and say how many were killed; survivors are printed as they are found.

    Raises:
        MisuseError: `only` names no file of the core, or there is no git checkout.
        CannotRunHereError: cosmic-ray or scipy is not installed.
    """
    for package in ("cosmic_ray", "scipy"):
        if importlib.util.find_spec(package) is None:
            raise CannotRunHereError(f"{package} is not installed", remedy="install requirements/laptop.txt")
    deadline, processes = time.monotonic() + MINUTES * 60, os.cpu_count() or 1
    python_path = load(root).project.python_path
    found = [path.relative_to(root).as_posix() for pattern in CORE for path in sorted(root.glob(pattern))]
    core = [path for path in found if only in path and not path.endswith("/__init__.py")]
    if not core:
        raise MisuseError(f"no file of the core has {only!r} in its path", remedy=f"take one of {', '.join(found)}")
    commit = _git(root, "stash", "create") or _git(root, "rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(root, commit, Path(folder), processes, python_path)
        source = Path(folder, "0")
        codes = {path: (source / path).read_text(encoding="utf-8") for path in core}
        mutants = {(path, *place): found for path in core for place, found in mutants_of(path, codes[path]).items()}
        drawn = draw(mutants, codes, number, seed)
        sys.stdout.write(f"{len(drawn)} of {len(mutants)} places, seed {seed}\n")
        sys.stdout.flush()
        killed = Draw(copies, codes, drawn, tests_of(source, python_path, core), deadline).run(processes)
    return judged(killed, seed)


def judged(ends: Sequence[bool | None], seed: int) -> Check:
    """The check that the command leaves: the rate of killed mutants with its interval, against the least one."""
    from scipy.stats import binomtest

    killed, late = ends.count(True), ends.count(None)
    run = len(ends) - late
    low, high = binomtest(killed, run).proportion_ci(method="wilson") if run else (0.0, 1.0)
    words = f"{killed} of {run} mutants killed: {100 * killed / max(run, 1):.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    outcome = Outcome.PASS if low >= LEAST_KILLED else Outcome.FAIL
    if late:
        words, outcome = f"{words}; no time for {late}", Outcome.DID_NOT_RUN
    numbers = {"mutants": run, "killed": killed, "lower_end": float(low), "seed": seed}
    return Check(id="mutants of the core", outcome=outcome, message=words, numbers=numbers)


@ending
def main() -> int:
    """Draw mutants and run them; the exit status is 0, 1 (too few were killed) or 4 (not all of them could run)."""
    parser = Parser(description="Count how many mutants of the core its tests kill.")
    parser.add_argument("--number", type=positive, default=DRAWN, help=f"how many are drawn ({DRAWN})")
    parser.add_argument("--seed", type=int, help="of the draw; printed, so that it can be repeated")
    parser.add_argument("--only", default="", metavar="TEXT", help="files of the core whose path holds this")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    check = kill(find_root(Path.cwd()), given.number, seed, given.only)
    sys.stdout.write(f"{check.message}\n")
    if out := os.environ.get("HILGATE_OUT"):
        Check.write_all(Path(out), [check])
    statuses = {Outcome.PASS: Exit.PASS, Outcome.FAIL: Exit.FAIL}
    return statuses.get(check.outcome, Exit.NOTHING_RAN)


if __name__ == "__main__":
    sys.exit(main())
