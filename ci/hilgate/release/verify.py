# SPDX-License-Identifier: Apache-2.0
"""Read a bundle back and believe none of it: every file accounted for, every digest equal, the verdict derived again.

Each check needs what the ones before it found sound; the first that fails is the answer. Whoever can write a whole
bundle anew can write one that passes: only a signature of the file says who wrote it.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from hilgate.declare.quarantine import read_used
from hilgate.errors import HilgateError, RecordsError
from hilgate.judge.verdict import judge, read_verdict
from hilgate.model import PLAN_FILE, VERDICT_FILE, Noun
from hilgate.plan.make import plan_digest, read_plan
from hilgate.release import bundle
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hilgate.model import Plan, Verdict
    from hilgate.run.results import Recorded

CHECKS: Final = ("archive", "checksums", "plan", "records", "images", "verdict", "release", "bill")
NOT_CHECKED: Final = "not checked: what stands above is not sound"

MOST_MEMBERS = 100_000
MOST_BYTES = 8 * 1024**3
"""More than any build leaves; a file that claims more is refused before it fills a disk."""

DEMANDED = {bundle.MANIFEST_FILE, PLAN_FILE, VERDICT_FILE, bundle.REPORT_FILE, bundle.SBOM_FILE}

LEGITIMATE = frozenset({"no queue", "other profiles"})
"""Causes for which a release may leave a step out: no such machine exists, or the step belongs to other plans."""


class UnsoundError(RecordsError):
    """What one check found."""


class BundleFinding(Noun):
    """One line of the answer; `sound` is None for what was not looked at."""

    check: str
    sound: bool | None
    words: str


@dataclass(frozen=True)
class Answer:
    """All findings; the plan and the verdict only where everything is sound."""

    findings: tuple[BundleFinding, ...]
    plan: Plan | None
    verdict: Verdict | None

    @property
    def sound(self) -> bool:
        """Whether every check passed."""
        return all(finding.sound for finding in self.findings)


def verify(file: Path, *, demanded: Mapping[str, str] | None = None) -> Answer:
    """Run every check on a bundle.

    `demanded` is what its manifest must say, e.g. `{"profile": "release"}`.

    Raises:
        RecordsError: There is no such file.
    """
    if not file.is_file():
        raise RecordsError("there is no bundle", where=str(file), remedy="make one with `hilgate bundle`")
    findings: list[BundleFinding] = []
    with tempfile.TemporaryDirectory(prefix="hilgate-bundle-") as name:
        folder = Path(name)
        found = _check(file, folder, demanded or {})
        for check in CHECKS:
            try:
                words = next(found, NOT_CHECKED)
                findings.append(BundleFinding(check=check, sound=True if words != NOT_CHECKED else None, words=words))
            except HilgateError as error:
                words = str(error).replace(f"{folder / bundle.TOP}/", "")
                findings.append(BundleFinding(check=check, sound=False, words=words))
        top = folder / bundle.TOP
        sound = all(finding.sound for finding in findings)
        plan, verdict = (read_plan(top / PLAN_FILE), read_verdict(top / VERDICT_FILE)) if sound else (None, None)
    return Answer(tuple(findings), plan, verdict)


def _check(file: Path, folder: Path, demanded: Mapping[str, str]) -> Iterator[str]:
    """What each of `CHECKS` found, in their order.

    Raises:
        HilgateError: What the first that fails found.
    """
    members = unpack(file, folder)
    yield f"{len(members)} plain files in one folder"

    yield f"{check_sums(members)} checksums agree, nothing missing, nothing more"

    manifest = bundle.Manifest.load(members[bundle.MANIFEST_FILE], "ask for the bundle again")
    plan = read_plan(members[PLAN_FILE])
    plan.require_whole(PLAN_FILE)
    digest = plan_digest(plan)
    for what, claimed, real in (
        ("digest", manifest.plan_digest, digest),
        ("commit", manifest.commit, plan.commit),
        ("profile", manifest.profile, plan.profile),
    ):
        require(claimed == real, f"another plan: its {what} is {real[:40]}, the manifest says {claimed[:40]}")
    for name, value in demanded.items():
        require(getattr(manifest, name) == value, f"its {name} is {getattr(manifest, name)}, and {value} was asked for")
    yield f"plan {digest[:12]} of commit {plan.commit[:12]}, profile {plan.profile}, {count(len(plan.steps), 'step')}"

    recorded = bundle.read_records(folder / bundle.TOP / "results", plan)
    require(not recorded.damaged, "; ".join(f"{key}: {why}" for key, why in sorted(recorded.damaged.items())))
    require(bool(recorded.builds), "no job left a record")
    trees = {build.tree for build in recorded.builds}
    require(
        len(trees) == 1 or plan.profile != "release", f"its jobs ran over {len(trees)} different states of the files"
    )
    attempts = sum(len(found) for found in recorded.attempts.values())
    yield f"{count(attempts, 'step record')} of {count(len(recorded.builds), 'job')} answer this plan and this commit"

    yield _check_images(manifest, plan, recorded)

    stored = read_verdict(members[VERDICT_FILE])
    where = f"plan {stored.plan_digest[:12]} and commit {stored.commit[:12]}"
    require((stored.plan_digest, stored.commit) == (digest, plan.commit), f"the verdict is of {where}")
    quarantine = read_used(folder / bundle.TOP)
    derived = judge(
        plan,
        recorded,
        digest,
        decided=stored.decided,
        quarantine=quarantine,
        approved_by=stored.approved_by,
        doubts=stored.doubts,
    )
    require(
        derived.outcome is stored.outcome,
        f"the stored verdict says {stored.outcome.value}; the records give {derived.outcome.value}: {derived.why}",
    )
    require(derived == stored, f"the stored verdict is not what the records give: {_difference(stored, derived)}")
    require(stored.outcome is manifest.outcome, f"the manifest says {manifest.outcome}, the verdict {stored.outcome}")
    yield f"derived again from the records: {stored.outcome.value}: {stored.why}"

    yield _check_release(plan, recorded)

    text = members[bundle.SBOM_FILE].read_text("utf-8", errors="replace")
    problem = bill_problem(text)
    require(not problem, f"no CycloneDX 1.6 bill: {problem}")
    require(manifest.commit in text and digest in text, "the bill is of another build")
    yield "CycloneDX 1.6, of this commit and plan"


def require(holds: bool, otherwise: str) -> None:
    """Refuse the bundle unless this holds.

    Raises:
        UnsoundError: It does not.
    """
    if not holds:
        raise UnsoundError(otherwise)


def unpack(file: Path, folder: Path) -> dict[str, Path]:
    """Extract a tar into a folder; returns its files by their name in the bundle.

    Raises:
        UnsoundError: It is no whole tar, is too large, or holds anything but plain files below `evidence/`.
    """
    members: dict[str, Path] = {}
    total = 0
    try:
        with tarfile.open(file, mode="r:", errorlevel=2) as tar:
            for entry in tar:
                name = entry.name.removeprefix(f"{bundle.TOP}/")
                within = entry.name.startswith(f"{bundle.TOP}/") and bundle.NAME.fullmatch(name)
                require(entry.isreg(), f"{entry.name!a} is no plain file (type {entry.type!r})")
                require(bool(within), f"{entry.name!a} lies outside of {bundle.TOP}/")
                require(name not in members, f"{entry.name!a} stands in it twice")
                total += entry.size
                few = len(members) < MOST_MEMBERS and total <= MOST_BYTES
                require(few, f"more than {MOST_MEMBERS} members or {MOST_BYTES} bytes: no build leaves as much")
                members[name] = _copy_out(tar, entry, folder / entry.name)
    except (tarfile.TarError, EOFError, OSError, ValueError, UnicodeError) as error:
        raise UnsoundError(f"no readable tar: {error}") from error
    return members


def _copy_out(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> Path:
    """Copy a plain file without its owner and mode; Python 3.11.4 brought `filter="data"`, which 3.11.2 lacks."""
    source = tar.extractfile(entry)
    assert source is not None  # it is a plain file
    path.parent.mkdir(parents=True, exist_ok=True)
    with source, path.open("xb") as target:
        shutil.copyfileobj(source, target)
    return path


def check_sums(members: Mapping[str, Path]) -> int:
    """Compare every member with its line of `SHA256SUMS`; returns how many there are.

    Raises:
        UnsoundError: A member is missing, too much, or another than its checksum.
    """
    require(bundle.SUMS_FILE in members, f"{bundle.SUMS_FILE} is missing")
    lines = members[bundle.SUMS_FILE].read_bytes().decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    listed = {match[2]: match[1] for match in matches}
    require(len(listed) == len(lines), f"{bundle.SUMS_FILE} has a line that is no checksum, or names a file twice")
    present = members.keys() - {bundle.SUMS_FILE}
    for what, names in (
        ("missing", (listed.keys() | DEMANDED) - present),
        (f"not in {bundle.SUMS_FILE}", present - listed.keys()),
        ("another content than its checksum", {name for name in present & listed.keys()
                                               if bundle.sha256(members[name]) != listed[name]}),
    ):  # fmt: skip
        require(not names, f"{what}: {', '.join(map(ascii, sorted(names)[:5]))}")
    return len(listed)


def _check_images(manifest: bundle.Manifest, plan: Plan, recorded: Recorded) -> str:
    built = recorded.digests(plan)
    require(built == manifest.images, f"plan and records name the images {built}, the manifest {manifest.images}")
    for name, record in sorted(recorded.images.items()):
        planned = record.content == plan.images.get(name)
        require(planned, f"the image {name} was built from other contents than the plan's")
    for step in plan.steps:
        attempt = recorded.last(step.key)
        if step.image and attempt:
            ran_in, wanted = attempt.record.environment.image, built.get(step.image)
            right = bool(ran_in) and ran_in == wanted
            require(right, f"{step.key} ran in {ran_in or 'no image'}, and {step.image} is {wanted}")
    of = f" ({len(plan.digests)} of an earlier build)" if plan.digests else ""
    return f"{len(built)} images{of}, and every result was made in the one that its step names"


def _check_release(plan: Plan, recorded: Recorded) -> str:
    if plan.profile != "release":
        return f"not a release: profile {plan.profile}"
    require(not plan.dirty, "a release is planned of uncommitted files")
    require(not plan.fork, "a release is planned of a fork")
    for key, attempts in sorted(recorded.attempts.items()):
        require(all(one.record.reused is None for one in attempts), f"{key} was not run: a pass of an earlier build")
    require(plan.base is None, "a release is planned of a change, not of everything")
    for omission in plan.omissions:
        require(omission.cause in LEGITIMATE, f"{omission.key} is left out of a release: {omission.reason}")
    return f"{len(plan.omissions)} omissions, each because no such machine exists or the step belongs to other plans"


def bill_problem(text: str) -> str:
    """What is wrong with a bill by the CycloneDX 1.6 schema; empty for a sound one."""
    try:
        bill = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    version = bill.get("specVersion") if isinstance(bill, dict) else None
    if version != "1.6":  # the schema takes any text there
        return f"its specVersion is {version!r}"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return "" if problem is None else (str(problem).splitlines() or ["against the schema"])[0][:200]


def _difference(stored: Verdict, derived: Verdict) -> str:
    for mine, theirs in zip(stored.steps, derived.steps, strict=False):
        if mine != theirs:
            return f"{theirs.key}: {mine.outcome.value} ({mine.why}) against {theirs.outcome.value} ({theirs.why})"
    return ", ".join(name for name in type(stored).model_fields if getattr(stored, name) != getattr(derived, name))
