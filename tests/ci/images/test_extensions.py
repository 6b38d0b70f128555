# SPDX-License-Identifier: Apache-2.0
"""The extensions compiled without ROCm: what differs from the record is red, and nothing is kept that was not built."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.images import ROOT, instructions
from support.planted import instead, must_be_noticed, planted

from hilgate.errors import CannotRunHereError, DeclarationError
from hilgate.images import engines
from hilgate.images.engines import BuildFailedError, BuildRequest
from hilgate.images.pins import read

ARCHS = ("gfx90a", "gfx942", "gfx950")
KERNELS = {"64 0 32 0 0 0 8192": 2, "128 0 40 0 0 0 0": 1}  # vgpr agpr sgpr spills spills scratch lds -> kernels
UNITS = {unit: {"archs": {arch: dict(KERNELS) for arch in ARCHS}} for unit in ("scan_fwd", "scan_bwd")}


sys.path.append(str(ROOT / "docker"))  # scripts of this folder import each other by name
measured, compiling = importlib.import_module("extensions"), importlib.import_module("compile_extensions")
sys.path.remove(str(ROOT / "docker"))


def _without(*path):
    def plant(units):
        for key in path[:-1]:
            units = units[key]
        del units[path[-1]]

    return plant


def _figures(text, count=1):
    def plant(units):
        kernels = units["scan_fwd"]["archs"]["gfx950"]
        kernels["64 0 32 0 0 0 8192"] -= 1
        kernels[text] = kernels.get(text, 0) + count

    return plant


GFX950 = "scan_fwd for gfx950"
FAULTS = {
    "unit-gone": (_without("scan_bwd"), "scan_bwd is in the record and was not compiled"),
    "arch-new": (
        lambda units: units["scan_fwd"]["archs"].update(gfx1250=dict(KERNELS)),
        "scan_fwd for gfx1250 is not in the record: an architecture is new",
    ),
    "unit-new": (
        lambda units: units.update(scan_new=units["scan_bwd"]),
        "scan_new is not in the record: a unit is new",
    ),
    "arch-gone": (_without("scan_fwd", "archs", "gfx950"), f"{GFX950} holds no kernel"),
    "arch-empty": (lambda units: units["scan_fwd"]["archs"].update(gfx950={}), f"{GFX950} holds no kernel"),
    "kernel-gone": (
        _without("scan_fwd", "archs", "gfx950", "128 0 40 0 0 0 0"),
        f"{GFX950} has 2 kernels, recorded are 3",
    ),
    "spill": (_figures("64 0 32 7 0 28 8192"), f"{GFX950} spills 7 registers, recorded are 0"),
    "scalar-spill": (_figures("64 0 32 0 3 0 8192"), f"{GFX950} spills 3 registers, recorded are 0"),
    "lds": (_figures("64 0 32 0 0 0 65536"), f"{GFX950} has kernels of other registers, scratch or LDS"),
}


@planted(FAULTS)
def test_what_is_not_as_recorded_is_red(fault):
    found = copy.deepcopy(UNITS)
    fault.change(found)
    recorded = measured.summary(UNITS)
    must_be_noticed(fault, partial(measured.complaints, recorded), instead(measured.summary(found)), recorded)


def test_a_sample_is_one_unit_for_one_architecture():
    found, recorded = measured.summary({"scan_fwd": {"archs": {"gfx942": dict(KERNELS)}}}), measured.summary(UNITS)
    assert measured.complaints(recorded, found, "gfx942") == []
    assert measured.complaints(recorded, found, "gfx950") == [f"{GFX950} holds no kernel"]


def test_the_record_has_a_line_for_each_unit():
    text = (ROOT / "docker/extensions.json").read_text()
    sources = json.loads(text)["sources"]
    assert measured.written(sources) == text
    assert len(text.splitlines()) <= 100
    assert {name: len(one["units"]) for name, one in sources.items()} == {"causal-conv1d": 3, "mamba-ssm": 9, "vllm": 4}
    for one in sources.values():
        for arch, kernels in one["kernels"].items():
            assert sum(archs[arch][0] for archs in one["units"].values()) == kernels > 0


HIPCC = """#!/bin/sh
echo "$*" >> calls
case "$*" in *-E*) mode=preprocess ;; *) mode=object ;; esac
if [ -e fails ] && grep -q $mode fails; then exit 3; fi
for last; do :; done
{ echo $mode; cat unit.hip; } > "$last"
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """launcher(): exit status and reuse of one compilation, over a compiler that copies."""
    (tmp_path / "real").write_text(HIPCC)
    (tmp_path / "real").chmod(0o755)
    (tmp_path / "unit.hip").write_text("kernel")
    (tmp_path / "toolchain").write_text("clang 22")
    (tmp_path / "objects").mkdir()
    for name, path in (("HIPCC", "real"), ("OBJECTS", "objects"), ("TOOLCHAIN", "toolchain")):
        monkeypatch.setenv(f"HILGATE_{name}", str(tmp_path / path))

    def compile_it(*words):
        words = words or ("-c", "unit.hip", "-o", "build/unit.o", "--offload-arch=gfx942")
        (tmp_path / "build").mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, ROOT / "docker/hip/hipcc", *words], cwd=tmp_path, check=False)
        events = tmp_path / "objects/units.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return done.returncode, [line["reused"] for line in lines]

    compile_it.folder = tmp_path
    return compile_it


def test_an_object_is_kept_and_taken_again_by_what_it_is_made_of(launcher):
    assert launcher() == (0, [False])
    assert launcher() == (0, [False, True])
    assert (launcher.folder / "build/unit.o").read_text() == "object\nkernel"
    (launcher.folder / "unit.hip").write_text("kernel 2")
    assert launcher()[1][-1] is False
    (launcher.folder / "toolchain").write_text("clang 23")
    assert launcher()[1][-1] is False
    assert launcher("-c", "unit.hip", "--offload-arch=gfx950", "-o", "build/unit.o")[1][-1] is False
    assert launcher("-c", "unit.hip", "--offload-arch=gfx950", "-o", "build/other.o")[1][-1] is True


@pytest.mark.parametrize("mode", ["preprocess", "object"])
def test_a_unit_that_does_not_compile_leaves_no_object(launcher, mode):
    (launcher.folder / "fails").write_text(mode)
    assert launcher() == (3, [])
    assert list((launcher.folder / "objects").iterdir()) == []
    assert not (launcher.folder / "build/unit.o").exists()
    (launcher.folder / "fails").unlink()
    assert launcher() == (0, [False])


@pytest.mark.parametrize("damage", [b"", b"object\nkernex"], ids=["empty", "other-bytes"])
def test_a_kept_object_that_is_not_whole_is_compiled_again(launcher, damage):
    launcher()
    (kept,) = (launcher.folder / "objects").glob("*.o")
    kept.write_bytes(damage)
    assert launcher()[1] == [False, False]
    assert (launcher.folder / "build/unit.o").read_text() == "object\nkernel"
    (fact,) = (launcher.folder / "objects").glob("*.json")
    fact.write_text("{")  # a disk that was full
    assert launcher()[1] == [False, False, False]


def test_anything_but_a_compilation_goes_to_the_compiler(launcher):
    assert launcher("--version") == (0, [])
    (launcher.folder / "objects").rmdir()  # outside a build nothing is kept
    assert launcher("-c", "unit.hip", "-o", "build/unit.o") == (0, [])
    assert (launcher.folder / "calls").read_text().splitlines() == ["--version", "-c unit.hip -o build/unit.o"]


def test_each_unit_that_is_done_is_said():
    done = {"unit": "b", "reused": False, "seconds": 400, "cpu_seconds": 200}
    assert compiling.progress(done, 2, 3) == "b: compiled in 400 s (200 s of a core); 2 of 3 units"
    assert compiling.progress(done | {"reused": True}, 1, 0) == "b: kept; 1 of 1 units"


def test_a_stage_is_built_from_what_it_needs_and_nothing_else():
    recipe = (ROOT / "docker/rocm.Dockerfile").read_text()
    for name, stage in (("causal-conv1d", "build-conv1d"), ("mamba-ssm", "build-mamba")):
        text = compiling.cut(recipe, stage)
        named = [one["value"].rpartition(" ")[2] for one in instructions("rocm", text) if one["instruction"] == "FROM"]
        assert named == ["base", "compiler", stage]
        assert f"wheel-{name}.sh" in text
    assert compiling.cut(recipe, "rocm").count("FROM ") == recipe.count("FROM ")
    whole = compiling.cut(recipe, "rocm", compiling.ABSENT)
    assert recipe.count("FROM ") - whole.count("FROM ") == 2 * len(compiling.ABSENT)
    assert [name for name in ("aiter", "vllm", "mamba", "conv1d") if f"wheels-{name}" in whole] == ["mamba", "conv1d"]


def test_a_failed_step_is_named_with_its_line_and_the_way_in(tmp_path, monkeypatch):
    monkeypatch.setattr(engines.shutil, "which", lambda name: name)
    monkeypatch.setattr(engines.os, "geteuid", lambda: 0)
    monkeypatch.setattr(engines, "FREE", 0)
    engine = engines.Buildah(tmp_path / "store", "hip", Path("rootfs.sh"))
    (tmp_path / "Dockerfile").write_text("FROM base AS base\n# why\nRUN one \\\n    && two\n")
    asked = BuildRequest("x", "1", "Dockerfile", tmp_path, {}, {}, "", {}, tmp_path / "log")

    def fails(_words, log, *_):
        log.write_text("STEP 1/2: FROM base AS base\n--> 0123456789ab\nSTEP 2/2: RUN one     && two\nno such thing\n")
        raise BuildFailedError("buildah ended with 2", where="log")

    def missing(*_):
        raise CannotRunHereError("buildah is not installed")

    monkeypatch.setattr(engines, "build", fails)
    monkeypatch.setattr(engines, "answer", lambda _words: "[]")
    monkeypatch.setattr(engines, "output", missing)  # what tidies up behind a failed build must not hide why it failed
    with pytest.raises(BuildFailedError) as failure:
        engine.bud(asked, {"BASE": "b"})
    for part in ("at Dockerfile:3 RUN one", f"--root {tmp_path}/store/storage", "from 0123456789ab) -- bash"):
        assert part in str(failure.value)


class Store:
    """Buildah that has every image, and what each container that it runs prints."""

    suite = "hip-1"

    def __init__(self, *_: object) -> None:
        self.printed = (0, "\n".join(compiling.PATCHED))

    def find(self, *_):
        return "sha256:1"

    def size(self, *_):
        return 1.0, 1

    def name(self, *_):
        return "name"

    def run(self, *_):
        return self.printed


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "Buildah", Store)
    monkeypatch.setattr(compiling, "pip_settings", lambda: {"pip_conf": "", "mounts": {}})
    return compiling.Extensions(ROOT, tmp_path / "scratch", tmp_path / "out")


def outcomes(checks) -> dict[str, str]:
    return {check.id: check.outcome.value for check in checks}


@pytest.mark.parametrize(
    ("status", "reported", "outcome"),
    [
        (0, compiling.PATCHED, "pass"),
        (0, ("gfx950 without=64 with=64",), "fail"),
        (1, compiling.PATCHED, "fail"),
        (0, (), "fail"),
    ],
    ids=["needed", "not-needed", "does-not-apply", "nothing"],
)
def test_a_patch_is_there_for_what_it_changes(run, status, reported, outcome):
    run.engine.printed = (status, "\n".join(("unpack.sh: a.patch", *reported)))
    run.recorded = {}
    checks = outcomes(run.run(sample=True, record=False))
    assert checks["mamba-ssm: its patch is needed"] == outcome
    assert checks["sample"] == "fail"  # nothing is recorded


def test_the_sample_is_compared_by_the_name_of_its_unit(run, monkeypatch):
    """hipcc of the base names a unit by the object that it is asked for."""
    source, unit, arch = compiling.SAMPLE
    flags = ["-c", "unit.hip", "--offload-arch=gfx90a", f"--offload-arch={arch}"]
    run.recorded = {source: {"flags": shlex.join(flags)}}
    asked = []
    monkeypatch.setattr(run.engine, "run", lambda *words: asked.append(words[2]) or (0, ""))
    monkeypatch.setattr(run, "_measured", lambda *_: {})
    assert outcomes(run.run(sample=True, record=False))["sample"] == "pass"
    assert asked[-1][2].endswith(f'exec hipcc "$@" -o {unit}.o')
    assert asked[-1][-3:] == ["-c", "unit.hip", f"--offload-arch={arch}"]


def test_a_record_of_another_key_is_not_current(run):
    run.recorded = {name: {"key": key} for name, key in run.keys.items()}
    assert all(run._current(name).outcome.value == "pass" for name in compiling.SOURCES)
    run.recorded["mamba-ssm"]["key"] = "0" * 64
    assert "make extensions ARGS=--record" in run._current("mamba-ssm").message


def test_each_source_is_recorded_before_the_next_is_built(run, monkeypatch):
    """What fails later, hours after it, takes nothing of the record."""
    path = run.scratch.with_name("record.json")
    monkeypatch.setattr(compiling, "RECORD", str(path))
    run.recorded = {}
    monkeypatch.setattr(run, "_wheel", lambda name: {"key": run.keys[name], "units": UNITS})

    def fails():
        raise BuildFailedError("vLLM's kernels do not compile")

    monkeypatch.setattr(run, "_vllm", fails)
    assert run.run(sample=False, record=True)[-1].message == "vLLM's kernels do not compile"
    again = compiling.Extensions(ROOT, run.scratch, run.out)
    found = {name: again._current(name).outcome.value for name in again.keys}
    assert found == dict.fromkeys(compiling.SOURCES, "pass") | {"vllm": "fail"}


def test_a_wheel_that_was_not_built_is_not_one(run):
    """A container that copies nothing, as after a full disk: no folder of this key stays."""
    run.engine.printed = (1, "No space left on device")
    checks = run.run(sample=False, record=False)
    assert "no wheel: No space left on device" in checks[-1].message
    assert not list((run.scratch / "wheels").glob("*[!l]"))


@pytest.mark.parametrize("text", ["", "{}", "[]"], ids=["empty", "other", "list"])
def test_a_record_that_is_none_is_refused(run, monkeypatch, text):
    path = run.scratch.with_name("record.json")
    path.write_text(text)
    monkeypatch.setattr(compiling, "RECORD", str(path))
    with pytest.raises(DeclarationError, match="no record"):
        compiling.Extensions(ROOT, run.scratch, run.out)


def fetched(folder: Path, *, status: int = 0, body: str = "package") -> subprocess.CompletedProcess[str]:
    """rootfs.sh over one package, a curl that gives `body`, and a dpkg-deb that unpacks nothing."""
    (folder / "bin").mkdir(exist_ok=True)
    hip = folder / "hip"
    hip.mkdir(exist_ok=True)
    (hip / "rootfs.sh").write_bytes((ROOT / "docker/hip/rootfs.sh").read_bytes())
    sha = hashlib.sha256(b"package").hexdigest()
    (hip / "debs.txt").write_text(
        f"{sha} pool/main/h/hipcc_7.2.4_amd64.deb\n{sha} pool/libamdhip64-dev_7.2.4-1_amd64.deb\n"
    )
    programs = {
        "curl": f'while [ "$1" != --output ]; do shift; done; printf %s {body} > "$2"; exit {status}',
        "dpkg-deb": "tar -c -T /dev/null",
    }
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "DEBIAN_MIRROR": "http://mirror"}
    words = ["bash", str(hip / "rootfs.sh"), "name", str(folder / "root")]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_a_base_is_made_of_all_listed_packages_or_not_at_all(tmp_path):
    gone = fetched(tmp_path, status=22)
    assert (gone.returncode, (tmp_path / "root").exists()) == (4, False)
    assert "http://mirror has no pool/main/h/hipcc_7.2.4_amd64.deb (any more)" in gone.stderr
    other = fetched(tmp_path, body="other")
    assert (other.returncode, (tmp_path / "root").exists()) == (3, False)
    assert "is not the package of debs.txt" in other.stderr
    assert not list((tmp_path / "root.debs").glob("*.deb"))
    (tmp_path / "root.partial").mkdir()
    (tmp_path / "root.partial/left-over").touch()
    made = fetched(tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "root/opt/rocm/.info/version").read_text() == "7.2.4\n"
    assert "hipcc_7.2.4" in (tmp_path / "root/opt/rocm/.info/toolchain").read_text()
    assert not (tmp_path / "root/left-over").exists()
    assert not (tmp_path / "root.debs").exists()


def test_the_packages_are_of_the_rocm_that_the_image_has(root):
    """The same minor version of HIP, and one line for each package."""
    lines = [line.split() for line in (root / "docker/hip/debs.txt").read_text().splitlines()]
    assert all(len(sha) == 64 and path.startswith("pool/main/") for sha, path in lines)
    assert len({path for _, path in lines}) == len(lines)
    versions = {path.split("_")[1].split("-")[0] for _, path in lines if "/hipcc_" in path or "amdhip64-dev" in path}
    minor = read(root).rocm.rocm.rpartition(".")[0]
    assert {version.split("+")[0].rpartition(".")[0] for version in versions} == {minor}


def test_no_root_is_said_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(engines.shutil, "which", lambda name: name)
    monkeypatch.setattr(engines.os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRunHereError, match="need root"):
        compiling.Extensions(ROOT, tmp_path / "scratch", tmp_path / "out")
