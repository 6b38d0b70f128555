# SPDX-License-Identifier: Apache-2.0
"""A test that no step runs is found, whatever leaves it out: a path, an option that ignores, a filter."""

from __future__ import annotations

import json
import shlex

import pytest
from support.plans import AGENTS, git

from hilgate.checks import collected
from hilgate.errors import DeclarationError
from hilgate.model.record import Outcome

TESTS = {
    "tests/a/test_x.py": "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_one(n): ...\n"
    "def test_two(): ...\n",
    "tests/b/test_one.py": "def test_one(): ...\n",
    "tests/b/test_two.py": "def test_one(): ...\n",
    "tests/b/support.py": "def test_one(): ...\n",
    "tools/test_tube.py": "",
}
ONE = {"devices": ["cpu"], "evidence": "junit", "timeout_minutes": 1}


def repository(root, *commands, exempt=""):
    for name, text in TESTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    steps = [{"key": f"s{n}", "label": "s", "command": f"python -m pytest {c}", **ONE} for n, c in enumerate(commands)]
    (root / "ci/areas").mkdir(parents=True)
    (root / "ci/agents.yaml").write_text(AGENTS)
    area = {"area": "s", "title": "S", "why": "w.", "paths": ["*"], "steps": steps}
    (root / "ci/areas/s.yaml").write_text(json.dumps(area))
    table = f'[tool.hilgate.unreached]\n"{exempt}" = "it takes an hour"\n' if exempt else ""
    (root / "pyproject.toml").write_text(table)
    git(root, "init", "-q")
    return root


NOWHERE = "{}: no step of ci/areas runs it; name it in one"
LEFT_OUT = "{}: filters of every step leave it out"


@pytest.mark.parametrize(
    ("commands", "exempt", "lines"),
    [
        (["tests"], "", []),
        (["tests/a", "tests/b"], "", []),
        (["tests/a tests/b/test_one.py"], "", [NOWHERE.format("tests/b/test_two.py")]),
        (["tests --ignore=tests/b/test_two.py"], "", [NOWHERE.format("tests/b/test_two.py")]),
        (["tests --ignore=tests/b/test_two.py"], "tests/b/test_two.py", []),
        (["tests"], "tests/a/test_x.py", ["pyproject.toml: tests/a/test_x.py needs no exemption; remove it"]),
        (["tests -k one"], "", [LEFT_OUT.format("tests/a/test_x.py::test_two")]),
        (["tests -k 'not 1]'"], "", [LEFT_OUT.format("tests/a/test_x.py::test_one[1]")]),
        (["tests -k one", "tests -k two"], "", []),
        (["tests -k one", "tests/a"], "", []),
        (["tests --deselect tests/a/test_x.py::test_two"], "", [LEFT_OUT.format("tests/a/test_x.py::test_two")]),
    ],
)
def test_what_no_step_runs_is_named(commands, exempt, lines, tmp_path):
    *steps, found = collected.checks(repository(tmp_path, *commands, exempt=exempt))
    assert found.id == collected.EVERY_TEST
    assert (found.outcome, found.message.splitlines() if lines else []) == (
        Outcome.FAIL if lines else Outcome.PASS,
        lines,
    )
    assert {one.outcome for one in steps} == {Outcome.PASS}


def test_a_step_that_cannot_be_listed_leaves_it_open(tmp_path):
    root = repository(tmp_path, "tests/a", "tests/b")
    (root / "tests/a/test_x.py").write_text("raise SystemError('broken')\n")
    broken, fine, found = collected.checks(root)
    assert (broken.outcome, fine.outcome, found.outcome) == (Outcome.FAIL, Outcome.PASS, Outcome.DID_NOT_RUN)
    area = root / "ci/areas/s.yaml"
    area.write_text(area.read_text().replace('"timeout_minutes": 1', '"timeout_minutes": 1, "packages": ["no-such"]'))
    assert {one.outcome for one in collected.checks(root)} == {Outcome.DID_NOT_RUN}


def test_an_exemption_needs_a_reason(tmp_path):
    root = repository(tmp_path, "tests")
    (root / "pyproject.toml").write_text('[tool.hilgate.unreached]\n"tests/a/test_x.py" = ""\n')
    with pytest.raises(DeclarationError, match="no reason"):
        collected.exemptions(root)


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("python -m pytest tests -k 'a or b' -x", "python -m pytest tests -x"),
        ("python -m pytest -m device tests --ignore=tests/a", "python -m pytest tests --ignore=tests/a"),
        ("python -m pytest tests --deselect=tests/a.py::t --maxfail=1", "python -m pytest tests --maxfail=1"),
        ("python -m pytest --amdgcn gfx942 tests -kone", "python -m pytest --amdgcn gfx942 tests"),
    ],
)
def test_filters_are_taken_off_a_command(command, left):
    assert collected.without_filters(shlex.split(command)) == shlex.split(left)
