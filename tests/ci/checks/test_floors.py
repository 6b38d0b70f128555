# SPDX-License-Identifier: Apache-2.0
"""The minimum of a pytest step against what pytest collects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import write_repository

from hilgate.checks import floors
from hilgate.declare.load import load
from hilgate.errors import DeclarationError
from hilgate.model.record import Outcome

ROOT = Path(__file__).parents[3]

CASES = """
import pytest
@pytest.mark.parametrize("size", range(40))
def test_size(size): ...
@pytest.mark.slow
def test_slow(): ...
class TestMore:
    @pytest.mark.parametrize("word", ["a", "b"])
    def test_word(self, word): ...
"""
CONFTEST = """
import pytest
def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    named = [word.split("::")[0] for word in config.args]
    if any("one" in word for word in named) and any("two" in word for word in named):
        raise pytest.UsageError("one process cannot run both")
"""


def repository(root, **steps):
    """A repository with these steps: (arguments of pytest, minimum, more of the declaration)."""
    for folder in ("one", "two"):
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / f"test_{folder}.py").write_text(CASES)
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    write_repository(root, {"other": "python -c pass"})
    for key, (arguments, minimum, more) in steps.items():
        lines = [
            f"area: {key}",
            "title: Samples",
            "why: Samples work.",
            'paths: ["tests/"]',
            "steps:",
            f"  - key: {key}",
            f"    label: {key}",
            f"    command: python -m pytest {arguments}",
            "    devices: [cpu]",
            "    evidence: junit",
            f"    minimum: {minimum}",
            "    timeout_minutes: 1",
            more,
        ]
        (root / "ci" / "areas" / f"{key}.yaml").write_text("\n".join(lines) + "\n")
    return root


def run(root, *arguments):
    env = os.environ | {"HILGATE_OUT": str(root / "out"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "hilgate.checks.floors", *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    found = root / "out" / "findings.jsonl"
    checks = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    return done, {one["id"]: one for one in checks}


def test_a_minimum_that_fits_passes_and_any_other_is_red(tmp_path):
    root = repository(
        tmp_path,
        fits=("tests/one", 42, ""),
        low=("tests/one", 20, ""),
        high=("tests/one -m slow", 2, ""),
    )
    done, checks = run(root)
    assert done.returncode == 1, done.stderr
    assert {name: one["outcome"] for name, one in checks.items()} == {"fits": "pass", "low": "fail", "high": "fail"}
    assert "promises at least 20 of 43 collected tests, and must promise at least 41" in checks["low"]["message"]
    assert checks["high"]["numbers"] == {"minimum": 2, "collected": 1}


def test_what_is_written_fits_and_is_the_only_change(tmp_path):
    more = "    smoke: {arguments: -k word, minimum: 9, minutes: 0.1}"
    root = repository(tmp_path, low=("tests/one --ignore=tests/two", 20, more))
    area = root / "ci/areas/low.yaml"
    before = area.read_text()
    done, checks = run(root, "--write")
    assert done.returncode == 0, done.stdout
    assert area.read_text() == before.replace("minimum: 20", "minimum: 42").replace("minimum: 9", "minimum: 2")
    assert checks["low (smoke)"]["numbers"] == {"minimum": 2, "collected": 2}


def test_tests_that_one_process_cannot_import_together_have_their_own(tmp_path):
    root = repository(
        tmp_path,
        one=("tests/one/test_one.py::TestMore tests/one/test_one.py::test_slow", 3, ""),
        two=("tests/two -k 'not slow'", 42, ""),
    )
    done, checks = run(root)
    assert done.returncode == 0, done.stdout
    assert {name: one["numbers"]["collected"] for name, one in checks.items()} == {"one": 3, "two": 42}


def test_a_folder_that_is_gone_is_no_pass(tmp_path):
    """pytest refuses a path that is not there, and what an error keeps from being collected has no number."""
    root = repository(tmp_path, gone=("tests/three", 40, ""), broken=("tests/two", 43, ""))
    (root / "tests/two/test_two.py").write_text("import no_such_module\n")
    done, checks = run(root)
    assert done.returncode == 5, done.stdout
    assert {one["outcome"] for one in checks.values()} == {"did not run"}
    assert "not found: " in checks["gone"]["message"]
    assert "exit 2" in checks["broken"]["message"]


@pytest.mark.parametrize("collected", [1, 2, 10, 13, 19, 20, 25, 30, 41, 223, 1946])
def test_what_is_written_is_within_the_slack(collected):
    assert floors.least(collected) <= floors.written(collected) <= collected
    assert floors.least(collected) >= 0.95 * collected


def test_the_declarations_of_this_repository_can_be_rewritten():
    """One number in one place each; numbers alone change."""
    promised = list(floors.floors(load(ROOT)))
    assert {one.step for one in promised} >= {"units-ci", "models-families", "cover-cdna3"}
    for one in promised:
        text = (ROOT / f"ci/areas/{one.area}.yaml").read_text()
        new = floors.rewrite(text, one, 123456)
        changed = [(old, now) for old, now in zip(text.splitlines(), new.splitlines(), strict=True) if old != now]
        ((old, now),) = changed
        assert now == re.sub(rf"minimum: {one.minimum}\b", "minimum: 123456", old)
        assert ("smoke" in old or old.startswith("      ")) is one.smoke


def test_a_step_without_a_minimum_to_write_is_said():
    (one, *_) = floors.floors(load(ROOT))
    with pytest.raises(DeclarationError, match="has no minimum to replace"):
        floors.rewrite(f"steps:\n  - key: {one.step}\n    label: none\n", one, 3)


def test_what_could_not_be_collected_did_not_run():
    (one, *_) = floors.floors(load(ROOT))
    assert one.check("pytest collects nothing", 0.0).outcome is Outcome.DID_NOT_RUN
