"""Opens a bundle's tar without trusting it: no links, no devices, no way out of its folder, no byte unaccounted for.

Reads a bundle back and believes none of it: every byte accounted for, every digest equal, the verdict derived again.

The checks stand in one table and run in its order; each needs what the ones before it found sound. Whoever can write a
whole bundle anew can write one that passes: only a signature (`hilgate.release.signature`) says who wrote it.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from hilgate.declare.quarantine import read_used
from hilgate.errors import HilgateError, RecordsError
from hilgate.judge import verdict
from hilgate.judge import verdict as judge
from hilgate.judge.verdict import NO_QUARANTINE
from hilgate.model import Noun
from hilgate.plan.make import plan_digest, read_plan
from hilgate.release import bundle, sbom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Buffer

    from hilgate.model import Plan, Quarantine, Verdict
    from hilgate.run.results import Recorded


MOST_MEMBERS = 100_000
MOST_BYTES = 8 * 1024**3
"""More than any build leaves; a file that claims more is refused before it fills a disk."""

DEMANDED = frozenset(
    {bundle.MANIFEST_FILE, bundle.PLAN_FILE, verdict.VERDICT_FILE, bundle.REPORT_FILE, bundle.SBOM_FILE}
)


class UnsoundError(RecordsError):
    """What one check found."""

    def __init__(self, words: str) -> None:
        super().__init__(words)


def unpack(file: Path, folder: Path, members: dict[str, Path]) -> int:
    """Write every member below `folder` and into `members`; returns the time that all of them carry.

    Raises:
        UnsoundError: It is truncated, holds anything but plain files in its one folder, or differs in a single byte
            from what `bundle.write_tar` writes for these members.
    """
    size = file.stat().st_size
    if size == 0 or size % tarfile.RECORDSIZE:
        raise UnsoundError(f"truncated: {size} bytes are no whole number of tar records ({tarfile.RECORDSIZE} bytes)")
    mtimes: set[float] = set()
    total = 0
    with _tar(file) as tar:
        for entry in tar:
            name = entry.name.removeprefix(f"{bundle.TOP}/")
            _refuse(entry, name, members)
            total += entry.size
            if total > MOST_BYTES or len(members) >= MOST_MEMBERS:
                raise UnsoundError(f"more than {MOST_MEMBERS} members or {MOST_BYTES} bytes: no build leaves as much")
            mtimes.add(entry.mtime)
            members[name] = _extract(tar, entry, folder / name)
    mtime = int(min(mtimes, default=0))
    hashing = _Hashing()
    bundle.write_tar(hashing, members, mtime)
    if hashing.digest.hexdigest() != bundle.file_sha256(file):
        raise UnsoundError(
            "its bytes are not those that hilgate writes for these members: another order, owner or time, or data "
            "between or behind them"
        )
    return mtime


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> Path:
    source = tar.extractfile(entry)
    assert source is not None  # a plain file has contents
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        while chunk := source.read(bundle.CHUNK_BYTES):
            out.write(chunk)
    return target


@contextmanager
def _tar(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, mode="r:", errorlevel=2) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError, ValueError, UnicodeError) as error:
        raise UnsoundError(f"no readable tar: {error}") from error


def _refuse(entry: tarfile.TarInfo, name: str, members: dict[str, Path]) -> None:
    if entry.issym() or entry.islnk():
        raise UnsoundError(f"{entry.name!a} is a link to {entry.linkname!a}")
    if entry.type != tarfile.REGTYPE:
        raise UnsoundError(f"{entry.name!a} is no plain file (type {entry.type!r})")
    if not entry.name.startswith(f"{bundle.TOP}/") or not bundle.NAME.fullmatch(name):
        raise UnsoundError(f"{entry.name!a} lies outside of {bundle.TOP}/")
    parents = {parent.as_posix() for parent in Path(name).parents}
    if name in members or parents & members.keys():
        raise UnsoundError(f"{entry.name!a} stands in it twice")


class _Hashing(io.BytesIO):
    """A file that keeps the digest of what is written and how much it was."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._place = 0

    def write(self, data: Buffer, /) -> int:
        self.digest.update(data)
        size = memoryview(data).nbytes
        self._place += size
        return size

    def tell(self) -> int:
        return self._place


def check_sums(members: dict[str, Path]) -> int:
    """Compare every member with its line of `SHA256SUMS`; returns how many there are.

    Raises:
        UnsoundError: A member is missing, too much, or another than its checksum.
    """
    sums = members.get(bundle.SUMS_FILE)
    if sums is None:
        raise UnsoundError(f"{bundle.SUMS_FILE} is missing")
    lines = sums.read_bytes().decode("utf-8", errors="replace").splitlines()
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    listed: dict[str, str] = {match[2]: match[1] for match in matches}
    if len(listed) != len(lines):
        raise UnsoundError(f"{bundle.SUMS_FILE} has a line that is no checksum, or names a file twice")
    present = members.keys() - {bundle.SUMS_FILE}
    if missing := sorted((listed.keys() | DEMANDED) - present):
        raise UnsoundError(f"missing: {', '.join(map(ascii, missing[:5]))}")
    if extra := sorted(present - listed.keys()):
        raise UnsoundError(f"not in {bundle.SUMS_FILE}: {', '.join(map(ascii, extra[:5]))}")
    if wrong := sorted(name for name in present if bundle.file_sha256(members[name]) != listed[name]):
        raise UnsoundError(f"another content than its checksum: {', '.join(map(ascii, wrong[:5]))}")
    return len(listed)


LEGITIMATE = (
    re.compile(r"no queue offers [a-z0-9-]+; .*"),
    re.compile(r"runs (?:at a desk|for a pull request|nightly)(?: and (?:at a desk|for a pull request|nightly))*"),
)
"""Why a release may leave a step out: no such machine exists, or the step belongs to other plans. Not being affected by
a change, not being asked for or missing a tool are no reasons."""

NOT_CHECKED: Final = "not checked: what stands above is not sound"


class Finding(Noun):
    """One line of the answer; `sound` is None for what was not looked at."""

    check: str
    sound: bool | None
    words: str


@dataclass
class Opened:
    """What the checks so far established."""

    file: Path
    folder: Path
    demanded: Mapping[str, str]
    members: dict[str, Path] = field(default_factory=dict)
    mtime: int = 0
    manifest: bundle.Manifest | None = None
    plan: Plan | None = None
    digest: str = ""
    recorded: Recorded | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Answer:
    """All findings; the plan and the verdict only where everything is sound."""

    findings: tuple[Finding, ...]
    plan: Plan | None
    verdict: Verdict | None

    @property
    def sound(self) -> bool:
        """Whether every check passed."""
        return all(finding.sound for finding in self.findings)

    def after(self, finding: Finding) -> Answer:
        """With one finding more."""
        findings = (*self.findings, finding)
        return Answer(findings, self.plan, self.verdict) if finding.sound else Answer(findings, None, None)


def verify(file: Path, *, demanded: Mapping[str, str] | None = None) -> Answer:
    """Run every check on a bundle.

    Args:
        file: The tar.
        demanded: What its manifest must say, e.g. `{"profile": "release"}`.

    Raises:
        RecordsError: There is no such file.
    """
    if not file.is_file():
        raise RecordsError("there is no bundle", where=str(file), remedy="make one with `hilgate bundle`")
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="hilgate-bundle-") as name:
        opened = Opened(file, Path(name), demanded or {})
        for check, look in CHECKS:
            if findings and not findings[-1].sound:
                findings.append(Finding(check=check, sound=None, words=NOT_CHECKED))
                continue
            try:
                findings.append(Finding(check=check, sound=True, words=look(opened)))
            except HilgateError as error:
                words = str(error).replace(f"{opened.folder}/", "")
                findings.append(Finding(check=check, sound=False, words=words))
    sound = all(finding.sound for finding in findings)
    return Answer(tuple(findings), opened.plan if sound else None, opened.verdict if sound else None)


def _archive(opened: Opened) -> str:
    opened.mtime = unpack(opened.file, opened.folder, opened.members)
    return f"{len(opened.members)} members, laid out as hilgate lays them out"


def _checksums(opened: Opened) -> str:
    return f"{check_sums(opened.members)} checksums agree, nothing missing, nothing more"


def _plan(opened: Opened) -> str:
    try:
        opened.manifest = bundle.Manifest.model_validate_json(opened.members[bundle.MANIFEST_FILE].read_bytes())
    except ValidationError as error:
        raise UnsoundError(f"{bundle.MANIFEST_FILE} is no manifest: {error.errors()[0]['msg']}") from error
    manifest, plan = opened.manifest, read_plan(opened.members[bundle.PLAN_FILE])
    opened.plan, opened.digest = plan, plan_digest(plan)
    for what, claimed, real in (
        ("digest", manifest.plan_digest, opened.digest),
        ("commit", manifest.commit, plan.commit),
        ("profile", manifest.profile, plan.profile),
    ):
        if claimed != real:
            raise UnsoundError(f"another plan: its {what} is {real[:40]}, the manifest says {claimed[:40]}")
    said: dict[str, Any] = manifest.model_dump(mode="json")
    for name, value in opened.demanded.items():
        if said[name] != value:
            raise UnsoundError(f"its {name} is {said[name]}, and {value} was asked for")
    if opened.mtime != manifest.committed:
        raise UnsoundError("the time of its members is not the commit's")
    return f"plan {opened.digest[:12]} of commit {plan.commit[:12]}, profile {plan.profile}, {len(plan.steps)} steps"


def _records(opened: Opened) -> str:
    assert opened.plan is not None
    opened.recorded = bundle.read_records(opened.folder / "results", opened.plan, opened.digest)
    recorded = opened.recorded
    if recorded.damaged:
        raise UnsoundError("; ".join(f"{key}: {why}" for key, why in sorted(recorded.damaged.items())))
    if not recorded.builds:
        raise UnsoundError("no job left a record")
    trees = {build.tree for build in recorded.builds}
    if opened.plan.profile == "release" and len(trees) > 1:
        raise UnsoundError(f"its jobs ran over {len(trees)} different states of the files")
    attempts = sum(len(found) for found in recorded.attempts.values())
    return f"{attempts} step records of {len(recorded.builds)} jobs answer this plan and this commit"


def _images(opened: Opened) -> str:
    assert opened.plan is not None
    assert opened.recorded is not None
    assert opened.manifest is not None
    built = {name: record.digest for name, record in opened.recorded.images.items()}
    if built != opened.manifest.images:
        raise UnsoundError(f"the records name the images {built}, the manifest {opened.manifest.images}")
    for name, record in sorted(opened.recorded.images.items()):
        if record.content != opened.plan.images.get(name):
            raise UnsoundError(f"the image {name} was built from other contents than the plan's")
    for step in opened.plan.steps:
        attempt = opened.recorded.last(step.key)
        ran_in = attempt.record.environment.image if attempt else ""
        if step.image and attempt and (not ran_in or ran_in != built.get(step.image)):
            raise UnsoundError(f"{step.key} ran in {ran_in or 'no image'}, and {step.image} is {built.get(step.image)}")
    return f"{len(built)} images, and every result was made in the one that its step names"


def _verdict(opened: Opened) -> str:
    assert opened.plan is not None
    assert opened.recorded is not None
    assert opened.manifest is not None
    stored = judge.read_verdict(opened.members[judge.VERDICT_FILE])
    if (stored.plan_digest, stored.commit) != (opened.digest, opened.plan.commit):
        raise UnsoundError(f"the verdict is of plan {stored.plan_digest[:12]} and commit {stored.commit[:12]}")
    derived = judge_again(opened.plan, opened.recorded, opened.digest, stored, read_used(opened.folder / "results"))
    if derived.outcome is not stored.outcome:
        raise UnsoundError(
            f"the stored verdict says {stored.outcome.value}; the records give {derived.outcome.value}: {derived.why}"
        )
    if stored != derived:
        raise UnsoundError(f"the stored verdict is not what the records give: {_difference(stored, derived)}")
    if stored.outcome is not opened.manifest.outcome:
        raise UnsoundError(f"the manifest says {opened.manifest.outcome.value}, the verdict {stored.outcome.value}")
    opened.verdict = stored
    return f"derived again from the records: {stored.outcome.value}: {stored.why}"


def judge_again(
    plan: Plan, recorded: Recorded, digest: str, stored: Verdict, quarantine: Quarantine = NO_QUARANTINE
) -> Verdict:
    """The verdict that these records give, at the time of the stored one, with its approval and its quarantine."""
    return judge.judge(
        plan, recorded, digest, decided=stored.decided, quarantine=quarantine, approved_by=stored.approved_by
    )


def _difference(stored: Verdict, derived: Verdict) -> str:
    for mine, theirs in zip(stored.steps, derived.steps, strict=False):
        if mine != theirs:
            return f"{theirs.key}: {mine.outcome.value} ({mine.why}) against {theirs.outcome.value} ({theirs.why})"
    left: dict[str, Any] = stored.model_dump()
    return ", ".join(sorted(name for name, value in derived.model_dump().items() if left[name] != value))


def _release(opened: Opened) -> str:
    plan = opened.plan
    assert plan is not None
    if plan.profile != "release":
        return f"not a release: profile {plan.profile}"
    if plan.dirty or plan.fork or plan.base is not None:
        words = "of uncommitted files" if plan.dirty else "of a fork" if plan.fork else "of a change, not of everything"
        raise UnsoundError(f"a release is planned {words}")
    for omission in plan.omissions:
        if not any(reason.fullmatch(omission.reason) for reason in LEGITIMATE):
            raise UnsoundError(f"{omission.key} is left out of a release: {omission.reason}")
    return f"{len(plan.omissions)} omissions, each because no such machine exists or the step belongs to other plans"


def _bill(opened: Opened) -> str:
    assert opened.manifest is not None
    text = opened.members[bundle.SBOM_FILE].read_text("utf-8", errors="replace")
    if problem := sbom.problem_of(text):
        raise UnsoundError(f"no CycloneDX 1.6 bill: {problem}")
    if opened.manifest.commit not in text or opened.digest not in text:
        raise UnsoundError("the bill is of another build")
    return "CycloneDX 1.6, of this commit and plan"


CHECKS: tuple[tuple[str, Callable[[Opened], str]], ...] = (
    ("archive", _archive),
    ("checksums", _checksums),
    ("plan", _plan),
    ("records", _records),
    ("images", _images),
    ("verdict", _verdict),
    ("release", _release),
    ("bill", _bill),
)
