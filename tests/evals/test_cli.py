# SPDX-License-Identifier: Apache-2.0
"""Exit statuses and findings of the command line, without an engine."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from hileval import cli
from hileval.ask import loop, recording
from hileval.command import run as ending
from hileval.engines import EngineError
from hileval.gates import declare
from hileval.gates.resolve import without_baseline
from hileval.records.baseline import BaselineError, stored_outcomes
from hilgate.errors import Exit, MisuseError
from hilgate.model.record import Check, Outcome


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["hileval", *arguments])
        monkeypatch.setenv("HILGATE_OUT", str(tmp_path))
        with pytest.raises(SystemExit) as exited:
            ending(cli.app)
        findings = tmp_path / "findings.jsonl"
        lines = findings.read_text().splitlines() if findings.exists() else []
        return exited.value.code, capsys.readouterr(), [Check.model_validate(json.loads(line)) for line in lines]

    return command


@pytest.fixture
def planted(monkeypatch, plant, planted_questions, tmp_path):
    """Replace the questions, their answers and the baseline with planted ones."""

    def use(correct, served_by="pagedkv."):
        questions = planted_questions(plant.run(correct), served_by=served_by)
        monkeypatch.setattr(loop, "questions_of", lambda _: questions)
        monkeypatch.setattr(loop, "JOURNALS", tmp_path / "journals")
        monkeypatch.setattr(cli.Baseline, "read", lambda _: plant.baseline([True] * 200))

    return use


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyError("x"), 70, "error: a bug in hileval: KeyError: 'x'"),
        (OSError(28, "No space left on device"), 5, "error: there is no room: No space left on device"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (EngineError("starting vLLM failed"), 4, "error: starting vLLM failed"),
    ],
    ids=["bug", "full disk", "interrupt", "engine"],
)
def test_every_end_has_its_status_of_the_table(run, monkeypatch, tmp_path, error, status, words):
    """Python's own status of an exception is 1, which the table calls fail."""
    monkeypatch.setattr(cli, "load_gates", mock.Mock(side_effect=error))
    code, output, _ = run("steps")
    assert code == status
    assert words in output.err
    assert "Traceback" not in output.err
    logs = [path.read_text("utf-8") for path in tmp_path.glob("hileval-*.log")]
    assert ["KeyError: 'x'" in log for log in logs] == [True] * (status == Exit.BUG)


def test_output_that_does_not_arrive_is_no_pass():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hileval", "steps"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr[:30]) == (Exit.CANNOT_RUN_HERE, b"error: there is no room: No sp")


def test_a_pass(run, planted, tmp_path):
    planted([True] * 200)
    code, output, findings = run("gate", "pocket-hybrid")
    assert code == 0
    assert [check.outcome for check in findings] == [Outcome.PASS] * 4
    assert findings[2].id == "pocket-hybrid/accuracy"
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 75, "which decide"
    assert "75/75 = 100.0%" in output.out


@pytest.mark.parametrize(("lost", "when", "code"), [(1, "release", 6), (9, "release", 1), (150, "pre-merge", 1)])
def test_inconclusive_fail_and_another_backend_are_not_a_pass(run, planted, lost, when, code):
    planted([i >= lost for i in range(200)])
    assert run("gate", "pocket-hybrid", "--when", when)[0] == code
    planted([True] * 200, served_by="vllm.")
    assert run("gate", "pocket-hybrid", "--when", when)[0] == 4


def test_a_dead_engine_leaves_a_finding_and_no_traceback(run, planted, monkeypatch, tmp_path):
    planted([True] * 200)
    (tmp_path / "samples.jsonl").write_text("stale\n")

    def die(*_):
        raise EngineError("starting vLLM failed: OSError: boom", where="pocket/hybrid", remedy="read the log")

    monkeypatch.setattr(loop, "ask_until_decided", die)
    code, output, findings = run("gate", "pocket-hybrid")
    assert code == 4
    assert "Traceback" not in output.err
    assert "boom" in output.err
    assert [check.outcome for check in findings] == [Outcome.DID_NOT_RUN]
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (("gate", "poket-hybrid"), 2, "did you mean 'pocket-hybrid'"),
        (("gate", "pocket-hybrid-drif"), 2, "did you mean 'pocket-hybrid-drift'"),
        (("gate", "pocket-hybrid-drift", "--when", "release"), 2, "own sequences"),
        (("gate", "pocket-hybrid-drift", "--limit", "5"), 2, "own sequences"),
        (("gate", "pocket-hybrid", "--judge-only"), 3, "asked.json"),
        (("record", "pocket-hybrid"), 2, "--"),
        (("record", "pocket-hybrid", "--reason", "x", "--engine", "sglang"), 2, "sglang"),
        (("accept", "pocket-hybrid", "--by", " "), 2, "--by is empty"),
        (("accept", "pocket-hybrid"), 3, "pocket-hybrid.proposed.json"),
        (("accept", "pocket-hybrid-drift"), 2, "is a drift gate"),
        (("steps",), 0, "pocket-hybrid"),
    ],
)
def test_what_needs_no_engine(run, arguments, code, printed):
    got, output, findings = run(*arguments)
    assert (got, findings) == (code, [])
    assert printed in (output.out if arguments == ("steps",) else output.err)


def use_gate(monkeypatch, **changes):
    declared = declare.load_gates()
    gate = declared.gates["pocket-hybrid"].model_copy(update=changes)
    monkeypatch.setattr(cli, "load_gates", lambda: declared.model_copy(update={"gates": {"pocket-hybrid": gate}}))


def test_baseline_runs_differ_in_order_and_size_and_resume(monkeypatch, plant, planted_questions, run, tmp_path):
    """Five processes are asked for; the second one dies once, and the first is not asked again."""
    use_gate(monkeypatch, baseline=str(tmp_path / "made.json"), deterministic=False, floor=0.1)
    monkeypatch.setattr(recording, "JOURNALS", tmp_path)
    monkeypatch.setattr(loop, "JOURNALS", tmp_path)
    started, runs = [], []

    def process(command, check):
        assert (command[:4], check) == ([sys.executable, "-m", "hileval.ask", "run"], False)
        started.append(command[command.index("--attention-backend") + 1])
        if len(started) == 2:
            return mock.Mock(returncode=1)
        number = int(command[command.index("--number") + 1])
        runs.append(planted_questions(plant.run([i % 7 != number for i in range(600)]), served_by="vllm."))
        recording.record_run(without_baseline(command[4], cli.load_gates()).using(attention_backend="vllm"), number)
        return mock.Mock(returncode=0)

    monkeypatch.setattr(loop, "questions_of", lambda _: runs[-1])
    monkeypatch.setattr(recording, "environment", lambda: plant.baseline([True]).environment)
    monkeypatch.setattr(loop.subprocess, "run", process)
    command = ("record", "pocket-hybrid", "--reason", "x", "--second", "TRITON_ATTN")
    code, output, _ = run(*command)
    assert code == 4
    assert "run 2 of 5 ended with status 1" in output.err
    code, output, _ = run(*command)
    assert (code, "5 runs (5 distinct) of 600 questions" in output.out) == (0, True)
    assert started[2:] == ["vllm"] * 4 + ["TRITON_ATTN"]
    first, again, *others = (questions.batches for questions in runs)
    assert again == [], "the finished run was not asked again"
    assert [len(batches[0]) for batches in (first, *others)] == [25, 200, 64, 500, 100]
    orders = {tuple(doc_id for batch in batches for doc_id in batch) for batches in (first, *others)}
    assert {len(order) for order in orders} == {600}
    assert len(orders) == 5
    proposal = cli.Baseline.read(tmp_path / "made.proposed.json")
    with pytest.raises(BaselineError, match="a proposal that nobody has accepted"):
        stored_outcomes(proposal, "strict", plant.identity, range(9))
    assert not list(tmp_path.glob("*run-*"))


def test_an_attention_that_is_not_the_named_one_is_not_recorded(monkeypatch, plant, planted_questions, tmp_path):
    questions = planted_questions(plant.run([True] * 30), served_by="pagedkv.")
    monkeypatch.setattr(loop, "questions_of", lambda _: questions)
    monkeypatch.setattr(recording, "JOURNALS", tmp_path)
    monkeypatch.setattr(loop, "JOURNALS", tmp_path)
    gate = without_baseline("pocket-hybrid", cli.load_gates()).using(attention_backend="vllm")
    with pytest.raises(MisuseError, match="not recorded: 1 of 1 layers served by another backend"):
        recording.record_run(gate, 0)
    assert not list(tmp_path.iterdir()), "a repeated command does not go on from these answers"
    assert questions.engine.close.called


def test_accept_shows_a_proposal_and_takes_it_with_a_name(run, monkeypatch, plant, tmp_path):
    stored, proposed = tmp_path / "made.json", tmp_path / "made.proposed.json"
    use_gate(monkeypatch, baseline=str(stored))
    plant.baseline([i != 3 for i in range(200)]).write(proposed)
    code, output, _ = run("accept", "pocket-hybrid")
    assert (code, stored.exists()) == (0, False)
    assert output.out.startswith("proposed  99.50% [")
    assert "no baseline yet" in output.out
    plant.baseline([True] * 200).write(stored)
    _, output, _ = run("accept", "pocket-hybrid")
    assert "accepted by a planter" in output.out
    assert "1 questions flip" in output.out
    assert "  question 3: was 11111\n" in output.out
    assert output.out.endswith("nothing is accepted yet: hileval accept pocket-hybrid --by NAME\n")
    code, output, _ = run("accept", "pocket-hybrid", "--by", "a reviewer")
    assert (code, proposed.exists()) == (0, False)
    accepted = cli.Baseline.read(stored)
    assert (accepted.accepted_by, accepted.questions[3].strict) == ("a reviewer", "00000")


def test_a_missing_baseline_is_a_record_error(run, monkeypatch, tmp_path):
    use_gate(monkeypatch, baseline=str(tmp_path / "none.json"))
    code, output, _ = run("gate", "pocket-hybrid")
    assert code == 3
    assert "no baseline" in output.err
    assert "hileval record" in output.err


def test_missing_weights_cannot_run_here(run, monkeypatch, plant, tmp_path):
    use_gate(monkeypatch, model=str(tmp_path))
    monkeypatch.setattr(cli.Baseline, "read", lambda _: plant.baseline([True]))
    code, output, findings = run("gate", "pocket-hybrid")
    assert code == 5
    assert "config.json is missing" in output.err
    assert findings[0].outcome is Outcome.DID_NOT_RUN


@pytest.mark.parametrize("asked", [("--when", "release"), ("--limit", "20")])
def test_stored_answers_are_judged_again_without_an_engine(run, planted, monkeypatch, tmp_path, asked):
    """The same checks as the run gave; nothing is asked, and the folder stays as it is."""
    planted([i >= 9 for i in range(200)])
    code, output, _ = run("gate", "pocket-hybrid", *asked)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    monkeypatch.setattr(loop, "questions_of", mock.Mock(side_effect=AssertionError))
    again, repeated, _ = run("gate", "pocket-hybrid", *asked, "--judge-only")
    assert (again, repeated.out) == (code, output.out)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_drift_findings_do_not_lie_beside_other_answers(run, monkeypatch, tmp_path):
    (tmp_path / "samples.jsonl").write_text("{}\n")
    monkeypatch.setattr(loop, "ask_sides", mock.Mock())
    checks = [Check(id="g/reading", outcome=Outcome.PASS, message="m")]
    monkeypatch.setattr(cli, "judge", lambda *_: (checks, ""))
    _, output, findings = run("gate", "pocket-hybrid-drift")
    assert [check.id for check in findings] == ["g/reading"]
    assert not (tmp_path / "samples.jsonl").exists()
    assert output.out.endswith(f"{tmp_path}/findings.jsonl\n")
