# SPDX-License-Identifier: Apache-2.0
"""A token for the key of an app: what is signed, by which key, and what GitHub is asked for."""

from __future__ import annotations

import base64
import datetime as dt
import json
import subprocess

import pytest

from hilgate.buildkite.api import RemoteError
from hilgate.buildkite.app import PERMISSIONS, connect
from hilgate.errors import CannotRunHereError, MisuseError

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """The private key as a secret holds it, and the file of the public one."""
    folder = tmp_path_factory.mktemp("key")
    secret, public = folder / "key.pem", folder / "public.pem"
    subprocess.run(["openssl", "genrsa", "-out", secret, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", secret, "-pubout", "-out", public], check=True, capture_output=True)
    return secret.read_text(), public


def decoded(part):
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def verified(statement, public, folder):
    """Whether openssl finds the signature to be the key's."""
    signed, _, signature = statement.rpartition(".")
    (folder / "signature").write_bytes(decoded(signature))
    words = ["openssl", "dgst", "-sha256", "-verify", public, "-signature", folder / "signature"]
    return subprocess.run(words, input=signed.encode(), capture_output=True, check=False).returncode == 0


def connected(forge, secret, **env):
    return connect(forge.url, {"HILGATE_GITHUB_TOKEN": secret, **env}, NOW)


def test_a_token_is_used_as_it_is(server, forge):
    assert connected(forge, "ghp_x").token == "ghp_x"
    assert connect(forge.url, {}, NOW).token == ""
    assert server.asked == []


def test_a_key_becomes_a_token_of_an_hour_for_one_repository(server, forge, key, tmp_path):
    secret, public = key
    server.answer(200, {"id": 12, "account": {}}).answer(201, {"token": "ghs_hour", "expires_at": "x"})
    found = connected(forge, secret, HILGATE_GITHUB_APP="Iv23.app")
    assert (found.url, found.token) == (forge.url, "ghs_hour")
    (_, installation, _, _, headers), (method, tokens, _, body, again) = server.asked
    assert (installation, method, tokens) == (
        "/repos/acme/rocm/installation",
        "POST",
        "/app/installations/12/access_tokens",
    )
    assert json.loads(body) == {"repositories": ["rocm"], "permissions": PERMISSIONS}
    statement = headers["Authorization"].removeprefix("Bearer ")
    assert again["Authorization"] == f"Bearer {statement}"
    head, claims, _ = statement.split(".")
    assert json.loads(decoded(head)) == {"alg": "RS256", "typ": "JWT"}
    began = int(NOW.timestamp()) - 60
    assert json.loads(decoded(claims)) == {"iss": "Iv23.app", "iat": began, "exp": began + 540}
    assert verified(statement, public, tmp_path)
    assert not verified(f"{head}.{claims[:-2]}AA.{statement.rpartition('.')[2]}", public, tmp_path)


def test_an_app_that_nobody_names_a_broken_key_and_no_openssl_are_said(server, forge, key, monkeypatch):
    with pytest.raises(MisuseError, match="nobody says of which"):
        connected(forge, key[0])
    broken = "-----BEGIN RSA PRIVATE KEY-----\nc2VjcmV0\n-----END RSA PRIVATE KEY-----\n"
    with pytest.raises(MisuseError, match="does not take the key") as raised:
        connected(forge, broken, HILGATE_GITHUB_APP="1")
    assert "c2VjcmV0" not in str(raised.value)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotRunHereError, match="nothing can be signed here"):
        connected(forge, key[0], HILGATE_GITHUB_APP="1")
    assert server.asked == []


def test_an_app_that_is_not_installed_here_is_said(server, forge, key):
    server.answer(404, {"message": "Not Found"})
    with pytest.raises(RemoteError, match=r"GitHub refuses \(404\)"):
        connected(forge, key[0], HILGATE_GITHUB_APP="1")
