# SPDX-License-Identifier: Apache-2.0
"""The list of what passed and is not simply a pass: every kind is in it, in all three places, and nothing else is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.builds import built
from support.jobs import passed, skipped
from support.plans import step

from hilgate.model.record import Outcome
from hilgate.report import annotation, terminal
from hilgate.report.reservations import TITLE, reservations
from hilgate.report.view import ReportView
from hilgate.report.write import Report, report_page

LACKS = {"may_lack": {"cpu:amx_tile": {"why": "the prefix cache of MLA needs AMX", "most": 2}}}


def lacking(name):
    return skipped(name, "needs AMX").model_copy(update={"labels": {"needs": "cpu:amx_tile"}})


def part(planned):
    return planned.part("-k hnd")


def a_build():
    """One step of each kind, and one that simply passed."""
    steps = (
        (step("gate", "x"), [passed("g/floor"), passed("g/accuracy", labels={"passed_but": "answers churned"})]),
        (part(step("subset", "x")), [passed()]),
        (step("mla", "x", **LACKS), [passed(), lacking("t1"), lacking("t2")]),
        (step("twice", "x"), [passed()]),
        (step("measured", "x"), [passed()]),
        (step("late", "x", minutes=0.5), [passed()]),
        (step("plain", "x"), [passed()]),
    )
    plan, recorded, verdict = built(*steps)
    attempts = dict(recorded.attempts)
    (once,) = attempts["twice-cpu"]
    stopped = once.record.model_copy(update={"outcome": Outcome.DID_NOT_RUN, "message": "its node ran out of memory"})
    attempts["twice-cpu"] = (dataclasses.replace(once, record=stopped, checks=()), once)
    recorded = dataclasses.replace(recorded, attempts=attempts, restored={"measured-cpu": ("tests/tolerances.py",)})
    known = {"gate-cpu": {"flaky": ("f",), "quarantined": ("q",)}}
    ruled = tuple(one.model_copy(update=known.get(one.key, {})) for one in verdict.steps)
    return plan, recorded, verdict.model_copy(update={"steps": ruled})


def terminal_of(build, capsys):
    terminal.print_verdict(Report(*build, Path("report.html")))
    return capsys.readouterr().out


def test_every_kind_is_listed_once_with_what_it_is_about():
    plan, recorded, verdict = a_build()
    found = {one.title: one.ids for one in reservations(plan, recorded, verdict)}
    assert found == {
        "flaky in gate-cpu": ("f",),
        "quarantined in gate-cpu": ("q",),
        "not all proved in gate-cpu": ("g/accuracy: answers churned",),
        "a part": ("subset-cpu: 1 check of -k hnd",),
        "cannot run here": ("mla-cpu: 2 checks (the prefix cache of MLA needs AMX)",),
        "ran again": ("twice-cpu: its node ran out of memory",),
        "slow": ("late-cpu: 1 min 35 s, declared 0.5 min",),
        "restored": ("measured-cpu: tests/tolerances.py",),
    }


def test_report_annotation_and_terminal_have_the_same_list(capsys):
    build = a_build()
    titles = [one.title for one in reservations(*build)]
    assert len(titles) == 8
    for shown in (report_page(ReportView(*build)), annotation.render(ReportView(*build)), terminal_of(build, capsys)):
        at = shown.index(TITLE)
        places = [shown.index(title, at) for title in titles]
        assert places == sorted(places)
        assert shown.count(TITLE) == 1


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.FAIL])
def test_nothing_is_listed_where_all_simply_passed(outcome, capsys):
    """Nor a part of a step that failed: it is listed as what it is."""
    plan, recorded, verdict = built(
        (part(step("one", "x")) if outcome is Outcome.FAIL else step("one", "x"), [passed()])
    )
    verdict = verdict.model_copy(update={"steps": (verdict.steps[0].model_copy(update={"outcome": outcome}),)})
    assert reservations(plan, recorded, verdict) == ()
    assert TITLE not in terminal_of((plan, recorded, verdict), capsys)
