# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that speak to Buildkite: a server on this machine, and a client of it."""

from __future__ import annotations

import pytest
from support.rest import TOKEN, serving

from hilgate.buildkite.api import Client, builds_url


@pytest.fixture
def server():
    with serving() as played:
        yield played


@pytest.fixture
def client(server):
    """Stand-in for Buildkite's API; how long it would have waited stands in `waits`."""
    waits = []
    url = builds_url("acme", "rocm", api=server.address)
    made = Client(url, TOKEN, sleep=waits.append, timeout_seconds=10.0)
    made.waits = waits
    return made
