# SPDX-License-Identifier: Apache-2.0
"""Gates of accuracy, resolved for a test: with an engine or a model's folder of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hileval.gates.declare import load_gates
from hileval.gates.resolve import ResolvedGate
from hileval.gates.rule import GateRule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hileval.gates.declare import Gate, Gates


PRE_MERGE = GateRule(
    questions=250,
    seed=3,
    look_every=25,
    first_look=50,
    alpha=0.01,
    margin=0.05,
    beta=0.03,
    baseline_runs=5,
    extensions=1,
    unresolved="flag",
)
"""A rule of a merge: it looks nine times, and asks once more."""


@functools.cache
def declared() -> Gates:
    """The gates of this repository, read once a session."""
    return load_gates()


@dataclass(frozen=True)
class PlantedGate(ResolvedGate):
    """A gate whose engine a test makes."""

    make: Callable[[], Any] | None = None

    def start(self) -> Any:
        """The test's engine."""
        return self.make() if self.make else super().start()


def resolved(
    gate: Gate,
    make: Callable[[], Any] | None = None,
    *,
    name: str = "g",
    rule: Any = None,
    baseline: Any = None,
    folder: Path | None = None,
) -> ResolvedGate:
    """A declared gate as `hileval.gates.resolve` gives it; without a rule with the first that it names."""
    found = rule or declared().rules[next(iter(gate.rules.values()))]
    made = PlantedGate(name, gate, found, gate.engine, baseline, make=make)
    if folder is not None:
        made.__dict__["folder"] = folder
    return made
