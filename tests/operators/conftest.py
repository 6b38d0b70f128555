# SPDX-License-Identifier: Apache-2.0
"""Runs of vLLM's ROCm backends, each in a process of its own whose platform is ROCm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from operators.cases import CASES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a session waits for vLLM's import, twice: minutes on a busy machine."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(1200))


def start(arch: str, *cases: str, path: tuple[Path, ...] = ()) -> subprocess.Popen[str]:
    """Start the cases of an arch; `path` stands before everything else that is imported."""
    folders = [*map(str, path), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-m", "operators.drive", "--arch", arch, *cases]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def records(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a run says of its cases."""
    said, complaints = process.communicate()
    assert process.returncode == 0, complaints[-2000:]
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="session")
def results(request) -> dict[str, dict[str, Any]]:
    """Records of the cases that this session asks for, by name; the archs run beside each other."""
    asked = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    every = any(item.name == "test_every_contract_is_reached" for item in request.session.items)
    cases = CASES if every else [case for case in CASES if case in asked]
    archs = sorted({case.arch for case in cases})
    running = [start(arch, *(case.id for case in cases if case.arch == arch)) for arch in archs]
    return {record["case"]: record for process in running for record in records(process)}
