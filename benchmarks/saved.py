"""Records read back from a results file, each one checked before a figure is drawn from it.

A file is one run: every line has the hardware, the versions, the commit and the measured rates of the first. What a
line derives (ratio, bandwidth, fraction) must follow from what it measured and from the case of that name, so that a
case that changed after its measurement is noticed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from .cases import CASES, Case
from .record import Record, compared, rates_of_use

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDING = 2e-4
"""More than three roundings to five significant digits (`Record.line`), 5e-5 each: two times and their quotient."""

_ADAPTER = TypeAdapter(Record)
_CASES = {case.name: case for case in CASES}


class RecordsError(ValueError):
    """A results file cannot be believed; the message has file, line and what to do."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where}: {problem}\n  to do: run `python -m benchmarks.run --out` again; never edit results by hand"
        )


@dataclass(frozen=True)
class Row:
    """A record and the case that it measured."""

    case: Case
    record: Record


def read(path: Path) -> list[Row]:
    """Return the rows of a results file in its order.

    Raises:
        RecordsError: The file is missing or empty, a line is no record (a key missing, unknown or of the wrong type,
            NaN or infinity), its case is unknown or was there before, its figures contradict each other or the case,
            or it comes from another run than the first line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RecordsError(str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RecordsError(str(path), f"is not UTF-8 ({error.reason})") from error
    rows: list[Row] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        record = _parse(line, where)
        if record.case in lines_of:
            raise RecordsError(where, f"case {record.case!r} is already in line {lines_of[record.case]}")
        lines_of[record.case] = number
        if record.case not in _CASES:
            raise RecordsError(where, f"got case {record.case!r}; expected the name of one in benchmarks/cases.py")
        row = Row(_CASES[record.case], record)
        for problem in itertools.chain(_contradictions(row), _other_runs(record, [row.record for row in rows])):
            raise RecordsError(where, problem)
        rows.append(row)
    if not rows:
        raise RecordsError(f"{path}:1", "the file is empty; expected one record a line")
    return rows


def _parse(line: str, where: str) -> Record:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        got = "" if first["type"] in {"missing", "json_invalid"} else f"; got {first['input']!r}"
        raise RecordsError(where, f"{f'key {key!r}: ' if key else ''}{first['msg']}{got}") from error


def _contradictions(row: Row) -> Iterator[str]:
    """Say what in a record contradicts itself or its case."""
    case, record = row.case, row.record
    yield from _differences(record, case, ("op", "peer", "yardstick"), "as benchmarks/cases.py has the case")
    for name in ("ours_us", "peer_us", "yardstick_rate"):
        if (value := getattr(record, name)) is not None and value <= 0:
            yield f"{name}: got {value}; expected more than 0"
    for side, time, spread, error in (
        ("ours", record.ours_us, record.spread, record.rel_error),
        ("peer", record.peer_us, record.peer_spread, record.peer_rel_error),
    ):
        if time is not None and (spread is None or error is None):
            yield f"{side}: got a time without its spread or its error; expected all three"
        if (time is None) != (f"{side}: " in record.trouble):
            yield f"{side}: got the time {time} with the trouble {record.trouble!r}; expected one of the two"
    derived = compared(case, record.ours_us, record.peer_us, record.yardstick_rate)
    for name, expected in derived.items():
        got = getattr(record, name)
        if (got is None) != (expected is None):
            yield f"{name}: got {got}; expected {expected} by the times"
        elif got is not None and not math.isclose(got, expected, rel_tol=ROUNDING):
            yield f"{name}: got {got}; expected {expected:.5g} by the times and by benchmarks/cases.py"


def _other_runs(record: Record, earlier: list[Record]) -> Iterator[str]:
    """Say in what a record differs from the run that the earlier ones belong to."""
    for first in earlier[:1]:
        yield from _differences(record, first, ("hardware", "versions", "commit"), "as in line 1: a file is one run")
    rate = rates_of_use(earlier).get(record.yardstick, record.yardstick_rate)
    if record.yardstick_rate != rate:
        yield f"yardstick_rate: got {record.yardstick_rate}; expected {rate}, as in an earlier line: a file is one run"


def _differences(record: Record, other: object, names: tuple[str, ...], why: str) -> Iterator[str]:
    for name in names:
        if (got := getattr(record, name)) != (expected := getattr(other, name)):
            yield f"{name}: got {got!r}; expected {expected!r}, {why}"
