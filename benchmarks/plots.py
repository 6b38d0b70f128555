# SPDX-License-Identifier: Apache-2.0
"""Charts and tables of a recorded run: `python -m benchmarks.plots`, from the root of the repository.

Reads `benchmarks/results/h200.jsonl` (or the file named) and writes beside it a page (`h200.md`) and its charts
(`h200/*.svg`). The same records give the same bytes.

Exit status: 0 written (with --check: up to date), 1 --check found something stale, 2 misuse, 3 a record is invalid.
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.errors import Parser

from . import charts
from .cases import CASES
from .record import BenchmarkRecordError, BenchmarkRow, Record, environment, read, table

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).resolve().parent

ALT = {
    "ratio": "bars: time of vLLM's kernel over ours for every case",
    "bandwidth": "bars: percent of the measured bandwidth for every case, and the goals",
}
CHARTS = {
    "ratio": (
        "Beside vLLM's Triton kernels",
        "Right of the line ours is faster. Both sides in one run, on the same data.",
    ),
    "bandwidth": (
        "Bandwidth",
        (
            "Bytes that the operation cannot avoid, over time, as a share of what a plain read (decode) or copy "
            "(gather, write) reaches on this machine. Prefill, extend and mixed, which the matrix units bound too, are "
            "in the table."
        ),
    ),
}
"""Chart -> heading and what it shows."""


def left_out(rows: Sequence[BenchmarkRow]) -> str:
    """Return which cases have no record in this run, as one sentence; of operations without any, their names alone."""
    recorded = {row.case.name for row in rows}
    missing = [case for case in CASES if case.name not in recorded]
    absent = {case.op for case in missing} - {row.case.op for row in rows}
    names = [f"`{case.name}`" for case in missing if case.op not in absent] + [f"every {op}" for op in sorted(absent)]
    return f"Not in this run: {', '.join(names)}." if names else "Every case is in this run."


def summary(rows: Sequence[BenchmarkRow]) -> str:
    """Return a Markdown table with a row for each operation and peer: cases, how much faster ours is, missed goals."""
    lines = ["| operation | vLLM's kernel | cases | ours is faster by | share of the vendor's rate | goals missed |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    groups: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        groups.setdefault((row.record.case.split()[0], row.record.peer), []).append(row.record)
    for (operation, peer), records in groups.items():
        ratios = _span([record.ratio for record in records])
        shares = _span([one.vendor_us / one.ours_us if one.vendor_us and one.ours_us else None for one in records])
        missed = sum(one.goal != "met" for one in records)
        lines.append(f"| {operation} | `{peer}` | {len(records)} | {ratios} | {shares} | {missed} |")
    return "\n".join(lines)


def _span(figures: Sequence[float | None]) -> str:
    """The least and the largest figure that there is."""
    found = [figure for figure in figures if figure is not None]
    low, high = (f"{of(found):.2f}" for of in (min, max)) if found else ("-", "-")
    return low if low == high else f"{low} to {high}"


def page(rows: Sequence[BenchmarkRow], source: str, folder: str) -> str:
    """Return the Markdown page: a summary, one heading, sentence and picture a chart, then all rows.

    Args:
        rows: Of one run.
        source: Name of the results file.
        folder: Where the pictures lie, relative to the page.
    """
    parts = [
        f"# {rows[0].record.hardware}: our kernels beside vLLM's",
        (
            f"`python -m benchmarks.plots` writes this page from `{source}`. "
            "[How it is measured](../../docs/reference/benchmarks.md#how-it-is-measured)."
        ),
        environment([row.record for row in rows]),
        summary(rows),
    ]
    for name, (heading, sentence) in CHARTS.items():
        parts += [f"## {heading}", sentence, f"![{ALT[name]}]({folder}/{name}.svg)"]
    parts += ["## All rows", table([row.record for row in rows]), left_out(rows)]
    return "\n\n".join(parts) + "\n"


def render(source: Path) -> dict[Path, str]:
    """Return every file that follows from a results file, with its text.

    Raises:
        BenchmarkRecordError: A record is invalid.
    """
    rows = read(source)
    pictures = {
        "ratio": charts.ratio_chart(charts.ratios(rows)),
        "bandwidth": charts.bandwidth_chart(charts.bandwidths(rows)),
    }
    folder = source.with_suffix("")
    files = {folder / f"{name}.svg": text for name, text in pictures.items()}
    files[source.with_suffix(".md")] = page(rows, source.name, folder.name)
    return files


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, write or check, return the exit status."""
    parser = Parser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument(
        "source", nargs="?", type=Path, default=FOLDER / "results" / "h200.jsonl", help="results file to plot"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    given = parser.parse_args(arguments)
    try:
        files = render(given.source)
    except BenchmarkRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if given.check else 'written'}: {path}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    if not stale:
        print(f"{len(files)} files are up to date with {given.source}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
