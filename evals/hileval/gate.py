"""The rule: from a run and a baseline to checks. Pure; no clock, no file, no engine.

Order matters. First who served the run (accuracy of something else proves nothing), then broken output (it names the
cause), then the paired test against the baseline, then the absolute floor.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hileval import stats
from hileval.broken import Flag
from hilgate.errors import Exit, NothingSelectedError, RecordsError
from hilgate.model import Check, Number, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.declare import Gate
    from hileval.records import Baseline, Run, Sample, StoredAnswer


class IdentityMismatchError(RecordsError):
    """The baseline was recorded with another model, tokenizer, prompt or generation: nothing to compare."""


def pair_answers(run: Run, baseline: Baseline) -> list[tuple[StoredAnswer, Sample]]:
    """Match every sample with its stored answer; a run on fewer questions uses fewer of the baseline's.

    Raises:
        IdentityMismatchError: an identity field or a prompt differs, or a question is not in the baseline.
    """
    where = f"baseline of {baseline.gate}, recorded {baseline.recorded}"
    remedy = (
        "undo the change, or record a new baseline on purpose: python -m hileval baseline record <gate> --reason ..."
    )
    if differences := run.identity.differences(baseline.identity):
        raise IdentityMismatchError(
            f"not the run the baseline was recorded with: {'; '.join(differences)}", where=where, remedy=remedy
        )
    stored = {answer.doc_hash: answer for answer in baseline.answers}
    pairs = []
    for sample in run.samples:
        answer = stored.get(sample.doc_hash)
        if answer is None:
            raise IdentityMismatchError(
                f"question {sample.doc_id} ({sample.doc_hash[:12]}) is not in the baseline", where=where, remedy=remedy
            )
        if answer.prompt_hash != sample.prompt_hash:
            raise IdentityMismatchError(
                f"question {sample.doc_id} was asked with another prompt", where=where, remedy=remedy
            )
        pairs.append((answer, sample))
    return pairs


def judge(name: str, gate: Gate, run: Run, baseline: Baseline, served: Check | None) -> list[Check]:
    """Every check of a gate.

    Args:
        name: The gate's key; check ids start with it.
        gate: Its declaration.
        run: What was measured; must hold at least one sample.
        baseline: What it is compared with.
        served: The check of who served attention (`hileval.served`), None where the engine has no choice.

    Raises:
        IdentityMismatchError: the run and the baseline are not comparable.
    """
    pairs = pair_answers(run, baseline)
    checks = [
        _broken(f"{name}/broken-output", gate, pairs),
        _accuracy(f"{name}/accuracy", gate, pairs, run.seconds),
        _floor(f"{name}/floor", gate, run),
    ]
    if served is None:
        return checks
    if served.outcome is not Outcome.PASS:
        checks = [_not_measured(check) for check in checks]
    return [served, *checks]


def exit_status(checks: Sequence[Check]) -> Exit:
    """One status for all checks: a failure outranks a missing result, which outranks an inconclusive one.

    Raises:
        NothingSelectedError: there is no check at all.
    """
    if not checks:
        raise NothingSelectedError("a gate without checks", remedy="this is a bug in hileval")
    outcomes = {check.outcome for check in checks}
    for outcome, status in (
        (Outcome.FAIL, Exit.FAIL),
        (Outcome.DID_NOT_RUN, Exit.NOTHING_RAN),
        (Outcome.INCONCLUSIVE, Exit.INCONCLUSIVE),
    ):
        if outcome in outcomes:
            return status
    return Exit.PASS


def _not_measured(check: Check) -> Check:
    return check.model_copy(
        update={
            "outcome": Outcome.DID_NOT_RUN,
            "message": f"not measured on the required attention; what answered instead: {check.message}",
        }
    )


def _broken(check_id: str, gate: Gate, pairs: Sequence[tuple[StoredAnswer, Sample]]) -> Check:
    n = len(pairs)
    kinds = Counter(flag for _, sample in pairs for flag in sample.flags)
    count = sum(bool(sample.flags) for _, sample in pairs)
    before = sum(bool(answer.flags) for answer, _ in pairs)
    expected = before / n + 1 / n
    p_value = stats.excess(count, n, expected)
    allowed = max(gate.broken.max_rate, 2 * before / n)
    numbers: dict[str, Number] = {
        "n": n,
        "broken": count,
        "baseline_broken": before,
        "p_value": p_value,
        "limit": allowed,
    }
    numbers |= {flag.value.replace(" ", "_").replace("-", "_"): kinds[flag] for flag in Flag if kinds[flag]}
    listed = ", ".join(f"{kinds[flag]} {flag.value}" for flag in Flag if kinds[flag]) or "none"
    first = next((sample for _, sample in pairs if sample.flags), None)
    shown = f"; first: question {first.doc_id}: {first.text[:60]!r}" if first else ""
    reasons = []
    if kinds[Flag.NON_FINITE]:
        reasons.append("a log-probability was NaN or infinite")
    if count / n > allowed:
        reasons.append(f"more than {allowed:.1%} broken")
    if count >= gate.broken.min_count and p_value <= gate.broken.alpha:
        reasons.append(f"p={p_value:.1e} against the baseline's {before}")
    message = f"{count}/{n} answers broken ({listed})" + (f": {', '.join(reasons)}{shown}" if reasons else shown)
    outcome = Outcome.FAIL if reasons else Outcome.PASS
    return Check(id=check_id, outcome=outcome, message=message, numbers=numbers)


def _accuracy(check_id: str, gate: Gate, pairs: Sequence[tuple[StoredAnswer, Sample]], seconds: float) -> Check:
    n = len(pairs)
    paired = stats.pair([a.strict_correct for a, _ in pairs], [s.strict_correct for _, s in pairs])
    correct = sum(sample.strict_correct for _, sample in pairs)
    before = sum(answer.strict_correct for answer, _ in pairs)
    flexible = sum(sample.flexible_correct for _, sample in pairs)
    p_value = stats.mcnemar(paired)
    upper = stats.drop_upper(paired, gate.alpha)
    low, high = stats.interval(correct, n, gate.alpha)
    if p_value <= gate.alpha:
        outcome, verdict = Outcome.FAIL, f"dropped (p={p_value:.1e} <= {gate.alpha:g})"
    elif upper < gate.margin:
        outcome, verdict = Outcome.PASS, f"a drop of {gate.margin:.1%} is excluded (bound {upper:.1%})"
    else:
        outcome = Outcome.INCONCLUSIVE
        verdict = f"a drop of {gate.margin:.1%} is not excluded (bound {upper:.1%}, p={p_value:.2g})"
    message = (
        f"{correct}/{n} = {correct / n:.1%} [{low:.1%}, {high:.1%}], baseline {before / n:.1%}, "
        f"lost {paired.lost}, gained {paired.gained}: {verdict}"
    )
    lost = [str(sample.doc_id) for answer, sample in pairs if answer.strict_correct and not sample.strict_correct]
    labels = {"filter": "strict-match", "lost_questions": " ".join(lost[:20])} if lost else {"filter": "strict-match"}
    numbers: dict[str, Number] = {
        "n": n,
        "correct": correct,
        "exact_match": correct / n,
        "ci_low": low,
        "ci_high": high,
        "flexible_exact_match": flexible / n,
        "baseline_exact_match": before / n,
        "lost": paired.lost,
        "gained": paired.gained,
        "same_text": sum(answer.text == sample.text for answer, sample in pairs),
        "p_value": p_value,
        "alpha": gate.alpha,
        "drop_upper": upper,
        "margin": gate.margin,
        "seconds": round(seconds, 1),
    }
    return Check(id=check_id, outcome=outcome, message=message, labels=labels, numbers=numbers, seconds=seconds)


def _floor(check_id: str, gate: Gate, run: Run) -> Check:
    n, correct = len(run.samples), run.strict_correct
    low, high = stats.interval(correct, n, gate.alpha)
    share = correct / n
    if share >= gate.floor:
        outcome, verdict = Outcome.PASS, "not below"
    elif high < gate.floor:
        outcome, verdict = Outcome.FAIL, "below"
    else:
        outcome, verdict = Outcome.INCONCLUSIVE, "below, but the interval reaches"
    message = f"{correct}/{n} = {share:.1%} [{low:.1%}, {high:.1%}] is {verdict} the floor of {gate.floor:.0%}"
    numbers: dict[str, Number] = {"n": n, "exact_match": share, "ci_low": low, "ci_high": high, "floor": gate.floor}
    return Check(id=check_id, outcome=outcome, message=message, numbers=numbers)
