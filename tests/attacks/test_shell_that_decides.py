# SPDX-License-Identifier: Apache-2.0
"""Who: whoever types the command, often without a thought. What: a variable of their shell, or what an installation
left in the tree and git ignores, makes a test that fails pass.

What must happen: steps have what decides how they run from their declaration alone, and the output says once what they
do not get. Metadata that is of nothing installed stops every step. Who has a PYTHONPATH is not stopped by it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.plans import environ, git, hilgate, plan, python, step, write_repository

from hilgate.errors import Exit
from hilgate.plan.machine import installed
from hilgate.run.process import not_passed_on, variables

TESTS = """
import pytest
import mod
from helpers import is_double

@pytest.mark.parametrize("n", range(3))
def test_double(n):
    is_double(mod.double(n), n)
"""
FILES = {
    "lib/mod.py": "def double(n):\n    return 2 * n + (n == 2)\n",
    "lib/helpers.py": "def is_double(found, n):\n    assert found == 2 * n\n",
    "lib/lenient.py": "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n",
    "tests/test_mod.py": TESTS,
    "ci/project.yaml": "python_path: [lib]\n",
}
COMMAND = "python -m pytest tests -q -p no:cacheprovider"


@pytest.fixture
def red(tmp_path: Path) -> Path:
    """A repository whose one test fails for one of three numbers, and whose .gitignore names what tools leave."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = write_repository(tmp_path, {"unit": COMMAND}, unit={"evidence": "junit"})
    (root / ".gitignore").write_text("results/\n*.egg-info/\n*.dist-info/\n__pycache__/\n")
    git(root, "commit", "-qam", "what tools leave")
    return root


SITE = "import pathlib, sys\nsys.modules['mod'] = type(sys)('mod')\nsys.modules['mod'].double = lambda n: 2 * n\n"

SHELLS = {
    "deselects": {"PYTEST_ADDOPTS": "--deselect=tests/test_mod.py::test_double[2]"},
    "keyword": {"PYTEST_ADDOPTS": "-k 'not 2'"},
    "plugin": {"PYTEST_PLUGINS": "lenient"},
    "optimized": {"PYTHONOPTIMIZE": "1"},
    "shadow": {"PYTHONPATH": "{there}"},
    "shadow before ours": {"PYTHONPATH": "{there}" + os.pathsep + environ()["PYTHONPATH"]},
    "home of python's files": {"PYTHONPYCACHEPREFIX": "{there}", "PYTHONOPTIMIZE": "2"},
    "preload": {"LD_PRELOAD": "{there}/none.so", "PYTHONOPTIMIZE": "1"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_variable_does_not_reach_a_step_and_is_named(red: Path, shell: str, tmp_path_factory) -> None:
    there = tmp_path_factory.mktemp("there")
    (there / "sitecustomize.py").write_text(SITE)
    env = {name: value.format(there=there) for name, value in SHELLS[shell].items()}
    done = hilgate(red, "gate", "--all", **env)
    assert done.returncode == Exit.FAIL, done.stdout + done.stderr
    said = re.findall(
        "^steps do not get this shell's (.*): each has what its own `env` declares$", done.stderr, re.MULTILINE
    )
    assert len(said) == 1, done.stderr
    assert set(env) <= set(said[0].split(", "))


def test_what_a_step_declares_it_has_and_nothing_is_said_of_it(tmp_path: Path) -> None:
    shown = "import os, sys; sys.exit(os.environ.get('{name}') != '{value}')"
    checks = {"a": python(shown.format(name="TRITON_INTERPRET", value="1")), "b": python("import elsewhere")}
    (tmp_path / "more").mkdir()
    (tmp_path / "more/elsewhere.py").write_text("")
    root = write_repository(
        tmp_path,
        checks,
        a={"env": {"TRITON_INTERPRET": "1"}},
        b={"env": {"TRITON_INTERPRET": "0", "PYTHONPATH": "more"}},
    )
    done = hilgate(root, "gate", "--all", TRITON_INTERPRET="7", TRITON_CACHE_DIR=str(tmp_path), HF_HOME="/none")
    assert "it left no findings.jsonl" in done.stdout
    assert "exit 1" not in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.startswith("steps do not") and "TRITON" in line]


@pytest.mark.parametrize(
    ("name", "reaches"),
    [
        ("HIP_VISIBLE_DEVICES", True),
        ("HF_HOME", True),
        ("TRITON_CACHE_DIR", True),
        ("VLLM_CACHE_ROOT", True),
        ("LD_LIBRARY_PATH", True),
        ("GIT_SSH_COMMAND", True),
        ("GIT_CONFIG_COUNT", True),
        ("HTTPS_PROXY", True),
        ("HYPOTHESIS_PROFILE", False),
        ("PYTHONSTARTUP", False),
        ("PYTHONWARNINGS", False),
        ("PYTHONBREAKPOINT", False),
        ("TRITON_KERNEL_OVERRIDE", False),
        ("TORCHDYNAMO_DISABLE", False),
        ("VLLM_ATTENTION_BACKEND", False),
        ("PAGEDKV_MLA", False),
        ("GIT_DIR", False),
        ("BASH_ENV", False),
        ("BASH_FUNC_pytest%%", False),
        ("MYPYPATH", False),
    ],
)
def test_which_variables_decide(name: str, reaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = step("a-cpu", "true")
    monkeypatch.setenv(name, "0")
    assert (name in variables(one, plan(one), Path())) is reaches
    assert (name not in not_passed_on([one], plan(one), Path())) is reaches


def test_what_a_pythonpath_adds_is_not_installed_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step would begin, and fail at its import."""
    (tmp_path / "engine-1.0.dist-info").mkdir()
    (tmp_path / "engine-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed(["engine"]) == {"engine": "1.0"}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert installed(["engine"]) == {}


PLUGIN = "[pytest11]\nlenient = lenient\n"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
LEFT = {
    "plugin": ("lib/x.egg-info", {"entry_points.txt": PLUGIN}, "lib/x.egg-info gives lenient as a plugin (pytest11)"),
    "other kind": (
        "lib/x-1.dist-info",
        {"METADATA": METADATA.format(name="x", version=1), "entry_points.txt": PLUGIN},
        "x",
    ),
    "of the root": ("x.egg-info", {"entry_points.txt": PLUGIN}, "x.egg-info gives lenient as a plugin (pytest11)"),
    "other group": (
        "lib/x.egg-info",
        {"entry_points.txt": "[vllm.general_plugins]\nx = mod\n"},
        "gives mod as a plugin (vllm.general_plugins)",
    ),
    "another version": (
        "lib/pytest-1.0.dist-info",
        {"METADATA": METADATA.format(name="pytest", version="1.0")},
        "lib/pytest-1.0.dist-info says that pytest is 1.0",
    ),
}


@pytest.mark.parametrize("way", LEFT)
def test_metadata_ignored_by_git_and_not_installed_stops_steps(red: Path, way: str) -> None:
    folder, files, why = LEFT[way]
    (red / folder).mkdir()
    for name, text in files.items():
        (red / folder / name).write_text(text)
    done = hilgate(red, "gate", "--all")
    assert done.returncode == Exit.NOTHING_RAN, done.stdout
    said = " ".join(done.stdout.split())
    assert why in said
    assert "remove that, or install the project it belongs to" in said


HONEST = {
    "own project": (
        {"lib/pyproject.toml": "[project]\nname = 'toy'\n[project.entry-points.pytest11]\nlenient = 'lenient'\n"},
        "lib/toy.egg-info",
        {"PKG-INFO": METADATA.format(name="toy", version="2"), "entry_points.txt": PLUGIN},
    ),
    "scripts": ({}, "lib/toy.egg-info", {"entry_points.txt": "[console_scripts]\ntoy = mod:double\n"}),
    "nothing but names": ({}, "lib/toy.egg-info", {"PKG-INFO": METADATA.format(name="toy", version="2")}),
    "an empty one": ({}, "lib/pytest.egg-info", {}),
}


@pytest.mark.parametrize("way", HONEST)
def test_a_projects_own_installation_stops_nothing(red: Path, way: str) -> None:
    tracked, folder, files = HONEST[way]
    for name, text in tracked.items():
        (red / name).write_text(text)
    (red / "lib/lenient.py").write_text("")
    (red / folder).mkdir()
    for name, text in files.items():
        (red / folder / name).write_text(text)
    done = hilgate(red, "gate", "--all")
    assert (done.returncode, "test_double[2]" in done.stdout) == (Exit.FAIL, True), done.stdout


def test_how_many_tests_were_deselected_is_said(red: Path) -> None:
    """Those that an option of the command, a setting or a hook of the tree takes out, which pytest need not tell."""
    hook = "def pytest_collection_modifyitems(items):\n    del items[2:]\n"
    ways = (
        (f"{COMMAND} -k 'not 2'", ""),
        (f"{COMMAND} --deselect 'tests/test_mod.py::test_double[2]' -p xdist -n 1", ""),
        (COMMAND, hook),
    )
    for command, conftest in ways:
        (red / "tests/conftest.py").write_text(conftest)
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        write_repository(red, {"unit": command}, unit={"evidence": "junit", "env": alone})
        done = hilgate(red, "gate", "--all")
        assert done.returncode == Exit.PASS, done.stdout
        (step,) = json.loads((red / "results/verdict.json").read_text())["steps"]
        assert step["why"] == "2 passed, 1 deselected"
