# SPDX-License-Identifier: Apache-2.0
"""Every test file of the repository is named by a step: the file itself, or a folder above it."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from hilgate.declare.load import load
from hilgate.evidence import KINDS
from hilgate.git import tracked_files

ROOT = Path(__file__).parents[3]

FILTERS = ("-k", "-m", "--deselect", "--ignore-glob")
"""Options of pytest that leave tests of a folder out, and may leave out all of a file."""


def unnamed(files, commands):
    """Return the test files that no command names; of a command with a filter only the files that it spells out count.

    What a filter leaves of a folder is known to pytest alone: a new file of it may be left out.
    """
    whole, part = [], []
    for command in commands:
        options = shlex.split(command)[3:]
        (part if any(word.startswith(FILTERS) for word in options) else whole).append(command)
    pairs = [pair for command in part for pair in itertools.pairwise(shlex.split(command))]
    spelt_out = {word.partition("::")[0] for before, word in pairs if before not in {"--deselect", "--ignore"}}
    reaches = KINDS["junit"].reaches
    return [file for file in files if file not in spelt_out and not any(reaches(one, f"{file}::") for one in whole)]


def test_a_step_names_every_test_file():
    files = [name for name in tracked_files(ROOT) if name.startswith("tests/") and Path(name).match("test_*.py")]
    commands = [step.command for _, step in load(ROOT).steps() if step.evidence == "junit"]
    lost = unnamed(files, commands)
    assert not lost, f"no step of ci/areas names {', '.join(sorted(lost))}: name each, or its folder, in a step"


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
        (["tests/a", "tests/b --deselect=tests/b/test_x.py"], ["tests/b/test_x.py"]),
        (["tests/a", "tests/b --deselect tests/b/test_x.py"], ["tests/b/test_x.py"]),
        (["tests/a", "tests/b --ignore tests/b/test_x.py"], ["tests/b/test_x.py"]),
        (["tests/a", "tests/b --ignore-glob=*x.py"], ["tests/b/test_x.py"]),
        ([], ["tests/a/test_x.py", "tests/b/test_x.py"]),
    ],
)
def test_a_file_that_no_step_names_is_found(commands, lost):
    files = ["tests/a/test_x.py", "tests/b/test_x.py"]
    assert unnamed(files, [f"{PYTEST} {command}" for command in commands]) == lost
