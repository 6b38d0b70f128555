# SPDX-License-Identifier: Apache-2.0
"""`docker/pins.toml`, every pin of the images: read strictly, and given to builds as variables and labels.

TOML parsers know no line numbers, and a wrong pin in a file of pins is found by its line: the lines of tables and keys
are collected beside the parsed data.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from hilgate import __version__
from hilgate.declare.yaml import Document, validate
from hilgate.errors import DeclarationError
from hilgate.model import Key, StrictModel, refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hilgate.declare.yaml import Loc

PINS_FILE: Final = "docker/pins.toml"
BUILD_FILE: Final = "docker/build.txt"


def _shape(pattern: str, meaning: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise refused(f"must be {meaning}, got {text!r}")
        return text

    return AfterValidator(check)


Arch = Annotated[str, _shape(r"gfx[0-9a-f]{3,4}", "a gfx architecture")]
Commit = Annotated[str, _shape(r"([0-9a-f]{40})?", "the 40 hex digits of a commit")]
Digest = Annotated[str, _shape(r"(sha256:[0-9a-f]{64})?", "'sha256:' and 64 hex digits")]
Repository = Annotated[str, _shape(r"https://[\w.-]+/[\w.-]+/[\w.-]+", "https://host/owner/name")]
Sha256 = Annotated[str, _shape(r"(?!e3b0c44298fc1c14)([0-9a-f]{64})?", "the 64 hex digits of a sha256, not of nothing")]
Text = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, _shape(r"[\w.+-]+", "a word")]


class BaseImage(StrictModel):
    """An image that others start from."""

    reference: Text
    digest: Digest
    """Empty: not read off yet; the build refuses."""


class GitCommit(StrictModel):
    """One commit of a repository: the hash of all that it holds, so nothing else is pinned of it."""

    repository: Repository
    commit: Commit


class GitSource(GitCommit):
    """A commit that is fetched, with its submodules."""

    tag: Annotated[str, _shape(r"[\w.+-]*", "the name of a tag")] = ""
    """The release whose commit it is, by which an empty one is looked up; nothing is ever fetched by it."""
    submodules: dict[Annotated[str, _shape(r"[\w/+-]+", "a folder")], GitCommit] = Field(default_factory=dict)
    """Folder -> the commit that the fetched one names there; every submodule is among them."""

    @model_validator(mode="after")
    def _can_be_read_off(self) -> GitSource:
        if not self.commit and not self.tag:
            raise refused("needs the commit, or the tag that names it")
        return self

    @property
    def address(self) -> str:
        """What a build adds: the repository at the commit, as engines write it."""
        return f"{self.repository}.git#{self.commit}"

    @property
    def pinned_submodules(self) -> str:
        """The list that docker/scripts/commit.sh compares."""
        return " ".join(f"{folder}={submodule.commit}" for folder, submodule in sorted(self.submodules.items()))


class Requirement(StrictModel):
    """A version that a source's own build asks for, which docker/build.txt has to have."""

    version: Annotated[str, _shape(r"[0-9][\w.]*|", "a version")]
    files: tuple[Annotated[str, _shape(r"[\w./-]+", "a file")], ...] = Field(min_length=1)
    """Files of the source's repository that may name it."""


class Patch(StrictModel):
    """A change to a source, applied without fuzz."""

    file: Text
    sha256: Sha256
    why: Text


class Source(StrictModel):
    """A package that is built for the ROCm image."""

    version: Word
    archs: tuple[Arch, ...] = Field(min_length=1)
    """Architectures whose code objects its extensions must hold."""
    without: dict[Arch, Text] = Field(default_factory=dict)
    """Architecture -> why it has no code for it."""
    extensions: tuple[Word, ...] = Field(min_length=1)
    """How the file names of its extension modules begin; each must be there."""
    sdist: Sha256 | None = None
    """sha256 of its source distribution, which pip fetches."""
    git: GitSource | None = None
    parts: dict[str, GitSource] = Field(default_factory=dict)
    """Folder in its tree -> what its build would clone."""
    patches: tuple[Patch, ...] = ()
    requires: dict[Word, Requirement] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.sdist is None) == (self.git is None):
            raise refused("needs either sdist or git")
        if self.requires and self.git is None:
            raise refused("only what comes from git can have requires")
        return self

    def commits(self, place: str) -> dict[str, GitSource]:
        """What is fetched from git, by its place in the file, below that of this source."""
        commits = {f"{place}.git": self.git} if self.git else {}
        return commits | {f"{place}.parts.{folder}": part for folder, part in self.parts.items()}


class CpuPins(StrictModel):
    """The image of `make gate`."""

    suite: Word
    packages: tuple[Word, ...] = Field(min_length=1)
    base: BaseImage


class RocmPins(StrictModel):
    """The image of the GPU agents; versions are those of its base and may not change on the way."""

    rocm: Word
    python: Word
    torch: Word
    triton: Word
    base: BaseImage


class Pins(StrictModel):
    """`docker/pins.toml`."""

    archs: tuple[Arch, ...] = Field(min_length=1)
    cpu: CpuPins
    rocm: RocmPins
    sources: dict[Key, Source]


def read(root: Path) -> Pins:
    """Read and check the pins of a repository, patches included.

    Raises:
        DeclarationError: The file is unreadable, or one or more pins are wrong; every mistake has its line.
    """
    try:
        text = (root / PINS_FILE).read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeclarationError(f"cannot be read: {error}", where=PINS_FILE, remedy="restore the file") from error
    document: Document[Pins] = Document(PINS_FILE, lines=key_lines(text))
    validate(data, Pins, document)
    pins = document.value
    if pins is not None:
        _check_sources(document, pins, root)
    if pins is None or document.mistakes:
        listed = "\n".join(str(mistake) for mistake in document.mistakes)
        raise DeclarationError(
            f"{len(document.mistakes)} wrong pin(s)\n{listed}", where=PINS_FILE, remedy="correct the lines above"
        )
    return pins


def _check_sources(document: Document[Pins], pins: Pins, root: Path) -> None:
    """Each architecture is built for by each source, or the source says why not; each patch is the pinned one."""
    built = (root / BUILD_FILE).read_text(encoding="utf-8", errors="replace") if (root / BUILD_FILE).is_file() else ""
    for name, source in pins.sources.items():
        loc: Loc = ("sources", name, "archs")
        for arch in pins.archs:
            if (arch in source.archs) == (arch in source.without):
                what = "is both built and left out" if arch in source.archs else "is missing; build it, or say why not"
                document.blame(loc, f"{arch} {what} in `without`")
        for arch in sorted({*source.archs, *source.without} - set(pins.archs)):
            document.blame(loc, f"{arch} is not in archs")
        for package, asked in source.requires.items():
            if asked.version and f"\n{package}=={asked.version} " not in f"\n{built}":
                what = f"{BUILD_FILE} has another {package}; write {package}=={asked.version} into docker/build.in"
                document.blame(("sources", name, "requires", package, "version"), f"{what} and run docker/lock.sh")
        for index, patch in enumerate(source.patches):
            path = root / patch.file
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
            if digest != patch.sha256:
                at: Loc = ("sources", name, "patches", index, "sha256")
                document.blame(at, f"{patch.file} is {digest}, pinned is {patch.sha256!r}")


def key_lines(text: str) -> dict[Loc, int]:
    """Line of each table and key of a TOML text that parses."""
    lines: dict[Loc, int] = {}
    table: Loc = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[?[\w\"'. /-]+\]", line):
            table = _header(tomllib.loads(line))
            while table in lines and isinstance(table[-1], int):
                table = (*table[:-1], table[-1] + 1)
            lines[table] = number
        elif match := re.match(r"\s*(?:\"([^\"]+)\"|([\w-]+))\s*=", line):
            lines.setdefault((*table, match[1] or match[2]), number)
    return lines


def _header(table: Any) -> Loc:
    """`[a.b]` parses as {"a": {"b": {}}}, `[[a]]` as {"a": [{}]}."""
    if isinstance(table, list):
        return (0, *_header(table[0]))
    return next(((key, *_header(inside)) for key, inside in table.items()), ())


WHEELS: Final = {"mamba-ssm": "MAMBA", "causal-conv1d": "CONV1D", "aiter": "AITER", "vllm": "VLLM"}
"""Source -> prefix of its variables; `wheels-<prefix>` in lower case is its target."""

PARTS: Final = {"triton_kernels": "TRITON"}
"""Folder of a part -> infix of its variables."""


def labels(image: str, pins: Pins | None, content: str, revision: str) -> dict[str, str]:
    """Labels of an image. `revision` is the commit that built it first; equal contents of a later commit are reused."""
    labelled = {
        "org.opencontainers.image.title": f"hilgate {image}",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.revision": revision,
        "hilgate.content": content,
    }
    if pins is None:
        return labelled
    base = pins.cpu.base if image == "cpu" else pins.rocm.base
    labelled |= {
        "org.opencontainers.image.base.name": base.reference,
        "org.opencontainers.image.base.digest": base.digest,
    }
    if image == "cpu":
        return labelled | {"hilgate.pins.suite": pins.cpu.suite, "hilgate.pins.packages": " ".join(pins.cpu.packages)}
    rocm = {"rocm": pins.rocm.rocm, "torch": pins.rocm.torch, "triton": pins.rocm.triton, "archs": " ".join(pins.archs)}
    sources = {name: source.version for name, source in pins.sources.items()}
    return labelled | {f"hilgate.pins.{name}": value for name, value in (rocm | sources).items()}


def bake_variables(
    pins: Pins, contents: Mapping[str, str], keys: Mapping[str, str], store: str, revision: str
) -> dict[str, str]:
    """Every variable of docker-bake.hcl. `store` is the prefix of image names: a registry, or `hilgate` without one."""
    variables = {
        "REVISION": revision,
        "HILGATE_VERSION": __version__,
        "STORE": store,
        "CPU_PACKAGES": " ".join(pins.cpu.packages),
        "CPU_SUITE": pins.cpu.suite,
        "ROCM": pins.rocm.rocm,
        "TORCH": pins.rocm.torch,
        "TRITON": pins.rocm.triton,
        "ARCHS": " ".join(pins.archs),
    }
    for image, base in (("cpu", pins.cpu.base), ("rocm", pins.rocm.base)):
        prefix = image.upper()
        variables[f"{prefix}_CONTENT"] = contents[image]
        variables[f"{prefix}_BASE"] = f"{base.reference}@{base.digest}"
        variables |= {f"{prefix}_BASE_NAME": base.reference, f"{prefix}_BASE_DIGEST": base.digest}
    for name, prefix in WHEELS.items():
        variables[f"{prefix}_KEY"] = keys[name]
        variables |= source_variables(prefix, pins.sources[name])
    return variables


def source_variables(prefix: str, source: Source) -> dict[str, str]:
    """The variables of docker-bake.hcl about one source."""
    patches = " ".join(patch.file for patch in source.patches)
    variables = {"VERSION": source.version, "ARCHS": " ".join(source.archs), "PATCHES": patches}
    if source.sdist is not None:
        variables["SDIST"] = source.sdist
    commits = {"": source.git} if source.git else {}
    commits |= {f"{PARTS[folder]}_": part for folder, part in source.parts.items()}
    for infix, commit in commits.items():
        variables |= {f"{infix}GIT": commit.address, f"{infix}COMMIT": commit.commit}
        variables[f"{infix}SUBMODULES"] = commit.pinned_submodules
    return {f"{prefix}_{key}": value for key, value in variables.items()}
