# SPDX-License-Identifier: Apache-2.0
"""`python -m hilgate.images`: the key of each image and wheel; `build IMAGE` builds one, `pins` checks them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.declare.load import find_root, load_project
from hilgate.errors import CannotRunHereError, DeclarationError, Exit, MisuseError, Parser, ending
from hilgate.git import inspect
from hilgate.images.build import ImageBuild, build, require_filled
from hilgate.images.contents import contents, fill, unfilled, wheel_keys
from hilgate.images.engines import Buildah, Docker, available, output
from hilgate.images.fetched import fetched
from hilgate.images.pins import PINS_FILE, read
from hilgate.model.record import Outcome
from hilgate.text import suggest

if TYPE_CHECKING:
    from hilgate.images.engines import Engine
    from hilgate.images.pins import Pins
    from hilgate.model.record import Check


@ending
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is one of `hilgate.errors.Exit`."""
    parser = Parser(prog="python -m hilgate.images", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    parser.add_argument("--json", action="store_true", help="print the keys as JSON")
    listing = commands.add_parser("pins", help="check docker/pins.toml and list the pins that are still empty")
    listing.add_argument(
        "--fill", action="store_true", help="look up the empty pins, write them and show the difference"
    )
    building = commands.add_parser("build", help="build an image, unless it is built already")
    building.add_argument("image", help="name of an image in ci/project.yaml")
    building.add_argument(
        "--check", action="store_true", help="say what would be fetched and whether anything is missing; build nothing"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a runner or an agent: ends a build as Ctrl-C does
    try:
        root = find_root(Path.cwd())
        if options.command == "build":
            return _check(options.image, root) if options.check else _build(options.image, root)
        if options.command == "pins":
            return _pins(root, filling=options.fill)
        _keys(root, as_json=options.json)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the next build goes on from the last finished layer\n")
        return Exit.INTERRUPTED
    return Exit.PASS


def _keys(root: Path, *, as_json: bool) -> None:
    keys = {"images": contents(root), "wheels": wheel_keys(root, read(root)) if _pinned(root) else {}}
    if as_json:
        sys.stdout.write(json.dumps(keys, indent=1) + "\n")
        return
    for kind, by_name in keys.items():
        for name, key in by_name.items():
            sys.stdout.write(f"{kind.removesuffix('s'):<6} {name:<14} {key[:56]}\n")


def _pinned(root: Path) -> list[str]:
    return [name for name, image in load_project(root).images.items() if image.pins]


def _pins(root: Path, *, filling: bool) -> int:
    pinned = _pinned(root)
    if not pinned:
        raise MisuseError("no image has pins", where="ci/project.yaml images", remedy="write pins: true and the file")
    refused = [f"{line}\n" for image in pinned for line in fill(image, root)] if filling else []
    if filling:
        sys.stdout.write(output(["git", "-C", str(root), "diff", "--no-color", "--", PINS_FILE])[1])
        sys.stderr.writelines(refused)
    pins = read(root)
    for image in pinned:
        missing = unfilled(image, pins)
        state = f"{len(missing)} not read off yet" if missing else "every pin is read off"
        sys.stdout.write(f"{image:<5} {state}\n")
        sys.stdout.writelines(f"  {place}\n    {command}\n" for place, command in missing)
    return Exit.CANNOT_RUN_HERE if refused else Exit.PASS


def _check(image: str, root: Path) -> int:
    """Print every input that the build of an image fetches; it is complete when each says what it must be."""
    images = load_project(root).images
    if image not in images:
        raise MisuseError(f"there is no image {image!r}", where="ci/project.yaml images", remedy=suggest(image, images))
    key, pins = contents(root)[image], read(root) if images[image].pins else None
    inputs = fetched(image, images[image], pins, root)
    for fetched_input in inputs:
        sys.stdout.write(f"{fetched_input.kind:<10} {fetched_input.address:<47} {fetched_input.value or 'MISSING'}\n")
    require_filled(image, pins)
    if unhashed := [fetched_input.address for fetched_input in inputs if not fetched_input.value]:
        raise DeclarationError(
            "a file of requirements has a line without a hash",
            where=", ".join(unhashed),
            remedy="lock it again: docker/lock.sh for docker/, make lock for requirements/",
        )
    sys.stdout.write(f"complete: image {image!r} fetches these {len(inputs)} inputs; its key is {key}\n")
    return Exit.PASS


def _folders(root: Path, name: str) -> tuple[bool, Path, Path]:
    """Whether it is a fork's build, where its store is, and where its findings go."""
    fork = os.environ.get("HILGATE_FORK", "") not in {"", "0"}
    out = Path(os.environ.get("HILGATE_OUT", root / "results" / "images" / name))
    return fork, root / ".images" / ("fork" if fork else "own"), out


def _said(checks: tuple[Check, ...]) -> bool:
    """Print the findings; whether every promise holds."""
    for check in checks:
        sys.stdout.write(f"{check.outcome.value:<5} {check.id:<24} {check.seconds:6.1f} s  {check.message}\n")
    return all(check.outcome is Outcome.PASS for check in checks)


def _build(image: str, root: Path) -> int:
    fork, scratch, out = _folders(root, image)

    def choose(pins: Pins | None) -> Engine:
        if available():
            registry = os.environ.get("HILGATE_REGISTRY", "").rstrip("/")
            return Docker(registry, root / "docker" / "docker-bake.hcl", fork=fork)
        if image != "cpu" or pins is None:
            raise CannotRunHereError(
                "it needs docker with buildx", where=f"image {image}", remedy="build it on the image queue"
            )
        return Buildah(scratch / "store", pins.cpu.suite, root / "docker" / "scripts" / "debootstrap.sh")

    branch, pull = (os.environ.get(f"BUILDKITE_{name}", "") for name in ("BRANCH", "PULL_REQUEST"))
    fresh = pull == "false" and branch == os.environ.get("BUILDKITE_PIPELINE_DEFAULT_BRANCH")
    checks = build(ImageBuild(image, root, out, scratch, inspect(root, None).commit, fresh), choose)
    if not _said(checks):
        return Exit.FAIL
    sys.stdout.write((out / "image.json").read_text(encoding="utf-8"))
    return Exit.PASS


if __name__ == "__main__":
    sys.exit(main())
