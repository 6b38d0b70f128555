# SPDX-License-Identifier: Apache-2.0
"""A gate beside another attention in the same job: how it is asked, and what it says."""

import sys
from dataclasses import replace
from unittest import mock

import pytest
from support.gates import declared

from hileval.ask import loop, recording
from hileval.ask.recording import record_beside
from hileval.engines import EngineError
from hileval.gates import steps
from hileval.gates.judge import judge_answers
from hileval.gates.resolve import ResolvedGate, resolve, resolve_pair
from hileval.records.answers import BESIDE_FILE
from hileval.records.baseline import IdentityMismatchError, read_pair
from hilgate.errors import MisuseError, NothingSelectedError, RecordsError
from hilgate.model.record import Check, Outcome

N, NAME, COMMIT = 1319, "granite-4.0-h-micro", "c0ffee00" * 5
DECLARED = declared()
GATE = DECLARED.gates[NAME]
GOOD = [i % 5 > 0 for i in range(N)]


def read(folder):
    return read_pair(folder / BESIDE_FILE, NAME, "TRITON_ATTN", GATE.filter)


@pytest.fixture
def trusted(plant, planted_questions, monkeypatch, tmp_path):
    """The run of the attention beside it: every fifth answer is wrong, or what a test gives."""

    def ask(correct=GOOD, limit=None, when="pre-merge"):
        run = plant.run(correct)
        run = run.model_copy(update={"identity": run.identity.model_copy(update={"revision": COMMIT})})
        questions = planted_questions(run, served_by="vllm.")
        monkeypatch.setattr(loop, "JOURNALS", tmp_path)
        monkeypatch.setattr(loop, "questions_of", lambda _: questions)
        served = Check(id="g/served", outcome=Outcome.PASS, message="", labels={"backend": "TRITON_ATTN"})
        monkeypatch.setattr(recording, "check_backend", lambda *_: served)
        monkeypatch.setattr(recording, "environment", lambda: plant.baseline([True]).environment)
        record_beside(resolve_pair(NAME, DECLARED, when, limit), tmp_path / BESIDE_FILE)
        return replace(resolve(NAME, DECLARED, when=when), baseline=read(tmp_path))

    return ask


def judged(gate, plant, correct):
    """Checks by name, of ours with these answers, asked in the rule's order."""
    ids = gate.rule.order(N)
    run = plant.run(correct)
    run = run.model_copy(update={"samples": tuple(run.samples[one] for one in ids), "identity": gate.baseline.identity})
    hashes = [sample.doc_hash for sample in run.samples]
    asked = plant.asked(None, run)
    asked = type(asked)(ids, (run,), gate.baseline.outcomes(GATE.filter, hashes))
    return {check.id.split("/")[1]: check for check in judge_answers(gate, asked, None)}


def test_a_paired_merge_passes_and_says_what_is_unproved(plant, trusted):
    found = judged(trusted(), plant, GOOD)["accuracy"]
    assert found.outcome is Outcome.PASS
    assert "TRITON_ATTN in the same job" in found.message
    assert "one run each" in found.message
    assert f"revision not pinned: this is main of today, {COMMIT}" in found.message
    assert "one run of TRITON_ATTN in the same job stands for it" in found.labels["passed_but"]
    assert "revision not pinned" in found.labels["passed_but"]


def test_a_release_without_a_baseline_is_no_pass_and_says_so(plant, trusted):
    found = judged(trusted(when="release"), plant, GOOD)["accuracy"]
    assert found.outcome is Outcome.INCONCLUSIVE
    assert f"no baseline is recorded, and a release wants 5 runs: python -m hileval record {NAME}" in found.message


@pytest.mark.parametrize("when", ["pre-merge", "release"])
def test_answers_lost_beside_the_other_attention_fail(plant, trusted, when):
    worse = [right and i % 13 > 0 for i, right in enumerate(GOOD)]
    found = judged(trusted(when=when), plant, worse)
    assert found["accuracy"].outcome is Outcome.FAIL
    assert "TRITON_ATTN in the same job: 8" in found["floor"].message


def test_both_below_the_floor_fail_although_they_agree(plant, trusted):
    both = [i % 2 > 0 for i in range(N)]
    found = judged(trusted(both), plant, both)
    assert (found["accuracy"].outcome, found["floor"].outcome) == (Outcome.PASS, Outcome.FAIL)


def test_another_attention_that_breaks_is_no_measure(plant, trusted, monkeypatch):
    run = plant.run(GOOD, non_finite=(3,))
    monkeypatch.setattr(plant, "run", lambda _: run)
    with pytest.raises(RecordsError, match="non-finite"):
        trusted()


def test_what_no_run_beside_it_left_is_refused(trusted, tmp_path):
    gate, file = trusted(limit=20), tmp_path / BESIDE_FILE
    assert gate.baseline.n == 20
    text = file.read_text()
    for content, why in (
        (text[:-9], "not a run of TRITON_ATTN"),
        (text.replace(f"{NAME} beside", "another beside"), "a run of another beside by"),
        (text.replace('"TRITON_ATTN"', '"ROCM_ATTN"'), "by ROCM_ATTN, not beside TRITON_ATTN"),
    ):
        file.write_text(content)
        with pytest.raises(RecordsError, match=why):
            read(tmp_path)
    with pytest.raises(NothingSelectedError):
        trusted(limit=0)


def test_the_peer_has_its_own_process_whose_death_is_no_result(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(ResolvedGate, "identity", mock.Mock(model=GATE.model))
    monkeypatch.setattr(
        loop.subprocess, "run", lambda command, check: called.append((command, check)) or mock.Mock(returncode=4)
    )
    with pytest.raises(EngineError, match="the same questions to TRITON_ATTN ended with status 4"):
        loop.ask(resolve(NAME, DECLARED, when="release", limit=7), tmp_path)
    ((command, check),) = called
    assert command[:5] == [sys.executable, "-m", "hileval.ask", "beside", NAME]
    assert command[5:] == ["--when", "release", "--file", str(tmp_path / BESIDE_FILE), "--limit", "7"]
    assert not check


def test_the_peer_has_no_switches_of_ours_and_no_baseline(plant, tmp_path):
    ours = GATE.model_copy(update={"env": {"PAGEDKV_PACKING": "shuffle"}, "baseline": str(tmp_path / "made.json")})
    gates = DECLARED.model_copy(update={"gates": DECLARED.gates | {NAME: ours}})
    other = resolve_pair(NAME, gates, "pre-merge").declared
    assert (other.attention_backend, other.env) == ("TRITON_ATTN", {})
    with pytest.raises(MisuseError, match="paired with nothing"):
        resolve_pair("lfm2.5-350m", gates, "pre-merge")
    assert resolve(NAME, gates).wants_pair
    identity = plant.identity.model_copy(update={"revision": COMMIT})
    plant.baseline(GOOD, identity=identity).write(tmp_path / "made.json")
    recorded = resolve(NAME, gates)
    assert not recorded.wants_pair
    assert (recorded.revision, recorded.pinned) == (COMMIT, True), "the baseline pins the model"
    assert "beside" not in steps._label(NAME, ours, None)
    assert "beside TRITON_ATTN (no baseline, unpinned)" in steps._label(NAME, GATE, None)


def test_a_revision_that_contradicts_the_baseline_is_refused(plant, tmp_path):
    ours = GATE.model_copy(update={"revision": "0" * 40, "baseline": str(tmp_path / "made.json")})
    identity = plant.identity.model_copy(update={"revision": COMMIT})
    plant.baseline(GOOD, identity=identity).write(tmp_path / "made.json")
    gates = DECLARED.model_copy(update={"gates": DECLARED.gates | {NAME: ours}})
    with pytest.raises(IdentityMismatchError, match=f"pins revision {'0' * 40}.*recorded with {COMMIT}"):
        resolve(NAME, gates)


def test_the_peer_decides_a_merge_alone_and_a_release_with_all():
    together = DECLARED.deciding_together(GATE)
    alone, released = (resolve(NAME, DECLARED, when=when, of=together).rule for when in ("pre-merge", "release"))
    assert alone.alpha == DECLARED.rules["paired"].alpha == 0.01
    assert released.alpha == pytest.approx(0.01 / together)
