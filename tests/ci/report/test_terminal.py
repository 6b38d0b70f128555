# SPDX-License-Identifier: Apache-2.0
"""Tables of cells on a terminal of 80 columns or another width."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from support.builds import built
from support.cell_tables import cell, grid, table
from support.jobs import passed
from support.plans import step

from hilgate.model.record import Outcome
from hilgate.report import terminal
from hilgate.report.write import Report
from hilgate.text import MARKS, STYLES, duration

FRUITS = [f"granite-hybrid-{number}" for number in range(18)]
TESTS = [
    "prefill",
    "chunked-prefill",
    "decode",
    "mixed-batch",
    "prefix-caching",
    "preemption",
    "state-reuse",
    "graphs",
    "fp8-cache",
    "interleaved",
    "shuffle",
    "speculative",
    "tensor-parallel",
]


def text(*checks, width=80):
    return [line.plain for line in terminal.lines(table(*checks), width)]


def mixed(row, column):
    number = FRUITS.index(row) + TESTS.index(column)
    return ["pass", "pass", "did not run", "inconclusive", "fail", ""][number % 6]


def test_eighteen_rows_and_thirteen_columns_fit_80_columns():
    found = text(*grid(FRUITS, TESTS, mixed))
    assert max(cell_len(line) for line in found) <= 80
    for name in (*FRUITS, *TESTS):
        assert any(name in line for line in found)


def test_each_mark_stands_below_the_bar_of_its_column():
    found = text(*grid(FRUITS, TESTS, mixed))
    heads = {name: next(line.index(name) for line in found if line.endswith(name)) for name in TESTS}
    for row in FRUITS:
        line = next(line for line in found if line.startswith(f"{row} ")).ljust(80)
        for name, at in heads.items():
            wanted = MARKS[Outcome(mixed(row, name))] if mixed(row, name) else " "
            assert (row, name, line[at]) == (row, name, wanted)


def test_few_columns_have_one_line_of_names():
    assert text(cell("fig", "a"), cell("apple", "bcd", "did not run"))[1:5] == [
        "grid-cpu: 1 passed, 0 failed, 1 not run, 2 not asked (blank)",
        "       a  bcd",
        "fig    ✓",
        "apple     ○",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_any_table_fits_its_terminal(width):
    rows = [f"{'very-' * 12}long-{n}" for n in range(3)] + ["木" * 30]
    columns = [f"column-{'x' * n}-{n}" for n in range(60)]
    found = text(*grid(rows, columns, lambda row, _: "fail" if row == rows[0] else "pass"), width=width)
    assert max(cell_len(line) for line in found if "…" in line or "│" in line) <= width
    marks = [line for line in found if line.startswith("very-") and "✗" in line]
    assert sum(line.count("✗") for line in marks) == 60
    for n in range(40 if width == 60 else 60):
        assert any(f"column-{'x' * min(n, 3)}" in line for line in found)


def test_marks_have_outcome_colours_and_hostile_names_are_text():
    evil = "\x1b[31mred\u202e"
    spans = [span for line in terminal.lines(table(cell(evil, "a", "fail")), 80) for span in line.spans]
    assert STYLES[Outcome.FAIL] in {str(span.style) for span in spans}
    assert "\x1b" not in "".join(text(cell(evil, evil, "fail", evil)))


DRIFT = "accuracy-pocket-hybrid-drift-cpu"


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (120, "outcome step passed failed other time"),
        (80, "outcome step passed failed time"),
        (60, "outcome step passed failed time"),
    ],
)
@pytest.mark.parametrize("seconds", [323.0, 71.0, 36000.0])
def test_the_table_of_steps_is_never_cut(monkeypatch, capsys, width, header, seconds):
    monkeypatch.setenv("COLUMNS", str(width))
    build = built((step(DRIFT.removesuffix("-cpu"), "x"), [passed()]), (step("codeobjects", "x"), None))
    steps = [one.model_copy(update={"seconds": seconds}) for one in build[2].steps]
    terminal.print_verdict(Report(*build[:2], build[2].model_copy(update={"steps": tuple(steps)}), Path("report.html")))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == header.split()
    (row,) = [line for line in lines if line.startswith("✓ pass")]
    assert row.endswith(duration(seconds))
    assert (DRIFT in row) == (width > 60)
    assert max(cell_len(line) for line in lines[:4]) <= width


def test_a_key_too_long_for_the_terminal_is_continued(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    terminal.print_verdict(Report(*built((step(DRIFT.removesuffix("-cpu"), "x"), [passed()])), Path("report.html")))
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.split()[2] + second.strip() == DRIFT
