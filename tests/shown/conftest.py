# SPDX-License-Identifier: Apache-2.0
"""A checkout for commands that pages show."""

from __future__ import annotations

import shutil

import pytest
from support.plans import git
from support.shown import ROOT

from hilgate.git import tracked_files


@pytest.fixture
def checkout(tmp_path):
    """This working tree as a checkout of its own, of which origin/main is the newest commit."""
    for name in tracked_files(ROOT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    for name in (".venv", ".triton"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to((ROOT / name).resolve())
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "a copy")
    git(tmp_path, "remote", "add", "origin", "https://forge.invalid/hilgate")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(tmp_path, "symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    return tmp_path
