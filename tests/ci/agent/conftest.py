# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the agent's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.agent import agent  # noqa: F401 - a fixture
from support.nodes import FakeNode

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A fit node of 8 MI300X whose programs are the only ones on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "node" / "bin"))
    return FakeNode(tmp_path / "node")
