"""What was asked and answered, and which stored answers it may be compared with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval import stats
    from hileval.baseline import Baseline
    from hileval.declare import Gate
    from hileval.records import Identity, Run, Sample


class IdentityMismatchError(RecordsError):
    """The baseline was recorded with another model, tokenizer, prompt or generation: nothing to compare."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked and answered.

    Attributes:
        ids: Questions of the plan, in the order of asking; each run holds answers to the first of them.
        runs: All but the last are complete.
        base: Stored outcomes [K, questions] of `ids`; None without a baseline.
    """

    ids: tuple[int, ...]
    runs: tuple[Run, ...]
    base: stats.Outcomes | None

    @property
    def samples(self) -> list[Sample]:
        """Every answer."""
        return [sample for run in self.runs for sample in run.samples]

    @property
    def seconds(self) -> float:
        """Wall time of all runs."""
        return sum(run.seconds for run in self.runs)

    def outcomes(self, gate: Gate) -> list[stats.Outcomes]:
        """Per run, which answers are right under the gated filter."""
        return [np.array([s.correct(gate.filter) for s in run.samples], dtype=bool) for run in self.runs]


def stored_outcomes(gate: Gate, baseline: Baseline, identity: Identity, ids: Sequence[int]) -> stats.Outcomes:
    """Outcomes [K, n] of the questions `ids`, in that order, once it is sure that they are of the same thing.

    Raises:
        IdentityMismatchError: An identity field differs, or a question is not in the baseline.
    """
    if differences := identity.differences(baseline.identity):
        raise _mismatch(baseline, f"not the model the baseline was recorded with: {'; '.join(differences)}")
    hashes = {question.doc_id: question.doc_hash for question in baseline.questions}
    if missing := [one for one in ids if one not in hashes]:
        raise _mismatch(
            baseline, f"{len(missing)} of {len(ids)} questions are not in it, the first is question {missing[0]}"
        )
    return baseline.outcomes(gate.filter, [hashes[one] for one in ids])


def require_same_prompts(baseline: Baseline, samples: Sequence[Sample]) -> None:
    """Refuse answers to something else than the stored runs were asked.

    Raises:
        IdentityMismatchError: A question or its prompt differs.
    """
    stored = {question.doc_id: question for question in baseline.questions}
    for sample in samples:
        question = stored.get(sample.doc_id)
        if question is None or question.doc_hash != sample.doc_hash:
            raise _mismatch(baseline, f"question {sample.doc_id} ({sample.doc_hash[:12]}) is not in the baseline")
        if question.prompt_hash != sample.prompt_hash:
            raise _mismatch(baseline, f"question {sample.doc_id} was asked with another prompt")


def _mismatch(baseline: Baseline, what: str) -> IdentityMismatchError:
    return IdentityMismatchError(
        what,
        where=f"baseline of {baseline.gate}, recorded {baseline.recorded}",
        remedy="undo the change, or record a new baseline on purpose: python -m hileval baseline record <gate> ...",
    )
