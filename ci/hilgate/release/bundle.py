# SPDX-License-Identifier: Apache-2.0
"""The evidence of a build as one tar: what was expected, what arrived, what was decided, and from what it was made.

The last is the software bill (SBOM) as CycloneDX 1.6 JSON: what was locked, installed where it ran, and pinned. The
same build gives the same bytes: the time of the bill is the commit's, its serial number is made from the plan's digest.
`hilgate.release.verify` reads a bundle back and believes none of it; so that the bill can be made again from the bundle
alone, the lock files and the pins that it was made from are in it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import re
import tarfile
import tomllib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from hilgate import __version__
from hilgate.errors import RecordsError
from hilgate.judge.verdict import read_verdict
from hilgate.model import JOBS_FOLDER, PLAN_FILE, VERDICT_FILE, Key, StrictModel
from hilgate.model.plan import PlanProfile
from hilgate.model.record import Outcome
from hilgate.plan.make import plan_digest, read_plan
from hilgate.report import tables
from hilgate.run import results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model.plan import Plan
    from hilgate.model.record import Environment
    from hilgate.run.results import Recorded

TOP = "evidence"
MANIFEST_FILE, SUMS_FILE, SBOM_FILE, PINS_FILE = "manifest.json", "SHA256SUMS", "sbom.cdx.json", "pins.toml"
REPORT_FILE = "report.html"
OPTIONAL_FILES = ("annotation.md", "junit.xml", "quarantine.json")
LOCKS = "locks"
"""Folder of the lock files in a bundle."""
PINS = Path("docker/pins.toml")
WHEEL_LABEL, DIGEST_LABEL = "wheel", "sha256"
"""Labels of a check about a wheel: its file name, and `sha256:...` of its bytes."""
NAMESPACE = uuid.UUID("6b1f0f0e-2f6b-5d0e-9f9e-0d1c6a6f7a11")
"""Of the serial numbers of bills."""
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
        images=dict(sorted(recorded.digests(plan).items())),
        wheels=wheels_in(files, recorded),
    )
    bill = make_sbom(
        manifest,
        locks={path.name: path.read_text("utf-8") for path in locks.values()},
        environments=environments_of(recorded),
        pins=tomllib.loads(pins.read_text("utf-8")) if pins.is_file() else {},
    )
    members: dict[str, bytes | Path] = {
        MANIFEST_FILE: (manifest.model_dump_json(indent=1) + "\n").encode(),
        SBOM_FILE: bill.encode(),
        **files,
        **locks,
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


def lock_files(root: Path) -> dict[str, Path]:
    """Name in the bundle -> lock file of a repository."""
    return {f"{LOCKS}/{path.name}": path for path in sorted((root / "requirements").glob("*.txt"))}


def environments_of(recorded: Recorded) -> list[Environment]:
    """Where the records of a build were made."""
    return [
        *(build.environment for build in recorded.builds),
        *(attempt.record.environment for attempts in recorded.attempts.values() for attempt in attempts),
    ]


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
    said = _tried(recorded)
    for wheel, digest in built.items():
        if (wheel, digest) not in said:
            raise RecordsError(f"of the wheel {wheel} no check says that it is {digest[:19]}", where="results")
    for (wheel, digest), key in sorted(said.items()) if built else ():
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


_WHEEL = re.compile(r"\w[\w.]*-\w[\w.+!]*(?:-[\w.]+){3,4}\.whl", re.ASCII)
"""name-version(-build)-python-abi-platform.whl"""

_LOCKED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[^\s;\\#]+)(?P<rest>.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def make_sbom(
    manifest: Manifest, *, locks: Mapping[str, str], environments: Iterable[Environment], pins: Mapping[str, Any]
) -> str:
    """The software bill of one build.

    Args:
        manifest: What was built, and its images.
        locks: Name of a lock file -> its text (`name==version`, `--hash=sha256:...`).
        environments: Where records were made.
        pins: `docker/pins.toml` as read; empty when there is none.

    Raises:
        RecordsError: A lock file holds a line that pins nothing.
    """
    found: dict[str, Component] = {}

    def package(name: str, version: str, where: tuple[str, str], hashes: Iterable[str] = ()) -> None:
        normal = re.sub(r"[-_.]+", "-", name).lower()  # PEP 503
        kind = "generic" if normal == "python" else "pypi"
        made = _component(found, normal, version, PackageURL(type=kind, name=normal, version=version))
        made.hashes.update(_sha256(digest) for digest in hashes)
        made.properties.add(Property(name=where[0], value=where[1]))

    for file, text in sorted(locks.items()):
        for name, version, hashes in _locked(file, text):
            package(name, version, ("hilgate:locked-in", file), hashes)
    distinct = {one.model_dump_json(): one for one in environments}
    for _, environment in sorted(distinct.items()):
        for name, version in sorted({"python": environment.python, **environment.versions}.items()):
            package(name, version, ("hilgate:installed-on", environment.host))
    for path, facts in _pinned(pins):
        version = next((facts[key] for key in ("version", "tag", "commit", "reference") if facts.get(key)), "")
        made = _component(found, path, version, PackageURL(type="generic", name=path))
        for key, value in facts.items():
            made.properties.add(Property(name=f"hilgate:pin:{key}", value=value))
            if match := _HEX.fullmatch(value):
                made.hashes.add(_sha256(match[1]))
    _add_what_was_built(found, manifest)
    subject = Component(
        name="hilgate",
        version=manifest.commit,
        type=ComponentType.APPLICATION,
        bom_ref="hilgate",
        properties=[
            Property(name="hilgate:plan-digest", value=manifest.plan_digest),
            Property(name="hilgate:version", value=manifest.hilgate),
        ],
    )
    bom = Bom(
        components=[found[reference] for reference in sorted(found)],
        serial_number=uuid.uuid5(NAMESPACE, manifest.plan_digest),
        metadata=BomMetaData(component=subject, timestamp=dt.datetime.fromtimestamp(manifest.committed, dt.UTC)),
    )
    bom.register_dependency(subject, bom.components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def _add_what_was_built(found: dict[str, Component], manifest: Manifest) -> None:
    """The images and our own wheels."""
    for name, digest in sorted(manifest.images.items()):
        purl = PackageURL(type="oci", name=name, version=digest)
        _component(found, name, digest, purl, ComponentType.CONTAINER).hashes.add(
            _sha256(digest.removeprefix("sha256:"))
        )
    for file, digest in sorted(manifest.wheels.items()):
        name, version = file.split("-")[:2]
        made = _component(found, name, version, PackageURL(type="pypi", name=name, version=version))
        made.hashes.add(_sha256(digest.removeprefix("sha256:")))
        made.properties.add(Property(name="hilgate:wheel", value=file))
        made.licenses.add(DisjunctiveLicense(id="Apache-2.0"))


def _component(
    found: dict[str, Component], name: str, version: str, purl: PackageURL, kind: ComponentType = ComponentType.LIBRARY
) -> Component:
    """The one of this reference: what two files name is one component."""
    reference = purl.to_string()
    new = Component(name=name, version=version or None, type=kind, bom_ref=reference, purl=purl)
    return found.setdefault(reference, new)


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def _locked(file: str, text: str) -> Iterable[tuple[str, str, list[str]]]:
    lines = [line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if not line or line.startswith(("#", "--", "-c ", "-r ")):
            continue
        match = _LOCKED.fullmatch(line)
        if match is None:
            raise RecordsError(
                f"a line that pins nothing: {line[:80]}", where=file, remedy="lock it with name==version"
            )
        yield match["name"], match["version"], _HASH.findall(match["rest"])


def _pinned(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterable[tuple[str, dict[str, str]]]:
    """Every table that names a version, a commit, a file or a digest, by its path in the file."""
    facts = {key: value for key, value in table.items() if isinstance(value, str)}
    if path and not {"version", "commit", "digest", "sha256", "tag"}.isdisjoint(facts):
        yield "/".join(path), facts
    for key, value in sorted(table.items()):
        if isinstance(value, dict):
            yield from _pinned(value, (*path, key))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                if isinstance(inner, dict):
                    yield from _pinned(inner, (*path, key, str(number)))
