"""The evidence of a build as one file: what was expected, what arrived, what was decided, and from what it was made.

A plain tar, the same bytes from the same results: members sorted, times the commit's, owner 0. `hilgate.release.verify`
reads it back and believes none of it.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tomllib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from hilgate import __version__
from hilgate.errors import RecordsError
from hilgate.judge import verdict as judge
from hilgate.model import SCHEMA_VERSION, Key, Noun, Outcome, Profile
from hilgate.plan.make import plan_digest, read_plan
from hilgate.release.sbom import make_sbom
from hilgate.report import tables
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hilgate.model import Environment, Plan
    from hilgate.run.results import Recorded

TOP = "evidence"
MANIFEST_FILE, PLAN_FILE, SUMS_FILE, SBOM_FILE, PINS_FILE = (
    "manifest.json", "plan.json", "SHA256SUMS", "sbom.cdx.json", "pins.toml")  # fmt: skip
REPORT_FILE = "report.html"
OPTIONAL_FILES = ("annotation.md", "junit.xml", "quarantine.json")
JOBS_FOLDER = "jobs"
PINS = Path("docker/pins.toml")
NAME = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[^\x00-\x1f\x7f\\]{1,240}")
"""Relative, no empty or dotted parts, nothing that a list of checksums would have to escape (GNU coreutils: backslash
and line breaks)."""

CHUNK_BYTES = 1024 * 1024


class Manifest(Noun):
    """`manifest.json`: what a bundle is about, for those who look before they verify."""

    schema_version: Literal[1] = SCHEMA_VERSION
    hilgate: str
    """Version that wrote it."""
    commit: str
    committed: int
    """Time of the commit, seconds since 1970 (UTC); also the time of every member."""
    plan_digest: str
    profile: Profile
    outcome: Outcome
    images: dict[Key, str]
    """Image -> digest, as built."""


def write_bundle(root: Path, folder: Path, out: Path, *, committed: int) -> Manifest:
    """Write the evidence in a judged results folder to one file; an interrupted write leaves no file of that name.

    Args:
        root: The repository at the commit of the plan: lock files and pins are taken from there.
        folder: A results folder with `plan.json`, `verdict.json` and `report.html`.
        out: The file to write.
        committed: Time of the plan's commit, seconds since 1970 (UTC).

    Raises:
        RecordsError: Something is missing, unreadable, a link, or of another plan.
    """
    plan = read_plan(folder / PLAN_FILE)
    if not plan.commit:
        raise RecordsError(
            "a plan without a commit proves nothing", where=str(folder / PLAN_FILE), remedy="commit first"
        )
    digest = plan_digest(plan)
    recorded = read_records(folder, plan, digest)
    verdict = judge.read_verdict(folder / judge.VERDICT_FILE)
    images = {name: record.digest for name, record in sorted(recorded.images.items())}
    manifest = Manifest(
        hilgate=__version__, commit=plan.commit, committed=committed, plan_digest=digest, profile=plan.profile,
        outcome=verdict.outcome, images=images,
    )  # fmt: skip
    pins = root / PINS
    made = {
        MANIFEST_FILE: (manifest.model_dump_json(indent=1) + "\n").encode(),
        SBOM_FILE: make_sbom(
            commit=plan.commit,
            committed=committed,
            plan_digest=digest,
            locks={path.name: path.read_text("utf-8") for path in sorted((root / "requirements").glob("*.txt"))},
            environments=environments(recorded),
            pins=tomllib.loads(pins.read_text("utf-8")) if pins.is_file() else {},
            images=images,
        ).encode(),
    }
    members: dict[str, bytes | Path] = {**made, **_found(folder), **({PINS_FILE: pins} if pins.is_file() else {})}
    members[SUMS_FILE] = "".join(f"{_sha256(members[name])}  {name}\n" for name in sorted(members)).encode()
    fresh = out.with_name(out.name + ".new")
    try:
        with fresh.open("wb") as file:
            write_tar(file, members, committed)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
    return manifest


def read_records(folder: Path, plan: Plan, digest: str) -> Recorded:
    """The records of a results folder: of all jobs where agents left some, else of this machine."""
    jobs = folder / JOBS_FOLDER
    return results.read_all(folder, jobs if jobs.is_dir() else None, plan, digest)


def environments(recorded: Recorded) -> list[Environment]:
    """Every distinct environment that a record names."""
    found = [build.environment for build in recorded.builds]
    found += [attempt.record.environment for attempts in recorded.attempts.values() for attempt in attempts]
    return sorted({one.model_dump_json(): one for one in found}.values(), key=lambda one: one.model_dump_json())


def write_tar(file: IO[bytes], members: Mapping[str, bytes | Path], mtime: int) -> None:
    """The one way in which a bundle is laid out; reading it back compares every byte with this."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(members):
            member = members[name]
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.mtime, entry.mode = mtime, 0o644
            if isinstance(member, bytes):
                entry.size = len(member)
                tar.addfile(entry, io.BytesIO(member))
            else:
                with member.open("rb") as source:
                    entry.size = member.stat().st_size
                    tar.addfile(entry, source)


def file_sha256(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _found(folder: Path) -> dict[str, Path]:
    """Name in the bundle -> file: the decision, and below `results/` everything that jobs left."""
    members = {name: folder / name for name in (PLAN_FILE, judge.VERDICT_FILE, REPORT_FILE)}
    missing = [name for name, path in members.items() if not path.is_file()]
    if missing:
        raise RecordsError(f"no {', '.join(missing)}", where=str(folder), remedy="run `hilgate judge` first")
    members |= {name: folder / name for name in OPTIONAL_FILES if (folder / name).is_file()}
    members |= {path.name: path for path in tables.files_in(folder)}
    tops = (
        [folder / JOBS_FOLDER] if (folder / JOBS_FOLDER).is_dir() else [folder / results.RESULTS_FILE, folder / "steps"]
    )
    files = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    for path in files:
        name = f"results/{path.relative_to(folder).as_posix()}"
        if path.is_symlink() or not (path.is_file() or path.is_dir()) or not NAME.fullmatch(name):
            raise RecordsError(
                "neither a plain file nor a folder, or its name cannot stand in a list of checksums",
                where=ascii(str(path)),
                remedy="see the step that left it, and run it again without",
            )
        if path.is_file():
            members[name] = path
    return members


def _sha256(member: bytes | Path) -> str:
    return hashlib.sha256(member).hexdigest() if isinstance(member, bytes) else file_sha256(member)
