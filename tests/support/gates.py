# SPDX-License-Identifier: Apache-2.0
"""Gates of accuracy, resolved for a test: with an engine or a model's folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hileval.gates.declare import load_gates
from hileval.gates.resolve import ResolvedGate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hileval.gates.declare import Gate


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
    found = rule or load_gates().rule(gate, next(iter(gate.rules)))
    made = PlantedGate(name, gate, found, gate.engine, baseline, make)
    if folder is not None:
        made.__dict__["folder"] = folder
    return made
