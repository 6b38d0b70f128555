"""From a file of `python -m benchmarks.run` to the lines of one build, so that kernel times have a history too."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hilgate.errors import RecordsError
from hilgate.history.collect import build_id, short
from hilgate.history.lines import BuildLine, CheckLine, StepLine
from hilgate.history.store import Entry
from hilgate.model import Outcome, Ruling

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.model import Number


class Measured(BaseModel):
    """What the history keeps of one line that `python -m benchmarks.run` wrote; its other keys stay in that file."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    case: str = Field(min_length=1)
    op: str
    hardware: str = Field(min_length=1)
    commit: str = Field(min_length=7)
    peer: str
    ours_us: float | None
    spread: float | None
    peer_us: float | None
    gbps: float | None
    rel_error: float | None
    trouble: str


def of_benchmarks(path: Path, *, measured: dt.datetime, branch: str) -> Entry:
    """The lines of a recorded benchmark run: one step, and a check per case.

    Args:
        path: A file of `python -m benchmarks.run`.
        measured: When; the file itself does not say.
        branch: As for `of_build`.

    Raises:
        RecordsError: The file is missing, empty, of two commits or devices, or a line is not one of a benchmark.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordsError(f"no benchmarks: {error.strerror}", where=str(path)) from None
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            rows.append(Measured.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = ".".join(str(part) for part in first["loc"])
            raise RecordsError(
                f"not a line of benchmarks: {at}: {first['msg']}", where=f"{path}:{number}", remedy="record it again"
            ) from None
    if len({(row.commit, row.hardware) for row in rows}) != 1:
        what = "is empty" if not rows else "mixes runs of two commits or devices"
        raise RecordsError(f"the file {what}", where=str(path), remedy="add one recorded run at a time")
    commit, hardware = rows[0].commit, rows[0].hardware
    shared: dict[str, object] = {
        "build": build_id(commit, hardware, hashlib.sha256(content).hexdigest(), measured.isoformat()),
        "commit": commit,
        "branch": branch,
        "time": measured.astimezone(dt.UTC),
    }
    wrong = [row for row in rows if row.ours_us is None]
    outcome = Outcome.FAIL if wrong else Outcome.PASS
    place: dict[str, object] = {"key": "benchmarks", "step": "benchmarks", "device": hardware}
    nothing = {"seconds": 0.0, "gpu_minutes": 0.0}
    build = {
        "profile": "benchmarks",
        "why": f"{len(rows)} cases",
        "steps": 1,
        "step_minutes": 0.0,
        "queue_minutes": 0.0,
    }
    step = {"area": "benchmarks", "queue": "", "node": "", "queue_seconds": 0.0, "attempts": 1, "flaky": ()}
    step |= {"ruling": Ruling.REGRESSION if wrong else Ruling.PASS, "passed": len(rows) - len(wrong)}
    return Entry(
        BuildLine.model_validate(shared | nothing | build | {"outcome": outcome}),
        (StepLine.model_validate(shared | nothing | place | step | {"outcome": outcome, "failed": len(wrong)}),),
        tuple(CheckLine.model_validate(shared | place | _case(row)) for row in rows),
    )


def _case(row: Measured) -> dict[str, object]:
    measured = {"ours_us": row.ours_us, "spread_us": row.spread, "peer_us": row.peer_us, "gbps": row.gbps}
    measured["rel_error"] = row.rel_error
    numbers: dict[str, Number] = {name: v for name, v in measured.items() if v is not None and math.isfinite(v)}
    outcome = Outcome.PASS if row.ours_us is not None else Outcome.FAIL
    message = "" if outcome is Outcome.PASS else short(row.trouble or "it has no time")
    labels = {"op": row.op, "peer": row.peer}
    return {"id": row.case, "outcome": outcome, "message": message, "labels": labels, "numbers": numbers}
