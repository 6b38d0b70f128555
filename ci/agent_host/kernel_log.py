# SPDX-License-Identifier: Apache-2.0
"""GPU trouble in the kernel's log: which lines mean it, how bad they are, and how far this agent has read.

    python3 -m agent_host.kernel_log [--accept]

The patterns are the message texts of Linux, drivers/gpu/drm/amd (6.8 to 7.2); the file is named beside each. A line
counts only if it begins as the driver's own lines do and its message begins with one of these texts: the kernel also
prints the names of processes and files (`HWS hang[2581]: segfault at 0 ...`), and any program chooses those.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_host import host
from hilgate.errors import Exit, Parser, ending

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMAND = "HILGATE_KERNEL_LOG"
"""Variable of the agent: the command that prints the log, e.g. `sudo -n dmesg` where kernel.dmesg_restrict is 1."""

BOOT_ID = "sys/kernel/random/boot_id"
"""File below /proc whose content changes at each start of the machine."""


class Severity(enum.Enum):
    """What a line says about the node."""

    BROKEN = "broken"
    """Does not pass by itself: counts until the machine is started again."""
    HUNG = "hung"
    """The GPU stopped and was, or is being, restarted: counts once."""
    FAULT = "fault"
    """A program reached for memory that is not its own: evidence against that program, not against the node."""
    UNKNOWN = "unknown"
    """The driver calls it an error, and no pattern here tells what it means: listed, and decides nothing."""

    @property
    def makes_unfit(self) -> bool:
        """Whether such a line speaks against the node."""
        return self in {Severity.BROKEN, Severity.HUNG}


PREFIX = (
    # dev_err, drm_err: the driver's name and the device. pr_err: the module's name. DRM_ERROR: the function.
    r"(?:(?:amdgpu|kfd) (?:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|kfd): (?:amdgpu: )?"
    # Short enough to be a process's name, which the kernel prints before `[pid]`; control characters are escaped here.
    r"|(?!.{0,60}\[[0-9]+\])(?:amdgpu: |kfd: |(?=\[drm)))"
    r"(?:\[drm(?::\w+(?: \[amdgpu\])?)?\] )?(?:\*ERROR\* )?"
)
"""How each line of the driver begins. A process cannot bring it about: its name has 15 bytes, and `[pid]` follows."""

EVENT = r"(?:\{[0-9]+\} ?)?"
"""Number of a hardware error, which its lines share."""

PATTERNS = tuple(
    (severity, re.compile(PREFIX + f"(?:{pattern})", re.IGNORECASE))
    for severity, pattern in (
        # amdgpu_ras.c, umc_v*.c, ras/rascore: errors that ECC could not mend. A count of zero is an all-clear.
        (
            Severity.BROKEN,
            EVENT + r"(?:socket: [0-9]+, die: [0-9]+,? )?[1-9][0-9]* (?:new )?uncorrectable hardware errors?\b",
        ),
        # amdgpu_ras.c, nbio_v7_*.c: one error, which ends everything on the GPU, without a count.
        (Severity.BROKEN, EVENT + r"(?:fatal )?uncorrectable hardware error\b"),
        # amdgpu_ras_eeprom.c: too many bad pages.
        (Severity.BROKEN, r"RAS records:\s*[0-9]+ exceed threshold"),
        # amdgpu_device.c, amdgpu_kms.c
        (Severity.BROKEN, r"GPU reset\([0-9]+\) failed|GPU Recovery Failed|GPU reset end with ret = -[0-9]+"),
        (Severity.BROKEN, r"device lost from bus|Fatal error during GPU init"),
        # amdgpu_xgmi.c: the links between GPUs.
        (Severity.BROKEN, r"(?:XGMI\w*|WAFL) PCS \w+Err\b.*detected"),
        # pcie/aer.c
        (Severity.BROKEN, r"PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\)"),
        # amdgpu_job.c
        (Severity.HUNG, r"ring \S+ timeout, (?:signaled seq|but soft recovered)"),
        # amdgpu_ring.c: also after a reset that did not help.
        (Severity.HUNG, r"ring \S+ test failed"),
        # amdgpu_device.c
        (Severity.HUNG, r"GPU reset begin!"),
        # smu_cmn.c: the processor that sets clocks and power answers no more.
        (Severity.HUNG, r"SMU: I'm not done with your "),
        # mes_v11_0.c, mes_v12_0.c: "failed to response" up to Linux 6.8.
        (Severity.HUNG, r"MES(?:\([0-9]\))? failed to respon(?:d|se)\b|MES might be in unrecoverable state"),
        # kfd_device_queue_manager.c
        (
            Severity.HUNG,
            r"qcm fence wait loop timeout expired|The cp might be in an unrecoverable state|HWS hang",
        ),
        (Severity.HUNG, r"Failed to (?:evict|restore|add|remove) (?:process |hardware )?queues?\b"),
        # gmc_v9_0.c, gmc_v11_0.c, gmc_v12_0.c
        (
            Severity.FAULT,
            r"\[(?:gfx|mm)hub[0-9]*\] (?:retry |no-retry )?page fault|\w*VM_L2_PROTECTION_FAULT_STATUS:0x",
        ),
    )
)
"""The first that matches decides."""

ERROR = re.compile(PREFIX + rf"(?:(?<=\*ERROR\* )|{EVENT}\[Hardware Error\])", re.IGNORECASE)
"""A line that the driver itself calls an error."""

_STAMP = re.compile(r"^\[\s*([0-9]+\.[0-9]+)\]\s?(.*)$")
_BDF = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")


@dataclass(frozen=True)
class Trouble:
    """One line of GPU trouble; `stamp` is seconds after boot, by the kernel's own clock."""

    stamp: float
    text: str
    severity: Severity

    def __str__(self) -> str:
        return f"[{self.stamp:.6f}] {self.text}"


@dataclass(frozen=True)
class Log:
    """A log as read once: its trouble, and the stamp of its last line."""

    trouble: tuple[Trouble, ...]
    end: float

    def since(self, seen: float, accepted: float, bdfs: frozenset[str] = frozenset()) -> list[Trouble]:
        """What counts for an agent that has read up to `seen`: all that is newer, and whatever does not pass.

        Args:
            seen: Seconds after boot.
            accepted: Up to when a person has accepted everything, after a repair that needed no restart.
            bdfs: The agent's GPUs; empty for all. A line that names only others does not count; a nameless one does.
        """
        counting = []
        for line in self.trouble:
            named = set(_BDF.findall(line.text.lower()))
            if bdfs and named and not named & bdfs:
                continue
            if line.stamp > accepted and (line.stamp > seen or line.severity is Severity.BROKEN):
                counting.append(line)
        return counting


def severity_of(text: str) -> Severity | None:
    """What a line of the log says about the node; None when it is no GPU trouble."""
    unknown = Severity.UNKNOWN if ERROR.match(text) else None
    return next((severity for severity, pattern in PATTERNS if pattern.match(text)), unknown)


def read(env: Mapping[str, str]) -> Log:
    """Read the log with the agent's command, `dmesg` where it names none.

    Raises:
        SickNodeError: The command fails, or prints nothing that has the kernel's times.
    """
    command = env.get(COMMAND, "dmesg")
    try:
        words = shlex.split(command) or ["dmesg"]
    except ValueError as error:
        raise host.SickNodeError(
            f"{COMMAND} is no command: {error}", where=command, remedy="close its quotes"
        ) from error
    ran = host.run(words, 20.0)
    remedy = f"let the agent's user read it (sysctl kernel.dmesg_restrict=0), or set {COMMAND}, e.g. to 'sudo -n dmesg'"
    if ran.failure:
        raise host.SickNodeError(f"the kernel's log cannot be read: {ran.failure}", where=command, remedy=remedy)
    log = parse(ran.out)
    if log is None:
        raise host.SickNodeError("the kernel's log is empty or has no times", where=command, remedy=remedy)
    return log


def parse(text: str) -> Log | None:
    """The trouble in a log; None when no line has the kernel's time, so nobody knows when anything happened."""
    matches = map(_STAMP.match, text.splitlines())
    stamped = [(float(match[1]), host.printable(match[2])) for match in matches if match]
    if not stamped:
        return None
    judged = [(stamp, line, severity_of(line)) for stamp, line in stamped]
    trouble = tuple(Trouble(stamp, line, severity) for stamp, line, severity in judged if severity is not None)
    return Log(trouble, max(stamp for stamp, _ in stamped))


class Position:
    """How far an agent has read the log of this boot. Lost, it is the beginning: that finds more, not less."""

    def __init__(self, env: Mapping[str, str], boot: Path) -> None:
        self.path = host.state_file(env, "kernel-log")
        try:
            self.boot = boot.read_text(encoding="ascii").strip()
        except OSError:
            self.boot = ""

    def load(self) -> tuple[float, float]:
        """The stamps up to which the log was read, and up to which a person has accepted it; -1 for neither."""
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if self.boot and known["boot"] == self.boot:
                return float(known["seen"]), float(known["accepted"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return -1.0, -1.0

    def save(self, seen: float, *, accepted: bool = False) -> None:
        """Note that everything up to `seen` was read. A folder that cannot be written leaves the old note."""
        known = {"boot": self.boot, "seen": seen, "accepted": seen if accepted else self.load()[1]}
        with contextlib.suppress(OSError):
            host.write_whole(self.path, json.dumps(known))


@ending
def main(words: list[str] | None = None) -> int:
    """Show the trouble that counts for this agent; with --accept it no longer does. 0 without any, else 75."""
    parser = Parser(prog="agent_host.kernel_log", description="GPU trouble in the kernel's log.")
    parser.add_argument("--accept", action="store_true", help="the node was repaired: ignore everything logged so far")
    arguments = parser.parse_args(words)
    position = Position(os.environ, host.PROC / BOOT_ID)
    log = read(os.environ)
    counting = log.since(*position.load())
    for line in counting:
        sys.stdout.write(f"{line.severity.value:<7} {line}\n")
    if arguments.accept:
        position.save(log.end, accepted=True)
        sys.stdout.write(f"accepted up to {log.end:.6f} s after boot\n")
        return 0
    return int(Exit.SICK_NODE if any(line.severity is not Severity.UNKNOWN for line in counting) else Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
