# SPDX-License-Identifier: Apache-2.0
"""Put a verdict on GitHub: a check run, and one comment that is changed and never repeated (Checks, Issue comments)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hilgate.buildkite.github import Forge

MARK = "<!-- hilgate: verdict -->"
ANSWER = "<!-- hilgate: answer -->"
"""First lines of the comments, by which they are found again among those of their author."""
PER_PAGE = 100
MOST_PAGES = 30
"""Of comments of a pull request; a longer talk gets a second comment rather than a search without end."""


class _Comment(BaseModel, frozen=True):
    """A comment, as far as is needed here."""

    class _User(BaseModel, frozen=True):
        login: str

    id: int
    body: str | None = None
    user: _User | None = None


class _Made(BaseModel, frozen=True):
    """Something that GitHub made or changed."""

    id: int
    html_url: str = ""


_COMMENTS: TypeAdapter[list[_Comment]] = TypeAdapter(list[_Comment])
_MADE: TypeAdapter[_Made] = TypeAdapter(_Made)


def publish(forge: Forge, pull_request: int, author: str, check: Mapping[str, Any], text: str) -> tuple[str, str]:
    """Make the comment or change the one that `author` made before, and make the check; their addresses.

    The comment comes first: GitHub takes checks from apps alone, and the token may be a person's.

    Raises:
        RemoteError: GitHub does not answer, refuses, or answers something else than it documents.
    """
    comment = write(forge, pull_request, author, MARK, text)
    return comment, forge.ask("/check-runs", _MADE, method="POST", body=check).html_url


def write(forge: Forge, pull_request: int, author: str, mark: str, text: str) -> str:
    """Make a comment that begins with a mark, or change the one that `author` made before; its address.

    Raises:
        RemoteError: GitHub does not answer, refuses, or answers something else than it documents.
    """
    comments, body = f"/issues/{pull_request}/comments", {"body": f"{mark}\n{text}"}
    earlier = _earlier(forge, comments, author, mark)
    if earlier is None:
        return forge.ask(comments, _MADE, method="POST", body=body).html_url
    return forge.ask(f"/issues/comments/{earlier}", _MADE, method="PATCH", body=body).html_url


def _earlier(forge: Forge, comments: str, author: str, mark: str) -> int | None:
    """The comment to change: nobody else's, whatever mark it bears."""
    for page in range(1, MOST_PAGES + 1):
        found = forge.ask(comments, _COMMENTS, {"per_page": PER_PAGE, "page": page})
        for one in found:
            if one.user and one.user.login == author and (one.body or "").startswith(mark):
                return one.id
        if len(found) < PER_PAGE:
            break
    return None
