# SPDX-License-Identifier: Apache-2.0
"""The evidence bundle: nothing left out, what a release demands, and every way of tampering found and named."""

from __future__ import annotations

import copy
import datetime as dt
import gzip
import io
import json
import shutil
import tarfile

import pytest
from support import cell_tables
from support.bundles import (
    BUILDER_RECORDS,
    COMMITTED,
    DIGEST,
    MLA,
    RECORDS,
    built,
    edited,
    first_problem,
    forge,
    members_of,
    records,
    without,
    without_lines,
    write,
)
from support.jobs import IMAGE_STEP, NOW
from support.plans import COMMIT, ENVIRONMENT, plan, step

from hilgate.cli.verdict import judge_and_report
from hilgate.errors import MisuseError, RecordsError
from hilgate.judge.verdict import judge
from hilgate.model.declaration import Quarantine, Quarantined
from hilgate.model.plan import Omission, plan_digest
from hilgate.model.record import BuildRecord, Check, Outcome
from hilgate.plan.make import read_plan
from hilgate.release import bundle, verify
from hilgate.report import tables
from hilgate.run import results


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"))


def test_a_sound_bundle_is_sound(sound):
    answer = verify.verify(sound)
    unasked = {"commit", "signature"}
    assert [(finding.check, finding.sound) for finding in answer.findings] == [
        (check, None if check in unasked else True) for check in verify.CHECKS
    ]
    assert answer.verdict.outcome is Outcome.PASS


def test_what_was_asked_for_is_demanded(sound):
    assert verify.verify(sound, verify.Asked(demanded={"profile": "gate", "commit": COMMIT})).sound
    assert "profile is gate, and release was asked for" in first_problem(sound, profile="release")


def omission(cause, reason="runs as no queue offers it"):
    return {"omissions": (Omission(key="far-gfx950", area="samples", label="far", cause=cause, reason=reason),)}


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


def test_a_release_counts_every_step(tmp_path):
    uncounted = {"steps": (IMAGE_STEP, MLA.model_copy(update={"report_only": True}))}
    assert "mla-cpu would not count in a release" in first_problem(write(tmp_path, **RELEASE | uncounted))


@pytest.mark.parametrize("cause", sorted(verify.LEGITIMATE))
def test_a_release_may_omit_what_no_machine_or_other_plan_offers(tmp_path, cause):
    problem = first_problem(write(tmp_path, **RELEASE, **omission(cause, "whatever it says")))
    assert problem.startswith("commit: a release is held against its commit"), "and so it passed what stands before"


def test_a_failing_build_has_a_sound_bundle_too(tmp_path):
    file = write(tmp_path, checks=[Check(id="t.py::a", outcome=Outcome.FAIL, message="wrong")])
    answer = verify.verify(file)
    assert answer.sound
    assert answer.verdict.outcome is Outcome.FAIL


def test_a_quarantined_failure_is_derived_with_its_quarantine(tmp_path):
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


@pytest.mark.parametrize(
    "make", [lambda p: p.symlink_to("/etc/passwd"), lambda p: p.with_name("a\nb").touch()], ids=["link", "line break"]
)
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
    judge_and_report(out, a_plan, jobs=out / "jobs")
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert {"results/jobs/a-cpu/results.jsonl", "results/jobs/b-cpu/results.jsonl"} <= set(
        members_of(tmp_path / "e.tar")
    )
    assert verify.verify(tmp_path / "e.tar").sound


def test_tables_are_in_it(tmp_path):
    root, out = built(tmp_path)
    a_plan, recorded, verdict = cell_tables.build(cell_tables.cell("fig", "a"))
    tables.write(out, a_plan, "d" * 64, recorded, tables.tables(a_plan, recorded, verdict))
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert members_of(tmp_path / "e.tar")["cells.json"] == (out / "cells.json").read_bytes()
    assert verify.verify(tmp_path / "e.tar").sound


def test_without_a_bill_a_bundle_is_sound_and_a_release_is_not(tmp_path):
    root, out = built(tmp_path)
    (out / "sbom.cdx.json").unlink()
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    (found,) = [one for one in verify.verify(tmp_path / "e.tar").findings if one.check == "bill"]
    assert (found.sound, found.words) == (None, "there is no bill of materials")
    (tmp_path / "release").mkdir()
    file = write(tmp_path / "release", **RELEASE)
    problem = first_problem(forge(file, tmp_path / "r.tar", without("sbom.cdx.json")))
    assert problem == "bill: a release needs its bill of materials, sbom.cdx.json"


def edited_bill(**changes):
    return lambda m: {**m, "sbom.cdx.json": json.dumps({**json.loads(m["sbom.cdx.json"]), **changes}).encode()}


NOT_SUMMED = {
    "a flipped byte": (edited("results/steps/mla-cpu/log.txt", b"log", b"lag"), "checksums: another content"),
    "a missing member": (without("report.html"), "checksums: missing: 'report.html'"),
    "an extra member": (lambda m: {**m, "x": b""}, "checksums: not in SHA256SUMS: 'x'"),
    "no checksums": (without("SHA256SUMS"), "checksums: SHA256SUMS is missing"),
    "a checksum that is none": (lambda m: {**m, "SHA256SUMS": b"x\n"}, "checksums: SHA256SUMS has a line"),
    "a name summed twice": (lambda m: {**m, "SHA256SUMS": m["SHA256SUMS"] * 2}, "checksums: SHA256SUMS has a line"),
}
"""Changes that leave SHA256SUMS as it was, and the words of the problem."""

TAMPERED = {
    "a missing member and its checksum": (without("report.html"), "checksums: missing: 'report.html'"),
    "another plan": (edited("plan.json", b'"minimum": 1', b'"minimum": 2'), "plan: another plan: its digest"),
    "a quick run": (
        edited("plan.json", b'"profile": "gate"', b'"profile": "quick"'),
        "plan: a quick run decides about no",
    ),
    "a part of a step": (edited("plan.json", b'"arguments": ""', b'"arguments": "-k x"'), "plan: a run of a part of"),
    "no plan": (edited("plan.json", b"{", b""), "plan: not a plan"),
    "no manifest": (edited("manifest.json", b'"profile"', b'"prefile"'), "plan: not a manifest: profile"),
    "another commit in the manifest": (edited("manifest.json", b"cccc", b"cccd"), "plan: another plan: its commit"),
    "another profile": (edited("manifest.json", b'"gate"', b'"release"'), "plan: another plan: its profile"),
    "records of another plan": (
        edited(RECORDS, b'"plan_digest":"', b'"plan_digest":"f'),
        "records: mla-cpu: results.jsonl: these",
    ),
    "records of another commit": (
        edited(RECORDS, b'"commit":"cccc', b'"commit":"dddd'),
        "records: mla-cpu: results.jsonl: these",
    ),
    "a dropped check": (without_lines(b"t.py::b"), "records: mla-cpu: results.jsonl: it announces 2"),
    "a dropped opening": (without_lines(b'"kind":"build"'), "records: mla-cpu: results.jsonl: its first"),
    "no records": (without(RECORDS, BUILDER_RECORDS), "records: no results"),
    "a truncated line": (lambda m: {**m, RECORDS: m[RECORDS][:-1]}, "records: mla-cpu: results.jsonl: it is not as"),
    "a dropped image": (
        without_lines(b'"kind":"image"', BUILDER_RECORDS),
        "images: plan and records name the images {}",
    ),
    "another image digest": (
        edited(BUILDER_RECORDS, b'"digest":"sha256:abab', b'"digest":"sha256:cdab'),
        "images: plan and records",
    ),
    "another image in the manifest": (
        edited("manifest.json", b"sha256:abab", b"sha256:cdab"),
        "images: plan and records name the images",
    ),
    "an image of other contents": (
        edited(BUILDER_RECORDS, b'"content":"cc', b'"content":"dd'),
        "images: the image rocm was",
    ),
    "a step in another image": (
        edited(RECORDS, b'"image":"sha256:abab', b'"image":"sha256:cdab'),
        "images: mla-cpu ran",
    ),
    "a step in no image": (edited(RECORDS, f'"image":"{DIGEST}"'.encode(), b'"image":""'), "images: mla-cpu ran"),
    "a dropped step": (without(RECORDS), "verdict: the stored verdict says pass; the records give did not run"),
    "a failure that became a pass": (
        edited(RECORDS, b'"exit_status":0', b'"exit_status":1'),
        "verdict: the stored verdict says pass; the records give fail",
    ),
    "a verdict of another plan": (
        edited("verdict.json", b'"plan_digest": "', b'"plan_digest": "f'),
        "verdict: the verdict is of plan f",
    ),
    "a worded verdict": (edited("verdict.json", b"2 passed", b"3 passed"), "verdict: the stored verdict is not"),
    "a verdict with other counts": (
        edited("verdict.json", b'"passed": 2', b'"passed": 9'),
        "verdict: the stored verdict is not what",
    ),
    "a verdict that is none": (edited("verdict.json", b'"steps"', b'"stops"'), "verdict: not a verdict"),
    "an outcome in the manifest": (
        edited("manifest.json", b'"pass"', b'"fail"'),
        "verdict: the manifest says fail, the verdict pass",
    ),
    "a bill that is none": (edited("sbom.cdx.json", b"CycloneDX", b"SPDX"), "bill: sbom.cdx.json is of the format"),
    "a bill that is no JSON": (edited("sbom.cdx.json", b"{", b""), "bill: sbom.cdx.json or a lock file cannot be"),
    "a bill that is a list": (lambda m: {**m, "sbom.cdx.json": b"[]"}, "bill: sbom.cdx.json or a lock file cannot"),
    "a bill without components": (edited_bill(components=[]), "bill: bill of materials and lock files differ in"),
    "a bill with another version": (
        edited("sbom.cdx.json", b"2.13.0", b"2.13.1"),
        "bill: bill of materials and lock files differ in torch 2.13.0, torch 2.13.1",
    ),
    "a bill with a package more": (
        edited("sbom.cdx.json", b'"components": [', b'"components": [{"name": "evil", "version": "1"}, '),
        "bill: bill of materials and lock files differ in evil 1",
    ),
    "other locks": (edited("locks/a.txt", b"2.13.0", b"2.14.0"), "bill: bill of materials and lock files differ"),
    "no locks": (without("locks/a.txt"), "bill: bill of materials and lock files differ"),
    "a lock that pins nothing": (edited("locks/a.txt", b"==2.13.0", b">=2.13"), "bill: locks/a.txt has a line"),
    "a file that no build leaves": (lambda m: {**m, "malware.bin": b"x"}, "members: no build leaves 'malware"),
    "a table that is none": (lambda m: {**m, "evil.json": b"{}"}, "members: no build leaves 'evil.json'"),
    "files of a step that was not planned": (
        lambda m: {**m, "results/steps/evil-cpu/log.txt": b"x"},
        "members: no build leaves 'results/steps/evil",
    ),
    "a wheel of which no check says anything": (
        lambda m: {**m, "results/steps/mla-cpu/wheels/a-1-py3-none-any.whl": b"x"},
        "wheels: of the wheel a-1-py3-none-any.whl no check says",
    ),
    "a wheel whose name is none": (
        lambda m: {**m, "results/steps/mla-cpu/wheels/a.whl": b"x"},
        "wheels: no wheel is called 'a.whl'",
    ),
    "a wheel in the manifest alone": (
        edited("manifest.json", b'"wheels": {}', b'"wheels": {"a.whl": "sha256:00"}'),
        "wheels: its files have the wheels {}, the manifest",
    ),
}
"""Changes with the checksums made anew."""


@pytest.mark.parametrize("fault", [*NOT_SUMMED, *TAMPERED])
def test_tampering_is_found_and_named(sound, tmp_path, fault):
    change, words = (NOT_SUMMED | TAMPERED)[fault]
    forged = forge(sound, tmp_path / "f.tar", change, summed=fault in TAMPERED)
    assert first_problem(forged).startswith(words)


def raw(sound, path, change):
    """The tar itself rewritten, entry by entry."""
    with tarfile.open(sound) as old, tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as new:
        for number, entry in enumerate(old):
            data = old.extractfile(entry).read()
            for changed, content in change(number, entry, data):
                changed.size = len(content)
                new.addfile(changed, io.BytesIO(content))
    return path


def link(kind, target):
    def change(number, entry, data):
        if number == 0:
            bad = tarfile.TarInfo("evidence/link")
            bad.type, bad.linkname, bad.mtime = kind, target, entry.mtime
            yield bad, b""
        yield entry, data

    return change


def named(name):
    def change(number, entry, data):
        changed = copy.copy(entry)
        changed.name = name if number == 0 else entry.name
        yield changed, data

    return change


ARCHIVES = {
    "a symbolic link": (link(tarfile.SYMTYPE, "/etc/passwd"), "is no plain file"),
    "a hard link": (link(tarfile.LNKTYPE, "evidence/plan.json"), "is no plain file"),
    "a device": (link(tarfile.CHRTYPE, ""), "is no plain file"),
    "a pipe": (link(tarfile.FIFOTYPE, ""), "is no plain file"),
    "a folder": (link(tarfile.DIRTYPE, ""), "is no plain file"),
    "an absolute name": (named("/etc/cron.d/x"), "lies outside of evidence/"),
    "a way out": (named("evidence/../../x"), "lies outside of evidence/"),
    "a dotted way": (named("evidence/./x"), "lies outside of evidence/"),
    "another folder": (named("elsewhere/x"), "lies outside of evidence/"),
    "a line break in a name": (named("evidence/a\nb"), "lies outside of evidence/"),
    "a member twice": (lambda _n, e, d: [(e, d), (e, d)], "stands in it twice"),
    "a file that is a folder too": (named("evidence/plan.json/x"), "no readable tar"),
}


@pytest.mark.parametrize(("change", "words"), ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_hilgate_did_not_write_is_refused(sound, tmp_path, change, words):
    problem = first_problem(raw(sound, tmp_path / "f.tar", change))
    assert problem.startswith("archive: ")
    assert words in problem
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[: len(data) // 2 // 512 * 512],
        lambda data: data[: len(data) // 2 + 1],
        lambda _data: b"x" * 10240,
        lambda _data: b"",
        gzip.compress,
    ],
    ids=["half", "half a block", "no tar", "empty", "compressed"],
)
def test_a_damaged_file_is_refused(sound, tmp_path, change):
    (tmp_path / "f.tar").write_bytes(change(sound.read_bytes()))
    assert first_problem(tmp_path / "f.tar").startswith(("archive: no readable tar", "checksums: "))


def test_data_behind_the_end_is_found(sound, tmp_path):
    (tmp_path / "f.tar").write_bytes(sound.read_bytes() + b"\0" * 512 + b"x" * 512)
    assert first_problem(tmp_path / "f.tar") == "archive: there is data after its end"


def test_every_byte_of_a_file_counts(sound, tmp_path):
    with tarfile.open(sound) as tar:
        places = [entry.offset_data + entry.size // 2 for entry in tar if entry.size]
    data = bytearray(sound.read_bytes())
    for place in places:
        data[place] ^= 1
        (tmp_path / "f.tar").write_bytes(data)
        first_problem(tmp_path / "f.tar")
        data[place] ^= 1


def test_the_order_of_members_does_not_count(sound, tmp_path):
    assert verify.verify(forge(sound, tmp_path / "f.tar", lambda members: members)).sound


def test_no_bundle_of_a_quick_run_is_written(tmp_path):
    with pytest.raises(MisuseError, match="a quick run decides about no merge and no release"):
        write(tmp_path, profile="quick")
