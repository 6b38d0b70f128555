# SPDX-License-Identifier: Apache-2.0
"""Every test file of the repository is named by a step: the file itself, or a folder above it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hilgate.declare.load import load
from hilgate.evidence import KINDS
from hilgate.git import tracked_files

ROOT = Path(__file__).parents[2]

ELSEWHERE = {"tests/bugs/test_zoo.py": "it plants the bugs that no step plants, and `.ci/run` runs it"}
"""Test file that needs no step -> why."""


def unnamed(files, commands):
    """Return the test files that no command names; one that takes a part (`-k`, `-m`) counts for files it spells out.

    What a filter leaves of a folder is known to pytest alone: a new file of it may be left out.
    """
    whole, part = [], []
    for command in commands:
        (part if {"-k", "-m"} & set(shlex.split(command)[3:]) else whole).append(command)
    spelt_out = {word.partition("::")[0] for command in part for word in shlex.split(command)}
    reaches = KINDS["junit"].reaches
    return [file for file in files if file not in spelt_out and not any(reaches(one, f"{file}::") for one in whole)]


def test_a_step_names_every_test_file():
    files = [name for name in tracked_files(ROOT) if name.startswith("tests/") and Path(name).match("test_*.py")]
    commands = [step.command for _, step in load(ROOT).steps() if step.evidence == "junit"]
    lost = set(unnamed(files, commands)) - ELSEWHERE.keys()
    assert not lost, f"no step of ci/areas names {', '.join(sorted(lost))}: name each, or its folder, in a step"
    assert ELSEWHERE.keys() <= set(files)


PYTEST = "python -m pytest"


@pytest.mark.parametrize(
    ("commands", "lost"),
    [
        (["tests/a", "tests/b"], []),
        (["tests"], []),
        (["tests/a", "tests/b/test_x.py::test_one"], []),
        (["tests/a"], ["tests/b/test_x.py"]),
        (["tests/a tests/b --ignore=tests/b/test_x.py"], ["tests/b/test_x.py"]),
        (["tests/a", "tests/b --ignore=tests/b/test_x.py", "tests/b/test_x.py"], []),
        (["tests/a", "tests/b -k one"], ["tests/b/test_x.py"]),
        (["tests/a", "tests/b/test_x.py -k one"], []),
        (["tests/a", "-m device tests/b"], ["tests/b/test_x.py"]),
        ([], ["tests/a/test_x.py", "tests/b/test_x.py"]),
    ],
)
def test_a_file_that_no_step_names_is_found(commands, lost):
    files = ["tests/a/test_x.py", "tests/b/test_x.py"]
    assert unnamed(files, [f"{PYTEST} {command}" for command in commands]) == lost
