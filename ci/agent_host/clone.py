# SPDX-License-Identifier: Apache-2.0
"""Read what the agent's own clone of its repository declares: queues, the project, where a change may begin.

A file is refused whole if it is damaged, too large, too deep, or written with aliases.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_host.host import FULL_SHA
from hilgate.errors import CannotRunHereError, DeclarationError
from hilgate.names import AGENTS_FILE, PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST_BASE_FILE = "ci/agent/oldest_base"
"""Full sha of the oldest commit of the default branch that a change may begin at."""

SETTINGS = "ci/agent"
"""Folder of the settings of Buildkite and GitHub, as Terraform."""

REPOSITORY = "HILGATE_REPOSITORY"
"""Variable of the agent: its own clone of the repository that it serves, which no job writes to. Without it, the clone
is the one that these modules lie in."""

MOST_CHARACTERS = 256 * 1024
"""A longer YAML file is refused; `hilgate.declare.yaml` has the same limit."""

MOST_DEPTH = 10
"""A deeper YAML file is refused. Ours have four levels; PyYAML recurses, and would end in a RecursionError."""


@dataclass(frozen=True)
class QueuePromise:
    """What each agent of a queue has; 0 GPUs on a cpu queue."""

    queue: str
    gpus: int
    arch: str
    """Arch of its device: `cpu`, or a gfx arch, also where the device is a partition (gfx942-cpx)."""
    memory_gib: int
    image: str = ""
    """What its jobs run in; empty on a queue whose jobs run on the host."""
    compute_units: int = 0
    """Compute units of each GPU; 0 where the queue does not say."""


@dataclass(frozen=True)
class Project:
    """What a host must know of ci/project.yaml."""

    forks_may_change: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    selfcheck: str = ""


def repository(env: Mapping[str, str]) -> Path:
    """The agent's own clone of the repository that it serves."""
    return Path(env.get(REPOSITORY) or Path(__file__).resolve().parents[2])


def read(folder: Path, name: str) -> str:
    """A file of declarations; empty where there is none.

    Raises:
        DeclarationError: It cannot be read.
    """
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise DeclarationError(
            f"cannot be read: {error}", where=str(folder / name), remedy=f"see the clone that {REPOSITORY} names"
        ) from error


def oldest_base(folder: Path) -> str:
    """Full sha of the oldest commit that a change may begin at, by the agent's own clone; empty where it names none.

    Raises:
        DeclarationError: The file has something else in it.
    """
    text = read(folder, OLDEST_BASE_FILE)
    lines = list(filter(None, (line.partition("#")[0].strip() for line in text.splitlines())))
    if text and not (len(lines) == 1 and FULL_SHA.fullmatch(lines[0])):
        raise DeclarationError(
            "names no commit", where=str(folder / OLDEST_BASE_FILE), remedy="write one full sha, and comments after '#'"
        )
    return lines[0] if lines else ""


def may_rebase(folder: Path) -> bool:
    """Whether the settings of GitHub in the agent's own clone let it rebase what it merges, commit by commit.

    Raises:
        DeclarationError: A file of settings cannot be read.
    """
    files = sorted((folder / SETTINGS).glob("*.tf"))
    return any('"rebase"' in read(folder, path.relative_to(folder).as_posix()).lower() for path in files)


def queues(text: str) -> dict[str, QueuePromise]:
    """The queues of a ci/agents.yaml.

    Raises:
        DeclarationError: The file is refused, or an entry lacks a fact or has one of another type.
        CannotRunHereError: This host has no PyYAML.
    """
    declared = _mapping(text, AGENTS_FILE).get("queues") or {}
    if not isinstance(declared, dict):
        raise _refused("has no mapping of queues", AGENTS_FILE)
    promises = {}
    for name, facts in declared.items():
        promise = _promise(name, facts)
        if promise is None:
            raise DeclarationError(
                "the queue lacks a fact, or has one of another type",
                where=f"{AGENTS_FILE} queues {name}",
                remedy="write for each queue: name: {device: gfx942, gpus: 1, memory_gib: 192}",
            )
        promises[name] = promise
    return promises


def _promise(name: object, facts: object) -> QueuePromise | None:
    """A queue's promise; None where a fact is missing or of another type."""
    if not isinstance(facts, dict):
        return None
    device, gpus, memory, image = (facts.get(key) for key in ("device", "gpus", "memory_gib", "image"))
    image, units = image or "", facts.get("compute_units", 0)
    # `type`, because YAML's `yes` is a bool, which is an int to Python.
    if type(gpus) is not int or type(memory) is not int or type(units) is not int or min(gpus, memory, units) < 0:
        return None
    if not (isinstance(name, str) and isinstance(device, str) and isinstance(image, str)):
        return None
    return QueuePromise(name, gpus, device.partition("-")[0], memory, image, units)


def project(text: str) -> Project:
    """What a host must know of a ci/project.yaml; defaults where the text is empty.

    Raises:
        DeclarationError: The file is refused, or a key has a value of another type.
        CannotRunHereError: This host has no PyYAML.
    """
    declared = _mapping(text, PROJECT_FILE)
    selfcheck = declared.get("selfcheck") or ""
    lists = {key: declared.get(key) or [] for key in ("forks_may_change", "python_path")}
    for key, value in {**lists, "selfcheck": [selfcheck]}.items():
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise DeclarationError(
                f"{value!r:.80} is not text, or not a list of it", where=f"{PROJECT_FILE} {key}", remedy="quote it"
            )
    return Project(tuple(lists["forks_may_change"]), tuple(lists["python_path"]), selfcheck)


def _mapping(text: str, where: str) -> dict[Any, Any]:
    """What a YAML text says; empty for an empty one.

    Raises:
        DeclarationError: It is not YAML, too large, too deep, or has an alias, which may stand for gigabytes.
        CannotRunHereError: This host has no PyYAML.
    """
    try:
        import yaml  # here, so that clean-up works on a host that lacks it
    except ImportError as error:
        raise CannotRunHereError(
            "this host's Python has no PyYAML", where=sys.executable, remedy="apt-get install python3-yaml"
        ) from error
    depth = 0
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"has more than {MOST_CHARACTERS // 1024} KiB", where)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise _refused(f"has an alias, *{event.anchor}", where)
            if depth > MOST_DEPTH:
                raise _refused(f"has more than {MOST_DEPTH} levels", where)
        mapping = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise _refused(f"is not YAML: {' '.join(str(error).split()):.200}", where) from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise _refused("is not a mapping", where)
    return mapping


def _refused(what: str, where: str) -> DeclarationError:
    return DeclarationError(
        f"the file {what}", where=where, remedy=f"correct it on the default branch, or see the clone of {REPOSITORY}"
    )
