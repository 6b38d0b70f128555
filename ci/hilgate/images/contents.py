"""What an image is built from, as one sha256: equal contents are the same image, whoever asks and whenever.

The key of an image covers its part of the pins and every file that its build sees: the build gets a folder with just
these files (`copy_inputs`), so nothing outside the key can enter the image. Docs, tests and the recipe of the other
image are not inputs. The key of a wheel covers what its bytes depend on: a change of ours does not compile aiter again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any, Final

import pathspec

from hilgate.errors import DeclarationError
from hilgate.git import tracked_files
from hilgate.images.pins import PINS_FILE, read

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hilgate.images.pins import BaseImage, Pins

PACKAGES: Final = (
    *("/ci/hilgate/", "/kernels/pagedkv/", "/evals/hileval/", "/evals/families/"),
    *("/pyproject.toml", "/kernels/pyproject.toml", "/evals/pyproject.toml", "!*.md"),
)
"""Our own packages and what builds them."""

INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "cpu": (
        *("/docker/cpu.Dockerfile", "/docker/prove.py", "/requirements/"),
        *("/docker/scripts/apt.sh", "/docker/scripts/debootstrap.sh", "/docker/scripts/proof-cpu.sh"),
        *PACKAGES,
    ),
    "rocm": (
        *("/docker/rocm.Dockerfile", "/docker/docker-bake.hcl", "/docker/codeobjects.py", "/docker/build.txt"),
        *("/docker/prove.py", "/docker/patches/", "/docker/scripts/", "/requirements/laptop.txt"),
        *("!/docker/scripts/apt.sh", "!/docker/scripts/debootstrap.sh", "!/docker/scripts/proof-cpu.sh"),
        *PACKAGES,
    ),
}
"""Image -> gitignore-style globs of the files that its build sees; the last match wins."""

WHEEL_SCRIPTS: Final = ("docker/scripts/fetch.sh", "docker/scripts/unpack.sh", "docker/scripts/wheel.sh")
"""Scripts that every wheel is made by; its own `wheel-<name>.sh` comes on top."""


def contents(root: Path) -> dict[str, str]:
    """Image -> sha256 of everything it is built from; empty in a repository without images.

    Raises:
        DeclarationError: The pins are wrong, or an image has no Dockerfile.
        CannotRunHereError: git cannot list the files.
    """
    if not (root / PINS_FILE).exists():
        return {}
    pins = read(root)
    names = tracked_files(root)
    keys = {}
    for image in INPUTS:
        lines = [_canonical(pinned(image, pins)).decode()]
        for name in inputs(image, names):
            mode = "x" if (root / name).stat().st_mode & 0o100 else "-"
            lines.append(f"{_sha256((root / name).read_bytes())} {mode} {name}")
        keys[image] = _sha256("\n".join(lines).encode())
    return keys


def inputs(image: str, names: Iterable[str]) -> tuple[str, ...]:
    """The files among `names` that the build of `image` sees, sorted."""
    chosen = tuple(sorted(pathspec.PathSpec.from_lines("gitignore", INPUTS[image]).match_files(names)))
    recipe = f"docker/{image}.Dockerfile"
    if recipe not in chosen:
        raise DeclarationError(f"image {image!r} has no recipe", where=recipe, remedy="restore the file")
    return chosen


def pinned(image: str, pins: Pins) -> dict[str, Any]:
    """The part of the pins that `image` depends on; `pins.json` in its build."""
    return pins.model_dump(mode="json", include={"cpu"} if image == "cpu" else {"archs", "rocm", "sources"})


def wheel_keys(root: Path, pins: Pins) -> dict[str, str]:
    """Source -> sha256 of what its wheel's bytes depend on: source, patches, ROCm, torch, architectures, scripts."""
    keys = {}
    for name, source in pins.sources.items():
        scripts = [*WHEEL_SCRIPTS, f"docker/scripts/wheel-{name}.sh"]
        made_of = {
            "source": source.model_dump(mode="json", exclude={"parts": {"__all__": {"read_off"}}}),
            "rocm": pins.rocm.model_dump(mode="json"),
            "scripts": {script: _sha256((root / script).read_bytes()) for script in scripts},
        }
        keys[name] = _sha256(_canonical(made_of))
    return keys


def copy_inputs(image: str, root: Path, folder: Path) -> None:
    """Fill `folder`, emptied first, with what the key of `image` covers: its files and its pins."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in inputs(image, tracked_files(root)):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target)
    (folder / "pins.json").write_bytes(_canonical(pinned(image, read(root))))


def unfilled(image: str, pins: Pins) -> list[tuple[str, str]]:
    """Pins of `image` that are still empty, each with the command that fills it."""
    if image == "cpu":
        return _unfilled_base("cpu.base", pins.cpu.base)
    found = _unfilled_base("rocm.base", pins.rocm.base)
    for name, source in pins.sources.items():
        origins: dict[str, Any] = {"archive": source.archive} if source.archive else {}
        origins |= {f"parts.{folder}": part for folder, part in source.parts.items()}
        for origin, part in origins.items():
            place = f"sources.{name}.{origin}"
            if not part.commit:
                tag = getattr(part, "tag", "")
                command = part.read_off or f"git ls-remote {part.repository} '{tag}^{{}}' {tag}"
                found.append((f"{place}.commit", command))
            if not part.sha256:
                url = part.url if part.commit else part.url.replace("/.tar.gz", "/<commit>.tar.gz")
                found.append((f"{place}.sha256", f"curl --fail --silent --location {url} | sha256sum"))
    return found


def _unfilled_base(place: str, base: BaseImage) -> list[tuple[str, str]]:
    command = f"docker buildx imagetools inspect --format '{{{{.Manifest.Digest}}}}' {base.reference}"
    return [] if base.digest else [(f"{place}.digest", command)]


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
