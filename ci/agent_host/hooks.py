# SPDX-License-Identifier: Apache-2.0
"""Hooks of an agent: check that the node is fit before a job, and clean up after it.

    agent_host/__main__.py hooks admit         called by ci/hooks/pre-bootstrap, before anything of a job runs
    agent_host/__main__.py hooks preflight     called by ci/hooks/pre-command
    agent_host/__main__.py hooks postflight    called by ci/hooks/post-command
    agent_host/__main__.py hooks ended         called by ci/hooks/pre-exit

Admit: 0 lets the job in. Anything else refuses it, so that Buildkite gives it to another agent: there is no room for
the job's own files, or three jobs in a row ended fast without a verdict. The agent is paused with the reason.

Preflight: fit is 0. Unfit is 75: the job's folder says why, the agent is paused with a note, and Buildkite gives the
job to another one. Whatever cannot be looked at counts as unfit. A queue or a setting that makes no sense is 3 and
pauses nothing.

Postflight ends what the job left and looks again. Its status is ignored, because a job keeps its own, and it pauses
nothing: the next job's preflight looks again, and what passes by itself may have passed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import gpus, health, host, kernel_log, pause, reap
from hilgate.errors import DeclarationError, Exit, HilgateError, Parser, ending
from hilgate.names import PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent_host.clone import QueuePromise

SETTLE_SECONDS = 15.0
"""Time for memory and processes of the previous job to go: the driver frees VRAM after the process has ended. None
after a cancelled job, whose hooks have little time."""


def _temporary() -> Path:
    return host.temporary(os.environ)


@dataclass(frozen=True)
class NodeContext:
    """A job's environment and files, where to look at the node, and how long."""

    env: Mapping[str, str]
    checkout: Path
    proc: Path = host.PROC
    kfd: Path = host.KFD
    settle_seconds: float = SETTLE_SECONDS
    smi_seconds: float = gpus.SMI_SECONDS
    elements: int = gpus.ELEMENTS
    """Words that the tiny kernel mixes."""
    temporary: Path = field(default_factory=_temporary)
    """Where jobs have their folders."""

    def position(self) -> kernel_log.Position:
        """How far this agent has read the kernel's log."""
        return kernel_log.Position(self.env, self.proc / kernel_log.BOOT_ID)


def admit(env: Mapping[str, str], temporary: Path) -> int:
    """Let a job in, or refuse it before anything of it runs: 0, or 75 after the agent was paused.

    The agent gives this hook few variables, and the job's in a file.
    """
    env = {**_variables_of_job(env), **env}
    # With the folder of the checkout, of which pre-bootstrap knows no more than where all of them lie.
    builds = Path(env.get("BUILDKITE_BUILD_PATH") or reap.BUILDS)
    folders = {"the job's own files": temporary, "checkouts": builds}
    least = health.whole_number(env, health.MIN_ROOM, health.MIN_ROOM_MIB)
    problems = health.room_problems({what: where for what, where in folders.items() if where.is_dir()}, least)
    minutes = pause.usual_minutes(env)
    if not problems:
        try:
            if why := pause.begins(env, time.time()):
                problems, minutes = [why], pause.FAST_ENDINGS_MINUTES
        except OSError as error:
            state = host.state_file(env, "endings")
            problems = [f"what this agent remembers cannot be written: {error.strerror} ({state})"]
    if not problems:
        return int(Exit.PASS)
    sys.stdout.write("".join(f"refused: {problem}\n" for problem in problems))
    pause.take_out(problems, env, minutes)
    return int(Exit.SICK_NODE)


def _variables_of_job(env: Mapping[str, str]) -> dict[str, str]:
    """Buildkite's variables of the job, as the agent wrote them for this hook; none where the file cannot be read."""
    try:
        variables = json.loads(Path(env.get("BUILDKITE_ENV_JSON_FILE", "")).read_bytes())
        return {
            name: value for name, value in variables.items() if name.startswith("BUILDKITE_") and isinstance(value, str)
        }
    except (OSError, ValueError, AttributeError):
        return {}


def ended(env: Mapping[str, str]) -> int:
    """Note how a job ended; the third fast ending without a verdict in a row pauses the agent."""
    try:
        if why := pause.ends(env, time.time()):
            pause.take_out([why], env, pause.FAST_ENDINGS_MINUTES)
    except OSError as error:
        sys.stdout.write(f"how this job ended cannot be noted: {error.strerror}\n")
    return int(Exit.PASS)


def preflight(node: NodeContext, *, by_hand: bool = False) -> int:
    """Look at a node, leave the record in the job's folder, and take the agent out of service if it is unfit.

    By hand it writes, pauses and remembers nothing.

    Raises:
        DeclarationError: The queue is unknown, a setting of the agent makes no sense, or a GPU job has no folder.
    """
    env, checkout, promise = node.env, node.checkout, health.promised(node.env)
    folder_of_job, step = (None, "") if by_hand else health.job_folder(env, checkout)
    if promise.gpus and folder_of_job is None and not by_hand:
        raise DeclarationError(
            f"the job of {step or 'a step without a key'} uploads no results/jobs/<key>, where its health belongs",
            where="artifact_paths",
            remedy="send to GPU queues only what hilgate generates",
        )
    record = health.HealthRecord(step, "before", env.get("BUILDKITE_AGENT_NAME", ""))
    if not by_hand:
        _end_dead_jobs(node)
    _look_before(node, promise, record, by_hand=by_hand)
    if folder_of_job is not None:
        record.write(folder_of_job)  # the agent uploads it, also after a failed pre-command hook
    if not record.problems:
        sys.stdout.write(f"~~~ fit for {promise.queue}\n{table(record)}")
        return int(Exit.PASS)
    sys.stdout.write(f"+++ this node is unfit for {promise.queue}\n{table(record)}")
    sys.stdout.write("".join(f"unfit: {problem}\n" for problem in record.problems))
    if not by_hand:
        pause.forget_job(env)
        pause.take_out(record.problems, env, pause.usual_minutes(env))
        sys.stdout.write("Nothing was learned about the change; another agent takes the job.\n")
    return int(Exit.SICK_NODE)


def _end_dead_jobs(node: NodeContext) -> None:
    """End what jobs that were killed have left: it would count against this node."""
    left, job = reap.Reaped(), node.env.get("BUILDKITE_JOB_ID", "")
    reap.end_dead_jobs(reap.Places(node.temporary, reap.BUILDS, node.proc), left, spare=job)
    sys.stdout.write("".join(f"ended {host.printable(line)}\n" for line in left.ended))
    sys.stdout.write("".join(f"note: {host.printable(line)}\n" for line in left.problems))


def _look_before(node: NodeContext, promise: QueuePromise, record: health.HealthRecord, *, by_hand: bool) -> None:
    """Look at disks and GPUs; the record says what is wrong."""
    least = health.whole_number(node.env, health.MIN_DISK, health.MIN_DISK_GIB)
    for folder in (node.checkout, node.temporary, *([health.DOCKER_ROOT] if promise.image else ())):
        if folder.is_dir():
            record.problems += health.disk_problems(folder, least)
    if promise.gpus:
        record.problems += gpus.shared_problems(node.env, node.proc)
        end = _look(node, promise, record, idle=True)
        if not record.problems:  # last, and only on GPUs that nothing else speaks against
            record.problems += compute(node, promise)
        if not by_hand and not record.problems and end is not None:
            node.position().save(end)


def compute(node: NodeContext, promise: QueuePromise) -> list[str]:
    """What the tiny kernel got wrong; nothing where there is none, and a line says so."""
    if gpus.selfcheck(node.env):
        return gpus.selfcheck_problems(node.env, promise.gpus, elements=node.elements)
    sys.stdout.write(f"note: no kernel was run, so whether the GPUs compute is not known; {PROJECT_FILE}\n")
    sys.stdout.write("  of this agent's clone has no selfcheck\n")
    return []


def postflight(node: NodeContext) -> int:
    """End what the job left, look at the node, leave the record in the job's folder.

    Raises:
        DeclarationError: The queue is unknown or a setting of the agent makes no sense; what was left is ended first.
    """
    env = node.env
    left = host.end_job(env.get("BUILDKITE_JOB_ID", ""), grace_seconds=host.grace(env))
    sys.stdout.write("".join(f"ended {line}\n" for line in left.ended))
    promise = health.promised(env)
    folder, step = health.job_folder(env, node.checkout)
    record = health.HealthRecord(step, "after", env.get("BUILDKITE_AGENT_NAME", ""), left.problems, ended=left.ended)
    if promise.gpus:
        end = _look(node, promise, record, idle=False)
        if end is not None:
            # The record tells of it, so the next job's preflight need not; what does not pass counts again by itself.
            node.position().save(end)
    if folder is not None:
        record.write(folder)
    sys.stdout.write("".join(f"kernel: {line}\n" for line in record.dmesg[:5]))
    sys.stdout.write("".join(f"the job leaves the node unfit: {problem}\n" for problem in record.problems))
    return int(Exit.SICK_NODE if record.problems else Exit.PASS)


def _look(node: NodeContext, promise: QueuePromise, record: health.HealthRecord, *, idle: bool) -> float | None:
    """GPUs, holders and the kernel's log, none of which stops the others; returns the log's end if it can be read."""
    own = look_at_gpus(node, promise, record, idle=idle)
    try:
        log = kernel_log.read(node.env)
    except HilgateError as error:
        record.problems.append(f"{error.what} ({error.where}); {error.remedy}")
        return None
    trouble = log.since(*node.position().load(), own)
    unknown = [line for line in trouble if line.severity is kernel_log.Severity.UNKNOWN]
    record.notes += [f"the kernel's log, not understood: {line}" for line in unknown]
    # A fault is evidence about the program that ran, so it belongs to the record after a job and to no other.
    passing_over = {kernel_log.Severity.UNKNOWN, *([kernel_log.Severity.FAULT] if idle else [])}
    record.dmesg = [str(line) for line in trouble if line.severity not in passing_over]
    sick = [line for line in trouble if line.severity.makes_unfit]
    if sick:
        count = f"{len(sick)} lines" if len(sick) > 1 else "a line"
        record.problems.append(f"the kernel's log has {count} of GPU trouble: {sick[0].text[:160]}")
    return log.end


def look_at_gpus(
    node: NodeContext, promise: QueuePromise, record: health.HealthRecord, *, idle: bool
) -> frozenset[str]:
    """What amd-smi and the driver say of this agent's GPUs; returns their PCI addresses, none for the whole machine."""
    own_nodes = gpus.own_nodes(node.env, node.kfd)
    own = frozenset(render_node.bdf for render_node in own_nodes)
    limit = health.whole_number(node.env, health.VRAM_LIMIT, health.VRAM_LIMIT_MIB)
    allowed = node.env.get(gpus.ALLOWED_HOLDERS, "")
    until = time.monotonic() + node.settle_seconds
    while True:
        passing: list[str] = []
        try:
            found, unread = gpus.read_smi(seconds=node.smi_seconds)
            record.gpus = [gpu for gpu in found if gpu.bdf in own or not own]
            lasting, record.notes = health.own_problems(unread, found, own)
            lasting += health.lasting_problems(found, promise, own)
            passing = health.passing_problems(record.gpus, limit, idle=idle)
        except HilgateError as error:
            lasting = [f"{error.what} ({error.where})"]
        holders, hidden = gpus.find_holders(own_nodes, allowed=allowed, proc=node.proc, kfd=node.kfd)
        passing += holders
        if lasting or not passing or time.monotonic() >= until:
            break
        time.sleep(min(3.0, max(0.0, until - time.monotonic())))
    record.problems += lasting + passing + hidden
    return own


def table(record: health.HealthRecord) -> str:
    """The GPUs of a look, a line each; empty where there are none."""
    table = "GPU  PCI address   arch     VRAM used / MiB  hottest / C  ECC  name\n" if record.gpus else ""
    for gpu in record.gpus:
        table += f"{gpu.index:>3}  {gpu.bdf}  {gpu.arch:<7}  {gpu.vram_used_mib:>6} / {gpu.vram_total_mib:>6}  "
        table += f"{gpu.temperature_c:>11g}  {gpu.ecc_uncorrectable:>3}  {gpu.name[:22]}\n"
    return table


HOOKS = ("admit", "preflight", "postflight", "ended")


@ending
def main(words: list[str] | None = None) -> int:
    """Run a hook; returns the exit status."""
    parser = Parser(prog="agent_host.hooks", description="Check this node before and after a job.")
    parser.add_argument("hook", choices=HOOKS)
    parser.add_argument(
        "--checkout", type=Path, default=Path.cwd(), help="checkout of the job (default: the current folder)"
    )
    parser.add_argument(
        "--queue", default="", help="check the node for this queue instead of the agent's own; pauses nothing"
    )
    arguments = parser.parse_args(words)
    env = {**os.environ, health.QUEUE: arguments.queue} if arguments.queue else dict(os.environ)
    if arguments.hook == "admit":
        return admit(env, host.temporary(env))
    if arguments.hook == "ended":
        return ended(env)
    cancelled = env.get("BUILDKITE_JOB_CANCELLED") == "true"
    node = NodeContext(env, arguments.checkout, settle_seconds=0.0 if cancelled else SETTLE_SECONDS)
    return postflight(node) if arguments.hook == "postflight" else preflight(node, by_hand=bool(arguments.queue))


if __name__ == "__main__":
    sys.exit(main())
