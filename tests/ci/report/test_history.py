"""How a history is shown: tables for 80 columns, and one page of plots that opens anywhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from support.builds import NOW, Outline, remember
from support.jobs import failed, passed

from hilgate.cli import history
from hilgate.history import queries
from hilgate.report.history import render

EVIL = "<script>alert(1)</script> $x^2$ ${HOME} | ` \u202e"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Three builds, a minute apart: a score that rises, a kernel that slows down, a check that is flaky twice."""
    folder = tmp_path_factory.mktemp("history")
    for number, time in enumerate((10.0, 12.0, 22.0)):
        score = {"exact_match": 0.5 + number / 10, "ci_low": 0.3 + number / 10, "ci_high": 0.8, "n": 200}
        checks = [passed("pocket/accuracy", numbers=score), passed("decode", numbers={"ours_us": time})]
        checks += [failed(EVIL)] if number == 1 else []
        remember(folder, checks, minute=number, flaky=("sometimes",) if number != 1 else ())
    return {step: queries.ask(folder, step=step) for step in ("", "a-cpu")}


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▄"),
        ([1.0, 1.0], "▄▄"),
        ([1.0, None, 2.0], "▁·█"),
        ([float("nan"), 1.0, 2.0], "·▁█"),
        ([None], "·"),
        ([9.0, *range(12)], "▁▂▃▄▅▆▇█"),
    ],
    ids=["none", "one", "constant", "gap", "nan", "only a gap", "more than fit"],
)
def test_bars(values, drawn):
    assert history.bars(values) == drawn


@pytest.mark.parametrize("metric", queries.METRICS)
@pytest.mark.parametrize("step", ["", "a-cpu"], ids=["all", "one step"])
def test_tables_fit_80_columns(answers, metric, step):
    text = io.StringIO()
    history.show_history_tables(Console(file=text, width=80), metric, answers[step][metric], limit=1)
    lines = text.getvalue().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_a_terminal_gets_no_escape_sequences():
    text = io.StringIO()
    row = {"key": "a", "id": "x\x1b[31m\u202e", "flaky": 1, "rate": 1.0, "failed": 0, "builds": 1, "last": NOW}
    history.show_history_tables(Console(file=text, width=80), "flakes", [row], limit=1)
    assert "x\\x1b[31m\\u202e" in text.getvalue()
    assert "\x1b" not in text.getvalue()


@pytest.mark.parametrize("metric", queries.METRICS)
def test_an_empty_table_says_why(metric):
    text = io.StringIO()
    history.show_history_tables(Console(file=text, width=80), metric, [], limit=1)
    assert text.getvalue().startswith(f"{metric}: no ")


@pytest.fixture(scope="module")
def html(answers):
    return render(answers[""], step="")


def test_the_page_shows_everything_and_fetches_nothing(html):
    outline = Outline(html)
    text = " ".join(outline.text.split())
    for words in ("3 builds", "Minutes", "Accuracy", "70.0%", "Kernel times", "+100.0%", "2 (67%)"):
        assert words in text
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"@import|https?:|url\((?!#)", html)
    assert all(address.startswith("#") for address in outline.addresses)


def test_hostile_ids_are_text_on_the_page_too(html):
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_plots_take_their_colours_from_the_page(html):
    svg = "".join(re.findall(r"(?s)<svg.*?</svg>", html))
    assert "var(--plot)" in svg
    assert not re.search(r"(?:fill|stroke): #", svg)
    assert "(prefers-color-scheme: dark)" in html
    assert "@media print" in html


def test_a_page_of_no_build_says_so():
    assert "no build in this time" in render({metric: [] for metric in queries.METRICS}, step="")


def test_every_plot_says_what_it_shows(html):
    assert len(re.findall(r'<svg[^>]*role="img"[^>]*aria-label="[^"]+"', html)) == html.count("<svg")


def test_the_same_values_give_the_same_bytes(answers, html):
    assert render(answers[""], step="") == html
