"""From figures to findings: budgets for ours, ours compared with theirs, and the proof that the audit can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .budgets import Budgets, lds_message
from .compilation import Figures
from .errors import LdsExceededError
from .findings import Finding, Outcome
from .isolation import Crash
from .machine import ARCHES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .work import Refusal, Row


def judge_refusal(refusal: Refusal, labels: dict[str, str]) -> Finding:
    """A launch that could not even be planned. On their side it is missing evidence, on ours a failure."""
    outcome: Outcome = "fail" if refusal.case.side == "ours" else "inconclusive"
    all_labels = refusal.case.labels | labels | {"arch": refusal.arch}
    return Finding(refusal.id, outcome, message=refusal.message, labels=all_labels)


def judge_row(row: Row, budgets: Budgets, labels: dict[str, str]) -> Finding:
    """One compiled (or not compiled) kernel."""
    labels = row_labels(row, budgets) | labels
    if row.case.expected_lds:
        return _judge_proof(row, labels)
    if row.case.side == "vllm":
        outcome, message = _evidence(row)
    else:
        outcome, message = _ours(row, budgets)
    return Finding(row.id, outcome, row.seconds, message, labels, row_numbers(row))


def row_labels(row: Row, budgets: Budgets) -> dict[str, str]:
    """What the row is about, in words."""
    constants = dict(row.specialisation.constants)
    kernel = row.specialisation.kernel
    tile = constants.get(budgets.tile_argument(kernel), "")
    return row.case.labels | {"arch": row.arch, "kernel": kernel, "tile": tile}


def row_numbers(row: Row) -> dict[str, float]:
    """What was read from the code object; only the LDS where the compilation was stopped for it."""
    limit = ARCHES[row.arch].lds_bytes
    if isinstance(row.result, LdsExceededError):
        return {"lds_bytes": row.result.lds_bytes, "lds_limit_bytes": limit}
    if not isinstance(row.result, Figures):
        return {}
    figures, code, text = row.result, row.result.code, row.result.text
    return {
        "lds_bytes": figures.lds_bytes,
        "lds_limit_bytes": limit,
        "vgpr": code.vgpr,
        "agpr": code.agpr,
        "sgpr": code.sgpr,
        "vgpr_spills": code.vgpr_spills,
        "sgpr_spills": code.sgpr_spills,
        "scratch_bytes": code.scratch_bytes,
        "waves_per_simd": figures.waves_per_simd,
        "num_waves": figures.num_waves,
        "mfma": text.mfma,
        "loads_x4": text.count_loads(16),
        "loads_x2": text.count_loads(8),
        "loads_x1": text.count_loads(4),
        "narrow_loads": sum(site.count for site in text.narrow_loads()),
        "wide_share": round(text.wide_share() or 0.0, 4),
        "ds_ops": text.ds_ops,
        "waits": text.waits,
        "instructions": text.instructions,
        "compile_seconds": round(figures.compile_seconds, 3),
    }


def compare(rows: Sequence[Row], labels: dict[str, str]) -> list[Finding]:
    """Ours against theirs: at the same operation, dtype, head size, block size and arch, no worse an occupancy.

    Only the kernels that read the cache are compared; reductions of partial results are small on both sides.
    """
    ours = [row for row in rows if row.case.side == "ours" and row.case.batch.big and _reads_cache(row)]
    theirs = [row for row in rows if row.case.side == "vllm" and not row.case.expected_lds and _reads_cache(row)]
    return [
        _compare(mine, other, labels)
        for mine in ours
        for other in theirs
        if mine.arch == other.arch and mine.case.shape == other.case.shape
    ]


def _reads_cache(row: Row) -> bool:
    return row.specialisation.kernel == row.case.kernels[0]


def _compare(mine: Row, other: Row, labels: dict[str, str]) -> Finding:
    name = f"{mine.arch}/compare/{mine.case.name}/{other.specialisation.kernel}"
    labels = mine.case.labels | labels | {"arch": mine.arch, "kernel": other.specialisation.kernel, "side": "both"}
    if not isinstance(mine.result, Figures):
        return Finding(name, "inconclusive", message="ours was not compiled, see its own finding", labels=labels)
    numbers = {"ours_waves_per_simd": mine.result.waves_per_simd}
    if isinstance(other.result, LdsExceededError):
        message = f"theirs cannot start: {other.result}"
        return Finding(name, "pass", message=message, labels=labels, numbers=numbers)
    if not isinstance(other.result, Figures):
        return Finding(name, "inconclusive", message="theirs was not compiled", labels=labels, numbers=numbers)
    numbers["theirs_waves_per_simd"] = other.result.waves_per_simd
    message = f"waves per SIMD: ours {mine.result.waves_per_simd:g}, theirs {other.result.waves_per_simd:g}"
    worse = mine.result.waves_per_simd < other.result.waves_per_simd
    return Finding(name, "fail" if worse else "pass", message=message, labels=labels, numbers=numbers)


def _ours(row: Row, budgets: Budgets) -> tuple[Outcome, str]:
    result = row.result
    if isinstance(result, LdsExceededError):
        return "fail", lds_message(result.kernel, result.lds_bytes, row.arch)
    if isinstance(result, Crash):
        return ("inconclusive" if result.timed_out else "fail"), result.message
    if isinstance(result, Exception):
        return "fail", f"{type(result).__name__}: {result}"
    violations = budgets.violations(result, dense_rows=row.case.dense_rows)
    if violations:
        return "fail", "; ".join(violations)
    return "pass", f"same machine code as {row.twin}" if row.twin else ""


def _evidence(row: Row) -> tuple[Outcome, str]:
    """Theirs never fails our gate; without figures it is no evidence either."""
    result = row.result
    if isinstance(result, LdsExceededError):
        return "pass", f"evidence: {result}"
    if isinstance(result, Figures):
        spilled = f", {result.code.vgpr_spills} VGPRs spilled" if result.code.vgpr_spills else ""
        return "pass", f"evidence: vLLM's kernel as installed{spilled}"
    return "inconclusive", f"no figures for vLLM's kernel: {getattr(result, 'message', result)}"


def _judge_proof(row: Row, labels: dict[str, str]) -> Finding:
    result, expected = row.result, row.case.expected_lds
    if isinstance(result, LdsExceededError) and result.lds_bytes == expected:
        message = f"caught as it must be: {result}"
        return Finding(row.id, "pass", row.seconds, message, labels, row_numbers(row))
    if isinstance(result, Crash) and result.timed_out:
        return Finding(row.id, "inconclusive", row.seconds, result.message, labels)
    got = "compiled without complaint" if isinstance(result, Figures) else str(getattr(result, "message", result))
    message = f"the audit is broken: a tile that needs {expected} B of LDS was not caught ({got})"
    return Finding(row.id, "fail", row.seconds, message, labels, row_numbers(row))
