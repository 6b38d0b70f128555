"""What a job on a host reads: its step in `plan.json`, and the digest of the image that another job built.

Plain JSON, because an agent's own Python has no pydantic. Everything that is used is checked here.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hilgate.errors import CannotRunHereError, MisuseError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DOWNLOAD_SECONDS = 300
FROM_BUILD = "HILGATE_IMAGE_FROM_BUILD"
_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BUILD = re.compile(r"[0-9a-f-]{1,36}")


@dataclass(frozen=True)
class Step:
    """What `plan.json` says of one step and of the build.

    Attributes:
        content: sha256 of what the step's image is built from; empty without an image.
        provider: Planned key of the step that builds that image; empty where this plan has none.
    """

    key: str
    commit: str
    fork: bool
    image: str
    content: str
    provider: str
    provides: str
    gpus: int
    network: bool
    secrets: tuple[str, ...]
    timeout_minutes: int


def read_step(path: Path, key: str) -> Step:
    """One step of a plan.

    Raises:
        RecordsError: There is no plan, or it is not one.
        MisuseError: The plan has no such step.
    """
    try:
        plan = json.loads(path.read_bytes())
        steps = {f"{planned['step']['key']}-{planned['device']}": planned for planned in plan["steps"]}
        if key not in steps:
            raise MisuseError(f"the plan has no step {key!r}", where=str(path), remedy="take a key of its steps")
        planned, step = steps[key], steps[key]["step"]
        image = _text(planned.get("image") or "")
        providers = [k for k, other in steps.items() if image and other["step"].get("provides") == image]
        return Step(
            key=_matching(_KEY, key),
            commit=_matching(re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?"), plan["commit"]),
            fork=_flag(plan.get("fork", False)),
            image=_matching(_KEY, image) if image else "",
            content=_matching(re.compile(r"[0-9a-f]{64}"), plan["images"][image]) if image else "",
            provider=_matching(_KEY, providers[0]) if providers else "",
            provides=_text(step.get("provides") or ""),
            gpus=_number(step.get("gpus", 0) if planned["device"] != "cpu" else 0, 0, 8),
            network=_flag(step.get("network", False)),
            secrets=tuple(_text(name) for name in step.get("secrets", ())),
            timeout_minutes=_number(step["timeout_minutes"], 1, 180),
        )
    except OSError as error:
        raise RecordsError(f"no plan: {error.strerror}", where=str(path), remedy="download plan.json first") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordsError(
            f"not a plan: {type(error).__name__}: {error}", where=str(path), remedy="plan the build again"
        ) from error


def image_digest(step: Step, env: Mapping[str, str], folder: Path, *, local: Path) -> str:
    """Digest of the step's image, from the records of the job that built it.

    On an agent these are downloaded into `folder` (or come from the build that `HILGATE_IMAGE_FROM_BUILD` names); at a
    desk they lie in `local`, a folder of job folders.

    Raises:
        CannotRunHereError: No such record arrived, or the image was built from other contents than the plan's.
    """
    provider = step.provider or (f"image-{step.image}-cpu" if env.get(FROM_BUILD) else "")
    if not provider:
        raise CannotRunHereError(
            f"no step of the plan builds the image {step.image!r}",
            where=f"step {step.key}",
            remedy=f"plan the step that provides it, or name a build that has it in {FROM_BUILD}",
        )
    results = download(provider, env, folder) if env.get("BUILDKITE") == "true" else local / provider / "results.jsonl"
    record = _last_image(results, step.image)
    if record.get("content") != step.content:
        raise CannotRunHereError(
            f"the image {step.image!r} was built from other contents than the plan's "
            f"({str(record.get('content'))[:12]!r}, not {step.content[:12]!r})",
            where=str(results),
            remedy="run the step that builds the image again in this build",
        )
    digest = record.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CannotRunHereError(
            f"the record of the image {step.image!r} has no digest", where=str(results), remedy="build it again"
        )
    return digest


def download(key: str, env: Mapping[str, str], folder: Path) -> Path:
    """Fetch the records of another job of this build (of its last retry) and return their path.

    Raises:
        CannotRunHereError: The agent could not.
    """
    name = f"results/jobs/{key}/results.jsonl"
    build = env.get(FROM_BUILD, "")
    if build and not _BUILD.fullmatch(build):
        raise CannotRunHereError(f"{FROM_BUILD}={build!r} names no build", remedy="give its number or its id")
    command = ["buildkite-agent", "artifact", "download", name, f"{folder}/"]
    command += ["--build", build] if build else []
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=DOWNLOAD_SECONDS)
        problem = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        problem = problem if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    path = folder / name
    if problem or not path.is_file():
        raise CannotRunHereError(
            f"the records of {key} did not arrive: {problem or 'nothing was downloaded'}",
            where=name,
            remedy=f"see the job {key} of this build",
        )
    return path


def _last_image(results: Path, image: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for line in results.read_bytes().splitlines():
            record = json.loads(line)
            if record["kind"] == "image" and record["image"] == image:
                found = record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotRunHereError(
            f"the records of the image {image!r} cannot be read: {type(error).__name__}",
            where=str(results),
            remedy="run the step that builds it again",
        ) from error
    if not found:
        raise CannotRunHereError(
            f"the job that builds the image {image!r} left no record of it",
            where=str(results),
            remedy="see why it did not pass",
        )
    return found


def _matching(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} does not match {pattern.pattern}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _number(value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r} is not between {least} and {most}")
    return value
