# SPDX-License-Identifier: Apache-2.0
"""Builds that were made up: a plan of samples, what was recorded of it, the verdict; and what a page of them shows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import sqlite3
from html.parser import HTMLParser

from support.jobs import failed, finished, passed
from support.plans import ENVIRONMENT, plan, step

from hilgate.judge import verdict
from hilgate.model.plan import plan_digest
from hilgate.model.record import BuildRecord, Outcome
from hilgate.report import history
from hilgate.run import results

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)


def built(*steps_and_checks, **changes):
    """(plan, recorded, verdict) of steps that recorded these checks, on a machine without what they may lack."""
    a_plan = plan(*[one for one, _ in steps_and_checks], **changes)
    digest = plan_digest(a_plan)
    attempts = {}
    for number, (one, checks) in enumerate(steps_and_checks):
        if checks is None:
            continue
        red = any(check.outcome is Outcome.FAIL for check in checks)
        *_, record = finished(
            one,
            *checks,
            status=int(red),
            started=NOW + dt.timedelta(seconds=number),
            seconds=90.0 + number,
            peak_memory_mib=100.0,
            environment=ENVIRONMENT,
            imported={},
            lacked=tuple(one.step.may_lack),
        )
        attempts[one.key] = (results.Attempt(record, tuple(checks)),)
    build = BuildRecord(started=NOW, plan_digest=digest, commit=a_plan.commit, environment=ENVIRONMENT)
    recorded = results.Recorded((build,), attempts)
    return a_plan, recorded, verdict.judge(a_plan, recorded, digest, decided=NOW)


class Outline(HTMLParser):
    """Tags, addresses and visible text; complains about tags that do not close."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.open, self.text = [], [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in {"href", "src", "xlink:href"}]
        if tag not in {"meta", "br", "line"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):  # noqa: ARG002
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += f"{data} "


def began(recorded, moment):
    """The same records of a build that began at another time."""
    (build,) = recorded.builds
    return dataclasses.replace(recorded, builds=(build.model_copy(update={"started": moment}),))


def remember(path, checks, *, minute=0, flaky=(), keep=None, of=None, **changes):
    """Add a build of a step, which began at a minute after NOW, to a history; returns its name."""
    a_plan, recorded, decided = built((of or step("a", "x"), checks), **changes)
    steps = tuple(one.model_copy(update={"flaky": flaky}) for one in decided.steps)
    recorded = began(recorded, NOW + dt.timedelta(minutes=minute))
    decided = decided.model_copy(update={"steps": steps})
    build, added = history.add(path, a_plan, recorded, decided, branch="main", keep=keep)
    assert added
    return build


def rows_of(path):
    """Everything that a history holds, table by table."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        return {name: connection.execute(f"select * from {name}").fetchall() for name in tables}


def three_builds(path):
    """A history of three builds of two steps, a minute apart: of step `a` a score that rises and a kernel that slows
    down; a check that was flaky in two builds, and another that failed in the last."""
    for number, time in enumerate((10.0, 12.0, 22.0)):
        score = {"exact_match": 0.5 + number / 10, "ci_low": 0.4 + number / 10, "ci_high": 0.6 + number / 10, "n": 200}
        before = {"baseline_exact_match": 0.55} if number < 2 else {}
        checks = [
            passed("pocket/accuracy", numbers=score | before),
            passed("decode", numbers={"ours_us": time, "peer_us": 1.0, "spread_us": 1.0, "max_abs_err": 1.0}),
            failed("sometimes") if number == 1 else passed("sometimes"),
            failed("broken") if number == 2 else passed("broken"),
        ]
        steps = (step("a", "x", device="gfx942", gpus=2), checks), (step("b", "x"), [passed()])
        a_plan, recorded, decided = built(*steps)
        first, second = decided.steps
        first = first.model_copy(update={"flaky": ("sometimes",) if number < 2 else ()})
        recorded = began(recorded, NOW + dt.timedelta(minutes=number))
        history.add(path, a_plan, recorded, decided.model_copy(update={"steps": (first, second)}), branch="main")
    return path
