"""Planted runs and baselines: outcome vectors in, records out."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest

from hileval.broken import flags_of
from hileval.declare import Gate, load_gates
from hileval.records import Baseline, Identity, Run, Sample, StoredAnswer
from hilgate.model import Environment

if TYPE_CHECKING:
    from collections.abc import Sequence

IDENTITY = Identity(
    model="pocket/hybrid",
    weights="a" * 64,
    tokenizer="b" * 64,
    task="c" * 64,
    num_fewshot=0,
    generation="{}",
    lm_eval="0.4.13",
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Plant:
    """Makes runs and baselines from outcome vectors."""

    identity = IDENTITY

    @staticmethod
    def run(correct: Sequence[bool], *, texts: dict[int, str] | None = None, non_finite: Sequence[int] = ()) -> Run:
        samples = []
        for i, right in enumerate(correct):
            text = (texts or {}).get(i, f" Bob has 9. 9 + 7 = {16 if right else 15}\n#### {16 if right else 15}")
            bad = int(i in non_finite)
            samples.append(
                Sample(
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
            )
        return Run(identity=IDENTITY, samples=tuple(samples), seconds=1.5)

    @classmethod
    def baseline(cls, correct: Sequence[bool], **changes: object) -> Baseline:
        fields = (
            "doc_hash",
            "prompt_hash",
            "text",
            "finish_reason",
            "n_tokens",
            "strict_correct",
            "flexible_correct",
            "flags",
        )
        answers = [StoredAnswer(**{f: getattr(s, f) for f in fields}) for s in cls.run(correct).samples]
        values = {
            "gate": "pocket-hybrid",
            "recorded": dt.date(2026, 11, 21),
            "reason": "planted",
            "engine": "vllm 0.32.0",
            "attention_backend": "CPU_ATTN",
            "environment": Environment(host="", device="cpu", cores=2, memory_gib=8.0, python="3.11", versions={}),
            "identity": IDENTITY,
            "n": len(answers),
            "answers": answers,
        }
        return Baseline.model_validate(values | changes)


@pytest.fixture
def plant() -> type[Plant]:
    return Plant


@pytest.fixture(scope="session")
def gate() -> Gate:
    return load_gates()["pocket-hybrid"]
