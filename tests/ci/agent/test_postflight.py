"""After a job what it left is ended first, then the node is looked at, and nothing counts twice against the next."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.nodes import JOB, QUIET, ToyNode

from hilgate.agent import postflight, preflight
from hilgate.errors import DeclarationError
from hilgate.model import Health

if TYPE_CHECKING:
    from pathlib import Path

FAULT = "amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:3)"
HANG = "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ToyNode:
    monkeypatch.setenv("PATH", str(tmp_path / "node" / "bin"))
    return ToyNode(tmp_path / "node", "amd_mi355_1")


def look(node: ToyNode) -> int:
    return postflight.run(node.env, node.checkout, node=node.node())


def seen(node: ToyNode) -> Health:
    return Health.model_validate_json(node.health("after").read_text())


def test_a_clean_job_leaves_a_healthy_node(node: ToyNode) -> None:
    assert look(node) == 0
    record = seen(node)
    assert (record.moment, record.healthy, record.ended, len(record.gpus)) == ("after", True, (), 1)


def test_a_server_that_the_job_left_is_ended_and_named(node: ToyNode) -> None:
    env = {**os.environ, "BUILDKITE_JOB_ID": JOB}
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    assert look(node) == 0
    assert server.wait(5) == -15
    assert [line.split()[0] for line in seen(node).ended] == [str(server.pid)]


def test_a_foreign_holder_survives_and_makes_the_node_unfit(node: ToyNode) -> None:
    node.process(4242, "python3", opens=("/dev/kfd",))
    assert look(node) == 75
    assert seen(node).problems == ("process 4242 (python3, state S) holds /dev/kfd",)
    assert node.told() == [], "the next preflight decides about the agent"


def test_memory_that_stays_in_use_makes_the_node_unfit(node: ToyNode) -> None:
    node.edit("metric", lambda data: data[0]["mem_usage"]["used_vram"].update(value=250000))
    assert look(node) == 75
    assert "250000 MiB of VRAM in use" in seen(node).problems[0]


def test_heat_after_work_is_no_trouble(node: ToyNode) -> None:
    node.edit("metric", lambda data: data[0]["temperature"]["hotspot"].update(value=97))
    assert look(node) == 0
    assert seen(node).gpus[0].temperature_c == 97.0


def test_a_lost_gpu_makes_the_node_unfit(node: ToyNode) -> None:
    for what in ("list", "static", "metric"):
        node.edit(what, lambda data: data.clear())
    assert look(node) == 75
    assert seen(node).problems == ("0 GPUs where amd_mi355_1 promises 1",)


def test_a_fault_of_the_program_is_recorded_and_not_held_against_the_node(node: ToyNode) -> None:
    node.log(QUIET + f"[  200.000000] {FAULT}\n")
    assert look(node) == 0
    record = seen(node)
    assert (record.healthy, record.dmesg) == (True, (f"[200.000000] {FAULT}",))


def test_a_hang_is_recorded_once_and_the_next_job_may_run(node: ToyNode) -> None:
    node.log(QUIET + f"[  200.000000] {HANG}\n")
    assert look(node) == 75
    assert seen(node).dmesg == (f"[200.000000] {HANG}",)
    assert preflight.run(node.env, node.checkout, node=node.node()) == 0
    assert look(node) == 0
    assert seen(node).dmesg == ()


def test_trouble_before_the_job_is_not_the_jobs(node: ToyNode) -> None:
    assert preflight.run(node.env, node.checkout, node=node.node()) == 0
    node.log(QUIET + f"[   99.000000] {HANG}\n[  200.000000] {FAULT}\n")
    assert look(node) == 0
    assert seen(node).dmesg == (f"[200.000000] {FAULT}",)


def test_a_node_that_cannot_be_looked_at_is_unfit(node: ToyNode) -> None:
    (node.bin / "amd-smi").unlink()
    (node.bin / "dmesg").unlink()
    assert look(node) == 75
    assert len(seen(node).problems) == 2


def test_what_was_left_is_ended_although_the_queue_is_unknown(node: ToyNode) -> None:
    env = {**os.environ, "BUILDKITE_JOB_ID": JOB}
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = "default"
    with pytest.raises(DeclarationError):
        postflight.run(node.env, node.checkout)
    assert server.wait(5) == -15


def test_a_cpu_job_is_cleaned_up_and_nothing_is_asked_of_gpus(node: ToyNode) -> None:
    for name in ("amd-smi", "dmesg"):
        (node.bin / name).unlink()
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = "amd-cpu"
    assert look(node) == 0
    assert seen(node).gpus == ()
