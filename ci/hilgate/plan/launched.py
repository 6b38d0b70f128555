# SPDX-License-Identifier: Apache-2.0
"""Steps that launch none of the `@triton.jit` functions whose bodies a change edits, by what earlier builds recorded.

A kernel's body matters only to steps that compile or interpret it, and the processes of each step record which kernels
these are (`hilgate.pytest_recorder`). A note of an earlier build still holds if nothing that differs from its
commit can change what the step launches: the same rules select by it, body by body.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hilgate import git
from hilgate.plan.select import select
from hilgate.pytest_recorder import ELSEWHERE, name_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hilgate.declare.imports import Imports
    from hilgate.model import Key
    from hilgate.model.declaration import Area, Step
    from hilgate.plan.select import Selection


@dataclass(frozen=True)
class Launches:
    """What a step launched, compiled, interpreted or read as text in a build that passed."""

    commit: str
    names: frozenset[str] = frozenset()
    """`<file>::<function>`, or what was read as text: a file, or a folder with `/` at its end; a file may be a copy
    somewhere else (`hilgate.pytest_recorder`)."""
    problem: str = ""
    """Why it does not count, as the end of "the record of <commit> ..."."""

    def among(self, bodies: Mapping[str, frozenset[str]]) -> list[str]:
        """Which of these functions (file -> names) it launches, each as `<file>: body of <function>`."""
        folders = tuple("" if name == "./" else name for name in self.names if name.endswith("/"))
        return [
            f"{file}: body of {name}"
            for file, functions in sorted(bodies.items())
            for name in sorted(functions)
            # A copy of the file outside the repository is recorded under ELSEWHERE, with the function's name.
            if {f"{file}::{name}", f"{ELSEWHERE}::{name}", file, name_elsewhere(file)} & self.names
            or file.startswith(folders)
        ]

    def placed(self, files: Collection[str]) -> Launches:
        """The same, where other files than these are elsewhere: in an environment of the checkout, say."""
        names = set()
        for name in self.names:
            file, colons, function = name.partition("::")
            known = file in files or name.endswith("/")
            names.add(name if known else f"{ELSEWHERE}::{function}" if colons else name_elsewhere(file))
        return replace(self, names=frozenset(names))


# One module


def edited_bodies(before: bytes | None, after: bytes | None) -> frozenset[str]:
    """The jitted functions whose bodies alone differ between two states of a source; none where anything else does.

    A body is its lines, comments among them; what stands around bodies must be the same lines and the same syntax.
    Functions inside of others, or with a decorator that is not Triton's, count as what stands around.
    """
    old, new = _split(before), _split(after)
    if old is None or new is None or old[0] != new[0]:
        return frozenset()
    return frozenset(name for name, lines in old[1].items() if lines != new[1][name])


def _split(source: bytes | None) -> tuple[object, dict[str, list[str]]] | None:
    """Split a source into the code outside of jitted functions' bodies, and these bodies by name.

    None for a source that has no such function or cannot be parsed.
    """
    if source is None or b"jit" not in source:
        return None
    try:
        tree, lines = ast.parse(source), source.decode().split("\n")
    except (ValueError, SyntaxError, RecursionError):
        return None
    functions = jitted(tree)
    named = {function.name: function for function in functions}
    # Of two definitions of a name the last one counts; for Python alone does a lone carriage return end a line.
    if len(named) < len(functions) or b"\r" in source.replace(b"\r\n", b"\n"):
        return None
    bodies: dict[str, list[str]] = {}
    inside: set[int] = set()
    for name, one in named.items():
        first, last = one.body[0].lineno - 1, one.end_lineno or 0
        bodies[name] = lines[first:last]
        inside |= set(range(first, last))
        one.body = []
    return (ast.dump(tree), [text for number, text in enumerate(lines) if number not in inside]), bodies


def jitted(tree: ast.Module) -> list[ast.FunctionDef]:
    """The jitted functions that a module defines, but inside of others or in branches."""
    places = dict(_imports(tree))
    return [one for one in tree.body if isinstance(one, ast.FunctionDef) and _is_jitted(one, places)]


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that a module imports, with the dotted name of what it is."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            for alias in one.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(one, ast.ImportFrom):
            for alias in one.names:
                yield alias.asname or alias.name, f"{one.module or ''}.{alias.name}"


def _is_jitted(function: ast.FunctionDef, places: Mapping[str, str]) -> bool:
    """Whether Triton, or a module that hands it on, makes a kernel of it, and nothing else decorates it."""
    decorators = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    paths = [_dotted(decorator, places).split(".") for decorator in decorators]
    ends = {parts[-1] for parts in paths if "triton" in parts}
    return "jit" in ends <= {"jit", "autotune", "heuristics"} and all("triton" in parts for parts in paths)


def _dotted(node: ast.AST, places: Mapping[str, str]) -> str:
    """`a.b.c` of an expression, its first name as imported; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, places)}.{node.attr}"
    return places.get(node.id, "") if isinstance(node, ast.Name) else ""


# The change


@dataclass(frozen=True)
class Answer:
    """What records say of a step on a device."""

    runs: bool
    reason: str
    """The whole reason, or what is added to why imports select it where none counts."""
    counts: bool = True
    """Whether there is a record that counts."""


_Since = tuple["Selection", "Mapping[str, frozenset[str]]", "Mapping[Key, str]"]
"""What differences select, the edited bodies among them, and the reasons by everything else."""


@dataclass
class Launched:
    """Asks the records of steps that only edited bodies select.

    Attributes:
        root: The checkout.
        change: What it changes.
        areas: As it declares them.
        graph: Its import graph.
        records: Declared step, device -> what builds in which it passed recorded, the newest first.
    """

    root: Path
    change: git.Changes
    areas: Sequence[Area]
    graph: Imports
    records: Callable[[str, str], Sequence[Launches]]
    _since: dict[str, _Since | None] = field(default_factory=dict)

    @cached_property
    def bodies(self) -> Mapping[str, frozenset[str]]:
        """File of the change -> the jitted functions in it whose bodies are all that it changes there."""
        return self._edited(self.change.merge_base, self.change.files or ())

    @cached_property
    def _files(self) -> Mapping[str, str]:
        return git.tree(self.root, self.change.merge_base)

    def _edited(self, commit: str, files: Iterable[str]) -> dict[str, frozenset[str]]:
        names = [name for name in files if name.endswith(".py") and (self.root / name).is_file()]
        before = git.files_at(self.root, commit, names) if names else {}
        found = {name: edited_bodies(text, (self.root / name).read_bytes()) for name, text in before.items()}
        return {name: bodies for name, bodies in found.items() if bodies}

    def answers(self, step: Step) -> dict[Key, Answer]:
        """Device -> what the newest record that counts says of a step; nothing for devices without a record."""
        answers = {device: self._answer(step.key, device) for device in step.devices}
        return {device: answer for device, answer in answers.items() if answer}

    def _answer(self, key: Key, device: Key) -> Answer | None:
        why = ""
        for recorded in self.records(key, device):
            record = recorded.placed(self._files)
            where = f"the build of {record.commit[:12]}"
            outdated = "" if record.problem else self._outdated(key, record)
            if problem := record.problem or outdated:
                why = why or f"its record of {where} {problem}"
                if outdated and self._selected_since(record.commit):
                    break  # and so are older ones
            elif launched := record.among(self.bodies):
                more = f" and {len(launched) - 1} more" if len(launched) > 1 else ""
                return Answer(runs=True, reason=f"{launched[0]}{more} changed, launched in {where}")
            else:
                return Answer(runs=False, reason=f"not affected: it passed and launched no changed kernel in {where}")
        return Answer(runs=True, reason=why, counts=False) if why else None

    def _outdated(self, key: Key, record: Launches) -> str:
        """Why a record says nothing of what the step launches at the merge base; empty where it still holds."""
        since = self._selected_since(record.commit)
        if since is None:
            return "is of another line"
        selection, bodies, others = since
        if key in selection.reasons and key not in selection.by_bodies:
            return f"is out of date: {others.get(key, selection.reasons[key])}"
        # What it launched and was edited between the two may call what this change edits.
        before = {file: names - self.bodies.get(file, frozenset()) for file, names in bodies.items()}
        moved = record.among(before)
        return f"is out of date: {moved[0]} changed" if moved else ""

    def _selected_since(self, commit: str) -> _Since | None:
        """The steps selected by everything that changed since a commit; None if it is no ancestor of the merge base."""
        if commit not in self._since:
            self._since[commit] = None
            if git.is_ancestor(self.root, commit, self.change.merge_base):
                then, now = git.tree(self.root, commit), self._files
                differing = {name for name in then.keys() | now.keys() if then.get(name) != now.get(name)}
                files = differing | {*(self.change.files or ())}
                bodies = self._edited(commit, sorted(files))
                appeared = files - then.keys()
                others = select(self.areas, files - bodies.keys(), self.graph, appeared)
                selection = select(self.areas, files, self.graph, appeared, bodies)
                self._since[commit] = selection, bodies, others.reasons
        return self._since[commit]
