# SPDX-License-Identifier: Apache-2.0
"""Two stored runs, ours or lm-eval's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from hileval.__main__ import main
from hileval.compare import compare, read_answers
from hileval.errors import RunsError
from hilgate.errors import Exit

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
                common = {key: row[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target")}
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
    made = compare(stored("a", GOOD), stored("b", worse, harness), "flexible", **LEVELS)
    flips = made.flips
    lost = sum(np.array(GOOD) & ~np.array(worse))
    assert made.outcome == "fail"
    assert made.lost == lost
    assert f"changed  {lost} lost, 1 gained" in str(made)
    assert made.p_value >= binomtest(lost, lost + 1, alternative="greater").pvalue
    assert [flip.lost for flip in flips] == [True] * lost + [False]
    assert (flips[0].stored_text[-2:], flips[0].new_text[-2:]) == ("16", "15")


def test_the_same_passes_and_churn_is_not_decided(stored):
    assert compare(stored("a", GOOD), stored("b", GOOD, True), "flexible", **LEVELS).outcome == "pass"
    other = [right != (i in range(100, 130)) for i, right in enumerate(GOOD)]
    other = [not right if i in range(0, 300, 10) else right for i, right in enumerate(other)]
    assert compare(stored("a", GOOD), stored("c", other), "flexible", **LEVELS).outcome == "inconclusive"


VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
"""Which test questions the pocket hybrid answered, and its share of 2,000 others: greedily, at three temperatures, and
with noise of 1 and of 12 % of their standard deviation on its weights. Recorded once."""


@pytest.mark.parametrize("before", VECTORS)
@pytest.mark.parametrize("after", VECTORS)
def test_recorded_runs_get_the_verdict_that_is_right_for_them(stored, monkeypatch, before, after):
    """Temperatures and checkpoints, every ordered pair, through the command; other questions tell what is right."""
    files = [stored(name, [one == "1" for one in VECTORS[name]["right"]]) for name in (before, after)]
    if before == after:
        files[1] = stored("again", [one == "1" for one in VECTORS[after]["right"]])
    monkeypatch.setattr(sys, "argv", ["hileval", "compare", *map(str, files)])
    with pytest.raises(SystemExit) as exited:
        main()
    really = VECTORS[before]["really"] - VECTORS[after]["really"]
    assert not 0.01 < really < 0.04, "every pair is a clear case"
    right = {Exit.FAIL} if really > 0.04 else {Exit.PASS} if really <= 0 else {Exit.PASS, Exit.INCONCLUSIVE}
    assert exited.value.code in right


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines[:-1], "400 and 399 questions"),
        (lambda lines: [*lines, lines[0]], "question 0 occurs twice"),
        (
            lambda lines: [line.replace('"flexible_correct": true', '"flexible_correct": 0.5') for line in lines],
            "0.5.*--metric",
        ),
        (lambda lines: [*lines[:6], lines[6][:40]], "no JSON.*\n.*b:7"),
        (lambda _: [], "no answers"),
        (lambda _: ["{}"], "nothing of exact_match"),
        (lambda _: ["[]"], "no object of keys"),
        (
            lambda lines: [line.replace('"doc_hash"', '"no"') for line in lines],
            "nothing of doc_hash, which lm-eval writes from",
        ),
        (lambda lines: [line.replace('"prompt_hash": "', '"prompt_hash": "0') for line in lines], "another prompt"),
        (
            lambda _: ['{"filter": "strict_match", "exact_match": 1, "doc_hash": "a"}'],
            r"(?s)no answer of filter flexible-extract.*use --filter with one of: strict_match",
        ),
        (
            lambda _: ['{"filter": "strict-match", "exact_match": 1}'],
            r"(?s)no answer.*use --filter with one of: strict-match",
        ),
    ],
    ids=[
        "one less",
        "twice",
        "half right",
        "cut",
        "empty",
        "something else",
        "a list",
        "an old lm-eval",
        "other prompts",
        "another task",
        "the other filter",
    ],
)
def test_what_cannot_be_paired_is_refused(stored, change, why):
    good, other = stored("a", GOOD), stored("b", GOOD)
    other.write_text("\n".join(change(other.read_text().splitlines())))
    with pytest.raises(RunsError, match=why):
        compare(good, other, "flexible", **LEVELS)


GREEDY = {"until": ["</s>"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 256}


def as_lm_eval_writes(path, right, *, answers=None, **changes):
    """A samples file of lm-eval: `answers` by question, and what is changed in each row; None takes it away."""
    with path.open("w", encoding="utf-8") as file:
        for i, one in enumerate(right):
            row = {
                "doc_id": i,
                "doc": {"question": f"question {i}"},
                "target": "#### 16",
                "arguments": {"gen_args_0": {"arg_0": f"prompt {i}", "arg_1": GREEDY}},
                "resps": [[(answers or {}).get(i, "16" if one else "15")]],
                "filter": "flexible-extract",
                "exact_match": float(one),
                "doc_hash": f"d{i}",
                "prompt_hash": f"p{i}",
                "target_hash": "t",
            }
            row = {key: value for key, value in (row | changes).items() if value is not None}
            file.write(f"{json.dumps(row)}\n")
    return path


def asked_with(**arguments):
    return {"arguments": {"gen_args_0": {"arg_0": "prompt", "arg_1": GREEDY | arguments}}}


def test_a_task_of_choices_is_judged_by_its_accuracy(tmp_path):
    both = {"filter": "none", "exact_match": None, "metrics": ["acc", "acc_norm"], "acc": 1.0, "acc_norm": 0.0}
    path = as_lm_eval_writes(tmp_path / "a", GOOD, resps=[[["-1.5", "True"]], [["-3.5", "False"]]], **both)
    assert (read_answers(path).filter, read_answers(path).metric) == ("none", "acc")
    assert str(compare(path, path, **LEVELS)).startswith("pass: a drop of 2.0% is excluded\n  before   400 of 400")
    none_right = compare(path, path, metric="acc_norm", **LEVELS)
    assert (none_right.outcome, "could show" in none_right.verdict) == ("inconclusive", True)
    with pytest.raises(RunsError, match="says nothing of f1"):
        read_answers(path, metric="f1")


ANSWERS = [None, "\ud83d", "half \udc00 of it", 12, ["a", "b"], "", "\x00", "\u2028"]
"""Null of a model that still reasoned at the token limit, an emoji that the limit cut, and whatever else JSON holds."""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_answer_of_a_flipped_question_is_shown(encoding, tmp_path):
    flipped = dict(zip([*range(7, 15)], ANSWERS, strict=True))
    before = as_lm_eval_writes(tmp_path / "before", [right != (i in range(7, 11)) for i, right in enumerate(GOOD)])
    after = as_lm_eval_writes(
        tmp_path / "after", [right != (i in range(11, 15)) for i, right in enumerate(GOOD)], answers=flipped
    )
    done = subprocess.run(
        [sys.executable, "-m", "hileval", "compare", before, after, "--margin=0.1"],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == Exit.PASS, done.stderr
    assert [b"question %d" % one in done.stdout for one in flipped] == [True] * len(ANSWERS)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (asked_with(max_gen_toks=64), "another generation arguments, .*'max_gen_toks': 64"),
        (asked_with(temperature=1.0), "another generation arguments"),
        (asked_with(until=["\n\n"]), "another generation arguments"),
        ({"arguments": [["prompt", GREEDY | {"top_p": 0.5}]]}, "another generation arguments"),
        ({"target_hash": "u"}, "another hash of the target"),
        ({"target": "17"}, "another target, .*: 16 before, 17 after"),
        ({"prompt_hash": "q"}, "another prompt"),
    ],
    ids=["tokens", "temperature", "stop", "older layout", "target hash", "target", "prompt"],
)
def test_runs_that_were_asked_otherwise_are_refused(changes, why, tmp_path):
    files = as_lm_eval_writes(tmp_path / "a", GOOD), as_lm_eval_writes(tmp_path / "b", GOOD, **changes)
    with pytest.raises(RunsError, match=why):
        compare(*files, "flexible", **LEVELS)


@pytest.mark.parametrize("name", ["arguments", "prompt_hash", "target_hash"])
def test_what_one_file_does_not_say_is_no_plain_pass(name, tmp_path):
    word = {"arguments": "generation arguments", "prompt_hash": "prompt", "target_hash": "hash of the target"}[name]
    whole, trimmed = as_lm_eval_writes(tmp_path / "a", GOOD), as_lm_eval_writes(tmp_path / "b", GOOD, **{name: None})
    for files in (whole, trimmed), (trimmed, whole):
        made = compare(*files, "flexible", **LEVELS)
        assert made.outcome == "inconclusive"
        assert f"only one of the files says the {word}" in made.verdict
    assert compare(whole, whole, "flexible", **LEVELS).caveat == ""
    made = compare(trimmed, trimmed, "flexible", **LEVELS)
    assert (made.outcome, made.caveat) == ("pass", f"neither file says the {word}")
    assert str(made).endswith(f"caveat   neither file says the {word}")


def test_a_gate_and_lm_eval_agree_on_how_they_were_asked(plant, tmp_path):
    theirs = as_lm_eval_writes(tmp_path / "theirs", GOOD)
    samples = [
        one.model_copy(
            update={
                "doc_hash": f"d{one.doc_id}",
                "prompt_hash": f"p{one.doc_id}",
                "target_hash": "t",
                "generation": json.dumps(GREEDY | {"temperature": 0}, sort_keys=True),
            }
        )
        for one in plant.run(GOOD).samples
    ]
    ours = tmp_path / "ours"
    ours.write_text("".join(f"{one.model_dump_json()}\n" for one in samples), "utf-8")
    made = compare(ours, theirs, "flexible", **LEVELS)
    assert (made.outcome, made.caveat) == ("pass", "")


def test_json_of_any_depth_is_refused(tmp_path):
    deep = tmp_path / "deep"
    deep.write_text("[" * 200_000)
    with pytest.raises(RunsError, match="a thousand levels"):
        read_answers(deep, "flexible")


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_an_answer_may_hold_what_ends_a_line_of_text(stored, plant, tmp_path, end):
    text = f"first{end}second\n#### 16"
    path = tmp_path / "ours.jsonl"
    run = plant.run(GOOD, texts={3: text})
    path.write_text("".join(f"{sample.model_dump_json()}\n" for sample in run.samples) + "\n", encoding="utf-8")
    assert end in path.read_text(encoding="utf-8")
    assert read_answers(path, "flexible").answers[run.samples[3].doc_hash].text == text
    assert compare(path, stored("a", GOOD), "flexible", **LEVELS).outcome == "pass"
