# SPDX-License-Identifier: Apache-2.0
"""What the build of an image would fetch, read from the pins and the lock files alone: no network is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hilgate.git import tracked_files
from hilgate.images.contents import inputs

if TYPE_CHECKING:
    from pathlib import Path

    from hilgate.images.pins import Pins
    from hilgate.model.declaration import Image

BY_VERSION: Final = frozenset({"requirements/torch.txt"})
"""Files whose index belongs to the machine, and each index has other files of the same version."""


@dataclass(frozen=True)
class Fetched:
    """One input of a build that is not in the repository."""

    kind: str
    address: str
    value: str
    """What it must be: digest, commit or sha256. Empty where the pin is, or where a lock file lacks a hash."""


def fetched(name: str, image: Image, pins: Pins | None, root: Path) -> list[Fetched]:
    """Every input of an image that its build fetches, in the order of the pins."""
    listed: list[Fetched] = []
    if pins is not None:
        base = pins.cpu.base if name == "cpu" else pins.rocm.base
        listed.append(Fetched("base", base.reference, base.digest))
    if pins is not None and name == "cpu":
        packages = f"{pins.cpu.suite}: {' '.join(pins.cpu.packages)}"
        listed.append(Fetched("debian", packages, "signed by the suite"))
    elif pins is not None:
        listed += _sources(pins)
    return listed + [_locked(file, root) for file in inputs(image, tracked_files(root)) if file.endswith(".txt")]


def _sources(pins: Pins) -> list[Fetched]:
    sources = []
    for name, source in pins.sources.items():
        if source.sdist is not None:
            sources.append(Fetched("sdist", f"{name} {source.version}", source.sdist and f"sha256:{source.sdist}"))
        for commit in source.commits(name).values():
            sources.append(Fetched("git", commit.repository, commit.commit))
            sources += [
                Fetched("submodule", submodule.repository, submodule.commit) for submodule in commit.submodules.values()
            ]
    return sources


def _locked(file: str, root: Path) -> Fetched:
    """A file of requirements, which says of each by its sha256 what it is."""
    text = (root / file).read_text(encoding="utf-8").replace("\\\n", " ")
    asked = [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    hashed = all("--hash=sha256:" in line for line in asked)
    value = "sha256 of each" if hashed else "by version" if file in BY_VERSION else ""
    return Fetched("python", f"{file}: {len(asked)} distributions", value)
