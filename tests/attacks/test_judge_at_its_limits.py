# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: results that keep the judge or a report busy, or end them with an error: large files, messages of
brackets, thousands of checks that look like nothing else, JSON without end, numbers that are no numbers.

What must happen: what is read has a size, the work is proportional to it, and what judges the results of others has
minutes and 4 GiB. There is a verdict in any case, and it is no pass. Long messages of honest tests are shortened.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import NOW
from support.plans import ENVIRONMENT, breaks, dies, grows, hilgate, plan, step

from hilgate import text
from hilgate.cli.verdict import judge_and_report
from hilgate.evidence import KINDS
from hilgate.model.plan import plan_digest
from hilgate.model.record import BuildRecord, Outcome, StepRecord
from hilgate.plan import limits
from hilgate.report import terminal
from hilgate.report.causes import shape_of
from hilgate.report.view import LIMIT_BYTES
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.forks import Project

    from hilgate.model.verdict import Verdict

Raw = dict[str, Any]
TABLE = {"rows": "arch", "columns": "way", "file": "cells.json"}
STEP = step("one", "x", matrix=TABLE)
PLAN = plan(STEP, merge_base="b" * 40)
MANY = 12_000


def record(checks: int, **changes: object) -> StepRecord:
    failed = {"exit_status": 1, "outcome": "fail", "command": "x", "environment": ENVIRONMENT}
    about = {"key": "one-cpu", "started": NOW, "seconds": 1.0, "checks": checks}
    return StepRecord.model_validate({**about, **failed, **changes})


def lines(checks: Sequence[Raw], more: Sequence[Raw] = ()) -> list[bytes]:
    """What a job writes of these checks and reruns."""
    build = BuildRecord(started=NOW, plan_digest=plan_digest(PLAN), commit=PLAN.commit, environment=ENVIRONMENT)
    found = [{"kind": "check", "step": "one-cpu", "check": check} for check in checks]
    written = [json.dumps(one).encode() for one in (*found, {}, *more)]
    written[len(found)] = record(len(found)).model_dump_json().encode()
    return [one + b"\n" for one in (build.model_dump_json().encode(), *written)]


def judged(folder: Path, *of: bytes, **files: bytes) -> Verdict:
    """The verdict and the reports over a job that left these lines, and these files beside them."""
    job = folder / "jobs/one-cpu"
    job.mkdir(parents=True)
    (job / results.RESULTS_FILE).write_bytes(results.with_digest(b"".join(of)))
    for name, content in files.items():
        (job / f"{name}.json").write_bytes(content)
    judged, report = judge_and_report(folder, PLAN, jobs=folder / "jobs")
    terminal.print_verdict(report, every=True)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    assert 0 < sizes["annotation.md"] < LIMIT_BYTES
    assert 0 < sizes["report.html"] < LIMIT_BYTES
    assert judged.verdict.outcome is not Outcome.PASS
    return judged.verdict


def wrong(name: object, message: str = "wrong", **more: object) -> Raw:
    """A failing check, as whoever writes the file himself writes it: no model of ours looks at it before the judge."""
    return {"id": f"t.py::test[{name}]", "outcome": "fail", "message": message, **more}


def again(name: object, number: int, *, on_base: bool) -> Raw:
    where = {"host": f"host{number}", "elsewhere": False, "on_base": on_base}
    ended = {"outcome": "fail", "seconds": 0.0, "message": f"other {number}"}
    return {"kind": "rerun", "step": "one-cpu", "check": name, **where, **ended}


def letters(number: int) -> str:
    """A word without digits for each number."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


WORDS = "-".join(f"a{n}" for n in range(3_000))
CHECKS = {
    "brackets": [wrong(n, "[" * 15_000) for n in range(100)],
    "lists that begin and never end": [wrong(n, "[1,(" * 4_000) for n in range(100)],
    "backticks": [{"id": "a", "outcome": "did not run", "message": "`" * 500_000}],
    "one line": [wrong(n, "x" * 100_000) for n in range(100)],
    "words of its own name": [wrong(WORDS, WORDS)],
    "many": [wrong(n) for n in range(MANY)],
    "pairs": [wrong(f"{n}-{m}", f"{letters(n)}\nt{letters(n)}.py:{n}: E") for n in range(MANY) for m in range(2)],
    "a table": [wrong(n, letters(n), labels={"arch": f"r{n}", "way": f"c{n}"}) for n in range(MANY)],
    "a row": [wrong(n, letters(n % 30), labels={"arch": "r", "way": f"c{n}"}) for n in range(MANY)],
    "labels": [wrong(1, labels={f"label{n}": "v" * 100 for n in range(MANY)})],
    "integers": [wrong(1, numbers=dict.fromkeys(("exact_match", "ci_low", "ci_high", "n", "max_abs_err"), 10**300))],
    "seconds": [wrong(1, seconds=1e308), wrong(2, seconds=1e308)],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CHECKS)
def test_checks_keep_neither_judge_nor_reports_busy(tmp_path: Path, name: str) -> None:
    assert judged(tmp_path, *lines(CHECKS[name])).steps[0].counts.failed in {0, len(CHECKS[name])}


@pytest.mark.timeout(60)
def test_many_runs_over_the_merge_base_are_looked_up_once(tmp_path: Path) -> None:
    checks = [wrong(n) for n in range(MANY)]
    more = [again(check["id"], number, on_base=True) for number, check in enumerate(checks)]
    assert judged(tmp_path, *lines(checks, more)).outcome is Outcome.FAIL


def test_more_reruns_than_a_runner_makes_are_damage(tmp_path: Path) -> None:
    checks = [wrong(n) for n in range(2_000)]
    more = [again(check["id"], number, on_base=False) for number, check in enumerate(checks)]
    (decided,) = judged(tmp_path, *lines(checks, more)).steps
    assert (decided.outcome, "2000 reruns" in decided.why) == (Outcome.DID_NOT_RUN, True)


def test_a_file_of_results_has_a_size(tmp_path: Path) -> None:
    (decided,) = judged(tmp_path, *lines([]), b"\n" * 2**26).steps
    assert decided.outcome is Outcome.DID_NOT_RUN
    assert "bytes, and at most 67108864 are read" in decided.why


DEEP = b"[" * 100_000
NUMBER = b'{"kind":"check","step":"one-cpu","check":{"id":"a","outcome":"pass","numbers":{"a":%s}}}\n'
LINES = {
    "deep": b'{"kind":"check","step":"one-cpu","check":' + DEEP + b"\n",
    "a number of 5000 digits": NUMBER % (b"9" * 5_000),
    "a number beyond floats": NUMBER % (b"9" * 400),
    "an id without end": b'{"kind":"check","step":"one-cpu","check":{"id":"%s","outcome":"pass"}}\n' % (b"a" * 100_000),
    "a key without end": b'{"%s":1}\n' % (b"a" * 100_000),
    "a time without a zone": record(0).model_dump_json().replace("Z", "").encode() + b"\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LINES)
def test_a_record_that_is_none_is_damage_and_said_shortly(tmp_path: Path, name: str) -> None:
    build, *rest = lines([])
    (decided,) = judged(tmp_path, build, LINES[name], *rest).steps
    assert decided.outcome is Outcome.DID_NOT_RUN
    assert "not a record" in decided.why
    assert len(decided.why) < 1_000


@pytest.mark.parametrize(
    "note", [DEEP, b" " * 2_000_000, b'{"files": ["a', b"{}"], ids=["deep", "large", "cut", "empty"]
)
def test_a_note_of_restored_files_that_is_none_is_damage(tmp_path: Path, note: bytes) -> None:
    (decided,) = judged(tmp_path, *lines([wrong(1)]), restored=note).steps
    assert (decided.outcome, "restored.json: " in decided.why) == (Outcome.DID_NOT_RUN, True)


def test_a_long_honest_message_is_shortened_in_its_place(tmp_path: Path) -> None:
    body = "E   AssertionError: " + "differs " * 50_000 + "\n\ntests/a.py:7: AssertionError"
    case = f'<testcase classname="tests.a" name="test_x"><failure message="m">{body}</failure></testcase>'
    (tmp_path / "junit.xml").write_text(f'<testsuite tests="1" failures="1" errors="0">{case}</testsuite>')
    (check,) = KINDS["junit"].collect(tmp_path, tmp_path).checks
    assert len(check.message) <= 20_000
    assert check.message.startswith("AssertionError: differs")
    assert check.message.endswith("\ntests/a.py:7: AssertionError")


def test_an_id_that_no_record_holds_is_lost_evidence(tmp_path: Path) -> None:
    case = f'<testcase classname="tests.a" name="test_x[{"a" * 30_000}]"/>'
    (tmp_path / "junit.xml").write_text(f'<testsuite tests="1">{case}</testsuite>')
    found = KINDS["junit"].collect(tmp_path, tmp_path)
    assert "id: String should have at most 20000 characters" in found.problem


@given(st.text(max_size=8), st.text(max_size=300))
def test_no_text_is_an_error_or_becomes_long(name: str, message: str) -> None:
    for words in (shape_of(message, f"t[{name}]"), text.markdown(message), text.fenced(message), text.log(message)):
        assert len(words) <= 10 * len(message) + 20


PIECES = st.text(st.sampled_from("[(,)] 1.-+exnaif0`\n:*_{}|~@w/\\\x1b"), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(PIECES, PIECES)
def test_the_work_grows_as_a_text_does(begin: str, piece: str) -> None:
    """A text of 100,000 characters takes a second at the most; work that grows with its square would take minutes."""
    message = begin + piece * (100_000 // len(piece))
    for function in (shape_of, text.markdown, text.fenced, text.log, text.line, text.xml):
        began = time.process_time()
        function(message)
        assert time.process_time() - began < 1.0, function


def hangs(folder: Path, *_: object, **__: object) -> None:
    (folder / "comment.md").write_text("half of a report\n")
    time.sleep(300)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("work", "status", "words"),
    [
        (hangs, 3, "reading and judging took more than 5 s"),
        (grows, 3, "reading and judging took more than 0.25 GiB"),
        (dies, 3, "ended by signal 11"),
        (breaks, 70, "a bug in hilgate"),
    ],
)
def test_what_ends_the_judge_leaves_a_verdict_that_is_no_pass(
    change: Project, monkeypatch: pytest.MonkeyPatch, work: object, status: int, words: str
) -> None:
    change.write("src/limits.toml", "floor = 0.9\n")
    change.commit()
    results_of = change.theirs / "results"
    plan_it = ("plan", "--profile", "pr", "--base", "main", "--write", "results/plan.json")
    assert hilgate(change.theirs, *plan_it).returncode == 0
    judge = ("--plan", "results/plan.json", "--jobs", "results/jobs")
    assert hilgate(change.theirs, "judge", *judge, limited=True).returncode == 4
    monkeypatch.setattr(results, "read_all", work)
    monkeypatch.setattr(limits, "JUDGE_SECONDS", 5.0)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2**28)
    (results_of / "verdict.json").write_text('{"outcome": "pass"}')
    for command in (("pipeline", "--recheck", *judge), ("judge", *judge)):
        done = hilgate(change.theirs, *command, limited=True)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert json.loads((results_of / "verdict.json").read_text())["outcome"] == "did not run"
    assert "did not run" in (results_of / "annotation.md").read_text()
    assert not (results_of / "comment.md").exists()


def test_damage_is_said_in_the_log_as_text(change: Project) -> None:
    change.write("src/limits.toml", "floor = 0.9\n")
    change.commit()
    assert (
        hilgate(change.theirs, "plan", "--profile", "pr", "--base", "main", "--write", "results/plan.json").returncode
        == 0
    )
    (step, *_) = json.loads((change.theirs / "results/plan.json").read_text())["steps"]
    job = change.theirs / f"results/jobs/{step['step']['key']}-{step['device']}"
    job.mkdir(parents=True)
    (job / "results.jsonl").write_bytes(results.with_digest(b'{"kind":"build","\\u001b]0;x\\n+++ all passed":1}\n'))
    done = hilgate(change.theirs, "judge", "--plan", "results/plan.json", "--jobs", "results/jobs")
    assert (done.returncode, "damaged: " in done.stderr) == (4, True), done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\n+++" not in done.stdout + done.stderr
