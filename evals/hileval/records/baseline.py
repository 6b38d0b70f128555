# SPDX-License-Identifier: Apache-2.0
"""Baselines (`evals/baselines/*.json`): K runs of a trusted engine, question by question, and who accepted them."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, StringConstraints, ValidationError, model_validator

from hileval import statistics
from hileval.records.answers import Filter, Flag, Identity, RecordedRun, Run, Setting, Sha, refuse_duplicates
from hilgate.errors import RecordsError
from hilgate.model import Key, Scalar, StrictModel, first_problem
from hilgate.model.record import Environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hileval.records.answers import Sample


REMEDY = "restore it from git, or record it anew: python -m hileval record <gate> --reason ..."
Digits = Annotated[str, StringConstraints(pattern=r"^[01]+$")]
"""One digit per run: 1 where it holds, 0 where it does not."""


NOBODY = "nobody yet"
"""Who accepted a proposal: it is no baseline."""


ENDS_WITH_JOB = "nobody: it ends with this job"
"""Who accepted a run of another attention in the same job, which stands for a baseline."""


class BaselineError(RecordsError):
    """The baseline is missing, truncated, or not what its schema says."""


class IdentityMismatchError(RecordsError):
    """The baseline was recorded with another model, tokenizer, prompt or generation: nothing to compare."""


class UnfitBaselineError(RecordsError):
    """The runs are not good enough to be a baseline: what they get wrong could never be reported as lost."""


class Question(StrictModel):
    """One question of a baseline: enough to pair, to compare and to see what changed."""

    doc_id: int = Field(ge=0)
    doc_hash: Sha
    prompt_hash: Sha
    text: str
    """Text of the first run."""
    strict: Digits
    """Runs that were right under the strict filter."""
    flexible: Digits
    broken: Digits
    """Runs that had a flag of `hileval.records.answers.Flag`."""
    same_text: Digits
    """Runs with the text of the first run."""
    flags: tuple[Flag, ...] = ()
    """Flags of all runs."""


class Baseline(StrictModel):
    """The file."""

    schema_version: Literal[2] = 2
    gate: Key
    recorded: dt.date
    reason: str = Field(min_length=1)
    """Why these runs were recorded."""
    accepted_by: str = Field(min_length=1)
    """Person or team that reviewed the runs and answers for them."""
    identity: Identity
    setting: Setting
    environment: Environment
    runs: int = Field(ge=1)
    n: int = Field(ge=1)
    questions: tuple[Question, ...]

    @model_validator(mode="after")
    def _complete(self) -> Baseline:
        if self.n != len(self.questions):
            raise ValueError(f"says n={self.n} but holds {len(self.questions)} questions: lines were lost")
        for question in self.questions:
            for name in ("strict", "flexible", "broken", "same_text"):
                if len(getattr(question, name)) != self.runs:
                    raise ValueError(
                        f"question {question.doc_id}: {name} is of {len(getattr(question, name))} runs, not {self.runs}"
                    )
        refuse_duplicates([question.doc_hash for question in self.questions], f"baseline of {self.gate}")
        refuse_duplicates([f"doc_id {question.doc_id}" for question in self.questions], f"baseline of {self.gate}")
        return self

    def outcomes(
        self, which: Literal["strict", "flexible", "broken"], hashes: Sequence[str] | None = None
    ) -> statistics.Outcomes:
        """Outcomes [runs, questions] of these questions, in this order; by default of all.

        Raises:
            KeyError: A question is not in the baseline.
        """
        stored = {question.doc_hash: getattr(question, which) for question in self.questions}
        rows = [[digit == "1" for digit in stored[doc_hash]] for doc_hash in (stored if hashes is None else hashes)]
        return np.array(rows, dtype=bool).reshape(-1, self.runs).T

    def d(self, which: Filter) -> float | None:
        """Discordance of its runs (`statistics.discordance`); None where there is only one."""
        return None if self.runs < 2 else statistics.discordance(self.outcomes(which))

    def distinct(self, which: Filter) -> int:
        """Number of different runs: copies of one run say nothing about the next."""
        return len(np.unique(self.outcomes(which), axis=0))

    def flagged(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Shares of its answers to the same questions that were broken, and that were only cut off; of none, 0."""
        hashes = {question.doc_hash for question in self.questions}
        asked = [sample.doc_hash for sample in samples if sample.doc_hash in hashes]
        if not asked:
            return 0.0, 0.0
        ends = {question.doc_hash for question in self.questions if question.flags == (Flag.TRUNCATED,)}
        cut = self.outcomes("broken", [doc_hash for doc_hash in asked if doc_hash in ends]).sum() / (
            self.runs * len(asked)
        )
        return float(self.outcomes("broken", asked).mean() - cut), float(cut)

    def changes(self, engine: str, arguments: dict[str, Scalar], now: Environment) -> tuple[str, ...]:
        """Differences from the stored runs besides the attention: they are allowed, and the report shows them.

        Args:
            engine: Name and version of the engine that answered.
            arguments: Its arguments.
            now: Where it answered.
        """
        setting = self.setting.model_copy(update={"engine": engine, "arguments": dict(arguments)})
        then = self.environment
        pairs = {"device": (then.device, now.device)}
        pairs |= {name: (then.versions[name], now.versions[name]) for name in then.versions if name in now.versions}
        differing = [f"{name}: {before} -> {after}" for name, (before, after) in pairs.items() if before != after]
        return (*setting.differences(self.setting), *differing)

    def write(self, path: Path) -> None:
        """Write as JSON, one question per line so that a diff shows which ones changed."""
        head = self.model_dump(mode="json", exclude={"questions"})
        lines = ",\n  ".join(json.dumps(question.model_dump(mode="json")) for question in self.questions)
        text = json.dumps(head, indent=1)[:-2] + f',\n "questions": [\n  {lines}\n ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read and check a baseline.

        Raises:
            BaselineError: missing, cut short, of another schema, or self-contradictory; names the field.
        """
        if not path.is_file():
            raise BaselineError("no baseline", where=str(path), remedy=REMEDY)
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise BaselineError("the baseline is not UTF-8", where=str(path), remedy=REMEDY) from error
        except ValidationError as error:
            what = f"the baseline is not valid: {first_problem(error)}"
            raise BaselineError(what, where=str(path), remedy=REMEDY) from error


def stored_outcomes(baseline: Baseline, which: Filter, identity: Identity, ids: Sequence[int]) -> statistics.Outcomes:
    """Outcomes [K, n] of the questions `ids`, in that order, once it is sure that they are of the same thing.

    Raises:
        BaselineError: Nobody accepted it.
        IdentityMismatchError: An identity field differs, or a question is not in the baseline.
    """
    if baseline.accepted_by == NOBODY:
        raise BaselineError(
            "a proposal that nobody has accepted is no baseline",
            where=f"baseline of {baseline.gate}, recorded {baseline.recorded}",
            remedy="look at it, then: python -m hileval accept <gate> --by NAME",
        )
    if differences := identity.differences(baseline.identity):
        raise _mismatch(baseline, f"not the model the baseline was recorded with: {'; '.join(differences)}")
    hashes = {question.doc_id: question.doc_hash for question in baseline.questions}
    if missing := [doc_id for doc_id in ids if doc_id not in hashes]:
        raise _mismatch(
            baseline, f"{len(missing)} of {len(ids)} questions are not in it, the first is question {missing[0]}"
        )
    return baseline.outcomes(which, [hashes[doc_id] for doc_id in ids])


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
        remedy="undo the change, or record a new baseline on purpose: python -m hileval record <gate> ...",
    )


def make_baseline(
    gate: str,
    runs: Sequence[Run],
    *,
    floor: float,
    which: Filter = "strict",
    setting: Setting,
    environment: Environment,
    reason: str,
    by: str = NOBODY,
) -> Baseline:
    """Turn K runs of the same questions into a baseline; `which` filter is the gated one.

    Raises:
        UnfitBaselineError: K = 0, runs of different questions or identities, exact match of a run below the gate's
            floor, or an answer with a non-finite log-probability.
    """
    if not runs:
        raise UnfitBaselineError("K = 0: no run", where=gate, remedy="record at least one; K >= 5 shares no luck")
    first = runs[0]
    for number, run in enumerate(runs, 1):
        n = len(run.samples)
        if differing := run.identity.differences(first.identity):
            what = f"run {number} is of another model: {'; '.join(differing)}"
            raise UnfitBaselineError(what, where=gate, remedy="record all runs of one model")
        if [s.prompt_hash for s in run.samples] != [s.prompt_hash for s in first.samples]:
            what = f"run {number} was asked other questions than run 1"
            raise UnfitBaselineError(what, where=gate, remedy="record all runs of one task")
        if run.correct(which) < floor * n:
            raise UnfitBaselineError(
                f"run {number}: {run.correct(which)}/{n} right is below the floor of {floor:.1%}",
                where=gate,
                remedy="find out why first; a baseline below the floor could not pass its own gate",
            )
        if bad := sum(sample.non_finite > 0 for sample in run.samples):
            raise UnfitBaselineError(
                f"run {number}: {bad} answers have non-finite log-probabilities", where=gate, remedy="fix the engine"
            )
    return Baseline(
        gate=gate,
        recorded=dt.datetime.now(tz=dt.UTC).date(),
        reason=reason,
        accepted_by=by,
        identity=first.identity,
        setting=setting,
        environment=environment,
        runs=len(runs),
        n=len(first.samples),
        questions=tuple(_question([run.samples[i] for run in runs]) for i in range(len(first.samples))),
    )


def read_pair(path: Path, gate: str, pair: str | None, which: Filter) -> Baseline:
    """The run that another attention left in the same job, as a baseline of one run.

    Args:
        path: Its file (`RecordedRun`).
        gate: The gate beside which it was asked.
        pair: The attention that was asked.
        which: The gated filter.

    Raises:
        RecordsError: The run is missing, damaged, of another attention, or has no finite log-probabilities.
    """
    remedy = "run the gate again"
    try:
        recorded = RecordedRun.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        what = f"not a run of {pair}: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise RecordsError(what, where=str(path), remedy=remedy) from error
    heading = recorded.heading
    if heading.gate != f"{gate} beside" or heading.attention_backend != pair:
        what = f"a run of {heading.gate} by {heading.attention_backend}, not beside {pair}"
        raise RecordsError(what, where=str(path), remedy=remedy)
    return make_baseline(
        gate,
        [recorded.run],
        floor=0.0,
        which=which,
        setting=recorded.setting,
        environment=recorded.environment,
        reason="asked in the same job, because nothing is recorded",
        by=ENDS_WITH_JOB,
    )


def _question(samples: Sequence[Sample]) -> Question:
    first = samples[0]
    return Question(
        doc_id=first.doc_id,
        doc_hash=first.doc_hash,
        prompt_hash=first.prompt_hash,
        text=first.text,
        strict=_digits(sample.strict_correct for sample in samples),
        flexible=_digits(sample.flexible_correct for sample in samples),
        broken=_digits(bool(sample.flags) for sample in samples),
        same_text=_digits(sample.text == first.text for sample in samples),
        flags=tuple(sorted({flag for sample in samples for flag in sample.flags})),
    )


def _digits(values: Iterable[bool]) -> str:
    return "".join("1" if value else "0" for value in values)


PACKAGES = ("torch", "triton", "vllm", "transformers", "lm_eval", "amd-aiter")


def versions() -> dict[str, str]:
    """Versions of the installed packages that an answer depends on."""
    installed = {}
    for package in PACKAGES:
        for name in (package, f"{package}-cpu"):
            try:
                installed[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return installed


def environment() -> Environment:
    """Hardware and versions of this process, without host names."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Environment(
        host="",
        device=device,
        cores=os.cpu_count() or 1,
        memory_gib=round(memory, 1),
        python=platform.python_version(),
        versions=versions(),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
