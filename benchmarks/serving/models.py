# SPDX-License-Identifier: Apache-2.0
"""Models in their published sizes, with fewer layers where two of them would not fit on one GPU; and what is asked.

Configurations are `evals/drawn/<name>/config.json`, and `<name>-tiny` for a CPU. No weights can be downloaded where
this runs: `hileval.engines.worker` draws them. Multipliers are 1: they are tuned for trained weights, and cost no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hileval.gates.declare import EVALS

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Model:
    """One model."""

    name: str
    """Of the published checkpoint."""
    layers: str
    """What of the published model is here."""

    def folder(self, *, tiny: bool = False) -> Path:
        """Where its config.json is."""
        return EVALS / "drawn" / (self.name.lower() + ("-tiny" if tiny else ""))


_ALL = (
    Model("granite-4.0-h-small", "20 of 40 layers, 2 of 4 with attention"),
    Model("Falcon-H1-7B", "all 44 layers, each with attention beside Mamba-2"),
    Model("Qwen3-30B-A3B", "24 of 48 layers, attention in each"),
)
MODELS: dict[str, Model] = {model.name: model for model in _ALL}


@dataclass(frozen=True)
class ServingCase:
    """So many requests of so long a prompt, random tokens, at once."""

    requests: int
    prompt: int
    answers: int = 97
    """Tokens of each answer."""

    @property
    def name(self) -> str:
        """As `--case` takes it."""
        return f"{self.requests} x {self.prompt}"


CASES = (ServingCase(1, 32768), ServingCase(8, 16384), ServingCase(32, 4096))
SMOKE = (ServingCase(2, 80, 12), ServingCase(3, 21, 12))
MOST = max(case.requests for case in CASES)
LONGEST = max(case.prompt + case.answers for case in CASES)
