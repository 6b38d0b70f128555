# SPDX-License-Identifier: Apache-2.0
"""Who: an author, or nobody. What: a change to data of the gate (tolerances, floors) that breaks its own tests. Until
somebody approves it, steps run with the merge base's data, and all of them pass.

What must happen: what was approved has run as it will be merged before the verdict is a pass, on agents and by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.flow import BRANCH, FORK, Build, Machine

TEST = """\
from pathlib import Path
import limits
def test_it():
    assert float(Path(__file__).with_name("limit.txt").read_text()) <= limits.FLOOR
"""
APPROVER = "ada@example.org"

pytestmark = pytest.mark.usefixtures("main")


def built(host: Machine, limit: str, kind: dict[str, str], approver: str) -> Build:
    """The build of a change to the limit that its own test reads."""
    commit = host.change("0.95", **{"tests/test_a.py": TEST, "tests/limit.txt": limit})
    return replace(host, approver=approver).build(host.clone, commit, **kind)


@pytest.mark.parametrize(("limit", "kind"), [("2\n", BRANCH), ("not a number\n", FORK)], ids=["branch", "fork"])
def test_data_that_breaks_its_tests_is_red_once_it_is_approved(host: Machine, limit: str, kind: dict[str, str]) -> None:
    found = built(host, limit, kind, APPROVER)
    assert found.statuses["one-cpu"] == 0, found.log()
    assert found.statuses["verdict"] == 6
    assert found.statuses["one-cpu-approved"] == 1
    assert found.posted == 1
    verdict = json.loads(found.artifact("required", "results/verdict.json"))
    assert (verdict["outcome"], verdict["approved_by"]) == ("fail", f"Somebody <{APPROVER}>")


def test_honest_data_is_green_once_it_has_run_as_approved(host: Machine) -> None:
    found = built(host, "0.5\n", FORK, APPROVER)
    assert found.statuses["verdict"] == 6, found.log()
    assert (found.statuses["one-cpu-approved"], found.posted) == (0, 0), found.log()


def test_nothing_runs_again_where_who_started_the_build_approves(host: Machine) -> None:
    found = built(host, "0.5\n", BRANCH, "starter@example.org")
    assert "one-cpu-approved" not in found.statuses
    assert found.posted not in {0, None}


def test_a_change_to_what_ran_as_it_is_repeats_no_step(host: Machine) -> None:
    commit = host.change("0.95", Makefile="all:\n")
    found = replace(host, approver=APPROVER).build(host.clone, commit, **BRANCH)
    assert "one-cpu-approved" not in found.statuses
    assert found.posted == 0, found.log()
