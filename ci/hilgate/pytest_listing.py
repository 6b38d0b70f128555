# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin that writes which tests began, or with `--collect-only` which there are.

The runner loads it into every step of pytest, and a copy of this file into pytest over the merge base, whose own
hilgate may be another (`hilgate.run.listing`). So it imports nothing of hilgate.

What began counts, not what was collected: a hook of a conftest.py can drop tests at any later moment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "HILGATE_LISTING"
"""Names the file to write: a JSON list of node ids."""

NAME = "hilgate-listing"
"""Name of the plugin that is registered where there is a file to write."""

ALL_SHARDS = "all-shards-"
"""What begins the name of the file beside it, in which a shard lists the tests of all shards."""


class Listing:
    """Collects the ids of a session, and writes them once it has come to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: dict[str, None] = {}
        self.of_all_shards: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take what there is, where nothing will begin."""
        if session.config.option.collectonly:
            self.ids = dict.fromkeys(item.nodeid for item in session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Take a test that begins."""
        self.ids[nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the ids, but not of a session that was stopped early: the others are not gone."""
        if not (session.shouldstop or session.shouldfail):
            self.path.write_text(json.dumps(list(self.ids)), encoding="ascii")
            if session.config.getoption("splits", None):
                self.path.with_name(ALL_SHARDS + self.path.name).write_text(
                    json.dumps(self.of_all_shards), encoding="ascii"
                )


@pytest.hookimpl(trylast=True)  # and so right before pytest-split, whose own hook pytest learns of later
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what all shards together must run."""
    if listing := config.pluginmanager.get_plugin(NAME):
        listing.of_all_shards = [item.nodeid for item in items]


def pytest_configure(config: pytest.Config) -> None:
    """Take the variable away as well, so that no pytest which a test starts writes to the same file."""
    if path := os.environ.pop(VARIABLE, ""):
        config.pluginmanager.register(Listing(Path(path)), NAME)
