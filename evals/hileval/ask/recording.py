# SPDX-License-Identifier: Apache-2.0
"""Make the runs of a baseline: each asks all questions once, in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from hileval.ask.loop import Heading, Journal, RecordedRuns, batches, code_fingerprint, questions_of
from hileval.gates.declare import EVALS
from hileval.gates.judge import check_backend
from hileval.records.baseline import environment
from hileval.records.records import Run, Setting
from hilgate.errors import MisuseError
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.records import Sample

JOURNALS = Path("results/journals")
"""Where answers are kept until their gate has spoken."""


def recorded_path(name: str, number: int) -> Path:
    """Where a finished run waits for the others."""
    return JOURNALS / f"{name}.run-{number + 1}.json"


def fingerprint() -> str:
    """Of the code that answers depend on."""
    return code_fingerprint(EVALS.parent / "kernels/pagedkv", EVALS / "hileval")


def record_run(gate: ResolvedGate, number: int) -> None:
    """Make one run of a baseline; a finished run is reused if the same model and setting answer.

    Raises:
        MisuseError: Another attention served it than the gate names.
        HilgateError: Whatever the engine raises.
    """
    questions = questions_of(gate)
    heading = Heading.of(gate, questions.identity, fingerprint(), f"run {number}")
    path = recorded_path(gate.name, number)
    if path.is_file() and RecordedRuns.model_validate_json(path.read_bytes()).heading == heading:
        return
    journal = Journal(questions, path.with_suffix(".jsonl"), heading)
    began = time.monotonic()
    found: dict[int, Sample] = {}
    try:
        for batch in batches(gate.rule, questions.available, number):
            found |= zip(batch, journal.ask(batch, number), strict=True)
        if questions.engine is None:  # all of it was in the journal, but nobody to ask who served it
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
        samples=tuple(found[one] for one in range(questions.available)),
        seconds=time.monotonic() - began,
    )
    setting = Setting(
        engine=questions.engine.name,
        attention_backend=served.labels["backend"] if served else gate.engine,
        arguments=dict(gate.declared.engine_args),
    )
    recorded = RecordedRuns(heading=heading, run=run, setting=setting, environment=environment())
    path.write_text(recorded.model_dump_json(), encoding="utf-8")
    journal.finish()
