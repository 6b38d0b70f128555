"""The words of the results: the table for benchmarks/README.md, and the page that shows the charts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cases import CASES
from .record import rates_of_use

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .record import Record
    from .saved import Row

BEGIN = "<!-- rows: written by `python -m benchmarks.plots`, not by hand -->"
END = "<!-- end of rows -->"

UNITS = {"read": (1e9, "GB/s"), "copy": (1e9, "GB/s"), "matmul": (1e12, "TFLOP/s")}
ALT = {
    "ratio": "bars: time of vLLM's kernel over ours for every case",
    "bandwidth": "bars: percent of the measured bandwidth for every case, and the goals",
    "block_size": "lines: decode time over block size, ours and vLLM's",
    "context": "lines: decode time of one sequence over its length, ours and vLLM's",
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
    "block_size": (
        "Time over block size",
        (
            "Decode of 64 sequences of 8k tokens, head size 128. Hybrid models have blocks of 544, 784 or 2048 tokens, "
            "because attention and Mamba share pages."
        ),
    ),
    "context": ("Time over context at batch 1", "Decode of one sequence, head size 128, blocks of 16."),
}
"""Chart -> heading and what it shows."""


class SectionError(ValueError):
    """A text lacks the place for the rows, or has two."""


def environment(rows: Sequence[Row]) -> str:
    """Return what was measured with and the rates of the machine, as one sentence."""
    record = rows[0].record
    rates = rates_of_use([row.record for row in rows])
    speeds = [f"{name} {rate / UNITS[name][0]:,.0f} {UNITS[name][1]}" for name, rate in rates.items()]
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    return f"{record.hardware}; {', '.join(versions)}; commit {record.commit}; {', '.join(speeds)}."


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| case | ours us (spread) | peer us (spread) | ratio | rate | of | error, peer's | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in (row.record for row in rows):
        cells = (
            record.case,
            _time(record.ours_us, record.spread),
            _time(record.peer_us, record.peer_spread),
            "-" if record.ratio is None else f"{record.ratio:.2f}",
            _rate(record),
            "-" if record.fraction is None else f"{record.fraction:.0%}{record.yardstick[0]}",
            f"{_error(record.rel_error)}, {_error(record.peer_rel_error)}",
            _goal(record),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def left_out(rows: Sequence[Row]) -> str:
    """Return which cases have no record in this run, as one sentence."""
    recorded = {row.case.name for row in rows}
    names = [f"`{case.name}`" for case in CASES if case.name not in recorded]
    return f"Not in this run: {', '.join(names)}." if names else "Every case is in this run."


def section(rows: Sequence[Row]) -> str:
    """Return what stands between `BEGIN` and `END`."""
    return f"{BEGIN}\n{environment(rows)}\n\n{table(rows)}\n\n{left_out(rows)}\n{END}"


def with_section(text: str, rows: Sequence[Row], where: str) -> str:
    """Return the text with its section replaced.

    Raises:
        SectionError: The text does not hold `BEGIN` and then `END`, each once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SectionError(
            f"{where}: got {text.count(BEGIN)} beginnings and {text.count(END)} ends of the rows; expected one of "
            f"each, in this order\n  to do: put these two lines where the table belongs:\n{BEGIN}\n{END}"
        )
    return text[: text.index(BEGIN)] + section(rows) + text[text.index(END) + len(END) :]


def page(rows: Sequence[Row], charts: Mapping[str, str], source: str, folder: str) -> str:
    """Return the Markdown page: one heading, sentence and picture a chart, then the table.

    Args:
        rows: Of one run.
        charts: Chart -> SVG; one that is not there had too few records to draw.
        source: Name of the results file.
        folder: Where the pictures lie, relative to the page.
    """
    parts = [
        f"# {rows[0].record.hardware}: our kernels beside vLLM's",
        f"`python -m benchmarks.plots` on `{source}`; [how it is measured](../README.md#how-it-is-measured).",
        environment(rows),
    ]
    for name, (heading, sentence) in CHARTS.items():
        picture = f"![{ALT[name]}]({folder}/{name}.svg)" if name in charts else "Too few records to draw it."
        parts += [f"## {heading}", sentence, picture]
    parts += ["## All rows", table(rows), left_out(rows)]
    return "\n\n".join(parts) + "\n"


def _time(median: float | None, spread: float | None) -> str:
    return "-" if median is None or spread is None else f"{median:,.1f} ({spread:,.1f})"


def _rate(record: Record) -> str:
    if record.yardstick == "matmul":
        return "-" if record.tflops is None else f"{record.tflops:,.0f} TFLOP/s"
    return "-" if record.gbps is None else f"{record.gbps:,.0f} GB/s"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}" if error else "0"


def _goal(record: Record) -> str:
    said = "met" if record.goal == "met" else f"**missed: {record.goal}**"
    return f"{said}; {record.trouble}".replace("|", "/") if record.trouble else said
