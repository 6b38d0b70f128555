# SPDX-License-Identifier: Apache-2.0
"""What one signature of a release covers: an in-toto statement (v1) with the SLSA provenance predicate (v1).

Its subjects are the evidence bundle, the wheels and the images, by digest. Its predicate names the commit, the digest
of the plan, and what was locked and pinned. All of it follows from the bundle but for who built it and in which build,
so `hilgate.release.verify` makes it again and compares. It is signed as a file by OpenSSH (`ssh-keygen -Y sign`), with
the namespace and the principal below; `ci/allowed_signers` names the keys that may.
"""

from __future__ import annotations

import datetime as dt
import re
import subprocess
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hilgate.errors import CannotRunHereError, MisuseError, RecordsError
from hilgate.model import PLAN_FILE, VERDICT_FILE, first_problem
from hilgate.release import bundle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hilgate.model.verdict import Verdict
    from hilgate.run.results import Recorded

PRINCIPAL: Final = "release"
NAMESPACE: Final = "hilgate-release"
"""Of the signature: one made for anything else, with the same key, is none of a release."""
SIGNERS_FILE: Final = "ci/allowed_signers"
BUNDLE_NAME: Final = "evidence.tar"
BUILD_TYPE: Final = "urn:hilgate:release:v1"
SECONDS: Final = 60
MOST_BYTES: Final = 1 << 20


class BundlePart(BaseModel):
    """A part of a statement, in the names of its specification; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Subject(BundlePart):
    """Something that was made."""

    name: str
    digest: dict[str, str]


class Material(BundlePart):
    """Something that it was made from (in-toto `ResourceDescriptor`)."""

    uri: str
    digest: dict[str, str]


class External(BundlePart):
    """What was asked for."""

    commit: str
    profile: str


class Internal(BundlePart):
    """What the builder decided."""

    planDigest: str  # noqa: N815 - names of SLSA are written so
    hilgate: str


class BuildDefinition(BundlePart):
    """What was built, from what."""

    buildType: Literal["urn:hilgate:release:v1"] = BUILD_TYPE  # noqa: N815
    externalParameters: External  # noqa: N815
    internalParameters: Internal  # noqa: N815
    resolvedDependencies: tuple[Material, ...]  # noqa: N815


class Builder(BundlePart):
    """Who built it: a URI that names the pipeline, or this program on a machine at hand."""

    id: str = Field(pattern=r"^[a-z][a-z0-9+.-]*:\S+$", max_length=500)


class Metadata(BundlePart):
    """Which build it was, and when."""

    invocationId: str = Field(max_length=500)  # noqa: N815
    startedOn: str  # noqa: N815
    finishedOn: str  # noqa: N815


class RunDetails(BundlePart):
    """The run, and what it left beside the subjects."""

    builder: Builder
    metadata: Metadata
    byproducts: tuple[Material, ...]


class Predicate(BundlePart):
    """SLSA provenance v1."""

    buildDefinition: BuildDefinition  # noqa: N815
    runDetails: RunDetails  # noqa: N815


class Statement(BundlePart):
    """in-toto statement v1."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field("https://in-toto.io/Statement/v1", alias="_type")
    subject: tuple[Subject, ...]
    predicateType: Literal["https://slsa.dev/provenance/v1"] = "https://slsa.dev/provenance/v1"  # noqa: N815
    predicate: Predicate

    def text(self) -> str:
        """The JSON that is signed."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def make(
    file: Path,
    members: Mapping[str, Path],
    manifest: bundle.Manifest,
    recorded: Recorded,
    verdict: Verdict,
    *,
    builder: str,
    invocation: str,
) -> Statement:
    """The statement about a bundle.

    Args:
        file: The bundle.
        members: Its files by their names in it.
        manifest: Its manifest.
        recorded: Its records.
        verdict: Its verdict.
        builder: URI of who built it.
        invocation: URI or name of the build.
    """
    digests = {name: {"sha256": bundle.sha256(path)} for name, path in members.items()}
    subjects = [Subject(name=BUNDLE_NAME, digest={"sha256": bundle.sha256(file)})]
    subjects += [Subject(name=name, digest=_hex(digest)) for name, digest in sorted(manifest.wheels.items())]
    subjects += [
        Subject(name=f"pkg:oci/{name}", digest=_hex(digest)) for name, digest in sorted(manifest.images.items())
    ]
    made_from = [name for name in sorted(members) if name.startswith(f"{bundle.LOCKS}/") or name == bundle.PINS_FILE]
    commit = Material(uri=f"git+commit:{manifest.commit}", digest={"gitCommit": manifest.commit})
    started = min(build.started for build in recorded.builds)
    left = (PLAN_FILE, VERDICT_FILE, bundle.SBOM_FILE)
    return Statement(
        subject=tuple(subjects),
        predicate=Predicate(
            buildDefinition=BuildDefinition(
                externalParameters=External(commit=manifest.commit, profile=manifest.profile),
                internalParameters=Internal(planDigest=manifest.plan_digest, hilgate=manifest.hilgate),
                resolvedDependencies=(
                    commit,
                    *(Material(uri=f"evidence:{name}", digest=digests[name]) for name in made_from),
                ),
            ),
            runDetails=RunDetails(
                builder=Builder(id=builder),
                metadata=Metadata(invocationId=invocation, startedOn=_time(started), finishedOn=_time(verdict.decided)),
                byproducts=tuple(Material(uri=f"evidence:{name}", digest=digests[name]) for name in left),
            ),
        ),
    )


def _hex(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def _time(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def built_by(env: Mapping[str, str]) -> tuple[str, str]:
    """Builder and invocation by Buildkite's variables; of a machine at hand where there are none."""
    slug = re.compile(r"[A-Za-z0-9_-]{1,200}")
    organization, pipeline = (env.get(f"BUILDKITE_{name}_SLUG", "") for name in ("ORGANIZATION", "PIPELINE"))
    if not (slug.fullmatch(organization) and slug.fullmatch(pipeline)):
        return "urn:hilgate:local", ""
    return f"https://buildkite.com/{organization}/{pipeline}", env.get("BUILDKITE_BUILD_ID", "")


def read(file: Path) -> Statement:
    """Read a statement.

    Raises:
        RecordsError: It is missing, or no statement of a release.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            raise RecordsError("no statement is so large", where=str(file), remedy="take the one of the release")
        return Statement.model_validate_json(file.read_bytes())
    except OSError as error:
        what = f"there is no statement: {error.strerror}"
        raise RecordsError(what, where=str(file), remedy="take the one of the release") from error
    except ValidationError as error:
        what = f"not a statement of a release: {first_problem(error)}"
        raise RecordsError(what, where=str(file), remedy="take the one of the release") from error


def difference(given: Statement, made: Statement) -> str:
    """Where two statements differ first, in words; empty for equal ones."""
    return _differ(given.model_dump(by_alias=True, mode="json"), made.model_dump(by_alias=True, mode="json"), "")


def _differ(given: Any, made: Any, place: str) -> str:
    if given == made:
        return ""
    if isinstance(given, dict) and isinstance(made, dict):
        for key in sorted({**given, **made}):
            if found := _differ(given.get(key), made.get(key), f"{place}.{key}" if place else key):
                return found
    if isinstance(given, list) and isinstance(made, list) and len(given) == len(made):
        for number, (one, other) in enumerate(zip(given, made, strict=True)):
            if found := _differ(one, other, f"{place}[{number}]"):
                return found
    return f"{place} is {str(given)[:90]!a}, and the bundle gives {str(made)[:90]!a}"


def require_signed(file: Path, signature: Path, signers: Path) -> str:
    """Have OpenSSH check the signature of a statement; returns its words, which name the key.

    Raises:
        RecordsError: It is not signed, by a key that may not, or for another purpose; or nobody may sign.
        MisuseError: There is no list of signers.
        CannotRunHereError: `ssh-keygen` is not installed, or hangs.
    """
    try:
        keys = [line for line in signers.read_text("utf-8").splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"--signers FILE, by default {SIGNERS_FILE} of --root"
        raise MisuseError(f"no list of signers: {error}", where=str(signers), remedy=remedy) from error
    if not keys:
        raise RecordsError(
            "nobody may sign a release: it names no key", where=str(signers), remedy="see its first lines"
        )
    if not signature.is_file():
        raise RecordsError("the statement is not signed", where=str(signature), remedy="take both files of the release")
    words = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-I", PRINCIPAL, "-f", str(signers), "-s", str(signature)]
    try:
        with file.open("rb") as text:
            done = subprocess.run(
                words, stdin=text, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
            )
    except FileNotFoundError as error:
        raise CannotRunHereError("ssh-keygen is not installed", remedy="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise CannotRunHereError(f"ssh-keygen did not answer in {SECONDS} s", remedy="try it by hand") from error
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise RecordsError(f"not signed by a key that may: {said}", where=str(signature), remedy=f"see {signers.name}")
    return " ".join(done.stdout.split())[:200]
