# SPDX-License-Identifier: Apache-2.0
"""Each distribution has a changelog that its wheel holds, and that names its version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = {"ci/hilgate": "pyproject.toml", "kernels/pagedkv": "kernels/pyproject.toml"}
DISTRIBUTIONS |= {"evals/hileval": "evals/pyproject.toml"}
"""Package -> where its wheel is described."""


def version_of(package):
    (found,) = re.findall(
        r'^__version__ = "([^"]+)"$', (ROOT / package / "__init__.py").read_text("utf-8"), re.MULTILINE
    )
    return found


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_a_changelog_names_the_version_behind_what_is_unreleased(package):
    unreleased, *released = re.findall(r"^## (\S+)", (ROOT / package / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert unreleased == "Unreleased"
    assert released[:1] in ([], [version_of(package)])


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_the_description_of_a_wheel_leads_to_it(package):
    about = tomllib.loads((ROOT / DISTRIBUTIONS[package]).read_text("utf-8"))
    assert f"`{Path(package).name}/CHANGELOG.md`" in about["project"]["readme"]["text"]
    assert f"]({package}/CHANGELOG.md)" in (ROOT / "CHANGELOG.md").read_text("utf-8")
