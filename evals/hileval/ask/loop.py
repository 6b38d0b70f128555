# SPDX-License-Identifier: Apache-2.0
"""Ask an engine until the rule has an answer, with a journal: a crash or Ctrl-C costs no question twice.

The journal holds one JSON line per answer, written as soon as it is given, below a line that names what was asked:
gate, identity, engine and a fingerprint of the code under test. Answers of anything else are set aside, never mixed in;
a line cut short by a crash is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import numpy as np
from pydantic import Field, ValidationError

from hileval.gates.rule import outcomes_of
from hileval.records.baseline import require_same_prompts, stored_outcomes, versions
from hileval.records.records import Evaluation, Identity, Run, Sample, Setting
from hilgate.errors import NothingSelectedError
from hilgate.model import Scalar, StrictModel
from hilgate.model.record import Environment, Outcome
from hilgate.pytest_recorder import bytes_to_compare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.ask.documents import DocumentQuestions
    from hileval.ask.harness import TaskQuestions
    from hileval.gates.resolve import ResolvedGate
    from hileval.gates.rule import GateRule


class Questions(Protocol):
    """A task on an engine."""

    identity: Identity
    available: int
    """How many questions the task holds."""

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; `run` 0 is the first time they are asked."""


def questions_of(gate: ResolvedGate) -> TaskQuestions | DocumentQuestions:
    """The questions of a gate, of either kind; its engine starts when the first one is asked.

    Raises:
        HilgateError: See the classes.
    """
    if gate.declared.kind == "documents":
        from hileval.ask.documents import DocumentQuestions

        return DocumentQuestions(gate)
    if gate.declared.weights == "repository":  # a hub's model may have to be fetched, and then a bar says something
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when lm-eval imports tqdm: a bar per look says nothing
    from hileval.ask.harness import TaskQuestions  # imports lm-eval, which takes seconds

    return TaskQuestions(gate)


class Listener(Protocol):
    """Whoever shows the run to a person."""

    def asked(self, run: int, done: int, most: int, right: int) -> None:
        """After every batch: questions answered and the most there will be in this run, and how many were right."""


def ask_until_decided(
    gate: ResolvedGate, questions: Questions, listener: Listener, limit: int | None = None
) -> Evaluation:
    """Ask what the rule of a gate wants to know.

    Without a baseline all questions of the plan are asked once: only the floor can be judged.

    Raises:
        NothingSelectedError: No question is left to ask.
        RecordsError: The baseline is of something else, or does not hold the questions of the plan.
        HilgateError: Whatever the engine raises; nothing is scored then.
    """
    rule, baseline, which = gate.rule, gate.baseline, gate.declared.filter
    ids = rule.order(questions.available)[:limit]
    if not ids:
        raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
    base = stored_outcomes(baseline, which, questions.identity, ids) if baseline else None
    stops = rule.plan(len(ids))
    runs: list[list[Sample]] = []
    seconds: list[float] = []
    wanted = True
    while wanted:
        runs.append([])
        began = time.monotonic()
        for stop in stops:
            # Each run in more batches than the one before: the same ones would give the same bits, one run copied.
            for batch in np.array_split(np.array(ids[len(runs[-1]) : stop]), len(runs)):
                fresh = questions.ask(batch.tolist(), len(runs) - 1) if batch.size else []
                if baseline:
                    require_same_prompts(baseline, fresh)
                runs[-1] += fresh
            listener.asked(len(runs) - 1, stop, len(ids), sum(s.correct(which) for s in runs[-1]))
            samples = [sample for run in runs for sample in run]
            stored = baseline.flagged(samples) if baseline else None
            so_far = gate.declared.broken.check("so far", stored, samples, len(stops))
            outcomes = [outcomes_of(run, which) for run in runs]
            wanted, more = rule.next_to_ask(base, outcomes, wrecked=so_far.outcome is Outcome.FAIL)
            if not more:
                break
        seconds.append(time.monotonic() - began)
    return Evaluation(
        ids,
        tuple(
            Run(identity=questions.identity, samples=tuple(run), seconds=spent)
            for run, spent in zip(runs, seconds, strict=True)
        ),
        base,
    )


class Heading(StrictModel):
    """First line of a journal."""

    gate: str
    identity: Identity
    engine: str
    attention_backend: str | None
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """Arguments of the engine."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Switches of the engine."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that an answer depends on."""
    code: str
    """sha256 of the kernels and of this package: answers of other code are not these answers."""

    @classmethod
    def of(cls, gate: ResolvedGate, identity: Identity, code: str, run: str = "") -> Heading:
        """What is asked now; `run` names one run of several."""
        declared = gate.declared
        return cls(
            gate=f"{gate.name} {run}".rstrip(),
            identity=identity,
            engine=gate.engine,
            attention_backend=declared.attention_backend,
            arguments=dict(declared.engine_args),
            environment=dict(declared.env),
            versions=versions(),
            code=code,
        )


class RecordedRuns(StrictModel):
    """One of the K runs of a baseline, kept until all are there."""

    heading: Heading
    run: Run
    setting: Setting
    environment: Environment


SIZES = (25, 200, 64, 500, 100)
"""Questions asked at once in recorded runs, by turns; the first is the gate's own step."""


def batches(rule: GateRule, available: int, number: int) -> list[tuple[int, ...]]:
    """Ids of all questions for a recorded run, batch by batch: each run in another order and of another size.

    K runs of one process in one order are one run copied K times. The first comes in the gate's own order.
    """
    ids = np.random.default_rng([rule.seed, number] if number else rule.seed).permutation(available).tolist()
    size = SIZES[number % len(SIZES)]
    return [tuple(ids[first : first + size]) for first in range(0, available, size)]


class _Line(StrictModel):
    run: int
    sample: Sample


class Journal:
    """Questions that remembers its answers across processes."""

    def __init__(self, inner: Questions, path: Path, heading: Heading) -> None:
        """Read what an earlier process left, if it is about the same thing; else set it aside as `<name>.before`."""
        self._inner, self._path = inner, path
        self._known: dict[int, dict[int, Sample]] = defaultdict(dict)
        self.identity = inner.identity
        self.available = inner.available
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if lines and lines[0] != _bytes(heading):
            path.replace(path.with_name(path.name + ".before"))
            lines = []
        kept = lines[:1] or [_bytes(heading)]
        for line in lines[1:]:
            try:
                entry = _Line.model_validate_json(line)
            except ValidationError:
                continue
            kept.append(line if line.endswith(b"\n") else line + b"\n")
            self._known[entry.run][entry.sample.doc_id] = entry.sample
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(path)

    @property
    def resumed(self) -> int:
        """Answers that need not be asked again."""
        return sum(map(len, self._known.values()))

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; only those not in the journal are asked."""
        known = self._known[run]
        missing = [one for one in ids if one not in known]
        if missing:
            fresh = self._inner.ask(missing, run)
            with self._path.open("ab") as file:
                file.write(b"".join(_bytes(_Line(run=run, sample=sample)) for sample in fresh))
                file.flush()
                os.fsync(file.fileno())
            known.update({sample.doc_id: sample for sample in fresh})
        return [known[one] for one in ids]

    def finish(self) -> None:
        """The gate has its answer: a later run asks again, because it is to say something about another day."""
        self._path.unlink(missing_ok=True)


def code_fingerprint(*folders: Path) -> str:
    """sha256 over the names and contents of the Python and TOML files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.suffix in {".py", ".toml"}):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + bytes_to_compare(file))
    return digest.hexdigest()


def _bytes(model: StrictModel) -> bytes:
    return json.dumps(model.model_dump(mode="json"), sort_keys=True).encode() + b"\n"
