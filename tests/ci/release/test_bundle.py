"""The evidence bundle: the same bytes twice, nothing left out, and what a release demands."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import tarfile

import pytest
from support import cell_tables as cells
from support.bundles import COMMITTED, DIGEST, built, first_problem, members_of, records, write
from support.jobs import NOW
from support.plans import COMMIT, ENVIRONMENT, plan, step

from hilgate.errors import RecordsError
from hilgate.judge.verdict import judge
from hilgate.model import BuildRecord, Check, Omission, Outcome, Quarantine, Quarantined
from hilgate.plan.make import plan_digest, read_plan
from hilgate.release import bundle, verify
from hilgate.report import tables
from hilgate.report.write import decide
from hilgate.run import results


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"))


def test_a_sound_bundle_is_sound(sound):
    answer = verify.verify(sound)
    assert [(finding.check, finding.sound) for finding in answer.findings] == [(check, True) for check in verify.CHECKS]
    assert answer.verdict.outcome is Outcome.PASS


def test_its_checksums_are_those_of_sha256sum(sound, tmp_path):
    with tarfile.open(sound) as tar:
        tar.extractall(tmp_path, filter="data")
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "evidence", check=False
    )
    assert done.returncode == 0


def test_what_was_asked_for_is_demanded(sound):
    assert verify.verify(sound, demanded={"profile": "gate", "commit": COMMIT}).sound
    assert "profile is gate, and release was asked for" in first_problem(sound, profile="release")


def omission(cause, reason="runs as no queue offers it"):
    return {"omissions": (Omission(key="far-gfx950", area="toys", label="far", cause=cause, reason=reason),)}


RELEASE = {"profile": "release", "base": None, "changed_files": ()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (omission("not affected"), "far-gfx950 is left out of a release: runs as no queue offers it"),
        (omission("not asked for"), "left out"),
        (omission("not here", "runs on gfx942 here, which is the stronger evidence"), "left out"),
        (omission("need omitted", "needs x, which is omitted"), "left out"),
        ({"base": "main"}, "of a change, not of everything"),
        ({"dirty": True}, "of uncommitted files"),
        ({"fork": True}, "of a fork"),
    ],
)
def test_a_release_leaves_nothing_out_without_a_reason(tmp_path, changes, words):
    assert words in first_problem(write(tmp_path, **RELEASE | changes))


@pytest.mark.parametrize("cause", sorted(verify.LEGITIMATE))
def test_a_release_may_leave_out_what_no_machine_offers_or_other_plans_run(tmp_path, cause):
    assert verify.verify(write(tmp_path, **RELEASE, **omission(cause, "whatever it says"))).sound


def test_a_failing_build_has_a_sound_bundle_too(tmp_path):
    file = write(tmp_path, checks=[Check(id="t.py::a", outcome=Outcome.FAIL, message="wrong")])
    answer = verify.verify(file)
    assert answer.sound
    assert answer.verdict.outcome is Outcome.FAIL


def test_a_quarantined_failure_is_derived_again_with_its_quarantine(tmp_path):
    root, out = built(tmp_path, checks=[Check(id="t.py::a", outcome=Outcome.FAIL, message="wrong")])
    a_plan = read_plan(out / "plan.json")
    expires = NOW.date() + dt.timedelta(days=7)
    entry = Quarantined(test="t.py::a", step="mla", reason="r", owner="o", added=NOW.date(), expires=expires)
    quarantine = Quarantine(tests=(entry,))
    recorded = bundle.read_records(out, a_plan)
    verdict = judge(a_plan, recorded, plan_digest(a_plan), decided=NOW, quarantine=quarantine)
    assert verdict.steps[1].quarantined == ("t.py::a",)
    verdict.save(out / "verdict.json")
    quarantine.save(out / "quarantine.json")
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert verify.verify(tmp_path / "e.tar").sound


@pytest.mark.parametrize("name", ["plan.json", "verdict.json", "report.html", "steps"])
def test_no_bundle_without_evidence(tmp_path, name):
    root, out = built(tmp_path)
    shutil.rmtree(out / name) if name == "steps" else (out / name).unlink()
    with pytest.raises(RecordsError):
        bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repository", "results"]


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/etc/passwd"), lambda p: p.with_name("a\nb").touch()],
                         ids=["link", "line break"])  # fmt: skip
def test_no_bundle_of_what_cannot_be_read_back(tmp_path, make):
    root, out = built(tmp_path)
    make(out / "steps" / "odd")
    with pytest.raises(RecordsError, match="neither a plain file"):
        bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)


def test_what_every_job_of_an_agent_left_is_in_it(tmp_path):
    root, out = built(tmp_path, image="")
    a_plan = plan(step("a", "x"), step("b", "x"), omissions=())
    a_plan.save(out / "plan.json")
    for one in a_plan.steps:
        opening = BuildRecord(started=NOW, plan_digest=plan_digest(a_plan), commit=COMMIT, environment=ENVIRONMENT)
        results.write(out / "jobs" / one.key, opening, records(one, Check(id="p", outcome=Outcome.PASS)))
    decide(out, a_plan, jobs=out / "jobs")
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert {"results/jobs/a-cpu/results.jsonl", "results/jobs/b-cpu/results.jsonl"} <= set(
        members_of(tmp_path / "e.tar")
    )
    assert verify.verify(tmp_path / "e.tar").sound


def test_tables_are_in_it(tmp_path):
    root, out = built(tmp_path)
    a_plan, recorded, verdict = cells.build(cells.cell("fig", "a"))
    tables.write(out, a_plan, "d" * 64, recorded, tables.tables(a_plan, recorded, verdict))
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert members_of(tmp_path / "e.tar")["cells.json"] == (out / "cells.json").read_bytes()
    assert verify.verify(tmp_path / "e.tar").sound


def test_the_bill_names_what_was_locked_installed_pinned_and_built(sound):
    bill = json.loads(members_of(sound)["sbom.cdx.json"])
    found = {component["purl"]: component for component in bill["components"]}
    torch = found["pkg:pypi/torch@2.13.0"]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert {(p["name"], p["value"]) for p in torch["properties"]} == {
        ("hilgate:locked-in", "a.txt"), ("hilgate:installed-on", "desk")}  # fmt: skip
    assert {
        "pkg:pypi/py-yaml@6.0",
        "pkg:generic/python@3.11.0",
        "pkg:generic/rocm/base",
        "pkg:generic/sources/aiter",
    } <= set(found)
    (image,) = [component for component in found.values() if component["type"] == "container"]
    assert image["version"] == DIGEST
    assert bill["metadata"]["timestamp"] == "2025-11-21T12:00:00+00:00"
    assert verify.bill_problem(json.dumps(bill)) == ""


def test_a_lock_file_that_pins_nothing_is_refused(tmp_path):
    root, out = built(tmp_path)
    (root / "requirements" / "a.txt").write_text("torch>=2\n")
    with pytest.raises(RecordsError, match="pins nothing: torch>=2"):
        bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
