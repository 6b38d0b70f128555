"""From figures to findings: budgets for ours, evidence of theirs, and the proof that the audit can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .assembly import wide_share
from .budgets import Budgets, lds_message
from .compilation import Figures
from .errors import LdsExceededError
from .findings import Finding, Outcome
from .isolation import Crash
from .machine import ARCHES
from .narrow import declared

if TYPE_CHECKING:
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
    seconds = row.result.compile_seconds if isinstance(row.result, Figures) and not row.twin else row.seconds
    return Finding(row.id, outcome, seconds, message, labels, row_numbers(row, labels))


def row_labels(row: Row, budgets: Budgets) -> dict[str, str]:
    """What the row is about, in words."""
    constants = dict(row.specialisation.constants)
    kernel = row.specialisation.kernel
    known = budgets.known(kernel)
    shape = {"tile": constants.get(known.tile, ""), "rows": constants.get(known.rows, "")}
    return row.case.labels | {"arch": row.arch, "kernel": kernel} | shape


def row_numbers(row: Row, labels: dict[str, str]) -> dict[str, float]:
    """What was read from the code object; only the LDS where the compilation was stopped for it."""
    limit = ARCHES[row.arch].lds_bytes
    if isinstance(row.result, LdsExceededError):
        return {"lds_bytes": row.result.lds_bytes, "lds_limit_bytes": limit}
    if not isinstance(row.result, Figures):
        return {}
    figures, code, text = row.result, row.result.code, row.result.text
    workgroups = figures.waves_per_simd * ARCHES[row.arch].simds / figures.num_waves
    in_flight = {"kv_tokens_in_flight": labels["tile"], "query_rows_in_flight": labels["rows"]}
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
        "wide_share": round(wide_share(text.loads), 4),
        "ds_ops": text.ds_ops,
        "waits": text.waits,
        "instructions": text.instructions,
        "compile_seconds": round(figures.compile_seconds, 3),
    } | {name: workgroups * int(size) for name, size in in_flight.items() if size}


def _ours(row: Row, budgets: Budgets) -> tuple[Outcome, str]:
    result = row.result
    if isinstance(result, LdsExceededError):
        return "fail", lds_message(result.kernel, result.lds_bytes, row.arch)
    if isinstance(result, Crash):
        return ("inconclusive" if result.timed_out else "fail"), result.message
    if isinstance(result, Exception):
        return "fail", words(result)
    narrow = declared(row.id)
    violations = budgets.violations(result, scattered=(*row.case.scattered, *narrow))
    violations += [
        f"loads through {pointer} are wide, and narrow.toml declares them narrow: remove that entry"
        for pointer in narrow
        if not budgets.narrow(result, pointer)
    ]
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
    return "inconclusive", f"no figures for vLLM's kernel: {words(result)}"


def words(result: Exception | Crash) -> str:
    """How a compilation failed, with what the compiler printed."""
    if isinstance(result, Crash):
        return result.message
    return f"{type(result).__name__}: {result}" + "".join(getattr(result, "__notes__", []))


def _judge_proof(row: Row, labels: dict[str, str]) -> Finding:
    result, expected = row.result, row.case.expected_lds
    if isinstance(result, LdsExceededError) and result.lds_bytes == expected:
        message = f"caught as it must be: {result}"
        return Finding(row.id, "pass", row.seconds, message, labels, row_numbers(row, labels))
    if isinstance(result, Crash) and result.timed_out:
        return Finding(row.id, "inconclusive", row.seconds, result.message, labels)
    got = "compiled without complaint" if isinstance(result, Figures) else words(result)
    message = f"the audit is broken: a tile that needs {expected} B of LDS was not caught ({got})"
    return Finding(row.id, "fail", row.seconds, message, labels, row_numbers(row, labels))
