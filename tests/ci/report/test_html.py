# SPDX-License-Identifier: Apache-2.0
"""The report and its twins: right content and size, nothing that runs or leaves the machine."""

from __future__ import annotations

import re

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from support.builds import Outline, built
from support.cell_tables import build, cell
from support.jobs import failed, passed, skipped
from support.plans import step

from hilgate.report import annotation
from hilgate.report.view import LIMIT_BYTES, ReportView
from hilgate.report.write import report_page
from hilgate.text import duration

MIXED = built(
    (
        step("good", "x", columns=("arch", "lds_bytes")),
        [passed(labels={"arch": "gfx942"}, numbers={"lds_bytes": 65536})],
    ),
    (step("bad", "x"), [passed(), failed(numbers={"max_abs_err": 0.5}), *[skipped(f"s{i}") for i in range(30)]]),
    (step("lost", "x"), None),
)


def test_the_verdict_comes_first_then_what_broke_then_the_change():
    text = " ".join(Outline(report_page(ReportView(*MIXED))).text.split())
    order = [
        "✗ fail 2 passed, 1 failed, 30 not run; bad-cpu: max_abs_err 0.5 > 0.001",
        "1 step regressed, 1 step stopped by the machine, 1 not selected",
        "What broke",
        "✗ regression bad-cpu",
        "error max_abs_err 0.5",
        "reproduce hilgate run bad-cpu",
        "30 not run: needs gfx950",
        "○ infra lost-cpu",
        "no record of it arrived",
        "What changed",
        "samples/layout.py",
        "Every step",
        "When it ran",
        "65 536",
        "Not selected",
        "far-gfx950",
        "Where it ran",
    ]
    text = text.replace("\u202f", " ")
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_a_green_report_has_no_section_of_what_is_not():
    text = Outline(report_page(ReportView(*built((step("good", "x"), [passed()]))))).text
    assert "What broke" not in text
    assert "✓" in text


def test_nothing_runs_and_nothing_is_fetched():
    outline = Outline(report_page(ReportView(*MIXED), logs={"bad-cpu": "steps/bad-cpu/log.txt"}))
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert outline.addresses == ["steps/bad-cpu/log.txt"]
    assert not re.search(r"url\(|@import|https?:", report_page(ReportView(*MIXED)))


@pytest.mark.parametrize("number", [3, 2_000])
def test_the_report_and_the_annotation_stay_below_1_mib(number):
    checks = [failed(f"test[{i}-{'x' * 300}]", "line\n" * 400) for i in range(number)]
    build = built(
        *[(step(f"s{n}", "x", columns=("arch",)), checks[: number // (1 if n == 0 else 40)]) for n in range(30)]
    )
    view = ReportView(*build)
    html, markdown = report_page(view), annotation.render(view)
    assert len(html.encode()) < LIMIT_BYTES
    assert len(markdown.encode()) < LIMIT_BYTES
    assert "more" in html


def test_the_annotation_is_the_first_screen():
    text = annotation.render(ReportView(*MIXED))
    assert text.startswith("## ✗ fail: 2 passed, 1 failed, 30 not run; bad-cpu: max\\_abs\\_err 0.5 &gt; 0.001\n")
    assert "```text\nhilgate run bad-cpu\n```" in text
    assert "| good-cpu | 1 | 1 min 30 s |" in text
    assert "not selected: far-gfx950: needs gfx950" in text


def test_junit_never_shows_a_red_step_as_green(tmp_path):
    path = annotation.write_junit(*MIXED[1:], tmp_path)
    suites = {suite.name: list(suite) for suite in JUnitXml.fromfile(str(path))}
    kinds = {name: [type(result) for case in cases for result in case.result] for name, cases in suites.items()}
    assert kinds["good-cpu: good samples"] == []
    assert kinds["bad-cpu: bad samples"] == [Failure] + [Skipped] * 30
    assert kinds["lost-cpu: lost samples"] == [Error]


def test_the_timeline_places_bars_in_the_whole_time():
    a_plan, recorded, verdict = built(
        (step("a", "x"), [passed()]), (step("b", "x"), [passed()]), (step("c", "x"), None)
    )
    bars, ticks = ReportView(a_plan, recorded, verdict).timeline
    assert [(bar.key, round(bar.left, 1), round(bar.width, 1)) for bar in bars] == [
        ("a-cpu", 0.0, 97.8),
        ("b-cpu", 1.1, 98.9),
    ]
    assert [words for _, words in ticks] == ["0 s", "15 s", "30 s", "45 s", "1 min", "1 min 15 s", "1 min 30 s"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "\u2013"),
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3840, "1 h 04 min"),
    ],
)
def test_durations_are_words(seconds, words):
    assert duration(seconds) == words


def test_the_page_has_each_cells_words_and_the_reasons():
    html = report_page(
        ReportView(*build(cell("fig", "a", "fail", numbers={"err": 0.5}), cell("fig", "b"), cell("kiwi", "b")))
    )
    outline = Outline(html)
    words = " ".join(outline.text.split())
    assert "grid samples grid-cpu 2 passed, 1 failed, 1 not asked (blank) fruit a b fig ✗ ✓ kiwi ✓ ✗ a: fig:" in words
    assert 'title="fig, a: fail, 0.0 s: max_abs_err 0.5 &gt; 0.001, err 0.5"' in html
    assert "not the whole table" not in words


def test_the_page_says_that_a_table_is_not_whole():
    words = " ".join(Outline(report_page(ReportView(*build()))).text.split())
    assert "0 passed, 0 failed; not the whole table" in words
    assert "○ not the whole table: no record of it arrived" in words


def test_a_huge_table_stays_within_the_report():
    checks = [cell(f"{'r' * 80}{n}", f"{'c' * 80}{n % 300}", "fail", f"{'w' * 500}{n}") for n in range(6000)]
    html = report_page(ReportView(*build(*checks)))
    assert len(html.encode()) < LIMIT_BYTES
    assert re.search(r"6000 x 300 cells, all of them in cells\.json", html)


def test_lines_break_at_words_and_cells_name_their_columns():
    html = report_page(ReportView(*MIXED))
    assert '<code class="paste"><span>hilgate</span> <span>run</span> <span>bad-cpu</span>' in html
    heads = re.findall(r"<th[^>]*>([^<]+)", html[html.index('<table class="steps">') :])[:8]
    (row,) = re.findall(r"(?s)<tr>\n  <td class=\"nowrap\"><span class=\"outcome fail\">.*?</tr>", html)
    assert re.findall(r'data-name="([^"]+)"', row) == heads[2:]
