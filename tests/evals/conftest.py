# SPDX-License-Identifier: Apache-2.0
"""Planted runs and baselines: outcome vectors in, records out."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from typing import TYPE_CHECKING
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
from support.gates import declared

from hileval.gates.rule import GateRule
from hileval.records.answers import Evaluation, Identity, Run, Sample, Setting, flags_of
from hileval.records.baseline import make_baseline
from hilgate.model.record import Environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.gates.declare import Gate
    from hileval.records.baseline import Baseline

IDENTITY = Identity(
    model="pocket/hybrid",
    weights="a" * 64,
    tokenizer="b" * 64,
    chat_template="e" * 64,
    task="c" * 64,
    num_fewshot=0,
    generation="{}",
    lm_eval="0.4.13",
)


@functools.cache
def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sample(i: int, text: str, right: bool, bad: int) -> Sample:
    """An answer to question `i`."""
    return Sample(
        doc_id=i,
        doc_hash=sha(f"doc {i}"),
        prompt_hash=sha(f"prompt {i}"),
        question=f"question {i}",
        target="16",
        text=text,
        finish_reason="stop",
        n_tokens=17,
        non_finite=bad,
        strict="16" if right else "15",
        flexible="16" if right else "15",
        strict_correct=right,
        flexible_correct=right,
        flags=flags_of(text, finish_reason="stop", non_finite=bad),
    )


class Plant:
    """Makes runs and baselines from outcome vectors."""

    identity = IDENTITY

    @staticmethod
    def run(
        correct: Sequence[bool],
        *,
        texts: dict[int, str] | None = None,
        non_finite: Sequence[int] = (),
        weights: str = IDENTITY.weights,
    ) -> Run:
        samples = []
        for i, right in enumerate(correct):
            text = (texts or {}).get(i, f" Bob has 9. 9 + 7 = {16 if right else 15}\n#### {16 if right else 15}")
            samples.append(sample(i, text, bool(right), int(i in non_finite)))
        return Run(identity=IDENTITY.model_copy(update={"weights": weights}), samples=tuple(samples), seconds=1.5)

    @classmethod
    def baseline(cls, *runs: Sequence[bool], **changes: object) -> Baseline:
        """One vector is five equal runs."""
        vectors = runs if len(runs) > 1 else runs * 5
        made = make_baseline(
            "pocket-hybrid",
            [cls.run(vector) for vector in vectors],
            floor=0.01,
            setting=Setting(engine="vllm 0.32.0", attention_backend="CPU_ATTN"),
            environment=Environment(host="", device="cpu", cores=2, memory_gib=8.0, python="3.11", versions={}),
            reason="planted",
            by="a planter",
        )
        return made.model_copy(update=changes)

    @classmethod
    def asked(cls, baseline: Baseline | None, *runs: Run) -> Evaluation:
        """A run as `conduct` leaves it, questions in the order of their ids."""
        ids = tuple(sample.doc_id for sample in max(runs, key=lambda run: len(run.samples)).samples)
        if baseline is None:
            return Evaluation(ids, runs, None)
        ids = tuple(question.doc_id for question in baseline.questions)
        return Evaluation(ids, runs, baseline.outcomes("strict"))


class PlantedQuestions:
    """Questions whose answers are known, on an engine with one attention layer; remembers what it was asked."""

    def __init__(self, run: Run, *, served_by: str = "pagedkv.", dies_after: float = math.inf) -> None:
        self.identity, self.available = run.identity, len(run.samples)
        self.engine: mock.Mock | None = None
        self.asked: list[tuple[int, int]] = []
        self.batches: list[tuple[int, ...]] = []
        self._samples, self._dies_after = run.samples, dies_after
        self._layer = {"layer": "l0", "impl": f"{served_by}Impl", "backend": "x.OWN", "writes": 1, "attentions": 1}

    def ask(self, ids: Sequence[int], run: int) -> list[Sample]:
        if len(self.asked) >= self._dies_after:
            raise KeyboardInterrupt
        self.engine = mock.Mock(attention_layers=lambda: [self._layer])
        self.engine.name = "vllm 0.32.0"
        self.asked += [(run, doc_id) for doc_id in ids]
        self.batches.append(tuple(ids))
        return [self._samples[doc_id] for doc_id in ids]


@pytest.fixture
def planted_questions() -> type[PlantedQuestions]:
    return PlantedQuestions


@pytest.fixture
def plant() -> type[Plant]:
    return Plant


@pytest.fixture(scope="session")
def gate() -> Gate:
    return declared().gates["pocket-hybrid"]


@pytest.fixture
def no_report_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval adds a report of the machine to its results: `pip list` and ten more programs each time. We read none."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", dict)


@pytest.fixture(scope="session")
def rule() -> GateRule:
    """Two hundred questions, looked at once."""
    return GateRule(questions=200, alpha=0.01, margin=0.03, beta=0.01, baseline_runs=5, unresolved="block")
