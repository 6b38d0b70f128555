"""Fixtures of the agent's tests."""

from __future__ import annotations

import signal

import pytest
from support.agent import Agent

from hilgate.agent import docker


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "STOP_SECONDS", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield Agent(tmp_path)
    signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.glob("hilgate-*")) == []  # nothing is left, however it ended
