# SPDX-License-Identifier: Apache-2.0
"""What a comment on a pull request may ask for: `/hilgate run NAME...`, `retry`, `cancel`, `explain`.

The comment is read from GitHub by its number, so nobody is believed about who wrote it or what it says. Who may ask
stands in `ci/agent/commands.json` of the default branch as GitHub has it, never in a checkout, which a fork could have
changed. What was asked for is remembered in the builds that it started and in the answer: each comment counts once, and
a pull request rests for a while between two builds. A comment that was changed later does nothing: whoever may write to
the repository can change it. A build that is started so is a rerun as any other: a fork's is a fork's, and a part of a
plan posts no status.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hilgate.buildkite import api
from hilgate.buildkite.publish import ANSWER, MOST_PAGES, PER_PAGE
from hilgate.errors import DeclarationError, MisuseError
from hilgate.text import line, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hilgate.buildkite.github import Forge

FILE = "ci/agent/commands.json"
"""Who may ask, and how long a pull request rests: {"users": ["login"], "cooldown_minutes": 5}."""
COMMENT_KEY = "hilgate-comment"
"""Meta-data of a build: the number of the comment that started it."""
RECENT = dt.timedelta(hours=6)
"""How old a comment may be that is looked for; what an older one asks for nobody waits for any more."""
MOST_NAMES = 10
RECENT_BUILDS = 100
"""Of a pull request's branch that are looked at for what was asked before."""

Verb = Literal["run", "retry", "cancel", "explain"]
USAGE = "write one line: /hilgate run STEP|MODEL ..., /hilgate retry, /hilgate cancel, or /hilgate explain"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_PULL = re.compile(r".*/issues/(\d{1,9})")
_ANSWERED = re.compile(r"<!-- of comment (\d{1,19}) -->")


class NotAllowedError(MisuseError):
    """Who asked may not, or not yet."""


@dataclass(frozen=True)
class Command:
    """What a comment asks for; `names` are of steps and models, for `run` alone."""

    verb: Verb
    names: tuple[str, ...] = ()


def _words(body: str) -> list[str]:
    """The first line of a comment, in words."""
    return (body.splitlines()[0] if body.strip() else "").split(" ")


def parse(body: str) -> Command:
    """The command of a comment that is one: its first line, exactly.

    Raises:
        MisuseError: It begins as a command and is none.
    """
    words = _words(body)
    verb, names = next(iter(words[1:2]), ""), tuple(words[2:])
    known: tuple[Verb, ...] = get_args(Verb)
    if verb not in known:
        raise MisuseError(f"no command is called {line(verb)[:40]!r}", where="the comment", remedy=USAGE)
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None or (verb == "run") is not bool(names) or len(names) > MOST_NAMES:
        what = f"{line(wrong)[:40]!r} is no name" if wrong is not None else f"/hilgate {verb} with {len(names)} names"
        raise MisuseError(what, where="the comment", remedy=f"{USAGE}; at most {MOST_NAMES} names")
    return Command(next(one for one in known if one == verb), names)


class _User(BaseModel, frozen=True):
    login: str


class AskedComment(BaseModel, frozen=True):
    """A comment, as GitHub shows it."""

    id: int
    body: str
    user: _User | None = None
    issue_url: str
    created_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None

    @property
    def login(self) -> str:
        """Who wrote it; empty where GitHub does not say."""
        return self.user.login if self.user else ""

    @property
    def is_command(self) -> bool:
        """Whether it asks for something, rightly or not."""
        return _words(self.body)[0] == "/hilgate"

    @property
    def pull_request(self) -> int:
        """Its number; of an issue that is none Buildkite has no build.

        Raises:
            MisuseError: GitHub's address of it is none.
        """
        found = _PULL.fullmatch(self.issue_url)
        if found is None:
            raise MisuseError("the comment is of no pull request", where=str(self.id), remedy="none needed")
        return int(found[1])


class Allowed(BaseModel, frozen=True, extra="forbid"):
    """`ci/agent/commands.json`."""

    users: tuple[str, ...]
    cooldown_minutes: int = Field(ge=1, le=1440)


class _Repository(BaseModel, frozen=True):
    default_branch: str


class _Contents(BaseModel, frozen=True):
    encoding: Literal["base64"]
    content: str


_LISTED: TypeAdapter[list[AskedComment]] = TypeAdapter(list[AskedComment])
_ASKED: TypeAdapter[AskedComment] = TypeAdapter(AskedComment)
_REPOSITORY: TypeAdapter[_Repository] = TypeAdapter(_Repository)
_CONTENTS: TypeAdapter[_Contents] = TypeAdapter(_Contents)


def read(forge: Forge, comment: int) -> AskedComment:
    """A comment by its number."""
    return forge.ask(f"/issues/comments/{comment}", _ASKED)


def answered_mark(asked: AskedComment) -> str:
    """What an answer ends with, so that its comment is not answered again."""
    return f"<!-- of comment {asked.id} -->"


def unanswered(forge: Forge, author: str, now: dt.datetime) -> list[AskedComment]:
    """Commands of the last hours that are younger than the last one that `author` answered there, oldest first.

    Raises:
        RemoteError: GitHub does not answer, refuses, or there are more comments than anybody writes in that time.
    """
    since = (now - RECENT).strftime("%Y-%m-%dT%H:%M:%SZ")
    found: list[AskedComment] = []
    for page in range(1, MOST_PAGES + 1):
        more = forge.ask("/issues/comments", _LISTED, {"since": since, "per_page": PER_PAGE, "page": page})
        found += more
        if len(more) < PER_PAGE:
            break
    else:
        what = f"over {MOST_PAGES * PER_PAGE} comments within {RECENT.total_seconds() / 3600:g} hours"
        raise api.RemoteError(what, where=forge.url, remedy="answer the one that counts by its number")
    last: dict[str, int] = {}
    for one in found:
        mark = _ANSWERED.search(one.body) if one.login == author and one.body.startswith(ANSWER) else None
        if mark:
            last[one.issue_url] = max(last.get(one.issue_url, 0), int(mark[1]))
    new = (one for one in found if one.is_command and one.id > last.get(one.issue_url, 0))
    return sorted((one for one in new if one.login != author), key=lambda one: one.id)


def allowed(forge: Forge) -> Allowed:
    """Who may ask, as the default branch says on GitHub.

    Raises:
        DeclarationError: The file there is not what it should be.
        RemoteError: It is not there, or GitHub does not answer.
    """
    branch = forge.ask("", _REPOSITORY).default_branch
    found = forge.ask(f"/contents/{FILE}", _CONTENTS, {"ref": branch})
    try:
        return Allowed.model_validate_json(base64.b64decode(found.content))
    except (ValidationError, binascii.Error) as error:
        raise DeclarationError(
            f"not a list of who may ask: {line(str(error))[:200]}",
            where=f"{branch}:{FILE}",
            remedy='write {"users": ["login"], "cooldown_minutes": 5}',
        ) from error


def permit(asked: AskedComment, may: Allowed, builds: Iterable[api.RemoteBuild], now: dt.datetime) -> None:
    """Refuse who may not ask, what was answered before, and a pull request that still rests.

    Raises:
        NotAllowedError: With the reason.
    """
    if asked.login.casefold() not in {user.casefold() for user in may.users}:
        raise NotAllowedError(
            f"{line(asked.login)[:40] or 'nobody'} may not ask", where=FILE, remedy="one of the users there may"
        )
    started = [build for build in builds if COMMENT_KEY in build.meta_data]
    if any(build.meta_data[COMMENT_KEY] == str(asked.id) for build in started):
        raise NotAllowedError("this comment was answered before", where=str(asked.id), remedy="write another one")
    rest = dt.timedelta(minutes=may.cooldown_minutes)
    newest = max((build.created_at for build in started if build.created_at), default=None)
    if newest is not None and now - newest < rest:
        left = -((newest + rest - now) // dt.timedelta(minutes=-1))
        what = f"a build was asked for less than {may.cooldown_minutes} minutes ago"
        raise NotAllowedError(what, where=started[0].web_url, remedy=f"ask again in {left} minutes")


def recent(client: api.Client, pull_request: int, branch: str) -> list[api.RemoteBuild]:
    """The newest builds of a pull request, reruns too."""
    found = itertools.islice(client.builds(branch=branch), RECENT_BUILDS)
    return [build for build in found if build.pull_request and build.pull_request.id == str(pull_request)]


def wanted(command: Command, steps: Iterable[str], models: Iterable[str]) -> list[str]:
    """What a rerun is asked for: models by their names, steps as `step:NAME`, everything for `retry`.

    Raises:
        MisuseError: A name is neither; with the closest that are.
    """
    if command.verb == "retry":
        return [api.ALL]
    steps, models, found = set(steps), set(models), []
    for name in command.names:
        if name not in steps | models:
            raise MisuseError(
                f"no step and no model is called {name!r}", where="the comment", remedy=suggest(name, steps | models)
            )
        found.append(name if name in models else f"{api.STEP}{name}")
    return list(dict.fromkeys(found))


def answer(
    client: api.Client,
    asked: AskedComment,
    may: Allowed,
    command: Command,
    names: tuple[Iterable[str], Iterable[str]],
    now: dt.datetime,
) -> str:
    """Do what was asked for, and say what was done in a sentence.

    `names` are those of all steps and of all models of the default branch.

    Raises:
        NotAllowedError: Who asked may not, or not yet.
        MisuseError: A name is unknown, or the pull request has no build.
        RemoteError: Buildkite refuses, or does not answer.
    """
    pull_request = asked.pull_request
    permit(asked, may, (), now)  # before anything is asked of Buildkite
    if asked.updated_at != asked.created_at:
        what = "this comment was changed after it was written, perhaps by somebody else"
        raise NotAllowedError(what, where=str(asked.id), remedy="write another one")
    last = client.find_pull_request(pull_request)
    builds = recent(client, pull_request, last.branch)
    if command.verb == "explain":
        return f"build {last.number} of {last.commit[:12]} is {last.state}: {last.web_url}"
    if command.verb == "cancel":
        running = [build for build in builds if build.state in api.UNFINISHED]
        for build in running:
            client.cancel(build.number)
        ended = ", ".join(str(build.number) for build in running)
        return f"canceled: {ended}" if running else "nothing of this pull request runs"
    permit(asked, may, builds, now)
    body = api.request(last, wanted(command, *names), profile="pr")
    body["meta_data"] |= {COMMENT_KEY: str(asked.id)}
    started = client.create(body)
    part = "" if command.verb == "retry" else "; a part of the plan never changes the required status"
    return f"build {started.number} was started: {started.web_url}{part}"
