# SPDX-License-Identifier: Apache-2.0
"""The drift gate: ours beside the engine's own attention by their log-probabilities, each asked in its own process.

Exact match sees a fault when an answer becomes wrong; the distributions behind it move long before that. Nothing is
stored: the engine's own attention answers in the same job, and what it differs from itself is what rounding does.
Reading all tokens at once and writing them one by one round differently, so each has a rounding of its own. The same
rule must notice a block of tokens that was replaced, or a pass means nothing.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hileval.distances import Drift, Floor
from hileval.engines import EngineError
from hileval.records.sides import Side
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.gates.declare import DriftGate
    from hileval.gates.resolve import ResolvedDrift
    from hileval.records.sides import SideName
    from hilgate.model import Number


def run_drift(drift: ResolvedDrift, out: Path) -> list[Check]:
    """Every side in a process of its own: a plugin cannot leave one that it has joined. `out` keeps their answers.

    Raises:
        EngineError: A side ended without an answer.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = side_files(drift.declared, out)
    for which, file in files.items():
        file.unlink(missing_ok=True)
        others = [other for other in files if other != "peer"] if which == "peer" else []
        given = [word for other in others for word in ("--given", f"{other}={files[other]}")]
        command = [sys.executable, "-m", "hileval.ask", "side", drift.name, which, "--file", str(file), *given]
        if status := subprocess.run(command, check=False).returncode:
            raise EngineError(f"{which} ended with status {status}", where=drift.name, remedy="read what it says above")
    return judge_sides(drift, out)


def judge_sides(drift: ResolvedDrift, out: Path) -> list[Check]:
    """The checks of a drift gate from the answers in a folder.

    Raises:
        RecordsError: A side is missing or damaged.
    """
    sides = {which: Side.unpack(file) for which, file in side_files(drift.declared, out).items()}
    return compare_sides(drift.name, sides["ours"], sides["peer"], drift.declared.floor, sides.get("second"))


def side_files(drift: DriftGate, out: Path) -> dict[SideName, Path]:
    """Where the answers of each side are, in the order of asking: the peer reads what the others wrote."""
    names: tuple[SideName, ...] = ("ours", "second", "peer") if drift.second else ("ours", "peer")
    return {which: out / f"{which}.json.gz" for which in names}


def compare_sides(name: str, ours: Side, peer: Side, floor: Floor, second: Side | None = None) -> list[Check]:
    """The checks of a drift gate, and who served it."""
    reads = [Drift.rounding(peer.read_alone, peer.read)]
    writes = [Drift.rounding(peer.wrote, peer.read_again["peer"])]
    if second is not None:
        reads.append(Drift.rounding(second.read, peer.read))
        writes.append(Drift.rounding(second.wrote, peer.read_again["second"]))
    unchanged = [row[-len(changed_rows) :] for row, changed_rows in zip(peer.read, peer.changed, strict=True)]
    served = [side.served for side in (ours, peer, second) if side is not None and side.served is not None]
    checks = judge_drift(
        name,
        Compared(Drift.between(ours.read, peer.read), Drift.largest(*reads)),
        Compared(Drift.between(ours.wrote, peer.read_again["ours"]), Drift.largest(*writes)),
        Drift.between(peer.changed, unchanged),
        floor,
    )
    if any(check.outcome is not Outcome.PASS for check in served):
        checks = [check.model_copy(update={"outcome": Outcome.DID_NOT_RUN}) for check in checks]
    return [*served, *_second_is_another(name, peer, second), *checks]


def _second_is_another(name: str, peer: Side, second: Side | None) -> list[Check]:
    """A finding if the second trusted attention is the peer's own, which would make rounding look too small."""
    if second is None or peer.served is None or second.served is None:
        return []
    backends = [side.served.labels.get("backend") for side in (peer, second) if side.served is not None]
    if None in backends or backends[0] != backends[1]:
        return []
    message = (
        f"the second trusted attention is the peer's own, {backends[0]}: how much two attentions differ is not known "
        "here; name two backends, `peer` and `second`, that this machine serves differently"
    )
    return [Check(id=f"{name}/second", outcome=Outcome.INCONCLUSIVE, message=message)]


@dataclass(frozen=True)
class Compared:
    """Ours beside the peer, in one way of asking."""

    ours: Drift
    """Ours from the peer."""
    rounding: Drift
    """Right attentions from one another: the peer from itself, and from a second trusted one."""


def judge_drift(name: str, reading: Compared, writing: Compared, control: Drift, floor: Floor) -> list[Check]:
    """The checks of a drift gate.

    Args:
        name: The gate's key; check ids start with it.
        reading: All tokens are given at once. Rounding: the peer reading each sequence alone, and a second attention.
        writing: Tokens are written one by one, and the peer reads them at once. Rounding: the peer writing, and a
            second attention writing, from the peer reading what they wrote.
        control: The peer from itself, with one block of each sequence replaced, at the places after it.
        floor: Nats of each figure that are explained anyway.
    """
    ways = {"reading": reading, "writing": writing}
    noticed = {way: not control.within(compared.rounding, floor) for way, compared in ways.items()}
    limits = "; ".join(f"{way} may be off by {compared.rounding.limit(floor)}" for way, compared in ways.items())
    checks = [
        Check(
            id=f"{name}/control",
            outcome=Outcome.PASS if all(noticed.values()) else Outcome.INCONCLUSIVE,
            message=f"a replaced block {'is' if all(noticed.values()) else 'IS NOT'} noticed: {control} nats of "
            f"median / 90 % / worst; {limits}",
            numbers=_numbers(control),
        )
    ]
    for way, compared in ways.items():
        limit = compared.rounding.limit(floor)
        close = compared.ours.within(compared.rounding, floor)
        outcome = Outcome.PASS if noticed[way] else Outcome.INCONCLUSIVE
        checks.append(
            Check(
                id=f"{name}/{way}",
                outcome=outcome if close else Outcome.FAIL,
                message=f"{compared.ours} nats at {compared.ours.places} places "
                f"{'are' if close else 'ARE NOT'} explained: rounding of {compared.rounding} explains up to {limit}",
                numbers=_numbers(compared.ours),
            )
        )
    return checks


def _numbers(drift: Drift) -> dict[str, Number]:
    return {key: value if math.isfinite(value) else 1e9 for key, value in asdict(drift).items()}
