"""Buildkite's REST API: the calls that hilgate makes, and each way in which they fail as one sentence.

The token is sent in one header and written nowhere: not in messages, not in files, not in what `--dry-run` prints.

What Buildkite's REST API says of a build, and where it says it.

Reruns of some models: what is asked of Buildkite, and when such a build may answer for the whole change. Pure.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hilgate.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hilgate.model import Plan, PlannedStep


TOKEN_VARIABLE = "BUILDKITE_API_TOKEN"  # noqa: S105 - the name of a variable
TIMEOUT_SECONDS = 20.0
ATTEMPTS = 5
BACKOFF_SECONDS = 1.0
"""Before the second attempt; doubled before each further one."""

LONGEST_WAIT_SECONDS = 90.0
"""Buildkite's rate limit counts a minute; a longer `Retry-After` is an outage, and waiting in silence helps nobody."""

PER_PAGE = 100
PAGES = 5
"""Pages of builds that are searched for a pull request."""

_TOKEN = re.compile(r"[\x21-\x7e]+")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_T = TypeVar("_T")


class RemoteError(CannotRunHereError):
    """Buildkite could not be reached, or answered with something other than was asked for."""


class _AgainError(Exception):
    """An attempt that may be repeated.

    Attributes:
        problem: What happened.
        wait: Seconds to wait first; None leaves it to the caller.
        done: Whether what was asked for may have been done all the same.
    """

    def __init__(self, problem: str, *, wait: float | None = None, done: bool = True) -> None:
        self.problem, self.wait, self.done = problem, wait, done
        super().__init__(problem)


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

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.token):  # httpx would quote it in the message of its own error
            raise MisuseError(
                f"{TOKEN_VARIABLE} is {'not a token: it has spaces or line breaks' if self.token else 'not set'}",
                remedy="make one under Personal Settings, API Access Tokens, with the scopes read_builds, write_builds",
            )

    def builds(self, **query: str | int) -> list[RemoteBuild]:
        """One page of builds, newest first."""
        parameters = {"per_page": PER_PAGE, "exclude_jobs": "true", "exclude_pipeline": "true", **query}
        return self._repeated(lambda: self._attempt("GET", _BUILDS, params=parameters))

    def find_pull_request(self, number: int, *, branch: str = "", commit: str = "") -> RemoteBuild:
        """The newest build of a pull request that is not itself a rerun.

        Raises:
            MisuseError: There is none among the newest builds.
        """
        query = {name: value for name, value in (("branch", branch), ("commit", commit)) if value}
        for page in range(1, PAGES + 1):
            builds = self.builds(page=page, **query)
            for build in builds:
                pull = build.pull_request
                if pull and pull.id == str(number) and NONCE_KEY not in build.meta_data:
                    return build
            if len(builds) < PER_PAGE:
                break
        among = "".join(f" of {name} {value}" for name, value in query.items())
        raise MisuseError(
            f"pull request {number} has no build{among} among the newest {PAGES * PER_PAGE}",
            where=self.url,
            remedy="look at its checks on GitHub: a build must have been started; --branch narrows the search",
        )

    def create(self, body: Mapping[str, Any], nonce: str) -> RemoteBuild:
        """Start a build, once: where an answer was lost, look for the build before asking again.

        Args:
            body: As documented for "Create a build"; its meta-data holds the nonce under `NONCE_KEY`.
            nonce: Unlike that of any other request.

        Raises:
            MisuseError: The token or the pipeline is wrong.
            RemoteError: Buildkite refuses, or does not answer.
        """
        return self._repeated(
            lambda: self._attempt("POST", _BUILD, json=body),
            find=lambda: next(iter(self.builds(**{f"meta_data[{NONCE_KEY}]": nonce})), None),
        )

    def _repeated(self, attempt: Callable[[], _T], find: Callable[[], _T | None] = lambda: None) -> _T:
        """Its answer, after as many attempts as it takes; `find` looks for what a lost answer may have been about."""
        wait, last = BACKOFF_SECONDS, ""
        for number in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except _AgainError as again:
                last = again.problem
                if number < ATTEMPTS:
                    self.sleep(wait if again.wait is None else again.wait)
                wait *= 2
                if again.done and (found := find()) is not None:
                    return found
        raise RemoteError(
            f"no use: {last}, {ATTEMPTS} times in a row", where=self.url, remedy="try again in a few minutes"
        )

    def _attempt(self, method: str, adapter: TypeAdapter[_T], **arguments: Any) -> _T:
        """One request.

        Raises:
            _AgainError: It may be repeated.
            MisuseError: The token or the pipeline is wrong.
            RemoteError: Buildkite refuses for good.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        try:
            answer = httpx.request(method, self.url, headers=headers, timeout=self.timeout_seconds, **arguments)
        except httpx.TimeoutException:
            raise _AgainError(f"no answer from Buildkite within {self.timeout_seconds:g} seconds") from None
        except httpx.RequestError as error:
            raise _AgainError(f"no connection to Buildkite ({type(error).__name__})") from None
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise _AgainError("Buildkite limits requests (429)", wait=_asked_to_wait(answer), done=False)
        if answer.is_server_error:
            raise _AgainError(f"Buildkite has trouble of its own ({answer.status_code})")
        if not answer.is_success:
            raise self._refusal(answer)
        try:
            data = answer.json()
        except ValueError:
            raise _AgainError("Buildkite's answer is cut off") from None
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
        if answer.status_code in (401, 403):
            return MisuseError(
                f"Buildkite does not accept the token ({answer.status_code})",
                where=TOKEN_VARIABLE,
                remedy="make a token with the scopes read_builds and write_builds, and access to the organization",
            )
        if answer.status_code == httpx.codes.NOT_FOUND:
            return MisuseError(
                "Buildkite knows no such pipeline, or hides it from this token (404)",
                where=self.url,
                remedy="check --organization and --pipeline",
            )
        return RemoteError(
            f"Buildkite refuses ({answer.status_code}): {_message(answer)}",
            where=self.url,
            remedy="correct what it names; nothing was started",
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
    """Buildkite's own sentence, on one line and without control characters."""
    try:
        text = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        text = "without a reason"
    return _UNPRINTABLE.sub(" ", text)[:300]


API = "https://api.buildkite.com"
NONCE_KEY = "hilgate-rerun"
"""Meta-data of a rerun: tells one request from the next, so that an answer that was lost starts no second build."""

IMAGES_KEY = "hilgate-images"
"""Meta-data that a verdict leaves: JSON, image -> digest."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9_-]*")


class _Answer(BaseModel):
    """Part of an answer; Buildkite adds fields whenever it likes."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PullRequest(_Answer):
    """The pull request of a build."""

    id: str | None = None
    base: str | None = None
    repository: str | None = None
    """Where the branch is: another repository than the pipeline's for a fork."""


class RemoteBuild(_Answer):
    """A build, as far as a rerun needs it."""

    number: int
    web_url: str
    commit: str
    branch: str
    state: str
    env: dict[str, Any] = Field(default_factory=dict)
    meta_data: dict[str, Any] = Field(default_factory=dict)
    pull_request: PullRequest | None = None


_BUILDS: TypeAdapter[list[RemoteBuild]] = TypeAdapter(list[RemoteBuild])
_BUILD: TypeAdapter[RemoteBuild] = TypeAdapter(RemoteBuild)


def builds_url(organization: str, pipeline: str, *, api: str = API) -> str:
    """Where a pipeline's builds are listed and created.

    Raises:
        MisuseError: One of the two names is no slug.
    """
    for option, name in (("--organization", organization), ("--pipeline", pipeline)):
        if not _SLUG.fullmatch(name):
            raise MisuseError(
                f"{option} {name!r} is not a slug",
                remedy="take it from the address of the pipeline: buildkite.com/<organization>/<pipeline>",
            )
    return f"{api}/v2/organizations/{organization}/pipelines/{pipeline}/builds"


ALL = "all"
"""Instead of models: the whole plan of the change."""

GATE = ("ci/hilgate/", ".buildkite/")
"""What decides; a change to it needs an approval, and only a full build asks for one."""


def images_of(build: RemoteBuild) -> dict[str, str]:
    """Image -> digest, as the build's verdict left them; empty when it came to none.

    Raises:
        RemoteError: They are there and not readable.
    """
    text = build.meta_data.get(IMAGES_KEY)
    if text is None:
        return {}
    try:
        images = json.loads(text)
    except (TypeError, ValueError):
        images = None
    if not isinstance(images, dict) or not all(isinstance(digest, str) for digest in images.values()):
        raise RemoteError(f"the meta-data {IMAGES_KEY} cannot be read", where=build.web_url, remedy="use a newer build")
    return images


def request(build: RemoteBuild, models: Sequence[str], *, profile: str, nonce: str) -> dict[str, Any]:
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
            remedy="without it a fork could be given secrets; push again, and rerun that build",
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
        "meta_data": {NONCE_KEY: nonce},
    }


def shortfall(required: Plan, plan: Plan) -> tuple[str, ...]:
    """Why a rerun does not answer for the whole change, a sentence each; empty when it does.

    Args:
        required: The `pr` plan of the change, made in the same build.
        plan: What the rerun ran.
    """
    found = [
        f"the {name} is another"
        for name in ("profile", "commit", "dirty", "base", "merge_base", "fork", "images", "changed_files")
        if getattr(required, name) != getattr(plan, name)
    ]
    if required.profile != "pr":
        found.append(f"a plan of profile {required.profile} is not what a merge needs")
    if plan.loosened or required.loosened or any(path.startswith(GATE) for path in required.changed_files):
        found.append("the change edits its own gate, which needs an approval")
    have = {step.key: _what(step) for step in plan.steps}
    found += [f"{step.key} is missing" for step in required.steps if step.key not in have]
    found += [f"{step.key} differs" for step in required.steps if have.get(step.key, _what(step)) != _what(step)]
    return tuple(found)


def _what(step: PlannedStep) -> PlannedStep:
    """A step without the reason for it."""
    return step.model_copy(update={"reason": ""})
