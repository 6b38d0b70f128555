# SPDX-License-Identifier: Apache-2.0
"""Quarantine (`ci/quarantine.yaml`): checks that may fail until a date by which somebody has promised to mend them.

What counts is the file of the merge base: a change cannot put its own failure into quarantine. It may take an entry
out, which counts at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.declare import yaml
from hilgate.declare.load import InvalidDeclarationsError
from hilgate.git import file_at
from hilgate.model.declaration import LONGEST_QUARANTINE, Quarantine, Quarantined
from hilgate.text import suggest

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from hilgate.declare.load import Declarations
    from hilgate.declare.yaml import Document
    from hilgate.model.plan import PlannedStep

QUARANTINE_FILE = "ci/quarantine.yaml"
USED_FILE = "quarantine.json"
"""The one that a verdict was made with, in the results folder."""


@dataclass(frozen=True)
class Entries:
    """The quarantine on a day."""

    tests: tuple[Quarantined, ...]
    today: dt.date

    def of(self, step: PlannedStep) -> frozenset[str]:
        """Ids of the checks of this step that may fail."""
        return frozenset(one.test for one in self.tests if _covers(one, step) and not self._is_expired(one))

    def expired(self, step: PlannedStep | None = None) -> tuple[str, ...]:
        """A sentence for each entry whose day has come: of a step, or of all, whether or not their step is planned."""
        found = [one for one in self.tests if self._is_expired(one) and (step is None or _covers(one, step))]
        return tuple(f"quarantine of {one.test} expired on {one.expires}: mend it or take it out" for one in found)

    def _is_expired(self, one: Quarantined) -> bool:
        return self.today >= one.expires or one.expires - one.added > LONGEST_QUARANTINE


def load_quarantine(root: Path, declarations: Declarations) -> Quarantine:
    """Read and check the file of the working tree; without one nothing is in quarantine.

    Raises:
        InvalidDeclarationsError: With every mistake: unknown steps or devices, dates, entries that stand twice.
    """
    path = root / QUARANTINE_FILE
    if not path.exists():
        return Quarantine()
    document = yaml.read(path, root, Quarantine)
    if document.value is not None:
        _check(document, document.value, declarations)
    if document.mistakes:
        raise InvalidDeclarationsError(document.mistakes)
    assert document.value is not None
    return document.value


def effective(root: Path, merge_base: str, here: Quarantine) -> Quarantine:
    """The quarantine that counts for a change: entries of the merge base that it has not taken out.

    `here` is the quarantine of the working tree, which counts where nothing is compared (`merge_base` is empty).

    Raises:
        CannotRunHereError: The merge base is not in this checkout.
        InvalidDeclarationsError: The merge base's own file is invalid.
    """
    if not merge_base:
        return here
    text = file_at(root, merge_base, QUARANTINE_FILE)
    if text is None:
        return Quarantine()
    document = yaml.parse(text, f"{merge_base[:12]}:{QUARANTINE_FILE}", Quarantine)
    if document.value is None:
        raise InvalidDeclarationsError(document.mistakes)
    kept = {_identity(one) for one in here.tests}
    return Quarantine(tests=tuple(one for one in document.value.tests if _identity(one) in kept))


def _covers(one: Quarantined, step: PlannedStep) -> bool:
    return one.step == step.step.key and (not one.devices or step.device in one.devices)


def _identity(one: Quarantined) -> tuple[str, str, tuple[str, ...]]:
    return one.test, one.step, tuple(sorted(one.devices))


def _check(document: Document[Quarantine], quarantine: Quarantine, declarations: Declarations) -> None:
    steps = {step.key: step for _, step in declarations.steps()}
    for number, one in enumerate(quarantine.tests):
        step = steps.get(one.step)
        if step is None:
            document.blame(("tests", number, "step"), f"no step is called {one.step!r}", suggest(one.step, steps))
            continue
        for place, device in enumerate(one.devices):
            if device not in step.devices:
                what = f"the step {one.step} does not run on {device!r}"
                document.blame(("tests", number, "devices", place), what, f"name one of {', '.join(step.devices)}")


def read_used(folder: Path) -> Quarantine:
    """The quarantine that a verdict was made with; an empty one where none was kept.

    Raises:
        RecordsError: It is not a quarantine.
    """
    path = folder / USED_FILE
    return Quarantine.load(path, "judge again: `hilgate judge` writes it") if path.is_file() else Quarantine()
