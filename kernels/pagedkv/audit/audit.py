"""The audit from end to end: select, plan, compile, judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import vllm_kernels
from .budgets import load_budgets
from .cases import all_cases
from .compare import compare
from .compilation import Figures
from .findings import Finding, exit_status, write_findings
from .judge import judge_refusal, judge_row
from .report import format_report
from .warmth import progress, warm_up
from .work import compile_all, plan_work, row_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .case import Case

__all__ = ["exit_status", "format_report", "ids", "run", "select", "write_findings"]


def select(only: str, arches: Sequence[str]) -> list[tuple[str, Case]]:
    """(arch, case) for each case whose id contains `only`."""
    return [
        (arch, case)
        for arch in arches
        for case in all_cases()
        if any(only in row_id(arch, case, kernel) for kernel in (*case.kernels, *case.optional))
    ]


def ids(cases: Sequence[tuple[str, Case]]) -> list[str]:
    """What `--list` prints."""
    return [row_id(arch, case, "+".join(case.kernels)) for arch, case in cases]


def run(cases: Sequence[tuple[str, Case]], *, version: str, jobs: int, timeout: float) -> tuple[list[Finding], int]:
    """Compile and judge.

    Args:
        cases: From `select`.
        version: Of Triton, for the labels.
        jobs: Compilers at a time.
        timeout: Seconds for one launch.

    Returns:
        The findings, and how many code objects were read.

    Raises:
        CannotRunHereError: The AMD compiler does not work here, or vLLM's kernels are wanted and cannot be imported.
    """
    budgets = load_budgets()
    if any(case.side == "vllm" for _, case in cases):
        vllm_kernels.load()
    warm_up()
    labels = {"triton": version}
    plan = plan_work(cases)
    rows = compile_all(plan, jobs=jobs, timeout=timeout, progress=progress)
    findings = [judge_refusal(refusal, labels) for refusal in plan.refusals]
    findings += [judge_row(row, budgets, labels) for row in rows]
    findings += compare(findings, budgets.rules)
    return findings, sum(isinstance(row.result, Figures) and not row.twin for row in rows)
