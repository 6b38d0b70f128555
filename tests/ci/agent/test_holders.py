"""Who has a GPU open: by open files, by the driver's own list, zombies included, and only of this agent's GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.nodes import JOB, ToyNode

from hilgate.agent import holders
from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path) -> ToyNode:
    toy = ToyNode(tmp_path / "node", "amd_mi300_8")
    toy.process(1, "systemd")
    toy.process(500, "bash", parent=1, opens=("/dev/null", "/dev/dri/card0"))
    for number in range(2):
        toy.card(number + 2, minor=128 + 8 * number, bus=0x05 + 0x21 * number, gpu_id=21000 + number)
    return toy


def found(node: ToyNode, **env: str) -> tuple[list[str], list[str]]:
    cards = holders.own_cards(env, node.kfd)
    held, problems = holders.find(cards, allowed=env.get(holders.ALLOWED, ""), proc=node.proc, kfd=node.kfd)
    return [str(holder) for holder in held], problems


def test_nobody_holds_an_idle_node(node: ToyNode) -> None:
    assert found(node) == ([], [])


def test_an_open_device_is_held(node: ToyNode) -> None:
    node.process(4242, "python3", opens=("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD128"))
    (node.proc / "4242/environ").write_bytes(f"BUILDKITE_JOB_ID={JOB}\0".encode())
    assert found(node) == (
        [f"process 4242 (python3, state S) of job {JOB} holds /dev/dri/renderD128 and /dev/kfd"],
        [],
    )


def test_a_zombie_that_the_driver_keeps_is_held_and_its_parent_named(node: ToyNode) -> None:
    node.process(4000, "server", parent=1)
    node.process(4242, "python3", state="Z", parent=4000)
    (node.kfd / "proc/4242").mkdir()
    assert found(node)[0] == ["zombie 4242 (python3) keeps /dev/kfd; its parent is 4000 (server, state S)"]


def test_a_zombie_whose_threads_still_run_is_held(node: ToyNode) -> None:
    node.process(4242, "python3", state="Z")
    node.process(4243, "thread", opens=("/dev/kfd",))
    (node.proc / "4242/task").mkdir()
    (node.proc / "4243").rename(node.proc / "4242/task/4243")
    assert found(node)[0] == ["zombie 4242 (python3) keeps /dev/kfd; its parent is 1 (systemd, state S)"]


def test_a_process_that_only_the_driver_remembers_is_held(node: ToyNode) -> None:
    (node.kfd / "proc/777").mkdir()
    assert found(node)[0] == ["zombie 777 (gone) keeps /dev/kfd; its parent is 0"]


def test_a_declared_monitor_is_left_out_and_nothing_else(node: ToyNode) -> None:
    node.process(300, "gpuagent", opens=("/dev/dri/renderD128",))
    node.process(301, "gpuagentx", opens=("/dev/dri/renderD128",))
    assert found(node, HILGATE_ALLOWED_HOLDERS="node_exporter gpuagent")[0] == [
        "process 301 (gpuagentx, state S) holds /dev/dri/renderD128"
    ]


def test_on_a_shared_machine_another_agents_gpu_is_not_ours(node: ToyNode) -> None:
    node.process(4242, "python3", opens=("/dev/kfd", "/dev/dri/renderD128"))
    (node.kfd / "proc/4242").mkdir()
    (node.kfd / "proc/4242/vram_21000").write_text("4096\n")
    (node.kfd / "proc/4242/vram_21001").write_text("0\n")
    assert found(node, HILGATE_RENDER_NODES="renderD136") == ([], [])
    assert len(found(node, HILGATE_RENDER_NODES="renderD128, renderD136")[0]) == 1


def test_memory_of_our_gpu_without_an_open_file_is_held(node: ToyNode) -> None:
    (node.kfd / "proc/777").mkdir()
    (node.kfd / "proc/777/vram_21001").write_text("1048576\n")
    assert len(found(node, HILGATE_RENDER_NODES="renderD136")[0]) == 1
    (node.kfd / "proc/777/vram_21001").write_text("not a number")
    assert len(found(node, HILGATE_RENDER_NODES="renderD136")[0]) == 1


def test_a_render_node_that_the_driver_does_not_list_is_refused(node: ToyNode) -> None:
    with pytest.raises(DeclarationError, match="renderD129 not among the driver's: renderD128, renderD136"):
        holders.own_cards({"HILGATE_RENDER_NODES": "renderD129"}, node.kfd)


def test_processes_that_nobody_can_look_into_are_a_problem(node: ToyNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.process(4242, "python3")
    seen = holders._open_nodes
    monkeypatch.setattr(holders, "_open_nodes", lambda proc, pid: None if pid == 4242 else seen(proc, pid))
    assert found(node) == ([], []), "the driver's list covers other users"
    (node.kfd / "proc").rmdir()
    assert found(node)[1] == [
        f"1 processes of other users may hold a GPU: the driver does not list its own in {node.kfd}/proc"
    ]


def test_the_topology_gives_pci_addresses(node: ToyNode) -> None:
    node.card(0, minor=0, bus=0, gpu_id=0)
    (node.kfd / "topology/nodes/9").mkdir()
    assert [(card.render, card.bdf) for card in holders.topology(node.kfd)] == [
        ("renderD128", "0000:05:00.0"),
        ("renderD136", "0000:26:00.0"),
    ]
