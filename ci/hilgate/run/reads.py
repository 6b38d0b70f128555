# SPDX-License-Identifier: Apache-2.0
"""Files of the checkout that a step reads: each must select it, or a later change to that file would not run it.

Every process of Python that a step starts notes what it opens (`hilgate.pytest_recorder`), unless a test clears the
environment of one. What selects a step is asked of the planner's own rule, so nothing is declared twice.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate import git, pytest_recorder
from hilgate.declare import imports
from hilgate.declare.load import load
from hilgate.evidence import LISTING_PLUGIN, PYTEST_PLUGIN
from hilgate.model.declaration import CPU
from hilgate.model.record import LONGEST_ID, MOST_KERNELS
from hilgate.plan.select import select
from hilgate.pytest_recorder import FOLDER, WHOLE, name_elsewhere
from hilgate.text import argument_list, count, line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from hilgate.declare.load import Declarations
    from hilgate.model.plan import PlannedStep

READS_FILE: Final = "reads.txt"
"""File in the output folder of a step: the files of the checkout that it read, one on each line."""
KERNELS_FILE: Final = "kernels.txt"
"""Beside it: the functions of Triton that it compiled or interpreted, and what it read as text; why that is not all."""

_SITE: Final = """{recorder}

watch({folder!r}, {root!r})
# The next one on the path, which this one stands before: of an outer run, or of the environment.
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
_spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index({folder!r}) + 1 :])
if _spec and _spec.loader:
    _spec.loader.exec_module(module_from_spec(_spec))
"""


def record(folder: Path, root: Path) -> str:
    """Make the folder that must come first on the import path of a step, whose output folder this is.

    It holds, while the step runs, the `sitecustomize` of its processes, and their notes.
    """
    place = folder / FOLDER
    (place / "lists").mkdir(parents=True)
    (place / WHOLE).touch()
    recorder = Path(pytest_recorder.__file__).read_text(encoding="utf-8")
    text = _SITE.format(recorder=recorder, folder=str(place), root=os.path.realpath(root))
    (place / "sitecustomize.py").write_text(text, encoding="utf-8")
    return str(place)


@dataclass(frozen=True)
class Notes:
    """What the processes of a step noted.

    Attributes:
        began: Whether there was one: of a step without Python there is none.
        files: Files and folders of the checkout that they read.
        kernels: As in `StepRecord.kernels`; None where that may not be all.
        lost: Why `files` is not all; empty where it is.
    """

    began: bool
    files: frozenset[str]
    kernels: tuple[str, ...] | None = None
    lost: str = ""


def collect(folder: Path, tracked: Collection[str] = ()) -> Notes:
    """Read the notes of a step's processes, and write them for people. The folder of the recorder goes.

    Of sources that were read as text those are left out which have the name of no tracked file: packages' own, say.
    """
    place = folder / FOLDER
    try:
        notes = [note for path in (place / "lists").iterdir() for note in path.read_bytes().split(b"\0")]
        complete = (place / WHOLE).exists()
        shutil.rmtree(place)
    except OSError:
        notes, complete = [], False
    names = {os.fsdecode(note) for note in notes}
    launched, as_text, unseen = (_after(mark, names) for mark in pytest_recorder.MARKS)
    files = frozenset(one for one in names if one and not one.startswith("/"))
    ends = {name_elsewhere(name) for name in tracked}
    as_text = {name for name in as_text if not ends or name.endswith("/") or name_elsewhere(name) in ends}
    kernels = tuple(sorted(launched | as_text))
    lost = "" if complete else "not all that it read could be noted: free disk space, and leave $HILGATE_OUT alone"
    unknown = lost
    if not names:
        unknown = unknown or "no process of it is a Python"
    if unseen:
        unknown = unknown or f"what {', '.join(sorted(unseen))} did is not noted: its environment or options differ"
    if len(kernels) > MOST_KERNELS or any(len(kernel) > LONGEST_ID for kernel in kernels):
        unknown = unknown or "there are too many, or names too long"
    _write(folder / READS_FILE, sorted(files))
    _write(folder / KERNELS_FILE, [*([f"not whole: {unknown}"] if unknown else []), *kernels])
    return Notes(bool(names), files, None if unknown else kernels, lost)


def _after(mark: str, names: Iterable[str]) -> set[str]:
    return {line(name.removeprefix(mark)) for name in names if name.startswith(mark)}


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line(one)}\n" for one in lines), encoding="utf-8", errors="backslashreplace")


class Selecting:
    """What selects the steps of a checkout, asked for one file at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._steps: dict[str, frozenset[str]] = {}

    @cached_property
    def tracked(self) -> frozenset[str]:
        """Files that git tracks."""
        return git.in_index(self._root)

    @cached_property
    def _declarations(self) -> Declarations:
        return load(self._root)

    @cached_property
    def _graph(self) -> imports.Imports:
        return imports.build(self._root, self._declarations.project.python_path)

    def is_held(self, step: PlannedStep) -> bool:
        """Whether a step is refused for what it read; of any other its record says so.

        That is a step that a desk can run, where its author sees what to name. What runs on agents alone may import
        what cannot turn it red: other attention backends, say, of which a change to our kernels shall select none.
        """
        if not (self._root / "ci/areas").is_dir():
            return True
        return step.device == CPU and "gate" in step.step.profiles and self._declarations.project.refuse_reads

    def problem(self, step: PlannedStep, notes: Notes) -> str:
        """Why what a step read cannot stand; empty where every file selects it.

        Folders that it listed are noted and not asked about: tools list what they never open, and which names of a
        folder matter no note says.
        """
        if notes.lost:
            return notes.lost
        if not notes.began and argument_list(step.step.command)[0] == sys.executable:
            return "none of its processes noted what it read: its Python does not load the `sitecustomize` of its path"
        read = sorted(notes.files & self.tracked)
        if not read or not (self._root / "ci/areas").is_dir():  # a plan of nothing that is declared here
            return ""
        if any(area.always for area, one in self._declarations.steps() if one.key == step.step.key):
            return ""
        missed = [name for name in read if not self._selects(name, step.step.key)]
        if not missed:
            return ""
        more = f" and {count(len(missed) - 1, 'more file')}" if len(missed) > 1 else ""
        verb = "do" if more else "does"
        return (
            f"it read {missed[0]}{more}, which {verb} not select it ({READS_FILE} has all): name what it reads in its "
            f"`reads` or `imports` or in `paths` of the area {step.area}, or do not read it"
        )

    def _selects(self, name: str, key: str) -> bool:
        if name not in self._steps:
            self._steps[name] = frozenset(select(self._declarations.areas, [name], self._graph).reasons)
        return key in self._steps[name] or name in self._own

    @cached_property
    def _own(self) -> frozenset[str]:
        """Modules that hilgate itself adds to a step of pytest, and what they import, where the checkout has them."""
        if self._graph.problem:
            return frozenset()
        modules = self._graph.reached((PYTEST_PLUGIN, LISTING_PLUGIN))
        return frozenset(name for name in self.tracked if self._graph.packages.module_of(name) in modules)
