# SPDX-License-Identifier: Apache-2.0
"""Each distribution has a changelog that its wheel holds, in the form of Keep a Changelog, which names its version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = {"ci/hilgate": "pyproject.toml", "kernels/pagedkv": "kernels/pyproject.toml"}
DISTRIBUTIONS |= {"evals/hileval": "evals/pyproject.toml"}
"""Package -> where its wheel is described."""

SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
VERSION = re.compile(r"(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}( \[YANKED\])?")


def version_of(package):
    (found,) = re.findall(
        r'^__version__ = "([^"]+)"$', (ROOT / package / "__init__.py").read_text("utf-8"), re.MULTILINE
    )
    return found


def wrong(text, version):
    """What is wrong with a changelog, a sentence for each."""
    _, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    names = [one.splitlines()[0] for one in versions]
    if names[:1] != ["Unreleased"]:
        return ["Unreleased does not stand first"]
    released = [VERSION.fullmatch(name) for name in names[1:]]
    if not all(released):
        return [f"got the versions {names[1:]}; expected 0.2.0 - 2027-01-31"]
    numbers = [tuple(map(int, found[1].split("."))) for found in released if found]
    said = ["versions do not stand newest first"] if numbers != sorted(set(numbers), reverse=True) else []
    if released and released[0] and released[0][1] != version:
        said.append(f"the newest is {released[0][1]}, and __version__ is {version}")
    for name, body in zip(names, versions, strict=True):
        sections = re.findall(r"^### (.+)$", body, re.MULTILINE)
        if sections != [one for one in SECTIONS if one in sections]:
            said.append(f"{name}: got the sections {sections}; expected some of {SECTIONS}, in this order")
        entries = re.findall(r"^- .*(?:\n  .*)*", body, re.MULTILINE)
        long = [entry for entry in entries if entry.count("\n") > 1 or len(entry) > 300]
        said += [f"{name}: longer than two lines: {entry[:60]}" for entry in long]
        if not entries and name != "Unreleased":
            said.append(f"{name}: has no entry")
    return said


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_a_changelog_has_its_form_and_names_the_version(package):
    assert wrong((ROOT / package / "CHANGELOG.md").read_text("utf-8"), version_of(package)) == []


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_the_description_of_a_wheel_leads_to_it(package):
    about = tomllib.loads((ROOT / DISTRIBUTIONS[package]).read_text("utf-8"))
    assert f"`{Path(package).name}/CHANGELOG.md`" in about["project"]["readme"]["text"]
    assert f"]({package}/CHANGELOG.md)" in (ROOT / "CHANGELOG.md").read_text("utf-8")


GOOD = """# Changelog

## Unreleased

## 0.2.0 - 2027-01-31

### Added

- One

### Fixed

- Two
  lines

## 0.1.0 - 2026-12-01 [YANKED]

### Security

- Three
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("## Unreleased\n\n", ""), "Unreleased does not stand first"),
        (("0.2.0 - 2027-01-31", "0.2.0"), "got the versions"),
        (("## 0.2.0", "## 0.0.2"), "newest first"),
        (("## 0.2.0", "## 0.3.0"), "the newest is 0.3.0, and __version__ is 0.2.0"),
        (("### Added", "### News"), "got the sections"),
        (("### Fixed", "### Added"), "got the sections"),
        (("- Two\n  lines", "- Two\n  more\n  lines"), "longer than two lines"),
        (("- Three", ""), "has no entry"),
    ],
)
def test_a_changelog_of_another_form_is_red(change, words):
    assert wrong(GOOD, "0.2.0") == []
    assert words in " ".join(wrong(GOOD.replace(*change), "0.2.0"))
