# SPDX-License-Identifier: Apache-2.0
"""Two stored runs, ours or lm-eval's."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from hileval import cli
from hileval.gates.compare import compare
from hilgate.errors import Exit, RecordsError
from hilgate.model import Outcome

N = 400
GOOD = [i % 10 > 0 for i in range(N)]
LEVELS = {"alpha": 0.01, "margin": 0.02}


@pytest.fixture
def stored(plant, tmp_path):
    """Files of a run: ours, and as lm-eval logs it, a row per filter."""

    def write(name, right, harness=False):
        lines = []
        for sample in plant.run(right).samples:
            row = json.loads(sample.model_dump_json())
            if harness:
                common = {key: row[key] for key in ("doc_id", "doc_hash", "target")}
                common |= {"doc": {"question": row["question"]}, "resps": [[row["text"]]]}
                scores = {"strict-match": 0.0, "flexible-extract": float(row["flexible_correct"])}
                lines += [common | {"filter": name, "exact_match": score} for name, score in scores.items()]
            else:
                lines.append(row)
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.mark.parametrize("harness", [False, True], ids=["ours", "lm-eval's"])
def test_a_drop_fails_and_each_flip_has_both_answers(stored, harness):
    worse = [right and not 100 <= i < 120 for i, right in enumerate(GOOD)]
    worse[0] = True
    check, flips = compare(stored("a", GOOD), stored("b", worse, harness), "flexible", **LEVELS)
    lost = sum(np.array(GOOD) & ~np.array(worse))
    assert check.outcome is Outcome.FAIL
    assert (check.numbers["lost"], check.numbers["gained"]) == (lost, 1)
    assert check.numbers["p_value"] >= binomtest(lost, lost + 1, alternative="greater").pvalue
    assert [flip.lost for flip in flips] == [True] * lost + [False]
    assert (flips[0].stored_text[-2:], flips[0].new_text[-2:]) == ("16", "15")


def test_the_same_passes_and_churn_is_not_decided(stored):
    assert compare(stored("a", GOOD), stored("b", GOOD, True), "flexible", **LEVELS)[0].outcome is Outcome.PASS
    other = [right != (i in range(100, 130)) for i, right in enumerate(GOOD)]
    other = [not right if i in range(0, 300, 10) else right for i, right in enumerate(other)]
    assert compare(stored("a", GOOD), stored("c", other), "flexible", **LEVELS)[0].outcome is Outcome.INCONCLUSIVE


VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
"""Which questions the pocket hybrid answered (`python -m hileval.pocket vectors`), and its share of 1,000 others."""


@pytest.mark.parametrize("before", VECTORS)
@pytest.mark.parametrize("after", VECTORS)
def test_recorded_runs_get_the_verdict_that_is_right_for_them(stored, monkeypatch, before, after):
    """Temperatures and checkpoints, every ordered pair, through the command; other questions tell what is right."""
    files = [stored(name, [one == "1" for one in VECTORS[name]["right"]]) for name in (before, after)]
    if before == after:
        files[1] = stored("again", [one == "1" for one in VECTORS[after]["right"]])
    monkeypatch.setattr(sys, "argv", ["hileval", "compare", *map(str, files)])
    with pytest.raises(SystemExit) as exited:
        cli.run(cli.app)
    really = VECTORS[before]["really"] - VECTORS[after]["really"]
    assert not 0.01 < really < 0.04, "every pair is a clear case"
    right = {Exit.FAIL} if really > 0.04 else {Exit.PASS} if really <= 0 else {Exit.PASS, Exit.INCONCLUSIVE}
    assert exited.value.code in right


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines[:-1], "400 and 399 questions"),
        (lambda lines: [*lines, lines[0]], "question 0 occurs twice"),
        (lambda lines: [line.replace('"flexible_correct": true', '"flexible_correct": 0.5') for line in lines], "0.5"),
        (lambda lines: [line[:40] for line in lines], "JSONDecodeError"),
        (lambda _: [], "no answer of filter"),
        (lambda _: ["{}"], "KeyError"),
    ],
    ids=["one less", "twice", "half right", "cut", "empty", "something else"],
)
def test_what_cannot_be_paired_is_refused(stored, change, why):
    good, other = stored("a", GOOD), stored("b", GOOD)
    other.write_text("\n".join(change(other.read_text().splitlines())))
    with pytest.raises(RecordsError, match=why):
        compare(good, other, "flexible", **LEVELS)
