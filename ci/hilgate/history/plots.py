"""Small plots as SVG that take their colours from the page around them: light, dark and printed alike.

matplotlib knows fixed colours only, so it draws in stand-ins that are then replaced by the page's CSS variables. The
same values give the same bytes.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

INK, QUIET, LINE, TONE, OTHER = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES: Final = {INK: "ink", QUIET: "quiet", LINE: "line", TONE: "plot", OTHER: "plot-other"}
_HEAD = re.compile(r"(?s)^.*?(?=<svg)")
_METADATA = re.compile(r"(?s)\s*<metadata>.*?</metadata>")
_NAMESPACES = re.compile(r'\s+(?:xmlns(?::xlink)?="[^"]*"|version="[^"]*")')
_NAMES = re.compile(r' id="(?:figure|axes|patch|line2d|text|xtick|ytick|matplotlib\.axis|PolyCollection|FillBetween'
                    r'PolyCollection|LineCollection|PathCollection|legend)_\d+"')  # fmt: skip
_FONTS = re.compile(r" font-family: [^;\"]*;")
_STYLE = re.compile(r"(?s)\s*<defs>\s*<style.*?</style>\s*</defs>")
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[\d.]+pt"')

WIDE, SMALL = (7.2, 1.9), (3.5, 1.5)
"""Inches, at 72 points: over the whole page, and two beside each other."""


def minutes(times: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], *, label: str) -> str:
    """Lines over builds, one per named series (at most two)."""
    figure, axes = _figure(WIDE)
    places = range(len(times))
    for (name, values), colour, style in zip(series, (TONE, OTHER), ("-", "--"), strict=False):
        axes.plot(places, values, style, color=colour, marker="o", markersize=2.6, linewidth=1.2, label=name)
    axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=7, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _builds(axes, times)
    return _svg(figure, label)


def interval(times: Sequence[str], rows: tuple[Sequence[float], Sequence[float], Sequence[float]], *,
             baseline: Sequence[float | None], label: str) -> str:  # fmt: skip
    """A score over builds inside its interval, with the baseline that it was held against."""
    score, low, high = rows
    figure, axes = _figure(SMALL)
    places = list(range(len(times)))
    axes.fill_between(places, low, high, color=TONE, alpha=0.16, linewidth=0)
    axes.vlines(places, low, high, color=TONE, linewidth=0.8)
    axes.plot(places, score, color=TONE, marker="o", markersize=2.8, linewidth=1.2)
    known = [(place, value) for place, value in zip(places, baseline, strict=True) if value is not None]
    if known:
        axes.plot([place for place, _ in known], [value for _, value in known], "--", color=OTHER, linewidth=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _builds(axes, times)
    return _svg(figure, label)


def course(times: Sequence[str], values: Sequence[float], *, label: str) -> str:
    """One value over builds; the axis begins at 0, so that a change looks as large as it is."""
    figure, axes = _figure(SMALL)
    axes.plot(range(len(times)), values, color=TONE, marker="o", markersize=2.8, linewidth=1.2)
    axes.set_ylim(0, max(values) * 1.15 or 1)
    _builds(axes, times)
    return _svg(figure, label)


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 7.5, "font.family": "sans-serif"}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(colors=QUIET, labelcolor=INK, length=2.5)
    axes.grid(visible=True, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _builds(axes: Any, times: Sequence[str]) -> None:
    """Builds stand at equal distances; at most six are named."""
    every = max(1, -(-len(times) // 6))
    shown = list(range(len(times)))[::-1][::every][::-1]
    axes.set_xticks(shown, [times[place] for place in shown])
    axes.margins(x=0.06)


def _svg(figure: Any, label: str) -> str:
    """The figure as SVG for inside a page: no prologue, no fixed size, no colours of its own."""
    import html

    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _NAMES.sub("", _NAMESPACES.sub("", _METADATA.sub("", _HEAD.sub("", text.getvalue()))))
    svg = _SIZE.sub(r"\1", _STYLE.sub("", _FONTS.sub("", svg)))  # the page has fonts and styles of its own
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
