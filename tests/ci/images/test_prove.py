# SPDX-License-Identifier: Apache-2.0
"""The proof of an image: each way in which an image is not what the pins say stops the build."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BASE = {
    "python": "3.12.3",
    "rocm": "7.2.4",
    "torch": "2.10.0+rocm7.2.4.git3d3aa833",
    "triton": "3.6.0+rocm7.2.4.git4ed88892",
}
FILES = {"torch-files": "a" * 64, "triton-files": "b" * 64}
PARTS = ("rocm", "python", "torch", "triton")
PINS = {
    "archs": ["gfx942", "gfx950"],
    "rocm": {"rocm": "7.2.4", "python": "3.12", "torch": "2.10.0", "triton": "3.6.0"},
    "sources": {"aiter": {"archs": ["gfx942", "gfx950"], "extensions": ["module_"]}},
}


@pytest.fixture
def prove(monkeypatch):
    folder = Path(__file__).parents[3] / "docker"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "codeobjects", raising=False)
    spec = importlib.util.spec_from_file_location("prove", folder / "prove.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pinned_versions_are_accepted_with_local_parts(prove):
    found = prove.pinned(PINS, BASE)
    assert [(one["found"], one["pinned"]) for one in found] == [(BASE[name], PINS["rocm"][name]) for name in PARTS]
    assert {one["differs"] for one in found} == {one["refused"] for one in found} == {""}
    assert prove.table(found).splitlines()[3].split()[:3] == ["torch", BASE["torch"], "2.10.0"]
    assert prove.table([]) == ""
    assert prove.unchanged(BASE | FILES, BASE | FILES) == []


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("triton", "3.6.2", ""),
        ("triton", "3.6.0.post1", ""),
        ("torch", "2.10.1+rocm7.2.4.git0", ""),
        ("rocm", "7.2.40", ""),
        ("triton", "3.7.0", "another minor version"),
        ("triton", "4.6.0", "another minor version"),
        ("triton", "3.60.0", "another minor version"),
        ("torch", "2.1.0", "another minor version"),
        ("torch", "unknown", "another minor version"),
        ("rocm", "7", "another minor version"),
        ("python", "3.120.1", "another minor version"),
        ("python", "3.11.9", "another minor version"),
        ("torch", "missing", "is not there"),
        ("rocm", "missing", "is not there"),
    ],
)
def test_other_versions_are_shown_and_refused_unless_patches(prove, name, value, refused):
    found = {key: version for key, version in (BASE | {name: value}).items() if version != "missing"}
    compared = {one["name"]: one for one in prove.pinned(PINS, found)}
    said = compared.pop(name)
    assert (said["found"], said["pinned"], said["refused"]) == (value, PINS["rocm"][name], refused)
    assert {one["refused"] + one["differs"] for one in compared.values()} == {""}
    (line,) = [line for line in prove.table([said]).splitlines() if line.startswith(name)]
    assert line.endswith(f"REFUSED: {refused}" if refused else "another patch version")


@pytest.mark.parametrize("name", [*BASE, *FILES])
def test_a_replaced_part_of_the_base_is_named(prove, name):
    (message,) = prove.unchanged(BASE | FILES, BASE | FILES | {name: "other"})
    assert message.startswith(f"{name} of the base was replaced")
    assert message.endswith("install with --no-deps")


def test_the_same_version_with_other_files_is_a_replacement(prove, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "triton-3.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n")
    (info / "RECORD").write_text("triton/__init__.py,sha256=rocm,1\n")
    before = prove.versions(("triton",))
    (info / "RECORD").write_text("triton/__init__.py,sha256=cuda,1\n")
    after = prove.versions(("triton",))
    assert before["triton"] == after["triton"] == "3.6.0"
    assert before["triton-files"] != after["triton-files"]
    assert prove.versions(("no-such-distribution",))["no-such-distribution"] == "missing"


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ({"module_a.so": {"gfx942": 3, "gfx950": 3}, "host.so": {}}, []),
        ({"module_a.so": {"gfx942": 3}}, ["aiter: module_a.so has no kernel for gfx950"]),
        ({"module_a.so": {"gfx942": 3, "gfx950": 0}}, ["aiter: module_a.so has no kernel for gfx950"]),
        (
            {"module_a.so": {"gfx942": 1, "gfx950": 1}, "b.so": {"gfx90a": 1}},
            ["aiter: b.so has no kernel for gfx942", "aiter: b.so has no kernel for gfx950"],
        ),
        ({"module_a.so": {}}, ["aiter: no extension module_*.so with device code among 1 libraries"]),
        ({}, ["aiter: no extension module_*.so with device code among 0 libraries"]),
        ({"module_a.so": {"gfx942": 1, "gfx950": 1}, "b.so": "is cut off"}, ["aiter: b.so is cut off"]),
    ],
    ids=["good", "arch-missing", "arch-without-kernels", "another-arch-only", "host-only", "nothing", "unreadable"],
)
def test_code_for_every_architecture(prove, monkeypatch, tmp_path, libraries, message):
    monkeypatch.setattr(
        prove, "_libraries", lambda _name, folder: {folder / key: value for key, value in libraries.items()}
    )
    lines, problems = prove.code(PINS, tmp_path)
    assert problems == message
    assert len(lines) == sum(isinstance(value, dict) and bool(value) for value in libraries.values())


def test_libraries_of_a_distribution_are_found_by_its_record(prove, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "amd_aiter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 1\n")
    (info / "RECORD").write_text("aiter/jit/module_a.so,,\naiter/__init__.py,,\n")
    (tmp_path / "aiter/jit").mkdir(parents=True)
    (tmp_path / "aiter/jit/module_a.so").write_text("no ELF")
    (found,) = prove._libraries("aiter", tmp_path).items()
    assert found[0] == tmp_path / "aiter/jit/module_a.so"
    assert "no readable ELF" in found[1]


def test_a_module_that_raises_anything_is_a_problem(prove, tmp_path, monkeypatch):
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no HIP GPUs')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(prove.IMPORTS, "cpu", ("json", "breaks_at_import", "not_there_at_all"))
    assert [one.split(":")[0] for one in prove.imports("cpu")] == ["import breaks_at_import", "import not_there_at_all"]


def test_packages_that_ask_a_gpu_at_import_work_on_a_builder(prove, tmp_path, monkeypatch):
    text = "import os, torch\nassert torch.cuda.get_device_properties(0).gcnArchName == os.environ['GPU_ARCHS'][:6]\n"
    (tmp_path / "asks_the_first_gpu.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(prove.IMPORTS, "cpu", ("asks_the_first_gpu",))
    assert len(prove.imports("cpu")) == 1
    assert prove.imports("cpu", archs=["gfx942", "gfx950"]) == []


def test_every_pinned_source_has_modules_that_must_import(prove, pins):
    assert set(pins.sources) <= set(prove.IMPORTS)
    assert "amdsmi" in prove.IMPORTS["vllm"]  # without it vLLM finds no platform, and says so on a GPU only


@pytest.mark.parametrize(
    ("modules", "status"), [(("json",), 0), (("json", "not_there_at_all"), 1)], ids=["good", "bad"]
)
def test_the_exit_status_is_the_proof(prove, tmp_path, monkeypatch, modules, status, capsys):
    monkeypatch.setitem(prove.IMPORTS, "cpu", modules)
    assert prove.main(["cpu", str(tmp_path / "proof.json")]) == status
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert bool(proof["problems"]) == bool(status)
    assert "prove: " in capsys.readouterr().out


def test_the_rocm_proof_reads_pins_and_base(prove, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prove, "versions", lambda _names: BASE | FILES)
    monkeypatch.setattr(prove, "code", lambda _pins, _folder: (["module_a.so: gfx942 3"], []))
    monkeypatch.setattr(prove, "site_packages", lambda: tmp_path)
    asked = []
    monkeypatch.setattr(prove, "imports", lambda *parts, archs: asked.extend([*parts, *archs]) or [])
    paths = [str(tmp_path / name) for name in ("pins.json", "base.json", "proof.json")]
    assert prove.main(["record", paths[1]]) == 0
    (tmp_path / "pins.json").write_text(json.dumps(PINS))
    assert prove.main(["rocm", *paths]) == 0
    assert asked == ["rocm", "aiter", "gfx942", "gfx950"]  # of a base without the others nothing of them is asked
    assert json.loads((tmp_path / "proof.json").read_text())["versions"]["bill"]
    for pinned, status in (("3.6.2", 0), ("3.7.0", 1)):
        (tmp_path / "pins.json").write_text(json.dumps(PINS | {"rocm": PINS["rocm"] | {"triton": pinned}}))
        assert prove.main(["rocm", *paths]) == status
        assert json.loads((tmp_path / "proof.json").read_text())["base"][3]["differs"] == "another patch version"
        assert ("REFUSED" in capsys.readouterr().out) == bool(status)
