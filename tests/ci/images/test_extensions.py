# SPDX-License-Identifier: Apache-2.0
"""The extensions compiled without ROCm: a unit without kernels is red, and nothing is kept that was not built."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.images import ROOT, instructions

from hilgate.errors import CannotRunHereError
from hilgate.images import engines
from hilgate.images.engines import BuildFailedError, BuildRequest
from hilgate.images.pins import read

sys.path.append(str(ROOT / "docker"))  # scripts of this folder import each other by name
compiling = importlib.import_module("compile_extensions")
sys.path.remove(str(ROOT / "docker"))


@pytest.mark.parametrize(
    ("archs", "problems"),
    [
        ({"gfx942": {"64 0 32 0 0 0 8192": 2}, "gfx950": {"64 0 32 0 0 0 8192": 2}}, []),
        ({"gfx942": {"64 0 32 0 0 0 8192": 2}}, ["scan holds no kernel for gfx950"]),
        ({"gfx942": {}, "gfx950": {}}, ["scan holds no kernel for gfx942", "scan holds no kernel for gfx950"]),
        (None, ["no unit was compiled"]),
    ],
    ids=["both", "an architecture is absent", "empty code objects", "nothing"],
)
def test_each_unit_holds_kernels_for_each_architecture(archs, problems):
    units = {} if archs is None else {"scan": {"archs": archs}}
    assert compiling.without_kernels(units, ("gfx942", "gfx950")) == problems


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
    assert outcomes(run.run(sample=True))["mamba-ssm: its patch is needed"] == outcome


def test_the_sample_holds_kernels_or_is_red(run, monkeypatch):
    _, unit, arch = compiling.SAMPLE
    scripts = []

    def compiles(*words):
        scripts.append(words[2][2])
        run.events.touch()
        return run.engine.printed

    assert "cannot be measured" in run.run(sample=True)[-1].message  # the container compiled nothing
    monkeypatch.setattr(run, "engine", Store())
    monkeypatch.setattr(run.engine, "run", compiles)
    for kernels, outcome in ({}, "fail"), ({"64 0 32 0 0 0 8192": 54}, "pass"):
        made = {unit: {"archs": {arch: kernels}, "cpu_seconds": 1}}
        monkeypatch.setattr(compiling, "measured", lambda *_, made=made: made)
        assert run.run(sample=True)[-1].outcome.value == outcome
    assert f"{unit}.o" in scripts[-1]


def test_a_wheel_that_was_not_built_is_not_one(run):
    """A container that copies nothing, as after a full disk: no folder of this key stays."""
    run.engine.printed = (1, "No space left on device")
    checks = run.run(sample=False)
    assert "no wheel: No space left on device" in checks[-1].message
    assert not list((run.scratch / "wheels").glob("*[!l]"))


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
    assert any(path.startswith("pool/main/g/git/") for _, path in lines), "unpack.sh patches with git"
    versions = {path.split("_")[1].split("-")[0] for _, path in lines if "/hipcc_" in path or "amdhip64-dev" in path}
    minor = read(root).rocm.rocm.rpartition(".")[0]
    assert {version.split("+")[0].rpartition(".")[0] for version in versions} == {minor}


def test_no_root_is_said_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(engines.shutil, "which", lambda name: name)
    monkeypatch.setattr(engines.os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRunHereError, match="need root"):
        compiling.Extensions(ROOT, tmp_path / "scratch", tmp_path / "out")
