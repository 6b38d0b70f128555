# SPDX-License-Identifier: Apache-2.0
"""A tool chain that records instead of compiling, and the instructions of a recipe."""

from __future__ import annotations

import io
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from dockerfile_parse import DockerfileParser
from support.plans import IDENTITY

ROOT = Path(__file__).parents[2]

FAKE = """#!{python}
import io, json, os, re, sys, tarfile
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({record!r}, "a") as file:
    file.write(json.dumps({{"program": name, "words": words, "env": dict(os.environ)}}) + "\\n")
if os.environ.get("FAKE_FAILS") == name:
    sys.exit(1)
if words[:2] == ["-m", "pip"]:
    rest = words[2:]
    if "download" in rest:
        folder = rest[rest.index("--dest") + 1]
        want = open(rest[rest.index("--requirement") + 1]).read()
        package, version = re.match(r"([\\w-]+)==(\\S+)", want).groups()
        module = package.replace("-", "_")
        text = '__version__ = "' + version + '"\\n'
        with tarfile.open(f"{{folder}}/{{module}}-{{version}}.tar.gz", "w:gz") as tar:
            more = json.loads(os.environ.get("FAKE_FILES", "{{}}"))
            for path, body in ((f"{{module}}/__init__.py", text), *more.items()):
                info = tarfile.TarInfo(f"{{module}}-{{version}}/{{path}}")
                info.size = len(body.encode())
                tar.addfile(info, io.BytesIO(body.encode()))
    if "wheel" in rest:
        open(rest[rest.index("--wheel-dir") + 1] + "/one-1-py3-none-any.whl", "w").close()
"""


class Chain:
    """Fake `python3`, `hipcc`, `git`, `curl` in front of the path, and their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record.jsonl"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("python3", "pip", "hipcc", "git", "curl"):
            self.fake(name)
        # git works on what is there itself; what would reach a network is recorded.
        git = self.programs / "git"
        (self.programs / "recording").mkdir()
        git.rename(self.programs / "recording/git")
        git.write_text(
            f'#!/bin/sh\ncase " $* " in *" clone "*|*" fetch "*|*" pull "*|*" submodule "*|*" ls-remote "*)\n'
            f'  exec {self.programs}/recording/git "$@" ;; esac\nexec {shutil.which("git")} "$@"\n'
        )
        git.chmod(0o755)

    def fake(self, name: str) -> None:
        path = self.programs / name
        path.write_text(FAKE.format(python=sys.executable, record=str(self.record)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.programs}:/usr/bin:/bin"
        return subprocess.run(
            words, cwd=cwd or self.folder, env={"PATH": path, **env}, capture_output=True, text=True, check=False
        )

    def calls(self, *words: str) -> list[dict]:
        """Recorded calls whose words hold all of `words`."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [one for one in map(json.loads, lines) if set(words) <= {one["program"], *one["words"]}]


def git(folder: Path, *words: str) -> str:
    """What git prints in a folder."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def checkout(path: Path, files: dict[str, str], submodules: dict[str, dict[str, str]] | None = None) -> dict[str, str]:
    """A checkout of one commit at `path`, and the variables about it; of submodules, those of their own checkouts."""
    path.mkdir(parents=True)
    git(path, "init", "--quiet")
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    for folder, inner in (submodules or {}).items():
        git(path, "submodule", "--quiet", "add", inner["GIT"].partition("#")[0], folder)
    git(path, "add", "--all")
    git(path, "commit", "--quiet", "--message", "one")
    commit = git(path, "rev-parse", "HEAD")
    listed = " ".join(f"{folder}={inner['COMMIT']}" for folder, inner in sorted((submodules or {}).items()))
    return {"GIT": f"{path}#{commit}", "COMMIT": commit, "SUBMODULES": listed}


def instructions(image: str, text: str | None = None) -> list[dict]:
    """Instructions of a Dockerfile: that of an image, or another text."""
    recipe = (text or (ROOT / f"docker/{image}.Dockerfile").read_text()).encode()
    return [one for one in DockerfileParser(fileobj=io.BytesIO(recipe)).structure if one["instruction"] != "COMMENT"]


def checkout_of_images(folder: Path) -> Path:
    """A committed checkout of what the images are made of and their keys cover."""
    for name in ("docker", "requirements"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("kernels/pyproject.toml", "ci/agents.yaml", "ci/project.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for arguments in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "all"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder
