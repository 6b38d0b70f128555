"""Asks questions until the rule has an answer: the loop between the rule, the engine and the journal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hileval.evaluation import Evaluation, require_same_prompts, stored_outcomes
from hileval.gate import broken_beyond_doubt
from hileval.records import Run
from hileval.rule import State, first_runs, order, stand
from hilgate.errors import NothingSelectedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.baseline import Baseline
    from hileval.declare import Gate
    from hileval.records import Identity, Sample
    from hileval.rule import Rule
    from hileval.stats import Outcomes


class Questions(Protocol):
    """A task on an engine."""

    identity: Identity
    available: int
    """How many questions the task holds."""

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        """Answers to these questions, in their order; `run` 0 is the first time they are asked."""


class Listener(Protocol):
    """Whoever shows the run to a person."""

    def asked(self, run: int, done: int, most: int, right: int) -> None:
        """After every batch: questions answered and the most there will be in this run, and how many were right."""


def conduct(
    gate: Gate,
    rule: Rule,
    baseline: Baseline | None,
    questions: Questions,
    listener: Listener,
    limit: int | None = None,
) -> Evaluation:
    """Ask what the rule wants to know.

    Without a baseline all questions of the plan are asked once: only the floor can be judged.

    Raises:
        NothingSelectedError: No question is left to ask.
        RecordsError: The baseline is of something else, or does not hold the questions of the plan.
        HilgateError: Whatever the engine raises; nothing is scored then.
    """
    ids = order(rule, questions.available)[:limit]
    if not ids:
        raise NothingSelectedError("no questions to ask", remedy="use a --limit of at least 1")
    base = stored_outcomes(gate, baseline, questions.identity, ids) if baseline else None
    stops = rule.plan(len(ids))
    runs: list[list[Sample]] = []
    seconds: list[float] = []
    wanted = True
    while wanted:
        runs.append([])
        began = time.monotonic()
        for stop in stops:
            fresh = questions.ask(ids[len(runs[-1]) : stop], len(runs) - 1)
            if baseline:
                require_same_prompts(baseline, fresh)
            runs[-1] += fresh
            listener.asked(len(runs) - 1, stop, len(ids), sum(s.correct(gate.filter) for s in runs[-1]))
            wanted, more = _next(gate, rule, baseline, base, runs)
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


def _next(
    gate: Gate, rule: Rule, baseline: Baseline | None, base: Outcomes | None, runs: list[list[Sample]]
) -> tuple[bool, bool]:
    """Whether another run is wanted, and whether this one has to go on."""
    if broken_beyond_doubt(gate, baseline, [sample for run in runs for sample in run]):
        return False, False
    if base is None:
        return False, True
    outcomes = [np.array([sample.correct(gate.filter) for sample in run], dtype=bool) for run in runs]
    state = stand(rule, base, outcomes).state
    if state is State.ASK_MORE:
        return len(runs) < first_runs(rule, base), True
    return state is State.RUN_AGAIN, False
