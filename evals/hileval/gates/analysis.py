# SPDX-License-Identifier: Apache-2.0
"""What stored runs say beside each other: two of them compared, one shown with its baseline, and the trend of nights.

Runs are our samples.jsonl, or lm-eval's samples_*.jsonl.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from hileval import statistics
from hileval.gates.judge import FLIPPED, Flip, unpacked
from hileval.records.baseline import Baseline
from hilgate.errors import CannotRunHereError, RecordsError
from hilgate.model import FINDINGS_FILE, PLAN_FILE, Number
from hilgate.model.record import Check, Outcome, json_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from hileval.records.records import Filter

    Array = NDArray[np.floating]

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""lm-eval's names."""


@dataclass(frozen=True)
class Answered:
    """What a run says to one question."""

    doc_id: int
    question: str
    target: str
    text: str
    """Of the first time it was asked."""
    right: float
    """Share of right answers: 0 or 1 where it was asked once."""
    flags: tuple[str, ...]
    prompt_hash: str | None
    """Of what was asked; None where the file does not say."""


def read_answers(path: Path, which: Filter, *, repeated: bool = False) -> dict[str, Answered]:
    """Answers by their question's hash; a gate may ask the same ones `repeated`ly, in several runs.

    Raises:
        RecordsError: Unreadable, not answers, a question twice, a score that is neither 0 nor 1, or none of the filter.
    """
    found: dict[str, list[Answered]] = {}
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
                raise KeyError("doc_hash, which lm-eval writes from 0.4.3 on")  # noqa: TRY301 - the same
            same = found.setdefault(row["doc_hash"], [])
            if same and not (repeated and ours):
                raise ValueError(f"question {row['doc_id']} occurs twice")  # noqa: TRY301 - the same
            same.append(
                Answered(
                    doc_id=row["doc_id"],
                    question=row["question"] if ours else str(row["doc"].get("question", row["doc"])),
                    target=str(row["target"]).rsplit("#### ", 1)[-1],
                    text=row["text"] if ours else row["resps"][0][0],
                    right=float(right),
                    flags=tuple(row["flags"]) if ours else (),
                    prompt_hash=row.get("prompt_hash"),
                )
            )
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordsError(
            f"not stored answers: {type(error).__name__}: {error}",
            where=f"{path}:{number}" if number else str(path),
            remedy="name a samples.jsonl of a gate, or samples_<task>_<time>.jsonl of lm-eval 0.4.3 or later, of "
            "a task with an exact_match",
        ) from error
    if not found:
        held = f"the file holds {', '.join(sorted(others))}; " if others else ""
        other = next((name for name in FILTERS if FILTERS[name] in others), None)
        raise RecordsError(
            f"no answer of filter {FILTERS[which]}",
            where=str(path),
            remedy=held + (f"use --filter {other}" if other else f"{' and '.join(FILTERS.values())} can be compared"),
        )
    return {
        key: replace(same[0], right=math.fsum(one.right for one in same) / len(same)) for key, same in found.items()
    }


def compare(before: Path, after: Path, which: Filter, *, alpha: float, margin: float) -> tuple[Check, list[Flip]]:
    """Whether the second run is worse: both tests at alpha; a pass excludes a drop of the margin.

    Raises:
        RecordsError: See `read_answers`; or the files share no question, or not all of them, or were asked with other
            prompts.
    """
    old, new = read_answers(before, which), read_answers(after, which)
    if old.keys() != new.keys():
        raise RecordsError(
            f"{len(old)} and {len(new)} questions, {len(old.keys() & new.keys())} of them the same",
            where=f"{before}, {after}",
            remedy="compare runs of the same questions",
        )
    asked = [(one, one.prompt_hash, new[key].prompt_hash) for key, one in old.items()]
    other = [one for one, then, now in asked if None not in (then, now) and then != now]
    if other:
        raise RecordsError(
            f"{len(other)} of {len(old)} questions were asked with another prompt, first question {other[0].doc_id}",
            where=f"{before}, {after}",
            remedy="compare runs of the same prompts: system prompt, examples and chat template included",
        )
    base, now = (np.array([[side[key].right > 0 for key in old]]) for side in (old, new))
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
    elif high <= margin:
        outcome, verdict = Outcome.PASS, f"a drop of {margin:.1%} is excluded"
    else:
        outcome, verdict = Outcome.INCONCLUSIVE, f"no drop is shown, and one of {margin:.1%} is not excluded"
    n, drop = base.size, statistics.drop(base, now)
    message = (
        f"{base.sum()}/{n} = {base.mean():.1%} before, {now.sum()}/{n} = {now.mean():.1%} after, lost {lost}, "
        f"gained {len(flips) - lost}, drop {drop:.1%} [{low:.1%}, {high:.1%}], p={p_value:.2g}: {verdict}"
    )
    numbers = {"n": n, "lost": lost, "gained": len(flips) - lost, "p_value": p_value, "drop": drop}
    return Check(id="compare/accuracy", outcome=outcome, message=message, numbers=numbers), flips


@dataclass(frozen=True)
class ViewRow:
    """One question on the page."""

    doc_id: int
    question: str
    target: str
    before: float | None
    """Share of earlier runs that were right; None where nobody asked it before."""
    text_before: str
    now: float
    text: str
    flags: Sequence[str]

    @property
    def kinds(self) -> list[str]:
        """Which filters show it."""
        moved = 0.0 if self.before is None else self.now - self.before
        flip = ["lost"] if moved <= -FLIPPED else ["gained"] if moved >= FLIPPED else []
        other = ["new"] if self.before is None else []
        return [*flip, "right" if self.now >= FLIPPED else "wrong", *(["flagged"] if self.flags else []), *other]


KINDS = {
    "lost": "right before and wrong now",
    "gained": "wrong before and right now",
    "wrong": "wrong now",
    "right": "right now",
    "flagged": "signs of broken output, or cut off",
    "new": "not asked before",
}


def read_before(path: Path, which: Filter) -> Mapping[str, tuple[float, str]]:
    """Per question hash, share of right answers and the first text: of a baseline, or of a stored run.

    Raises:
        RecordsError: It is neither.
    """
    if path.suffix == ".json":
        baseline = Baseline.read(path)
        shares = baseline.outcomes(which).mean(axis=0)
        return {one.doc_hash: (share, one.text) for one, share in zip(baseline.questions, shares, strict=True)}
    return {key: (one.right, one.text) for key, one in read_answers(answers_file(path), which, repeated=True).items()}


def answers_file(path: Path) -> Path:
    """The answers in a folder that `gate` wrote; a file is one itself."""
    return path / "samples.jsonl" if path.is_dir() else path


def rows_of(answers: Mapping[str, Answered], before: Mapping[str, tuple[float, str]]) -> list[ViewRow]:
    """Lost questions first, then gained ones, then wrong ones; otherwise in the order of asking."""
    rows = []
    for key, one in answers.items():
        share, text = before.get(key, (None, ""))
        rows.append(ViewRow(one.doc_id, one.question, one.target, share, text, one.right, one.text, one.flags))
    ranks = list(KINDS)
    return sorted(rows, key=lambda row: ranks.index(row.kinds[0]))


def read_findings(folder: Path) -> list[Check]:
    """What the gate said of the answers in this folder; nothing where it said nothing.

    Raises:
        RecordsError: Something else is written there.
    """
    path = folder / FINDINGS_FILE
    try:
        return [Check.model_validate_json(line) for _, line in json_lines(path)] if path.is_file() else []
    except (OSError, ValueError) as error:
        raise RecordsError("not the findings of a gate", where=str(path), remedy="run the gate again") from error


def render(run: Path, against: Path | None, which: Filter) -> str:
    """The page of a run, beside a baseline or another run.

    Raises:
        RecordsError: One of them cannot be read, or they share no question.
    """
    answers = read_answers(answers_file(run), which, repeated=True)
    before = {} if against is None else read_before(against, which)
    if against is not None and not before.keys() & answers.keys():
        raise RecordsError(
            "the two share no question", where=f"{run}, {against}", remedy="name runs of the same questions"
        )
    rows = rows_of(answers, before)
    counts = {kind: sum(kind in row.kinds for row in rows) for kind in KINDS}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hileval.gates", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("view.html.j2").render(
        name=str(run),
        against=None if against is None else str(against),
        which=which,
        checks=read_findings(run if run.is_dir() else run.parent),
        rows=rows,
        kinds={kind: title for kind, title in KINDS.items() if counts[kind]},
        counts=counts,
        not_asked=len(before.keys() - answers.keys()),
    )


def visible(text: str) -> str:
    """Characters without a shape (controls, turns of direction) as escapes: a model may write what pages obey."""
    return "".join(
        f"\\u{ord(one):04x}" if unicodedata.category(one) in {"Cc", "Cf", "Cs", "Co"} and one not in "\n\t" else one
        for one in text
    )


# A changepoint test (Hawkins, Qiu and Kang 2003): the last 1 to WINDOW nights are compared with all nights before them,
# and the most improbable split is what counts,
#
#     z = (mean drop of the last nights - mean drop before) / sqrt(v (1 / answers before + 1 / answers since)).
#
# Only nights are compared with nights: what their baseline was lucky with is in all of them. v, the variance of one
# answer, is d / 2 of the stored runs, or what neighbouring nights show if that is more (von Neumann 1941: half the mean
# squared difference of successive values), and never less than half a question a night. A split stands out from
# z >= ALARM on.
#
# A change of rounding moves the mean too: some questions are lost for good and some gained, and their difference stays.
# So a split that stands out is an alarm only if the questions themselves say that more were lost than gained: Student's
# t over what each question's share of right nights fell by (`statistics.difference_p`), at CONFIRMED. The largest of so
# many z has no closed form: `alarms` replays both.

ALARM = 4.5
"""In a year of nights of an unchanged model at most one in a hundred gives an alarm (`alarms`)."""
CONFIRMED = 0.001
"""Of a hundred changes of rounding one or two give an alarm within thirty nights, all nights and splits counted."""
FEWEST, BEFORE, WINDOW = 10, 5, 30
"""Nights below which nothing is said; nights before a change at least; nights since it at most."""
YEAR = 365


@dataclass(frozen=True)
class Night:
    """What a gate said in one night."""

    build: str
    """Folder in the history: time and commit."""
    drop: float
    """Mean exact match of the baseline less that of the night, of the same questions."""
    answers: int
    d: float
    """Discordance of the stored runs."""
    baseline: str
    """Which one: a new baseline begins a new series."""
    right: str = ""
    """Which questions were answered right, as `judge` packs them; empty in nights of before it did."""

    @property
    def outcomes(self) -> NDArray[np.bool_] | None:
        """[questions], in the order of asking; None where the night does not say."""
        return unpacked(self.right) if self.right else None


def read_nights(history: Path) -> dict[str, list[Night]]:
    """The nights of each accuracy step (a gate on a device), the oldest first, since its newest baseline.

    Raises:
        CannotRunHereError: There is no such folder.
        RecordsError: A build in it is damaged.
    """
    if not history.is_dir():
        raise CannotRunHereError(
            "there is no history here", where=str(history), remedy="set HILGATE_HISTORY to the folder of builds"
        )
    found: dict[str, list[Night]] = defaultdict(list)
    for build in sorted(history.glob("[0-9]*Z-*-*")):
        try:
            if json.loads((build / PLAN_FILE).read_bytes())["profile"] != "nightly":
                continue
            lines = (build / "results.jsonl").read_bytes().splitlines()
            for line in (json.loads(one) for one in lines if b'/accuracy"' in one and b'"check"' in one):
                check = line["check"]
                numbers, said = check["numbers"], check["labels"].get("baseline", "")
                if check["outcome"] != Outcome.DID_NOT_RUN and "drop" in numbers:
                    answers = int(numbers["n"]) * int(numbers["runs"])
                    right = check["labels"].get("right", "")
                    if right and len(unpacked(right)) != int(numbers["n"]):
                        raise ValueError(f"{numbers['n']} questions, and `right` is of {len(unpacked(right))}")  # noqa: TRY301 - worded below
                    night = Night(
                        build.name, float(numbers["drop"]), answers, float(numbers.get("d", 0.0)), said, right
                    )
                    found[line["step"]].append(night)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordsError(
                f"a damaged build: {type(error).__name__}: {error}",
                where=str(build),
                remedy="restore that build, or remove its folder from the history",
            ) from error
    return {
        step: [night for night in nights if night.baseline == nights[-1].baseline] for step, nights in found.items()
    }


def scan(drops: Array, answers: Array, d: float) -> Array:
    """Each split's z after the last night, [..., WINDOW]: at i of the last i + 1 nights; zero where nights are too few.

    Args:
        drops: Of each night, [..., nights].
        answers: [nights].
        d: Discordance of the stored runs.
    """
    nights = drops.shape[-1]
    z = np.zeros((*drops.shape[:-1], WINDOW))
    if nights < FEWEST:
        return z
    steps = np.diff(drops) ** 2 / (1 / answers[1:] + 1 / answers[:-1])
    v = np.maximum(steps.mean(axis=-1), max(d / 2, 0.5 / float(answers.mean())))
    weight, total = answers.cumsum(), (drops * answers).cumsum(axis=-1)
    for last in range(1, min(WINDOW, nights - BEFORE) + 1):
        before, now = weight[-last - 1], weight[-1] - weight[-last - 1]
        moved = (total[..., -1] - total[..., -last - 1]) / now - total[..., -last - 1] / before
        z[..., last - 1] = np.maximum(0.0, moved / np.sqrt(v * (1 / before + 1 / now)))
    return z


def confirm(right: NDArray[np.bool_], last: ArrayLike, others: int = 0) -> NDArray[np.float64]:
    """p-values of the questions that no more of them were lost than gained by the last nights.

    Args:
        right: [nights, questions].
        last: Nights since the split; of one split, or of several.
        others: Further questions, each answered alike in all nights.
    """
    since = np.asarray(last)
    total = right.cumsum(axis=0)
    before = total[-since - 1]
    moved = before / (len(right) - since[..., None]) - (total[-1] - before) / since[..., None]
    return statistics.difference_p(np.concatenate([moved, np.zeros((*since.shape, others))], axis=-1))


def judge_nights(series: Mapping[str, Sequence[Night]]) -> list[Check]:
    """One check per step: a confirmed drop fails, with the night since when and by how much.

    Too few nights pass and say so; no night at all did not run. A split that stands out and cannot be confirmed,
    because nights do not say which questions they answered right, is inconclusive.
    """
    return [_judge_step(step, nights) for step, nights in series.items()] or [
        Check(
            id="history/trend",
            outcome=Outcome.DID_NOT_RUN,
            message="no night of any gate is stored in the history; `hilgate history add` after each night fills it",
        )
    ]


def _judge_step(step: str, nights: Sequence[Night]) -> Check:
    drops, answers = (np.array([getattr(night, key) for night in nights], dtype=float) for key in ("drop", "answers"))
    splits = scan(drops, answers, max(night.d for night in nights))
    z, last = float(splits.max()), int(splits.argmax()) + 1
    numbers: dict[str, Number] = {"nights": len(nights), "z": z, "since": last if z else 0, "alarm": ALARM}
    but = ""
    outcome, message = Outcome.PASS, f"{len(nights)} nights: z {z:.1f}, looked into from {ALARM} on"
    if len(nights) < FEWEST:
        message = but = f"{len(nights)} nights; a trend is looked for from {FEWEST} on"
    elif z >= ALARM:
        right = [night.outcomes for night in nights]
        named = [one for one in right if one is not None]
        if len(named) < len(nights) or len({len(one) for one in named}) > 1:
            outcome = Outcome.INCONCLUSIVE
            numbers |= {"p_value": 1.0}
            why = "not all nights say which questions they answered right, so this may be another rounding"
        else:
            stand_out = np.flatnonzero(splits >= ALARM) + 1
            p_values = confirm(np.array(named), stand_out)
            found = dict(zip(stand_out.tolist(), p_values.tolist(), strict=True))
            likeliest = min(found, key=found.__getitem__)
            dropped = found[likeliest] <= CONFIRMED
            last = likeliest if dropped else last
            moved = statistics.differences(np.array(named)[:-last], np.array(named)[-last:])
            lost, gained = int((moved >= FLIPPED).sum()), int((moved <= -FLIPPED).sum())
            outcome = Outcome.FAIL if dropped else Outcome.PASS
            numbers |= {"p_value": found[last], "since": last, "lost": lost, "gained": gained}
            why = f"{lost} questions lost and {gained} gained, p={found[last]:.2g} that it is chance"
            if not dropped:
                but = "answers changed, as another rounding changes them, and no drop is shown"
                why += f": {but}"
        now, before = (np.average(drops[part], weights=answers[part]) for part in (slice(-last, None), slice(-last)))
        message += (
            f"; the last {last} lie {now - before:.2%} below those before them, since {nights[-last].build}: {why}"
        )
    if outcome is Outcome.FAIL:
        message = (
            f"TREND: {message}. Find the change among the builds since then; if it is wanted, record and accept a new "
            "baseline, which begins a new series"
        )
    labels = {"passed_but": but} if but else {}
    return Check(id=f"{step}/trend", outcome=outcome, message=message, numbers=numbers, labels=labels)


def alarms(
    d: float,
    n: int,
    *,
    shift: float = 0.0,
    ramp: float = 0.0,
    rounding: float = 0.0,
    good: int,
    nights: int,
    replays: int,
    seed: int,
) -> float:
    """Share of replayed histories with an alarm in one of `nights`, after `good` ones of the unchanged model.

    A share 2 d of the questions is a coin toss each night, as in `hileval.gates.power`; the others are answered alike
    until something changes.

    Args:
        d: Discordance.
        n: Questions a night.
        shift: Share of the questions that are lost after the good nights,
        ramp: or further ones lost each night.
        rounding: Each question is lost with this chance after the good nights, and gained with the same.
        good: Nights before; none of theirs counts as an alarm.
        nights: Nights looked at.
        replays: How many histories.
        seed: Of the replay.
    """
    rng = np.random.default_rng(seed)
    tossed, total = round(2 * d * n), good + nights
    later = np.maximum(np.arange(total) - good + 1, 0)
    lost = np.round(n * (shift * (later > 0) + ramp * later)).astype(int)
    moved = rng.binomial(n, rounding, (2, replays))
    heads = rng.binomial(tossed, 0.5, (replays, total))
    drops = (tossed / 2 - heads + lost + np.subtract(*moved)[:, None] * (later > 0)) / n
    answers = np.full(total, float(n))
    seen = np.zeros(replays, dtype=bool)
    # Which heads fall together is drawn once a history, so that one night is the same in all of its splits.
    coins: dict[int, NDArray[np.bool_]] = {}
    for end in range(max(good, 0) + 1, total + 1):
        splits = scan(drops[:, :end], answers[:end], d)
        for one in np.flatnonzero(~seen & (splits.max(axis=-1) >= ALARM)):
            since, before = later[:end, None] > 0, later[:end, None] == 0
            if one not in coins:
                coins[one] = _tosses(heads[one], tossed, np.random.default_rng([seed, int(one)]))
            gone = np.arange(lost[end - 1]) >= lost[:end, None]
            for_good = np.repeat(before, moved[0, one], 1), np.repeat(since, moved[1, one], 1)
            right = np.hstack([coins[one][:end], gone, *for_good])
            found = np.flatnonzero(splits[one] >= ALARM) + 1
            seen[one] = bool((confirm(right, found, max(0, n - right.shape[1])) <= CONFIRMED).any())
    return float(seen.mean())


def _tosses(heads: NDArray[np.int64], tossed: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which of the tossed questions are heads in each night, [nights, tossed], so many as `heads` says."""
    return rng.random((len(heads), tossed)).argsort(axis=1).argsort(axis=1) < heads[:, None]
