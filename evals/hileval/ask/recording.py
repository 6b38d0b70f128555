# SPDX-License-Identifier: Apache-2.0
"""Runs of a trusted attention, each in a process of its own: those of a baseline, and the one that stands for it."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from hileval.ask.loop import JOURNALS, Journal, batches, heading_of, questions_of
from hileval.gates.served import check_backend
from hileval.records.answers import RecordedRun, Run, Setting
from hileval.records.baseline import environment
from hilgate.errors import MisuseError, NothingSelectedError
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.ask.documents import DocumentQuestions
    from hileval.ask.harness import TaskQuestions
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.answers import Sample


def recorded_path(name: str, number: int) -> Path:
    """File of a finished run, until all runs of its baseline are there."""
    return JOURNALS / f"{name}.run-{number + 1}.json"


def record_run(gate: ResolvedGate, number: int) -> None:
    """Make one run of a baseline; a finished run is reused if the same model and setting answer.

    Raises:
        MisuseError: The attention that served the run is not the one that the gate names.
        HilgateError: Whatever the engine raises.
    """
    questions = questions_of(gate)
    planned = batches(gate.rule, questions.available, number)
    _record(gate, questions, planned, number, f"run {number}", recorded_path(gate.name, number))


def record_beside(gate: ResolvedGate, path: Path) -> None:
    """Ask a trusted attention what a gate without a baseline asks now: the same questions in the same batches.

    Raises:
        NothingSelectedError: No question is left to ask.
        HilgateError: See `record_run`.
    """
    questions = questions_of(gate)
    if not (ids := gate.rule.order(questions.available)[: gate.limit]):
        raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
    planned = [ids[begin:end] for begin, end in itertools.pairwise((0, *gate.rule.plan(len(ids))))]
    _record(gate, questions, planned, 0, "beside", path)


def _record(
    gate: ResolvedGate,
    questions: TaskQuestions | DocumentQuestions,
    planned: Sequence[tuple[int, ...]],
    number: int,
    title: str,
    path: Path,
) -> None:
    """Ask batch by batch, with a journal, and write the run; a finished one of the same model and setting is reused."""
    heading = heading_of(gate, questions.identity, title)
    if path.is_file() and RecordedRun.model_validate_json(path.read_bytes()).heading == heading:
        return
    journal = Journal(questions, JOURNALS / f"{gate.name}.{title.replace(' ', '-')}.jsonl", heading)
    began = time.monotonic()
    answers: dict[int, Sample] = {}
    try:
        for batch in planned:
            answers |= zip(batch, journal.ask(batch, number), strict=True)
        if questions.engine is None:  # every answer was in the journal, and no engine can say who served them
            questions.ask(batch, number)
        served = check_backend(gate, questions.engine)
    finally:
        if questions.engine is not None:
            questions.engine.close()
    assert questions.engine is not None
    if served is not None and served.outcome is not Outcome.PASS:
        raise MisuseError(
            f"not recorded: {served.message}",
            where=gate.name,
            remedy="name the --attention-backend that is to serve it",
        )
    run = Run(
        identity=questions.identity,
        samples=tuple(answers[doc_id] for doc_id in sorted(answers)),
        seconds=time.monotonic() - began,
    )
    setting = Setting(
        engine=questions.engine.name,
        attention_backend=served.labels["backend"] if served else gate.engine,
        arguments=dict(gate.declared.engine_args),
    )
    recorded = RecordedRun(heading=heading, run=run, setting=setting, environment=environment())
    path.write_text(recorded.model_dump_json(), encoding="utf-8")
    journal.finish()
