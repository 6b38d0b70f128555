# SPDX-License-Identifier: Apache-2.0
"""Judge what the engines of a gate answered: from their files and a baseline to checks. No clock, no engine.

Order matters. First who served the runs (accuracy of something else proves nothing), then broken output (it names the
cause), then the paired test against the baseline, then the absolute floor. Questions whose answer flipped are quoted
with the stored answer beside the new one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from statistics import NormalDist
from typing import TYPE_CHECKING

from hileval import statistics
from hileval.compare import Flip, side_by_side
from hileval.gates.drift import compare_sides
from hileval.gates.rule import RuleState, outcomes_of
from hileval.records.answers import BESIDE_FILE, REMEDY, SIDE_FILE, Asked, Evaluation, Side
from hileval.records.baseline import read_pair, require_same_prompts, stored_outcomes
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hileval.gates.resolve import ResolvedGate
    from hileval.gates.rule import GateRule, Standing
    from hileval.records.answers import Filter, Sample
    from hileval.records.baseline import Baseline
    from hilgate.model import Number


NO_BASELINE = "no baseline"
"""State of a gate without one."""
SHOWN_FLIPS = 3
"""Flipped questions that a message quotes; all of them are in flips.md."""


def judge(gate: ResolvedGate, folder: Path) -> tuple[list[Check], str]:
    """Every check of a gate from the answers in a folder, and all flipped questions in columns.

    Raises:
        RecordsError: The answers are missing, damaged or another gate's.
    """
    if gate.drift is not None:
        sides = {which: Side.unpack(folder / SIDE_FILE.format(which)) for which in gate.drift.sides}
        return compare_sides(gate.name, gate.drift.floor, sides), ""
    gate, asked, evaluation = read_evaluation(gate, folder)
    baseline, arguments = gate.baseline, gate.declared.engine_args
    changed = baseline.changes(asked.engine, arguments, asked.environment) if baseline else ()
    checks = judge_answers(gate, evaluation, asked.served, changed)
    flips = diff_answers(evaluation, baseline, gate.declared.filter) if baseline else ()
    return checks, side_by_side(flips, len(flips))


def read_evaluation(gate: ResolvedGate, folder: Path) -> tuple[ResolvedGate, Asked, Evaluation]:
    """The answers of a gate, once it is sure that they are what its rule asks and what its baseline was asked.

    Returns:
        The gate, with the run of its pair for a baseline where it wants one; who answered; and what.

    Raises:
        RecordsError: They are not, or they are missing or damaged.
    """
    asked, runs = Asked.read(folder)
    if asked.gate != gate.name:
        raise RecordsError(f"the answers of {asked.gate}, not of {gate.name}", where=str(folder), remedy=REMEDY)
    ids = gate.rule.order(asked.available)[: asked.limit]
    as_planned = all([sample.doc_id for sample in run.samples] == [*ids[: len(run.samples)]] for run in runs)
    if not as_planned or gate.limit not in {None, asked.limit}:
        raise RecordsError(
            "answers to other questions than the rule asks, or in another order",
            where=str(folder),
            remedy="name --when and --limit as they were when it was asked",
        )
    if gate.wants_pair:
        pair = read_pair(folder / BESIDE_FILE, gate.name, gate.declared.paired_with, gate.declared.filter)
        gate = dataclasses.replace(gate, baseline=pair)
    if gate.baseline is None:
        return gate, asked, Evaluation(ids, runs, None)
    for run in runs:
        require_same_prompts(gate.baseline, run.samples)
    return gate, asked, Evaluation(ids, runs, stored_outcomes(gate.baseline, gate.declared.filter, asked.identity, ids))


def judge_answers(
    resolved: ResolvedGate, evaluation: Evaluation, served: Check | None, changed: tuple[str, ...] = ()
) -> list[Check]:
    """Every check of a gate on answers.

    Args:
        resolved: The gate; without a baseline its floor alone is judged.
        evaluation: What was measured.
        served: The check of who served attention, None where the engine has no choice.
        changed: What else differs from the stored runs (`Baseline.changes`).
    """
    name, gate, rule, baseline = resolved.name, resolved.declared, resolved.rule, resolved.baseline
    accuracy_id, samples = f"{name}/accuracy", evaluation.samples
    stored = None if baseline is None else baseline.flagged(samples)
    new = [outcomes_of(run.samples, gate.filter) for run in evaluation.runs]
    looks = len(rule.plan(len(evaluation.ids)))
    broken_output = gate.broken.check(f"{name}/broken-output", stored, samples, looks)
    standing = None if evaluation.base is None else rule.stand(evaluation.base, new)
    share = counted = statistics.Share(new, rule.alpha)
    if standing is not None:
        counted = statistics.Share([run[: standing.n] for run in new[: standing.new_runs]], rule.alpha)
    floors = []
    if gate.floor is not None:
        floor = _floor(f"{name}/floor", gate.floor, share, None if resolved.beside else baseline)
        if resolved.beside and evaluation.base is not None:
            also = f"; {resolved.beside} in the same job: {evaluation.base.mean():.1%}"
            floor = floor.model_copy(update={"message": floor.message + also})
        floors = [floor]
    if standing is None:
        accuracy = _without_baseline(accuracy_id, resolved, evaluation, share)
    else:
        accuracy = _accuracy(accuracy_id, resolved, evaluation, standing, counted, changed)
    checks = [broken_output, _with_reservations(accuracy, resolved), *floors]
    if served is None:
        return checks
    if served.outcome is not Outcome.PASS:
        checks = [_not_measured(check) for check in checks]
    return [served, *checks]


def _with_reservations(check: Check, resolved: ResolvedGate) -> Check:
    """A pass of accuracy with what it does not prove: reports list such passes (`passed_but`)."""
    if check.outcome is not Outcome.PASS:
        return check
    labels, notes = check.labels, []
    if labels["state"] == RuleState.UNRESOLVED.value:
        notes.append("undecided after the last question and run")
    if labels["state"] == NO_BASELINE:
        notes.append("no baseline yet, so only the floor holds")
    if resolved.beside:
        notes.append(f"no baseline yet, so one run of {resolved.beside} in the same job stands for it")
    if labels.get("churn") == "yes":
        notes.append("answers churn")
    if not resolved.pinned:
        notes.append(UNPINNED)
    if "changed" in labels:
        notes.append(f"changed since the baseline: {labels['changed']}")
    return check.model_copy(update={"labels": labels | {"passed_but": "; ".join(notes)}}) if notes else check


def _not_measured(check: Check) -> Check:
    return check.model_copy(
        update={
            "outcome": Outcome.DID_NOT_RUN,
            "message": f"not measured on the required attention; what answered instead: {check.message}",
        }
    )


def _accuracy(
    check_id: str,
    resolved: ResolvedGate,
    evaluation: Evaluation,
    standing: Standing,
    share: statistics.Share,
    changed: tuple[str, ...],
) -> Check:
    """The check whether accuracy has dropped: its sentence, labels and numbers."""
    gate, rule, baseline = resolved.declared, resolved.rule, resolved.baseline
    assert baseline is not None
    assert evaluation.base is not None
    distinct, d = resolved.distinct, resolved.d
    outcome, verdict = _verdict(resolved, standing)
    churns = standing.churn_p <= rule.alpha and standing.state is not RuleState.FAIL
    if churns:
        verdict = (
            f"ANSWERS CHURN: {standing.churned:.1%} of them differ from the stored runs, which differ by {d or 0:.1%} "
            f"among themselves (p={standing.churn_p:.1e}): another rounding, or stored runs sharing theirs; {verdict}"
        )
    base = evaluation.base[:, : standing.n]
    flips = diff_answers(evaluation, baseline, gate.filter)
    lost, gained = [flip for flip in flips if flip.lost], [flip for flip in flips if not flip.lost]
    labels = {"filter": gate.filter, "state": standing.state.value, "churn": "yes" if churns else "no"}
    labels["baseline"] = f"{baseline.recorded} {baseline.identity.weights[:12]}"
    stored = f"baseline {base.mean():.1%} in {baseline.runs} runs"
    if resolved.beside:
        labels["baseline"] = f"none, beside {resolved.beside}"
        stored = f"{resolved.beside} in the same job {base.mean():.1%}, one run each"
    if lost:
        labels["lost_questions"] = " ".join(str(flip.doc_id) for flip in lost[:20])
    by_line, line_numbers = _by_line(evaluation.samples)
    unpinned = _unpinned(resolved, evaluation)
    message = f"{share}{by_line}, {stored}, lost {len(lost)}, gained {len(gained)}: {verdict}{unpinned}"
    if changed:
        labels["changed"] = "; ".join(changed)
        message += f"; changed since the baseline: {labels['changed']}"
    if outcome is not Outcome.PASS and lost:
        message += "\n" + side_by_side(lost, SHOWN_FLIPS)
    numbers: dict[str, Number] = share.numbers | {
        "n": standing.n,
        "runs": standing.new_runs,
        "correct": share.correct,
        "baseline_exact_match": float(base.mean()),
        "baseline_runs": baseline.runs,
        "baseline_distinct": distinct,
        "lost": len(lost),
        "gained": len(gained),
        "p_value": standing.p_value,
        "p_difference": standing.p_difference,
        "churned": standing.churned,
        "level": standing.level,
        "drop": standing.drop,
        "drop_low": standing.low,
        "drop_upper": standing.high,
        "margin": rule.margin,
        "seconds": round(evaluation.seconds, 1),
    }
    numbers |= ({} if d is None else {"d": d}) | line_numbers
    return Check(
        id=check_id, outcome=outcome, message=message, labels=labels, numbers=numbers, seconds=evaluation.seconds
    )


UNPINNED = "revision not pinned: this is main of today"


def _unpinned(resolved: ResolvedGate, evaluation: Evaluation) -> str:
    commit = evaluation.runs[0].identity.revision
    return "" if resolved.pinned else f"; {UNPINNED}{f', {commit}' if commit else ''}"


def _by_line(samples: Sequence[Sample]) -> tuple[str, dict[str, Number]]:
    """The share of right lines of documents, in words and numbers: shown, never tested (`hileval.ask.documents`)."""
    lines, right = sum(sample.lines for sample in samples), sum(sample.lines_right for sample in samples)
    if not lines:
        return "", {}
    text = f" of documents, {right}/{lines} = {right / lines:.1%} of their lines"
    return text, {"lines": lines, "lines_right": right, "line_match": right / lines}


def _verdict(resolved: ResolvedGate, standing: Standing) -> tuple[Outcome, str]:
    """Outcome and wording of a standing, for a merge or a release."""
    rule = resolved.rule
    p_value = max(standing.p_value, standing.p_difference)
    if standing.state is RuleState.FAIL:
        return Outcome.FAIL, f"dropped by {standing.drop:.1%} (p={p_value:.1e})"
    if unfit := _unfit(resolved, f"not failed (p={p_value:.2g}), but"):
        return Outcome.INCONCLUSIVE, unfit
    bound = f"{1 - rule.beta:.0%} bound {standing.high:.1%}" + (
        f" at one look of {standing.looks}" if standing.looks > 1 else ""
    )
    excluded = f"a drop of {rule.margin:.1%} is excluded ({bound})"
    undecided = f"a drop of {rule.margin:.1%} is not excluded ({bound}, p={p_value:.2g})"
    if standing.state is RuleState.PASS:
        return Outcome.PASS, excluded
    if standing.state is RuleState.UNRESOLVED and rule.unresolved == "flag":
        return Outcome.PASS, f"FLAGGED, {undecided} after {standing.new_runs} runs of {standing.n} questions"
    asked_less = standing.state in {RuleState.ASK_MORE, RuleState.RUN_AGAIN}
    way = "more questions would tell" if asked_less else _way_out(rule, standing)
    return Outcome.INCONCLUSIVE, f"{undecided}; {way}"


def _unfit(resolved: ResolvedGate, not_failed: str) -> str:
    """Why the stored runs cannot carry a pass; empty where they can."""
    rule, distinct = resolved.rule, resolved.distinct
    if resolved.beside:
        if rule.unresolved == "flag":
            return ""
        return (
            f"{not_failed} no baseline is recorded, and a release wants {rule.baseline_runs} runs: "
            f"python -m hileval record {resolved.name}"
        )
    if resolved.declared.deterministic:
        return f"declared deterministic, but its baseline holds {distinct} distinct runs" if distinct > 1 else ""
    if distinct < rule.baseline_runs:
        return (
            f"{not_failed} the baseline holds {distinct} distinct runs and the rule wants {rule.baseline_runs}: "
            "one run's luck would be shared by every merge"
        )
    return ""


def _way_out(rule: GateRule, standing: Standing) -> str:
    """Say what would decide a gate that asked everything it may.

    Where a share of the answers changes for good, as under another rounding, a mean moves by its square root over the
    questions, however often they are asked.
    """
    smallest = NormalDist().inv_cdf(1 - rule.beta) * math.sqrt(standing.churned / standing.n)
    hidden = (
        f"with {standing.churned:.1%} of the answers changed, {standing.n} questions can exclude a drop from about "
    )
    if smallest <= rule.margin:
        return f"{hidden}{smallest:.1%} on, so another run may decide: what was lost may be noise"
    return (
        f"{hidden}{smallest:.1%} on, and further runs of them cannot help. What decides: a margin of that size for "
        "this model (`rules` in gates.yaml), more questions, or stored runs that share this rounding "
        "(`hileval record --second` with an attention that rounds alike)"
    )


def _without_baseline(check_id: str, resolved: ResolvedGate, evaluation: Evaluation, share: statistics.Share) -> Check:
    gate, rule = resolved.declared, resolved.rule
    by_line, line_numbers = _by_line(evaluation.samples)
    source = (
        f"; {gate.published[0].kind}: {gate.published[0].value:.1%} ({gate.published[0].metric})"
        if gate.published
        else ""
    )
    if gate.floor is None:
        outcome, why = Outcome.INCONCLUSIVE, "neither a baseline nor a floor, so nothing is judged"
    else:
        outcome = Outcome.PASS if rule.unresolved == "flag" else Outcome.INCONCLUSIVE
        why = f"FLAGGED: no baseline yet, so only the floor holds{source}"
    return Check(
        id=check_id,
        outcome=outcome,
        message=f"{share}{by_line}, {why}{_unpinned(resolved, evaluation)}; record one: python -m hileval record",
        labels={"filter": gate.filter, "state": NO_BASELINE},
        numbers=share.numbers | {"correct": share.correct} | line_numbers,
        seconds=evaluation.seconds,
    )


def _floor(check_id: str, floor: float, share: statistics.Share, baseline: Baseline | None) -> Check:
    """Check the share against the floor.

    A baseline was held against it when it was recorded; then only certainty counts. Else the draw of the first
    questions, which is always the same, would decide for ever on a model near its floor.
    """
    if share.high < floor:
        outcome, verdict = Outcome.FAIL, "below"
    elif share.value >= floor:
        outcome, verdict = Outcome.PASS, "not below"
    elif baseline is not None:
        outcome, verdict = Outcome.PASS, "not below beyond doubt"
    else:
        outcome, verdict = Outcome.INCONCLUSIVE, "below, but the interval reaches"
    message = f"{share} is {verdict} the floor of {floor:.1%}"
    return Check(id=check_id, outcome=outcome, message=message, numbers=share.numbers | {"floor": floor})


FLIPPED = 0.5
"""A question has flipped when the share of its right answers moved by at least this much."""


def diff_answers(evaluation: Evaluation, baseline: Baseline, which: Filter) -> tuple[Flip, ...]:
    """Every flipped question under a filter, losses first, in the order of asking."""
    stored = {question.doc_id: question for question in baseline.questions}
    answers = defaultdict(list)
    for sample in evaluation.samples:
        answers[sample.doc_id].append(sample)
    flips = []
    for first, *others in (answers[sample.doc_id] for sample in evaluation.runs[0].samples):
        question = stored[first.doc_id]
        digits = question.strict if which == "strict" else question.flexible
        before = digits.count("1") / len(digits)
        now = sum(sample.correct(which) for sample in (first, *others)) / (1 + len(others))
        if abs(now - before) >= FLIPPED:
            flips.append(Flip(first.doc_id, first.question, first.target, before, now, question.text, first.text))
    return tuple(sorted(flips, key=lambda flip: not flip.lost))
