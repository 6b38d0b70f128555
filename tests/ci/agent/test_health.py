# SPDX-License-Identifier: Apache-2.0
"""A queue's name promises what ci/agents.yaml says of it, and an agent's plain Python is enough to tell."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from agent_host import clone, health
from hilgate.declare.load import load
from hilgate.errors import DeclarationError
from hilgate.names import PROJECT_FILE

ROOT = Path(__file__).parents[3]
QUEUES = load(ROOT).agents.queues
AGENT = [*sorted((ROOT / "ci/agent_host").glob("*.py")), ROOT / "ci/hilgate/names.py", ROOT / "ci/hilgate/errors.py"]

NEWER_THAN_310 = {
    *("tomllib", "StrEnum", "UTC", "ExceptionGroup", "TaskGroup", "assert_never", "Self", "chdir", "batched"),
}
"""Names that Python 3.11 and later have and an agent's 3.10 does not."""


@pytest.mark.parametrize("name", QUEUES)
def test_a_declared_queue_is_known_to_its_agents(name: str) -> None:
    promise, queue = health.promised({health.QUEUE: name}), QUEUES[name]
    assert promise.gpus == queue.gpus
    if queue.gpus:
        assert (promise.arch, promise.memory_gib) == (queue.device, queue.memory_gib)


def test_a_host_reads_the_project_as_the_plan_does() -> None:
    seen, project = clone.project(clone.read(ROOT, PROJECT_FILE)), load(ROOT).project
    assert (seen.forks_may_change, seen.python_path) == (project.forks_may_change, project.python_path)
    assert seen.selfcheck == project.selfcheck != ""


@pytest.mark.parametrize("name", ["amd_mi300_9", "amd_mi300_0", "amd_mi300_8 ", "amd_mi300", "mi300_8", "AMD_MI300_8"])
def test_a_name_that_is_only_like_one_is_unknown(name: str) -> None:
    with pytest.raises(DeclarationError, match="nothing is known of the queue"):
        health.promised({health.QUEUE: name})


@pytest.mark.parametrize("path", AGENT, ids=lambda path: path.name)
def test_an_agents_plain_python_can_run_it(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    assert names & NEWER_THAN_310 == set()


@pytest.mark.parametrize("path", AGENT, ids=lambda path: path.name)
def test_an_agent_needs_no_package_but_yaml(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"agent_host", "hilgate.errors", "hilgate.names", "yaml"}
    others = {name for name in modules - allowed if not name.startswith("agent_host.")}
    assert {name.split(".")[0] for name in others} <= sys.stdlib_module_names
