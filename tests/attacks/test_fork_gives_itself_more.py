# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: it declares network, secrets, a longer time, another queue, more GPUs or an image for a step of
ours or for one of its own, and would mine, scan the agents' network or leave with a model hub's token.

What must happen: each step has what the merge base declares for it; a step that the fork adds has none of it and at
most 30 minutes. A branch of ours may declare all of it, and an honest fork is planned as before.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.forks import AREA, project
from support.plans import hilgate

if TYPE_CHECKING:
    from pathlib import Path

AGENTS = """\
devices:
  cpu: {}
  gfx942: {}
queues:
  cpus: {device: cpu, gpus: 0, memory_gib: 8}
  gate: {device: cpu, gpus: 0, memory_gib: 4, gate: true}
  one: {device: gfx942, gpus: 1, memory_gib: 192}
  eight: {device: gfx942, gpus: 8, memory_gib: 192}
"""
MORE = "minutes: 90, agents: {network: true, secrets: [HF_TOKEN], queues: {gfx942: eight}, gpus: 8}"
ASKED = AREA.replace("devices: [cpu]", "devices: [gfx942]").replace("minutes: 5", MORE)
BUILDS = (
    AREA.replace("area: a", "area: y")
    .replace("key: one", "key: mine")
    .replace("minutes: 5", "minutes: 5, agents: {provides: mine}")
)
OWN = (
    AREA.replace("area: a", "area: z")
    .replace("key: one", "key: own")
    .replace("devices: [cpu]", "devices: [cpu, gfx942]")
)


def planned(folder: Path, *, fork: bool, honest: bool = False) -> dict[str, dict[str, Any]]:
    """Key -> planned step of a change to the declarations, as a fork or as a branch; an honest one only adds a test."""
    declared = AREA.replace("devices: [cpu]", "devices: [gfx942]")
    change = project(folder, **{"ci/agents.yaml": AGENTS, "ci/areas/a.yaml": declared})
    change.write("tests/test_b.py", "def test_b():\n    assert True\n")
    if not honest:
        change.write("ci/areas/a.yaml", ASKED)
        change.write("ci/areas/z.yaml", OWN.replace("minutes: 5", MORE))
        change.write("ci/areas/y.yaml", BUILDS)
        bigger = AGENTS.replace("one: {device: gfx942, gpus: 1", "one: {device: gfx942, image: mine, gpus: 8")
        change.write("ci/agents.yaml", bigger)
        change.write("ci/project.yaml", "forks_may_change: [src/, tests/]\nimages:\n  mine: {recipe: Dockerfile}\n")
        change.write("Dockerfile", "FROM scratch\n")
    change.commit()
    words = ("plan", "--profile", "pr", "--base", "main", "--json")
    done = hilgate(change.theirs, *words, **({"HILGATE_FORK": "1"} if fork else {}))
    assert done.returncode == 0, done.stderr
    return {f"{one['step']['key']}-{one['device']}": one for one in json.loads(done.stdout)["steps"]}


def test_a_forks_steps_have_what_the_merge_base_gives_them(tmp_path: Path) -> None:
    steps = planned(tmp_path, fork=True)
    assert set(steps) == {"one-gfx942", "own-cpu", "own-gfx942", "mine-cpu"}
    for key, one in steps.items():
        given = one["step"]
        assert (given["network"], given["secrets"], given["gpus"], given["provides"]) == (False, [], 1, None)
        assert (one["queue"], one["image"]) == ("cpus" if key.endswith("cpu") else "one", None)
        assert given["timeout_minutes"] == (40 if key.startswith("one") else 30)


def test_a_branch_and_an_honest_fork_are_planned_as_declared(tmp_path: Path) -> None:
    (tmp_path / "honest").mkdir()
    asked = planned(tmp_path, fork=False)["one-gfx942"]
    assert (asked["queue"], asked["step"]["network"], asked["step"]["timeout_minutes"]) == ("eight", True, 180)
    honest = planned(tmp_path / "honest", fork=True, honest=True)["one-gfx942"]
    assert (honest["queue"], honest["step"]["timeout_minutes"]) == ("one", 40)
