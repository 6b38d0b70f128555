"""Nodes made of files: an amd-smi that replays, a kernel log, a driver's folders, an agent that notes its orders."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilgate.agent import fleet, inspection

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parents[1] / "ci" / "agent" / "recorded"
ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"

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


@dataclass
class ToyNode:
    """A node in a folder. Programs are in `bin`, which alone is the path, so nothing real is ever called."""

    folder: Path
    queue: str
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bin.mkdir(parents=True)
        self.checkout.mkdir()
        (self.proc / "sys/kernel/random").mkdir(parents=True)
        (self.proc / "sys/kernel/random/boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
        (self.kfd / "proc").mkdir(parents=True)
        for what in ("list", "static", "metric"):
            (self.folder / f"{what}.json").write_text((RECORDED / MACHINES[self.queue] / f"{what}.json").read_text())
        self.log(QUIET)
        self.program("amd-smi", f"/bin/cat {self.folder}/$1.json")
        self.program("dmesg", f"/bin/cat {self.folder}/kernel.log")
        self.program("buildkite-agent", f"printf '%s\\n' \"$*\" >> {self.folder}/told")
        self.computes()
        self.env |= {
            "BUILDKITE_JOB_ID": JOB,
            "BUILDKITE_PULL_REQUEST": "false",
            "BUILDKITE_STEP_KEY": "kernels-gfx942",
            "BUILDKITE_AGENT_NAME": "mi300-node7-1",
            "BUILDKITE_ARTIFACT_PATHS": "results/jobs/kernels-gfx942/**/*",
            fleet.QUEUE: self.queue,
            "HILGATE_SELFCHECK": str(self.bin / "selfcheck"),
            "HILGATE_STATE": str(self.folder / "state"),
            "HILGATE_MIN_DISK_GIB": "0",
            "PATH": str(self.bin),
        }

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def proc(self) -> Path:
        return self.folder / "proc"

    @property
    def kfd(self) -> Path:
        return self.folder / "kfd"

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    def node(self, **changes: Any) -> inspection.Node:
        quick = {"settle_seconds": 0.0, "elements": 2000} | changes
        return inspection.Node(self.env, self.checkout, fleet.promised(self.env), self.proc, self.kfd, **quick)

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def computes(self, count: int | None = None, *, wrong: int | None = None, what: str = "words") -> None:
        """Give it a tiny kernel that computes right on `count` GPUs, wrong on one of them."""
        gpus = fleet.promised({fleet.QUEUE: self.queue}).gpus if count is None else count
        code = self.folder / "selfcheck.py"
        code.write_text(
            "import json, sys; sys.path.insert(0, " + repr(str(CI)) + ")\n"
            "from hilgate.agent.tinykernel import expected\n"
            "given = dict(word[2:].split('=') for word in sys.argv[1:] if '=' in word)\n"
            "words, product = expected(int(given['seed']), int(given['elements']))\n"
            f"devices = [dict(index=i, name='toy', words=f'{{words:016x}}', product=f'{{product:016x}}')"
            f" for i in range({gpus})]\n"
            + (f"devices[{wrong}][{what!r}] = '00000000deadbeef'\n" if wrong is not None else "")
            + "print('a line that a library prints'); print(json.dumps({'devices': devices}))\n"
        )
        self.program("selfcheck", f'exec {sys.executable} {code} "$@"')

    def edit(self, what: str, change: Callable[[list[dict[str, Any]]], None]) -> None:
        """Change what `amd-smi <what>` answers."""
        path = self.folder / f"{what}.json"
        data = json.loads(path.read_text())
        change(data["gpu_data"] if isinstance(data, dict) else data)
        path.write_text(json.dumps(data))

    def log(self, text: str) -> None:
        (self.folder / "kernel.log").write_text(text)

    def told(self) -> list[str]:
        """What the Buildkite agent was told, a line per call."""
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []

    def health(self, moment: str) -> Path:
        return self.checkout / "results/jobs/kernels-gfx942" / f"health-{moment}.json"

    def process(self, pid: int, name: str, *, state: str = "S", parent: int = 1, opens: tuple[str, ...] = ()) -> None:
        """Put a process into its /proc."""
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        rest = " ".join(["0"] * 15)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {pid} {pid} {rest} {pid * 10} 0 0\n")
        (folder / "environ").write_bytes(b"HOME=/root\0")
        for number, target in enumerate(opens):
            (folder / "fd" / str(number + 3)).symlink_to(target)

    def card(self, number: int, *, minor: int, bus: int, gpu_id: int) -> None:
        """Put a GPU into the driver's topology."""
        folder = self.kfd / "topology/nodes" / str(number)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"drm_render_minor {minor}\nlocation_id {bus << 8}\ndomain 0\n")
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
