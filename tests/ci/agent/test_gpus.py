# SPDX-License-Identifier: Apache-2.0
"""amd-smi is read strictly, from recorded machines; and who has a GPU open, zombies and shared machines included."""

from __future__ import annotations

import json

import pytest
from support.nodes import JOB, MACHINES, RECORDED, FakeNode, write_gpu

from agent_host import gpus, host
from agent_host.gpus import GpuStatus, parse_smi


def answers(machine: str) -> dict[str, str]:
    return {what: (RECORDED / machine / f"{what}.json").read_text() for what in ("list", "static", "metric")}


@pytest.mark.parametrize(
    ("machine", "count", "first"),
    [
        (
            "mi300x-8-rocm6.4",
            8,
            GpuStatus(0, "0000:05:00.0", "AMD Instinct MI300X", "gfx942", 196592, 284, 0, 36.0, 0, 304),
        ),
        (
            "mi355x-1-rocm7.2",
            1,
            GpuStatus(0, "0000:75:00.0", "AMD Instinct MI355X", "gfx950", 294896, 283, 0, 41.0, 0, 256),
        ),
        (
            "mi250-4-rocm6.2",
            8,
            GpuStatus(0, "0000:29:00.0", "AMD Instinct MI250X / MI250", "gfx90a", 65520, 10, 0, 40, 0, 104),
        ),
    ],
)
def test_recorded_machines_are_understood(machine: str, count: int, first: GpuStatus) -> None:
    gpus, problems = parse_smi(answers(machine))
    assert (problems, len(gpus), gpus[0]) == ([], count, first)
    assert {path.name for path in RECORDED.iterdir() if path.is_dir()} == set(MACHINES.values()), "each has a test"


def test_a_partition_has_the_heat_and_ecc_of_its_gpu() -> None:
    """Made from a recorded machine: nobody has recorded one in CPX mode."""
    said = {what: json.loads(text) for what, text in answers("mi300x-8-rocm6.4").items()}
    said["list"][1]["bdf"] = "0000:05:00.1"
    said["metric"][1] |= {"ecc": "N/A", "temperature": "N/A"}
    said["metric"][0]["ecc"]["total_uncorrectable_count"] = 3
    found, problems = parse_smi({what: json.dumps(data) for what, data in said.items()})
    assert problems == []
    assert (found[1].bdf, found[1].ecc_uncorrectable, found[1].temperature_c) == ("0000:05:00.1", 3, 36.0)
    said["list"][1]["bdf"] = "0000:05:01.0"  # a GPU of its own, of which nothing is known
    _, problems = parse_smi({what: json.dumps(data) for what, data in said.items()})
    assert [one.bdf for one in problems] == ["0000:05:01.0"] * 2


ABSENT = object()
VRAM, ECC, TARGET = "mem_usage.used_vram", "ecc.total_uncorrectable_count", "asic.target_graphics_version"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("mem_usage", "N/A", "mem_usage is 'N/A'"),
        (VRAM, "N/A", "used_vram is 'N/A'"),
        (VRAM, ABSENT, "used_vram is 'absent'"),
        (VRAM, 283, "used_vram is 283"),
        (VRAM, {"value": "N/A", "unit": "MB"}, "used_vram is {'value': 'N/A'"),
        (VRAM, {"value": 283, "unit": "pages"}, "used_vram is {'value': 283, 'unit': 'pages'"),
        (VRAM, {"value": 283, "unit": ["MB"]}, "used_vram is {'value': 283, 'unit': ['MB']"),
        (VRAM, {"value": -1, "unit": "MB"}, "used_vram is {'value': -1"),
        (VRAM, {"value": True, "unit": "MB"}, "used_vram is {'value': True"),
        (VRAM, {"value": 1e400, "unit": "MB"}, "used_vram is {'value': inf"),
        ("ecc", "N/A", "ecc is 'N/A'"),
        (ECC, "N/A", "its count of uncorrectable ECC errors is 'N/A'"),
        (ECC, ABSENT, "its count of uncorrectable ECC errors is 'absent'"),
        (ECC, "0", "its count of uncorrectable ECC errors is '0'"),
        ("temperature", ABSENT, "temperature is 'absent'"),
        ("temperature", {"edge": "N/A", "hotspot": "N/A", "mem": "N/A"}, "no sensor"),
        ("temperature.hotspot", "N/A", ""),
        ("temperature.hotspot", {"value": 36, "unit": "F"}, "its hotspot temperature is"),
        ("temperature.hotspot", {"value": 0, "unit": "C"}, "its hotspot temperature is 0 C"),
        ("temperature.mem", {"value": -273, "unit": "C"}, "its mem temperature is -273 C"),
        ("ecc.total_deferred_count", "0", "its count of deferred ECC errors is '0'"),
        ("ecc.total_deferred_count", "N/A", ""),
        ("asic.num_compute_units", "many", "its number of compute units is 'many'"),
        ("temperature.mem", {"value": float("nan"), "unit": "C"}, "its mem temperature is {'value': nan"),
        (TARGET, "N/A", "its gfx arch is 'N/A'"),
        (TARGET, "9.4.2", "its gfx arch is '9.4.2'"),
        ("asic", ABSENT, "asic is 'absent'"),
        ("bdf", "N/A", "its PCI address is 'N/A'"),
        ("bdf", ABSENT, "its PCI address is 'absent'"),
    ],
)
def test_what_is_not_understood_is_named(key: str, value: object, problem: str) -> None:
    texts = answers("mi300x-8-rocm6.4")
    *above, last = key.split(".")
    what = {"asic": "static", "bdf": "list"}.get(key.split(".", maxsplit=1)[0], "metric")
    data = json.loads(texts[what])
    section = data[3][above[0]] if above else data[3]
    if value is ABSENT:
        del section[last]
    else:
        section[last] = value
    gpus, problems = parse_smi({**texts, what: json.dumps(data)})
    assert [one.text.startswith(f"GPU 3: {problem}") for one in problems] == [True] * bool(problem)
    assert [one.bdf for one in problems] == ["" if what == "list" else "0000:65:00.0"] * bool(problem)
    assert [gpu.index for gpu in gpus] == [index for index in range(8) if index != 3 or not problem]


def test_a_gpu_that_one_command_leaves_out_is_named() -> None:
    texts = answers("mi300x-8-rocm6.4")
    for what, problem in (("metric", "amd-smi metric does not mention it"), ("list", "amd-smi list does not")):
        shorter = json.dumps(json.loads(texts[what])[:-1])
        gpus, problems = parse_smi({**texts, what: shorter})
        assert len(gpus) == 7
        assert [problem in one.text and one.text.startswith("GPU 7: ") for one in problems] == [True]


def test_a_decimal_stepping_is_the_same_arch() -> None:
    texts = answers("mi250-4-rocm6.2")
    gpus, problems = parse_smi({**texts, "static": texts["static"].replace('"gfx90a"', '"gfx9010"')})
    assert problems == []
    assert {gpu.arch for gpu in gpus} == {"gfx90a"}


def test_gigabytes_and_bytes_are_mebibytes() -> None:
    texts = answers("mi355x-1-rocm7.2")
    data = json.loads(texts["metric"])
    data["gpu_data"][0]["mem_usage"] |= {
        "used_vram": {"value": 283 * 2**20, "unit": "B"},
        "total_vram": {"value": 288, "unit": "GB"},
    }
    gpus, _ = parse_smi({**texts, "metric": json.dumps(data)})
    assert (gpus[0].vram_used_mib, gpus[0].vram_total_mib) == (283, 294912)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("WARNING: the user is not in the render group\n[]", "Expecting value"),
        ('[{"gpu": 0}', "Expecting ',' delimiter"),
        ("{}", "no list of GPUs"),
        ("[1, 2]", "no list of GPUs"),
        ('{"gpu_data": {}}', "no list of GPUs"),
        ('[{"gpu": "0"}]', "the index of a GPU is '0'"),
        ('[{"gpu": 0}, {"gpu": 0}]', "two GPUs of the same index"),
    ],
)
@pytest.mark.parametrize("what", ["list", "static", "metric"])
def test_an_unknown_shape_is_an_error(what: str, text: str, words: str) -> None:
    with pytest.raises(host.SickNodeError, match=words) as error:
        parse_smi({**answers("mi300x-8-rocm6.4"), what: text})
    assert error.value.where == f"amd-smi {what} --json"


@pytest.fixture
def busy(node: FakeNode) -> FakeNode:
    """A node with processes that hold no GPU, and two GPUs in its topology."""
    node.process(1, "systemd")
    node.process(500, "bash", parent=1, opens=("/dev/null", "/dev/dri/card0"))
    for number in range(2):
        write_gpu(node.kfd, number + 2, minor=128 + 8 * number, bus=0x05 + 0x21 * number, gpu_id=21000 + number)
    return node


def found(busy: FakeNode, **env: str) -> tuple[list[str], list[str]]:
    own = gpus.own_nodes(env, busy.kfd)
    return gpus.find_holders(own, allowed=env.get(gpus.ALLOWED_HOLDERS, ""), proc=busy.proc, kfd=busy.kfd)


def test_every_holder_is_named_but_a_declared_monitor(busy: FakeNode) -> None:
    assert found(busy) == ([], [])
    for pid, name in ((300, "gpuagent"), (301, "gpuagentx")):
        busy.process(pid, name, opens=("/dev/kfd",))
    busy.process(4000, "server", parent=1)
    busy.process(4242, "python3", state="Z", parent=4000)
    for pid in (777, 4242):  # known to the driver: one whose process is gone, and a zombie
        (busy.kfd / f"proc/{pid}").mkdir()
    busy.process(4300, "python3", opens=("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD128"))
    (busy.proc / "4300/environ").write_bytes(f"BUILDKITE_JOB_ID={JOB}\0".encode())
    busy.process(4400, "python3", state="Z")  # whose other thread still runs
    busy.process(4401, "thread", opens=("/dev/kfd",))
    (busy.proc / "4400/task").mkdir()
    (busy.proc / "4401").rename(busy.proc / "4400/task/4401")
    assert found(busy, HILGATE_ALLOWED_HOLDERS="node_exporter gpuagent") == (
        [
            "process 301 (gpuagentx, state S) holds /dev/kfd",
            "zombie 777 (gone) keeps /dev/kfd; its parent is 0",
            "zombie 4242 (python3) keeps /dev/kfd; its parent is 4000 (server, state S)",
            f"process 4300 (python3, state S) of job {JOB} holds /dev/dri/renderD128 and /dev/kfd",
            "zombie 4400 (python3) keeps /dev/kfd; its parent is 1 (systemd, state S)",
        ],
        [],
    )


def test_on_a_shared_machine_another_agents_gpu_is_not_ours(busy: FakeNode) -> None:
    busy.process(4242, "python3", opens=("/dev/kfd", "/dev/dri/renderD128"))
    (busy.kfd / "proc/4242").mkdir()
    (busy.kfd / "proc/4242/vram_21000").write_text("4096\n")
    (busy.kfd / "proc/4242/vram_21001").write_text("0\n")
    assert found(busy, HILGATE_RENDER_NODES="renderD136") == ([], [])
    assert len(found(busy, HILGATE_RENDER_NODES="renderD128, renderD136")[0]) == 1
    for held in ("1048576", "not a number"):  # memory of ours without an open file
        (busy.kfd / "proc/4242/vram_21001").write_text(f"{held}\n")
        assert len(found(busy, HILGATE_RENDER_NODES="renderD136")[0]) == 1


def test_processes_that_nobody_can_look_into_are_a_problem(busy: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    busy.process(4242, "python3")
    seen = gpus._open_devices
    monkeypatch.setattr(gpus, "_open_devices", lambda proc, pid: None if pid == 4242 else seen(proc, pid))
    assert found(busy) == ([], []), "the driver's list covers other users"
    (busy.kfd / "proc").rmdir()
    assert found(busy)[1] == [
        f"1 processes of other users may hold a GPU: the driver does not list its own in {busy.kfd}/proc"
    ]


def test_the_topology_gives_pci_addresses(busy: FakeNode) -> None:
    write_gpu(busy.kfd, 0, minor=0)
    listed = {node.name: node.bdf for node in gpus.topology(busy.kfd)}
    assert listed == {"renderD128": "0000:05:00.0", "renderD136": "0000:26:00.0"}
