# SPDX-License-Identifier: Apache-2.0
"""Build an image, or find it built: the same content is the same image.

What it leaves in its folder is what the gate reads: `findings.jsonl` with one check for each promise of an image, and
`image.json`, which is written only when every promise holds.
"""

from __future__ import annotations

import fcntl
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hilgate.declare.load import load_project
from hilgate.errors import CannotRunHereError, DeclarationError, MisuseError
from hilgate.images import engines
from hilgate.images.contents import contents, copy_inputs, unfilled, wheel_keys
from hilgate.images.pins import PINS_FILE, bake_variables, labels, read
from hilgate.model.record import Check, Outcome
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hilgate.images.engines import Engine
    from hilgate.images.pins import Pins
    from hilgate.model.declaration import Image


@dataclass(frozen=True)
class ImageBuild:
    """Which image of ci/project.yaml to build, from which commit of the repository at `root`, and where."""

    image: str
    root: Path
    out: Path
    """Folder of the findings, the log and image.json."""
    scratch: Path
    """Folder of the context and the lock; ignored by git."""
    revision: str
    fresh: bool = False
    """Build it although there is one: whoever may push could have made that, and what main builds others run in."""


def build(wanted: ImageBuild, choose: Callable[[Pins | None], Engine]) -> tuple[Check, ...]:
    """Build or find an image with the engine that `choose` takes; the checks say what holds of it.

    Raises:
        MisuseError: There is no such image.
        DeclarationError: A pin is wrong, or empty (with the command that fills it); nothing was fetched.
        CannotRunHereError: This machine cannot build it, or another build is using the store.
    """
    image, out, project = wanted.image, wanted.out, load_project(wanted.root)
    if image not in project.images:
        raise MisuseError(
            f"there is no image {image!r}", where="ci/project.yaml images", remedy=suggest(image, project.images)
        )
    declared, keys = project.images[image], contents(wanted.root)
    pins = read(wanted.root) if declared.pins else None
    require_filled(image, pins)
    content = keys[image]
    expected = labels(image, pins, content, wanted.revision)
    out.mkdir(parents=True, exist_ok=True)
    (out / "image.json").unlink(missing_ok=True)
    engine = choose(pins)
    with locked(wanted.scratch):
        began = time.monotonic()
        digest = None if wanted.fresh else engine.find(image, content)
        reused = digest is not None
        failure = "the build ended well, and there is no image under its content"
        if digest is None:
            try:
                engine.build(_request(wanted, declared, pins, keys, engine, expected))
                digest = engine.find(image, content)
            except engines.BuildFailedError as error:
                failure = str(error)
        how = "found by its content" if reused else "built"
        message = f"{how}: {digest[:19]}" if digest else failure
        checks = [check("built", bool(digest), message, began, {"content": content, "digest": digest or ""})]
        if digest:
            checks.append(_labelled(engine.with_base(expected), engine.labels(image, content)))
            checks.append(sized(*engine.size(image, content), declared.gigabytes))
            if pins:
                checks.append(proven(*engine.run(image, content, ["cat", "/opt/image/proof.json"], {})))
            if declared.check and not reused:
                checks.append(_checked(wanted, declared.check, project.python_path, engine, content))
    if all(check.outcome is Outcome.PASS for check in checks):
        record = {"image": image, "content": content, "digest": digest, "reused": reused}
        (out / "image.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    Check.write_all(out, checks)
    return tuple(checks)


def require_filled(image: str, pins: Pins | None) -> None:
    """Raise DeclarationError where a pin of an image is empty, with the command that reads each."""
    if missing := unfilled(image, pins) if pins else []:
        listed = "\n".join(f"  {place}\n      {command}" for place, command in missing)
        raise DeclarationError(
            f"{len(missing)} pin(s) of image {image!r} are not read off yet; what does it:\n{listed}",
            where=PINS_FILE,
            remedy="run `make lock-image` where there is a network: it runs them and writes the file; review it",
        )


def _request(
    wanted: ImageBuild,
    declared: Image,
    pins: Pins | None,
    keys: dict[str, str],
    engine: Engine,
    expected: dict[str, str],
) -> engines.BuildRequest:
    context = wanted.scratch / f"context-{wanted.image}"
    copy_inputs(wanted.image, declared, wanted.root, context)
    keys_of_wheels = wheel_keys(wanted.root, pins) if pins else {}
    return engines.BuildRequest(
        image=wanted.image,
        content=keys[wanted.image],
        recipe=declared.recipe,
        context=context,
        labels=expected,
        variables=bake_variables(pins, keys, keys_of_wheels, engine.store, wanted.revision) if pins else {},
        log=wanted.out / "build.log",
        **engines.pip_settings(),
    )


def check(name: str, holds: bool, message: str, began: float = 0, labels: dict[str, str] | None = None) -> Check:
    """A promise, and whether it holds; `began` is the monotonic time at which looking for it began."""
    outcome = Outcome.PASS if holds else Outcome.FAIL
    seconds = time.monotonic() - began if began else 0
    return Check(id=name, outcome=outcome, seconds=seconds, message=message, labels=labels or {})


def sized(gigabytes: float, layers: int, budget: float) -> Check:
    """Size of an image, and its budget where it has one."""
    message = f"{gigabytes:.1f} GB in {layers} layers" + (f", at most {budget:g} GB" if budget else "")
    return check("size", not budget or gigabytes <= budget, message)


def _labelled(expected: dict[str, str], actual: dict[str, str]) -> Check:
    # These say who built an image first; one that is found by its content may differ in them.
    first = {"org.opencontainers.image.revision", "org.opencontainers.image.version"}
    wrong = [
        f"{name} is {actual.get(name)!r}, the pins say {value!r}"
        for name, value in sorted(expected.items())
        if name not in first and actual.get(name) != value
    ]
    return check("labels match the pins", not wrong, "; ".join(wrong) or f"{len(expected)} labels")


def proven(status: int, printed: str) -> Check:
    """What prove.py left in an image: exit status and output of reading it."""
    name = "the image proved itself"
    try:
        proof: Any = json.loads(printed) if status == 0 else None
        problems, versions = proof["problems"], proof["versions"]
        patched = {part["name"]: f" (pinned {part['pinned']})" for part in proof.get("base", []) if part["differs"]}
    except (ValueError, TypeError, KeyError):
        return check(name, False, f"/opt/image/proof.json cannot be read: {printed[-300:]}")
    named = ", ".join(
        f"{key} {versions[key]}{patched.get(key, '')}"
        for key in ("torch", "triton", *(key for key in ("rocm", "python") if key in patched))
        if key in versions
    )
    return check(name, not problems, "; ".join(problems) or named)


def _checked(wanted: ImageBuild, command: str, path: tuple[str, ...], engine: Engine, content: str) -> Check:
    results = (wanted.out / "gate").resolve()
    results.mkdir(exist_ok=True)
    words = ["sh", "-c", f"cd /checkout && PYTHONPATH={':'.join(path)} exec {command}"]
    mounts = {str(wanted.root): "/checkout", str(results): "/results:rw"}
    began = time.monotonic()
    status, printed = engine.run(wanted.image, content, words, mounts)
    message = f"{command}: exit status {status}" + ("" if status == 0 else f"\n{printed[-1500:]}")
    return check("the gate passes inside", status == 0, message, began)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time in a store; the kernel drops the lock of a process that is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotRunHereError(
                "another build is using this store", where=str(folder), remedy="wait for it to end"
            ) from error
        yield
