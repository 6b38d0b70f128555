"""The record of a case, and the table. A side whose result is wrong has no time: there is no way to report one."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from typing import TYPE_CHECKING, ClassVar

from .cases import Op, Yardstick  # noqa: TC001  saved.py evaluates the annotations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .cases import Case


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
    """How `saved.py` reads it."""

    case: str
    op: Op
    ours_us: float | None
    spread: float | None
    peer: str
    peer_us: float | None
    peer_spread: float | None
    ratio: float | None
    """Peer time / our time: above 1 we are faster."""
    gbps: float | None
    tflops: float | None
    """Attention only."""
    fraction: float | None
    """Of the yardstick measured in the same run."""
    yardstick: Yardstick
    yardstick_rate: float
    """Bytes/s (read, copy) or FLOP/s (matmul)."""
    rel_error: float | None
    peer_rel_error: float | None
    goal: str
    """"met", or what is missing."""
    trouble: str
    hardware: str
    versions: dict[str, str]
    commit: str

    def line(self) -> str:
        """Return the record as one line of JSON; five significant digits are more than the spread allows."""
        fields = dataclasses.asdict(self)
        short = {name: float(f"{value:.5g}") for name, value in fields.items() if isinstance(value, float)}
        return json.dumps(fields | short, allow_nan=False)


def finding(record: Record) -> str:
    """Return the record as a line of `findings.jsonl`, so that a step of a build remembers its times."""
    numbers = {"ours_us": record.ours_us, "spread_us": record.spread, "peer_us": record.peer_us, "gbps": record.gbps}
    numbers["rel_error"] = record.rel_error
    right = record.ours_us is not None
    check = {
        "id": record.case,
        "outcome": "pass" if right else "fail",
        "message": "" if right else record.trouble or "it has no time",
        "labels": {"op": record.op, "peer": record.peer},
        "numbers": {name: value for name, value in numbers.items() if value is not None},
    }
    return json.dumps(check, allow_nan=False)


def build(
    case: Case,
    ours: Measured,
    peer: Measured,
    *,
    rates: Mapping[Yardstick, float],
    earlier: Sequence[Record],
    hardware: str,
    versions: dict[str, str],
    commit: str,
) -> Record:
    """Return the record of a case; `earlier` holds the records that a goal may refer to."""
    time, peer_time = ours.median_us, peer.median_us
    rate = rates[case.yardstick]
    derived = compared(case, time, peer_time, rate)
    missing = _missing(case, time, derived["ratio"], derived["fraction"], earlier)
    trouble = [
        f"{name}: {side.trouble or f'WRONG, error {side.error:.1e}'}"
        for name, side in (("ours", ours), ("peer", peer))
        if not side.right
    ]
    return Record(
        case=case.name,
        op=case.op,
        ours_us=time,
        spread=ours.spread_us,
        peer=case.peer,
        peer_us=peer_time,
        peer_spread=peer.spread_us,
        **derived,
        yardstick=case.yardstick,
        yardstick_rate=rate,
        rel_error=_finite(ours.error),
        peer_rel_error=_finite(peer.error),
        goal="; ".join(missing) or "met",
        trouble="; ".join(trouble),
        hardware=hardware,
        versions=versions,
        commit=commit,
    )


def compared(case: Case, time: float | None, peer_time: float | None, rate: float) -> dict[str, float | None]:
    """Return what two times (us) and the yardstick's rate say of a case: ratio, gbps, tflops and fraction."""
    if time is None:
        return dict.fromkeys(("ratio", "gbps", "tflops", "fraction"))
    gbps = case.bytes_moved() / time / 1e3
    tflops = case.flops() / time / 1e6 if case.flops() else None
    done = tflops * 1e12 if case.yardstick == "matmul" and tflops else gbps * 1e9
    ratio = peer_time / time if peer_time is not None else None
    return {"ratio": ratio, "gbps": gbps, "tflops": tflops, "fraction": done / rate}


def rates_of_use(records: Sequence[Record]) -> dict[Yardstick, float]:
    """Return the measured rates that the records refer to."""
    return {record.yardstick: record.yardstick_rate for record in records}


def _missing(
    case: Case, time: float | None, ratio: float | None, fraction: float | None, earlier: Sequence[Record]
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


def table(records: Sequence[Record], rates: Mapping[Yardstick, float]) -> str:
    """Return the table, at most 100 columns wide."""
    read, copy, matmul = rates["read"] / 1e9, rates["copy"] / 1e9, rates["matmul"] / 1e12
    lines = [
        f"read {read:.0f} GB/s, copy {copy:.0f} GB/s, matmul {matmul:.0f} TFLOP/s, measured in this run",
        f"{'case':<30}{'ours us':>8}{'spread':>7}{'peer us':>9}{'ratio':>6}{'GB/s':>6}{'of':>6}{'error':>8} goal",
    ]
    for record in records:
        time, spread, peer = (_number(x, ".1f") for x in (record.ours_us, record.spread, record.peer_us))
        share = _number(record.fraction, ".0%") + record.yardstick[0]
        goal = "met" if record.goal == "met" else f"no: {record.goal}"
        lines.append(
            f"{record.case:<30}{time:>8}{spread:>7}{peer:>9}{_number(record.ratio, '.2f'):>6}"
            f"{_number(record.gbps, '.0f'):>6}{share:>6}{_number(record.rel_error, '.1e'):>8} {goal}"[:100]
        )
        if record.trouble:
            lines.append(f"    {record.trouble}"[:100])
    return "\n".join(lines)


def _finite(error: float | None) -> float | None:
    """JSON has no infinity; `trouble` says what it was."""
    return error if error is not None and math.isfinite(error) else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
