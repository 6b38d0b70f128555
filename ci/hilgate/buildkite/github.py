# SPDX-License-Identifier: Apache-2.0
"""GitHub's settings of the repository against those that it declares: `ci/agent/github/*.json`, a ruleset each.

A verdict that nobody must wait for decides nothing, and a status that anybody may post is no verdict. GitHub alone can
hold a branch to them, so what it answers for a branch (REST API, "Rules") is compared with what is declared here.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from hilgate.buildkite.api import RemoteError
from hilgate.errors import DeclarationError, MisuseError
from hilgate.names import RULESETS, repository
from hilgate.text import line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

FOLDER = RULESETS
TOKEN_VARIABLE = "HILGATE_GITHUB_TOKEN"  # noqa: S105 - the name of a variable
API = "https://api.github.com"
VERSION = "2022-11-28"
TIMEOUT_SECONDS = 20.0
CONNECTIONS = 3
PER_PAGE = 100

MERGE_METHODS = "allowed_merge_methods"

UNKNOWN_ID = 0
"""In a file, for the id of an app that nobody has filled in yet."""

T = TypeVar("T")


class Actor(BaseModel, frozen=True):
    """Somebody who need not heed a ruleset; of several keys those that say who it is."""

    actor_type: str
    actor_id: int | None = None
    bypass_mode: str = "always"


class Names(BaseModel, frozen=True):
    """Patterns of refs."""

    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()


class Conditions(BaseModel, frozen=True):
    """Where a ruleset holds."""

    ref_name: Names


class BranchRule(BaseModel, frozen=True):
    """One rule; GitHub names the ruleset of those that it lists for a branch."""

    type: str
    parameters: dict[str, Any] = {}
    ruleset_id: int | None = None


class DeclaredSettings(BaseModel, frozen=True, extra="forbid"):
    """A file of `ci/agent/github`, in the words in which GitHub imports a ruleset."""

    name: str
    target: str
    enforcement: str
    bypass_actors: tuple[Actor, ...]
    conditions: Conditions
    rules: tuple[BranchRule, ...]


class Ruleset(BaseModel, frozen=True):
    """A ruleset as GitHub has it; who may bypass it is shown to those alone who may change it."""

    name: str
    bypass_actors: tuple[Actor, ...] | None = None


_RULES: TypeAdapter[list[BranchRule]] = TypeAdapter(list[BranchRule])
_RULESET: TypeAdapter[Ruleset] = TypeAdapter(Ruleset)


@dataclass
class Findings:
    """What differs, and what could not be seen; a sentence each."""

    differs: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def load(root: Path) -> dict[str, DeclaredSettings]:
    """File -> the ruleset that it declares; empty where the folder is missing.

    Raises:
        DeclarationError: A file is not a ruleset.
    """
    found = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found[f"{FOLDER}/{path.name}"] = DeclaredSettings.model_validate(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise DeclarationError(
                f"not a ruleset: {line(str(error))[:300]}",
                where=f"{FOLDER}/{path.name}",
                remedy="write it as GitHub exports one: name, target, enforcement, bypass_actors, conditions, rules",
            ) from error
    return found


@dataclass
class Forge:
    """Questions about one repository.

    Attributes:
        url: From `repository_url`.
        token: Empty for a public repository.
    """

    url: str
    token: str = field(default="", repr=False)

    def rules(self, branch: str) -> list[BranchRule]:
        """The rules that hold for a branch, whoever made them; it need not exist."""
        found: list[BranchRule] = []
        while len(found) % PER_PAGE == 0:
            page = len(found) // PER_PAGE + 1
            query = {"per_page": PER_PAGE, "page": page}
            more = self.ask(f"/rules/branches/{quote(branch, safe='')}", _RULES, query)
            found += more
            if len(more) < PER_PAGE:
                break
        return found

    def ruleset(self, number: int) -> Ruleset:
        """A ruleset, of the repository or of its organization."""
        return self.ask(f"/rulesets/{number}", _RULESET, {"includes_parents": "true"})

    def ask(
        self,
        path: str,
        adapter: TypeAdapter[T],
        query: Mapping[str, str | int] | None = None,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
    ) -> T:
        """One question, or with a `body` one change.

        Raises:
            RemoteError: GitHub does not answer, refuses, or answers something else than it documents.
        """
        headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": VERSION}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        where = f"{self.url}{path}"
        try:
            answer = _sent(method, where, params=dict(query or {}), headers=headers, json=body)
            if not answer.is_success:
                needed = "Metadata: read" if method == "GET" else "Checks and Pull requests: write"
                remedy = f"check the repository's name, and {TOKEN_VARIABLE} (permission {needed})"
                raise RemoteError(f"GitHub refuses ({answer.status_code})", where=where, remedy=remedy)
            return adapter.validate_python(answer.json())
        except httpx.HTTPError as error:
            what = f"no answer from GitHub ({type(error).__name__})"
            raise RemoteError(what, where=where, remedy="try again in a few minutes") from error
        except (ValidationError, ValueError) as error:
            what = f"GitHub's answer is not what it documents: {line(str(error))[:200]}"
            raise RemoteError(what, where=where, remedy="look at the repository's rules by hand") from error


def _sent(method: str, where: str, **arguments: Any) -> httpx.Response:
    """The answer; a connection that does not come about is tried again, as nothing was sent then."""
    for _ in range(CONNECTIONS - 1):
        with contextlib.suppress(httpx.ConnectError):
            return httpx.request(method, where, timeout=TIMEOUT_SECONDS, **arguments)
    return httpx.request(method, where, timeout=TIMEOUT_SECONDS, **arguments)


def repository_url(address: str) -> str:
    """Where GitHub answers for a repository, from its address or as OWNER/NAME.

    Raises:
        MisuseError: It is no repository's.
    """
    short = address.count("/") == 1 and ":" not in address
    found = repository(f"https://github.com/{address}" if short else address)
    if found is None or found.count("/") != 2:
        raise MisuseError(
            f"{address!r} names no repository on GitHub",
            where="--repository, or BUILDKITE_REPO",
            remedy="give --repository OWNER/NAME",
        )
    host, _, name = found.partition("/")
    return f"{API if host == 'github.com' else f'https://{host}/api/v3'}/repos/{name}"


def compare(declared: Mapping[str, DeclaredSettings], client: Forge, default: str) -> Findings:
    """What of the declared rulesets GitHub does not hold the repository to.

    Args:
        declared: From `load`.
        client: Who asks.
        default: The default branch.

    Raises:
        RemoteError: GitHub does not say.
    """
    found = Findings()
    for file, ruleset in declared.items():
        found.differs += [f"{file}: {problem}" for problem in (*_unfilled(ruleset), *rebasing(ruleset))]
        for pattern in ruleset.conditions.ref_name.include:
            branch = _example(pattern, default)
            rules = client.rules(branch)
            for wanted in ruleset.rules:
                _compare_rule(wanted, ruleset, [one for one in rules if one.type == wanted.type], branch, client, found)
    return Findings([*dict.fromkeys(found.differs)], [*dict.fromkeys(found.unseen)])


def _compare_rule(
    wanted: BranchRule,
    ruleset: DeclaredSettings,
    there: Iterable[BranchRule],
    branch: str,
    client: Forge,
    found: Findings,
) -> None:
    """Add what is wrong about one rule of a branch, unless one of those that are there is as declared."""
    problems: list[str] = []
    for rule in there:
        wrong = [*_different(wanted.parameters, rule.parameters)]
        has = client.ruleset(rule.ruleset_id) if rule.ruleset_id is not None and not wrong else None
        if has is not None and has.bypass_actors is None:
            found.unseen.append(f"GitHub does not show this token who may bypass the ruleset {line(has.name)!r}")
        elif has is not None and (more := {*(has.bypass_actors or ())} - {*ruleset.bypass_actors}):
            who = ", ".join(sorted(f"{one.actor_type} {one.actor_id}" for one in more))
            wrong = [f"it may be bypassed by {line(who)}"]
        if not wrong:
            return
        problems += wrong
    why = "; ".join(problems) or "there is no such rule"
    found.differs.append(f"GitHub does not hold {branch} to {wanted.type}: {why}")


def _different(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Parameters that are not as declared; of required checks there may be more, of ways to merge fewer."""
    for name, value in wanted.items():
        has = there.get(name)
        if name == MERGE_METHODS and isinstance(has, list):
            if more := [one for one in has if one not in value]:
                yield f"{name} has {line(json.dumps(more[0]))[:100]}"
        elif isinstance(value, list) and isinstance(has, list):
            missing = [one for one in value if not any(_covers(one, other) for other in has)]
            if missing:
                yield f"{name} lacks {json.dumps(missing[0])}"
        elif has != value:
            yield f"{name} is {line(json.dumps(has))[:100]} and not {json.dumps(value)}"


def _covers(wanted: object, there: object) -> bool:
    if isinstance(wanted, dict) and isinstance(there, dict):
        return all(there.get(key) == value for key, value in wanted.items())
    return wanted == there


def _unfilled(ruleset: DeclaredSettings) -> Iterator[str]:
    """Ids of apps that nobody has filled in."""
    for rule in ruleset.rules:
        for check in rule.parameters.get("required_status_checks", ()):
            if check.get("integration_id", UNKNOWN_ID) == UNKNOWN_ID:
                yield (
                    f"{check.get('context')} may be posted by anybody who can write to the repository: put the id of "
                    "Buildkite's app into integration_id (gh api /apps/buildkite --jq .id)"
                )
    if any(actor.actor_id == UNKNOWN_ID for actor in ruleset.bypass_actors):
        yield "put the id of the app that makes these branches into actor_id of bypass_actors"


def rebasing(ruleset: DeclaredSettings) -> Iterator[str]:
    """Ways to merge that put single commits of a change on the branch, which no build has seen as its head."""
    why = "puts commits on the branch that no build has seen: take squash or merge"
    for rule in ruleset.rules:
        if rule.type == "merge_queue" and rule.parameters.get("merge_method") == "REBASE":
            yield f"merge_method REBASE {why}"
        if rule.type == "pull_request" and "rebase" in rule.parameters.get(MERGE_METHODS, ["rebase"]):
            yield f"{MERGE_METHODS} of pull_request allows rebase, which {why}"


def _example(pattern: str, default: str) -> str:
    """A branch that a pattern of refs is about."""
    if pattern == "~DEFAULT_BRANCH":
        return default
    name = pattern.removeprefix("refs/heads/").replace("**/*", f"{default}/pr-1")
    return name.replace("*", "x") if not pattern.startswith("~") else "any"
