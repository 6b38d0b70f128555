# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the agent's tests."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from support.agent import Agent
from support.nodes import FakeNode

from hilgate.agent import container

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A fit node of 8 MI300X whose programs are the only ones on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "node" / "bin"))
    return FakeNode(tmp_path / "node")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """A host with a checkout, a plan, a docker and a buildkite-agent; a job may leave nothing behind on it."""
    monkeypatch.setattr(container, "STOP_SECONDS", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield Agent(tmp_path)
    signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.glob("hilgate-*")) == []  # nothing is left, however it ended
