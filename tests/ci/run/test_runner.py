# SPDX-License-Identifier: Apache-2.0
"""The runner: what each way of ending becomes, in which order steps start, and that nothing survives them."""

from __future__ import annotations

import os
import resource
import time

import pytest
from support import plans
from support.plans import failing, passing, plan, python, results_of, step, writes_findings

from hilgate.errors import DeclarationError, RecordsError
from hilgate.model.record import Outcome
from hilgate.run import process, results
from hilgate.run import runner as run_plan
from hilgate.run.results import step_folder


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 20.0)  # a busy machine starts a Python in seconds
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.3)


ENDINGS = {
    "passes": (writes_findings(passing()), Outcome.PASS, "1 passed"),
    "fails": (writes_findings(passing(), failing(), status=1), Outcome.FAIL, "it breaks: max_abs_err 0.5 > 0.001"),
    "exits-1-without-evidence": (python("raise SystemExit('boom')"), Outcome.FAIL, "it said: boom"),
    "hangs": (writes_findings(passing(), then="import time; time.sleep(60)"), Outcome.DID_NOT_RUN, "timed out after"),
    "segfaults": (python("import os; os.kill(os.getpid(), 11)"), Outcome.DID_NOT_RUN, "killed by SIGSEGV"),
    "leaves-nothing": (python("pass"), Outcome.DID_NOT_RUN, "it left no findings.jsonl"),
    "leaves-garbage": (
        python("import os, pathlib; pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl').write_text('{\"id')"),
        Outcome.DID_NOT_RUN,
        "findings.jsonl:1",
    ),
    "does-not-exist": ("no-such-program --x", Outcome.DID_NOT_RUN, "could not be started"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_each_ending_becomes_its_outcome(name, tmp_path, monkeypatch):
    command, outcome, why = ENDINGS[name]
    if name == "hangs":
        monkeypatch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 1.5)
    recorded = results_of(plan(step("sample", command)), tmp_path)
    record = recorded.last("sample-cpu").record
    assert record.outcome is outcome
    assert why in record.message


def test_a_dependant_of_a_failure_is_recorded_and_not_started(tmp_path):
    a_plan = plan(
        step("first", writes_findings(failing(), status=1)),
        step("middle", writes_findings(passing()), depends_on=("first-cpu",)),
        step("last", writes_findings(passing()), depends_on=("middle-cpu",)),
        step("alone", writes_findings(passing())),
    )
    recorded = results_of(a_plan, tmp_path)
    assert recorded.last("middle-cpu").record.message == "not started: it needs first-cpu, which failed"
    assert recorded.last("last-cpu").record.message == "not started: it needs middle-cpu, which did not run"
    assert recorded.last("alone-cpu").record.outcome is Outcome.PASS
    assert [path.name for path in step_folder(tmp_path, "middle-cpu").iterdir()] == ["results.jsonl"]


def test_cores_are_filled_and_never_exceeded(tmp_path):
    slow = writes_findings(passing(), then="import time; time.sleep(0.4)")
    a_plan = plan(step("a", slow), step("b", slow), step("c", slow), step("d", slow))
    progress = plans.Silent()
    results_of(a_plan, tmp_path, progress=progress)
    running, most = set(), 0
    for event, key in progress.events:
        running = running | {key} if event == "started" else running - {key}
        most = max(most, len(running))
    assert most == 2


def test_one_step_at_a_time_on_a_gpu(tmp_path):
    slow = writes_findings(passing(), then="import time; time.sleep(0.2)")
    steps = [step(name, slow, key=f"{name}-gfx942", device="gfx942") for name in "ab"]
    progress = plans.Silent()
    results_of(plan(*steps), tmp_path, progress=progress)
    assert [event for event, _ in progress.events] == ["started", "finished"] * 2


def test_stale_evidence_is_never_read(tmp_path):
    folder = step_folder(tmp_path, "sample-cpu")
    folder.mkdir(parents=True)
    (folder / "findings.jsonl").write_text('{"id": "old", "outcome": "pass"}\n')
    recorded = results_of(plan(step("sample", python("pass"))), tmp_path)
    assert recorded.last("sample-cpu").record.message == "it left no findings.jsonl"


def test_a_step_records_launches_unless_a_process_noted_none(tmp_path):
    alone = "import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', ''])"
    clean = (  # as a test may do that tries an installation, and hilgate when a step starts it
        "import subprocess, sys; from hilgate.pytest_recorder import recorders; from hilgate.run import process; "
        "env = {'PYTHONPATH': ':'.join(recorders())}; subprocess.run([sys.executable, '-P', '-s', '-c', ''], env=env); "
        "process.Watchdog().__exit__()"
    )
    then = {"all": "", "clean": clean, "not-all": alone}
    commands = {name: writes_findings(passing(), then=code) for name, code in then.items()} | {"none": "true"}
    recorded = results_of(plan(*[step(name, command) for name, command in commands.items()]), tmp_path)
    kernels = {name: recorded.last(f"{name}-cpu").record.kernels for name in commands}
    assert kernels == {"all": (), "clean": (), "not-all": None, "none": None}


def test_a_process_left_behind_is_killed(tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    command = writes_findings(passing(), then=code + "print(p.pid)")
    recorded = results_of(plan(step("sample", command)), tmp_path)
    pid = int((step_folder(tmp_path, "sample-cpu") / "log.txt").read_text())
    assert recorded.last("sample-cpu").record.outcome is Outcome.PASS
    plans.wait_for(lambda: not plans.alive(pid), seconds=5)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 1.5)
    deaf = writes_findings(
        passing(), then="import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    began = time.monotonic()
    recorded = results_of(plan(step("sample", deaf)), tmp_path)
    assert "timed out" in recorded.last("sample-cpu").record.message
    assert time.monotonic() - began < 10


def test_each_child_gets_its_environment_and_measures(tmp_path):
    wanted = {"SAMPLE": "1", "OMP_NUM_THREADS": "1", "HILGATE_PROFILE": "gate"}
    code = f"import os; assert {wanted}.items() <= os.environ.items(); x = b'1' * 2**27"
    command = writes_findings(passing(), then=code)
    saved = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        recorded = results_of(plan(step("sample", command, env={"SAMPLE": "1"})), tmp_path)
    finally:
        if saved is not None:
            os.environ["OMP_NUM_THREADS"] = saved
    record = recorded.last("sample-cpu").record
    assert record.outcome is Outcome.PASS
    # A forked child has had its parent's memory, and a test session can be larger than the child ever gets.
    session = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert 128 < record.peak_memory_mib < 1024 + session
    assert record.seconds > 0


def test_a_step_that_its_job_leaves_too_little_time_did_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 60.0)
    monkeypatch.setenv("BUILDKITE_TIMEOUT", "10")
    monkeypatch.setenv("HILGATE_JOB_STARTED", str(time.time() - 9 * 60 + 0.5))  # a minute is for the upload
    slow = writes_findings(passing(), then="import time; time.sleep(60)")
    recorded = results_of(plan(step("sample", slow)), tmp_path)
    message = recorded.last("sample-cpu").record.message
    assert message.startswith("its job had ")
    assert message.endswith(" s left for it, and its own time is 60 s")


def test_a_command_that_cannot_be_split_is_a_declaration_error():
    with pytest.raises(DeclarationError, match="quot"):
        process.argument_list("python -c 'open")
    with pytest.raises(DeclarationError, match="empty"):
        process.argument_list("  ")


def test_steps_that_end_together_on_a_full_disk_are_one_error(tmp_path, monkeypatch):
    def full(*_):
        raise RecordsError("the results could not be written")

    monkeypatch.setattr(results, "write", full)
    monkeypatch.setattr(run_plan, "POLL_SECONDS", 8)
    with pytest.raises(RecordsError, match="could not be written"):
        results_of(plan(step("a", python("pass")), step("b", python("pass"))), tmp_path)


def test_a_planted_bugs_step_ends_at_its_declared_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr("hilgate.run.runner.SECONDS_PER_MINUTE", 1.0)
    recorded = run_plan.run_plan(
        plan(step("sample", python("import time; time.sleep(60)"))), tmp_path, tmp_path / "out"
    )
    assert recorded.last("sample-cpu").record.message == "timed out after 1 s"
