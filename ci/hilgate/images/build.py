"""Builds an image, or finds it built: the same content is the same image.

What it leaves in its folder is what the gate reads: `findings.jsonl` with one check for each promise of an image, and
`image.json`, which is written only when every promise holds.
"""

from __future__ import annotations

import fcntl
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hilgate.errors import CannotRunHereError, DeclarationError, HilgateError, MisuseError
from hilgate.images.contents import INPUTS, contents, copy_inputs, unfilled, wheel_keys
from hilgate.images.engines import Order
from hilgate.images.pins import PINS_FILE, bake_variables, labels, read
from hilgate.model import Check, Outcome
from hilgate.text import suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hilgate.images.engines import Engine
    from hilgate.images.pins import Pins

UNLIKE: Final = {"org.opencontainers.image.revision", "org.opencontainers.image.version"}
"""Labels that say who built an image first; an image found by its content may differ in them."""

GATE: Final = ("hilgate", "run", "kernels-cache", "--results", "/results")
"""What is run in the CPU image before anybody else may: it needs torch, Triton, pytest and every part of hilgate."""


@dataclass(frozen=True)
class Job:
    """What to build and where.

    Attributes:
        image: cpu or rocm.
        root: The repository.
        out: Folder of the findings and of image.json.
        scratch: Folder for the context and the log; ignored by git.
        revision: Commit of the repository.
        fork: Whether a stranger's change is built.
        conf: pip configuration inside the build and its mounts.
    """

    image: str
    root: Path
    out: Path
    scratch: Path
    revision: str
    fork: bool
    conf: Callable[[], tuple[str, dict[str, str]]]


def build(job: Job, choose: Callable[[Pins], Engine]) -> tuple[Check, ...]:
    """Build or find `job.image`; the checks say what holds of it.

    Raises:
        MisuseError: There is no such image.
        DeclarationError: A pin is wrong or not read off yet.
        CannotRunHereError: This machine cannot build it.
    """
    if job.image not in INPUTS:
        raise MisuseError(
            f"there is no image {job.image!r}",
            where="python -m hilgate.images build",
            remedy=suggest(job.image, INPUTS),
        )
    pins, keys = read(job.root), contents(job.root)
    refuse_unfilled(job.image, pins)
    content = keys[job.image]
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "image.json").unlink(missing_ok=True)
    engine = choose(pins)
    found: list[Check] = []
    with _alone(job.scratch):
        began = time.monotonic()
        digest = engine.find(job.image, content)
        reused = digest is not None
        if digest is None:
            try:
                engine.build(_order(job, pins, keys, engine))
            except HilgateError as error:
                if isinstance(error, CannotRunHereError):
                    raise
                return _left(job, [*found, Check(id="built", outcome=Outcome.FAIL, message=str(error))])
            digest = engine.find(job.image, content) or ""
        seconds = time.monotonic() - began
        found.append(_built(digest, content, seconds, reused=reused))
        if digest:
            expected = engine.truly(labels(job.image, pins, content, job.revision))
            found.append(_labelled(expected, engine.labels(job.image, content)))
            found.append(_proven(*engine.run(job.image, content, ["cat", "/opt/image/proof.json"], {})))
            if job.image == "cpu" and not reused:
                found.append(_gate(job, engine, content))
    if all(check.outcome is Outcome.PASS for check in found):
        record = {"image": job.image, "content": content, "digest": digest, "reused": reused}
        (job.out / "image.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return _left(job, found)


def refuse_unfilled(image: str, pins: Pins) -> None:
    """Stop before anything is fetched while a pin is empty.

    Raises:
        DeclarationError: With the command that fills each of them.
    """
    if missing := unfilled(image, pins):
        listed = "\n".join(f"  {place}\n      {command}" for place, command in missing)
        raise DeclarationError(
            f"{len(missing)} pin(s) of image {image!r} are not read off yet; what does it:\n{listed}",
            where=PINS_FILE,
            remedy="run them where the network allows it, write the answers into the file, have them reviewed",
        )


def _order(job: Job, pins: Pins, keys: dict[str, str], engine: Engine) -> Order:
    context = job.scratch / f"context-{job.image}"
    copy_inputs(job.image, job.root, context)
    conf, mounts = job.conf()
    variables = bake_variables(pins, keys, wheel_keys(job.root, pins), engine.store, job.revision)
    content = keys[job.image]
    return Order(
        image=job.image,
        content=content,
        context=context,
        labels=labels(job.image, pins, content, job.revision),
        variables=variables,
        pip_conf=conf,
        mounts=mounts,
        fork=job.fork,
        log=job.out / "build.log",
    )


def _built(digest: str, content: str, seconds: float, *, reused: bool) -> Check:
    how = "found by its content" if reused else "built"
    return Check(
        id="built",
        outcome=Outcome.PASS if digest else Outcome.FAIL,
        seconds=seconds,
        message=f"{how}: {digest[:19]}" if digest else "the build ended well, and there is no image under its content",
        labels={"content": content, "digest": digest},
    )


def _labelled(expected: dict[str, str], found: dict[str, str]) -> Check:
    wrong = [
        f"{name} is {found.get(name)!r}, the pins say {value!r}"
        for name, value in sorted(expected.items())
        if name not in UNLIKE and found.get(name) != value
    ]
    return Check(
        id="labels match the pins",
        outcome=Outcome.FAIL if wrong else Outcome.PASS,
        message="; ".join(wrong) or f"{len(expected)} labels",
    )


def _proven(status: int, said: str) -> Check:
    name = "the image proved itself"
    try:
        proof: Any = json.loads(said) if status == 0 else None
        problems, versions = proof["problems"], proof["versions"]
    except (ValueError, TypeError, KeyError):
        return Check(id=name, outcome=Outcome.FAIL, message=f"/opt/image/proof.json cannot be read: {said[-300:]}")
    return Check(
        id=name,
        outcome=Outcome.FAIL if problems else Outcome.PASS,
        message="; ".join(problems)
        or ", ".join(f"{key} {versions[key]}" for key in ("torch", "triton") if key in versions),
    )


def _gate(job: Job, engine: Engine, content: str) -> Check:
    results = (job.out / "gate").resolve()
    results.mkdir(exist_ok=True)
    words = ["sh", "-c", f"cd /checkout && PYTHONPATH=ci:kernels:evals exec {' '.join(GATE)}"]
    began = time.monotonic()
    status, said = engine.run(job.image, content, words, {str(job.root): "/checkout", str(results): "/results:rw"})
    return Check(
        id="the gate passes inside",
        outcome=Outcome.PASS if status == 0 else Outcome.FAIL,
        seconds=time.monotonic() - began,
        message=f"{' '.join(GATE[:3])}: exit status {status}" + ("" if status == 0 else f"\n{said[-1500:]}"),
    )


def _left(job: Job, checks: list[Check]) -> tuple[Check, ...]:
    Check.write_all(job.out, checks)
    return tuple(checks)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One build at a time in a store; the kernel drops the lock of a process that is gone.

    Raises:
        CannotRunHereError: Another build has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotRunHereError(
                "another build is using this store", where=str(folder), remedy="wait for it to end"
            ) from error
        yield
