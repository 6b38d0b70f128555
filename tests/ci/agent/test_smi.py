"""amd-smi is read strictly: recorded machines are understood, and an unknown shape is a sentence, never a zero."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.nodes import MACHINES, RECORDED, ToyNode

from hilgate.agent import smi

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def answers(machine: str) -> dict[str, str]:
    return {what: (RECORDED / machine / f"{what}.json").read_text() for what in ("list", "static", "metric")}


def understood(texts: dict[str, str]) -> tuple[list[smi.Gpu], list[str]]:
    return smi.understand(texts["list"], texts["static"], texts["metric"])


@pytest.mark.parametrize(
    ("machine", "count", "first"),
    [
        ("mi300x-8-rocm6.4", 8, smi.Gpu(0, "0000:05:00.0", "AMD Instinct MI300X", "gfx942", 196592, 284, 0, 36.0)),
        ("mi355x-1-rocm7.2", 1, smi.Gpu(0, "0000:75:00.0", "AMD Instinct MI355X", "gfx950", 294896, 283, 0, 41.0)),
        ("mi250-4-rocm6.2", 8, smi.Gpu(0, "0000:29:00.0", "AMD Instinct MI250X / MI250", "gfx90a", 65520, 10, 0, 40.0)),
    ],
    ids=["8x MI300X", "1x MI355X", "4x MI250 with 2 dies"],
)
def test_recorded_machines_are_understood(machine: str, count: int, first: smi.Gpu) -> None:
    gpus, problems = understood(answers(machine))
    assert problems == []
    assert len(gpus) == count
    assert gpus[0] == first


def test_every_recorded_machine_has_a_test() -> None:
    assert {path.name for path in RECORDED.iterdir() if path.is_dir()} == set(MACHINES.values())


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(gpu: dict[str, Any]) -> None:
        for key in keys[:-1]:
            gpu = gpu[key]
        del gpu[keys[-1]]

    return change


def put(value: object, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(gpu: dict[str, Any]) -> None:
        for key in keys[:-1]:
            gpu = gpu[key]
        gpu[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("what", "change", "problem"),
    [
        ("metric", put("N/A", "mem_usage"), "GPU 3: mem_usage is 'N/A'"),
        ("metric", put("N/A", "mem_usage", "used_vram"), "GPU 3: used_vram is 'N/A'"),
        ("metric", drop("mem_usage", "used_vram"), "GPU 3: used_vram is 'absent'"),
        ("metric", put(283, "mem_usage", "used_vram"), "GPU 3: used_vram is 283"),
        (
            "metric",
            put({"value": "N/A", "unit": "MB"}, "mem_usage", "used_vram"),
            "GPU 3: used_vram is {'value': 'N/A'",
        ),
        ("metric", put({"value": 283, "unit": "pages"}, "mem_usage", "used_vram"), "'unit': 'pages'"),
        ("metric", put({"value": -1, "unit": "MB"}, "mem_usage", "used_vram"), "{'value': -1"),
        ("metric", put({"value": True, "unit": "MB"}, "mem_usage", "used_vram"), "{'value': True"),
        ("metric", put("N/A", "ecc"), "GPU 3: ecc is 'N/A'"),
        ("metric", put("N/A", "ecc", "total_uncorrectable_count"), "uncorrectable ECC errors is 'N/A'"),
        ("metric", drop("ecc", "total_uncorrectable_count"), "uncorrectable ECC errors is 'absent'"),
        ("metric", put("0", "ecc", "total_uncorrectable_count"), "uncorrectable ECC errors is '0'"),
        ("metric", put("N/A", "temperature", "hotspot"), ""),
        ("metric", put({"edge": "N/A", "hotspot": "N/A", "mem": "N/A"}, "temperature"), "no sensor"),
        ("metric", put({"value": 36, "unit": "F"}, "temperature", "hotspot"), "hotspot temperature is"),
        ("metric", drop("temperature"), "GPU 3: temperature is 'absent'"),
        ("static", put("N/A", "asic", "target_graphics_version"), "its gfx arch is 'N/A'"),
        ("static", put("9.4.2", "asic", "target_graphics_version"), "its gfx arch is '9.4.2'"),
        ("static", drop("asic"), "GPU 3: asic is 'absent'"),
        ("list", put("N/A", "bdf"), "its PCI address is 'N/A'"),
        ("list", drop("bdf"), "its PCI address is 'absent'"),
    ],
)
def test_what_is_not_understood_is_named(what: str, change: Callable[[dict[str, Any]], None], problem: str) -> None:
    texts = answers("mi300x-8-rocm6.4")
    data = json.loads(texts[what])
    change(data[3])
    gpus, problems = understood({**texts, what: json.dumps(data)})
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)
    assert [gpu.index for gpu in gpus] == [index for index in range(8) if index != 3 or not problem]


def test_a_gpu_that_one_command_leaves_out_is_named() -> None:
    texts = answers("mi300x-8-rocm6.4")
    for what, problem in (("metric", "amd-smi metric does not mention it"), ("list", "amd-smi list does not")):
        shorter = json.dumps(json.loads(texts[what])[:-1])
        gpus, problems = understood({**texts, what: shorter})
        assert len(gpus) == 7
        assert [problem in text and text.startswith("GPU 7: ") for text in problems] == [True]


def test_a_decimal_stepping_is_the_same_arch() -> None:
    texts = answers("mi250-4-rocm6.2")
    gpus, problems = understood({**texts, "static": texts["static"].replace('"gfx90a"', '"gfx9010"')})
    assert problems == []
    assert {gpu.arch for gpu in gpus} == {"gfx90a"}


def test_gigabytes_and_bytes_are_mebibytes() -> None:
    texts = answers("mi355x-1-rocm7.2")
    data = json.loads(texts["metric"])
    data["gpu_data"][0]["mem_usage"] |= {
        "used_vram": {"value": 283 * 2**20, "unit": "B"},
        "total_vram": {"value": 288, "unit": "GB"},
    }
    gpus, _ = understood({**texts, "metric": json.dumps(data)})
    assert (gpus[0].vram_used_mib, gpus[0].vram_total_mib) == (283, 294912)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("WARNING: the user is not in the render group\n[]", "not JSON"),
        ('[{"gpu": 0}', "not JSON"),
        ("{}", "no list of GPUs"),
        ("null", "no list of GPUs"),
        ("[1, 2]", "no list of GPUs"),
        ('{"gpu_data": {}}', "no list of GPUs"),
        ("[{}]", "index None"),
        ('[{"gpu": "0"}]', "index '0'"),
        ('[{"gpu": 0}, {"gpu": 0}]', "index 0"),
    ],
)
@pytest.mark.parametrize("what", ["list", "static", "metric"])
def test_an_unknown_shape_is_an_error(what: str, text: str, words: str) -> None:
    with pytest.raises(smi.AmdSmiError, match=words) as error:
        understood({**answers("mi300x-8-rocm6.4"), what: text})
    assert error.value.where == f"amd-smi {what} --json"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sleep 60", "did not answer within 0.2 s"),
        ("trap '' TERM; while :; do sleep 1; done", "did not answer within 0.2 s"),
        ("echo 'No GPU is in the group' >&2; exit 3", "status 3: No GPU is in the group"),
        ("kill -ABRT $$", "status -6"),
        ("printf '[{\\377'", "not JSON"),
    ],
    ids=["hangs", "hangs and ignores SIGTERM", "fails", "aborts", "garbage"],
)
def test_a_program_that_does_not_answer(body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = ToyNode(tmp_path / "node", "amd_mi300_8")
    node.program("amd-smi", body)
    monkeypatch.setenv("PATH", f"{node.bin}:/usr/bin:/bin")
    with pytest.raises(smi.AmdSmiError, match=words):
        smi.read(seconds=0.2 if "sleep" in body else 10.0)


def test_no_amd_smi_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(smi.AmdSmiError, match="amd-smi cannot be started: No such file"):
        smi.read()
