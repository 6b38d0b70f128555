# SPDX-License-Identifier: Apache-2.0
"""Keys that declarations had and have no more, each with what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

OLD_KEYS: Final[Mapping[str, str]] = {
    "steps.reuse": "remove it: no pass of an earlier run counts any more, and `hilgate gate --resume` continues a run",
    "steps.smoke": "remove it: `quick` of ci/project.yaml names the steps that run when nothing has changed",
    "steps.minimum": "remove it: every test that pytest collects must end",  # steps whose evidence is findings keep it
    "budgets": "remove it: a gate says which steps took over twice their declared `minutes`",
}
"""Path of the key in its file, without positions in lists -> what to write instead."""
