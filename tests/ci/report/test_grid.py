# SPDX-License-Identifier: Apache-2.0
"""The page of the history: commits by steps with a letter in each cell, at the width of a phone and of a laptop."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from support.browser import chromium
from support.builds import NOW, Outline

from hilgate.history import queries
from hilgate.report.history import LETTERS, MOST_COMMITS, MOST_STEPS, render_history
from hilgate.report.view import LIMIT_BYTES

OUTCOMES = list(LETTERS)


def answers(commits, steps):
    """A history in which the first step always passed and the others had every outcome in turn."""
    keys = [f"kernels-attention-of-a-rather-long-name-{n}-gfx942" for n in range(steps)]
    grid = [
        {
            "commit": f"{n:040x}",
            "time": NOW - dt.timedelta(hours=n),
            "cells": {
                key: "pass" if at == 0 else OUTCOMES[(n + at) % 5]
                for at, key in enumerate(keys)
                if at == 0 or (n + at) % 6
            },
        }
        for n in range(commits)
    ]
    hours = [
        {"week": dt.date(2026, 11, 16), "key": key, "device": "gfx942", "runs": 3, "minutes": 9.0, "gpu_hours": 1.2}
        for key in keys
    ]
    flake = {"key": keys[0], "id": f"tests/t.py::test_{'x' * 250}", "flaky": 1, "rate": 0.1, "failed": 2}
    flake |= {"builds": 10, "last": NOW, "low": 0.018, "high": 0.404}
    none = {metric: [] for metric in queries.METRICS}
    return none | {"grid": grid, "hours": hours, "flakes": [flake]}


def test_a_cell_has_a_letter_and_not_only_a_colour():
    page = render_history(answers(6, 4), step="")
    cells = re.findall(r'<td class="([a-z-]+)"(?: title="[^"]*")?>([A-Z])</td>', page)
    assert {(name.replace("-", " "), letter) for name, letter in cells} == set(LETTERS.items())
    assert "<td></td>" in page, "a step that was not planned"
    assert 'title="kernels-attention-of-a-rather-long-name-1-gfx942: ' in page


def test_steps_that_did_not_always_pass_come_first():
    headers = re.findall(r'<th class="turned"><span>(.*?)</span>', render_history(answers(6, 4), step=""))
    assert [name[-8] for name in headers] == ["1", "2", "3", "0"]


def test_the_flake_table_has_the_interval_and_hours_have_their_week():
    text = Outline(render_history(answers(2, 2), step="")).text
    assert "1 (10%)" in text
    assert "2 to 40%" in text
    assert re.search(r"2026-11-16\s+kernels-attention-of-a-rather-long-name-0-gfx942\s+3\s+9\.0\s+1\.2", text)


def test_a_large_history_is_cut_counted_and_below_the_limit():
    page = render_history(answers(200, 150), step="")
    assert len(page.encode()) < LIMIT_BYTES
    assert page.count('<th class="turned">') == MOST_STEPS
    assert f"and {200 - MOST_COMMITS} commits, {150 - MOST_STEPS} steps more" in page


def test_an_empty_history_has_no_grid():
    assert "Commits by steps" not in render_history({metric: [] for metric in queries.METRICS}, step="")


@pytest.mark.needs("program:chromium")
@pytest.mark.parametrize(("width", "columns"), [(400, 5), (1280, 30)])
def test_a_browser_shows_the_grid_without_a_page_that_is_too_wide(tmp_path, width, columns):
    path = tmp_path / "history.html"
    path.write_text(render_history(answers(30, 60), step=""), encoding="utf-8")
    with chromium() as tab:
        tab.size(width, 900)
        tab.open(path.as_uri())
        assert tab.value("document.documentElement.scrollWidth") <= width
        seen = "[...document.querySelectorAll('.grid tbody tr:first-child td')]"
        inside = tab.value(f"{seen}.filter(one => one.getBoundingClientRect().right <= window.innerWidth).length")
        assert columns <= inside < 60
        scrolled = "document.querySelector('.grid').parentElement"
        tab.value(f"{scrolled}.scrollLeft = {scrolled}.scrollWidth")
        assert tab.value("document.querySelector('.grid tbody th').getBoundingClientRect().left") >= 0, "commits stay"
        assert tab.said == []
