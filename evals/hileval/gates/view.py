# SPDX-License-Identifier: Apache-2.0
"""One static HTML page of a run: questions, answers, what flipped, filters. No script, no server, no network."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2

from hileval.gates.compare import read_answers
from hileval.gates.judge import FLIPPED
from hileval.records.baseline import Baseline
from hilgate.errors import RecordsError
from hilgate.model import FINDINGS_FILE
from hilgate.model.record import Check, json_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hileval.gates.compare import Answered
    from hileval.records.records import Filter


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
