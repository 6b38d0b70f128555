# SPDX-License-Identifier: Apache-2.0
"""Print what selection by launched kernels saves: `python ci/selection_figures.py RESULTS...`.

RESULTS are folders with `steps/<key>/kernels.txt` below them, which `hilgate gate` leaves; they stand for a build of
HEAD. Of each file of kernels every body is edited in turn, in a clone, and planned for a pull request: by imports, by
these records, and as if each GPU had launched what the CPU did, which hilgate itself never assumes. A file's line is
its worst body; the last line weighs files by the commits that touched them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.declare.imports import build
from hilgate.declare.load import find_root, load
from hilgate.errors import MisuseError, Parser, ending
from hilgate.images.contents import contents
from hilgate.model.declaration import CPU
from hilgate.plan.launched import Launched, Launches, jitted
from hilgate.plan.make import ChangeFacts, assemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hilgate.declare.imports import Imports
    from hilgate.model.plan import Plan

WAYS = ("imports", "records", "twins")
"""How a change is planned: without records, with them, and with those of the CPU for every device."""


class Figures:
    """Plans of one edit of a clone."""

    def __init__(self, root: Path, clone: Path, records: Mapping[str, frozenset[str]]) -> None:
        self.root, self.clone = root, clone
        files = frozenset(git.tracked_files(root))
        self.records = {key: Launches("", names).placed(files).names for key, names in records.items()}
        self.head = git.inspect(clone, None).commit
        self._declarations = load(clone)
        images = contents(clone)  # built already, as for any change of a kernel
        self._facts = ChangeFacts(images=images, digests=dict.fromkeys(images, f"sha256:{'0' * 64}"))
        self.all = assemble(self._declarations, git.inspect(clone, None), None, profile="pr", facts=self._facts)

    def graph(self) -> Imports:
        """The import graph of the clone's working tree."""
        return build(self.clone, self._declarations.project.python_path)

    def plan(self, way: str, graph: Imports) -> Plan:
        """The plan of the clone's working tree, which has this import graph."""

        def recorded(step: str, device: str) -> list[Launches]:
            names = self.records.get(f"{step}-{CPU if way == 'twins' else device}")
            return [] if names is None else [Launches(self.head, names)]

        change = git.inspect(self.clone, self.head)
        launched = None if way == "imports" else Launched(self.clone, change, self._declarations.areas, graph, recorded)
        return assemble(
            self._declarations, change, None, profile="pr", graph=graph, launched=launched, facts=self._facts
        )

    def worst(self, name: str) -> dict[str, tuple[int, float]]:
        """By `WAYS`: the most steps and GPU-minutes that an edit of one body of a file plans; nothing without one."""
        path = self.clone / name
        before = path.read_text(encoding="utf-8")
        planned: dict[tuple[str, frozenset[str]], Plan] = {}
        if "jit" not in before:
            return {}
        graph = self.graph()
        found: dict[str, tuple[int, float]] = {}
        for function, edited in bodies(before):
            calls = {
                key for key, names in self.records.items() if Launches("", names).among({name: frozenset({function})})
            }
            path.write_text(edited, encoding="utf-8")
            for way in WAYS:
                asked = way, frozenset(calls if way != "imports" else ())
                plan = planned.get(asked) or planned.setdefault(asked, self.plan(way, graph))
                most = found.get(way, (0, 0.0))
                found[way] = max(most[0], len(plan.steps)), max(most[1], gpu_minutes(plan))
        self.restore()
        return found

    def restore(self) -> None:
        """Take back every edit."""
        git_says(self.clone, "checkout", "--quiet", "--", ".")


def gpu_minutes(plan: Plan) -> float:
    """GPU time that its steps declare."""
    return sum((step.step.minutes or 0.0) * step.gpus for step in plan.steps)


def read_records(folders: Iterable[Path]) -> dict[str, frozenset[str]]:
    """Planned key -> what was noted of it, where that is whole."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("kernels.txt"))):
        if any((above / path.name).is_file() for above in path.parent.parents):
            continue  # of a gate that a step ran, over a planted bug say
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or not lines[0].startswith("not whole: "):
            found[path.parent.name] = frozenset(lines)
    if not found:
        raise MisuseError(
            "there is no whole kernels.txt", where=" ".join(map(str, folders)), remedy="run `hilgate gate`"
        )
    return found


def bodies(text: str) -> Iterator[tuple[str, str]]:
    """Each jitted function of a source, with the source after an edit of its body."""
    lines = text.splitlines(keepends=True)
    for one in jitted(ast.parse(text)):
        first = one.body[0]
        edit = f"{' ' * first.col_offset}pass\n"
        yield one.name, "".join([*lines[: one.end_lineno], edit, *lines[one.end_lineno or 0 :]])


def print_files(figures: Figures) -> None:
    """A line for each file with jitted functions, and one for all by their commits."""
    every, minutes = len(figures.all.steps), gpu_minutes(figures.all)
    _say(f"{every} steps, {minutes:.0f} GPU-minutes; of these are planned, by {', '.join(WAYS)}:")
    totals: dict[str, float] = dict.fromkeys(WAYS, 0.0)
    weights = 0
    for name in git.tracked_files(figures.root):
        worst = figures.worst(name) if name.startswith("kernels/") and name.endswith(".py") else {}
        if worst:
            commits = len(git_says(figures.root, "log", "--format=%h", "--", name).split())
            weights += commits
            for way, (_, spent) in worst.items():
                totals[way] += commits * spent
            shares = "  ".join(f"{number / every:4.0%}" for number, _ in worst.values())
            times = "  ".join(f"{spent / minutes:4.0%}" for _, spent in worst.values())
            _say(f"{name:44} {commits:3} commits  steps {shares}   GPU-minutes {times}")
    saved = "  ".join(f"{1 - total / (weights * minutes):4.0%}" for total in totals.values())
    _say(f"GPU-minutes saved, files weighed by their commits: {saved}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def git_says(root: Path, *arguments: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


@ending
def main(arguments: list[str] | None = None) -> int:
    """Print the figures."""
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    root = find_root(Path.cwd())
    with tempfile.TemporaryDirectory(prefix="selection-") as folder:
        clone = Path(folder) / "tree"
        git.clone_at(root, git.inspect(root, None).commit, clone)
        print_files(Figures(root, clone, read_records(given.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
