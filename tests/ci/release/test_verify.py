"""Every way of tampering with a bundle is found and named."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest
from support.bundles import (
    BUILDER_RECORDS,
    DIGEST,
    RECORDS,
    edited,
    first_problem,
    forge,
    without,
    without_lines,
    write,
)

from hilgate.release.verify import verify


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"))


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
    "no manifest": (edited("manifest.json", b'"profile"', b'"prefile"'), True, "plan: not a manifest: profile"),
    "another commit in the manifest": (
        edited("manifest.json", b"cccc", b"cccd"), True, "plan: another plan: its commit"),
    "another profile": (edited("manifest.json", b'"gate"', b'"release"'), True, "plan: another plan: its profile"),
    "records of another plan": (
        edited(RECORDS, b'"plan_digest":"', b'"plan_digest":"f'), True, "records: mla-cpu: results.jsonl: these"),
    "records of another commit": (
        edited(RECORDS, b'"commit":"cccc', b'"commit":"dddd'), True, "records: mla-cpu: results.jsonl: these"),
    "a dropped check": (without_lines(b"t.py::b"), True, "records: mla-cpu: results.jsonl: it announces 2"),
    "a dropped opening": (without_lines(b'"kind":"build"'), True, "records: mla-cpu: results.jsonl: its first"),
    "no records": (without(RECORDS, BUILDER_RECORDS), True, "records: no results"),
    "a truncated line": (
        lambda m: {**m, RECORDS: m[RECORDS][:-1]}, True, "records: mla-cpu: results.jsonl: it is not as"),
    "a dropped image": (
        without_lines(b'"kind":"image"', BUILDER_RECORDS), True, "images: the records name the images {}"),
    "another image digest": (
        edited(BUILDER_RECORDS, b'"digest":"sha256:abab', b'"digest":"sha256:cdab'), True, "images: the rec"),
    "another image in the manifest": (
        edited("manifest.json", b"sha256:abab", b"sha256:cdab"), True, "images: the records name the images"),
    "an image of other contents": (
        edited(BUILDER_RECORDS, b'"content":"cc', b'"content":"dd'), True, "images: the image rocm was"),
    "a step in another image": (
        edited(RECORDS, b'"image":"sha256:abab', b'"image":"sha256:cdab'), True, "images: mla-cpu ran"),
    "a step in no image": (
        edited(RECORDS, f'"image":"{DIGEST}"'.encode(), b'"image":""'), True, "images: mla-cpu ran"),
    "a dropped step": (
        without(RECORDS), True,
        "verdict: the stored verdict says pass; the records give did not run"),
    "a failure that became a pass": (
        edited(RECORDS, b'"exit_status":0', b'"exit_status":1'), True,
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
    assert verify(forge(sound, tmp_path / "f.tar", lambda members: members)).sound
