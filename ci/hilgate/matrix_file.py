"""The cells of a matrix as a file beside the other reports: a JSON list, and each record can be read alone.

Kinds of records: `cell`; `check`, which lacks a label and so has no place; and `step`, which says why cells of a step
may be missing or do not count. A file with a `step` in it is not the whole table.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hilgate.matrix import Table
    from hilgate.model import Plan

_OPENING = '[\n{{"matrix": "{name}"'
"""How each of these files begins, so that one is known by its name and first bytes whatever plan it was of."""


def write(folder: Path, plan: Plan, digest: str, tables: Iterable[Table]) -> tuple[Path, ...]:
    """Write each file that the plan's steps name, and remove those of other plans; returns the paths.

    Args:
        folder: A results folder.
        plan: What was expected.
        digest: `plan_digest(plan)`, of the whole plan where only a part of it is reported.
        tables: `matrix.tables`; those of one file are the same declared step on several devices.
    """
    clear(folder)
    lines: dict[str, list[str]] = {}
    for table in tables:
        lines.setdefault(table.spec.file, []).extend(json.dumps(record) for record in records(table, plan, digest))
    for name, found in lines.items():
        fresh = folder / f"{name}.new"
        fresh.write_text("[\n" + ",\n".join(found) + "\n]\n", encoding="utf-8")
        fresh.replace(folder / name)
    return tuple(folder / name for name in lines)


def records(table: Table, plan: Plan, digest: str) -> Iterator[dict[str, object]]:
    """The records of one table, in the order in which the checks ran; a `step` comes last. There is always one."""
    attempt = table.attempt
    about: dict[str, object] = {
        "step": table.step.key,
        "device": table.step.device,
        "command": table.step.command,
        "commit": plan.commit,
        "dirty": plan.dirty,
        "plan_digest": digest,
        "environment": attempt.record.environment.model_dump(mode="json") if attempt else None,
    }
    for cell in table.cells:
        names = {table.spec.rows: cell.row or None, table.spec.columns: cell.column or None}
        options = table.spec.options({label: value for label, value in names.items() if value})
        yield {
            "matrix": table.spec.file,
            "kind": "cell" if all(names.values()) else "check",
            **names,
            "outcome": cell.outcome.value,
            "reason": cell.reason,
            "seconds": cell.seconds,
            "checks": list(cell.checks),
            "labels": dict(cell.labels),
            "numbers": dict(cell.numbers),
            "reproduce": f"hilgate run {table.step.key} {options}".rstrip(),
            **about,
        }
    if table.lack or not table.grid:
        yield {
            "matrix": table.spec.file,
            "kind": "step",
            table.spec.rows: None,
            table.spec.columns: None,
            "outcome": table.verdict.outcome.value,
            "reason": table.lack or f"no check has the labels {table.spec.rows} and {table.spec.columns}",
            "seconds": table.verdict.seconds or 0.0,
            "checks": [],
            "labels": {},
            "numbers": {},
            "reproduce": table.verdict.reproduce,
            **about,
        }


def found(folder: Path) -> tuple[Path, ...]:
    """The files of matrices in a results folder, of whatever plan."""
    return tuple(path for path in sorted(folder.glob("*.json")) if _is_ours(path))


def clear(folder: Path) -> None:
    """Remove them: no table may outlive the verdict that it belonged to."""
    for path in found(folder):
        path.unlink()


def _is_ours(path: Path) -> bool:
    opening = _OPENING.format(name=path.name).encode()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(opening)) == opening
