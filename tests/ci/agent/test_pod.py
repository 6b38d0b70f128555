# SPDX-License-Identifier: Apache-2.0
"""A job in a pod: GPUs are judged without Buildkite and systemd, and a step runs beside the agent, not in it."""

from __future__ import annotations

import io
import json
import shutil
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from support.agent import DIGEST, KEY, SECRET
from support.nodes import ROOT, FakeNode, write_gpu

from agent_host import collect, gpus, hooks, host, job, pod
from hilgate.model.record import Health
from hilgate.names import node_name

if TYPE_CHECKING:
    from pathlib import Path

    from support.agent import Agent

BUSES = {128: 0x05, 136: 0x46}
"""Render nodes of two GPUs of the recorded machine: GPU 0 and GPU 2 of amd-smi."""


@pytest.fixture
def pods_node(node: FakeNode) -> FakeNode:
    """A node whose pod was given one GPU of eight, and whose kernel's log nobody may read."""
    for number, (minor, bus) in enumerate(BUSES.items(), 1):
        write_gpu(node.kfd, number, minor=minor, bus=bus, gpu_id=number)
    (node.folder / "dev/dri").mkdir(parents=True)
    (node.folder / "dev/dri/renderD128").touch()
    node.program("dmesg", "exit 1")
    node.computes(1)
    return node


def look(node: FakeNode, moment: str = "before", count: int = 1) -> Health:
    folder = node.folder / "given/health"
    pod.look(folder, node.node(), "kernels-gfx942", count, moment, dev=node.folder / "dev")
    return Health.model_validate_json((folder / f"health-{moment}.json").read_text())


def test_a_pod_judges_the_gpu_that_it_was_given(pods_node: FakeNode) -> None:
    pods_node.uses(41000)  # GPU 2, which another pod has
    record = look(pods_node)
    assert (record.healthy, record.problems, record.step) == (True, (), "kernels-gfx942")
    assert [gpu.bdf for gpu in record.gpus] == ["0000:05:00.0"]
    assert any("the kernel's log is not shown to a pod" in note for note in record.notes)
    assert pods_node.agent_calls() == []  # nothing of Buildkite is asked or paused


@pytest.mark.parametrize(
    ("arrange", "problem"),
    [
        (lambda n: n.uses(513, 0), "GPU 0 (0000:05:00.0) has 513 MiB of VRAM in use"),
        (lambda n: n.computes(1, wrong=0), "the tiny kernel: GPU 0 (fake) computed"),
        (lambda n: n.program("amd-smi", "exit 3"), "amd-smi ended with status 3"),
        (lambda n: (n.folder / "dev/dri/renderD128").unlink(), "this container has no GPU, and 1 were asked for"),
        (lambda n: (n.folder / "dev/dri/renderD136").touch(), "2 GPUs where amd_mi300_8 promises 1"),
    ],
)
def test_an_unfit_gpu_is_named(pods_node: FakeNode, arrange, problem: str) -> None:
    arrange(pods_node)
    record = look(pods_node)
    assert not record.healthy
    assert problem in " ".join(record.problems)


def test_unfit_is_75_and_an_unknown_queue_is_3(pods_node: FakeNode, monkeypatch, capsys) -> None:
    for name, value in pods_node.env.items():
        monkeypatch.setenv(name, value)
    words = ["fit", "--step", "kernels-gfx942", "--gpus", "1", "--root", str(pods_node.folder), "--queue"]
    monkeypatch.setattr(host, "DEV", pods_node.folder / "none")
    monkeypatch.setattr(pod.look, "__kwdefaults__", {"dev": pods_node.folder / "none"})
    assert pod.main([*words, "amd_mi300_8"]) == 75
    assert "unfit for amd_mi300_8: this container has no GPU" in capsys.readouterr().out
    assert pod.main([*words, "amd_mi999_1"]) == 3
    assert "nothing is known of the queue 'amd_mi999_1'" in capsys.readouterr().err
    own = pods_node.folder / "given/repository/ci"  # where another repository is served than this one
    own.mkdir(parents=True)
    (own / "agents.yaml").write_text("queues: {amd_mi999_1: {device: gfx942, gpus: 1, memory_gib: 192}}")
    assert pod.main([*words, "amd_mi999_1"]) == 75


def test_partitions_of_a_gpu_are_functions_of_its_address(tmp_path: Path) -> None:
    for number, partition in enumerate((0, 1, 7), 1):
        write_gpu(tmp_path, number, minor=127 + number, bus=0x05 | partition << 20)
    assert [node.bdf for node in gpus.topology(tmp_path)] == [f"0000:05:00.{part}" for part in (0, 1, 7)]


def test_the_node_of_a_pod_is_named_and_not_the_pod(monkeypatch) -> None:
    monkeypatch.setenv("HILGATE_NODE", "mi300-node7")
    assert node_name() == "mi300-node7"


@pytest.mark.parametrize(("image", "plugins"), [("1", ""), ("", "theirs")])
def test_no_plugin_runs_in_a_pod(image: str, plugins: str) -> None:
    env = {"HILGATE_AGENT_IMAGE": image, "BUILDKITE_PLUGINS": "theirs", "PATH": "/usr/bin:/bin"}
    hook = f'source {ROOT / "ci/hooks/environment"}; echo "$BUILDKITE_PLUGINS"'
    assert (
        subprocess.run(["bash", "-c", hook], env=env, check=True, capture_output=True, text=True).stdout
        == f"{plugins}\n"
    )


@pytest.fixture
def volumes(tmp_path: Path, agent: Agent) -> Path:
    """The two volumes of a pod; the agent's job is told of them."""
    root = tmp_path / "volumes"
    for name in ("given/health", "out", "workspace"):
        (root / name).mkdir(parents=True)
    agent.env |= {pod.POD: str(root), "BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu", "HILGATE_NODE": "node7"}
    return root


def beside(root: Path, code: str) -> threading.Thread:
    """The container of the step: what it is given runs there, with `code` in place of hilgate."""
    (root / "workspace/hilgate").mkdir(exist_ok=True)
    (root / "workspace/hilgate/__init__.py").touch()
    body = f"import json, os, pathlib, sys\nout = pathlib.Path({str(root / 'out')!r})\n{code}\n"
    (root / "workspace/hilgate/__main__.py").write_text(body)
    node = hooks.NodeContext({}, root)
    thread = threading.Thread(target=pod.run_given, args=(root, root / "workspace", node), daemon=True)
    thread.start()
    return thread


WRITES = "(out / 'results/results.jsonl').write_text('records\\n')\n"


def run(agent: Agent, root: Path, monkeypatch, code: str, *more: str) -> int:
    monkeypatch.setenv("PATH", f"{agent.bin}:{sys.prefix}/bin:/usr/bin:/bin")
    thread = beside(root, code)
    status = agent.run(monkeypatch, KEY, *more)
    thread.join(20)
    return status


@pytest.mark.parametrize("status", [0, 1, 6, 75])
def test_the_step_runs_beside_the_agent_and_passes_its_status_on(agent, volumes, monkeypatch, status) -> None:
    (volumes / "given/health/health-before.json").write_text("of no GPU")
    code = WRITES + f"(out / 'health-after.json').write_text('of no GPU')\nsys.exit({status})"
    assert run(agent, volumes, monkeypatch, code) == status
    assert [path.name for path in agent.results.iterdir()] == ["results.jsonl"]
    assert (agent.results / "results.jsonl").read_text() == "records\n"
    given = json.loads((volumes / "given/step.json").read_text())
    assert given["command"] == ["python3", "-m", "hilgate", "run", KEY, "--plan", f"{volumes}/given/plan.json",
                                "--results", f"{volumes}/out/results"]  # fmt: skip
    assert (volumes / "workspace/file").read_text() == "content\n"
    assert given["env"]["HILGATE_IMAGE"] == DIGEST
    assert given["env"]["HILGATE_NODE"] == "node7"
    assert given["env"]["HF_TOKEN"] == SECRET  # declared, and no fork
    assert "BUILDKITE_AGENT_ACCESS_TOKEN" not in given["env"]
    assert agent.calls() == []  # no Docker


def test_a_pod_asks_nothing_of_a_volumes_root_and_leaves_nothing(agent, volumes, monkeypatch) -> None:
    (volumes / "workspace").chmod(0o711)  # Kubernetes makes it root's
    killed = []

    def nobody_is_left(*asked: int) -> None:
        killed.append(asked)
        raise ProcessLookupError

    monkeypatch.setattr(pod.os, "getpid", lambda: 1)
    monkeypatch.setattr(pod.os, "kill", nobody_is_left)
    assert run(agent, volumes, monkeypatch, WRITES) == 0
    assert stat.S_IMODE((volumes / "workspace").stat().st_mode) == 0o711
    assert killed == [(-1, 9)]


def test_a_pod_runs_one_step(agent, volumes, monkeypatch, capsys) -> None:
    assert run(agent, volumes, monkeypatch, WRITES) == 0
    shutil.rmtree(agent.results)
    assert agent.run(monkeypatch) == 5
    assert "is the second step of a pod" in capsys.readouterr().err


def test_what_the_step_prints_is_in_the_log_of_the_job(agent, volumes, monkeypatch, capfdbinary) -> None:
    assert run(agent, volumes, monkeypatch, WRITES + "print('a line', flush=True)") == 0
    assert b"a line\n" in capfdbinary.readouterr().out


def test_a_container_that_is_started_again_was_killed(agent, volumes, monkeypatch) -> None:
    (volumes / "out/started").touch()
    assert run(agent, volumes, monkeypatch, "") == 137


def test_a_node_that_cannot_run_the_step_is_infrastructure(agent, volumes, monkeypatch) -> None:
    (volumes / "workspace").rmdir()
    (volumes / "workspace").touch()  # as where a disk is full or gone
    thread = threading.Thread(
        target=pod.run_given, args=(volumes, volumes / "workspace", hooks.NodeContext({}, volumes)), daemon=True
    )
    thread.start()
    assert agent.run(monkeypatch) == 75


@pytest.mark.parametrize("said", ["", "x", "-1", "256", "99999"])
def test_a_status_that_is_none_counts_as_killed(volumes, said) -> None:
    (volumes / "out/status").write_text(said)
    assert pod.attend(volumes, 5.0, io.BytesIO()) == 137


@pytest.mark.usefixtures("volumes")
def test_a_step_that_never_ends_is_infrastructure(agent, monkeypatch) -> None:
    seconds = property(lambda _: 0.5)
    monkeypatch.setattr(job.PlannedJob, "seconds", seconds)
    assert agent.run(monkeypatch) == 75


@pytest.mark.usefixtures("volumes")
def test_a_step_without_image_runs_outside_the_agents_container(agent, monkeypatch, capsys) -> None:
    assert agent.run(monkeypatch, "units-cpu") == 5
    assert "the agent's own containers run no code of a change" in capsys.readouterr().err


def test_health_before_comes_from_the_init_container_alone(agent, volumes, monkeypatch) -> None:
    agent.plan(steps=[{"key": KEY, "image": "rocm", "timeout_minutes": 1, "gpus": 1},
                      {"key": "image-rocm-cpu", "provides": "rocm", "timeout_minutes": 1}])  # fmt: skip
    (volumes / "given/health/health-before.json").write_text("fit")
    forged = (
        "(out / 'results/health-before.json').write_text('mine')\n(out / 'health-before.json').write_text('mine')\n"
    )
    assert run(agent, volumes, monkeypatch, WRITES + forged) == 0
    assert (agent.results / "health-before.json").read_text() == "fit"
    assert "mine" not in (agent.results / "health-after.json").read_text()


@pytest.mark.parametrize(("gpus", "offline"), [(1, "1"), (0, None)])
def test_a_forks_step_has_a_network_only_without_a_gpu(agent, volumes, monkeypatch, gpus, offline) -> None:
    kernels = {"key": KEY, "image": "rocm", "timeout_minutes": 1, "gpus": gpus, "network": True}
    agent.plan(fork=True, steps=[kernels], digests={"rocm": DIGEST})
    assert run(agent, volumes, monkeypatch, WRITES) == 0
    assert json.loads((volumes / "given/step.json").read_text())["env"].get("HF_HUB_OFFLINE") == offline


def test_a_recheck_in_a_pod_reads_what_the_job_left(agent, volumes, monkeypatch) -> None:
    earlier = agent.bin / f"artifacts/results/jobs/{KEY}/results.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("earlier\n")
    assert run(agent, volumes, monkeypatch, WRITES, "--recheck") == 0
    assert (volumes / f"given/jobs/{KEY}/results.jsonl").read_text() == "earlier\n"
    words = json.loads((volumes / "given/step.json").read_text())["command"]
    assert words[3:5] == ["recheck", KEY]
    assert words[words.index("--jobs") + 1] == f"{volumes}/given/jobs"


def test_links_that_the_step_leaves_lead_nowhere(agent, volumes, monkeypatch, tmp_path) -> None:
    (tmp_path / "token").write_text(SECRET)
    links = (
        f"os.symlink({str(tmp_path)!r}, out / 'results/folder')\n"
        f"os.symlink({str(tmp_path / 'token')!r}, out / 'results/file')\n"
        f"os.remove(out / 'log')\nos.symlink({str(tmp_path / 'token')!r}, out / 'log')\n"
    )
    assert run(agent, volumes, monkeypatch, WRITES + links) == 0
    assert sorted(path.name for path in agent.results.rglob("*")) == ["results.jsonl"]


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path, monkeypatch) -> None:
    for name in ("secret", "out", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret/token").write_text(SECRET)
    (tmp_path / "out/folder").symlink_to(tmp_path / "secret")
    kinds = {"folder": stat.S_IFDIR, "token": stat.S_IFREG}
    monkeypatch.setattr(collect, "_mode", lambda _, inner: kinds[inner.name])  # what it was a moment ago
    assert collect.collect(tmp_path / "out", tmp_path / "results") == ["folder: cannot be read (Not a directory)"]
    assert list((tmp_path / "results").rglob("*")) == []
