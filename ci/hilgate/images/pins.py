"""`docker/pins.toml`: every pin of the images, read strictly.

TOML parsers know no line numbers, and a wrong pin in a file of pins is found by its line: the lines of tables and keys
are collected once beside the parsed data.

What a build is told and what its image says of itself, both from the pins: variables of the bake file, labels.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, StringConstraints, ValidationError, model_validator

from hilgate import __version__
from hilgate.errors import DeclarationError
from hilgate.model import Key, Noun
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


PINS_FILE: Final = "docker/pins.toml"

Arch = Annotated[str, StringConstraints(pattern=r"^gfx[0-9a-f]{3,4}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40})?$")]
Digest = Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Repository = Annotated[str, StringConstraints(pattern=r"^https://[\w.-]+/[\w.-]+/[\w.-]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Text = Annotated[str, StringConstraints(min_length=1)]
Word = Annotated[str, StringConstraints(pattern=r"^[\w.+-]+$")]

SHAPES: Final = {
    "commit": "must be the 40 hex digits of a commit",
    "digest": "must be 'sha256:' and 64 hex digits",
    "repository": "must be https://host/owner/name",
    "sdist": "must be the 64 hex digits of a sha256",
    "sha256": "must be the 64 hex digits of a sha256",
}
"""What a value of the wrong shape is told, by its key."""


class Base(Noun):
    """An image that others start from."""

    reference: Text
    digest: Digest
    """Empty: not read off yet; the build refuses."""

    @property
    def pinned(self) -> str:
        """What FROM is given."""
        return f"{self.reference}@{self.digest}"


class Part(Noun):
    """A tarball of one commit."""

    repository: Repository
    commit: Commit
    sha256: Sha256
    read_off: str = ""
    """Command that prints the commit, where no tag of its own repository names it."""

    @property
    def url(self) -> str:
        """Where the forge serves the tarball of the commit."""
        return f"{self.repository}/archive/{self.commit}.tar.gz"


class Archive(Part):
    """A tarball of the commit that a release tag named when it was read off."""

    tag: Text
    """For the reader and for `git ls-remote`; nothing is ever fetched by it."""


class Patch(Noun):
    """A change to a source, applied without fuzz."""

    file: Text
    sha256: Sha256
    why: Text


class Source(Noun):
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
    archive: Archive | None = None
    parts: dict[str, Part] = Field(default_factory=dict)
    """Folder in its tree -> what the archive leaves out or its build would clone."""
    patches: tuple[Patch, ...] = ()

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.sdist is None) == (self.archive is None):
            raise ValueError("needs either sdist or archive")
        return self


class Cpu(Noun):
    """The image of `make gate`."""

    suite: Word
    packages: tuple[Word, ...] = Field(min_length=1)
    base: Base


class Rocm(Noun):
    """The image of the GPU agents; versions are those of its base and may not change on the way."""

    rocm: Word
    python: Word
    torch: Word
    triton: Word
    base: Base


class Pins(Noun):
    """`docker/pins.toml`."""

    archs: tuple[Arch, ...] = Field(min_length=1)
    cpu: Cpu
    rocm: Rocm
    sources: dict[Key, Source]


Loc = tuple[str | int, ...]


def read(root: Path) -> Pins:
    """Read and check the pins of a repository, patches included.

    Raises:
        DeclarationError: The file is unreadable, or one or more pins are wrong; every mistake has its line.
    """
    path = root / PINS_FILE
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeclarationError(f"cannot be read: {error}", where=PINS_FILE, remedy="restore the file") from error
    lines = key_lines(text)
    try:
        pins = Pins.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise _refusal([(_line(lines, one["loc"]), _said(one)) for one in error.errors()]) from error
    if wrong := [(_line(lines, loc), what) for loc, what in (*_archs(pins), *_patches(pins, root))]:
        raise _refusal(wrong)
    return pins


def key_lines(text: str) -> dict[Loc, int]:
    """Line of each table and key of a TOML text that parses."""
    lines: dict[Loc, int] = {}
    table: Loc = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[?[\w\"'. /-]+\]", line):
            table = _path(tomllib.loads(line))
            while table in lines and isinstance(table[-1], int):
                table = (*table[:-1], table[-1] + 1)
            lines[table] = number
        elif match := re.match(r"\s*(?:\"([^\"]+)\"|([\w-]+))\s*=", line):
            lines.setdefault((*table, match[1] or match[2]), number)
    return lines


def _path(header: Any) -> Loc:
    """`[a.b]` parses as {"a": {"b": {}}}, `[[a]]` as {"a": [{}]}."""
    if isinstance(header, list):
        return (0, *_path(header[0]))
    return next(((key, *_path(inside)) for key, inside in header.items()), ())


def _line(lines: dict[Loc, int], loc: Loc) -> int:
    return next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), 1)


def _said(detail: Any) -> str:
    loc = [str(part) for part in detail["loc"] if part != "[key]"]
    name = loc[-1] if loc else ""
    place = ".".join(loc)
    if detail["type"] == "extra_forbidden":
        known = {field for model in (Pins, Cpu, Rocm, Base, Source, Archive, Patch) for field in model.model_fields}
        return f"{place}: unknown key; {suggest(name, known)}"
    if detail["type"] == "missing":
        return f"{place}: is missing"
    if detail["type"] == "string_pattern_mismatch":
        shape = SHAPES.get(name, f"must match {detail['ctx']['pattern']}")
        return f"{place}: {shape}, got {detail['input']!r}"
    return f"{place}: {detail['msg'].removeprefix('Value error, ').lower()}"


def _archs(pins: Pins) -> list[tuple[Loc, str]]:
    """Each architecture is built for by each source, or the source says why not."""
    found: list[tuple[Loc, str]] = []
    for name, source in pins.sources.items():
        loc: Loc = ("sources", name, "archs")
        for arch in pins.archs:
            if (arch in source.archs) == (arch in source.without):
                what = "is both built and left out" if arch in source.archs else "is missing; build it, or say why not"
                found.append((loc, f"sources.{name}.archs: {arch} {what} in `without`"))
        unknown = sorted({*source.archs, *source.without} - set(pins.archs))
        found.extend((loc, f"sources.{name}.archs: {arch} is not in archs") for arch in unknown)
    return found


def _patches(pins: Pins, root: Path) -> list[tuple[Loc, str]]:
    found: list[tuple[Loc, str]] = []
    for name, source in pins.sources.items():
        for index, patch in enumerate(source.patches):
            loc: Loc = ("sources", name, "patches", index, "sha256")
            path = root / patch.file
            is_sha = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
            if is_sha != patch.sha256:
                found.append((loc, f"sources.{name}.patches: {patch.file} is {is_sha}, pinned is {patch.sha256!r}"))
    return found


def _refusal(found: list[tuple[int, str]]) -> DeclarationError:
    listed = "\n".join(f"{PINS_FILE}:{line}: {what}" for line, what in sorted(found))
    return DeclarationError(f"{len(found)} wrong pin(s)\n{listed}", where=PINS_FILE, remedy="correct the lines above")


WHEELS: Final = {"mamba-ssm": "MAMBA", "causal-conv1d": "CONV1D", "aiter": "AITER", "vllm": "VLLM"}
"""Source -> prefix of its variables; `wheels-<prefix>` in lower case is its target."""

PARTS: Final = {"3rdparty/composable_kernel": "CK", "triton_kernels": "TRITON"}
"""Folder of a part -> infix of its variables."""


def labels(image: str, pins: Pins, content: str, revision: str) -> dict[str, str]:
    """Labels of an image. `revision` is the commit that built it first; equal contents of a later commit are reused."""
    base = pins.cpu.base if image == "cpu" else pins.rocm.base
    found = {
        "org.opencontainers.image.title": f"hilgate {image}",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.base.name": base.reference,
        "org.opencontainers.image.base.digest": base.digest,
        "hilgate.content": content,
    }
    if image == "cpu":
        return found | {"hilgate.pins.suite": pins.cpu.suite, "hilgate.pins.packages": " ".join(pins.cpu.packages)}
    rocm = {"rocm": pins.rocm.rocm, "torch": pins.rocm.torch, "triton": pins.rocm.triton, "archs": " ".join(pins.archs)}
    sources = {name: source.version for name, source in pins.sources.items()}
    return found | {f"hilgate.pins.{name}": value for name, value in (rocm | sources).items()}


def bake_variables(
    pins: Pins, contents: Mapping[str, str], keys: Mapping[str, str], store: str, revision: str
) -> dict[str, str]:
    """Every variable of docker-bake.hcl. `store` is the prefix of image names: a registry, or `hilgate` without one."""
    found = {
        "REVISION": revision,
        "HILGATE_VERSION": __version__,
        "STORE": store,
        "CPU_CONTENT": contents["cpu"],
        "CPU_BASE": pins.cpu.base.pinned,
        "CPU_BASE_NAME": pins.cpu.base.reference,
        "CPU_BASE_DIGEST": pins.cpu.base.digest,
        "CPU_PACKAGES": " ".join(pins.cpu.packages),
        "CPU_SUITE": pins.cpu.suite,
        "ROCM_CONTENT": contents["rocm"],
        "ROCM_BASE": pins.rocm.base.pinned,
        "ROCM_BASE_NAME": pins.rocm.base.reference,
        "ROCM_BASE_DIGEST": pins.rocm.base.digest,
        "ROCM": pins.rocm.rocm,
        "TORCH": pins.rocm.torch,
        "TRITON": pins.rocm.triton,
        "ARCHS": " ".join(pins.archs),
    }
    for name, prefix in WHEELS.items():
        found[f"{prefix}_KEY"] = keys[name]
        found |= {f"{prefix}_{key}": value for key, value in _source(pins.sources[name]).items()}
    return found


def _source(source: Source) -> dict[str, str]:
    found = {
        "VERSION": source.version,
        "ARCHS": " ".join(source.archs),
        "PATCHES": " ".join(patch.file for patch in source.patches),
    }
    if source.sdist is not None:
        found["SDIST"] = source.sdist
    if source.archive:
        found |= _part("", source.archive)
    for folder, part in source.parts.items():
        found |= _part(f"{PARTS[folder]}_", part)
    return found


def _part(infix: str, part: Part) -> dict[str, str]:
    return {f"{infix}URL": part.url, f"{infix}SHA256": part.sha256}
