"""One look at a node, in phases; each adds its problems, and none stops the others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.agent import health, holders, kernel_log, paths, smi, tinykernel
from hilgate.errors import HilgateError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hilgate.agent.fleet import Promise
    from hilgate.agent.health import Health

SETTLE_SECONDS = 15.0
"""For memory and processes of the job before to go: the driver frees VRAM after the process has ended."""

SETTLE_POLL_SECONDS = 3.0


@dataclass(frozen=True)
class Node:
    """Where to look, and what is promised.

    Attributes:
        env: The agent's environment.
        checkout: The job's files.
        promise: What the queue has.
        proc: Processes.
        kfd: The driver.
        settle_seconds: How long a passing problem may take to go.
        smi_seconds: For one call of amd-smi.
        elements: Words that the tiny kernel mixes.
        remembers: Whether a fit look notes how far the kernel's log was read.
    """

    env: Mapping[str, str]
    checkout: Path
    promise: Promise
    proc: Path = paths.PROC
    kfd: Path = paths.KFD
    settle_seconds: float = SETTLE_SECONDS
    smi_seconds: float = smi.SECONDS
    elements: int = tinykernel.ELEMENTS
    remembers: bool = True

    def position(self) -> kernel_log.Position:
        """How far this agent has read the kernel's log."""
        return kernel_log.Position(self.env, self.proc / "sys" / "kernel" / "random" / "boot_id")


def before(node: Node, record: Health) -> None:
    """Every phase before a job. The tiny kernel runs last, and only on GPUs that nothing else speaks against."""
    record.problems += health.disk_problems(
        node.checkout, health.number(node.env, health.MIN_DISK, health.MIN_DISK_GIB)
    )
    if not node.promise.gpus:
        return
    end = _look(node, record, idle=True)
    if not record.problems:
        record.problems += tinykernel.problems(node.env, node.promise.gpus, elements=node.elements)
    if node.remembers and not record.problems and end is not None:
        node.position().save(end)


def after(node: Node, record: Health) -> None:
    """Every phase after a job, once what it left has been ended. Heat is no trouble now, and nothing is run."""
    if not node.promise.gpus:
        return
    end = _look(node, record, idle=False)
    if end is not None:
        # The record tells of it, so the next job's preflight need not; what does not pass counts again by itself.
        node.position().save(end)


def _look(node: Node, record: Health, *, idle: bool) -> float | None:
    """GPUs, holders and the kernel's log; returns the log's end, None when it cannot be read."""
    cards = holders.own_cards(node.env, node.kfd)
    bdfs = frozenset(card.bdf for card in cards)
    limit = health.number(node.env, health.VRAM_LIMIT, health.VRAM_LIMIT_MIB)
    until = time.monotonic() + node.settle_seconds
    while True:
        lasting, passing = _gpus(node, record, bdfs, limit, idle=idle)
        held, hidden = holders.find(cards, allowed=node.env.get(holders.ALLOWED, ""), proc=node.proc, kfd=node.kfd)
        passing += [str(holder) for holder in held]
        if lasting or not passing or time.monotonic() >= until:
            break
        time.sleep(min(SETTLE_POLL_SECONDS, max(0.0, until - time.monotonic())))
    record.problems += lasting + passing + hidden
    return _log(node, record, bdfs, idle=idle)


def _gpus(
    node: Node, record: Health, bdfs: frozenset[str], limit_mib: int, *, idle: bool
) -> tuple[list[str], list[str]]:
    """What is wrong with the GPUs for good, and what may be gone in a few seconds."""
    try:
        gpus, unread = smi.read(seconds=node.smi_seconds)
    except HilgateError as error:
        return [f"{error.what} ({error.where})"], []
    own = [gpu for gpu in gpus if gpu.bdf in bdfs or not bdfs]
    record.gpus = own
    lasting = unread + health.count_problems(gpus, node.promise, bdfs) + health.wear_problems(own)
    return lasting, health.vram_problems(own, limit_mib) + (health.heat_problems(own) if idle else [])


def _log(node: Node, record: Health, bdfs: frozenset[str], *, idle: bool) -> float | None:
    """Read the kernel's log from where this agent stopped."""
    try:
        log = kernel_log.read(node.env)
    except HilgateError as error:
        record.problems.append(f"{error.what} ({error.where}); {error.remedy}")
        return None
    trouble = kernel_log.of_gpus(log.since(*node.position().load()), bdfs)
    sick = [line for line in trouble if line.kind is not kernel_log.Kind.FAULT]
    # A fault is evidence about the program that ran, so it belongs to the record after a job and to no other.
    record.dmesg = [str(line) for line in (sick if idle else trouble)]
    if sick:
        count = f"{len(sick)} lines" if len(sick) > 1 else "a line"
        record.problems.append(f"the kernel's log has {count} of GPU trouble: {sick[0].text[:160]}")
    return log.end
