# SPDX-License-Identifier: Apache-2.0
"""Bundles of a made-up build, and the ways in which a forger rewrites one."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from support import jobs
from support.jobs import IMAGE_STEP, finished, opening, passed
from support.plans import ENVIRONMENT, plan, step

from hilgate.cli.verdict import judge_and_report
from hilgate.model.record import Outcome
from hilgate.release import bundle, verify
from hilgate.run import results
from hilgate.run.results import with_digest

COMMITTED = 1763726400
RECORDS = "results/steps/mla-cpu/results.jsonl"
BUILDER_RECORDS = "results/steps/image-rocm-cpu/results.jsonl"
DIGEST = "sha256:" + "ab" * 32
CONTENT = "c" * 64
LOCK = f"""torch==2.13.0 \\
    --hash=sha256:{"a" * 64}
    # via vllm
Py_YAML==6.0 ; python_version > '3' --hash=sha256:{"b" * 64}
"""
PINS = f'[rocm.base]\nreference = "rocm/pytorch:7"\ndigest = "{DIGEST}"\n[sources.aiter]\nversion = "0.1"\n'
MLA = step("mla", "test", image="rocm", evidence="junit")


def records(step_, *checks, image=""):
    status = int(any(check.outcome is Outcome.FAIL for check in checks))
    where = ENVIRONMENT.model_copy(update={"image": image})
    return finished(step_, *checks, status=status, environment=where)


def bill(*packages):
    """What cyclonedx-py writes of lock files that pin these packages, as far as anybody here reads it."""
    components = [{"type": "library", "name": name, "version": version} for name, version in packages]
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "components": components})


def built(folder, *, checks=None, image=DIGEST, **changes):
    """A repository and a judged results folder of two steps, one of them in the image that the other builds."""
    checks = checks or [passed("t.py::a"), passed("t.py::b")]
    a_plan = plan(IMAGE_STEP, MLA, **{"images": {"rocm": CONTENT}, "omissions": ()} | changes)
    root, out = folder / "repository", folder / "results"
    for path, text in (("requirements/a.txt", LOCK), ("docker/pins.toml", PINS)):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    (out / "steps" / "mla-cpu").mkdir(parents=True)
    (out / "steps" / "mla-cpu" / "log.txt").write_text("log\n")
    a_plan.save(out / "plan.json")
    image_record = jobs.image(content=CONTENT, digest=DIGEST)
    for one, lines in (
        (IMAGE_STEP, [image_record, *records(IMAGE_STEP, passed("built"))]),
        (MLA, records(MLA, *checks, image=image)),
    ):
        results.write(results.step_folder(out, one.key), opening(a_plan, environment=ENVIRONMENT), lines)
    judge_and_report(out, a_plan)
    (out / "sbom.cdx.json").write_text(bill(("torch", "2.13.0"), ("Py_YAML", "6.0")))
    return root, out


def write(folder, **changes):
    root, out = built(folder, **changes)
    bundle.write_bundle(root, out, folder / "e.tar", committed=COMMITTED)
    return folder / "e.tar"


def members_of(file):
    with tarfile.open(file) as tar:
        return {e.name.removeprefix("evidence/"): tar.extractfile(e).read() for e in tar}


def sums(members):
    lines = [f"{hashlib.sha256(members[n]).hexdigest()}  {n}\n" for n in sorted(members) if n != "SHA256SUMS"]
    return {**members, "SHA256SUMS": "".join(lines).encode()}


def forge(sound, out, change, *, summed=True):
    """Another bundle: its members changed, its checksums and digests made anew as a careful forger would."""
    members = change(members_of(sound))
    for name in (RECORDS, BUILDER_RECORDS):
        if summed and members.get(name, b"").endswith(b"\n"):
            lines = [line for line in members[name].splitlines(keepends=True) if b'"kind":"end"' not in line]
            members = {**members, name: with_digest(b"".join(lines))}
    with tarfile.open(out, "w") as tar:
        for name, data in reversed((sums(members) if summed else members).items()):
            entry = tarfile.TarInfo(f"evidence/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out


def edited(name, old, new):
    def change(members):
        assert old in members[name], name
        return {**members, name: members[name].replace(old, new)}

    return change


def without(*names):
    return lambda members: {name: data for name, data in members.items() if name not in names}


def without_lines(word, name=RECORDS):
    """Records with this word dropped."""

    def change(members):
        lines = members[name].splitlines(keepends=True)
        kept = [line for line in lines if word not in line]
        assert len(kept) < len(lines)
        return {**members, name: b"".join(kept)}

    return change


def first_problem(file, asked=None, **demanded):
    answer = verify.verify(file, asked or verify.Asked(demanded=demanded))
    assert not answer.sound
    assert answer.plan is None
    assert answer.verdict is None
    problem = next(finding for finding in answer.findings if not finding.sound)
    after = answer.findings[answer.findings.index(problem) + 1 :]
    assert {finding.sound for finding in after} <= {None}
    return f"{problem.check}: {problem.words}"
