# SPDX-License-Identifier: Apache-2.0
"""What an image is built from, as one sha256: equal contents are the same image, whoever asks and whenever.

The key of an image covers its part of the pins and every file that its build sees: the build gets a folder with just
these files (`copy_inputs`), so nothing outside the key can enter the image. The key of a wheel covers what its bytes
depend on: a change of ours does not compile aiter again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any, Final

import pathspec

from hilgate.declare.load import load_project
from hilgate.errors import DeclarationError
from hilgate.git import tracked_files
from hilgate.images.pins import PINS_FILE, key_lines, read
from hilgate.pytest_recorder import bytes_to_compare

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hilgate.images.pins import BaseImage, GitSource, Pins
    from hilgate.model.declaration import Image

ANSWERS: Final = {
    "commit": re.compile(r"\b([0-9a-f]{40})\b"),
    "digest": re.compile(r"\b(sha256:[0-9a-f]{64})\b"),
    "version": re.compile(r"== *([0-9][\w.]*)$"),
}
"""Key of a pin -> its value in what its command prints."""

WHEEL_SCRIPTS: Final = ("docker/scripts/fetch.sh", "docker/scripts/unpack.sh", "docker/scripts/wheel.sh")
"""Scripts that every wheel is made by; its own `wheel-<name>.sh` comes on top."""

GIT_SCRIPT: Final = "docker/scripts/commit.sh"
"""Script that checks what came from git."""


def contents(root: Path) -> dict[str, str]:
    """Image -> sha256 of everything it is built from; empty in a repository without images.

    Raises:
        DeclarationError: The pins are wrong, or an image has no Dockerfile.
        CannotRunHereError: git cannot list the files.
    """
    images = load_project(root).images
    if not images:
        return {}
    names = tracked_files(root)
    return {
        name: content(image, names, root, pinned(name, read(root)) if image.pins else None)
        for name, image in images.items()
    }


def content(image: Image, names: Iterable[str], root: Path, pins: dict[str, Any] | None = None) -> str:
    """sha256 of what one image is built from: its files among `names`, and its part of the pins."""
    lines = [_canonical(pins).decode()] if pins is not None else []
    for file in inputs(image, names):
        mode = "x" if (root / file).stat().st_mode & 0o100 else "-"
        lines.append(f"{_sha256(bytes_to_compare(root / file))} {mode} {file}")
    return _sha256(os.fsencode("\n".join(lines)))


def inputs(image: Image, names: Iterable[str]) -> tuple[str, ...]:
    """The files among `names` that the build of an image sees, sorted."""
    globs = [f"/{image.recipe}", *image.inputs]
    chosen = tuple(sorted(pathspec.PathSpec.from_lines("gitignore", globs).match_files(names)))
    if image.recipe not in chosen:
        raise DeclarationError("an image has no recipe", where=image.recipe, remedy="restore the file")
    return chosen


def pinned(image: str, pins: Pins) -> dict[str, Any]:
    """The part of the pins that `image` depends on; `pins.json` in its build."""
    return pins.model_dump(mode="json", include={"cpu"} if image == "cpu" else {"archs", "rocm", "sources"})


def wheel_keys(root: Path, pins: Pins) -> dict[str, str]:
    """Source -> sha256 of what its wheel's bytes depend on: source, patches, ROCm, torch, architectures, scripts."""
    keys = {}
    for name, source in pins.sources.items():
        scripts = [*WHEEL_SCRIPTS, f"docker/scripts/wheel-{name}.sh"]
        scripts += [GIT_SCRIPT] if source.commits("") else []
        made_of = {
            "source": source.model_dump(mode="json", exclude={"requires": {"__all__": {"files"}}}),
            "rocm": pins.rocm.model_dump(mode="json"),
            "scripts": {script: _sha256(bytes_to_compare(root / script)) for script in scripts},
        }
        keys[name] = _sha256(_canonical(made_of))
    return keys


def copy_inputs(name: str, image: Image, root: Path, folder: Path) -> None:
    """Fill `folder`, emptied first, with what the key of an image covers: its files and its pins."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in inputs(image, tracked_files(root)):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, target)
    if image.pins:
        (folder / "pins.json").write_bytes(_canonical(pinned(name, read(root))))


def unfilled(image: str, pins: Pins) -> list[tuple[str, str]]:
    """Pins of `image` that are still empty, each with the command that fills it."""
    if image == "cpu":
        return _unfilled_base("cpu.base", pins.cpu.base)
    empty = _unfilled_base("rocm.base", pins.rocm.base)
    for name, source in pins.sources.items():
        for place, pin in source.commits(f"sources.{name}").items():
            if not pin.commit:
                empty.append((f"{place}.commit", f"git ls-remote {pin.repository} '{pin.tag}^{{}}' {pin.tag}"))
            empty += [
                (f"{place}.submodules.{folder}.commit", _in_commit(pin, f"ls-tree FETCH_HEAD {folder}"))
                for folder, submodule in pin.submodules.items()
                if not submodule.commit
            ]
        for package, asked in source.requires.items():
            if source.git and not asked.version:
                search = (
                    f"grep -hoE '{package} *== *[0-9][0-9A-Za-z.]*' FETCH_HEAD -- {' '.join(asked.files)} | sort -u"
                )
                empty.append((f"sources.{name}.requires.{package}.version", _in_commit(source.git, search)))
    return empty


def _unfilled_base(place: str, base: BaseImage) -> list[tuple[str, str]]:
    command = f"docker buildx imagetools inspect --format '{{{{.Manifest.Digest}}}}' {base.reference}"
    command += f" || skopeo inspect --format '{{{{.Digest}}}}' docker://{base.reference}"
    return [] if base.digest else [(f"{place}.digest", command)]


def _in_commit(source: GitSource, words: str) -> str:
    """Command that asks git about a commit, or about that of the tag, and fetches its files only if it needs them."""
    revision = source.commit or f"refs/tags/{source.tag}"
    fetch = f"git -C a remote add origin {source.repository} && git -C a fetch --quiet --depth 1 --filter=blob:none"
    return f"git init --quiet --bare a && {fetch} origin {revision} && git -C a {words}"


def fill(image: str, root: Path) -> list[str]:
    """Run the command of each empty pin of `image` and write its answer into the file; what remains, with the reason.

    Commands need network, git, and docker or skopeo. An answer that is not exactly one value is none.
    """
    failed: dict[str, str] = {}
    while missing := [pin for pin in unfilled(image, read(root)) if pin[0] not in failed]:
        place, command = missing[0]
        with tempfile.TemporaryDirectory() as folder:
            words = ["bash", "-o", "pipefail", "-c", command]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        peeled = [line for line in lines if line.endswith("^{}")]  # of an annotated tag, its commit
        matches = map(ANSWERS[place.rpartition(".")[2]].search, peeled or lines)
        values = {match[1] for match in matches if match}
        path, before = root / PINS_FILE, (root / PINS_FILE).read_text(encoding="utf-8")
        try:
            (value,) = values
            text = before.splitlines(keepends=True)
            number = key_lines(before)[tuple(place.split("."))] - 1
            text[number] = text[number].replace('""', f'"{value}"', 1)
            path.write_text("".join(text), encoding="utf-8")
            read(root)
        except (ValueError, DeclarationError) as error:
            path.write_text(before, encoding="utf-8")
            printed = (done.stdout + done.stderr).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            failed[place] = (
                str(error) if isinstance(error, DeclarationError) else f"{len(values)} answers: {printed[0]}"
            )
    return [f"{place}: {reason}" for place, reason in failed.items()]


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
