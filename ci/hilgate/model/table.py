# SPDX-License-Identifier: Apache-2.0
"""`<name>.json`: the checks of a step that declares a matrix, on every device that it ran on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hilgate.model import Key, StrictModel
from hilgate.model.record import Check, Environment, Outcome

if TYPE_CHECKING:
    from pathlib import Path


class TableStep(StrictModel):
    """The step of a table on one device."""

    step: Key
    device: Key
    command: str
    outcome: Outcome
    incomplete: str
    """Why the table is not whole; empty when it is."""
    flaky: tuple[str, ...]
    """Ids of checks that failed and then passed."""
    quarantined: tuple[str, ...]
    environment: Environment | None
    """None when the step did not finish."""


class TableCheck(Check):
    """A check of a table, and of which step."""

    step: Key


class TableFile(StrictModel):
    """The file that a step's `matrix` names: the checks of that step, on all devices."""

    table: str
    """Name of the file."""
    schema_version: Literal[1] = 1
    commit: str
    dirty: bool
    plan_digest: str
    steps: tuple[TableStep, ...] = ()
    checks: tuple[TableCheck, ...] = ()


_OPENING = '{{\n "table": "{name}"'
"""How each of these files begins, so that one is known by its name and first bytes whatever plan it was of."""


def tables_in(folder: Path) -> tuple[Path, ...]:
    """The files of tables in a results folder, of whatever plan."""
    return tuple(path for path in sorted(folder.glob("*.json")) if path.is_file() and is_table(path))


def is_table(path: Path) -> bool:
    """Whether a file begins as that of a table of its name."""
    opening = _OPENING.format(name=path.name).encode()
    with path.open("rb") as file:
        return file.read(len(opening)) == opening
