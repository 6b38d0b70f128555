# SPDX-License-Identifier: Apache-2.0
"""Judge two stored runs of the same questions: lm-eval's samples_*.jsonl, or the samples.jsonl of a gate."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from hileval import statistics
from hileval.errors import RunsError

if TYPE_CHECKING:
    from collections.abc import Sequence

STATUS = {"pass": 0, "fail": 1, "inconclusive": 6}
"""Exit status of each outcome; 2 is misuse, 3 files that cannot be paired."""

SAME = {
    "prompt": "compare runs of the same prompts: system prompt, examples and chat template included",
    "target": "compare runs of the same version of the task",
    "hash of the target": "compare runs of the same version of the task",
    "generation arguments": "compare runs with the same stop words, temperature, max_gen_toks and so on",
}
"""Properties of a question that both runs must share, and the remedy where they do not."""

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""Our names of lm-eval's filters of GSM8K."""
METRICS = ("exact_match", "acc")
"""Metrics that are taken where none is named, the first of them that a file has."""
WIDTH = 56
"""Characters of each answer in a line of `side_by_side`."""


@dataclass(frozen=True, slots=True)
class Flip:
    """One question that is answered differently now.

    Attributes:
        before: Share of the stored runs that were right.
        now: Share of the new runs that are right.
        stored_text: What the first stored run wrote.
        new_text: What the first new run wrote.
    """

    doc_id: int
    question: str
    target: str
    before: float
    now: float
    stored_text: str
    new_text: str

    @property
    def lost(self) -> bool:
        """Right before and wrong now."""
        return self.now < self.before


@dataclass(frozen=True)
class Answered:
    """A run's answer to one question."""

    doc_id: int
    question: str
    target: str
    text: str
    right: bool
    asked: dict[str, object]
    """Values of the properties in `SAME`; None where the file does not say."""


@dataclass(frozen=True)
class ReadRun:
    """The answers of a file under one filter and one metric."""

    filter: str
    metric: str
    answers: dict[str, Answered]
    """Answers by the hash of their question."""


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of two runs."""

    outcome: Literal["pass", "fail", "inconclusive"]
    verdict: str
    caveat: str
    """Properties that neither file names, so that a pass does not prove them; empty for none."""
    scores: tuple[int, int, int]
    """Right answers before and after, and the number of questions."""
    scored_by: str
    """Metric and filter."""
    drop: float
    """Share of right answers before minus that after; negative is an improvement."""
    interval: tuple[float, float]
    """Bounds of the drop, each at level 1 - alpha."""
    alpha: float
    p_value: float
    flips: list[Flip]
    """Losses first."""

    @property
    def lost(self) -> int:
        """Questions that were right before and are wrong now."""
        return sum(flip.lost for flip in self.flips)

    def __str__(self) -> str:
        before, after, n = self.scores
        low, high = (100 * bound for bound in self.interval)
        level = 100 * (1 - self.alpha)
        lines = [
            f"{self.outcome}: {self.verdict}",
            f"  before   {before} of {n} right, {before / n:.1%} ({self.scored_by})",
            f"  after    {after} of {n} right, {after / n:.1%}",
            f"  changed  {self.lost} lost, {len(self.flips) - self.lost} gained",
            f"  drop     {100 * self.drop:.1f} points, from {low:.1f} to {high:.1f}, each bound at {level:g} %",
            f"  p        {self.p_value:.2g}, if nothing changed",
        ]
        return "\n".join([*lines, *[f"  caveat   {self.caveat}"] * bool(self.caveat)])


def read_answers(path: Path, which: str | None = None, metric: str | None = None) -> ReadRun:
    """Read the answers of a file.

    Args:
        path: A samples file.
        which: lm-eval's name of a filter, or `strict` or `flexible`; None takes flexible-extract, or the only one.
        metric: lm-eval's name of a metric that is 0 or 1; None takes the first of `METRICS` that is there.

    Raises:
        RunsError: Unreadable, not answers, a question twice, a score that is neither 0 nor 1, or none of the filter.
    """
    rows, number = [], 0
    try:
        # Split at line feeds alone: answers may hold U+2028, U+2029 and U+0085, which end a line of text and no JSON.
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if line.strip():
                rows.append((number, json.loads(line)))
                if not isinstance(rows[-1][1], dict):
                    raise ValueError("a line that is no object of keys")  # noqa: TRY301 - one place words it
        chosen = _filter({row["filter"] for _, row in rows if "filter" in row}, which, path)
        found: dict[str, Answered] = {}
        for number, row in rows:  # noqa: B007 - the error names it
            if row.get("filter", chosen) != chosen:
                continue
            metric = metric or _metric(row)
            answered = _answered(row, chosen, metric)
            if found.setdefault(row["doc_hash"], answered) is not answered:
                raise ValueError(f"question {row['doc_id']} occurs twice")  # noqa: TRY301 - one place words it
    except RunsError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunsError(
            f"not stored answers: {_wrong(error)}",
            where=f"{path}:{number}" if number else str(path),
            remedy="name a samples_*.jsonl of `lm_eval --log_samples` (0.4.3 or later)",
        ) from error
    if not found:
        raise RunsError("no answers", where=str(path), remedy="name a file that `lm_eval --log_samples` wrote")
    return ReadRun(chosen, str(metric), found)


def _wrong(error: Exception) -> str:
    """Describe what is wrong with a row, or with the whole file."""
    if isinstance(error, OSError):
        return str(error.strerror)
    if isinstance(error, KeyError):
        return f"a row says nothing of {error.args[0]}"
    if isinstance(error, RecursionError):
        return "JSON of a thousand levels"
    return f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else f"{error}"


def _filter(held: set[str], which: str | None, path: Path) -> str:
    """The filter whose rows are read."""
    wanted = FILTERS.get(which or "flexible", which or "")
    if which is None and wanted not in held and len(held) == 1:
        return held.pop()
    if held and wanted not in held:
        names = ", ".join(sorted(held))
        raise RunsError(f"no answer of filter {wanted}", where=str(path), remedy=f"use --filter with one of: {names}")
    return wanted


def _metric(row: dict[str, Any]) -> str:
    """The metric of a row where none was named; a gate's own rows have one."""
    if "strict_correct" in row:
        return METRICS[0]
    metric = next((name for name in METRICS if name in row), None)
    if metric is None:
        raise KeyError(f"{' or '.join(METRICS)}; choose with --metric from {row.get('metrics') or 'its keys'}")
    return metric


def _answered(row: dict[str, Any], which: str, metric: str) -> Answered:
    """A row of a file, ours or lm-eval's."""
    ours = "strict_correct" in row
    right = row["strict_correct" if which == FILTERS["strict"] else "flexible_correct"] if ours else row[metric]
    if right not in (0, 1):
        raise ValueError(f"{metric}: a score of {right!r}, neither 0 nor 1; choose another with --metric")
    if "doc_hash" not in row:
        raise KeyError("doc_hash, which lm-eval writes from 0.4.3 on")
    return Answered(
        doc_id=row["doc_id"],
        question=row["question"] if ours else str(row["doc"].get("question", row["doc"])),
        target=str(row["target"]).rsplit("#### ", 1)[-1],
        text=_text(row["text"] if ours else row["resps"][0][0]),
        right=bool(right),
        asked=_asked(row),
    )


def _text(answer: object) -> str:
    """An answer; empty where a server gave null, as for a model that was still reasoning at the token limit."""
    return "" if answer is None else str(answer)


def _asked(row: dict[str, Any]) -> dict[str, object]:
    """Properties of a row's question, by their names in `SAME`."""
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
    arguments = [list(request.values() if isinstance(request, dict) else request)[1:] for request in requests]
    return arguments if arguments and all(arguments) else None


def _asked_alike(old: dict[str, Answered], new: dict[str, Answered], where: str) -> tuple[list[str], list[str]]:
    """Names of `SAME` that one file says of a question and the other does not, and those that neither says.

    Raises:
        RunsError: Something of a question was not the same in both.
    """
    one_sided, unsaid = [], []
    for name, remedy in SAME.items():
        pairs = [(answer.doc_id, answer.asked[name], new[key].asked[name]) for key, answer in old.items()]
        in_both = [(doc_id, was, now) for doc_id, was, now in pairs if was is not None and now is not None]
        changed = [(doc_id, was, now) for doc_id, was, now in in_both if was != now]
        if changed:
            doc_id, was, now = changed[0]
            raise RunsError(
                f"{len(changed)} of {len(old)} questions were asked with another {name}, first question {doc_id}: "
                f"{was!s:.200} before, {now!s:.200} after",
                where=where,
                remedy=remedy,
            )
        if any((was is None) != (now is None) for _, was, now in pairs):
            one_sided.append(name)
        elif len(in_both) < len(pairs):
            unsaid.append(name)
    return one_sided, unsaid


def compare(
    before: Path, after: Path, which: str | None = None, *, metric: str | None = None, alpha: float, margin: float
) -> Comparison:
    """Judge whether the second run is worse: both tests at alpha; a pass excludes a drop of the margin.

    Raises:
        RunsError: See `read_answers`; or the files share no question, or not all of them, or something of `SAME`
            differs.
    """
    first = read_answers(before, which, metric)
    old, new = first.answers, read_answers(after, first.filter, first.metric).answers
    where = f"{before}, {after}"
    if old.keys() != new.keys():
        raise RunsError(
            f"{len(old)} and {len(new)} questions, {len(old.keys() & new.keys())} of them the same",
            where=where,
            remedy="compare runs of the same questions",
        )
    one_sided, unsaid = _asked_alike(old, new, where)
    base, now = (np.array([[side[key].right for key in old]]) for side in (old, new))
    p_value = max(statistics.drop_p(base, now), float(statistics.difference_p(statistics.differences(base, now))))
    low, high = statistics.drop_interval(base, now, alpha)
    flips = [
        Flip(was.doc_id, was.question, was.target, was.right, new[key].right, was.text, new[key].text)
        for key, was in old.items()
        if was.right != new[key].right
    ]
    outcome: Literal["pass", "fail", "inconclusive"] = "inconclusive"
    if p_value <= alpha:
        outcome, verdict = "fail", "the second run is worse"
    elif one_sided:
        verdict = f"only one of the files says the {' and the '.join(one_sided)}, so they may have been asked otherwise"
    elif base.mean() < margin:
        verdict = f"with {base.mean():.1%} right before, no drop of {margin:.1%} could show"
    elif high <= margin:
        outcome, verdict = "pass", f"a drop of {margin:.1%} is excluded"
    else:
        verdict = f"no drop is shown, and one of {margin:.1%} is not excluded"
    return Comparison(
        outcome=outcome,
        verdict=verdict,
        caveat=f"neither file says the {' or the '.join(unsaid)}" if unsaid else "",
        scores=(int(base.sum()), int(now.sum()), base.size),
        scored_by=f"{first.metric}, {first.filter}",
        drop=statistics.drop(base, now),
        interval=(low, high),
        alpha=alpha,
        p_value=p_value,
        flips=[flip for flip in flips if flip.lost] + [flip for flip in flips if not flip.lost],
    )


def side_by_side(flips: Sequence[Flip], most: int) -> str:
    """Questions with the stored and the new answer in two columns; says how many are left out."""
    parts = []
    for flip in flips[:most]:
        shares = f"right in {flip.before:.0%} of stored runs, {flip.now:.0%} now"
        head = f"question {flip.doc_id}, answer {textwrap.shorten(flip.target, 2 * WIDTH)}: {shares}"
        columns = ["stored", *_wrapped(flip.stored_text)], ["now", *_wrapped(flip.new_text)]
        rows = (f"  {a:<{WIDTH}} | {b}".rstrip() for a, b in itertools.zip_longest(*columns, fillvalue=""))
        parts.append("\n".join([head, *rows]))
    if len(flips) > most:
        parts.append(f"and {len(flips) - most} more flipped questions in flips.md")
    return "\n".join(parts)


def _wrapped(text: str) -> list[str]:
    lines = [line for part in text.strip().splitlines() for line in textwrap.wrap(part, WIDTH) or [""]]
    return lines or ["(nothing)"]


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line and a remedy, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  where: {self.prog}\n  to do: {self.prog} --help\n")


def _share(least: float, most: float, text: str) -> float:
    with contextlib.suppress(ValueError):
        if least <= float(text) <= most:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text}; expected {least:g} to {most:g}")


def _margin(text: str) -> float:
    return _share(0.001, 0.5, text)


def _alpha(text: str) -> float:
    return _share(1e-6, 0.2, text)


def main(arguments: Sequence[str]) -> int:
    """Run `hileval compare`; returns its exit status."""
    parser = _Parser(
        prog="hileval compare",
        description="Judge two stored runs of the same questions. Shows both answers of each one whose result changed.",
        epilog="exit status: 0 pass; 1 fail; 2 misuse; 3 files that cannot be read or paired; 6 inconclusive.",
    )
    add = parser.add_argument
    add("before", type=Path, metavar="BEFORE", help="samples_*.jsonl of lm-eval (or samples.jsonl of a gate): trusted.")
    add("after", type=Path, metavar="AFTER", help="The run to judge, in the same format.")
    add("--filter", metavar="NAME", help="lm-eval's filter (default: flexible-extract, or the only one of the file).")
    add("--metric", metavar="NAME", help="Metric that is 0 or 1 (default: exact_match, else acc).")
    add("--margin", type=_margin, default=0.02, help="Largest drop that may pass, a share (default: 0.02).")
    add("--alpha", type=_alpha, default=0.01, help="Probability that two equal runs fail (default: 0.01).")
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # answers may hold half of a character, and a locale may know few
            stream.reconfigure(errors="backslashreplace")
    try:
        made = compare(
            options.before,
            options.after,
            options.filter,
            metric=options.metric,
            alpha=options.alpha,
            margin=options.margin,
        )
        sys.stdout.write(f"{made}\n{side_by_side(made.flips, len(made.flips))}".rstrip("\n") + "\n")
        sys.stdout.flush()  # what does not arrive must not end as a pass
    except RunsError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    except OSError as error:  # a closed pipe, a full disk: Python's last flush would fail once more
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        return 5
    except Exception as error:  # noqa: BLE001 - Python's own status for it is 1, which means fail
        sys.stderr.write(f"error: a bug in hileval: {type(error).__name__}: {error}\n")
        return 70
    return STATUS[made.outcome]
