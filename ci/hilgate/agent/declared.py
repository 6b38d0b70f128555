# SPDX-License-Identifier: Apache-2.0
"""Read ci/agents.yaml and ci/project.yaml on an agent's host, whose plain Python has no YAML.

Of YAML this knows the shapes that these facts are written in: a text on its key's line, a list of words, and a mapping
of entries in braces. `hilgate.declare.load` reads them both ways and refuses a file in which the two differ, so
a host can be trusted to see what was reviewed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.agent.host import FULL_SHA
from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping

AGENTS_FILE, PROJECT_FILE = "ci/agents.yaml", "ci/project.yaml"

OLDEST_BASE_FILE = "ci/agent/oldest_base"
"""Full sha of the oldest commit of the default branch that a change may begin at."""

RULESETS = "ci/agent/github"
"""Folder of the rulesets that GitHub holds the repository to, as JSON."""

REPOSITORY = "HILGATE_REPOSITORY"
"""Of the agent: its own clone of the repository that it serves, which no job writes to. Without it, the one that these
modules lie in."""

_ENTRY = re.compile(r"([\w.-]+):\s*\{([^{}]*)\}")
_PAIR = re.compile(r"(\w+):\s*([\w.-]+)")


@dataclass(frozen=True)
class QueuePromise:
    """What each agent of a queue has; 0 GPUs on a cpu queue."""

    queue: str
    gpus: int
    arch: str
    """Its device: `cpu`, or a gfx arch."""
    memory_gib: int
    image: str = ""
    """What its jobs run in; empty on a queue whose jobs run on the host."""


def repository(env: Mapping[str, str]) -> Path:
    """The agent's own clone of the repository that it serves."""
    return Path(env.get(REPOSITORY) or Path(__file__).resolve().parents[3])


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
    lines = [bare for line in text.splitlines() if (bare := line.partition("#")[0].strip())]
    if text and not (len(lines) == 1 and FULL_SHA.fullmatch(lines[0])):
        raise DeclarationError(
            "names no commit", where=str(folder / OLDEST_BASE_FILE), remedy="write one full sha, and comments after '#'"
        )
    return lines[0] if lines else ""


def may_rebase(folder: Path) -> bool:
    """Whether a ruleset of the agent's own clone lets GitHub rebase what it merges, commit by commit.

    Raises:
        DeclarationError: A ruleset cannot be read.
    """
    for path in sorted((folder / RULESETS).glob("*.json")):
        name = path.relative_to(folder).as_posix()
        try:
            rules = [rule.get("parameters", {}) for rule in json.loads(read(folder, name))["rules"]]
            methods = {
                name for rule in rules for name in (rule.get("merge_method"), *rule.get("allowed_merge_methods", ()))
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeclarationError(
                "not a ruleset", where=str(path), remedy="write it as GitHub exports one, with rules and parameters"
            ) from error
        if methods & {"REBASE", "rebase"}:
            return True
    return False


def queues(text: str) -> dict[str, QueuePromise]:
    """The queues of a ci/agents.yaml.

    Raises:
        DeclarationError: An entry is not `name: {device: d, gpus: n, memory_gib: n}`.
    """
    block, found = " ".join(_block(text, "queues")), {}
    for entry in _ENTRY.finditer(block):
        facts = dict(_PAIR.findall(entry[2]))
        with contextlib.suppress(KeyError, ValueError):
            gpus, memory = int(facts["gpus"]), int(facts["memory_gib"])
            found[entry[1]] = QueuePromise(entry[1], gpus, facts["device"], memory, facts.get("image", ""))
            block = block.replace(entry[0], "", 1)
    if rest := block.strip("{}, "):
        raise DeclarationError(
            f"an agent's host, which has no YAML, cannot read {rest[:80]!r}",
            where=f"{AGENTS_FILE} queues",
            remedy="write each queue in one line: name: {device: gfx942, gpus: 1, memory_gib: 192}",
        )
    return found


def words(text: str, key: str) -> tuple[str, ...]:
    """A list of words in a ci/project.yaml; a word alone is a list of one, and no key an empty one."""
    lines = _block(text, key)
    listed = [line.removeprefix("- ") for line in lines]
    if len(lines) == 1 and lines[0].startswith("["):
        listed = lines[0].strip("[]").split(",")
    return tuple(word.strip(" \"'") for word in listed if word.strip())


def _block(text: str, key: str) -> list[str]:
    """What stands behind a key of the document, without comments: on its line, or indented below it."""
    lines = [bare for line in text.splitlines() if (bare := re.sub(r"(?:^|\s)#.*", "", line).rstrip())]
    for number, line in enumerate(lines):
        if line.startswith(f"{key}:"):
            below = itertools.takewhile(lambda other: other[0] in " -", lines[number + 1 :])
            return [part.strip() for part in (line.partition(":")[2], *below) if part.strip()]
    return []
