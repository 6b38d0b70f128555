# SPDX-License-Identifier: Apache-2.0
"""Who: a branch, a fork. What: code that Python runs in place of the code that is reviewed: bytecode, a binary or an
archive, or a folder beside a module of the same name, of which Python loads one and a reader sees the other.

What must happen: agents plan no change that brings such a file, wherever it lies and however it came there; hygiene is
red; locally, where it may be work in progress, the plan names it and no gate passes without a named approval.
"""

from __future__ import annotations

import json
from importlib import machinery
from typing import TYPE_CHECKING

import pytest
from support.forks import project
from support.plans import git, hilgate

from ci.lint import RULES
from hilgate.declare import protected

if TYPE_CHECKING:
    from pathlib import Path

    from support.forks import Project

PR = ("plan", "--profile", "pr", "--base", "main")
OURS = {
    "src/router.py": "rows = 1\n",
    "src/deep/er/router.py": "rows = 1\n",
    "src/package/__init__.py": "",
    "src/space/part.py": "",
    "src/built.so": "an old binary",
    "ci/protected.yaml": 'rules:\n  - {paths: ["src/**"], flag: nothing}\n',
}

UNREADABLE = [
    *("src/router.pyc", "src/new/__init__.pyc", "src/router.pyo", "src/__pycache__/router.cpython-311.pyc"),
    *("src/__pycache__/notes.txt", "src/router.so", "src/router.abi3.so", "src/libx.so.1.2", "src/router.pyd"),
    *("src/router.cpython-311-x86_64-linux-gnu.so", "src/x.dll", "src/x.dylib", "src/x.egg", "src/x.egg/y.py"),
    *("src/x-1.0-py3-none-any.whl", "src/x.zip", "x.pyz", "tests/deep/er/x.zip", "src/router.PYC", "src/X.Zip"),
]
SAME_NAME = {
    "a package": "src/router/__init__.py",
    "a package below": "src/deep/er/router/__init__.py",
    "a namespace package": "src/router/part.py",
    "a deep namespace package": "src/router/a/b/part.py",
    "a stub of a package": "src/router/__init__.pyi",
    "a folder in other case": "src/Router/__init__.py",
    "a module beside a package": "src/package.py",
    "a module beside a namespace package": "src/space.py",
    "a stub beside a package": "src/package.pyi",
}


@pytest.fixture
def kernels(tmp_path: Path) -> Project:
    """A repository of modules and packages that nothing protects, and a clone that changes it."""
    return project(tmp_path, **OURS)


@pytest.mark.parametrize("fork", ["0", "1"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("src/router/__init__.pyc", "nobody can read it"),
        ("src/router.abi3.so", "nobody can read it"),
        ("src/router/__init__.py", "beside src/router.py"),
        ("src/deep/er/router/a/b/part.py", "beside src/deep/er/router.py"),
        ("src/package.py", "beside src/package/"),
    ],
)
def test_no_agent_plans_it(kernels: Project, name: str, why: str, fork: str) -> None:
    kernels.write(name, "rows = 2\n")
    kernels.commit()
    refused = hilgate(kernels.theirs, *PR, HILGATE_FORK=fork)
    said = "".join(refused.stderr.split())
    assert (refused.returncode, name in said, why.replace(" ", "") in said) == (3, True, True), refused.stderr


@pytest.mark.parametrize("name", UNREADABLE)
def test_code_that_nobody_can_read_is_found(name: str) -> None:
    assert protected.unread_code([name], [*OURS, name]) == {name: "Python loads it, and nobody can read it"}


@pytest.mark.parametrize("suffix", [*machinery.EXTENSION_SUFFIXES, *machinery.BYTECODE_SUFFIXES])
def test_nothing_that_this_python_loads_is_forgotten(suffix: str) -> None:
    assert protected.is_unreadable_code(f"src/router{suffix}")


@pytest.mark.parametrize("kind", SAME_NAME)
def test_a_folder_beside_a_module_is_found(kind: str) -> None:
    name = SAME_NAME[kind]
    (why,) = protected.unread_code([name], [*OURS, name]).values()
    assert "Python loads only one of a module and a folder of the same name" in why
    assert protected.unread_code([name], OURS) == {}, "the change deletes it"
    assert protected.unread_code(["src/other.py"], [*OURS, name]) == {}, "the change does not touch it"


def test_a_renamed_folder_or_module_counts_by_its_new_name(kernels: Project) -> None:
    for old, new in (("src/package", "src/router"), ("src/router.py", "src/space.py"), ("src/built.so", "src/b.so")):
        git(kernels.theirs, "reset", "-q", "--hard", "main")
        git(kernels.theirs, "mv", old, new)
        kernels.commit()
        assert hilgate(kernels.theirs, *PR).returncode == 3, (old, new)


def test_an_edit_of_unreadable_code_is_refused_its_removal_not(kernels: Project) -> None:
    kernels.write("src/built.so", "another binary")
    kernels.commit()
    assert hilgate(kernels.theirs, *PR).returncode == 3
    (kernels.theirs / "src/built.so").unlink()
    kernels.commit()
    assert hilgate(kernels.theirs, *PR).returncode == 0


def test_a_pair_that_was_there_stops_only_changes_that_touch_it(tmp_path: Path) -> None:
    kernels = project(tmp_path, **OURS, **{"src/router/part.py": ""})
    kernels.write("src/other.py", "x = 1\n")
    kernels.commit()
    assert hilgate(kernels.theirs, *PR).returncode == 0
    kernels.write("src/router/__init__.py", "rows = 2\n")
    kernels.commit()
    assert hilgate(kernels.theirs, *PR).returncode == 3


def test_honest_moves_and_folders_of_data_are_planned(kernels: Project) -> None:
    (kernels.theirs / "src/package").mkdir(exist_ok=True)
    git(kernels.theirs, "mv", "src/router.py", "src/package/router.py")
    kernels.write("src/router/__init__.py", "from package import router\n")  # a module becomes a package
    kernels.write("tests/test_a/expected.json", "1\n")  # beside tests/test_a.py, and no code
    kernels.write("src/notes.zipper", "words\n")
    kernels.commit()
    planned = hilgate(kernels.theirs, *PR)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize("name", ["src/router.pyc", "src/router/__init__.py"])
@pytest.mark.parametrize("committed", [True, False])
def test_locally_it_is_named_and_needs_a_person(kernels: Project, name: str, committed: bool) -> None:
    kernels.write(name, "rows = 2\n")
    if committed:
        kernels.commit()
    made = hilgate(kernels.theirs, "plan", "--profile", "gate", "--base", "main", "--json")
    assert made.returncode == 0, made.stderr
    assert name in [one["path"] for one in json.loads(made.stdout)["protected_changes"]]


@pytest.mark.parametrize("name", ["src/router.pyc", "src/router/__init__.py"])
def test_hygiene_is_red(name: str) -> None:
    texts = dict.fromkeys((*(one for one in OURS if one != "src/built.so"), name), "")
    assert any(name in line for line in RULES["no-unread-code"](texts))
