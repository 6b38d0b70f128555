# SPDX-License-Identifier: Apache-2.0
"""Nodes made of files: an amd-smi that replays, a kernel log, a driver's folders, an agent that notes its calls."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_host import health, hooks
from hilgate.model.record import Health

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/ci/agent/recorded"

QUIET = """\
[    0.000000] Linux version 6.8.0-51-generic
[   12.345678] amdgpu 0000:05:00.0: amdgpu: ring comp_1.0.0 uses VM inv eng 0 on hub 0
[  100.250000] amdgpu 0000:05:00.0: amdgpu: no uncorrectable hardware errors detected in umc block
"""

JOB = str(uuid.uuid4())
"""Another one in each process: to end a job's processes must not end those of a test that runs beside it."""

MACHINES = {
    "amd_mi300_8": "mi300x-8-rocm6.4",
    "amd_mi355_1": "mi355x-1-rocm7.2",
    "amd_mi250_8": "mi250-4-rocm6.2",
}


def write_gpu(kfd: Path, number: int, *, minor: int, bus: int = 0, gpu_id: int = 0) -> None:
    """Put a GPU into a driver's topology."""
    folder = kfd / "topology/nodes" / str(number)
    folder.mkdir(parents=True)
    (folder / "properties").write_text(f"drm_render_minor {minor}\nlocation_id {bus << 8}\ndomain 0\n")
    (folder / "gpu_id").write_text(f"{gpu_id}\n")


@dataclass
class FakeNode:
    """A node in a folder. Programs are in `bin`, which alone is the path, so nothing real is ever called."""

    folder: Path
    queue: str = "amd_mi300_8"
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bin, self.proc = self.folder / "bin", self.folder / "proc"
        self.kfd, self.checkout = self.folder / "kfd", self.folder / "checkout"
        self.temporary = self.folder / "tmp"
        for folder in (self.bin, self.checkout, self.proc / "sys/kernel/random", self.kfd / "proc"):
            folder.mkdir(parents=True)
        (self.proc / "sys/kernel/random/boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
        for what in ("list", "static", "metric"):
            (self.folder / f"{what}.json").write_text((RECORDED / MACHINES[self.queue] / f"{what}.json").read_text())
        self.log(QUIET)
        self.program("amd-smi", f"/bin/cat {self.folder}/$1.json")
        self.program("dmesg", f"/bin/cat {self.folder}/kernel.log")
        self.program("docker", "exit 0")
        self.program("git", "exit 0")
        self.temporary.mkdir()
        self.program("buildkite-agent", f"printf '%s\\n' \"$*\" >> {self.folder}/agent-calls")
        self.computes()
        self.env |= {
            "BUILDKITE_JOB_ID": JOB,
            "BUILDKITE_REPO": "https://github.com/rocm/hilgate",
            "BUILDKITE_PULL_REQUEST": "false",
            "BUILDKITE_STEP_KEY": "kernels-gfx942",
            "BUILDKITE_AGENT_NAME": "mi300-node7-1",
            "BUILDKITE_ARTIFACT_PATHS": "results/jobs/kernels-gfx942/**/*",
            health.QUEUE: self.queue,
            "HILGATE_SELFCHECK": str(self.bin / "selfcheck"),
            "HILGATE_STATE": str(self.folder / "state"),
            "HILGATE_MIN_DISK_GIB": "0",
            "PATH": str(self.bin),
            "TMPDIR": str(self.temporary),
        }

    def node(self, **changes: Any) -> hooks.NodeContext:
        quick = {"settle_seconds": 0.0, "elements": 2000, "temporary": self.temporary} | changes
        return hooks.NodeContext(self.env, self.checkout, self.proc, self.kfd, **quick)

    def preflight(self, *, by_hand: bool = False, **changes: Any) -> int:
        return hooks.preflight(self.node(**changes), by_hand=by_hand)

    def postflight(self) -> int:
        return hooks.postflight(self.node())

    def record(self, moment: str) -> Health:
        """The record that a hook left, as the judge reads it."""
        path = self.checkout / "results/jobs/kernels-gfx942" / f"health-{moment}.json"
        return Health.model_validate_json(path.read_text())

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)

    def computes(self, count: int | None = None, *, wrong: int | None = None, what: str = "words") -> None:
        """Give it a tiny kernel that computes right on `count` GPUs, wrong on one of them."""
        count = health.promised({health.QUEUE: self.queue}).gpus if count is None else count
        code = self.folder / "selfcheck.py"
        code.write_text(
            f"import json, sys; sys.path.insert(0, {str(ROOT / 'ci')!r})\n"
            "from agent_host.gpus import expected_checksums\n"
            "given = dict(word[2:].split('=') for word in sys.argv[1:] if '=' in word)\n"
            "words, product = expected_checksums(int(given['seed']), int(given['elements']))\n"
            f"devices = [dict(index=i, name='fake', words=f'{{words:016x}}', product=f'{{product:016x}}')"
            f" for i in range({count})]\n"
            + (f"devices[{wrong}][{what!r}] = '00000000deadbeef'\n" if wrong is not None else "")
            + "print('a line that a library prints'); print(json.dumps({'devices': devices}))\n"
        )
        self.program("selfcheck", f'exec {sys.executable} {code} "$@"')

    def edit(self, what: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
        """Change what `amd-smi <what>` answers."""
        path = self.folder / f"{what}.json"
        data = json.loads(path.read_text())
        change(data["gpu_data"] if isinstance(data, dict) else data)
        path.write_text(json.dumps(data))

    def uses(self, mib: int, gpu: int = 2) -> None:
        """Let a GPU have this much memory in use."""
        self.edit("metric", lambda data: data[gpu]["mem_usage"]["used_vram"].update(value=mib))

    def log(self, text: str) -> None:
        (self.folder / "kernel.log").write_text(text)

    def agent_calls(self) -> list[str]:
        """What buildkite-agent was called with, a line per call."""
        path = self.folder / "agent-calls"
        return path.read_text().splitlines() if path.exists() else []

    def another_agent(self, pid: int, **variables: str) -> None:
        """Put another agent of this machine, or what runs its job, into its /proc."""
        self.process(pid, "buildkite-agent")
        for owner in ("self", str(pid)):
            (self.proc / owner / "ns").mkdir(parents=True, exist_ok=True)
            if not (self.proc / owner / "ns/pid").is_symlink():
                (self.proc / owner / "ns/pid").symlink_to("pid:[4026531836]")
        pairs = "".join(f"{name}={value}\0" for name, value in variables.items())
        (self.proc / str(pid) / "environ").write_text(pairs)

    def process(self, pid: int, name: str, *, state: str = "S", parent: int = 1, opens: tuple[str, ...] = ()) -> None:
        """Put a process into its /proc."""
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        rest = " ".join(["0"] * 15)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {pid} {pid} {rest} {pid * 10} 0 0\n")
        (folder / "environ").write_bytes(b"HOME=/root\0")
        for number, target in enumerate(opens):
            (folder / "fd" / str(number + 3)).symlink_to(target)
