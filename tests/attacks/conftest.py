# SPDX-License-Identifier: Apache-2.0
"""Fixtures of attacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.agent import agent  # noqa: F401 - a fixture
from support.forks import Project, project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def change(tmp_path: Path) -> Project:
    """A small repository and a clone that attacks it."""
    return project(tmp_path)
