"""The stages of the ROCm recipe, run from pins to wheel with a tool chain that records."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[3]


def instructions() -> list[dict]:
    recipe = (ROOT / "docker/rocm.Dockerfile").read_bytes()
    return [one for one in DockerfileParser(fileobj=io.BytesIO(recipe)).structure if one["instruction"] != "COMMENT"]


def stage_runs(variables: dict[str, str], stage: str, folder: Path) -> list[str]:
    """RUN commands of a stage as shell text: arguments filled in, folders of the image moved below `folder`."""
    commands, current = [], ""
    for one in instructions():
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
    "build-aiter": {"aiter": {"setup.py": ""}, "ck": {"include/ck.hpp": ""}},
    "build-vllm": {"vllm": {"setup.py": ""}, "triton": {"python/triton_kernels/triton_kernels/__init__.py": ""}},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_wheel_stage_runs_from_pins_to_wheel(chain, tarball, variables, tmp_path, stage):
    image = tmp_path / "opt/image"
    image.mkdir(parents=True)
    (image / "scripts").symlink_to(ROOT / "docker/scripts")
    (image / "docker").mkdir()
    (image / "docker/patches").symlink_to(ROOT / "docker/patches")
    for name, files in STAGES[stage].items():
        tarball(tmp_path / f"src/{name}.tar.gz", files)
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


def test_the_image_installs_requirements_by_hash_and_wheels_without_an_index(chain, variables, tmp_path):
    image = tmp_path / "opt/image"
    (image / "wheels").mkdir(parents=True)
    (image / "wheels/mamba_ssm.whl").touch()
    (image / "install.sh").symlink_to(ROOT / "docker/scripts/install.sh")
    (image / "laptop.txt").symlink_to(ROOT / "requirements/laptop.txt")
    (command,) = stage_runs(variables, "image", tmp_path)
    done = chain.run("bash", "-euo", "pipefail", "-c", command, cwd=image)
    assert done.returncode == 0, done.stderr
    requirements, wheels = chain.calls("install")
    assert {"--no-deps", "--require-hashes"} <= set(requirements["words"])
    assert {"--no-deps", "--no-index", f"{image}/wheels/mamba_ssm.whl"} <= set(wheels["words"])
    assert not (image / "wheels").exists()


@pytest.mark.parametrize("name", ["requirements/laptop.txt", "docker/build.txt"])
def test_what_is_installed_is_hashed_and_names_neither_torch_nor_triton(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"^(torch|triton|pytorch-triton-rocm)\b[ =]", text, re.MULTILINE)
    assert len(re.findall(r"^[\w.-]+(\[[\w,-]+\])?==", text, re.MULTILINE)) == len(
        re.findall(r"^[\w.\[\],-]+==\S+( ;.*)? \\$", text, re.MULTILINE)
    )
    for package in ("pytest", "lm-eval", "pyelftools") if "laptop" in name else ("cmake", "setuptools-scm"):
        assert f"\n{package}==" in f"\n{text}"
