"""After a job: end what it left, and note how it leaves the node. `python3 -m hilgate.agent.postflight`.

Called by .buildkite/hooks/post-command, which ignores the exit status: a job's own is never changed.

An unfit node is not paused here. The next job's preflight looks again, and what passes by itself may have passed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.agent import cleanup, fleet, health, inspection
from hilgate.errors import Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Mapping

CANCELLED_SETTLE_SECONDS = 0.0
"""A cancelled job's hooks have 9 s in all."""


def main(words: list[str] | None = None) -> int:
    """Clean up and look; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hilgate.agent.postflight", description="How does a job leave this node?")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="the job's files (here)")
    arguments = parser.parse_args(words)
    try:
        return run(dict(os.environ), arguments.checkout)
    except HilgateError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_status)


def run(env: Mapping[str, str], checkout: Path, *, node: inspection.Node | None = None) -> int:
    """End what the job left, look at the node, leave the record in the job's folder.

    Raises:
        DeclarationError: The queue is unknown or a setting of the agent makes no sense; what was left is ended first.
    """
    left = cleanup.end_job(env.get("BUILDKITE_JOB_ID", ""), grace_seconds=cleanup.grace(env))
    sys.stdout.write("".join(f"ended {line}\n" for line in left.ended))
    if node is None:
        cancelled = env.get("BUILDKITE_JOB_CANCELLED") == "true"
        settle = CANCELLED_SETTLE_SECONDS if cancelled else inspection.SETTLE_SECONDS
        node = inspection.Node(env, checkout, fleet.promised(env), settle_seconds=settle)
    folder, step = health.job_folder(env, checkout)
    record = health.Health(step, "after", agent=env.get("BUILDKITE_AGENT_NAME", ""), ended=left.ended)
    record.problems += left.problems
    inspection.after(node, record)
    if folder is not None:
        record.write(folder)
    for line in record.dmesg[:5]:
        sys.stdout.write(f"kernel: {line}\n")
    for problem in record.problems:
        sys.stdout.write(f"the job leaves the node unfit: {problem}\n")
    return int(Exit.SICK_NODE) if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
