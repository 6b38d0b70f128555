# SPDX-License-Identifier: Apache-2.0
"""A job in a pod of Kubernetes (agent-stack-k8s): are its GPUs fit, and the step in a container without a token.

    agent_host/__main__.py pod fit --queue Q --step KEY --gpus N    an init container: 0, or 75 on an unfit node
    agent_host/__main__.py pod step                                 the container that runs the code of a change

The agent's containers hold a token with which anybody could upload steps. So `hilgate job`, which runs in one of them,
hands the step over through two volumes: it alone writes to `given`, the step alone to `out`. There is no Docker, no
systemd and no agent to pause. A pod that fails before its agent starts is infrastructure to Buildkite (`stack_error`
with the status of the container, or -1 from a controller that uses the Stacks API), and the job runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from agent_host import clone, container, gpus, health, hooks, host
from hilgate.errors import Exit, HilgateError, Parser, ending

if TYPE_CHECKING:
    from collections.abc import Mapping

POD = "HILGATE_POD"
"""Variable of the container that runs `hilgate job`: the folder that has `given` and `out`."""

GIVEN, OUT = "given", "out"
PLAN, JOBS, STEP, HEALTH = "plan.json", "jobs", "step.json", "health"
"""Names in `given`, beside the workspace."""

REPOSITORY = "repository"
"""Folder in `given` with the default branch of a repository that is not hilgate's own, out of the agent's image."""

RESULTS, STATUS, STARTED, LOG = "results", "status", "started", "log"
"""Names in `out`."""

BEFORE, AFTER = "health-before.json", "health-after.json"

KILLED = 137
"""What a step ends with whose container was killed, e.g. for its memory: 128 + SIGKILL, as Docker says it."""

NO_LOG = "the kernel's log is not shown to a pod: a GPU that hung is known by what follows from it alone"
POLL_SECONDS = 0.2
CHUNK_BYTES = 2**20


def look(
    folder: Path, node: hooks.NodeContext, step: str, count: int, moment: str, *, dev: Path = host.DEV
) -> health.HealthRecord:
    """Judge the `count` GPUs that this container was given, and leave the record in `folder`.

    Raises:
        DeclarationError: The queue is unknown, or a setting makes no sense.
    """
    given = sorted(path.name for path in dev.glob("dri/renderD*"))
    node = replace(node, env={**node.env, gpus.RENDER_NODES: " ".join(given)})
    promise = replace(health.promised(node.env), gpus=count)
    record = health.HealthRecord(step, moment, node.env.get("BUILDKITE_AGENT_NAME", ""))
    if given:
        hooks.look_at_gpus(node, promise, record, idle=moment == "before")
    else:
        record.problems.append(f"this container has no GPU, and {count} were asked for: see the device plugin")
    record.notes.append(NO_LOG)
    if moment == "before" and not record.problems:
        record.problems += hooks.compute(node, promise)
    record.write(folder)
    return record


def run_given(root: Path, workspace: Path, node: hooks.NodeContext, *, dev: Path = host.DEV) -> None:
    """Wait until a step is given, run it in `workspace`, and leave results, log, health and status in `out`."""
    given, out = root / GIVEN, root / OUT
    if (out / STARTED).exists():  # Kubernetes has started this container again
        if not (out / STATUS).exists():
            host.write_whole(out / STATUS, f"{KILLED}\n")
        return
    while not (given / STEP).is_file():
        time.sleep(POLL_SECONDS)
    (out / STARTED).touch()
    try:
        status = _run(root, workspace, node, dev)
    except OSError as error:  # a full disk: this node, whatever the change is
        sys.stderr.write(f"error: {error}\n")
        status = int(Exit.SICK_NODE)
    host.write_whole(out / STATUS, f"{status}\n")


def _run(root: Path, workspace: Path, node: hooks.NodeContext, dev: Path) -> int:
    """Run what is given, look at the GPUs, and return the status as a shell gives it."""
    given, out = root / GIVEN, root / OUT
    step = json.loads((given / STEP).read_bytes())
    for path in (given / "workspace").iterdir():  # not the folder itself: the volume's root is not this user's
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, workspace / path.name, symlinks=True)
        else:
            shutil.copy2(path, workspace / path.name, follow_symlinks=False)
    (out / RESULTS).mkdir()
    env = {**os.environ, **step["env"]}
    if Path(container.CACHE).is_dir():
        env["HF_HOME"] = f"{container.CACHE}/huggingface"
    with (out / LOG).open("ab") as log:
        child = subprocess.run(
            step["command"], cwd=workspace, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
        if os.getpid() == 1:  # of this container: all else in it is the step's
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        if step["gpus"]:
            node = replace(node, env={**node.env, health.QUEUE: step["queue"]})
            try:
                look(out, node, step["key"], step["gpus"], "after", dev=dev)
            except HilgateError as error:  # the judge misses the record, and nothing counts without
                log.write(f"no look after the step: {error.what} ({error.where})\n".encode())
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def give(root: Path, *, key: str, command: tuple[str, ...], env: Mapping[str, str], queue: str, count: int) -> None:
    """Let the container of the step begin; all that it reads must be in `given` by now."""
    step = {"key": key, "command": command, "env": dict(env), "queue": queue, "gpus": count}
    host.write_whole(root / GIVEN / STEP, json.dumps(step))


def attend(root: Path, seconds: float, show: IO[bytes]) -> int:
    """Show what the step prints until it has ended; returns its exit status.

    Everything in `out` is written by the code of a change: a status that is none counts as a step that was killed.

    Raises:
        SickNodeError: It outlived `seconds`.
    """
    out, deadline, shown = root / OUT, time.monotonic() + seconds, 0
    while True:
        ended = os.path.lexists(out / STATUS)
        while text := _read(out / LOG, shown):
            shown += len(text)
            show.write(text)
            if not ended and time.monotonic() > deadline:
                break
        show.flush()
        if ended:
            said = _read(out / STATUS, 0)[:4].strip().decode("ascii", "replace")
            return int(said) if said.isascii() and said.isdecimal() and int(said) < 256 else KILLED
        if time.monotonic() > deadline:
            raise host.SickNodeError(
                f"ended after {seconds:.0f} s: what runs inside ends sooner, so it or this node hangs",
                remedy="see the container `step` of this pod; another node may do",
            )
        time.sleep(POLL_SECONDS)


def _read(path: Path, offset: int) -> bytes:
    """The next bytes of a plain file; empty where there are none, or no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        return os.pread(file.fileno(), CHUNK_BYTES, offset)


def _stop(_number: int, _frame: object) -> NoReturn:
    """The pod is over. A status that is not 0 would look like trouble of the node to some controllers."""
    sys.exit(Exit.PASS)


@ending
def main(words: list[str] | None = None) -> int:
    """Run a container of a pod; returns the exit status."""
    parser = Parser(prog="agent_host.pod", description="Run a container of a pod.")
    commands = parser.add_subparsers(dest="what", required=True)
    fit = commands.add_parser("fit", help="judge the GPUs of this container")
    fit.add_argument("--queue", required=True)
    fit.add_argument("--step", required=True, help="planned key")
    fit.add_argument("--gpus", required=True, type=int)
    for command in (fit, commands.add_parser("step", help="run the step that is given")):
        command.add_argument("--root", type=Path, default=Path(container.WORKSPACE).parent)
    asked = parser.parse_args(words)
    node = hooks.NodeContext(dict(os.environ), asked.root)
    own = asked.root / GIVEN / REPOSITORY
    if own.is_dir():
        node = replace(node, env={**node.env, clone.REPOSITORY: str(own)})
    if asked.what == "step":
        signal.signal(signal.SIGTERM, _stop)  # the first process of a container has no default for it
        run_given(asked.root, Path(container.WORKSPACE), node)
        while True:  # a container that ends is started again
            time.sleep(3600)
    node = replace(node, env={**node.env, health.QUEUE: asked.queue})
    record = look(asked.root / GIVEN / HEALTH, node, asked.step, asked.gpus, "before")
    sys.stdout.write(hooks.table(record))
    sys.stdout.write("".join(f"unfit for {asked.queue}: {problem}\n" for problem in record.problems))
    return int(Exit.SICK_NODE if record.problems else Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
