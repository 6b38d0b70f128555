# SPDX-License-Identifier: Apache-2.0
"""Runs of a trusted attention, each in a process of its own: those of a baseline, and the one that stands for it."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from hileval.ask.loop import JOURNALS, journal_of
from hileval.gates.served import check_backend
from hileval.records.answers import RecordedRun, Run, Setting
from hileval.records.baseline import environment
from hilgate.errors import MisuseError, NothingSelectedError
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.ask.loop import Journal
    from hileval.gates.resolve import ResolvedGate
    from hileval.gates.rule import GateRule
    from hileval.records.answers import Sample

SIZES = (25, 200, 64, 500, 100)
"""Questions asked at once in recorded runs, by turns; the first is the gate's own step."""


def batches(rule: GateRule, available: int, number: int) -> list[tuple[int, ...]]:
    """Ids of all questions for a recorded run, batch by batch: each run in another order and of another size.

    K runs of one process in one order are one run copied K times. The first comes in the gate's own order.
    """
    ids = np.random.default_rng([rule.seed, number] if number else rule.seed).permutation(available).tolist()
    size = SIZES[number % len(SIZES)]
    return [tuple(ids[first : first + size]) for first in range(0, available, size)]


def recorded_path(name: str, number: int) -> Path:
    """File of a finished run, until all runs of its baseline are there."""
    return JOURNALS / f"{name}.run-{number + 1}.json"


def record_run(gate: ResolvedGate, number: int) -> None:
    """Make one run of a baseline; a finished run is reused if the same model and setting answer.

    Raises:
        MisuseError: The attention that served the run is not the one that the gate names.
        HilgateError: Whatever the engine raises.
    """
    with journal_of(gate, f"run {number}") as journal:
        _record(gate, journal, batches(gate.rule, journal.available, number), number, recorded_path(gate.name, number))


def record_beside(gate: ResolvedGate, path: Path) -> None:
    """Ask a trusted attention what a gate without a baseline asks now: the same questions in the same batches.

    Raises:
        NothingSelectedError: No question is left to ask.
        HilgateError: See `record_run`.
    """
    with journal_of(gate, "beside") as journal:
        if not (ids := gate.rule.order(journal.available)[: gate.limit]):
            raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
        looks = itertools.pairwise((0, *gate.rule.plan(len(ids))))
        _record(gate, journal, [ids[begin:end] for begin, end in looks], 0, path)


def _record(gate: ResolvedGate, journal: Journal, planned: Sequence[tuple[int, ...]], number: int, path: Path) -> None:
    """Ask batch by batch and write the run; a finished one of the same model and setting is reused."""
    if path.is_file() and RecordedRun.model_validate_json(path.read_bytes()).heading == journal.heading:
        return
    began = time.monotonic()
    answers: dict[int, Sample] = {}
    for batch in planned:
        answers |= zip(batch, journal.ask(batch, number), strict=True)
    samples = tuple(answers[doc_id] for doc_id in sorted(answers))
    run = Run(identity=journal.identity, samples=samples, seconds=time.monotonic() - began)
    served = check_backend(gate, journal.engine)
    if served is not None and served.outcome is not Outcome.PASS:
        journal.path.unlink()  # else a repeated command would go on from the answers of this attention
        raise MisuseError(
            f"not recorded: {served.message}",
            where=gate.name,
            remedy="name the --attention-backend that is to serve it",
        )
    setting = Setting(
        engine=journal.engine.name,
        attention_backend=served.labels["backend"] if served else gate.engine,
        arguments=dict(gate.declared.engine_args),
    )
    recorded = RecordedRun(heading=journal.heading, run=run, setting=setting, environment=environment())
    path.write_text(recorded.model_dump_json(), encoding="utf-8")
