# SPDX-License-Identifier: Apache-2.0
"""Judge two stored runs of the same questions: our samples.jsonl, or lm-eval's samples_*.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hileval import statistics
from hileval.gates.judge import Flip
from hilgate.errors import RecordsError
from hilgate.model.record import Check, Outcome, json_lines

if TYPE_CHECKING:
    from pathlib import Path

    from hileval.records.records import Filter

SAME = {
    "prompt": "compare runs of the same prompts: system prompt, examples and chat template included",
    "target": "compare runs of the same version of the task",
    "hash of the target": "compare runs of the same version of the task",
    "generation arguments": "compare runs with the same stop words, temperature, max_gen_toks and so on",
}
"""What must be the same of each question in both runs, and what to do where it is not."""

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""lm-eval's names."""


@dataclass(frozen=True)
class Answered:
    """What a run says to one question."""

    doc_id: int
    question: str
    target: str
    text: str
    right: bool
    asked: dict[str, object]
    """What `SAME` names; None where the file does not say."""


def read_answers(path: Path, which: Filter) -> dict[str, Answered]:
    """Answers by their question's hash.

    Raises:
        RecordsError: Unreadable, not answers, a question twice, a score that is neither 0 nor 1, or none of the filter.
    """
    found: dict[str, Answered] = {}
    others, number = set[str](), 0
    try:
        for number, line in json_lines(path):  # noqa: B007 - the error names it
            row = json.loads(line)
            if "filter" in row and row["filter"] != FILTERS[which]:
                others.add(str(row["filter"]))
                continue
            ours = "strict_correct" in row
            right = row[f"{which}_correct"] if ours else row["exact_match"]
            if right not in (0, 1):
                raise ValueError(f"a score of {right!r}")  # noqa: TRY301 - one place words what is wrong with a file
            if "doc_hash" not in row:
                raise KeyError("doc_hash, which lm-eval writes from 0.4.3 on")
            if row["doc_hash"] in found:
                raise ValueError(f"question {row['doc_id']} occurs twice")  # noqa: TRY301 - the same
            found[row["doc_hash"]] = Answered(
                doc_id=row["doc_id"],
                question=row["question"] if ours else str(row["doc"].get("question", row["doc"])),
                target=str(row["target"]).rsplit("#### ", 1)[-1],
                text=_text(row["text"] if ours else row["resps"][0][0]),
                right=bool(right),
                asked=_asked(row),
            )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordsError(
            f"not stored answers: {type(error).__name__}: {error}",
            where=f"{path}:{number}" if number else str(path),
            remedy="name a samples.jsonl of a gate, or samples_<task>_<time>.jsonl of lm-eval 0.4.3 or later, of "
            "a task with an exact_match",
        ) from error
    if not found:
        held = f"; the file holds {', '.join(sorted(others))}" if others else ""
        other = next((name for name in FILTERS if FILTERS[name] in others), None)
        raise RecordsError(
            f"no answer of filter {FILTERS[which]}",
            where=str(path),
            remedy=(f"use --filter {other}" if other else f"name answers of {' or '.join(FILTERS.values())}") + held,
        )
    return found


def _text(answer: object) -> str:
    """An answer; empty where a server gave null, as for a model that was still reasoning at the token limit."""
    return "" if answer is None else str(answer)


def _asked(row: dict[str, Any]) -> dict[str, object]:
    """What a row says of its question, by the names in `SAME`."""
    return {
        "prompt": row.get("prompt_hash") or None,
        "target": str(row["target"]).rsplit("#### ", 1)[-1],
        "hash of the target": row.get("target_hash") or None,
        "generation arguments": _generation(row),
    }


def _generation(row: dict[str, Any]) -> object:
    """The arguments of each request but its prompt, which lm-eval writes as `gen_args_0: {arg_0: ..., arg_1: ...}`."""
    if row.get("generation"):  # ours
        return [[json.loads(row["generation"])]]
    requests = row.get("arguments") or []
    requests = requests.values() if isinstance(requests, dict) else requests
    found = [list(one.values() if isinstance(one, dict) else one)[1:] for one in requests]
    return found if found and all(found) else None


def _asked_alike(old: dict[str, Answered], new: dict[str, Answered], where: str) -> tuple[list[str], list[str]]:
    """Names of `SAME` that one file says of a question and the other does not, and those that neither says.

    Raises:
        RecordsError: Something of a question was not the same in both.
    """
    one_sided, unsaid = [], []
    for name, remedy in SAME.items():
        said = [(one.doc_id, one.asked[name], new[key].asked[name]) for key, one in old.items()]
        known = [(doc_id, was, now) for doc_id, was, now in said if was is not None and now is not None]
        changed = [(doc_id, was, now) for doc_id, was, now in known if was != now]
        if changed:
            doc_id, was, now = changed[0]
            raise RecordsError(
                f"{len(changed)} of {len(old)} questions were asked with another {name}, first question {doc_id}: "
                f"{was!s:.200} before, {now!s:.200} after",
                where=where,
                remedy=remedy,
            )
        if any((was is None) != (now is None) for _, was, now in said):
            one_sided.append(name)
        elif len(known) < len(said):
            unsaid.append(name)
    return one_sided, unsaid


def compare(before: Path, after: Path, which: Filter, *, alpha: float, margin: float) -> tuple[Check, list[Flip]]:
    """Whether the second run is worse: both tests at alpha; a pass excludes a drop of the margin.

    Raises:
        RecordsError: See `read_answers`; or the files share no question, or not all of them, or something of `SAME`
            differs.
    """
    old, new = read_answers(before, which), read_answers(after, which)
    if old.keys() != new.keys():
        raise RecordsError(
            f"{len(old)} and {len(new)} questions, {len(old.keys() & new.keys())} of them the same",
            where=f"{before}, {after}",
            remedy="compare runs of the same questions",
        )
    one_sided, unsaid = _asked_alike(old, new, f"{before}, {after}")
    base, now = (np.array([[side[key].right for key in old]]) for side in (old, new))
    p_value = max(statistics.drop_p(base, now), float(statistics.difference_p(statistics.differences(base, now))))
    low, high = statistics.drop_interval(base, now, alpha)
    flips = [
        Flip(one.doc_id, one.question, one.target, one.right, new[key].right, one.text, new[key].text)
        for key, one in old.items()
        if one.right != new[key].right
    ]
    flips.sort(key=lambda flip: not flip.lost)
    lost = sum(flip.lost for flip in flips)
    if p_value <= alpha:
        outcome, verdict = Outcome.FAIL, "dropped"
    elif one_sided:
        outcome = Outcome.INCONCLUSIVE
        verdict = f"only one of the files says the {' and the '.join(one_sided)}, so they may have been asked otherwise"
    elif high <= margin:
        outcome, verdict = Outcome.PASS, f"a drop of {margin:.1%} is excluded"
    else:
        outcome, verdict = Outcome.INCONCLUSIVE, f"no drop is shown, and one of {margin:.1%} is not excluded"
    n, drop = base.size, statistics.drop(base, now)
    message = (
        f"{base.sum()}/{n} = {base.mean():.1%} before, {now.sum()}/{n} = {now.mean():.1%} after, lost {lost}, "
        f"gained {len(flips) - lost}, drop {drop:.1%} [{low:.1%}, {high:.1%}], p={p_value:.2g}: {verdict}"
    )
    labels = {"passed_but": f"neither file says the {' or the '.join(unsaid)}"} if unsaid else {}
    message += "".join(f"; {caveat}" for caveat in labels.values())
    numbers = {"n": n, "lost": lost, "gained": len(flips) - lost, "p_value": p_value, "drop": drop}
    return Check(id="compare/accuracy", outcome=outcome, message=message, labels=labels, numbers=numbers), flips
