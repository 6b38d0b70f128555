# SPDX-License-Identifier: Apache-2.0
"""Runs of a trusted attention, each in a process of its own: those of a baseline, and the one that stands for it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hileval.ask.loop import Heading, Journal, RecordedRuns, batches, code_fingerprint, questions_of
from hileval.gates.declare import EVALS
from hileval.gates.judge import check_backend
from hileval.records.baseline import environment, make_baseline
from hileval.records.records import Run, Setting
from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.ask.documents import DocumentQuestions
    from hileval.ask.harness import TaskQuestions
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.records import Sample

JOURNALS = Path("results/journals")
"""Where answers are kept until their gate has spoken."""
BESIDE_FILE = "beside.json"
"""File in the output folder of a gate: the run of another attention that stands for its baseline."""


def recorded_path(name: str, number: int) -> Path:
    """Where a finished run waits for the others."""
    return JOURNALS / f"{name}.run-{number + 1}.json"


def fingerprint() -> str:
    """Fingerprint of the code that answers depend on."""
    return code_fingerprint(EVALS.parent / "kernels/pagedkv", EVALS / "hileval")


def record_run(gate: ResolvedGate, number: int) -> None:
    """Make one run of a baseline; a finished run is reused if the same model and setting answer.

    Raises:
        MisuseError: The attention that served the run is not the one that the gate names.
        HilgateError: Whatever the engine raises.
    """
    questions = questions_of(gate)
    given = batches(gate.rule, questions.available, number)
    _record(gate, questions, given, number, f"run {number}", recorded_path(gate.name, number))


def record_beside(gate: ResolvedGate, limit: int | None, path: Path) -> None:
    """Ask a trusted attention what a gate without a baseline asks now: the same questions in the same batches.

    Raises:
        NothingSelectedError: No question is left to ask.
        HilgateError: As of `record_run`.
    """
    questions = questions_of(gate)
    if not (ids := gate.rule.order(questions.available)[:limit]):
        raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
    given = [ids[begin:end] for begin, end in itertools.pairwise((0, *gate.rule.plan(len(ids))))]
    _record(gate, questions, given, 0, "beside", path)


def read_beside(gate: ResolvedGate, path: Path) -> ResolvedGate:
    """A gate beside the run that `record_beside` left: it is judged as against a baseline of one run.

    Raises:
        RecordsError: It is missing, damaged, of another attention, or has no finite log-probabilities.
    """
    asked, remedy = gate.declared.paired_with or "", "run the gate again"
    try:
        recorded = RecordedRuns.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        what = f"not a run of {asked}: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise RecordsError(what, where=str(path), remedy=remedy) from error
    if recorded.heading.gate != f"{gate.name} beside" or recorded.heading.attention_backend != asked:
        what = f"a run of {recorded.heading.gate} by {recorded.heading.attention_backend}, not beside {asked}"
        raise RecordsError(what, where=str(path), remedy=remedy)
    baseline = make_baseline(
        gate.name,
        [recorded.run],
        floor=0.0,
        which=gate.declared.filter,
        setting=recorded.setting,
        environment=recorded.environment,
        reason="asked in the same job, because nothing is recorded",
        by="nobody: it ends with this job",
    )
    return replace(gate, baseline=baseline, beside=recorded.setting.attention_backend)


def _record(
    gate: ResolvedGate,
    questions: TaskQuestions | DocumentQuestions,
    given: Sequence[tuple[int, ...]],
    number: int,
    title: str,
    path: Path,
) -> None:
    """Ask batch by batch, with a journal, and write the run; a finished one of the same model and setting is reused."""
    heading = Heading.of(gate, questions.identity, fingerprint(), title)
    if path.is_file() and RecordedRuns.model_validate_json(path.read_bytes()).heading == heading:
        return
    journal = Journal(questions, JOURNALS / f"{gate.name}.{title.replace(' ', '-')}.jsonl", heading)
    began = time.monotonic()
    found: dict[int, Sample] = {}
    try:
        for batch in given:
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
        samples=tuple(found[one] for one in sorted(found)),
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
