# SPDX-License-Identifier: Apache-2.0
"""A host with a docker and a buildkite-agent that record what they are asked, for tests of jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.nodes import write_gpu

from agent_host import container, host, job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DIGEST = "sha256:" + "ab" * 32
CONTENT = "c" * 64
KEY, CPU, BUILDER = "kernels-mla-gfx942", "units-cpu", "image-rocm-cpu"
SECRET = "hf_0123456789"

FAKE_DOCKER = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
behaviour = json.loads((here / "docker.json").read_text())
if words[0] in behaviour.get("hang", ()):
    time.sleep(60)
if words[0] == "stop":
    (here / "stopped").touch()
if words[0] != "run":
    if words[0] in behaviour.get("fail", ()):
        sys.exit("Error response from daemon: " + words[0] + " failed")
    sys.exit(0)
(here / "env.json").write_text(json.dumps(dict(os.environ)))
mounts = dict(
    [(part.split("=", 1)[1]) for part in word.split(",")[1:3]][::-1] for word in words if word.startswith("--mount=")
)
results = pathlib.Path(mounts["/hilgate/results"])
(results / "steps").mkdir()
(results / "results.jsonl").write_text("records\\n")
os.chdir(results)
exec(behaviour.get("do", ""))
(here / "started").touch()
end = time.monotonic() + behaviour.get("seconds", 0)
while time.monotonic() < end and not (here / "stopped").exists():
    time.sleep(0.02)
sys.exit(behaviour.get("status", 0))
"""

FAKE_AGENT = """#!{python}
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
(here / "agent-calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
name, target = sys.argv[3], pathlib.Path(sys.argv[4])
found = here / "artifacts" / name
if not found.exists():
    sys.exit("fatal: Failed to download artifacts: No artifacts found for downloading")
(target / name).parent.mkdir(parents=True, exist_ok=True)
shutil.copy(found, target / name)
"""


class Agent:
    """A checkout, a plan, programs on the path, and what they were asked."""

    def __init__(self, root: Path) -> None:
        self.bin, self.checkout = root / "bin", root / "checkout"
        self.bin.mkdir()
        self.checkout.mkdir()
        for name, text in (("docker", FAKE_DOCKER), ("buildkite-agent", FAKE_AGENT)):
            self.program(name, text.replace("{python}", sys.executable))
        (self.checkout / "file").write_text("content\n")
        for words in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "t"],
        ):
            subprocess.run(["git", *words], cwd=self.checkout, check=True)
        self.commit = host.git(self.checkout, "rev-parse", "HEAD").strip()
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(root),
            "BUILDKITE": "true",
            "BUILDKITE_JOB_ID": "j-1",
            "BUILDKITE_REPO": "https://github.com/rocm/hilgate",
            "BUILDKITE_PULL_REQUEST": "false",
            "HF_TOKEN": SECRET,
            "BUILDKITE_AGENT_ACCESS_TOKEN": SECRET,
        }
        self.docker()
        self.plan()
        self.record()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def docker(self, **behaviour: object) -> None:
        (self.bin / "docker.json").write_text(json.dumps(behaviour))

    def plan(self, **changes: object) -> None:
        step = {"timeout_minutes": 1, "gpus": 0, "secrets": ["HF_TOKEN"]}
        steps = [
            {**step, "key": BUILDER, "provides": "rocm"},
            {**step, "key": KEY, "image": "rocm"},
            {**step, "key": CPU},
        ]
        plan = {"commit": self.commit, "images": {"rocm": CONTENT}, "steps": steps} | changes
        plan["steps"] = [planned(**one) for one in plan["steps"]]
        (self.checkout / "results").mkdir(exist_ok=True)
        (self.checkout / "results" / "plan.json").write_text(json.dumps(plan))

    def record(self, **changes: object) -> None:
        record = {"kind": "image", "image": "rocm", "content": CONTENT, "digest": DIGEST} | changes
        path = self.bin / "artifacts" / "results" / "jobs" / BUILDER / "results.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"kind": "build"}\n' + json.dumps(record) + '\n{"kind": "step"}\n')

    def run(self, monkeypatch: pytest.MonkeyPatch, key: str = KEY, *more: str) -> int:
        folder = f"results/jobs/{key}" + (".recheck" if "--recheck" in more else "")
        monkeypatch.chdir(self.checkout)
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return job.main([key, *more, "--plan", "results/plan.json", "--results", folder])

    def calls(self, verb: str = "") -> list[list[str]]:
        path = self.bin / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if not verb or call[0] == verb]

    @property
    def results(self) -> Path:
        return self.checkout / "results" / "jobs" / KEY


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """A host with a checkout, a plan, a docker and a buildkite-agent; a job may leave nothing behind on it."""
    monkeypatch.setattr(container, "STOP_SECONDS", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield Agent(tmp_path)
    signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.glob("hilgate-*")) == []  # nothing is left, however it ended


def planned(key: str, image: str | None = None, job: str | None = None, **declared: object) -> dict[str, object]:
    """A planned step as `plan.json` has it."""
    name, _, device = key.rpartition("-")
    return {"step": {"key": name} | declared, "device": device, "image": image, "job": job}


def topology(root: Path, minors: list[int]) -> dict[str, Path]:
    """A KFD topology of these render nodes and their device nodes, as arguments of `container.gpu_devices`."""
    for number, minor in enumerate([0, *minors]):
        write_gpu(root / "kfd", number, minor=minor)
    (root / "dev" / "dri").mkdir(parents=True)
    for name in ("kfd", *(f"dri/renderD{minor}" for minor in minors)):
        (root / "dev" / name).touch()
    return {"kfd": root / "kfd", "dev": root / "dev"}
