# SPDX-License-Identifier: Apache-2.0
"""Verify a bundle: account for every file, compare every digest, and derive the verdict again.

Each check needs what the ones before it found sound; the first that fails is the answer. A clone that has the commit
says what the bundle cannot say of itself: which steps, lock files and pins the commit declares. Whoever can write a
whole bundle anew can write one that passes all of this: only a signature says who wrote it (OpenSSH checks it). A
release needs both.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate import __version__, git
from hilgate.declare.load import load
from hilgate.declare.quarantine import load_quarantine, read_used
from hilgate.errors import CannotRunHereError, HilgateError, MisuseError, RecordsError
from hilgate.judge.verdict import image_digests, judge, read_verdict
from hilgate.model import JOBS_FOLDER, PLAN_FILE, VERDICT_FILE, StrictModel
from hilgate.model.plan import plan_digest
from hilgate.model.table import is_table
from hilgate.names import RECHECK_SUFFIX
from hilgate.plan.make import plan_whole, read_plan
from hilgate.release import bundle, signature
from hilgate.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hilgate.model.plan import Plan
    from hilgate.model.verdict import Verdict
    from hilgate.run.results import Recorded

CHECKS: Final = (
    *("archive", "checksums", "plan", "members", "records", "images", "wheels", "verdict", "release", "bill"),
    *("commit", "signature"),
)
NOT_CHECKED: Final = "skipped: an earlier check failed"

MOST_MEMBERS = 100_000
MOST_BYTES = 8 * 1024**3
"""More than any build leaves; a file that claims more is refused before it fills a disk."""

DEMANDED = {bundle.MANIFEST_FILE, PLAN_FILE, VERDICT_FILE, bundle.REPORT_FILE}

LEGITIMATE = frozenset({"no queue", "other profiles"})
"""Causes for which a release may leave a step out: no such machine exists, or the step belongs to other plans."""


_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\#]+)")
"""The start of a line of a lock file: `name==version`, or `name[extra]==version`."""


class UnsoundError(RecordsError):
    """What one check found."""


class BundleFinding(StrictModel):
    """One line of the answer; `sound` is None for what was not looked at."""

    check: str
    sound: bool | None
    words: str


@dataclass(frozen=True)
class Asked:
    """What a bundle is held against, besides itself."""

    demanded: Mapping[str, str] = field(default_factory=dict)
    """What its manifest must say, e.g. `{"profile": "release"}`."""
    root: Path | None = None
    """A clone that has its commit."""
    signature: Path | None = None
    """Signature of its `SHA256SUMS`."""
    signers: Path | None = None
    """Who may sign; by default `ci/allowed_signers` of `root`."""
    unsigned: bool = False
    """Whether a release may be without a signature: before it is signed."""
    wheels: tuple[Path, ...] = ()
    """Wheels that must be those of the bundle."""


@dataclass(frozen=True)
class BundleAnswer:
    """All findings; the plan and the verdict only where everything is sound."""

    findings: tuple[BundleFinding, ...]
    plan: Plan | None
    verdict: Verdict | None

    @property
    def sound(self) -> bool:
        """Whether no check failed; a check that was not asked for is skipped, and fails nothing."""
        return all(finding.sound is not False for finding in self.findings)


def verify(file: Path, asked: Asked | None = None) -> BundleAnswer:
    """Run every check on a bundle.

    Raises:
        RecordsError: There is no such file.
        MisuseError: What it is to be held against is not there.
        CannotRunHereError: git or ssh-keygen are missing.
    """
    if not file.is_file():
        raise RecordsError("there is no bundle", where=str(file), remedy="make one with `hilgate bundle`")
    findings: list[BundleFinding] = []
    with tempfile.TemporaryDirectory(prefix="hilgate-bundle-") as name:
        folder = Path(name)
        found = _check(file, folder, asked or Asked())
        for check in CHECKS:
            try:
                sound, words = next(found, (None, NOT_CHECKED))
                findings.append(BundleFinding(check=check, sound=sound, words=words))
            except (CannotRunHereError, MisuseError) as error:
                if isinstance(error, CannotRunHereError) or check in {"commit", "signature"}:
                    raise  # nothing was learned about the bundle
                findings.append(BundleFinding(check=check, sound=False, words=str(error)))
            except HilgateError as error:
                words = str(error).replace(f"{folder / bundle.TOP}/", "")
                findings.append(BundleFinding(check=check, sound=False, words=words))
        top = folder / bundle.TOP
        sound = all(finding.sound is not False for finding in findings)
        plan, verdict = (read_plan(top / PLAN_FILE), read_verdict(top / VERDICT_FILE)) if sound else (None, None)
    return BundleAnswer(tuple(findings), plan, verdict)


def _check(file: Path, folder: Path, asked: Asked) -> Iterator[tuple[bool | None, str]]:
    """What each of `CHECKS` found, in their order; None for what was not asked for.

    Raises:
        HilgateError: What the first that fails found.
    """
    members = unpack(file, folder)
    yield True, f"{len(members)} plain files in one folder"

    yield True, f"{check_sums(members)} checksums agree, nothing missing, nothing more"

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
    for name, value in asked.demanded.items():
        require(getattr(manifest, name) == value, f"its {name} is {getattr(manifest, name)}, and {value} was asked for")
    steps = count(len(plan.steps), "step")
    yield True, f"plan {digest[:12]} of commit {plan.commit[:12]}, profile {plan.profile}, {steps}{_part(plan)}"

    yield True, _check_members(members, plan)

    recorded = bundle.read_records(folder / bundle.TOP / "results", plan)
    require(not recorded.damaged, "; ".join(f"{key}: {why}" for key, why in sorted(recorded.damaged.items())))
    require(bool(recorded.builds), "no job left a record")
    trees = {build.tree for build in recorded.builds}
    require(
        len(trees) == 1 or plan.profile != "release", f"its jobs ran over {len(trees)} different states of the files"
    )
    attempts = sum(len(found) for found in recorded.attempts.values())
    yield True, f"{count(attempts, 'step record')} of {count(len(recorded.builds), 'job')} answer this plan and commit"

    yield True, _check_images(manifest, plan, recorded)

    yield True, _check_wheels(manifest, members, recorded, asked.wheels)

    verdict = read_verdict(members[VERDICT_FILE])
    yield True, _check_verdict(verdict, manifest, plan, recorded, folder / bundle.TOP)

    yield True, _check_release(plan)

    yield _check_bill(plan, members)

    yield _check_commit(asked.root, manifest, plan, members)

    if asked.signature is None:
        needs = "a release needs its signature: --signature SHA256SUMS.sig"
        require(asked.unsigned or plan.profile != "release", needs)
        yield None, "its author is unknown: no --signature"
    else:
        yield True, _check_signature(asked, asked.signature, members[bundle.SUMS_FILE])


def _part(plan: Plan) -> str:
    """How many steps the plan leaves out, where steps were named; else empty."""
    left = sum(omission.cause == "not asked for" for omission in plan.omissions)
    return f": a part, {count(left, 'step')} were not asked for" if left else ""


def _check_members(members: Mapping[str, Path], plan: Plan) -> str:
    """Each file of a bundle is one that a build leaves."""
    known = {*DEMANDED, *bundle.OPTIONAL_FILES, bundle.SUMS_FILE, bundle.PINS_FILE}
    keys = {step.key for step in plan.steps}
    strange = []
    for name, path in members.items():
        words = name.split("/")
        if len(words) == 1:
            known_here = name in known or is_table(path)
        elif words[0] == bundle.LOCKS:
            known_here = len(words) == 2 and name.endswith(".txt")
        else:
            known_here = words[0] == "results" and words[1] in {JOBS_FOLDER, "steps"} and len(words) > 3
            known_here = known_here and words[2].removesuffix(RECHECK_SUFFIX) in keys
        strange += [] if known_here else [name]
    require(not strange, f"no build leaves {', '.join(map(ascii, sorted(strange)[:5]))}")
    return f"{len(members)} files, each of this build's steps or known by its name"


def _check_wheels(
    manifest: bundle.Manifest, members: Mapping[str, Path], recorded: Recorded, wheels: tuple[Path, ...]
) -> str:
    built = bundle.wheels_in(members, recorded)
    require(built == manifest.wheels, f"its files have the wheels {built}, the manifest {manifest.wheels}")
    for path in wheels:
        if not path.is_file():
            raise UnsoundError("there is no such wheel", where=str(path))
        is_it = built.get(path.name) == f"sha256:{bundle.sha256(path)}"
        require(is_it, f"{path.name} is not the wheel of this build, which is {built.get(path.name, 'none')}")
    given = f", {len(wheels)} that were given among them" if wheels else ""
    return f"{count(len(built), 'wheel')}{given}; checks about them are about these bytes"


def _check_verdict(stored: Verdict, manifest: bundle.Manifest, plan: Plan, recorded: Recorded, top: Path) -> str:
    digest = plan_digest(plan)
    where = f"plan {stored.plan_digest[:12]} and commit {stored.commit[:12]}"
    require((stored.plan_digest, stored.commit) == (digest, plan.commit), f"the verdict is of {where}")
    as_at_base = sorted(key for key, files in recorded.restored.items() if files and stored.approved_by)
    require(not as_at_base, f"approved, and {', '.join(as_at_base)} ran with files of the merge base")
    quarantine = read_used(top)
    derived = judge(
        plan,
        replace(recorded, waited=stored.waited),
        digest,
        decided=stored.decided,
        quarantine=quarantine,
        approved_by=stored.approved_by,
        doubts=stored.doubts,
        before=stored.before,
    )
    require(
        derived.outcome is stored.outcome,
        f"the stored verdict says {stored.outcome.value}; the records give {derived.outcome.value}: {derived.why}",
    )
    require(derived == stored, f"the stored verdict is not what the records give: {_difference(stored, derived)}")
    require(stored.outcome is manifest.outcome, f"the manifest says {manifest.outcome}, the verdict {stored.outcome}")
    return f"derived again from the records: {stored.outcome.value}: {stored.why}"


def _check_bill(plan: Plan, members: Mapping[str, Path]) -> tuple[bool | None, str]:
    """The bill of materials lists the packages that the lock files pin, and no others."""
    if bundle.SBOM_FILE not in members:
        require(plan.profile != "release", f"a release needs its bill of materials, {bundle.SBOM_FILE}")
        return None, "there is no bill of materials"
    try:
        bill = json.loads(members[bundle.SBOM_FILE].read_text("utf-8"))
        require(bill["bomFormat"] == "CycloneDX", f"{bundle.SBOM_FILE} is of the format {bill['bomFormat']!a}")
        listed = {(_normal(component["name"]), component["version"]) for component in bill["components"]}
        locks = {name: path.read_text("utf-8") for name, path in members.items() if name.startswith(f"{bundle.LOCKS}/")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsoundError(f"{bundle.SBOM_FILE} or a lock file cannot be read: {error!r}") from error
    pinned = {package for name, text in locks.items() for package in _pinned(name, text)}
    odd = [f"{name} {version}" for name, version in sorted(listed ^ pinned)]
    require(not odd, f"bill of materials and lock files differ in {', '.join(odd[:3])}{' ...' if odd[3:] else ''}")
    return True, f"CycloneDX, {count(len(listed), 'package')} as the lock files pin them"


def _normal(name: str) -> str:
    """The name of a package as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pinned(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Name and version of each package that a lock file pins.

    Raises:
        UnsoundError: A line pins nothing.
    """
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split(" #")[0].strip()
        if not words or words.startswith(("#", "--")):
            continue
        match = _PIN.match(words)
        require(match is not None, f"{file} has a line that pins nothing: {words[:80]!a}")
        assert match is not None
        yield _normal(match[1]), match[2]


def _check_commit(
    root: Path | None, manifest: bundle.Manifest, plan: Plan, members: Mapping[str, Path]
) -> tuple[bool | None, str]:
    """What the commit itself says, in a clone of the clone: files of its working tree that differ do not count."""
    if root is None:
        needs = "a release is held against its commit: --root CLONE, of a clone that has it"
        require(plan.profile != "release", needs)
        return None, "not held against its commit: no --root"
    with tempfile.TemporaryDirectory(prefix="hilgate-commit-") as name:
        tree = Path(name) / "tree"
        git.clone_at(root, manifest.commit, tree)
        committed = git.commit_time(tree, manifest.commit)
        require(manifest.committed == committed, f"its time is {manifest.committed}, the commit's {committed}")
        theirs = {name for name in members if name.startswith(f"{bundle.LOCKS}/")}
        ours = bundle.lock_files(tree)
        if (tree / bundle.PINS).is_file():
            ours[bundle.PINS_FILE] = tree / bundle.PINS
        theirs |= {bundle.PINS_FILE} & members.keys()
        odd = sorted(theirs ^ ours.keys()) or [
            name for name, path in sorted(ours.items()) if bundle.sha256(path) != bundle.sha256(members[name])
        ]
        require(not odd, f"not as the commit has it: {', '.join(odd[:5])}")
        files = f"{count(len(ours), 'file')} of locks and pins as the commit has them"
        if plan.profile not in {"nightly", "release"} or plan.base is not None:
            return True, f"{files}; a plan of a change depends on its machine and is not made again"
        top = members[PLAN_FILE].parent
        require(read_used(top) == load_quarantine(tree, load(tree)), "its quarantine is not that of the commit")
        derived = plan_whole(tree, profile=plan.profile, digests=plan.digests)
        require(plan_digest(derived) == plan_digest(plan), _other_plan(plan, derived, manifest))
    return True, f"{files}; it declares these {count(len(plan.steps), 'step')}"


def _other_plan(plan: Plan, derived: Plan, manifest: bundle.Manifest) -> str:
    """How a plan differs from what its commit declares."""
    mine, theirs = ({step.key: step for step in one.steps} for one in (derived, plan))
    other = f" (it was planned by hilgate {manifest.hilgate}, this is {__version__})"
    other = other if manifest.hilgate != __version__ else ""
    for words, keys in (
        ("lacks steps that its commit declares", mine.keys() - theirs.keys()),
        ("has steps that its commit does not declare", theirs.keys() - mine.keys()),
        (
            "declares otherwise than its commit",
            {key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]},
        ),
    ):
        if keys:
            return f"the plan {words}: {', '.join(sorted(keys)[:5])}{' ...' if len(keys) > 5 else ''}{other}"
    names = [name for name in type(plan).model_fields if getattr(plan, name) != getattr(derived, name)]
    return f"the plan is not what its commit gives: {', '.join(name for name in names if name != 'created')}{other}"


def _check_signature(asked: Asked, file: Path, sums: Path) -> str:
    signers = asked.signers or (asked.root / signature.SIGNERS_FILE if asked.root else None)
    if signers is None:
        raise MisuseError(
            "who may sign is not said", where="--signature", remedy="give --signers FILE, or --root CLONE"
        )
    return f"of {bundle.SUMS_FILE}: {signature.require_signed(sums, file, signers)}"


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
            end = tar.offset
        with file.open("rb") as raw:
            raw.seek(end)
            while block := raw.read(1 << 20):
                require(not block.strip(b"\0"), "there is data after its end")
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
        UnsoundError: A member is missing, is not listed, or has another checksum.
    """
    require(bundle.SUMS_FILE in members, f"{bundle.SUMS_FILE} is missing")
    lines = members[bundle.SUMS_FILE].read_bytes().decode("utf-8", errors="replace").splitlines()
    matches = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in lines]
    listed = {match[2]: match[1] for match in matches if match}
    require(len(listed) == len(lines), f"{bundle.SUMS_FILE} has a line that is no checksum, or names a file twice")
    present = members.keys() - {bundle.SUMS_FILE}
    for what, names in (
        ("missing", (listed.keys() | DEMANDED) - present),
        (f"not in {bundle.SUMS_FILE}", present - listed.keys()),
        (
            "another content than its checksum",
            {name for name in present & listed.keys() if bundle.sha256(members[name]) != listed[name]},
        ),
    ):
        require(not names, f"{what}: {', '.join(map(ascii, sorted(names)[:5]))}")
    return len(listed)


def _check_images(manifest: bundle.Manifest, plan: Plan, recorded: Recorded) -> str:
    built = image_digests(plan, recorded)
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


def _check_release(plan: Plan) -> str:
    if plan.profile != "release":
        return f"not a release: profile {plan.profile}"
    require(not plan.dirty, "a release is planned of uncommitted files")
    require(not plan.fork, "a release is planned of a fork")
    require(plan.base is None, "a release is planned of a change, not of everything")
    uncounted = [step.key for step in plan.steps if step.report_only]
    require(not uncounted, f"{', '.join(uncounted)} would not count in a release")
    for omission in plan.omissions:
        require(omission.cause in LEGITIMATE, f"{omission.key} is left out of a release: {omission.reason}")
    return f"{len(plan.omissions)} omissions, each because no such machine exists or the step belongs to other plans"


def _difference(stored: Verdict, derived: Verdict) -> str:
    for mine, theirs in zip(stored.steps, derived.steps, strict=False):
        if mine != theirs:
            return f"{theirs.key}: {mine.outcome.value} ({mine.why}) against {theirs.outcome.value} ({theirs.why})"
    return ", ".join(name for name in type(stored).model_fields if getattr(stored, name) != getattr(derived, name))
