# SPDX-License-Identifier: Apache-2.0
"""A build with a planted bug shows its cause before anybody scrolls, at 80 columns.

What each bug's step recorded was kept from real runs (`hilgate selftest --keep`); around it stand 23 steps that passed,
as many as a change to a kernel selects.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.builds import built
from support.jobs import passed
from support.plans import step

from hilgate.cli.planted_bugs import PLANTED, load_bugs
from hilgate.declare.load import load
from hilgate.evidence import FINDINGS_FILE
from hilgate.model.record import Check
from hilgate.report.causes import causes
from hilgate.report.terminal import SCREEN, first_screen
from hilgate.report.write import Report

ROOT = Path(__file__).parents[3]
BUGS = load_bugs(ROOT)
DECLARED = {one.key: one for _, one in load(ROOT).steps()}
GREEN = [(step(f"green-{n}", "x"), [passed()]) for n in range(23)]


def kept(bug):
    lines = (ROOT / PLANTED / bug.id / FINDINGS_FILE).read_text(encoding="utf-8").splitlines()
    return [Check.model_validate_json(line) for line in lines]


def build_of(bug, checks):
    """A whole build in which the bug's step recorded these checks."""
    planned = step(bug.turns_red, "x").model_copy(update={"step": DECLARED[bug.turns_red]}).part(bug.arguments)
    return built(*GREEN[:11], (planned, checks), *GREEN[11:])


def cause_of(bug, build):
    """The smallest case of the cause that the bug must show, and the first words of what it says."""
    matches = [one.failures for one in causes(*build) if any(says(bug, failure.check) for failure in one.failures)]
    assert matches, f"no kept failure matches {bug.expect!r}: hilgate selftest {bug.id} --keep"
    return matches[0][0].check


def says(bug, check):
    return check is not None and re.search(bug.expect, f"{check.id}\n{check.message}")


def flat(text):
    """Without the line breaks and spaces that a narrow screen puts in."""
    return re.sub(r"\s+", "", text)


def screen(build):
    return first_screen(Report(*build, path=Path("results/report.html")))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_80_columns_show_the_cause_of_each_planted_bug(bug):
    build = build_of(bug, kept(bug))
    cause = cause_of(bug, build)
    shown = screen(build)
    assert SCREEN == (80, 24)
    assert flat(cause.id)[:100] in flat(shown)
    assert flat(cause.message)[:50] in flat(shown)
    assert f"{bug.turns_red}-cpu" in shown
