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
    "steps.timeout_minutes": "remove it: a step is ended after eight times its `minutes`, and not before 30",
    "steps.packages": "list the distributions in `requires`: [torch, triton]",
    "steps.tools": "write it in `requires`: [program:git]",
    "steps.models": "write it in `requires`: [model:NAME]",
    "steps.checkout": "write it in `requires`: [checkout]",
    "steps.queues": "write agents: {queues: {DEVICE: QUEUE}}",
    "steps.gpus": "write agents: {gpus: N}",
    "steps.network": "write agents: {network: true}",
    "steps.secrets": "write agents: {secrets: [NAME]}",
    "steps.provides": "write agents: {provides: IMAGE}",
    "steps.columns": "write evidence: {kind: findings, columns: [NAME]}",
    "steps.matrix": "write evidence: {kind: junit, matrix: {rows: NAME, columns: NAME, file: NAME.json}}",
    "steps.cores": "remove it: a step keeps one core busy",
    "files": "write `rules` and reverse the list: of those that match a path the last one counts, as in areas",
    "budgets": "remove it: a gate says which steps took over twice their declared `minutes`",
}
"""Path of the key in its file, without positions in lists -> what to write instead."""
