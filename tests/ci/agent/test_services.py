# SPDX-License-Identifier: Apache-2.0
"""An agent asks Docker, the registry and git before each job, on queues without GPUs too."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from support.loopback import served

from agent_host import services

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.nodes import FakeNode

CPU = {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu"}
DEAD = "echo 'Cannot connect to the Docker daemon' >&2; exit 1"
OFF = "echo 'fatal: unable to access: Could not resolve host' >&2; exit 128"


@pytest.fixture
def registry() -> Iterator[str]:
    """A registry that asks for a password."""

    with served(lambda asked: (401 if asked.path == "/v2/" else 404, "", {})) as address:
        yield f"{address.removeprefix('http://')}/hilgate"


def closed() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}/hilgate"


def test_a_dead_docker_is_this_nodes_and_takes_it_out_for_hours(node: FakeNode) -> None:
    node.env |= CPU
    assert node.preflight() == 0
    node.program("docker", DEAD)
    assert node.preflight() == 75
    problem = "the Docker daemon does not answer: docker ended with status 1: Cannot connect to the Docker daemon"
    assert node.record("before").problems == (problem,)
    (pause,) = [call for call in node.agent_calls() if call.startswith("pause")]
    assert pause.startswith(f"pause --note {problem}")
    assert pause.endswith("--timeout-in-minutes 240")


def test_a_host_without_docker_is_unfit_for_a_queue_with_an_image_and_fit_for_one_without(node: FakeNode) -> None:
    (node.bin / "docker").unlink()
    node.env |= CPU
    assert node.preflight() == 75
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = "amd-gate"
    assert node.preflight() == 0


def test_a_git_server_that_is_silent_takes_the_agent_out_for_minutes_also_on_the_gate(node: FakeNode) -> None:
    """Every node may see the same: hours later there would be none."""
    node.program("git", OFF)
    for queue in ("amd-cpu", "amd-gate", "amd_mi300_8"):
        node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = queue
        assert node.preflight() == 75
        assert "the git server does not answer" in node.record("before").problems[0]
        assert node.agent_calls()[-2].endswith("--timeout-in-minutes 10")


def test_what_is_wrong_with_the_node_itself_is_said_alone(node: FakeNode) -> None:
    node.program("git", OFF)
    node.program("docker", DEAD)
    assert node.preflight() == 75
    assert len(node.record("before").problems) == 1
    assert "--timeout-in-minutes 240" in node.agent_calls()[1]


def test_a_registry_that_answers_anything_is_there_and_a_silent_one_is_not(node: FakeNode, registry: str) -> None:
    node.env |= CPU | {services.REGISTRY: registry}
    assert node.preflight() == 0
    node.env[services.REGISTRY] = closed()
    assert node.preflight() == 75
    name = node.env[services.REGISTRY].partition("/")[0]
    assert node.record("before").problems[0].startswith(f"the registry {name} does not answer: ")
    assert node.agent_calls()[-2].endswith("--timeout-in-minutes 10")


def test_a_daemon_that_is_being_restarted_is_waited_for(node: FakeNode) -> None:
    node.env |= CPU | {"HILGATE_PATIENCE_SECONDS": "20"}
    node.program(
        "docker", f"if [ $1 = version ] && [ ! -e {node.folder}/up ]; then : > {node.folder}/up; {DEAD}; fi; exit 0"
    )
    assert node.preflight() == 0


def test_what_a_killed_job_left_is_ended_before_the_node_is_judged(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "0193a8f2-0000-4000-8000-000000000001"
    node.program(
        "docker",
        f'case "$*" in *--format*hilgate.job*) echo {job} ;;\n'
        f"*label=hilgate.job={job}) [ -e {node.folder}/gone ] || echo c1 ;;\n"
        f"rm*) : > {node.folder}/gone ;; esac; exit 0",
    )
    assert node.preflight() == 0
    assert f"ended container c1 of job {job}\n" in capsys.readouterr().out
