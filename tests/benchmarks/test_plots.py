# SPDX-License-Identifier: Apache-2.0
"""What the pages and the charts say, and that the committed ones say what the committed records do. No device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import charts, plots, record

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks/results"
SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A run that stays as it is when a new one is recorded: what the tests know by heart."""


@pytest.fixture(scope="module")
def rows():
    return record.read(SAMPLE)


def without(rows, name, **changes):
    return [
        dataclasses.replace(row, record=dataclasses.replace(row.record, **changes)) if row.case.name == name else row
        for row in rows
    ]


@pytest.mark.parametrize("source", sorted(RECORDED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_committed_page_is_that_of_the_committed_records(source):
    """Every figure, bar and summary: what changes one of them changes these files."""
    committed = [source.with_suffix(".md"), *source.with_suffix("").iterdir()]
    written = {path: path.read_text(encoding="utf-8") for path in committed}
    assert written == plots.render(source), f"run python -m benchmarks.plots {source}"


def test_a_side_without_a_time_has_no_figure_in_the_table(rows):
    name = rows[0].case.name
    changed = without(rows, name, peer_us=None, peer_spread=None, ratio=None, goal="x3", trouble="peer: a | b")
    line = record.table([row.record for row in changed]).splitlines()[2]
    assert " | - | - | " in line
    assert line.endswith("**missed: x3**; peer: a / b |")


def test_a_bar_without_a_figure_misses_its_goal_and_says_so(rows):
    changed = without(rows, "decode bs64 8k", ours_us=None, ratio=None, fraction=None)
    bars = charts.bandwidths(changed)
    assert [bar.name for bar in bars if bar.missed] == ["decode bs64 8k"]
    for svg in (charts.bandwidth_chart(bars), charts.ratio_chart(charts.ratios(changed))):
        texts = ["".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).findall(".//{*}text")]
        assert texts.count("not measured") == 1


def test_check_sees_a_changed_table_and_writing_repairs_it(tmp_path, capsys):
    source, page = tmp_path / "h200.jsonl", tmp_path / "h200.md"
    source.write_text(SAMPLE.read_text(encoding="utf-8"))
    assert plots.main([str(source), "--check"]) == 1
    assert not page.exists(), "--check writes nothing"
    assert plots.main([str(source)]) == 0
    assert plots.main([str(source), "--check"]) == 0
    text = page.read_text()
    page.write_text(text.replace("16.6 (0.2)", "15.6 (0.2)"))
    capsys.readouterr()
    assert plots.main([str(source), "--check"]) == 1
    assert capsys.readouterr().out == f"stale: {page}\n"
    assert plots.main([str(source)]) == 0
    assert page.read_text() == text


def test_an_invalid_record_writes_nothing(tmp_path, capsys):
    source = tmp_path / "h200.jsonl"
    source.write_text(SAMPLE.read_text(encoding="utf-8").replace('"ratio": 2.8032', '"ratio": NaN'))
    assert plots.main([str(source)]) == 3
    assert f"{source}:1: key 'ratio'" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_source_that_is_not_there_is_named(tmp_path, capsys):
    assert plots.main([str(tmp_path / "none.jsonl")]) == 3
    assert "none.jsonl" in capsys.readouterr().err
