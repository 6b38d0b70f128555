# SPDX-License-Identifier: Apache-2.0
"""What hilgate does with the packages of its core alone: all but Buildkite."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from support.plans import passing, write_repository, writes_findings

from hilgate.cli.buildkite import PACKAGES
from hilgate.errors import Exit

ROOT = Path(__file__).resolve().parents[3]
HIDDEN = tuple(PACKAGES)
WITHOUT = f"""
import importlib.abc, sys
class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(f"hidden: {{name}}", name=name)
sys.meta_path.insert(0, Hides())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {HIDDEN!r} else real(name, *more)
from hilgate.__main__ import main
sys.exit(main())
"""


def without(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """hilgate in a Python that lacks the packages of every extra."""
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("root"), {"a": writes_findings(passing())})


def test_planning_to_bundling_works_without_any_extra(root: Path) -> None:
    commands = ("plan --all", "doctor", "gate --all", "bundle --out e.tar", "verify-bundle e.tar")
    for words in commands:
        done = without(root, *words.split())
        assert done.returncode == Exit.PASS, (words, done.stdout + done.stderr)
    assert (root / "results/report.html").is_file()


@pytest.mark.parametrize(
    "words", [["pipeline"], ["rerun", "all", "--pr", "7", "--dry-run"], ["end-waiting"]], ids=lambda words: words[0]
)
def test_a_command_that_needs_an_extra_names_it(root: Path, words: list[str]) -> None:
    done = without(root, *words)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "buildkite_sdk is not installed" in done.stderr
    assert "to do: pip install 'hilgate[buildkite]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_extra_holds_the_packages_that_its_commands_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split("[=<>]", one)[0] for one in project["optional-dependencies"]["buildkite"]}
    of = packages_distributions()
    assert {of[name][0] for name in PACKAGES} == extra
    core = {re.split("[=<>]", one)[0] for one in project["dependencies"]}
    assert not core & extra
