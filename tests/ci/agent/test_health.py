# SPDX-License-Identifier: Apache-2.0
"""A queue's name promises what ci/agents.yaml says of it, and an agent's plain Python is enough to tell."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from hilgate.agent import health
from hilgate.declare.load import load
from hilgate.errors import DeclarationError

ROOT = Path(__file__).parents[3]
QUEUES = load(ROOT).agents.queues
AGENT = sorted((ROOT / "ci/hilgate/agent").glob("*.py"))

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
def test_an_agent_needs_no_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {name for name in modules if name in {"hilgate.agent", "hilgate.errors"} or name.startswith("hilgate.agent.")}
    assert {name.split(".")[0] for name in modules - own} <= sys.stdlib_module_names
