# SPDX-License-Identifier: Apache-2.0
"""Preflight takes each unfit node out of service and says why; postflight ends what a job left and looks again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.nodes import JOB, QUIET, FakeNode, write_gpu

from hilgate.errors import DeclarationError
from hilgate.model.record import Health

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Break = Callable[[FakeNode], object]

HANG = "[  200.000000] amdgpu 0000:05:00.0: amdgpu: GPU reset begin!\n"
FAULT = "[  200.000000] amdgpu 0000:05:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:3)\n"


@pytest.mark.parametrize(("queue", "count"), [("amd_mi300_8", 8), ("amd_mi355_1", 1), ("amd_mi250_8", 8)])
def test_a_healthy_node_is_fit(
    queue: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(tmp_path / "node", queue)
    monkeypatch.setenv("PATH", str(node.bin))
    assert node.preflight() == 0
    record = node.record("before")
    assert (record.healthy, record.problems, record.dmesg, len(record.gpus)) == (True, (), (), count)
    assert (record.step, record.moment, record.agent) == ("kernels-gfx942", "before", "mi300-node7-1")
    assert record.taken.utcoffset() is not None
    assert node.agent_calls() == []
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"~~~ fit for {queue}"
    assert len(out) == 2 + count
    assert max(map(len, out)) <= 100


def metric(gpu: int, section: str, key: str, value: object) -> Break:
    def change(data: list[dict[str, Any]]) -> None:
        data[gpu][section][key] = value

    return lambda node: node.edit("metric", change)


def without_gpu_7(node: FakeNode) -> None:
    for what in ("list", "static", "metric"):
        node.edit(what, lambda data: data.pop(7))


BREAKS: dict[str, tuple[Break, str]] = {
    "leaked VRAM": (
        lambda node: node.uses(513),
        "GPU 2 (0000:46:00.0) has 513 MiB of VRAM in use; an idle one at most 512",
    ),
    "uncorrectable ECC": (
        metric(5, "ecc", "total_uncorrectable_count", 1),
        "GPU 5 (0000:a6:00.0) has 1 uncorrectable ECC errors",
    ),
    "deferred ECC": (
        metric(5, "ecc", "total_deferred_count", 2),
        "GPU 5 (0000:a6:00.0) has 2 deferred ECC errors",
    ),
    "another product of the arch": (
        lambda node: node.edit(
            "static", lambda data: data[0]["asic"].update(market_name="AMD Instinct MI308X", num_compute_units=80)
        ),
        "(AMD Instinct MI308X) has 80 compute units where amd_mi300_8 promises 304: another product, or partitioned",
    ),
    "hot": (metric(1, "temperature", "mem", {"value": 97, "unit": "C"}), "has 97 C; an idle one at most 90"),
    "missing GPU": (without_gpu_7, "7 GPUs where amd_mi300_8 promises 8"),
    "wrong arch": (
        lambda node: node.edit("static", lambda data: data[0]["asic"].update(target_graphics_version="gfx950")),
        "GPU 0 (0000:05:00.0) is gfx950 where amd_mi300_8 promises gfx942",
    ),
    "partitioned": (
        metric(0, "mem_usage", "total_vram", {"value": 24574, "unit": "MB"}),
        "GPU 0 (0000:05:00.0) has 24574 MiB where amd_mi300_8 promises 192 GiB: another product, or partitioned",
    ),
    "garbage": (lambda node: node.program("amd-smi", "echo {"), "the answer of amd-smi is not understood"),
    "failing amd-smi": (lambda node: node.program("amd-smi", "echo no permission; exit 2"), "status 2: no permission"),
    "a hang in the log": (
        lambda node: node.log(QUIET + HANG),
        "the kernel's log has a line of GPU trouble: amdgpu 0000:05:00.0: amdgpu: GPU reset begin!",
    ),
    "a foreign holder": (
        lambda node: node.process(4242, "python3", opens=("/dev/kfd",)),
        "process 4242 (python3, state S) holds /dev/kfd",
    ),
    "a holder that no signal ends": (
        lambda node: node.process(4242, "python3", state="D", opens=("/dev/kfd",)),
        "process 4242 (python3, state D) holds /dev/kfd",
    ),
    "another agent with some of its GPUs": (
        lambda node: node.another_agent(4242, HILGATE_RENDER_NODES="renderD128"),
        "renderD128 is another agent's too, by its HILGATE_RENDER_NODES: process 4242 (buildkite-agent, state S)",
    ),
    "a full disk": (lambda node: node.env.update(HILGATE_MIN_DISK_GIB="99999999"), "GiB free on the disk of"),
    "a GPU that computes wrong integers": (
        lambda node: node.computes(wrong=3),
        "the tiny kernel: GPU 3 (fake) computed 00000000deadbeef of its integers, not ",
    ),
    "a GPU that multiplies wrong": (
        lambda node: node.computes(wrong=3, what="product"),
        "computed 00000000deadbeef of its matrix product, not ",
    ),
    "a GPU that does not compute": (lambda node: node.computes(7), "the tiny kernel ran on 7 GPUs of 8"),
    "a kernel that cannot start": (
        lambda node: node.program("selfcheck", "echo 'HIP error: no ROCm-capable device is detected' >&2; exit 1"),
        "selfcheck ended with status 1: HIP error: no ROCm-capable device is detected",
    ),
    "a kernel that prints nothing": (lambda node: node.program("selfcheck", "true"), "nothing that is understood"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_unfit_node_says_why_and_is_taken_out(name: str, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    damage, problem = BREAKS[name]
    damage(node)
    assert node.preflight() == 75
    record = node.record("before")
    assert not record.healthy
    assert problem in "\n".join(record.problems)
    out = capsys.readouterr().out
    assert out.startswith("+++ this node is unfit for amd_mi300_8\n")
    assert problem in out
    pause, reported = node.agent_calls()
    assert reported.startswith("annotate --style warning --context node-")
    assert pause.startswith("pause --note ")
    assert pause.endswith(f"(hilgate, job {JOB}) --timeout-in-minutes 240")
    assert record.problems[0][:60].replace("\n", " ") in pause


def test_a_hung_amd_smi_is_given_up(node: FakeNode) -> None:
    node.program("amd-smi", "/bin/sleep 60")
    assert node.preflight(smi_seconds=0.2) == 75
    assert node.record("before").problems[0] == "amd-smi did not answer within 0.2 s (amd-smi list --json)"


def test_all_problems_are_named_and_no_kernel_runs_on_such_gpus(node: FakeNode) -> None:
    for name in ("leaked VRAM", "uncorrectable ECC", "a foreign holder", "a hang in the log"):
        BREAKS[name][0](node)
    node.program("selfcheck", f": > {node.folder}/ran")
    assert node.preflight() == 75
    assert len(node.record("before").problems) == 4
    assert not (node.folder / "ran").exists()


def test_memory_that_the_driver_frees_late_is_waited_for(node: FakeNode) -> None:
    node.uses(41000)
    (node.folder / "idle.json").write_text((node.folder / "metric.json").read_text().replace("41000", "283"))
    once = f"if [ $1 = metric ] && [ -e {node.folder}/asked ]; then set -- idle; fi"
    node.program("amd-smi", f"{once}; : > {node.folder}/asked; /bin/cat {node.folder}/$1.json")
    assert node.preflight(settle_seconds=60.0) == 0


def test_a_hang_that_the_last_job_recorded_counts_no_more(node: FakeNode) -> None:
    node.log(QUIET + HANG)
    assert node.preflight() == 75
    assert node.preflight() == 75, "an unfit look forgives nothing"
    node.node().position().save(200.0)
    assert node.preflight() == 0
    node.log(QUIET + "[  201.000000] amdgpu 0000:05:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc\n")
    node.node().position().save(300.0)
    assert node.preflight() == 75


def test_a_thousand_lines_of_trouble_are_a_readable_record(node: FakeNode) -> None:
    line = "amdgpu 0000:05:00.0: amdgpu: ring comp_1.2.0 timeout, signaled seq=41, emitted seq=44"
    node.log("".join(f"[  200.{number:06d}] {line}\n" for number in range(1000)))
    assert node.preflight() == 75
    record = node.record("before")
    assert len(record.dmesg) == 50
    assert record.dmesg[-1] == "and 951 more lines of GPU trouble"
    assert record.problems[0].startswith("the kernel's log has 1000 lines of GPU trouble: amdgpu 0000:05:00.0")


def test_a_pause_that_fails_is_reported_and_the_status_stays(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.uses(41000)
    node.program("buildkite-agent", "echo 401 Unauthorized >&2; exit 1")
    assert node.preflight() == 75
    out = capsys.readouterr().out
    for failed in ("this agent could not be paused", "the build does not report it"):
        assert f"{failed}: buildkite-agent ended with status 1: 401 Unauthorized" in out


def test_printed_text_cannot_colour_the_log_and_notes_are_short(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.process(4242, "evil\n\x1b[31m`$(reboot)`", opens=("/dev/kfd",))
    node.program("amd-smi", r"printf '%0400d\033[2J+++ fit\a\302\260\n' 0; exit 1")
    assert node.preflight() == 75
    pause, _ = node.agent_calls()
    note = pause.removeprefix("pause --note ").removesuffix(" --timeout-in-minutes 240")
    assert note.isprintable()
    assert len(note) <= 300
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert r"\x1b[2J" in out
    assert "\N{DEGREE SIGN}" in out


def test_a_cpu_queue_has_no_gpu_phases_and_uploads_no_folder(node: FakeNode) -> None:
    for name in ("amd-smi", "dmesg", "selfcheck"):
        (node.bin / name).unlink()
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = "amd-cpu"
    assert (node.preflight(), node.postflight()) == (0, 0)
    assert (node.record("before").gpus, node.record("after").gpus) == ((), ())
    node.env["BUILDKITE_ARTIFACT_PATHS"] = "results/plan.txt"
    before = sorted(node.checkout.rglob("*"))
    assert node.preflight() == 0
    assert sorted(node.checkout.rglob("*")) == before


def test_a_rerun_elsewhere_has_its_own_folder_and_the_same_step(node: FakeNode) -> None:
    node.env["BUILDKITE_STEP_KEY"] = "kernels-gfx942-recheck"
    node.env["BUILDKITE_ARTIFACT_PATHS"] = "results/jobs/kernels-gfx942.recheck/**/*"
    assert node.preflight() == 0
    path = node.checkout / "results/jobs/kernels-gfx942.recheck/health-before.json"
    assert Health.model_validate_json(path.read_text()).step == "kernels-gfx942"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"BUILDKITE_AGENT_META_DATA_QUEUE": "default"}, "nothing is known of the queue 'default'"),
        ({"HILGATE_VRAM_LIMIT_MIB": "lots"}, "'lots' is no whole number"),
        ({"HILGATE_MIN_DISK_GIB": "-1"}, "'-1' is no whole number"),
        ({"HILGATE_RENDER_NODES": "renderD999"}, "renderD999 not among the driver's: none"),
        ({"BUILDKITE_ARTIFACT_PATHS": "results/**/*"}, "uploads no results/jobs/<key>"),
        ({"BUILDKITE_ARTIFACT_PATHS": "results/jobs/../../etc/**/*"}, "uploads no results/jobs/<key>"),
        ({"BUILDKITE_ARTIFACT_PATHS": "results/jobs/elsewhere/**/*"}, "the job's folder is a link"),
    ],
)
def test_a_wrong_setting_is_a_wrong_declaration_and_no_pause(
    change: dict[str, str], words: str, node: FakeNode
) -> None:
    node.env |= change
    (node.checkout / "results/jobs").mkdir(parents=True)
    (node.checkout / "results/jobs/elsewhere").symlink_to(node.folder)
    with pytest.raises(DeclarationError, match=words):
        node.preflight()
    assert node.agent_calls() == []


@pytest.mark.parametrize(
    ("declared", "status", "words"),
    [
        ("", 0, "note: no kernel was run, so whether the GPUs compute is not known"),
        ("selfcheck: {bin}/selfcheck\n", 0, "fit for acme-8"),
        ("selfcheck: {bin}/absent\n", 75, "unfit: the tiny kernel: {bin}/absent cannot be started"),
        ("selfcheck: echo {bin}\n", 75, "unfit: the tiny kernel printed nothing that is understood"),
    ],
    ids=["none", "one", "cannot run", "says nothing"],
)
def test_another_repositorys_queue_is_what_its_clone_declares(
    declared: str, status: int, words: str, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    (node.folder / "acme/ci").mkdir(parents=True)
    queue = "queues:\n  acme-8: {device: gfx942, gpus: 8, memory_gib: 192}  # ours\n"
    (node.folder / "acme/ci/agents.yaml").write_text(queue)
    (node.folder / "acme/ci/project.yaml").write_text("python_path: [src]\n" + declared.format(bin=node.bin))
    del node.env["HILGATE_SELFCHECK"]
    node.program("echo", "echo nothing")
    node.env |= {"HILGATE_REPOSITORY": str(node.folder / "acme"), "BUILDKITE_AGENT_META_DATA_QUEUE": "acme-8"}
    assert node.preflight() == status
    assert words.format(bin=node.bin) in capsys.readouterr().out


def test_a_shared_machine_is_judged_by_the_agents_own_gpu(node: FakeNode) -> None:
    write_gpu(node.kfd, 2, minor=128, bus=0x05, gpu_id=1)
    write_gpu(node.kfd, 3, minor=136, bus=0x26, gpu_id=2)
    write_gpu(node.kfd, 4, minor=144, bus=0xFF, gpu_id=3)
    node.env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd_mi300_1", "HILGATE_RENDER_NODES": "renderD136"}
    node.uses(41000, gpu=0)
    node.process(4242, "python3", opens=("/dev/kfd", "/dev/dri/renderD128"))
    node.computes(1)
    assert node.preflight() == 0
    assert [gpu.bdf for gpu in node.record("before").gpus] == ["0000:26:00.0"]
    for pid, theirs, name in (
        (4243, "renderD128", "other"),
        (4244, "renderD136", "mi300-node7-1"),
    ):  # a call of its own
        node.another_agent(pid, HILGATE_RENDER_NODES=theirs, BUILDKITE_AGENT_NAME=name)
    assert node.preflight() == 0
    node.another_agent(4245, HILGATE_RENDER_NODES="renderD128,renderD136", BUILDKITE_AGENT_NAME="other")
    assert node.preflight() == 75
    (problem,) = node.record("before").problems
    assert problem.startswith("renderD136 is another agent's too")
    (node.proc / "4245/environ").write_text("")
    node.env["HILGATE_RENDER_NODES"] = "renderD144"
    assert node.preflight() == 75
    absent = "GPU 0000:ff:00.0 of this agent is not among those that amd-smi lists"
    assert node.record("before").problems[0] == absent
    del node.env["HILGATE_RENDER_NODES"]
    assert node.preflight() == 75
    assert "8 GPUs where amd_mi300_1 promises 1" in node.record("before").problems


NOT_READ = {"edge": "N/A", "hotspot": "N/A", "mem": "N/A"}
STRANGE: dict[str, tuple[Callable[[FakeNode, int], object], str]] = {
    "an APU": (
        lambda node, gpu: node.edit("metric", lambda data: data[gpu].update(ecc="N/A", temperature=NOT_READ)),
        "ecc is 'N/A'",
    ),
    "no memory": (
        lambda node, gpu: node.edit("metric", lambda data: data[gpu].update(mem_usage="N/A")),
        "mem_usage is 'N/A'",
    ),
    "no arch": (
        lambda node, gpu: node.edit("static", lambda data: data[gpu]["asic"].update(target_graphics_version="N/A")),
        "its gfx arch is 'N/A'",
    ),
    "no metric": (
        lambda node, gpu: node.edit("metric", lambda data: data.remove(next(one for one in data if one["gpu"] == gpu))),
        "amd-smi metric does not mention it",
    ),
    "no address": (
        lambda node, gpu: node.edit("list", lambda data: data[gpu].update(bdf="N/A")),
        "its PCI address is 'N/A'",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_gpus_of_others_are_recorded_and_not_judged(name: str, node: FakeNode) -> None:
    damage, problem = STRANGE[name]
    write_gpu(node.kfd, 2, minor=128, bus=0x05, gpu_id=1)
    write_gpu(node.kfd, 3, minor=136, bus=0x26, gpu_id=2)
    node.env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd_mi300_1", "HILGATE_RENDER_NODES": "renderD136"}
    node.computes(1)
    damage(node, 0)
    assert node.preflight() == 0
    record = node.record("before")
    assert (record.healthy, record.problems, record.notes[0][:6]) == (True, (), "GPU 0:")
    assert problem in record.notes[0]
    assert node.postflight() == 0
    damage(node, 1)
    assert node.preflight() == 75
    assert any(problem in one for one in node.record("before").problems)
    del node.env["HILGATE_RENDER_NODES"]
    assert node.preflight() == 75
    assert node.record("before").notes == ()


def test_by_hand_it_writes_uploads_pauses_and_forgives_nothing(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node.preflight(by_hand=True) == 0
    node.uses(41000)
    assert node.preflight(by_hand=True) == 75
    assert "unfit: GPU 2" in capsys.readouterr().out
    assert node.agent_calls() == []
    assert not (node.checkout / "results").exists()
    assert not (node.folder / "state").exists()
    node.uses(283)
    assert node.preflight() == 0
    assert (node.folder / "state").exists()


@pytest.mark.parametrize("queue", ["amd_mi300_8", "default"])
def test_a_server_that_the_job_left_is_ended_and_named(
    queue: str, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "BUILDKITE_JOB_ID": JOB}
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    node.env["BUILDKITE_AGENT_META_DATA_QUEUE"] = queue
    if queue == "default":
        with pytest.raises(DeclarationError):
            node.postflight()
    else:
        assert node.postflight() == 0
        assert [line.split()[0] for line in node.record("after").ended] == [str(server.pid)]
    assert server.wait(5) == -15
    assert f"ended {server.pid} (" in capsys.readouterr().out


def lose_gpus(node: FakeNode) -> None:
    for what in ("list", "static", "metric"):
        node.edit(what, lambda data: data.clear())


def blind(node: FakeNode) -> None:
    (node.bin / "amd-smi").unlink()
    (node.bin / "dmesg").unlink()


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (BREAKS["a foreign holder"][0], ["process 4242 (python3, state S) holds /dev/kfd"]),
        (lambda node: node.uses(250000), ["GPU 2 (0000:46:00.0) has 250000 MiB of VRAM in use"]),
        (lose_gpus, ["0 GPUs where amd_mi300_8 promises 8"]),
        (blind, ["amd-smi cannot be started", "the kernel's log cannot be read"]),
    ],
    ids=["holder", "memory", "no GPU", "nothing to look with"],
)
def test_a_node_that_a_job_left_unfit_is_recorded_and_not_paused(
    damage: Break, problems: list[str], node: FakeNode
) -> None:
    damage(node)
    assert node.postflight() == 75
    found = node.record("after").problems
    assert [got.startswith(want) for got, want in zip(found, problems, strict=True)] == [True] * len(problems)
    assert node.agent_calls() == [], "the next preflight decides about the agent"


def test_a_clean_job_leaves_a_healthy_node_even_if_hot(node: FakeNode) -> None:
    metric(0, "temperature", "hotspot", {"value": 97, "unit": "C"})(node)
    assert node.postflight() == 0
    record = node.record("after")
    assert (record.moment, record.healthy, record.ended, len(record.gpus)) == ("after", True, (), 8)
    assert record.gpus[0].temperature_c == 97.0


def test_a_fault_of_the_program_is_not_held_against_the_node(node: FakeNode) -> None:
    node.log(QUIET + HANG.replace("200", " 99"))
    assert node.postflight() == 75
    node.log(QUIET + HANG.replace("200", " 99") + FAULT)
    assert node.preflight() == 0, "a hang counts once, a fault never"
    assert node.postflight() == 0
    record = node.record("after")
    assert (record.healthy, record.dmesg) == (True, ())
    node.log(QUIET + FAULT.replace("200", "300"))
    assert node.postflight() == 0
    assert node.record("after").dmesg == (FAULT.replace("[  200", "[300").strip(),)


def test_what_a_killed_job_left_is_ended_before_judging(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    job = "0193a8f2-0000-4000-8000-000000000001"
    node.program(
        "docker",
        f'case "$*" in *--format*hilgate.job*) echo {job} ;;\n'
        f"*label=hilgate.job={job}) [ -e {node.folder}/gone ] || echo c1 ;;\n"
        f"rm*) : > {node.folder}/gone ;; esac; exit 0",
    )
    assert node.preflight() == 0
    assert f"ended container c1 of job {job}\n" in capsys.readouterr().out
