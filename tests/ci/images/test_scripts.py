# SPDX-License-Identifier: Apache-2.0
"""The scripts and stages of the recipes against a fake tool chain."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.images import ROOT, instructions

ARCHS = ("gfx90a", "gfx942", "gfx950")
SOURCES = {
    "mamba-ssm": ("2.3.2.post1", ARCHS, {"mamba_ssm/__init__.py": '__version__ = "2.3.2.post1"\n'}),
    "causal-conv1d": ("1.7.0", ARCHS, {"causal_conv1d/__init__.py": '__version__ = "1.7.0"\n'}),
    "aiter": ("0.1.24.post1", ARCHS[1:], {"3rdparty/composable_kernel/include/ck.hpp": ""}),
    "vllm": ("0.32.0", ARCHS[:2], {"triton_kernels/python/triton_kernels/triton_kernels/__init__.py": ""}),
}
ENVIRONMENT = {
    "mamba-ssm": "MAMBA_FORCE_BUILD=TRUE MAMBA_KEEP_CUDA_BUILD=TRUE HIP_ARCHITECTURES=gfx90a,gfx942,gfx950",
    "causal-conv1d": "CAUSAL_CONV1D_FORCE_BUILD=TRUE HIP_ARCHITECTURES=gfx90a,gfx942,gfx950",
    "aiter": "AITER_USE_SYSTEM_TRITON=1 PREBUILD_KERNELS=1 GPU_ARCHS=gfx942;gfx950 "
    "SETUPTOOLS_SCM_PRETEND_VERSION=0.1.24.post1",
    "vllm": "VLLM_TARGET_DEVICE=rocm PYTORCH_ROCM_ARCH=gfx90a;gfx942 SETUPTOOLS_SCM_PRETEND_VERSION=0.32.0",
}
FORBIDDEN = ("MAMBA_SKIP_CUDA_BUILD", "CAUSAL_CONV1D_SKIP_CUDA_BUILD")
FLAGS = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir")


def complaints(chain, scripts: Path, name: str, tree: Path) -> list[str]:
    """Build one wheel with these scripts and say what is wrong with how its setup.py would have been started."""
    version, archs, _ = SOURCES[name]
    done = chain.run(str(scripts / f"wheel-{name}.sh"), version, str(tree), str(chain.folder / "wheels"), *archs)
    if done.returncode:
        return [f"exit status {done.returncode}: {done.stderr}"]
    (call,) = chain.calls("python3", "wheel")
    found = [f"{flag} is missing" for flag in FLAGS if flag not in call["words"]]
    for key, value in (pair.split("=") for pair in ENVIRONMENT[name].split()):
        if call["env"].get(key) != value:
            found.append(f"{key} is {call['env'].get(key)}")
    found += [f"{key} is set" for key in FORBIDDEN if key in call["env"]]
    found += [f"{one['program']} was called" for one in chain.calls() if one["program"] in {"git", "curl"}]
    return found


@pytest.fixture
def scripts(tmp_path: Path, root: Path) -> Path:
    return Path(shutil.copytree(root / "docker" / "scripts", tmp_path / "scripts"))


@pytest.fixture
def tree(tmp_path: Path):
    def make(name: str) -> Path:
        for path, text in SOURCES[name][2].items():
            (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / path).write_text(text)
        return tmp_path / "tree"

    return make


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_is_built_as_its_setup_needs_it(chain, scripts, tree, name):
    assert complaints(chain, scripts, name, tree(name)) == []


@pytest.mark.parametrize("archs", [(), ("native",), ("gfx942", ""), ("gfx942;gfx950",), ("all",)], ids=str)
def test_only_named_architectures_are_built_for(chain, scripts, tree, archs):
    done = chain.run(str(scripts / "wheel-mamba-ssm.sh"), "2.3.2.post1", str(tree("mamba-ssm")), "wheels", *archs)
    assert (done.returncode, "architecture" in done.stderr, chain.calls("wheel")) == (2, True, [])


@pytest.mark.parametrize("name", SOURCES)
def test_a_wrong_source_or_one_that_fails_is_no_wheel(chain, scripts, tree, tmp_path, name):
    (tmp_path / "empty").mkdir()
    version, archs, _ = SOURCES[name]
    script = str(scripts / f"wheel-{name}.sh")
    assert chain.run(script, version, str(tmp_path / "empty"), "wheels", *archs).returncode == 3
    assert chain.calls("wheel") == []
    assert chain.run(script, version, str(tree(name)), "wheels", *archs, FAKE_FAILS="python3").returncode == 1
    (chain.programs / "hipcc").unlink()
    assert complaints(chain, scripts, name, tree(name))[0].startswith("exit status 5: wheel.sh: there is no hipcc")


def test_fetch_asks_for_one_source_by_its_hash(chain, scripts):
    for wrong in ("", "main", "ab" * 31):
        assert chain.run(str(scripts / "fetch.sh"), "mamba-ssm", "2.3.2.post1", wrong, "got").returncode == 2
    assert chain.calls() == []
    sha = "ab" * 32
    assert chain.run(str(scripts / "fetch.sh"), "mamba-ssm", "2.3.2.post1", sha, "got").returncode == 0
    (call,) = chain.calls("download")
    assert {"--no-deps", "--require-hashes", ":all:"} <= set(call["words"])
    assert (chain.folder / "got/source.txt").read_text() == f"mamba-ssm==2.3.2.post1 --hash=sha256:{sha}\n"
    assert (chain.folder / "got/source.tar.gz").is_file()


PATCH = "--- a/scan.cuh\n+++ b/scan.cuh\n@@ -1,3 +1,3 @@\n one\n-two\n+deux\n three\n"


@pytest.mark.parametrize(
    ("text", "status"),
    [("one\ntwo\nthree\n", 0), ("one\ntwo\nfour\n", 1), ("one\ndeux\nthree\n", 1), ("", 1)],
    ids=["applies", "needs-fuzz", "is-applied", "other-file"],
)
def test_unpack_applies_patches_exactly_or_stops(chain, scripts, tarball, tmp_path, text, status):
    tarball(tmp_path / "source.tar.gz", {"scan.cuh": text})
    (tmp_path / "a.patch").write_text(PATCH)
    done = chain.run(str(scripts / "unpack.sh"), str(tmp_path / "source.tar.gz"), "tree", str(tmp_path / "a.patch"))
    assert done.returncode == status, done.stderr
    if status == 0:
        assert (chain.folder / "tree/scan.cuh").read_text() == "one\ndeux\nthree\n"


@pytest.mark.parametrize("line", ["torch==2.10.0", "triton==3.6.0 \\", "pytorch-triton-rocm==3", "torchvision==1"])
def test_install_refuses_to_replace_torch_or_triton(chain, scripts, tmp_path, line):
    (tmp_path / "requirements.txt").write_text(f"pytest==9.2.0\n{line}\n")
    done = chain.run(str(scripts / "install.sh"), str(tmp_path / "requirements.txt"))
    assert (done.returncode, chain.calls()) == (3, [])


@pytest.mark.parametrize("script", sorted((ROOT / "docker/scripts").glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_short_strict_and_executable(script):
    lines = script.read_text().splitlines()
    assert len(lines) < 30
    assert "set -euo pipefail" in lines
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("status", [0, 1], ids=["complete", "interrupted"])
def test_a_base_folder_appears_only_when_it_is_complete(chain, scripts, status):
    fake = chain.programs / "debootstrap"
    fake.write_text(f'#!/bin/sh\nmkdir -p "$3/etc" && echo "$@" > "$3/etc/words" && exit {status}\n')
    fake.chmod(0o755)
    (chain.folder / "root.partial").mkdir()
    (chain.folder / "root.partial" / "left-over").touch()
    for name, mirror in (("root", {}), ("near", {"DEBIAN_MIRROR": "http://near"})):
        done = chain.run(str(scripts / "debootstrap.sh"), "bookworm", name, **mirror)
        assert (done.returncode, (chain.folder / name).exists()) == (status, status == 0)
        assert not (chain.folder / name / "left-over").exists()
        if status == 0:  # a mirror is named by the machine only
            words = ["--variant=minbase", "bookworm", f"{name}.partial", *mirror.values()]
            assert (chain.folder / name / "etc/words").read_text().split() == words


def test_no_packages_is_a_mistake_not_an_empty_image(chain, scripts):
    done = chain.run(str(scripts / "apt.sh"))
    assert (done.returncode, done.stderr) == (2, "apt.sh: name the packages (pins.toml, cpu.packages)\n")


def stage_runs(variables: dict[str, str], stage: str, folder: Path) -> list[str]:
    """RUN commands of a stage as shell text: arguments filled in, folders of the image moved below `folder`."""
    commands, current = [], ""
    for one in instructions("rocm"):
        if one["instruction"] == "FROM":
            current = one["value"].rsplit(" AS ", 1)[-1]
        elif one["instruction"] == "RUN" and current == stage:
            text = re.sub(r"--mount=\S+\s*", "", one["value"])
            text = re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], ""), text)
            commands.append(re.sub(r"(?<![\w.])/(opt/image|src|wheels)\b", rf"{folder}/\1", text))
    return commands


STAGES = {
    "build-mamba": {},
    "build-conv1d": {},
    "build-aiter": {"AITER": ("aiter", {"setup.py": ""}, {"include/ck.hpp": ""})},
    "build-vllm": {"VLLM_TRITON": ("triton", {"python/triton_kernels/triton_kernels/__init__.py": ""}, {})},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_wheel_stage_runs_from_pins_to_wheel(chain, repository, variables, tmp_path, stage):
    image = tmp_path / "opt/image"
    image.mkdir(parents=True)
    (image / "scripts").symlink_to(ROOT / "docker/scripts")
    (image / "docker").mkdir()
    (image / "docker/patches").symlink_to(ROOT / "docker/patches")
    for prefix, (name, files, kernels) in STAGES[stage].items():
        inside = {"3rdparty/composable_kernel": repository(tmp_path / "ck", kernels)} if kernels else {}
        made = repository(tmp_path / "src" / name, files, inside)
        pinned = {f"{prefix}_{key}": value for key, value in made.items()}
        assert set(pinned) <= set(variables)
        variables = variables | pinned
    # What the pinned patch expects to find, cut out of the source it was made for.
    lines = (ROOT / "docker/patches/mamba-ssm/wave-size-of-every-arch.patch").read_text().splitlines()
    files = json.dumps({"csrc/selective_scan/reverse_scan.cuh": before_patch(lines)})
    (command,) = stage_runs(variables, stage, tmp_path)
    done = chain.run("bash", "-euo", "pipefail", "-c", command, cwd=image, FAKE_FILES=files)
    assert done.returncode == 0, done.stderr
    (built,) = chain.calls("python3", "wheel")
    archs = re.split(
        "[;,]",
        built["env"].get("HIP_ARCHITECTURES") or built["env"].get("GPU_ARCHS") or built["env"]["PYTORCH_ROCM_ARCH"],
    )
    prefix = {"build-mamba": "MAMBA", "build-conv1d": "CONV1D", "build-aiter": "AITER", "build-vllm": "VLLM"}[stage]
    assert " ".join(archs) == variables[f"{prefix}_ARCHS"]
    assert {"--no-deps", "--no-index", "--no-build-isolation"} <= set(built["words"])
    assert list((tmp_path / "wheels").glob("*.whl"))
    assert not [one for one in chain.calls() if one["program"] in {"git", "curl", "pip"}]
    for call in chain.calls("download"):
        assert "--require-hashes" in call["words"]


def before_patch(lines: list[str]) -> str:
    """A file that the patch applies to exactly: its context and removed lines, at their places."""
    text: list[str] = []
    for line in lines:
        if match := re.match(r"@@ -(\d+)", line):
            text += [""] * (int(match[1]) - 1 - len(text))
        elif line[:1] in {" ", "-"} and not line.startswith("---"):
            text.append(line[1:])
    return "\n".join([*text, ""])


def test_the_image_installs_by_hash_and_without_an_index(chain, variables, tmp_path):
    image = tmp_path / "opt/image"
    (image / "wheels").mkdir(parents=True)
    (image / "wheels/mamba_ssm.whl").touch()
    (image / "install.sh").symlink_to(ROOT / "docker/scripts/install.sh")
    (image / "rocm.txt").symlink_to(ROOT / "docker/rocm.txt")
    for name in ("docker/scripts/entry-points.sh", "kernels/pyproject.toml"):
        (image / Path(name).name).symlink_to(ROOT / name)
    (command,) = stage_runs(variables, "image", tmp_path)
    done = chain.run("bash", "-euo", "pipefail", "-c", command, cwd=image)
    assert done.returncode == 0, done.stderr
    requirements, wheels = chain.calls("install")
    assert {"--no-deps", "--require-hashes"} <= set(requirements["words"])
    assert {"--no-deps", "--no-index", f"{image}/wheels/mamba_ssm.whl"} <= set(wheels["words"])
    assert not (image / "wheels").exists()
    assert chain.calls("-I", "-", f"{image}/pyproject.toml")


def test_vllm_finds_the_plugin_by_an_entry_point(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin/python"
    subprocess.run([ROOT / "docker/scripts/entry-points.sh", python, ROOT / "kernels/pyproject.toml"], check=True)
    asked = "from importlib import metadata, util\n"
    asked += "print(*metadata.entry_points(group='vllm.general_plugins'), util.find_spec('pagedkv'))"
    found = subprocess.run([python, "-I", "-c", asked], capture_output=True, text=True, check=True).stdout
    value = "pagedkv.vllm_plugin:register"
    assert found == f"EntryPoint(name='pagedkv', value='{value}', group='vllm.general_plugins') None\n"


@pytest.mark.parametrize("name", ["requirements/laptop.txt", "docker/rocm.txt", "docker/build.txt"])
def test_what_is_installed_is_hashed_without_torch_and_triton(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"^(torch|triton|pytorch-triton-rocm)\b[ =]", text, re.MULTILINE)
    assert len(re.findall(r"^[\w.-]+(\[[\w,-]+\])?==", text, re.MULTILINE)) == len(
        re.findall(r"^[\w.\[\],-]+==\S+( ;.*)? \\$", text, re.MULTILINE)
    )
    for package in (
        ("pytest", "lm-eval", "pyelftools")
        if "build" not in name
        else (*("cmake==3", "flydsl", "pybind11", "setuptools-rust", "setuptools-scm"),)
    ):
        assert re.search(rf"^{package}{'' if '=' in package else '=='}", text, re.MULTILINE)
