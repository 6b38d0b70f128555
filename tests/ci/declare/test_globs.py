# SPDX-License-Identifier: Apache-2.0
"""Globs mean what they mean to pathspec and so to git, and take no time that a name or a glob could choose."""

from __future__ import annotations

import itertools
import random
import time

import pathspec
import pytest
from support.nodes import ROOT

from hilgate.declare import globs
from hilgate.git import tracked_files

PARTS = ["**", "*", "a", "b", "a*", "*b", "*a*b", "?", "[ab]", "[!a]c", "a**b"]
NAMES = ["a", "b", "ab", "aab", "ac", "bc", "c", "a.b", "aXb"]


def test_they_mean_what_they_mean_to_pathspec() -> None:
    chance = random.Random(7)
    paths = ["/".join(chance.choices(NAMES, k=size)) for size in (1, 2, 3, 4) for _ in range(60)]
    for size, lead, end in itertools.product((1, 2, 3), ("", "/"), ("", "/")):
        for _ in range(60):
            parts = chance.choices(PARTS, k=size)
            if all(part == "**" for part in parts):
                continue
            listed = [f"{lead}{'/'.join(parts)}{end}", "!c", "a/*"][: chance.choice([1, 1, 2, 3])]
            known = pathspec.PathSpec.from_lines("gitignore", listed)
            for path in paths:
                assert globs.matches(listed, path) == known.match_file(path), (listed, path)


def test_every_area_claims_what_pathspec_says() -> None:
    import yaml

    names = [name for name in tracked_files(ROOT) if name.isascii()]
    for area in sorted((ROOT / "ci/areas").glob("*.yaml")):
        listed = yaml.safe_load(area.read_text())["paths"]
        known = set(pathspec.PathSpec.from_lines("gitignore", listed).match_files(names))
        assert {name for name in names if globs.matches(listed, name)} == known, area


@pytest.mark.parametrize(
    ("glob", "path", "whole", "below"),
    [
        ("**/*.md", "docs/x.md", True, True),
        ("**/*.md", "x.md/evil.py", False, True),
        ("LICENSE", "docker/LICENSE/apt.sh", False, True),
        ("docs/", "docs/a/b", True, True),
        ("docs/", "docs", False, False),
        ("docs/**", "docs/a/b", True, True),
        ("docs/**", "docs", False, False),
        ("/src", "src", True, True),
        ("/src", "src/a", False, True),
    ],
)
def test_a_file_itself_or_what_lies_below(glob: str, path: str, whole: bool, below: bool) -> None:
    assert globs.matches([glob], path, below=False) is whole
    assert globs.matches([glob], path) is below


@pytest.mark.parametrize("glob", ["", " ", "#a", "a\\*", "/", "!", "x" * 501])
def test_what_is_no_glob_is_refused(glob: str) -> None:
    with pytest.raises(ValueError, match=r"it |a glob has"):
        globs.parse(glob)


SLOW = [
    ("tests/" + "*a" * 24 + "*b", "tests/" + "a" * 120),
    ("*a" * 240 + "*b", "a" * 250),
    ("/".join(["**", "a*a"] * 60) + "/b", "/".join(["aa"] * 1300)),
    ("[" * 500, "a" * 200),
]


@pytest.mark.parametrize(("glob", "path"), SLOW)
def test_no_glob_and_no_name_takes_long(glob: str, path: str) -> None:
    began = time.process_time()
    for _ in range(10):
        assert not globs.matches([glob], path)
    assert time.process_time() - began < 2
