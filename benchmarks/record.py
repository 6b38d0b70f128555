# SPDX-License-Identifier: Apache-2.0
"""Records of a run: made, written, read back with every figure checked, and shown as a table.

A side whose result is wrong has no time: there is no way to report one. A file is one run: every line has the hardware,
the versions and the commit of the first. A run may take several sessions, on cards of one kind; every line has the
measured rates of its own. What a line derives (ratio, bandwidth, fraction) must
follow from what it measured and from the case of that name, so that a case that changed after its measurement is
noticed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat, TypeAdapter, ValidationError

from .cases import CASES, BenchmarkCase, Op, Yardstick

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


ROUNDING = 2e-4
"""More than three roundings to five significant digits (`Record.line`), 5e-5 each: two times and their quotient."""
UNITS = {"read": (1e9, "GB/s"), "copy": (1e9, "GB/s"), "matmul": (1e12, "TFLOP/s"), "launch": (1.0, "a second")}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One side of a case as it came from the device."""

    seconds: tuple[float, ...] = ()
    """One call, once per replay."""
    error: float | None = None
    """Against the oracle, over the outputs of these replays; None if it did not run."""
    bound: float = 0.0
    trouble: str = ""
    """What stopped it, if anything did."""

    @property
    def right(self) -> bool:
        """Whether it ran and its error is within the bound (NaN is not)."""
        return not self.trouble and self.error is not None and self.error <= self.bound

    @property
    def median_us(self) -> float | None:
        """Median time of a call in us; None unless `right`."""
        return statistics.median(self.seconds) * 1e6 if self.right and self.seconds else None

    @property
    def spread_us(self) -> float | None:
        """Longest minus shortest in us; None unless `right`."""
        return (max(self.seconds) - min(self.seconds)) * 1e6 if self.right and self.seconds else None


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the results file. Times in us, `spread` = max - min over the replays; None where there is none."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
    """How `read` takes it."""

    case: str
    op: Op
    ours_us: PositiveFloat | None
    spread: float | None
    peer: str
    peer_us: PositiveFloat | None
    peer_spread: float | None
    vendor_us: PositiveFloat | None
    """Microseconds of the vendor's library on the same K and V without blocks, where it has the operation."""
    vendor_spread: float | None
    ratio: float | None
    """Peer time / our time: above 1 we are faster."""
    gbps: float | None
    tflops: float | None
    """Attention only."""
    fraction: float | None
    """Share of the yardstick that was measured in the same run."""
    yardstick: Yardstick
    yardstick_rate: PositiveFloat
    """Bytes/s (read, copy), FLOP/s (matmul) or launches/s (launch)."""
    rel_error: float | None
    peer_rel_error: float | None
    vendor_rel_error: float | None
    goal: str
    """"met", or what is missing."""
    trouble: str
    hardware: str
    versions: dict[str, str]
    commit: str
    session: int
    """Number of the session, from 1. Both sides of a line, and the rate they are held against, were measured in it."""

    def line(self) -> str:
        """Return the record as one line of JSON; five significant digits are more than the spread allows."""
        fields = dataclasses.asdict(self)
        short = {name: float(f"{value:.5g}") for name, value in fields.items() if isinstance(value, float)}
        return json.dumps(fields | short, allow_nan=False)


def build(
    case: BenchmarkCase,
    ours: Measured,
    peer: Measured,
    vendor: Measured | None = None,
    *,
    rates: Mapping[Yardstick, float],
    earlier: Sequence[Record],
    hardware: str,
    versions: dict[str, str],
    commit: str,
    session: int = 1,
) -> Record:
    """Return the record of a case; `earlier` holds the records that a goal may refer to."""
    time, peer_time = ours.median_us, peer.median_us
    rate = rates[case.yardstick]
    derived = compared(case, time, peer_time, rate)
    missing = _missing(case, time, derived["ratio"], derived["fraction"], earlier)
    trouble = [
        f"{name}: {side.trouble or f'WRONG, error {side.error:.1e}'}"
        for name, side in (("ours", ours), ("peer", peer), ("vendor", vendor))
        if side is not None and not side.right
    ]
    return Record(
        case=case.name,
        op=case.op,
        ours_us=time,
        spread=ours.spread_us,
        peer=case.peer,
        peer_us=peer_time,
        peer_spread=peer.spread_us,
        vendor_us=vendor and vendor.median_us,
        vendor_spread=vendor and vendor.spread_us,
        **derived,
        yardstick=case.yardstick,
        yardstick_rate=rate,
        rel_error=_finite(ours.error),
        peer_rel_error=_finite(peer.error),
        vendor_rel_error=vendor and _finite(vendor.error),
        goal="; ".join(missing) or "met",
        trouble="; ".join(trouble),
        hardware=hardware,
        versions=versions,
        commit=commit,
        session=session,
    )


def compared(case: BenchmarkCase, time: float | None, peer_time: float | None, rate: float) -> dict[str, float | None]:
    """Return what two times (us) and the yardstick's rate say of a case: ratio, gbps, tflops and fraction."""
    if time is None:
        return dict.fromkeys(("ratio", "gbps", "tflops", "fraction"))
    ratio = peer_time / time if peer_time is not None else None
    if case.host:
        return {"ratio": ratio, "gbps": None, "tflops": None, "fraction": 1e6 / time / rate}
    gbps = case.bytes_moved() / time / 1e3
    tflops = case.flops() / time / 1e6 if case.flops() else None
    done = tflops * 1e12 if case.yardstick == "matmul" and tflops else gbps * 1e9
    return {"ratio": ratio, "gbps": gbps, "tflops": tflops, "fraction": done / rate}


def rates_of_use(records: Sequence[Record]) -> dict[Yardstick, float]:
    """Return the measured rates that the records refer to; all are of one session."""
    return {record.yardstick: record.yardstick_rate for record in records}


def _missing(
    case: BenchmarkCase, time: float | None, ratio: float | None, fraction: float | None, earlier: Sequence[Record]
) -> list[str]:
    """Return which conditions of the goal do not hold; one that cannot be evaluated does not hold."""
    goal, missing = case.goal, []
    if ratio is None or ratio < goal.ratio:
        missing.append(f"x{goal.ratio:g}")
    if goal.fraction is not None and (fraction is None or fraction < goal.fraction):
        missing.append(f"{goal.fraction:.0%} of {case.yardstick}")
    if goal.like is not None:
        base = next((record.ours_us for record in earlier if record.case == goal.like), None)
        if base is None or time is None or time > 1.05 * base:
            missing.append("within 5%")
    return missing


def _finite(error: float | None) -> float | None:
    """JSON has no infinity; `trouble` says what it was."""
    return error if error is not None and math.isfinite(error) else None


def environment(records: Sequence[Record]) -> str:
    """Return what was measured with and the rates of the machine, as one sentence."""
    record = records[0]
    sessions: dict[int, list[Record]] = {}
    for each in records:
        sessions.setdefault(each.session, []).append(each)
    parts = []
    for number, rows in sorted(sessions.items()):
        speeds = [f"{name} {rate / UNITS[name][0]:,.0f} {UNITS[name][1]}" for name, rate in rates_of_use(rows).items()]
        operations = ", ".join(dict.fromkeys(row.op for row in rows))
        parts.append(
            (f"session {number} ({len(rows)} cases: {operations}): " if len(sessions) > 1 else "") + ", ".join(speeds)
        )
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    return f"{record.hardware}; {', '.join(versions)}; commit {record.commit}; {'; '.join(parts)}."


def table(records: Sequence[Record]) -> str:
    """Return the records as a Markdown table."""
    lines = [
        "| case | ours us (spread) | peer us (spread) | ratio | vendor us, share | rate | of | error, peer's | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        cells = (
            record.case,
            _time(record.ours_us, record.spread),
            _time(record.peer_us, record.peer_spread),
            "-" if record.ratio is None else f"{record.ratio:.2f}",
            _vendor(record),
            _rate(record),
            "-" if record.fraction is None else f"{record.fraction:.0%}{record.yardstick[0]}",
            f"{_error(record.rel_error)}, {_error(record.peer_rel_error)}",
            _goal(record),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(median: float | None, spread: float | None) -> str:
    return "-" if median is None or spread is None else f"{median:,.1f} ({spread:,.1f})"


def _vendor(record: Record) -> str:
    """Return the vendor's time, and the share of its rate that ours has."""
    if record.vendor_us is None or record.ours_us is None:
        return "-"
    return f"{record.vendor_us:,.1f}, {record.vendor_us / record.ours_us:.2f}"


def _rate(record: Record) -> str:
    if record.yardstick == "launch":
        return "-" if record.ours_us is None else f"{1e6 / record.ours_us:,.0f} calls/s"
    if record.yardstick == "matmul":
        return "-" if record.tflops is None else f"{record.tflops:,.0f} TFLOP/s"
    return "-" if record.gbps is None else f"{record.gbps:,.0f} GB/s"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}" if error else "0"


def _goal(record: Record) -> str:
    text = "met" if record.goal == "met" else f"**missed: {record.goal}**"
    return f"{text}; {record.trouble}".replace("|", "/") if record.trouble else text


class BenchmarkRecordError(ValueError):
    """A results file cannot be believed; the message has file, line and what to do."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where}: {problem}\n  to do: run `python -m benchmarks.run --out` again; never edit results by hand"
        )


@dataclasses.dataclass(frozen=True)
class BenchmarkRow:
    """A record and the case that it measured."""

    case: BenchmarkCase
    record: Record


def read(path: Path) -> list[BenchmarkRow]:
    """Return the rows of a results file in its order.

    Raises:
        RecordsError: The file is missing or empty, a line is no record (a key missing, unknown or of the wrong type,
            NaN or infinity), its case is unknown or was there before, its figures contradict each other or the case,
            or it comes from another run than the first line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchmarkRecordError(str(path), f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BenchmarkRecordError(str(path), f"is not UTF-8 ({error.reason})") from error
    cases = {case.name: case for case in CASES}
    rows: list[BenchmarkRow] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        record = _parse(line, where)
        if record.case in lines_of:
            raise BenchmarkRecordError(where, f"case {record.case!r} is already in line {lines_of[record.case]}")
        lines_of[record.case] = number
        if record.case not in cases:
            raise BenchmarkRecordError(
                where, f"got case {record.case!r}; expected the name of one in benchmarks/cases.py"
            )
        row = BenchmarkRow(cases[record.case], record)
        for problem in itertools.chain(_contradictions(row), _other_runs(record, [row.record for row in rows])):
            raise BenchmarkRecordError(where, problem)
        rows.append(row)
    if not rows:
        raise BenchmarkRecordError(f"{path}:1", "the file is empty; expected one record a line")
    return rows


def _parse(line: str, where: str) -> Record:
    try:
        return TypeAdapter(Record).validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        got = "" if first["type"] in {"missing", "json_invalid"} else f"; got {first['input']!r}"
        raise BenchmarkRecordError(where, f"{f'key {key!r}: ' if key else ''}{first['msg']}{got}") from error


def _contradictions(row: BenchmarkRow) -> Iterator[str]:
    """Say what in a record contradicts itself or its case."""
    case, record = row.case, row.record
    yield from _differences(record, case, ("op", "peer", "yardstick"), "as benchmarks/cases.py has the case")
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
    same = [each for each in earlier if each.session == record.session]
    rate = rates_of_use(same).get(record.yardstick, record.yardstick_rate)
    if record.yardstick_rate != rate:
        yield f"yardstick_rate: got {record.yardstick_rate}; expected {rate}, as in an earlier line of its session"


def _differences(record: Record, other: object, names: tuple[str, ...], why: str) -> Iterator[str]:
    for name in names:
        if (got := getattr(record, name)) != (expected := getattr(other, name)):
            yield f"{name}: got {got!r}; expected {expected!r}, {why}"
