# SPDX-License-Identifier: Apache-2.0
"""The evidence of a build as one tar: what was expected, what arrived, what was decided, and from what it was made.

The last are the lock files, the pins and, in a release, the bill of materials (SBOM) that `cyclonedx-py` has written
from the lock files. The same build gives the same bytes: the time of every member is the commit's.
`hilgate.release.verify` reads a bundle back and believes none of it.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hilgate import __version__
from hilgate.errors import RecordsError, place_for
from hilgate.judge.verdict import image_digests, read_verdict
from hilgate.model import JOBS_FOLDER, PLAN_FILE, VERDICT_FILE, Key, StrictModel
from hilgate.model.plan import PlanProfile, plan_digest
from hilgate.model.record import Outcome
from hilgate.model.table import tables_in
from hilgate.plan.make import read_plan
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hilgate.model.plan import Plan
    from hilgate.run.results import Recorded

TOP = "evidence"
MANIFEST_FILE, SUMS_FILE, SBOM_FILE, PINS_FILE = "manifest.json", "SHA256SUMS", "sbom.cdx.json", "pins.toml"
REPORT_FILE = "report.html"
OPTIONAL_FILES = ("annotation.md", "junit.xml", "quarantine.json", SBOM_FILE)
LOCKS = "locks"
"""Folder of the lock files in a bundle."""
PINS = Path("docker/pins.toml")
WHEEL_LABEL, DIGEST_LABEL = "wheel", "sha256"
"""Labels of a check about a wheel: its file name, and `sha256:...` of its bytes."""
NAME = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|$))[^\x00-\x1f\x7f\\]{1,240}")
"""Relative, no empty or dotted parts, nothing that a list of checksums would have to escape (GNU coreutils: backslash
and line breaks)."""


class Manifest(StrictModel):
    """`manifest.json`: what a bundle is about, for those who look before they verify."""

    schema_version: Literal[2] = 2
    hilgate: str
    """Version that wrote it."""
    commit: str
    committed: int
    """Time of the commit, seconds since 1970 (UTC); also the time of every member."""
    plan_digest: str
    profile: PlanProfile
    outcome: Outcome
    images: dict[Key, str]
    """Image -> digest, as built."""
    wheels: dict[str, str]
    """File name of each wheel that a step built -> `sha256:...`; the wheel itself is below `results/`."""


def write_bundle(root: Path, folder: Path, out: Path, *, committed: int) -> Manifest:
    """Write the evidence in a judged results folder to one file; an interrupted write leaves no file of that name.

    `root` is at the commit of the plan, since lock files and pins are taken from there; `committed` is the time of that
    commit, seconds since 1970 (UTC).

    Raises:
        RecordsError: Something is missing, unreadable, a link, or of another plan.
        MisuseError: It is a part of the gate, whose evidence proves nothing of the rest.
    """
    plan = read_plan(folder / PLAN_FILE)
    plan.require_whole(str(folder / PLAN_FILE))
    if not plan.commit:
        raise RecordsError(
            "a plan without a commit proves nothing", where=str(folder / PLAN_FILE), remedy="commit first"
        )
    recorded = read_records(folder, plan)
    files = _files(folder)
    locks, pins = lock_files(root), root / PINS
    manifest = Manifest(
        hilgate=__version__,
        commit=plan.commit,
        committed=committed,
        plan_digest=plan_digest(plan),
        profile=plan.profile,
        outcome=read_verdict(folder / VERDICT_FILE).outcome,
        images=dict(sorted(image_digests(plan, recorded).items())),
        wheels=wheels_in(files, recorded),
    )
    members: dict[str, bytes | Path] = {
        MANIFEST_FILE: (manifest.model_dump_json(indent=1) + "\n").encode(),
        **files,
        **locks,
        **({PINS_FILE: pins} if pins.is_file() else {}),
    }
    sums = {name: sha256(content) for name, content in members.items()}
    members[SUMS_FILE] = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()
    out = place_for(out)
    fresh = out.with_name(out.name + ".new")
    try:
        with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(members):
                _add(tar, name, members[name], committed)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
    return manifest


def lock_files(root: Path) -> dict[str, Path]:
    """Name in the bundle -> lock file of a repository."""
    return {f"{LOCKS}/{path.name}": path for path in sorted((root / "requirements").glob("*.txt"))}


def wheels_in(members: Mapping[str, Path], recorded: Recorded) -> dict[str, str]:
    """File name -> digest of the wheels among the files that jobs left, as the checks about them say.

    Raises:
        RecordsError: A wheel of which no check says the digest, two of one name, or checks of other bytes than these.
    """
    built: dict[str, str] = {}
    for name, path in sorted(members.items()):
        wheel = name.rpartition("/")[2]
        if not (name.startswith("results/") and name.endswith(f"/wheels/{wheel}") and name.endswith(".whl")):
            continue
        if not _WHEEL.fullmatch(wheel):
            raise RecordsError(f"no wheel is called {wheel!a}", where=ascii(name), remedy="see the step that left it")
        if wheel in built:
            raise RecordsError(f"two wheels are called {wheel}", where=name, remedy="build each in one step")
        built[wheel] = f"sha256:{sha256(path)}"
    proven = _tried(recorded)
    for wheel, digest in built.items():
        if (wheel, digest) not in proven:
            raise RecordsError(f"of the wheel {wheel} no check says that it is {digest[:19]}", where="results")
    for (wheel, digest), key in sorted(proven.items()) if built else ():
        if built.get(wheel) != digest:
            is_built = built.get(wheel, "none of this name")
            raise RecordsError(f"{key} tried {wheel} of {digest[:19]}, and what was built is {is_built[:19]}")
    return built


def _tried(recorded: Recorded) -> dict[tuple[str, str], Key]:
    """File name and digest of each wheel that a check says it is about -> the step of the check."""
    found: dict[tuple[str, str], Key] = {}
    for key in recorded.attempts:
        last = recorded.last(key)
        for check in last.checks if last else ():
            if WHEEL_LABEL in check.labels:
                found[check.labels[WHEEL_LABEL], check.labels.get(DIGEST_LABEL, "")] = key
    return found


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
    members |= {path.name: path for path in tables_in(folder)}
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


_WHEEL = re.compile(r"\w[\w.]*-\w[\w.+!]*(?:-[\w.]+){3,4}\.whl", re.ASCII)
"""name-version(-build)-python-abi-platform.whl"""
