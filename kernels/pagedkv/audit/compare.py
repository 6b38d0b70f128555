"""Ours against theirs, compiled in the same run: one finding for each rule of `budgets.toml` and each shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.layout import packing_of

from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

FIGURES = ("waves_per_simd", "kv_tokens_in_flight", "query_rows_in_flight")
"""Figures that can be compared; of each, more is better."""

_SAME = ("arch", "operation", "dtype", "head_size", "block_size")
"""Labels in which two kernels must agree to be compared."""


@dataclass(frozen=True)
class Rule:
    """Ours must reach theirs in one figure."""

    operation: str
    ours: str
    """Our Triton function."""
    theirs: str
    """vLLM's."""
    figure: str
    """One of `FIGURES`."""


def compare(findings: Sequence[Finding], rules: Sequence[Rule]) -> list[Finding]:
    """Compare what was compiled.

    Args:
        findings: Of single kernels, with their labels and numbers.
        rules: What must reach what.

    Returns:
        For every rule, one finding per kernel of ours that has a counterpart. Caches below 2 GiB are left out, because
        theirs are compiled for serving. What reads a packed cache has one where theirs reads such a cache too.
    """
    return [
        _compare(mine, other, rule)
        for rule in rules
        for mine in findings
        if mine.labels.get("cache") == "2GiB+" and _is(mine, "ours", rule.ours, rule.operation)
        for other in findings
        if _is(other, "vllm", rule.theirs, rule.operation)
        and all(mine.labels[label] == other.labels[label] for label in _SAME)
        and (packing_of(mine.labels["layout"]) == "rows" or other.labels["layout"] == "x-packed")
    ]


def _is(finding: Finding, side: str, kernel: str, operation: str) -> bool:
    labels = finding.labels
    return (labels.get("side"), labels.get("kernel"), labels.get("operation")) == (side, kernel, operation)


def _compare(mine: Finding, other: Finding, rule: Rule) -> Finding:
    case = mine.id.split("/")[2]
    name = f"{mine.labels['arch']}/compare/{case}/{rule.theirs}"
    labels = mine.labels | {"side": "both", "kernel": rule.ours, "against": rule.theirs}
    figure = rule.figure.replace("_", " ")
    if rule.figure not in mine.numbers:
        return Finding(name, "inconclusive", message=f"{mine.id} has no {figure}: see there", labels=labels)
    ours = mine.numbers[rule.figure]
    numbers = {f"ours_{rule.figure}": ours}
    if rule.figure not in other.numbers:
        lds = other.numbers.get("lds_bytes", 0) > other.numbers.get("lds_limit_bytes", 0)
        message = f"{other.id} {'cannot start, it wants too much LDS' if lds else f'has no {figure}: see there'}"
        return Finding(name, "pass" if lds else "inconclusive", message=message, labels=labels, numbers=numbers)
    theirs = other.numbers[rule.figure]
    numbers[f"theirs_{rule.figure}"] = theirs
    message = f"{figure}: ours {ours:g}, theirs {theirs:g}"
    return Finding(name, "pass" if ours >= theirs else "fail", message=message, labels=labels, numbers=numbers)
