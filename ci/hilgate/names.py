"""Names that have a meaning of their own, in one place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hilgate.model import Key, Step

CPU = "cpu"
"""The device that every machine has: kernels under Triton's interpreter, and everything that needs no GPU."""

BUILDKITE_KEY = re.compile(r"[a-z0-9_-]{1,100}")
"""What every published version of Buildkite's schema takes as a step key; only the newest also takes a '.'."""

RESERVED_KEYS = frozenset({"plan", "recheck", "verdict"})
"""Step keys of the pipeline itself."""

RESERVED_FILES = frozenset({"plan.json", "verdict.json", "quarantine.json", "restored.json", "manifest.json",
                            "health-before.json", "health-after.json"})  # fmt: skip
"""Files that every build leaves, or its bundle, under these names."""

CELL_KEYS = ("matrix", "kind", "outcome", "reason", "seconds", "step", "device", "checks", "labels", "numbers",
             "reproduce", "command", "commit", "dirty", "plan_digest", "environment")  # fmt: skip
"""Keys of every record of a matrix, besides the names of its two labels."""

RUN_OPTIONS = frozenset({"plan", "jobs", "results", "help"})
"""Options of `hilgate run` that a label could be called like."""


def planned_key(step: Step, device: Key) -> Key:
    """Key of a step on a device."""
    return f"{step.key}-{device}"
