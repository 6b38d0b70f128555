# SPDX-License-Identifier: Apache-2.0
"""Judge compiled kernels: budgets for ours, evidence of vLLM's, crashes and configurations of the Mamba packages'.

A finding for each row, one for each comparison of ours with theirs, and one for each kernel of which every
configuration was compiled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, cast

from pagedkv.arch import limits
from pagedkv.layout import packing_of

from .budgets import FILE, KernelBudget, lds_message
from .cases import cases_of
from .code_object import wide_share
from .compile import Figures, LdsExceededError
from .findings import Finding, Outcome
from .isolation import Crash
from .machine import CDNA, SIMDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagedkv.layout import Name

    from .budgets import Budgets, Comparison, Declared, DeclaredCrash
    from .cases import Case, LaunchConfiguration

_COMPARED = ("arch", "operation", "dtype", "head_size", "block_size")
"""Labels in which two kernels must agree to be compared."""

WITHIN_BUDGET = "within budget"

USABLE, OVERSIZE, CRASHED, UNKNOWN = "usable", "oversize", "crashed", "unknown"
"""What became of a configuration: code that fits, more LDS than there is, no code, no answer in time."""


@dataclass(frozen=True)
class Row:
    """One kernel of one case on one arch."""

    case: Case
    arch: str
    kernel: str
    """Triton function; `launch` where the launch could not be planned."""
    constants: tuple[tuple[str, str], ...]
    """Compile-time arguments by name."""
    result: Figures | Exception | Crash
    seconds: float = 0.0
    """Seconds in the worker; 0 for a row that shares another row's machine code."""
    twin: str = ""
    """`id` of the row that compiled the same machine code; empty if it is this one."""

    @property
    def id(self) -> str:
        """Stable name of the row."""
        return self.case.id(self.arch, self.kernel)


def judge(rows: Sequence[Row], budgets: Budgets, declared: Declared, *, triton: str) -> list[Finding]:
    """Findings of all rows, of all comparisons, and of all kernels with configurations.

    Args:
        rows: In any order.
        budgets: Limits, and what is compared.
        declared: What the compiler is known to do wrong.
        triton: Its version.
    """
    findings = [judge_row(row, budgets, declared, triton=triton) for row in rows]
    kernels = defaultdict(list)
    for row, finding in zip(rows, findings, strict=True):
        if row.case.configuration:
            kernels[row.arch, row.case.configuration.kernel].append((row, row.case.configuration, finding))
    findings += compare(findings, budgets.comparisons)
    findings += _stale(findings, budgets, triton)
    # Some of a kernel's configurations say nothing of it: the others might be the ones that compile.
    complete = (group for group in kernels.values() if len(group) == group[0][1].count)
    return findings + [_judge_kernel(group, declared, triton) for group in complete]


def _stale(findings: Sequence[Finding], budgets: Budgets, triton: str) -> list[Finding]:
    """Failures of `[[unpromised]]` entries of which an arch holds every row within budget."""
    seen = {finding.id: finding for finding in findings}
    stale = []
    for entry, arch in product(budgets.unpromised, {finding.labels["arch"] for finding in findings}):
        ids = [case.id(arch, kernel) for case in cases_of("ours") for kernel in case.kernels]
        rows = [seen.get(name) for name in ids if entry.concerns(name, triton)]
        if rows and all(row and row.message.endswith(WITHIN_BUDGET) for row in rows):
            message = f"every row is within budget: promise them, and correct that entry of {FILE.name}"
            stale.append(Finding(f"{arch}/unpromised/{entry.rows}", "fail", message=message, labels={"arch": arch}))
    return stale


def judge_row(row: Row, budgets: Budgets, declared: Declared, *, triton: str) -> Finding:
    """One compiled (or not compiled) kernel."""
    labels = {"side": row.case.source, "arch": row.arch, "kernel": row.kernel, "triton": triton}
    constants, known = dict(row.constants), (budgets.kernels | budgets.evidence).get(row.kernel, KernelBudget())
    labels |= {"tile": constants.get(known.tile, ""), "rows": constants.get(known.rows, ""), **row.case.labels}
    if row.case.configuration:
        outcome, message = _configuration(row, declared.crash(row.case.configuration, row.arch, triton))
    elif row.case.expected_lds:
        outcome, message = _proof(row)
    elif row.case.source == "vllm":
        outcome, message = _evidence(row)
    else:
        outcome, message = _ours(row, budgets, declared, triton)
    return Finding(row.id, outcome, row.seconds, message, labels, _numbers(row, labels, budgets))


def _numbers(row: Row, labels: dict[str, str], budgets: Budgets) -> dict[str, float]:
    """What was read from the code object; only the LDS where the compilation was stopped for it."""
    lds_limit = limits(row.arch).lds_bytes
    if isinstance(row.result, LdsExceededError):
        return {"lds_bytes": row.result.lds_bytes, "lds_limit_bytes": lds_limit}
    if not isinstance(row.result, Figures):
        return {}
    figures, code, text = row.result, row.result.code, row.result.text
    workgroups = figures.waves_per_simd * SIMDS / figures.num_waves
    in_flight = {"kv_tokens_in_flight": labels["tile"], "query_rows_in_flight": labels["rows"]}
    numbers = {
        "lds_bytes": figures.lds_bytes,
        "lds_limit_bytes": lds_limit,
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
        "narrow_loads": text.count_loads(2, 1),
        "wide_share": round(wide_share(text.loads), 4),
        "ds_ops": text.ds_ops,
        "waits": text.waits,
        "instructions": text.instructions,
        "broadcast_high": text.broadcast_high,
        "compile_seconds": round(figures.compile_seconds, 3),
        "pointer_choices": len(figures.pointer_choices),
    }
    numbers |= budgets.loop_numbers(figures, dict(row.constants))
    return numbers | {name: workgroups * int(size) for name, size in in_flight.items() if size}


def _ours(row: Row, budgets: Budgets, declared: Declared, triton: str) -> tuple[Outcome, str]:
    """Ours must be within budget, but for what this Triton is declared to do.

    Args:
        row: The kernel.
        budgets: Limits.
        declared: What the compiler is known to do wrong.
        triton: Its version.
    """
    narrow, spill = declared.narrow_pointers(row.id, triton), declared.spill(row.id, triton)
    result, unpromised = row.result, budgets.promise(row.id, triton)
    if unpromised and not _timed_out(result):
        problems = budgets.violations(result) if isinstance(result, Figures) else [failure(result)]
        return "pass", f"not promised ({unpromised.why}): {'; '.join(problems) or WITHIN_BUDGET}"
    if isinstance(result, LdsExceededError):
        return "fail", lds_message(result.kernel, result.lds_bytes, row.arch)
    if not isinstance(result, Figures):
        return ("inconclusive" if _timed_out(result) else "fail"), failure(result)
    violations = budgets.violations(result, scattered=(*row.case.scattered, *narrow), spill=spill)
    loop = budgets.loop_numbers(result, dict(row.constants))
    violations += budgets.loop_violations(row.id, loop, result)
    violations += budgets.ceiling_violations(row.id, triton, loop, result)
    violations += [
        f"loads through {pointer} are wide, and declared.toml declares them narrow: remove that entry"
        for pointer in narrow
        if not budgets.narrow(result, pointer)
    ]
    if violations:
        return "fail", "; ".join(violations)
    twin = f"same machine code as {row.twin}" if row.twin else ""
    return "pass", "; ".join(filter(None, (f"spills as declared: {spill.why}" if spill else "", twin)))


def _evidence(row: Row) -> tuple[Outcome, str]:
    """Theirs never fails our gate; without figures it is no evidence either."""
    result = row.result
    if isinstance(result, LdsExceededError):
        return "pass", f"evidence: {result}"
    if isinstance(result, Figures):
        spilled = f", {result.code.vgpr_spills} VGPRs spilled" if result.code.vgpr_spills else ""
        return "pass", f"evidence: vLLM's kernel as installed{spilled}"
    return "inconclusive", f"no figures for vLLM's kernel: {failure(result)}"


def _proof(row: Row) -> tuple[Outcome, str]:
    """The planted defect must be caught, with the LDS that it wants."""
    result, expected = row.result, row.case.expected_lds
    if isinstance(result, LdsExceededError) and result.lds_bytes == expected:
        return "pass", f"caught as it must be: {result}"
    if _timed_out(result):
        return "inconclusive", failure(result)
    return "fail", f"the audit is broken: a tile that needs {expected} B of LDS was not caught ({failure(result)})"


def _configuration(row: Row, crash: DeclaredCrash | None) -> tuple[Outcome, str]:
    """A configuration may want too much LDS where the autotuner drops it, and may crash the compiler where declared.

    Any other failure of any configuration leaves the launch with an exception (`Autotuner._bench`), so one crash is
    enough to lose the kernel.

    Args:
        row: The configuration.
        crash: The declaration that concerns it, if there is one.
    """
    assert row.case.configuration is not None
    fate, message = _fate(row), failure(row.result)
    outcome: Outcome = "fail"
    if fate == UNKNOWN:
        outcome = "inconclusive"
    elif crash and fate != CRASHED:
        message = f"it was declared to crash and does not ({fate}): remove the declaration"
    elif crash and crash.matches(message):
        outcome, message = "pass", f"crashes as declared: {crash.why}"
    elif crash:
        message = f"it crashes otherwise than declared ({crash.says!r}): {message}"
    elif fate == CRASHED:
        message = f"a crash that nobody declared: {message}"
    elif fate == USABLE:
        outcome, message = "pass", ""
    elif row.case.configuration.autotuned:
        outcome, message = "pass", f"{message}: the autotuner drops it"
    else:
        message += ": every launch would raise OutOfResources"
    return outcome, message


def _judge_kernel(
    group: Sequence[tuple[Row, LaunchConfiguration, Finding]], declared: Declared, triton: str
) -> Finding:
    """Whether a kernel is left with a configuration that compiles and fits.

    Args:
        group: All its configurations on one arch.
        declared: Crashes that are expected.
        triton: Version of the compiler.
    """
    first, configuration, finding = group[0]
    fates = Counter(_fate(row) for row, _, _ in group)
    outcome: Outcome = "pass"
    message = ""
    if not fates[USABLE]:
        counts = ", ".join(f"{count} {fate}" for fate, count in fates.items())
        message = f"none of {len(group)} configurations can be launched: {counts}"
        crashes = [declared.crash(each, row.arch, triton) for row, each, _ in group]
        if all(crashes) and fates[CRASHED] == len(group):
            message += "".join(f", as declared: {why}" for why in {crash.why for crash in crashes if crash})
        else:
            outcome = "inconclusive" if fates[UNKNOWN] else "fail"
    numbers: dict[str, float] = {"configurations": len(group)}
    numbers |= {fate: fates[fate] for fate in (USABLE, OVERSIZE, CRASHED)}
    known = [row.result for row, _, _ in group if isinstance(row.result, Figures)]
    if known:
        numbers |= {
            "spilling": sum(each.code.vgpr_spills > 0 or each.code.scratch_bytes > 0 for each in known),
            "lds_bytes": max(each.lds_bytes for each in known),
            "vgpr": max(each.code.vgpr for each in known),
            "mfma": max(each.text.mfma for each in known),
        }
    labels = {label: text for label, text in finding.labels.items() if label != "configuration"}
    seconds = sum(each.seconds for _, _, each in group)
    return Finding(f"{first.arch}/{configuration.kernel}", outcome, seconds, message, labels, numbers)


def _fate(row: Row) -> str:
    """One of `USABLE`, `OVERSIZE`, `CRASHED`, `UNKNOWN`."""
    if isinstance(row.result, LdsExceededError):
        return OVERSIZE
    if _timed_out(row.result):
        return UNKNOWN
    return USABLE if isinstance(row.result, Figures) else CRASHED


def _timed_out(result: Figures | Exception | Crash) -> bool:
    return isinstance(result, Crash) and result.timed_out


def failure(result: Figures | Exception | Crash) -> str:
    """How a compilation failed, with what the compiler printed."""
    if isinstance(result, Figures):
        return "compiled without complaint"
    if isinstance(result, (Crash, LdsExceededError)):
        return str(result)
    return f"{type(result).__name__}: {result}" + "".join(getattr(result, "__notes__", []))


def compare(findings: Sequence[Finding], comparisons: Iterable[Comparison]) -> list[Finding]:
    """Compare ours with vLLM's, compiled in the same run.

    Args:
        findings: Of single kernels, with their labels and numbers.
        comparisons: What must reach what.

    Returns:
        For every comparison, one finding per kernel of ours that has a counterpart. Caches below 2 GiB are left out,
        because theirs are compiled for serving. What reads a packed cache has a counterpart where theirs reads such a
        cache too.
    """
    kernels = defaultdict(list)
    for finding in findings:
        kernels[tuple(finding.labels.get(label) for label in ("side", "kernel", "operation"))].append(finding)
    return [
        _compare(mine, other, comparison)
        for comparison in comparisons
        for mine in kernels["ours", comparison.ours, comparison.operation]
        if mine.labels.get("cache") == "2GiB+"
        for other in kernels["vllm", comparison.theirs, comparison.operation]
        if all(mine.labels[label] == other.labels[label] for label in _COMPARED)
        and (packing_of(cast("Name", mine.labels["layout"])) == "rows" or other.labels["layout"] == "x-packed")
        # On RDNA vLLM's kernel for packed caches keeps up to 1,680 registers in memory: what waves on that is not work.
        and not (mine.labels["arch"] not in CDNA and other.numbers.get("vgpr_spills"))
    ]


def _compare(mine: Finding, other: Finding, comparison: Comparison) -> Finding:
    case = mine.id.split("/")[2]
    name = f"{mine.labels['arch']}/compare/{case}/{comparison.theirs}"
    labels = mine.labels | {"side": "both", "kernel": comparison.ours, "against": comparison.theirs}
    figure = comparison.figure.replace("_", " ")
    if comparison.figure not in mine.numbers:
        return Finding(name, "inconclusive", message=f"{mine.id} has no {figure}: see there", labels=labels)
    ours = mine.numbers[comparison.figure]
    numbers = {f"ours_{comparison.figure}": ours}
    if comparison.figure not in other.numbers:
        lds = other.numbers.get("lds_bytes", 0) > other.numbers.get("lds_limit_bytes", 0)
        message = f"{other.id} {'cannot start, it wants too much LDS' if lds else f'has no {figure}: see there'}"
        return Finding(name, "pass" if lds else "inconclusive", message=message, labels=labels, numbers=numbers)
    theirs = other.numbers[comparison.figure]
    numbers[f"theirs_{comparison.figure}"] = theirs
    message = f"{figure}: ours {ours:g}, theirs {theirs:g}"
    return Finding(name, "pass" if ours >= theirs else "fail", message=message, labels=labels, numbers=numbers)
