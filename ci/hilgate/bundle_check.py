"""Reads a bundle back and believes none of it: every byte accounted for, every digest equal, the verdict derived again.

The checks stand in one table and run in its order; each needs what the ones before it found sound. Whoever can write a
whole bundle anew can write one that passes: only a signature (`hilgate.signature`) says who wrote it.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from hilgate import bundle, judge, sbom
from hilgate.bundle_archive import UnsoundError, check_sums, unpack
from hilgate.errors import HilgateError, RecordsError
from hilgate.judge import NO_QUARANTINE
from hilgate.model import Noun
from hilgate.plan import plan_digest, read_plan
from hilgate.quarantine import read_used

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hilgate.model import Plan, Quarantine, Verdict
    from hilgate.results import Recorded

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
