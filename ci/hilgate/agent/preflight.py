"""Before a job: is this node fit for it? `python3 -m hilgate.agent.preflight`, called by .buildkite/hooks/pre-command.

Fit is 0. Unfit is 75: the job's folder says why, the agent is paused with a note, and Buildkite gives the job to
another one. Whatever cannot be looked at counts as unfit. A queue or a setting that makes no sense is 3 and pauses
nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.agent import drain, fleet, health, inspection
from hilgate.errors import DeclarationError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Mapping


def main(words: list[str] | None = None) -> int:
    """Look at the node; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hilgate.agent.preflight", description="Is this node fit for its queue?")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="the job's files (here)")
    parser.add_argument("--queue", default="", help="instead of the agent's own: a look by hand, which pauses nothing")
    arguments = parser.parse_args(words)
    env = {**os.environ, fleet.QUEUE: arguments.queue} if arguments.queue else dict(os.environ)
    try:
        return run(env, arguments.checkout, by_hand=bool(arguments.queue))
    except HilgateError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_status)


def run(env: Mapping[str, str], checkout: Path, *, by_hand: bool = False, node: inspection.Node | None = None) -> int:
    """Look at a node, leave the record in the job's folder, and take the agent out of service if it is unfit.

    Args:
        env: The job's environment.
        checkout: Its files.
        by_hand: Write, upload and pause nothing.
        node: Where to look; this machine without it.

    Raises:
        DeclarationError: The queue is unknown, a setting of the agent makes no sense, or a GPU job has no folder.
    """
    node = node or inspection.Node(env, checkout, fleet.promised(env), remembers=not by_hand)
    folder, step = (None, "") if by_hand else health.job_folder(env, checkout)
    if node.promise.gpus and folder is None and not by_hand:
        raise DeclarationError(
            f"the job of {step or 'a step without a key'} uploads no results/jobs/<key>, where its health belongs",
            where="artifact_paths",
            remedy="send to GPU queues only what hilgate generates",
        )
    record = health.Health(step, "before", agent=env.get("BUILDKITE_AGENT_NAME", ""))
    inspection.before(node, record)
    path = record.write(folder) if folder is not None else None
    if not record.problems:
        sys.stdout.write(f"~~~ fit for {node.promise.queue}\n{_gpus(record)}")
        return 0
    sys.stdout.write(f"+++ this node is unfit for {node.promise.queue}\n{_gpus(record)}")
    sys.stdout.write("".join(f"unfit: {problem}\n" for problem in record.problems))
    if not by_hand:
        # The agent uploads artifacts after a failed pre-command hook too; this one does not wait for that.
        failures = [drain.upload(path, checkout) if path is not None else "", drain.pause(record.problems, env)]
        sys.stdout.write("".join(f"also: {failure}\n" for failure in failures if failure))
        sys.stdout.write("Nothing was learned about the change; another agent takes the job.\n")
    sys.stdout.flush()
    return int(Exit.SICK_NODE)


def _gpus(record: health.Health) -> str:
    if not record.gpus:
        return ""
    lines = ["GPU  PCI address   arch     VRAM used / MiB  hottest / C  ECC  name\n"]
    lines += [
        f"{gpu.index:>3}  {gpu.bdf}  {gpu.arch:<7}  {gpu.vram_used_mib:>6} / {gpu.vram_total_mib:>6}  "
        f"{gpu.temperature_c:>11g}  {gpu.ecc_uncorrectable:>3}  {gpu.name[:22]}\n"
        for gpu in record.gpus
    ]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
