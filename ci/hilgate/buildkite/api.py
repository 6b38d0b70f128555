# SPDX-License-Identifier: Apache-2.0
"""Client of Buildkite's API: find builds of a pull request, start reruns of some models, end jobs that wait.

Each way in which a call fails is one sentence. The token is sent in one header and written nowhere: not in messages,
not in files, not in what `--dry-run` prints.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hilgate.errors import CannotRunHereError, MisuseError
from hilgate.model.earlier import Earlier, EarlierBuild, LostTry, Waited
from hilgate.text import line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hilgate.model.declaration import Queue
    from hilgate.model.plan import Plan

TOKEN_VARIABLE = "BUILDKITE_API_TOKEN"  # noqa: S105 - the name of a variable
TIMEOUT_SECONDS = 20.0
GRAPHQL = "https://graphql.buildkite.com/v1"
_CANCEL = "mutation($id: ID!) { jobTypeCommandCancel(input: { id: $id }) { jobTypeCommand { state } } }"
ATTEMPTS = 5
BACKOFF_SECONDS = 1.0
"""Wait before the second attempt; doubled before each further one."""

LONGEST_WAIT_SECONDS = 90.0
"""Buildkite's rate limit counts a minute; a longer `Retry-After` is an outage, and waiting in silence helps nobody."""

PER_PAGE = 100
PAGES = 5
"""Pages of builds among which one of a pull request is looked for."""

MOST_PAGES = 500
"""Most pages of any other list, which is read whole. A list without end is an error, and never half an answer."""

_NO_TOKEN = (
    "Buildkite does not accept the token",
    f"make a {TOKEN_VARIABLE} with the scopes read_builds and write_builds, and access to the organization",
)
REFUSALS = {
    401: _NO_TOKEN,
    403: _NO_TOKEN,
    404: ("Buildkite knows no such pipeline, or hides it from this token", "check --organization and --pipeline"),
}
"""Status -> what it means and what to do."""

_TOKEN = re.compile(r"[\x21-\x7e]+")
_T = TypeVar("_T")


class RemoteError(CannotRunHereError):
    """Buildkite could not be reached, or answered with something other than was asked for."""


@dataclass
class Client:
    """Calls to one pipeline.

    Attributes:
        url: From `builds_url`.
        token: With the scopes read_builds and write_builds.
        sleep: Waits so many seconds between attempts.
        timeout_seconds: For each attempt.
    """

    url: str
    token: str = field(repr=False)
    sleep: Callable[[float], None] = time.sleep
    timeout_seconds: float = TIMEOUT_SECONDS
    graphql: str = GRAPHQL

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.token):  # httpx would quote it in the message of its own error
            raise MisuseError(
                f"{TOKEN_VARIABLE} is {'not a token: it has spaces or line breaks' if self.token else 'not set'}",
                remedy="make one under Personal Settings, API Access Tokens, with the scopes read_builds, write_builds",
            )

    def builds(self, **query: str | Sequence[str]) -> Iterator[RemoteBuild]:
        """All builds, newest first; a page is asked for when it is read.

        Raises:
            RemoteError: The list has no end.
        """
        parameters = {"per_page": PER_PAGE, "exclude_jobs": "true", "exclude_pipeline": "true", **query}
        return _pages(lambda page: self._ask("GET", _BUILDS, params={**parameters, "page": page}), self.url)

    def build(self, number: int) -> RemoteBuild:
        """One build with all of its jobs, those among them in whose place others came.

        Raises:
            MisuseError: The token or the pipeline is wrong.
            RemoteError: Buildkite refuses, or does not answer.
        """
        asking = replace(self, url=f"{self.url}/{number}")
        return asking._ask("GET", _BUILD, params={"include_retried_jobs": "true"})  # noqa: SLF001 - own

    def cancel_job(self, job: str) -> None:
        """End a job by its GraphQL id (scope graphql; `jobTypeCommandCancel`): the build goes on without it.

        Raises:
            MisuseError: The token is wrong.
            RemoteError: Buildkite refuses, or does not answer.
        """
        asking = replace(self, url=self.graphql)
        answer = asking._ask("POST", _CANCELLED, json={"query": _CANCEL, "variables": {"id": job}})  # noqa: SLF001 - own
        if answer.errors:
            what = f"Buildkite refuses to end a job: {line(str(answer.errors[0].get('message', '')))[:200]}"
            raise RemoteError(what, where=self.graphql, remedy=f"give {TOKEN_VARIABLE} the access to GraphQL")

    def find_pull_request(self, number: int, *, branch: str = "", commit: str = "") -> RemoteBuild:
        """The newest build of a pull request that is not itself a rerun.

        Raises:
            MisuseError: There is none among the newest builds.
        """
        query = {name: value for name, value in (("branch", branch), ("commit", commit)) if value}
        for build in itertools.islice(self.builds(**query), PAGES * PER_PAGE):
            pull = build.pull_request
            if pull and pull.id == str(number) and RERUN_KEY not in build.meta_data:
                return build
        among = "".join(f" of {name} {value}" for name, value in query.items())
        raise MisuseError(
            f"pull request {number} has no build{among} among the newest {PAGES * PER_PAGE}",
            where=self.url,
            remedy="look at its checks on GitHub: a build must have been started; --branch narrows the search",
        )

    def create(self, body: Mapping[str, Any]) -> RemoteBuild:
        """Start a build, as documented for "Create a build". An answer that was lost may start a second one.

        Raises:
            MisuseError: The token or the pipeline is wrong.
            RemoteError: Buildkite refuses, or does not answer.
        """
        return self._ask("POST", _BUILD, json=body)

    def _ask(self, method: str, adapter: TypeAdapter[_T], **arguments: Any) -> _T:
        """One request, repeated while an attempt says nothing about it.

        Raises:
            MisuseError: The token or the pipeline is wrong.
            RemoteError: Buildkite refuses, or does not answer.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        problem, pause = "", 0.0
        for attempt in range(ATTEMPTS):
            if attempt:
                self.sleep(pause)
            pause = BACKOFF_SECONDS * 2**attempt
            try:
                answer = httpx.request(method, self.url, headers=headers, timeout=self.timeout_seconds, **arguments)
                if answer.is_success:
                    return self._parsed(answer.json(), adapter)
            except httpx.TimeoutException:
                problem = f"no answer from Buildkite within {self.timeout_seconds:g} seconds"
            except httpx.RequestError as error:
                problem = f"no connection to Buildkite ({type(error).__name__})"
            except ValueError:
                problem = "Buildkite's answer is cut off"
            else:
                if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                    problem, pause = "Buildkite limits requests (429)", _asked_to_wait(answer) or pause
                elif answer.is_server_error:
                    problem = f"Buildkite has trouble of its own ({answer.status_code})"
                else:
                    raise self._refusal(answer)
        raise RemoteError(
            f"no use: {problem}, {ATTEMPTS} times in a row", where=self.url, remedy="try again in a few minutes"
        )

    def _parsed(self, data: object, adapter: TypeAdapter[_T]) -> _T:
        try:
            return adapter.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RemoteError(
                f"Buildkite's answer is not what it documents: {place}: {first['msg']}",
                where=self.url,
                remedy="look at the pipeline's builds before trying again",
            ) from error

    def _refusal(self, answer: httpx.Response) -> MisuseError | RemoteError:
        """What a status of 3xx or 4xx means."""
        status = answer.status_code
        if status in REFUSALS:
            what, remedy = REFUSALS[status]
            return MisuseError(f"{what} ({status})", where=self.url, remedy=remedy)
        what = f"Buildkite refuses ({status}): {_message(answer)}"
        return RemoteError(what, where=self.url, remedy="correct what it names; nothing was started")


def _pages(ask: Callable[[int], list[_T]], url: str) -> Iterator[_T]:
    """What the pages of a list hold, up to one that is not full; each is asked for when it is read."""
    for page in range(1, MOST_PAGES + 1):
        entries = ask(page)
        yield from entries
        if len(entries) < PER_PAGE:
            return
    raise RemoteError(
        f"the list has more than {MOST_PAGES} pages",
        where=url,
        remedy="see Buildkite; nothing was concluded from a part",
    )


def _asked_to_wait(answer: httpx.Response) -> float | None:
    """Seconds of `Retry-After`, or of `RateLimit-Reset`, which is what Buildkite documents.

    Raises:
        RemoteError: It asks for longer than anybody should wait.
    """
    asked = answer.headers.get("Retry-After") or answer.headers.get("RateLimit-Reset") or ""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", asked):
        return None
    if float(asked) > LONGEST_WAIT_SECONDS:
        raise RemoteError(f"Buildkite limits requests for another {asked} seconds (429)", remedy="try again after that")
    return float(asked)


def _message(answer: httpx.Response) -> str:
    """Buildkite's own sentence, on one line."""
    try:
        return line(str(answer.json()["message"]))[:300]
    except (ValueError, KeyError, TypeError):
        return "without a reason"


API = "https://api.buildkite.com"
RERUN_KEY = "hilgate-rerun"
"""Meta-data of a rerun: the number of the build that it repeats a part of."""

IMAGES_KEY = "hilgate-images"
"""Meta-data that a verdict leaves: JSON, image -> digest."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]*")


class PullRequest(BaseModel, frozen=True):
    """The pull request of a build."""

    id: str | None = None
    base: str | None = None
    repository: str | None = None
    """Where the branch is: another repository than the pipeline's for a fork."""


class RemoteJob(BaseModel, frozen=True):
    """A job; `scheduled` is one that waits for an agent, since it became runnable."""

    id: str = ""
    step_key: str | None = None
    retried: bool = False
    """Whether another job took its place."""
    retried_in_job_id: str | None = None
    """Which one."""
    retry_type: str | None = None
    """`automatic` or `manual`, of a job that took another's place."""
    exit_status: int | None = None
    graphql_id: str | None = None
    state: str | None = None
    runnable_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    agent_query_rules: tuple[str, ...] | None = None


class RemoteBuild(BaseModel, frozen=True):
    """A build, as far as is needed here; Buildkite adds fields whenever it likes."""

    number: int
    web_url: str
    commit: str
    branch: str
    state: str
    meta_data: dict[str, Any] = Field(default_factory=dict)
    pull_request: PullRequest | None = None
    jobs: tuple[RemoteJob, ...] = ()


class GraphQLAnswer(BaseModel, frozen=True):
    """What GraphQL answers with 200 whether it did what it was asked for or not."""

    errors: tuple[dict[str, Any], ...] = ()


_CANCELLED: TypeAdapter[GraphQLAnswer] = TypeAdapter(GraphQLAnswer)
_BUILDS: TypeAdapter[list[RemoteBuild]] = TypeAdapter(list[RemoteBuild])
_BUILD: TypeAdapter[RemoteBuild] = TypeAdapter(RemoteBuild)
_IMAGES = TypeAdapter(dict[str, str])


def builds_url(organization: str, pipeline: str, *, api: str = API) -> str:
    """Where a pipeline's builds are listed and created.

    Raises:
        MisuseError: One of the two names is no slug.
    """
    for option, name in (("--organization", organization), ("--pipeline", pipeline)):
        if not name:
            variable = f"HILGATE_{option[2:].upper()}"
            raise MisuseError(f"{option} is missing", remedy=f"give {option} SLUG, or set {variable}")
        if not _SLUG.fullmatch(name):
            raise MisuseError(
                f"{option} {name!r} is not a slug",
                remedy="take it from the address of the pipeline: buildkite.com/<organization>/<pipeline>",
            )
    return f"{api}/v2/organizations/{organization}/pipelines/{pipeline}/builds"


FAILED_KEY = "hilgate-failed"
"""Meta-data that a verdict leaves: JSON, the tree that was tested, and planned key -> ids of checks that failed."""


class LeftFailures(BaseModel, frozen=True):
    """What that meta-data holds."""

    tree: str
    failed: dict[str, tuple[str, ...]]


def earlier(client: Client, number: int, branch: str) -> Earlier:
    """The lost tries of a build's jobs, those that no agent took, and the builds of its branch before it.

    Raises:
        HilgateError: Buildkite does not say so.
    """
    jobs = client.build(number).jobs
    automatic = {job.id for job in jobs if job.retry_type == "automatic"}
    tries = [
        LostTry(
            step=job.step_key,
            job=job.id,
            exit_status=job.exit_status,
            started=job.started_at is not None or job.exit_status is not None,
            by_hand=job.retried_in_job_id not in automatic,
        )
        for job in jobs
        if job.retried and job.step_key
    ]
    waited = [
        Waited(step=job.step_key, minutes=int((job.finished_at - job.runnable_at).total_seconds() / 60))
        for job in jobs
        if job.step_key and not job.retried and not job.started_at and job.runnable_at and job.finished_at
    ]
    newest = itertools.islice(client.builds(branch=branch), PER_PAGE)
    builds = [
        EarlierBuild(number=build.number, commit=build.commit, state=build.state, **_left(build).model_dump())
        for build in newest
        if build.number < number
    ]
    return Earlier(tries=tuple(tries), waited=tuple(waited), builds=tuple(builds))


def _left(build: RemoteBuild) -> LeftFailures:
    """What the verdict of a build left; nothing where there was none, or somebody has written something else there."""
    try:
        return LeftFailures.model_validate_json(build.meta_data.get(FAILED_KEY) or "")
    except ValidationError:
        return LeftFailures(tree="", failed={})


ALL = "all"
"""Instead of models: the whole plan of the change."""

STEP = "step:"
"""How the name of a step begins among models that a rerun is asked for."""

GATE = ("ci/hilgate/", ".buildkite/")
"""What decides; a change to it needs an approval, and only a full build asks for one."""


def images_of(build: RemoteBuild) -> dict[str, str]:
    """Image -> digest, as the build's verdict left them; empty when it came to none.

    Raises:
        RemoteError: They are there and not readable.
    """
    try:
        text = build.meta_data.get(IMAGES_KEY)
        return {} if text is None else _IMAGES.validate_json(text)
    except ValidationError as error:
        what = f"the meta-data {IMAGES_KEY} cannot be read"
        raise RemoteError(what, where=build.web_url, remedy="use a newer build") from error


def request(build: RemoteBuild, models: Sequence[str], *, profile: str) -> dict[str, Any]:
    """The body of "Create a build": these models of this build's commit.

    The pull request goes along whole: from its repository the agents see that it is a fork, and give it no secrets.

    Raises:
        RemoteError: Buildkite does not say which pull request of which repository the build is of.
    """
    pull = build.pull_request
    if pull is None or not (pull.id and pull.base and pull.repository):
        raise RemoteError(
            "Buildkite does not say which repository the pull request comes from",
            where=build.web_url,
            remedy="push again, and rerun that build: without it a fork could be given secrets",
        )
    return {
        "commit": build.commit,
        "branch": build.branch,
        "message": f"Rerun of {', '.join(models)} after build {build.number}",
        "pull_request_id": int(pull.id),
        "pull_request_base_branch": pull.base,
        "pull_request_repository": pull.repository,
        "env": {
            "HILGATE_FLOW": "rerun",
            "HILGATE_MODELS": " ".join(models),
            "HILGATE_PROFILE": profile,
            "HILGATE_IMAGE_FROM_BUILD": str(build.number),
        },
        "meta_data": {RERUN_KEY: str(build.number)},
    }


def shortfall(required: Plan, plan: Plan) -> tuple[str, ...]:
    """Why a rerun does not answer for the whole change, a sentence each; empty when it does.

    `required` is the `pr` plan of the change, made in the same build; `plan` is what the rerun ran.
    """
    reasons = [
        f"the {name} is another"
        for name in ("profile", "commit", "dirty", "base", "merge_base", "fork", "images", "digests", "changed_files")
        if getattr(required, name) != getattr(plan, name)
    ]
    if required.profile != "pr":
        reasons.append(f"a plan of profile {required.profile} is not what a merge needs")
    if (
        plan.protected_changes
        or required.protected_changes
        or any(path.startswith(GATE) for path in required.changed_files)
    ):
        reasons.append("the change edits its own gate, which needs an approval")
    want, have = ({step.key: step.model_copy(update={"reason": ""}) for step in one.steps} for one in (required, plan))
    reasons += [f"{key} is missing" for key in want if key not in have]
    reasons += [f"{key} differs" for key, step in want.items() if have.get(key, step) != step]
    return tuple(reasons)


UNFINISHED = ("scheduled", "running", "failing")
"""States of builds whose jobs may wait."""


def overdue(unfinished: Iterable[RemoteBuild], queues: Mapping[str, Queue], now: dt.datetime) -> list[tuple[str, str]]:
    """(GraphQL id, sentence) of each job of our queues that no agent took within the queue's `wait_minutes`."""
    late_jobs = []
    for build in unfinished:
        for job in build.jobs:
            queue = _queue(job.agent_query_rules)
            if job.state != "scheduled" or not job.runnable_at or not job.graphql_id or queue not in queues:
                continue
            minutes, allowed = (now - job.runnable_at).total_seconds() / 60, queues[queue].wait_minutes
            if minutes > allowed:
                late = f"no agent took a job of {build.web_url} in {minutes:.0f} minutes ({allowed} allowed)"
                late_jobs.append((job.graphql_id, f"{queue}: {late}"))
    return late_jobs


def _queue(rules: Iterable[str] | None) -> str:
    """The queue that the rules of a job name."""
    return next((rule.removeprefix("queue=") for rule in rules or () if rule.startswith("queue=")), "")
