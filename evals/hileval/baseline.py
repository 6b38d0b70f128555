"""Recording a baseline: the trusted run that later runs are paired with."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from hileval.records import Baseline, StoredAnswer
from hilgate.errors import RecordsError
from hilgate.model import Environment

if TYPE_CHECKING:
    from hileval.records import Run

PACKAGES = ("torch", "triton", "vllm", "transformers", "lm_eval")


class UnfitBaselineError(RecordsError):
    """The run is not good enough to be a baseline: what it gets wrong could never be reported as lost."""


def make_baseline(gate: str, run: Run, *, floor: float, engine: str, attention_backend: str, reason: str) -> Baseline:
    """Turn a run into a baseline.

    Raises:
        UnfitBaselineError: exact match below the gate's floor, or an answer with a non-finite log-probability.
    """
    n = len(run.samples)
    if run.strict_correct < floor * n:
        raise UnfitBaselineError(
            f"{run.strict_correct}/{n} right is below the floor of {floor:.0%}",
            where=gate,
            remedy="find out why first; a baseline below the floor could not pass its own gate",
        )
    if bad := sum(sample.non_finite > 0 for sample in run.samples):
        raise UnfitBaselineError(
            f"{bad} answers have non-finite log-probabilities", where=gate, remedy="fix the engine"
        )
    return Baseline(
        gate=gate,
        recorded=dt.datetime.now(tz=dt.UTC).date(),
        reason=reason,
        engine=engine,
        attention_backend=attention_backend,
        environment=environment(),
        identity=run.identity,
        n=n,
        answers=tuple(
            StoredAnswer(
                doc_hash=sample.doc_hash,
                prompt_hash=sample.prompt_hash,
                text=sample.text,
                finish_reason=sample.finish_reason,
                n_tokens=sample.n_tokens,
                strict_correct=sample.strict_correct,
                flexible_correct=sample.flexible_correct,
                flags=sample.flags,
            )
            for sample in run.samples
        ),
    )


def environment() -> Environment:
    """Where this process runs, without host names."""
    import torch

    versions = {}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                versions[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Environment(
        host="",
        device=device,
        cores=os.cpu_count() or 1,
        memory_gib=round(memory, 1),
        python=platform.python_version(),
        versions=versions,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
