# SPDX-License-Identifier: Apache-2.0
"""The report, its twins and the history as a page: right content and size, nothing that runs or leaves the machine."""

from __future__ import annotations

import re

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from support.builds import Outline, built, three_builds
from support.cell_tables import build, cell
from support.jobs import failed, passed, skipped
from support.plans import step

from hilgate.history import queries
from hilgate.report import annotation, plots
from hilgate.report.history import render_history
from hilgate.report.view import LIMIT_BYTES, ReportView, timeline
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


@pytest.mark.parametrize("number", [3, 20_000])
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
    bars, ticks = timeline(a_plan, recorded, verdict)
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


def test_the_page_has_the_table_with_what_each_cell_says_and_the_reasons():
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


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return queries.ask(three_builds(tmp_path_factory.mktemp("history")))


@pytest.fixture(scope="module")
def history(answers):
    return render_history(answers, step="")


def test_the_page_shows_everything_and_fetches_nothing(history):
    outline = Outline(history)
    text = " ".join(outline.text.split())
    for words in ("3 builds", "Minutes", "Accuracy", "70.0%", "Kernel times", "+100.0%", "2 (67%)"):
        assert words in text
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"@import|https?:|url\((?!#)", history)
    assert all(address.startswith("#") for address in outline.addresses)


def test_hostile_ids_are_text_on_the_page_too(history):
    assert "<script" not in history
    assert "&lt;script&gt;" in history


def test_plots_take_their_colours_from_the_page(history):
    svg = "".join(re.findall(r"(?s)<svg.*?</svg>", history))
    assert svg.count('class="line one"') >= 3
    assert not re.search(r"fill=|stroke=|style=|#[0-9a-f]{3}", svg)
    assert ".plot .line { fill: none; stroke: var(--plot)" in history
    assert "(prefers-color-scheme: dark)" in history
    assert "@media print" in history


def accuracy(*scores):
    n = len(scores)
    values = {"score": scores, "baseline": [None] * n, "low": [0.5] * n, "high": [1.0] * n, "commit": ["c" * 40] * n}
    return plots.accuracy_plot(values | {"id": "g/accuracy", "device": "gfx942"})


def test_a_plot_places_each_value_between_the_steps_of_its_axis():
    plot = accuracy(0.9, 0.5, 1.0)
    assert [words for _, words in plot.steps] == ["50%", "60%", "70%", "80%", "90%", "100%"]
    downs = dict(zip((0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (down for down, _ in plot.steps), strict=True))
    (line,) = plot.lines
    assert [down for _, down in line.points] == [downs[0.9], downs[0.5], downs[1.0]]
    rights = [right for right, _ in line.points]
    assert rights == sorted(rights)
    assert rights == [right for right, _, _ in plot.band]
    assert {(low, high) for _, low, high in plot.band} == {(downs[0.5], downs[1.0])}
    assert all(0 < right < plot.width and 0 < down < plot.height for right, down in line.points)


def test_an_unchanged_value_and_many_builds_have_axes_too():
    flat = plots.kernel_plot({"id": "k", "device": "cpu", "number": "x_us", "value": [0.0] * 50, "commit": ["c"] * 50})
    assert len(flat.steps) >= 2
    assert len(flat.commits) <= plots.MOST_COMMITS
    assert flat.commits[-1][0] == flat.lines[0].points[-1][0], "the newest build is named"


def test_a_page_of_no_build_says_so():
    assert "no build in this time" in render_history({metric: [] for metric in queries.METRICS}, step="")


def test_every_plot_says_what_it_shows(history):
    assert len(re.findall(r'<svg[^>]*role="img"[^>]*aria-label="[^"]+"', history)) == history.count("<svg")


def test_the_same_values_give_the_same_bytes(answers, history):
    assert render_history(answers, step="") == history


def test_a_line_to_paste_breaks_between_its_words_only_and_a_phone_sees_every_column_that_counts():
    html = report_page(ReportView(*MIXED))
    assert '<code class="paste"><span>hilgate</span> <span>run</span> <span>bad-cpu</span>' in html
    assert ".paste span { display: inline-block; max-width: 100%; }" in html
    narrow = html[html.index("(max-width: 40rem)") :]
    assert ".steps td[data-name]::before { content: attr(data-name)" in narrow[: narrow.index("@media print")]
    heads = re.findall(r"<th[^>]*>([^<]+)", html[html.index('<table class="steps">') :])[:8]
    (row,) = re.findall(r"(?s)<tr>\n  <td class=\"nowrap\"><span class=\"outcome fail\">.*?</tr>", html)
    assert re.findall(r'data-name="([^"]+)"', row) == heads[2:]
