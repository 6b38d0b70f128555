# SPDX-License-Identifier: Apache-2.0
"""The stored answers of a gate, read again as they were asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hileval.records.baseline import require_same_prompts, stored_outcomes
from hileval.records.records import Evaluation, Identity, Run, Sample
from hilgate.errors import RecordsError
from hilgate.model import FINDINGS_FILE
from hilgate.model.record import Check, json_lines

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.gates.resolve import ResolvedGate


UNKNOWN = Identity(
    model="unknown",
    weights="0" * 64,
    tokenizer="0" * 64,
    chat_template="0" * 64,
    task="0" * 64,
    num_fewshot=0,
    generation="{}",
    lm_eval="unknown",
)
"""Digest of the questions of stored answers, which was compared when they were asked."""


def read_evaluation(folder: Path, gate: ResolvedGate, limit: int | None) -> tuple[Evaluation, Check | None]:
    """The stored answers of a gate, and the finding of who served them.

    Raises:
        RecordsError: They cannot be read, hold a question twice in a run, or are not what the baseline was asked.
    """
    declared, baseline = gate.declared, gate.baseline
    number, file = 0, folder / "samples.jsonl"
    try:
        samples, checks = [], []
        for number, line in json_lines(file):  # noqa: B007 - the error names it
            samples.append(Sample.model_validate_json(line))
        number, file = 0, folder / FINDINGS_FILE
        for number, line in json_lines(file):  # noqa: B007 - the error names it
            checks.append(Check.model_validate_json(line))
    except (OSError, ValueError) as error:
        raise RecordsError(
            f"not the answers of a gate: {type(error).__name__}: {str(error).splitlines()[0]}",
            where=f"{file}:{number}" if number else str(folder),
            remedy="name the folder that `gate` wrote",
        ) from error
    served = next((check for check in checks if f"/served-by-{declared.attention_backend}" in check.id), None)
    if declared.attention_backend is not None and served is None:
        raise RecordsError("nobody says who served it", where=str(folder), remedy="run the gate again")
    runs: list[list[Sample]] = []
    for sample in samples:
        if not runs or sample.doc_id == runs[0][0].doc_id:
            runs.append([])
        runs[-1].append(sample)
    if not runs:
        raise RecordsError("no answer", where=str(folder), remedy="run the gate again")
    ids = tuple(one.doc_id for one in runs[0])
    base = None
    if baseline is not None:
        require_same_prompts(baseline, samples)
        ids = gate.rule.order(baseline.n)[:limit]
        base = stored_outcomes(baseline, declared.filter, baseline.identity, ids)
    if any(tuple(one.doc_id for one in run) != ids[: len(run)] for run in runs):
        raise RecordsError(
            "answers to other questions than the rule asks, or in another order",
            where=str(folder),
            remedy="name --when and --limit as they were when it was asked",
        )
    identity = baseline.identity if baseline else UNKNOWN
    return Evaluation(ids, tuple(Run(identity=identity, samples=tuple(run), seconds=0) for run in runs), base), served
