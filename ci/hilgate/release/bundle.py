"""The evidence of a build as one tar: what was expected, what arrived, what was decided, and from what it was made.

`hilgate.release.verify` reads it back and believes none of it.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hilgate import __version__
from hilgate.errors import RecordsError
from hilgate.judge.verdict import VERDICT_FILE, read_verdict
from hilgate.model import SCHEMA_VERSION, Key, Noun, Outcome, Profile
from hilgate.plan.make import plan_digest, read_plan
from hilgate.release.sbom import make_sbom
from hilgate.report import tables
from hilgate.run import results

if TYPE_CHECKING:
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
    digest, recorded = plan_digest(plan), read_records(folder, plan)
    manifest = Manifest(
        hilgate=__version__,
        commit=plan.commit,
        committed=committed,
        plan_digest=digest,
        profile=plan.profile,
        outcome=read_verdict(folder / VERDICT_FILE).outcome,
        images={name: record.digest for name, record in sorted(recorded.images.items())},
    )
    pins = root / PINS
    bill = make_sbom(
        commit=plan.commit,
        committed=committed,
        plan_digest=digest,
        locks={path.name: path.read_text("utf-8") for path in sorted((root / "requirements").glob("*.txt"))},
        environments=_environments(recorded),
        pins=tomllib.loads(pins.read_text("utf-8")) if pins.is_file() else {},
        images=manifest.images,
    )
    members: dict[str, bytes | Path] = {
        MANIFEST_FILE: (manifest.model_dump_json(indent=1) + "\n").encode(),
        SBOM_FILE: bill.encode(),
        **_files(folder),
        **({PINS_FILE: pins} if pins.is_file() else {}),
    }
    sums = {name: sha256(content) for name, content in members.items()}
    members[SUMS_FILE] = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()
    fresh = out.with_name(out.name + ".new")
    try:
        with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(members):
                _add(tar, name, members[name], committed)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
    return manifest


def read_records(folder: Path, plan: Plan) -> Recorded:
    """The records of a results folder: of all jobs where agents left some, else of this machine."""
    jobs = folder / JOBS_FOLDER
    recorded = results.read_all(folder, jobs if jobs.is_dir() else None, plan, plan_digest(plan))
    if not recorded.builds and not recorded.damaged:
        raise RecordsError("no results", where=str(folder), remedy="run `hilgate gate` first")
    return recorded


def sha256(content: bytes | Path) -> str:
    """sha256 of bytes or of a file, in hex."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _environments(recorded: Recorded) -> list[Environment]:
    found = [build.environment for build in recorded.builds]
    found += [attempt.record.environment for attempts in recorded.attempts.values() for attempt in attempts]
    distinct = {one.model_dump_json(): one for one in found}
    return [distinct[text] for text in sorted(distinct)]


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path, mtime: int) -> None:
    entry = tarfile.TarInfo(f"{TOP}/{name}")
    entry.mtime, entry.mode = mtime, 0o644
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source:
        entry.size = len(content) if isinstance(content, bytes) else content.stat().st_size
        tar.addfile(entry, source)


def _files(folder: Path) -> dict[str, Path]:
    """Name in the bundle -> file: the decision, and below `results/` everything that jobs left."""
    members = {name: folder / name for name in (PLAN_FILE, VERDICT_FILE, REPORT_FILE)}
    missing = [name for name, path in members.items() if not path.is_file()]
    if missing:
        raise RecordsError(f"no {', '.join(missing)}", where=str(folder), remedy="run `hilgate judge` first")
    members |= {name: folder / name for name in OPTIONAL_FILES if (folder / name).is_file()}
    members |= {path.name: path for path in tables.files_in(folder)}
    jobs = folder / JOBS_FOLDER
    for path in sorted((jobs if jobs.is_dir() else folder / "steps").rglob("*")):
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
