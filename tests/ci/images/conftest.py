# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the images' tests: the recipe of the ROCm image runs on a laptop, with a tool chain that records."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest
from support.images import ROOT, Chain, checkout

from hilgate.images.contents import contents, wheel_keys
from hilgate.images.pins import Pins, bake_variables, read

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    folder = tmp_path / "chain"
    folder.mkdir()
    return Chain(folder)


@pytest.fixture
def tarball():
    """tarball(path, files): a tarball with one top folder, as forges make them."""

    def make(path: Path, files: dict[str, str]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz") as tar:
            for name, text in files.items():
                info = tarfile.TarInfo(f"top-{'0' * 40}/{name}")
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        return path

    return make


@pytest.fixture
def repository():
    """repository(path, files, submodules): a checkout of one commit, and what a recipe is given about it."""
    return checkout


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture(autouse=True)
def _no_outer_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("HILGATE", "BUILDKITE"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def pins() -> Pins:
    return read(ROOT)


@pytest.fixture(scope="session")
def keys() -> dict[str, str]:
    return contents(ROOT)


@pytest.fixture(scope="session")
def variables(pins: Pins, keys: dict[str, str]) -> dict[str, str]:
    return bake_variables(pins, keys, wheel_keys(ROOT, pins), "registry/hilgate", "c" * 40)
