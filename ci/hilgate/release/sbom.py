"""The software bill of a build as CycloneDX 1.6 JSON: what was locked, installed where it ran, and pinned.

Pure and reproducible: the same build gives the same bytes, so its time is the commit's and its serial number is made
from the plan's digest.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from hilgate import __version__
from hilgate.errors import RecordsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hilgate.model import Environment

NAMESPACE = uuid.UUID("6b1f0f0e-2f6b-5d0e-9f9e-0d1c6a6f7a11")
_LOCKED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[^\s;\\#]+)(?P<rest>.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def make_sbom(
    *,
    commit: str,
    committed: int,
    plan_digest: str,
    locks: Mapping[str, str],
    environments: Iterable[Environment],
    pins: Mapping[str, Any],
    images: Mapping[str, str],
) -> str:
    """The bill of one build.

    Args:
        commit: What was built.
        committed: Time of the commit, seconds since 1970 (UTC).
        plan_digest: Of the plan that the results answer.
        locks: Name of a lock file -> its text (`name==version`, `--hash=sha256:...`).
        environments: Where records were made.
        pins: `docker/pins.toml` as read; empty when there is none.
        images: Image -> digest, as built.

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
    for environment in environments:
        for name, version in sorted({"python": environment.python, **environment.versions}.items()):
            package(name, version, ("hilgate:installed-on", environment.host))
    _add_pins(found, pins)
    for name, digest in sorted(images.items()):
        purl = PackageURL(type="oci", name=name, version=digest)
        _component(found, name, digest, purl, ComponentType.CONTAINER).hashes.add(
            _sha256(digest.removeprefix("sha256:"))
        )
    subject = Component(
        name="hilgate", version=commit, type=ComponentType.APPLICATION, bom_ref="hilgate",
        properties=[Property(name="hilgate:plan-digest", value=plan_digest),
                    Property(name="hilgate:version", value=__version__)],
    )  # fmt: skip
    bom = Bom(
        components=[found[reference] for reference in sorted(found)],
        serial_number=uuid.uuid5(NAMESPACE, plan_digest),
        metadata=BomMetaData(component=subject, timestamp=dt.datetime.fromtimestamp(committed, dt.UTC)),
    )
    bom.register_dependency(subject, bom.components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def problem_of(text: str) -> str:
    """What is wrong with a bill by the CycloneDX 1.6 schema; empty for a sound one."""
    try:
        said = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    version = said.get("specVersion") if isinstance(said, dict) else None
    if version != "1.6":  # the schema takes any text there
        return f"its specVersion is {version!r}"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return "" if problem is None else (str(problem).splitlines() or ["against the schema"])[0][:200]


def _component(
    found: dict[str, Component],
    name: str,
    version: str,
    purl: PackageURL,
    kind: ComponentType = ComponentType.LIBRARY,
) -> Component:
    """The one of this reference: what two files name is one component."""
    reference = purl.to_string()
    new = Component(name=name, version=version or None, type=kind, bom_ref=reference, purl=purl)
    return found.setdefault(reference, new)


def _add_pins(found: dict[str, Component], pins: Mapping[str, Any]) -> None:
    for path, facts in _pinned(pins):
        version = next((facts[key] for key in ("version", "tag", "commit", "reference") if facts.get(key)), "")
        made = _component(found, path, version, PackageURL(type="generic", name=path))
        for key, value in facts.items():
            made.properties.add(Property(name=f"hilgate:pin:{key}", value=value))
            if match := _HEX.fullmatch(value):
                made.hashes.add(_sha256(match[1]))


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
