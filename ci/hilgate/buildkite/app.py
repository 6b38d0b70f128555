# SPDX-License-Identifier: Apache-2.0
"""Speak to GitHub as an app: its private key signs a statement, for which GitHub gives a token of an hour.

GitHub takes checks from apps alone, and no token of an app lives long enough to be a secret of a cluster; its key does.
The key reaches `openssl` through a pipe, and no file. (REST API: Apps; JSON Web Token by RS256.)
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter

from hilgate.buildkite.github import TOKEN_VARIABLE, Forge
from hilgate.errors import CannotRunHereError, MisuseError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

APP_VARIABLE = "HILGATE_GITHUB_APP"
"""The app's client id or number, where `HILGATE_GITHUB_TOKEN` is its private key."""
PERMISSIONS = {"checks": "write", "pull_requests": "write", "contents": "read", "metadata": "read"}
"""That the token has, whatever else the app may."""
LIVES_SECONDS = 540
"""Of the statement; GitHub takes ten minutes at most, and its clock may be another."""
SIGNING_SECONDS = 30


class _Installation(BaseModel, frozen=True):
    id: int


class _Token(BaseModel, frozen=True):
    token: str


_INSTALLATION: TypeAdapter[_Installation] = TypeAdapter(_Installation)
_TOKEN: TypeAdapter[_Token] = TypeAdapter(_Token)


def connect(url: str, env: Mapping[str, str], now: dt.datetime) -> Forge:
    """A repository on GitHub, asked with the token of the environment, or as the app whose key stands there instead.

    Args:
        url: From `github.repository_url`.
        env: Has HILGATE_GITHUB_TOKEN; empty for a public repository.
        now: The present.

    Raises:
        MisuseError: There is a key, and the app is not named, or openssl does not take the key.
        CannotRunHereError: There is no openssl here.
        RemoteError: GitHub does not know the app, or not in this repository.
    """
    secret = env.get(TOKEN_VARIABLE, "")
    if not secret.startswith("-----BEGIN "):
        return Forge(url, secret)
    app = env.get(APP_VARIABLE, "")
    if not app:
        raise MisuseError(
            f"{TOKEN_VARIABLE} is the key of an app, and nobody says of which",
            where=APP_VARIABLE,
            remedy="set it to the client id on the app's page",
        )
    as_app = Forge(url, _statement(app, secret, now))
    installed = as_app.ask("/installation", _INSTALLATION).id
    root, _, name = url.partition("/repos/")
    wanted = {"repositories": [name.partition("/")[2]], "permissions": PERMISSIONS}
    everywhere = Forge(root, as_app.token)
    made = everywhere.ask(f"/app/installations/{installed}/access_tokens", _TOKEN, method="POST", body=wanted)
    return Forge(url, made.token)


def _statement(app: str, key: str, now: dt.datetime) -> str:
    """A JSON Web Token that says who asks; a minute old, in case that this clock is ahead."""
    began = int(now.timestamp()) - 60
    claims = {"iss": app, "iat": began, "exp": began + LIVES_SECONDS}
    signed = ".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
    return f"{signed}.{_base64(_signature(signed.encode(), key))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _signature(data: bytes, key: str) -> bytes:
    reading, writing = os.pipe()
    try:
        os.write(writing, key.encode())  # less than a pipe holds
        os.close(writing)
        words = ["openssl", "dgst", "-sha256", "-sign", f"/dev/fd/{reading}"]
        done = subprocess.run(
            words, input=data, capture_output=True, pass_fds=(reading,), timeout=SIGNING_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunHereError(
            f"nothing can be signed here ({type(error).__name__})", where="openssl", remedy="install openssl"
        ) from None
    finally:
        os.close(reading)
    if done.returncode != 0:
        raise MisuseError(
            "openssl does not take the key", where=TOKEN_VARIABLE, remedy="make a new one on the app's page"
        )
    return done.stdout
