# SPDX-License-Identifier: Apache-2.0
"""Ask the engines of a gate: others than ours in processes of their own, ours until the rule has an answer.

Ours is asked with a journal, so that a crash or Ctrl-C costs no question twice. The journal holds one JSON line per
answer, written as soon as it is given, below a line that names what was asked: gate, identity, engine and a fingerprint
of the code under test. Answers of anything else are set aside, never mixed in; a line cut short by a crash is asked
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from pydantic import ValidationError

from hileval.command import stderr
from hileval.engines import EngineError
from hileval.gates.declare import EVALS
from hileval.gates.rule import outcomes_of
from hileval.gates.served import check_backend
from hileval.records.answers import (
    ASKED_FILE,
    BESIDE_FILE,
    FLIPS_FILE,
    SAMPLES_FILE,
    SIDE_FILE,
    Asked,
    Heading,
    Identity,
    Run,
    Sample,
)
from hileval.records.baseline import environment, read_pair, require_same_prompts, stored_outcomes, versions
from hilgate.errors import NothingSelectedError
from hilgate.model import StrictModel
from hilgate.model.record import Outcome
from hilgate.pytest_recorder import bytes_to_compare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hileval.engines import Engine
    from hileval.gates.resolve import ResolvedGate
    from hileval.records.answers import SideName

JOURNALS = Path("results/journals")
"""Folder of answers whose gate does not have all of them yet."""


class Questions(Protocol):
    """A task on an engine."""

    identity: Identity
    available: int
    """Number of questions in the task."""
    engine: Engine | None
    """Started when the first question is asked."""

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; `run` 0 is the first time they are asked."""


def questions_of(gate: ResolvedGate) -> Questions:
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


def ask(gate: ResolvedGate, out: Path) -> None:
    """Ask every engine of a gate; `out` gets their answers, and loses what another gate left there.

    Raises:
        HilgateError: The declaration, the model, an engine or lm-eval stopped it; nothing was measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    left = [out / name for name in (SAMPLES_FILE, ASKED_FILE, BESIDE_FILE, FLIPS_FILE)]
    for stale in [*left, *out.glob(SIDE_FILE.format("*"))]:
        stale.unlink(missing_ok=True)
    if gate.drift is not None:
        ask_sides(gate.name, gate.drift.sides, out)
        return
    if gate.wants_pair:
        assert gate.identity.model == gate.declared.model, "the model is here, or no process is started"
        limited = [] if gate.limit is None else ["--limit", str(gate.limit)]
        words = ("beside", gate.name, "--when", gate.when, "--file", str(out / BESIDE_FILE), *limited)
        in_its_own_process(f"the same questions to {gate.declared.paired_with}", *words)
        pair = read_pair(out / BESIDE_FILE, gate.name, gate.declared.paired_with, gate.declared.filter)
        gate = dataclasses.replace(gate, baseline=pair)
    ask_ours(gate, out)


def ask_sides(name: str, sides: Sequence[SideName], out: Path) -> None:
    """Ask each engine of a drift gate, the peer last: it is given the answers of the others."""
    for which in sides:
        others = [side for side in sides if side != "peer"] if which == "peer" else []
        given = [word for side in others for word in ("--given", f"{side}={out / SIDE_FILE.format(side)}")]
        in_its_own_process(which, "side", name, which, "--file", str(out / SIDE_FILE.format(which)), *given)


def in_its_own_process(what: str, *words: str) -> None:
    """Have an engine asked by `python -m hileval.ask`: a plugin cannot leave a process that it has joined.

    Raises:
        EngineError: It ended without its answers.
    """
    if status := subprocess.run([sys.executable, "-m", "hileval.ask", *words], check=False).returncode:
        raise EngineError(
            f"{what} ended with status {status}",
            where=words[1],
            remedy="read what it says above, then repeat the command",
        )


def ask_ours(gate: ResolvedGate, out: Path) -> None:
    """Ask the gate's own attention, and write what it answered.

    Raises:
        HilgateError: See `ask`; what was answered until then stays in the journal.
    """
    with journal_of(gate) as journal:
        runs = ask_until_decided(gate, journal)
        asked = Asked(
            gate=gate.name,
            identity=journal.identity,
            available=journal.available,
            limit=gate.limit,
            answers=tuple(len(run.samples) for run in runs),
            seconds=tuple(run.seconds for run in runs),
            engine=journal.engine.name,
            served=check_backend(gate, journal.engine),
            environment=environment(),
        )
        asked.write(out, [sample for run in runs for sample in run.samples])


@contextlib.contextmanager
def journal_of(gate: ResolvedGate, run: str = "") -> Iterator[Journal]:
    """The questions of a gate with a journal; `run` names one run of several.

    At the end the engine is closed. The journal goes only if nothing went wrong: a later run asks again, because it is
    to say something about another day.
    """
    questions = questions_of(gate)
    path = JOURNALS / f"{gate.name}.{run.replace(' ', '-')}".rstrip(".")
    journal = Journal(questions, path.with_name(f"{path.name}.jsonl"), heading_of(gate, questions.identity, run))
    if journal.resumed:
        stderr.print(f"{journal.resumed} answers of an interrupted run are kept", highlight=False)
    try:
        yield journal
    finally:
        if questions.engine is not None:
            questions.engine.close()
    journal.path.unlink(missing_ok=True)


def ask_until_decided(gate: ResolvedGate, questions: Questions | Journal) -> list[Run]:
    """Ask what the rule of a gate wants to know.

    Without a baseline all questions of the plan are asked once: only the floor can be judged.

    Returns:
        The runs, all but the last complete.

    Raises:
        NothingSelectedError: No question is left to ask.
        RecordsError: The baseline is of something else, or does not hold the questions of the plan.
        HilgateError: Whatever the engine raises; nothing is scored then.
    """
    rule, baseline, which = gate.rule, gate.baseline, gate.declared.filter
    ids = rule.order(questions.available)[: gate.limit]
    if not ids:
        raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
    base = stored_outcomes(baseline, which, questions.identity, ids) if baseline else None
    looks = rule.plan(len(ids))
    runs: list[Run] = []
    another_run = True
    while another_run:
        began, samples = time.monotonic(), list[Sample]()
        for look in looks:
            # Each run in more batches than the one before: the same ones would give the same bits, one run copied.
            for batch in np.array_split(np.array(ids[len(samples) : look]), len(runs) + 1):
                fresh = questions.ask(batch.tolist(), len(runs)) if batch.size else []
                if baseline:
                    require_same_prompts(baseline, fresh)
                samples += fresh
            seconds = time.monotonic() - began
            run = Run(identity=questions.identity, samples=tuple(samples), seconds=seconds)
            _print_progress(len(runs) + 1, run.correct(which), look, len(ids), seconds)
            answered = [sample for each in (*runs, run) for sample in each.samples]
            stored = baseline.flagged(answered) if baseline else None
            so_far = gate.declared.broken.check("so far", stored, answered, len(looks))
            outcomes = [outcomes_of(each.samples, which) for each in (*runs, run)]
            another_run, go_on = rule.next_to_ask(base, outcomes, wrecked=so_far.outcome is Outcome.FAIL)
            if not go_on:
                break
        runs.append(run)
    return runs


def _print_progress(run: int, right: int, asked: int, most: int, seconds: float) -> None:
    """Print on stderr how far a run is, how many answers are right, and how long it may still take."""
    left = f", at most {seconds / asked * (most - asked):.0f} s more" if asked < most else ""
    stderr.print(f"run {run}: {asked}/{most} asked, {right} right, {seconds:.0f} s{left}", highlight=False)


def heading_of(gate: ResolvedGate, identity: Identity, run: str = "") -> Heading:
    """The heading of the answers that are asked now; `run` names one run of several."""
    return Heading(
        gate=f"{gate.name} {run}".rstrip(),
        identity=identity,
        engine=gate.engine,
        attention_backend=gate.declared.attention_backend,
        arguments=dict(gate.declared.engine_args),
        environment=dict(gate.declared.env),
        versions=versions(),
        code=code_fingerprint(EVALS.parent / "kernels/pagedkv", EVALS / "hileval"),
    )


class _Line(StrictModel):
    run: int
    sample: Sample


class Journal:
    """Questions that remembers its answers across processes."""

    def __init__(self, inner: Questions, path: Path, heading: Heading) -> None:
        """Read what an earlier process left, if it is about the same thing; else set it aside as `<name>.before`."""
        self._inner, self.path, self.heading = inner, path, heading
        self._answers: dict[int, dict[int, Sample]] = defaultdict(dict)
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
            self._answers[entry.run][entry.sample.doc_id] = entry.sample
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(path)

    @property
    def resumed(self) -> int:
        """Answers that need not be asked again."""
        return sum(map(len, self._answers.values()))

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; only those not in the journal are asked."""
        answers = self._answers[run]
        missing = [doc_id for doc_id in ids if doc_id not in answers]
        if missing:
            fresh = self._inner.ask(missing, run)
            with self.path.open("ab") as file:
                file.write(b"".join(_bytes(_Line(run=run, sample=sample)) for sample in fresh))
                file.flush()
                os.fsync(file.fileno())
            answers.update({sample.doc_id: sample for sample in fresh})
        return [answers[doc_id] for doc_id in ids]

    @property
    def engine(self) -> Engine:
        """The engine that answers. Where an interrupted run left every answer, it is asked one again, to start it."""
        if self._inner.engine is None:
            run, answers = max(self._answers.items())
            self._inner.ask([next(iter(answers))], run)
        assert self._inner.engine is not None
        return self._inner.engine


def code_fingerprint(*folders: Path) -> str:
    """sha256 over the names and contents of the Python and TOML files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.suffix in {".py", ".toml"}):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + bytes_to_compare(file))
    return digest.hexdigest()


def _bytes(model: StrictModel) -> bytes:
    return json.dumps(model.model_dump(mode="json"), sort_keys=True).encode() + b"\n"
