"""The evidence bundle: the same bytes twice, and every way of tampering found and named."""

from __future__ import annotations

import datetime as dt
import gzip
import hashlib
import io
import json
import subprocess
import tarfile

import pytest
from toyplans import (
    COMMIT,
    ENVIRONMENT,
    IDENTITY,
    failing,
    hilgate,
    passing,
    plan,
    step,
    write_repository,
    writes_findings,
)

from hilgate import bundle, bundle_check, results, sbom
from hilgate.cli import gating
from hilgate.errors import RecordsError
from hilgate.model import BuildRecord, Check, CheckRecord, ImageRecord, Omission, Outcome, StepRecord
from hilgate.plan import plan_digest, write_plan

COMMITTED = 1763726400
NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
DIGEST = "sha256:" + "ab" * 32
CONTENT = "c" * 64
LOCK = f"""torch==2.13.0 \\
    --hash=sha256:{"a" * 64}
    # via vllm
Py_YAML==6.0 ; python_version > '3' --hash=sha256:{"b" * 64}
"""
PINS = f'[rocm.base]\nreference = "rocm/pytorch:7"\ndigest = "{DIGEST}"\n[sources.aiter]\nversion = "0.1"\n'
BUILDER = step("image-rocm", "build", provides="rocm")
MLA = step("mla", "test", image="rocm", evidence="junit")


def records(step_, *checks, image=""):
    where = ENVIRONMENT.model_copy(update={"image": image})
    status = int(any(check.outcome is Outcome.FAIL for check in checks))
    outcome = Outcome.FAIL if status else Outcome.PASS
    return [
        *(CheckRecord(step=step_.key, check=check) for check in checks),
        StepRecord(key=step_.key, started=NOW, seconds=1.0, exit_status=status, outcome=outcome, checks=len(checks),
                   command=step_.command, environment=where),
    ]  # fmt: skip


def built(folder, *, checks=None, image=DIGEST, **changes):
    """A repository and a judged results folder of two steps, one of them in the image that the other builds."""
    checks = checks or [Check(id="t.py::a", outcome=Outcome.PASS), Check(id="t.py::b", outcome=Outcome.PASS)]
    a_plan = plan(BUILDER, MLA, **{"images": {"rocm": CONTENT}, "omissions": ()} | changes)
    root, out = folder / "repository", folder / "results"
    for path, text in (("requirements/a.txt", LOCK), ("docker/pins.toml", PINS)):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    (out / "steps" / "mla-cpu").mkdir(parents=True)
    (out / "steps" / "mla-cpu" / "log.txt").write_text("log\n")
    write_plan(a_plan, out / "plan.json")
    opening = BuildRecord(started=NOW, plan_digest=plan_digest(a_plan), commit=COMMIT, environment=ENVIRONMENT)
    image_record = ImageRecord(step=BUILDER.key, image="rocm", content=CONTENT, digest=DIGEST)
    all_records = [opening, image_record, *records(BUILDER, Check(id="built", outcome=Outcome.PASS))]
    results.append(out / "results.jsonl", [*all_records, *records(MLA, *checks, image=image)])
    gating.decide(out, a_plan)
    return root, out


def write(folder, **changes):
    root, out = built(folder, **changes)
    bundle.write_bundle(root, out, folder / "e.tar", committed=COMMITTED)
    return folder / "e.tar"


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"))


def members_of(file):
    with tarfile.open(file) as tar:
        return {e.name.removeprefix("evidence/"): tar.extractfile(e).read() for e in tar}


def sums(members):
    lines = [f"{hashlib.sha256(members[n]).hexdigest()}  {n}\n" for n in sorted(members) if n != "SHA256SUMS"]
    return {**members, "SHA256SUMS": "".join(lines).encode()}


def forge(sound, out, change, *, summed=True, mtime=COMMITTED):
    """Another bundle: its members changed, its checksums made anew as a careful forger would."""
    members = change(members_of(sound))
    with out.open("wb") as file:
        bundle.write_tar(file, sums(members) if summed else members, mtime)
    return out


def edited(name, old, new):
    def change(members):
        assert old in members[name], name
        return {**members, name: members[name].replace(old, new)}

    return change


def without(*names):
    return lambda members: {name: data for name, data in members.items() if name not in names}


def without_lines(word):
    """Records with this word dropped."""

    def change(members):
        lines = members["results/results.jsonl"].splitlines(keepends=True)
        kept = [line for line in lines if word not in line]
        assert len(kept) < len(lines)
        return {**members, "results/results.jsonl": b"".join(kept)}

    return change


def first_problem(file, **demanded):
    answer = bundle_check.verify(file, demanded=demanded)
    assert not answer.sound
    assert answer.plan is None
    assert answer.verdict is None
    problem = next(finding for finding in answer.findings if not finding.sound)
    after = answer.findings[answer.findings.index(problem) + 1 :]
    assert {finding.sound for finding in after} <= {None}
    return f"{problem.check}: {problem.words}"


def test_a_sound_bundle_is_sound(sound):
    answer = bundle_check.verify(sound)
    assert [(finding.check, finding.sound) for finding in answer.findings] == [
        (check, True) for check, _ in bundle_check.CHECKS
    ]
    assert answer.verdict.outcome is Outcome.PASS


def test_the_same_results_give_the_same_bytes(sound, tmp_path):
    root, out = sound.parent / "repository", sound.parent / "results"
    bundle.write_bundle(root, out, tmp_path / "again.tar", committed=COMMITTED)
    assert (tmp_path / "again.tar").read_bytes() == sound.read_bytes()


def test_members_are_plain_files_of_nobody_at_the_time_of_the_commit(sound):
    with tarfile.open(sound) as tar:
        entries = tar.getmembers()
    assert [e.name for e in entries] == sorted(e.name for e in entries)
    assert {(e.type, e.uid, e.gid, e.uname, e.mode, e.mtime) for e in entries} == {
        (tarfile.REGTYPE, 0, 0, "", 0o644, COMMITTED)
    }
    assert {"evidence/pins.toml", "evidence/results/steps/mla-cpu/log.txt", "evidence/report.html"} <= {
        e.name for e in entries
    }


def test_its_checksums_are_those_of_sha256sum(sound, tmp_path):
    with tarfile.open(sound) as tar:
        tar.extractall(tmp_path, filter="data")
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / "evidence", check=False
    )
    assert done.returncode == 0


TAMPERED = {
    "a flipped byte": (edited("results/steps/mla-cpu/log.txt", b"log", b"lag"), False, "checksums: another content"),
    "a missing member": (without("report.html"), False, "checksums: missing: 'report.html'"),
    "a missing member and its checksum": (without("report.html"), True, "checksums: missing: 'report.html'"),
    "an extra member": (lambda m: {**m, "x": b""}, False, "checksums: not in SHA256SUMS: 'x'"),
    "no checksums": (without("SHA256SUMS"), False, "checksums: SHA256SUMS is missing"),
    "a checksum that is none": (lambda m: {**m, "SHA256SUMS": b"x\n"}, False, "checksums: SHA256SUMS has a line"),
    "a name summed twice": (
        lambda m: {**m, "SHA256SUMS": m["SHA256SUMS"] * 2}, False, "checksums: SHA256SUMS has a line"),
    "another plan": (edited("plan.json", b'"minimum": 1', b'"minimum": 2'), True, "plan: another plan: its digest"),
    "no plan": (edited("plan.json", b"{", b""), True, "plan: not a plan"),
    "no manifest": (edited("manifest.json", b'"profile"', b'"prefile"'), True, "plan: manifest.json is no manifest"),
    "another commit in the manifest": (
        edited("manifest.json", b"cccc", b"cccd"), True, "plan: another plan: its commit"),
    "another profile": (edited("manifest.json", b'"gate"', b'"release"'), True, "plan: another plan: its profile"),
    "another time": (edited("manifest.json", b"1763726400", b"1763726401"), True, "plan: the time of its members"),
    "records of another plan": (
        edited("results/results.jsonl", b'"plan_digest":"', b'"plan_digest":"f'), True, "records: these results"),
    "records of another commit": (
        edited("results/results.jsonl", b'"commit":"cccc', b'"commit":"dddd'), True, "records: these results are of"),
    "a dropped check": (without_lines(b"t.py::b"), True, "records: the step 'mla-cpu' announced 2 checks"),
    "a dropped opening": (without_lines(b'"kind":"build"'), True, "records: the first record must be"),
    "no records": (without("results/results.jsonl"), True, "records: no results"),
    "a truncated line": (
        lambda m: {**m, "results/results.jsonl": m["results/results.jsonl"][:-1]}, True, "records: the last line"),
    "a dropped image": (without_lines(b'"kind":"image"'), True, "images: the records name the images {}"),
    "another image digest": (
        edited("results/results.jsonl", b'"digest":"sha256:abab', b'"digest":"sha256:cdab'), True, "images: the rec"),
    "another image in the manifest": (
        edited("manifest.json", b"sha256:abab", b"sha256:cdab"), True, "images: the records name the images"),
    "an image of other contents": (
        edited("results/results.jsonl", b'"content":"cc', b'"content":"dd'), True, "images: the image rocm was"),
    "a step in another image": (
        edited("results/results.jsonl", b'"image":"sha256:abab', b'"image":"sha256:cdab'), True, "images: mla-cpu ran"),
    "a step in no image": (
        edited("results/results.jsonl", f'"image":"{DIGEST}"'.encode(), b'"image":""'), True, "images: mla-cpu ran"),
    "a dropped step": (
        lambda m: without_lines(b'"key":"mla-cpu"')(without_lines(b'"step":"mla-cpu"')(m)), True,
        "verdict: the stored verdict says pass; the records give did not run"),
    "a failure that became a pass": (
        edited("results/results.jsonl", b'"exit_status":0', b'"exit_status":1'), True,
        "verdict: the stored verdict says pass; the records give fail"),
    "a verdict of another plan": (
        edited("verdict.json", b'"plan_digest": "', b'"plan_digest": "f'), True, "verdict: the verdict is of plan f"),
    "a worded verdict": (edited("verdict.json", b"2 passed", b"3 passed"), True, "verdict: the stored verdict is not"),
    "a verdict with other counts": (
        edited("verdict.json", b'"passed": 2', b'"passed": 9'), True, "verdict: the stored verdict is not what"),
    "a verdict that is none": (edited("verdict.json", b'"steps"', b'"stops"'), True, "verdict: not a verdict"),
    "an outcome in the manifest": (
        edited("manifest.json", b'"pass"', b'"fail"'), True, "verdict: the manifest says fail, the verdict pass"),
    "a bill that is none": (edited("sbom.cdx.json", b'"1.6"', b'"9.9"'), True, "bill: no CycloneDX 1.6 bill"),
    "a bill of another build": (edited("sbom.cdx.json", b"cccc", b"cccd"), True, "bill: the bill is of another build"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "summed", "words"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_found_and_named(sound, tmp_path, change, summed, words):
    assert first_problem(forge(sound, tmp_path / "f.tar", change, summed=summed)).startswith(words)


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
        yield (entry.replace(name=name), data) if number == 0 else (entry, data)

    return change


def replaced(**what):
    return lambda number, entry, data: [(entry.replace(**what) if number == 1 else entry, data)]


ARCHIVES = {
    "a symbolic link": (link(tarfile.SYMTYPE, "/etc/passwd"), "is a link to '/etc/passwd'"),
    "a hard link": (link(tarfile.LNKTYPE, "evidence/plan.json"), "is a link to"),
    "a device": (link(tarfile.CHRTYPE, ""), "is no plain file"),
    "a pipe": (link(tarfile.FIFOTYPE, ""), "is no plain file"),
    "a folder": (link(tarfile.DIRTYPE, ""), "is no plain file"),
    "an absolute name": (named("/etc/cron.d/x"), "lies outside of evidence/"),
    "a way out": (named("evidence/../../x"), "lies outside of evidence/"),
    "a dotted way": (named("evidence/./x"), "lies outside of evidence/"),
    "another folder": (named("elsewhere/x"), "lies outside of evidence/"),
    "a line break in a name": (named("evidence/a\nb"), "lies outside of evidence/"),
    "a member twice": (lambda _n, e, d: [(e, d), (e, d)], "stands in it twice"),
    "a file that is a folder too": (named("evidence/plan.json/x"), "stands in it twice|no readable tar"),
    "another owner": (replaced(uid=1000), "its bytes are not those"),
    "an executable": (replaced(mode=0o755), "its bytes are not those"),
    "one other time": (replaced(mtime=COMMITTED + 1), "its bytes are not those"),
    "a hidden header": (replaced(uname="x"), "its bytes are not those"),
}


@pytest.mark.parametrize(("change", "words"), ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_hilgate_did_not_write_is_refused(sound, tmp_path, change, words):
    problem = first_problem(raw(sound, tmp_path / "f.tar", change))
    assert problem.startswith("archive: ")
    assert any(word in problem for word in words.split("|"))
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[: len(data) // 2 // 512 * 512], "truncated"),
        (lambda data: data[:10240], "no readable tar"),
        (lambda data: data + b"\0" * 10240, "its bytes are not those"),
        (lambda data: data + data, "its bytes are not those"),
        (lambda data: data[:-1] + b"x", "its bytes are not those"),
        (lambda data: data[:600] + b"\xff" + data[601:], "checksums|its bytes"),
        (lambda _data: b"x" * 10240, "no readable tar"),
        (lambda _data: b"", "truncated"),
        (lambda data: gzip.compress(data).ljust(20480, b"\0"), "no readable tar|truncated"),
    ],
    ids=["one byte less", "half", "the first record", "zeros more", "twice", "the last byte",
         "a byte of the first member", "no tar", "empty", "compressed"],
)  # fmt: skip
def test_a_damaged_file_is_refused(sound, tmp_path, change, words):
    (tmp_path / "f.tar").write_bytes(change(sound.read_bytes()))
    assert any(word in first_problem(tmp_path / "f.tar") for word in words.split("|"))


def test_every_single_byte_counts(sound, tmp_path):
    data = bytearray(sound.read_bytes())
    for place in range(0, len(data), len(data) // 20):
        data[place] ^= 1
        (tmp_path / "f.tar").write_bytes(data)
        first_problem(tmp_path / "f.tar")
        data[place] ^= 1


def test_what_was_asked_for_is_demanded(sound):
    assert bundle_check.verify(sound, demanded={"profile": "gate", "commit": COMMIT}).sound
    assert "profile is gate, and release was asked for" in first_problem(sound, profile="release")


def omission(reason):
    return (Omission(key="far-gfx950", area="toys", label="far", reason=reason),)


RELEASE = {"profile": "release", "base": None, "changed_files": ()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"omissions": omission("not affected by this change")}, "far-gfx950 is left out of a release: not affected"),
        ({"omissions": omission("not asked for")}, "not asked for"),
        ({"omissions": omission("needs buildah; not installed here")}, "needs buildah"),
        ({"base": "main"}, "of a change, not of everything"),
        ({"dirty": True}, "of uncommitted files"),
        ({"fork": True}, "of a fork"),
    ],
)
def test_a_release_leaves_nothing_out_without_a_reason(tmp_path, changes, words):
    assert words in first_problem(write(tmp_path, **RELEASE | changes))


@pytest.mark.parametrize(
    "reason", ["no queue offers cuda; run it at a desk that has one", "runs nightly", "runs in pr only"]
)
def test_a_release_may_leave_out_what_no_machine_offers_or_other_plans_run(tmp_path, reason):
    file = write(tmp_path, **RELEASE, omissions=omission(reason))
    assert bundle_check.verify(file).sound


def test_a_failing_build_has_a_sound_bundle_too(tmp_path):
    file = write(tmp_path, checks=[Check(id="t.py::a", outcome=Outcome.FAIL, message="wrong")])
    answer = bundle_check.verify(file)
    assert answer.sound
    assert answer.verdict.outcome is Outcome.FAIL


@pytest.mark.parametrize("name", ["plan.json", "verdict.json", "report.html", "results.jsonl"])
def test_no_bundle_without_evidence(tmp_path, name):
    root, out = built(tmp_path)
    (out / name).unlink()
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
    write_plan(a_plan, out / "plan.json")
    for one in a_plan.steps:
        job = out / "jobs" / one.key
        job.mkdir(parents=True)
        opening = BuildRecord(started=NOW, plan_digest=plan_digest(a_plan), commit=COMMIT, environment=ENVIRONMENT)
        results.append(job / "results.jsonl", [opening, *records(one, Check(id="p", outcome=Outcome.PASS))])
    gating.decide(out, a_plan, jobs=out / "jobs")
    bundle.write_bundle(root, out, tmp_path / "e.tar", committed=COMMITTED)
    assert {"results/jobs/a-cpu/results.jsonl", "results/jobs/b-cpu/results.jsonl"} <= set(
        members_of(tmp_path / "e.tar")
    )
    assert bundle_check.verify(tmp_path / "e.tar").sound


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
    assert sbom.problem_of(json.dumps(bill)) == ""


def test_a_lock_file_that_pins_nothing_is_refused():
    with pytest.raises(RecordsError, match="pins nothing: torch>=2"):
        sbom.make_sbom(commit=COMMIT, committed=0, plan_digest="d", locks={"a.txt": "torch>=2\n"}, environments=(),
                       pins={}, images={})  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A gate that passed, bundled and signed."""
    root = write_repository(tmp_path_factory.mktemp("repository"), {"a": writes_findings(passing())})
    assert hilgate(root, "gate").returncode == 0
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / "key")], check=True)
    (root / "signers").write_text("release " + (root / "key.pub").read_text())
    return root


def test_the_commands(repository):
    done = hilgate(repository, "bundle", "--out", "e.tar", "--key", "key")
    assert (done.returncode, done.stdout) == (0, "e.tar\n" + f"{repository}/e.tar.sig\n".replace(f"{repository}/", ""))
    checked = hilgate(repository, "verify-bundle", "e.tar", "--signers", "signers", "--profile", "gate")
    assert checked.returncode == 0
    assert checked.stdout.endswith("sound; its verdict: pass\n")
    assert max(map(len, checked.stdout.splitlines())) <= 90
    as_json = json.loads(hilgate(repository, "verify-bundle", "e.tar", "--json").stdout)
    assert (as_json["sound"], as_json["outcome"]) == (True, "pass")


def test_a_signature_says_who_wrote_it(repository, tmp_path):
    hilgate(repository, "bundle", "--out", "e.tar", "--key", "key")
    stranger = hilgate(repository, "verify-bundle", "e.tar", "--signers", "signers", "--signer", "mallory")
    assert stranger.returncode == 3
    assert "✗ signature" in stranger.stdout
    forge(repository / "e.tar", repository / "forged.tar", lambda m: m, mtime=7)
    (repository / "forged.tar.sig").write_bytes((repository / "e.tar.sig").read_bytes())
    assert "✗ signature" in hilgate(repository, "verify-bundle", "forged.tar", "--signers", "signers").stdout
    (repository / "e.tar.sig").unlink()
    assert "there is no e.tar.sig" in hilgate(repository, "verify-bundle", "e.tar", "--signers", "signers").stdout
    refused = hilgate(repository, "bundle", "--out", str(tmp_path / "e.tar"), "--key", "signers")
    assert refused.returncode == 2
    assert "could not be signed" in refused.stderr


def test_an_unsound_bundle_ends_with_3_whatever_it_claims(repository):
    hilgate(repository, "bundle", "--out", "e.tar")
    forge(repository / "e.tar", repository / "f.tar", edited("verdict.json", b"1 passed", b"7 passed"))
    done = hilgate(repository, "verify-bundle", "f.tar")
    assert done.returncode == 3
    assert done.stdout.endswith("NOT SOUND: nothing that it says counts\n")
    assert hilgate(repository, "verify-bundle", "none.tar").returncode == 3


def test_results_that_were_not_judged_as_recorded_are_not_bundled(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(failing(), status=1)})
    assert hilgate(root, "gate").returncode == 1
    verdict = root / "results" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"fail"', '"pass"'))
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "the stored verdict says pass; the records give fail" in done.stderr
    assert not (root / "e.tar").exists()


def test_a_bundle_is_of_the_commit_that_is_checked_out(tmp_path):
    root = write_repository(tmp_path, {"a": writes_findings(passing())})
    hilgate(root, "gate")
    subprocess.run(["git", *IDENTITY, "commit", "-q", "--allow-empty", "-m", "x"], cwd=root, check=True)
    done = hilgate(root, "bundle", "--out", "e.tar")
    assert done.returncode == 3
    assert "is checked out" in done.stderr
