# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: its process calls itself like a line of the driver about a hung GPU, and then crashes, so that
the kernel writes that name into its log.

What must happen: no line that a process can bring about counts as GPU trouble, so no agent of the machine is paused.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from agent_host import host, kernel_log

NAMES = [
    "HWS hang",
    "GPU reset begi",
    "amdgpu: HWS han",
    "[drm] HWS hang",
    "kfd: HWS hang\x1b",
    "amdgpu: ",
    "kfd: HWS hang",
    "amdgpu: \x1b[0m",
]
KERNEL = (
    "{name}[2581]: segfault at 0 ip 00007f sp 00007f error 4 in {file}[41f000+2a1000]",
    "traps: {name}[2581] trap invalid opcode ip:7f sp:7f error:0 in {file}[41f000+2a1000]",
    "Out of memory: Killed process 2581 ({name}) total-vm:1kB, anon-rss:1kB, file-rss:0kB",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task={name},pid=2581,uid=1001",
    "amdgpu: [2581]: segfault at 0 ip 00007f sp 00007f error 4 in {file}[41f000+2a1000]",
    "amdgpu 0000:05:00.0: amdgpu:  Process {name} pid 2581 thread {name} pid 2581",
)


@pytest.mark.parametrize("line", KERNEL)
@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_process_or_file_is_gpu_trouble(name: str, line: str) -> None:
    for file in ("python3.11", "GPU reset begin!", "HWS hang", "amdgpu: GPU reset begin!"):
        assert kernel_log.severity_of(host.printable(line.format(name=name, file=file))) is None


def test_the_kernel_keeps_fifteen_bytes_of_such_a_name() -> None:
    """The rule rests on it: `amdgpu 0000:05:00.0: ` alone is longer."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'amdgpu 0000:05:00.0: HWS hang')\n"
    code += "print(open('/proc/self/comm').read())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "amdgpu 0000:05:"
    assert not re.match(kernel_log.PREFIX, found)
