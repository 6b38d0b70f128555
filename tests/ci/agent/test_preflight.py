"""A fit node passes; each unfit one ends with 75, says why with numbers, leaves a health file and pauses its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.nodes import JOB, QUIET, ToyNode

from hilgate.agent import preflight
from hilgate.model import Health

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Break = Callable[[ToyNode], object]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "node" / "bin"))
    return tmp_path / "node"


def look(node: ToyNode) -> int:
    return preflight.run(node.env, node.checkout, node=node.node())


def seen(node: ToyNode) -> Health:
    return Health.model_validate_json(node.health("before").read_text())


@pytest.mark.parametrize(("queue", "gpus"), [("amd_mi300_8", 8), ("amd_mi355_1", 1), ("amd_mi250_8", 8)])
def test_a_healthy_node_is_fit(queue: str, gpus: int, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = ToyNode(path, queue)
    assert look(node) == 0
    record = seen(node)
    assert (record.healthy, record.problems, record.dmesg, len(record.gpus)) == (True, (), (), gpus)
    assert (record.step, record.moment, record.agent) == ("kernels-gfx942", "before", "mi300-node7-1")
    assert record.taken.utcoffset() is not None
    assert node.told() == []
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"~~~ fit for {queue}"
    assert len(said) == 2 + gpus
    assert max(map(len, said)) <= 100


def used(mib: int, gpu: int = 2) -> Break:
    def change(data: list[dict[str, Any]]) -> None:
        data[gpu]["mem_usage"]["used_vram"]["value"] = mib

    return lambda node: node.edit("metric", change)


def metric(gpu: int, section: str, key: str, value: object) -> Break:
    def change(data: list[dict[str, Any]]) -> None:
        data[gpu][section][key] = value

    return lambda node: node.edit("metric", change)


def without(gpu: int) -> Break:
    def change(node: ToyNode) -> None:
        for what in ("list", "static", "metric"):
            node.edit(what, lambda data: data.pop(gpu))

    return change


def arch(name: str) -> Break:
    def change(data: list[dict[str, Any]]) -> None:
        for gpu in data:
            gpu["asic"]["target_graphics_version"] = name

    return lambda node: node.edit("static", change)


def partitioned(data: list[dict[str, Any]]) -> None:
    data[0]["mem_usage"]["total_vram"]["value"] = 24574


BREAKS: dict[str, tuple[Break, str]] = {
    "leaked VRAM": (used(41000), "GPU 2 (0000:46:00.0) has 41000 MiB of VRAM in use; an idle one at most 512"),
    "a little leaked VRAM": (used(513), "has 513 MiB of VRAM in use"),
    "uncorrectable ECC": (
        metric(5, "ecc", "total_uncorrectable_count", 1),
        "GPU 5 (0000:a6:00.0) has 1 uncorrectable ECC errors",
    ),
    "hot": (metric(1, "temperature", "mem", {"value": 97, "unit": "C"}), "has 97 C; an idle one at most 90"),
    "missing GPU": (without(7), "7 GPUs where amd_mi300_8 promises 8"),
    "wrong arch": (arch("gfx950"), "GPU 0 (0000:05:00.0) is gfx950 where amd_mi300_8 promises gfx942"),
    "partitioned": (
        lambda node: node.edit("metric", partitioned),
        "GPU 0 (0000:05:00.0) has 24574 MiB where amd_mi300_8 promises 192 GiB: another product, or partitioned",
    ),
    "N/A in place of a count": (
        metric(4, "ecc", "total_uncorrectable_count", "N/A"),
        "GPU 4: its count of uncorrectable ECC errors is 'N/A'",
    ),
    "garbage": (lambda node: node.program("amd-smi", "echo {"), "the answer of amd-smi is not JSON"),
    "failing amd-smi": (lambda node: node.program("amd-smi", "echo no permission; exit 2"), "status 2: no permission"),
    "absent amd-smi": (lambda node: (node.bin / "amd-smi").unlink(), "amd-smi cannot be started"),
    "a hang in the log": (
        lambda node: node.log(QUIET + "[  200.000000] amdgpu 0000:05:00.0: amdgpu: GPU reset begin!\n"),
        "the kernel's log has a line of GPU trouble: amdgpu 0000:05:00.0: amdgpu: GPU reset begin!",
    ),
    "a log that nobody may read": (
        lambda node: node.program("dmesg", "echo 'dmesg: Operation not permitted' >&2; exit 1"),
        "the kernel's log cannot be read: it ended with status 1: dmesg: Operation not permitted",
    ),
    "a foreign holder": (
        lambda node: node.process(4242, "python3", opens=("/dev/kfd",)),
        "process 4242 (python3, state S) holds /dev/kfd",
    ),
    "a full disk": (
        lambda node: node.env.update(HILGATE_MIN_DISK_GIB="99999999"),
        "GiB free on the disk of",
    ),
    "a GPU that computes wrong integers": (
        lambda node: node.computes(wrong=3),
        "the tiny kernel: GPU 3 (toy) computed 00000000deadbeef of its integers, not ",
    ),
    "a GPU that multiplies wrong": (
        lambda node: node.computes(wrong=3, what="product"),
        "computed 00000000deadbeef of its matrix product, not ",
    ),
    "a GPU that does not compute": (lambda node: node.computes(7), "the tiny kernel ran on 7 GPUs of 8"),
    "a kernel that cannot start": (
        lambda node: node.program("selfcheck", "echo 'HIP error: no ROCm-capable device is detected' >&2; exit 1"),
        "the tiny kernel ended with status 1: HIP error: no ROCm-capable device is detected",
    ),
    "a kernel that says nothing": (lambda node: node.program("selfcheck", "true"), "said nothing that is understood"),
    "no command for the kernel": (
        lambda node: node.env.update(HILGATE_SELFCHECK="/not/there"),
        "the tiny kernel: /not/there cannot be started",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_unfit_node_says_why_and_is_taken_out(name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, problem = BREAKS[name]
    node = ToyNode(path, "amd_mi300_8")
    damage(node)
    assert look(node) == 75
    record = seen(node)
    assert not record.healthy
    assert problem in "\n".join(record.problems)
    said = capsys.readouterr().out
    assert said.startswith("+++ this node is unfit for amd_mi300_8\n")
    assert problem in said
    upload, pause = node.told()
    assert upload == "artifact upload results/jobs/kernels-gfx942/health-before.json"
    assert pause.startswith("pause --note ")
    assert pause.endswith(f"(hilgate preflight, job {JOB}) --timeout-in-minutes 240")
    assert record.problems[0][:60].replace("\n", " ") in pause


def test_a_hung_amd_smi_is_given_up(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.program("amd-smi", "/bin/sleep 60")
    assert preflight.run(node.env, node.checkout, node=node.node(smi_seconds=0.2)) == 75
    assert seen(node).problems[0] == "amd-smi did not answer within 0.2 s (amd-smi list --json)"


def test_several_problems_are_all_named(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    for name in ("leaked VRAM", "uncorrectable ECC", "a foreign holder", "a hang in the log"):
        BREAKS[name][0](node)
    assert look(node) == 75
    assert len(seen(node).problems) == 4


def test_no_kernel_is_run_on_a_gpu_that_something_speaks_against(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    used(41000)(node)
    node.program("selfcheck", f": > {node.folder}/ran")
    assert look(node) == 75
    assert not (node.folder / "ran").exists()


def test_memory_that_the_driver_frees_late_is_waited_for(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    used(41000)(node)
    busy = node.folder / "metric.json"
    idle = node.folder / "idle.json"
    idle.write_text(busy.read_text().replace("41000", "283"))
    once = f"if [ $1 = metric ] && [ -e {node.folder}/asked ]; then set -- idle; fi"
    node.program("amd-smi", f"{once}; : > {node.folder}/asked; /bin/cat {node.folder}/$1.json")
    assert preflight.run(node.env, node.checkout, node=node.node(settle_seconds=5.0)) == 0


def test_a_hang_that_the_last_job_recorded_counts_no_more(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    node.log(QUIET + "[  200.000000] amdgpu 0000:05:00.0: amdgpu: GPU reset begin!\n")
    assert look(node) == 75
    assert look(node) == 75, "an unfit look forgives nothing"
    node.node().position().save(200.0)
    assert look(node) == 0
    node.log(QUIET + "[  201.000000] amdgpu 0000:05:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc\n")
    node.node().position().save(300.0)
    assert look(node) == 75


def test_a_thousand_lines_of_trouble_are_a_readable_record(path: Path) -> None:
    node = ToyNode(path, "amd_mi300_8")
    line = "amdgpu 0000:05:00.0: amdgpu: ring comp_1.2.0 timeout, signaled seq=41, emitted seq=44"
    node.log("".join(f"[  200.{number:06d}] {line}\n" for number in range(1000)))
    assert look(node) == 75
    record = seen(node)
    assert len(record.dmesg) == 50
    assert record.dmesg[-1] == "and 951 more lines of GPU trouble"
    assert record.problems[0].startswith("the kernel's log has 1000 lines of GPU trouble: amdgpu 0000:05:00.0")
