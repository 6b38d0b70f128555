# SPDX-License-Identifier: Apache-2.0
"""What the pages and the charts say, and that the committed ones say what the committed records do. No device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import charts, plots, record

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
RECORDED = FOLDER / "results" / "h200.jsonl"
SAMPLE = Path(__file__).with_name("sample.jsonl")
"""A run that stays as it is when a new one is recorded: what the tests know by heart."""


@pytest.fixture(scope="module")
def rows():
    return record.read(SAMPLE)


@pytest.fixture(scope="module")
def rendered():
    return plots.render(RECORDED)


def texts(svg: str) -> list[str]:
    """Every piece of text of a picture, in its order."""
    found = ["".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).findall(".//{*}text")]
    assert found
    return found


def without(rows, name, **changes):
    return [
        dataclasses.replace(row, record=dataclasses.replace(row.record, **changes)) if row.case.name == name else row
        for row in rows
    ]


@pytest.mark.parametrize("source", sorted(RECORDED.parent.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_committed_page_is_that_of_the_committed_records(source):
    committed = [source.with_suffix(".md"), *source.with_suffix("").iterdir()]
    written = {path: path.read_text(encoding="utf-8") for path in committed}
    assert written == plots.render(source), f"run python -m benchmarks.plots {source}"


def test_the_table_has_a_row_a_record_and_says_what_is_missed(rows):
    lines = record.table([row.record for row in rows]).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2] == (
        "| decode bs1 8k | 16.6 (0.2) | 46.4 (0.4) | 2.80 | - | 2,027 GB/s | 44%r | 2.8e-03, 2.8e-03 | **missed: x3** |"
    )
    assert next(line for line in lines if line.startswith("| prefill")).split(" | ")[5:7] == ["292 TFLOP/s", "37%m"]
    assert {line.count("|") for line in lines} == {10}


def test_a_side_without_a_time_has_no_figure_in_the_table(rows):
    name = rows[0].case.name
    changed = without(rows, name, peer_us=None, peer_spread=None, ratio=None, goal="x3", trouble="peer: a | b")
    line = record.table([row.record for row in changed]).splitlines()[2]
    assert " | - | - | " in line
    assert line.endswith("**missed: x3**; peer: a / b |")


def test_ratio_bars_are_the_records(rows):
    bars = charts.ratios(rows)
    assert [(bar.name, bar.value) for bar in bars] == [(row.case.name, row.record.ratio) for row in rows]
    assert [bar.name for bar in bars if bar.missed] == ["decode bs1 8k"]


def test_bandwidth_bars_leave_out_what_matrix_units_bound(rows):
    bars = {bar.name: bar for bar in charts.bandwidths(rows)}
    assert set(bars) == {row.case.name for row in rows if row.record.yardstick != "matmul"}
    assert bars["gather 262k"].value == pytest.approx(93.848)
    assert bars["gather 262k"].goal == pytest.approx(85)
    assert {round(bar.goal) for bar in bars.values() if bar.goal} <= set(charts.GOALS)


def test_a_bar_without_a_figure_misses_its_goal_and_says_so(rows):
    changed = without(rows, "decode bs64 8k", ours_us=None, ratio=None, fraction=None)
    bars = charts.bandwidths(changed)
    assert [bar.name for bar in bars if bar.missed] == ["decode bs64 8k"]
    for svg in (charts.bandwidth_chart(bars), charts.ratio_chart(charts.ratios(changed))):
        assert texts(svg).count("not measured") == 1


def test_a_missed_goal_is_written_at_its_bar(rows):
    assert [text for text in texts(charts.ratio_chart(charts.ratios(rows))) if "missed" in text] == ["2.80 missed"]


def test_a_bar_is_as_long_as_its_figure(rows):
    """Widths in the picture, of two bars on the linear axis, are as their percentages."""
    svg = charts.bandwidth_chart([bar for bar in charts.bandwidths(rows) if bar.op == "gather"])
    boxes = [box for box in ElementTree.fromstring(svg).findall("{*}rect") if box.get("fill") == "#2a8c7c"]
    first, second = (float(box.get("width")) for box in boxes[:2])
    assert second / first == pytest.approx(0.9518 / 0.93848, rel=1e-4)


def test_every_picture_of_the_page_is_written_and_none_more(rendered):
    text = rendered[RECORDED.with_suffix(".md")]
    assert set(re.findall(r"\((h200/\w+\.svg)\)", text)) == {
        f"h200/{path.name}" for path in rendered if path.suffix == ".svg"
    }


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


def test_the_summary_counts_each_case_once_and_spans_its_figures(rows):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in plots.summary(rows).splitlines()[2:]]
    assert sum(int(line[2]) for line in lines) == len(rows)
    assert sum(int(line[5]) for line in lines) == sum(row.record.goal != "met" for row in rows)
    ratios = [row.record.ratio for row in rows if row.record.ratio is not None]
    shown = [float(one) for line in lines for one in line[3].split(" to ") if one != "-"]
    assert (min(shown), max(shown)) == (pytest.approx(min(ratios), abs=0.005), pytest.approx(max(ratios), abs=0.005))


def test_an_invalid_record_writes_nothing(tmp_path, capsys):
    source = tmp_path / "h200.jsonl"
    source.write_text(SAMPLE.read_text(encoding="utf-8").replace('"ratio": 2.8032', '"ratio": NaN'))
    assert plots.main([str(source)]) == 3
    assert f"{source}:1: key 'ratio'" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_source_that_is_not_there_is_named(tmp_path, capsys):
    assert plots.main([str(tmp_path / "none.jsonl")]) == 3
    assert "none.jsonl" in capsys.readouterr().err
