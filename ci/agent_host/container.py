# SPDX-License-Identifier: Apache-2.0
"""Run a step in a container: its GPUs, the one command line of `docker run`, and its end whatever happens.

Everything that a command line may contain is in `command`, which is pure. What ROCm needs, and nothing more:

* `/dev/kfd` is the compute interface that all GPUs share; each GPU adds its own `/dev/dri/renderD<minor>`. A container
  that is given only some render nodes reaches only those GPUs (AMD, "Running ROCm Docker containers", section
  "Restricting GPU access"). `rw` and not Docker's default `rwm`: no step makes device nodes.
* The devices belong to the host's groups `video` and `render`. Their names or numbers differ in an image (ROCm-docker
  issues 90 and 116), so groups are given as the numbers that own the devices on this host.
* Docker's default seccomp profile stays on. AMD's page calls `seccomp=unconfined` optional, for NUMA placement; JAX
  dropped it from its ROCm CI after HIP kernels, managed memory and a 4-GPU RCCL all-reduce passed on MI355X without
  (jax-ml/jax pull request 40370, September 2026).
* No capability: nothing of HIP, RCCL or vLLM on one node asks for one. Debuggers would (SYS_PTRACE), numactl too
  (SYS_NICE); neither runs here.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping  # noqa: TC003 - dataclasses resolve it on Python 3.10
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_host import gpus, host
from agent_host.trust import check_secrets
from hilgate.errors import CannotRunHereError, DeclarationError, Exit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKSPACE = "/hilgate/workspace"
RESULTS = "/hilgate/results"
PLAN = "/hilgate/plan.json"
JOBS = "/hilgate/jobs"
CACHE = "/hilgate/cache"
"""Where things are inside."""

PIDS = 16384
"""Threads count too: vLLM's and Inductor's compile workers are 32 processes of about 100 threads, and may be there for
each of 8 GPUs only in turn; a fork bomb ends here."""

SHM_GIB = 16
"""What the AMD pipelines of vLLM, SGLang and aiter give: RCCL and vLLM's workers share buffers in /dev/shm."""

STOP_SECONDS = 30
"""Between SIGTERM and SIGKILL of `docker stop`: six times the grace that the runner inside gives its own steps."""

FORBIDDEN = ("/proc", "/sys", "/dev", "/etc", "/run", "/var/run", "/boot", "/root/.ssh", "/var/lib/docker")
"""Never mounted, nor anything that contains them or lies in them: `/run` and `/var/run` hold docker.sock."""

PASSED = frozenset(
    {
        *("BUILDKITE", "BUILDKITE_AGENT_NAME", "BUILDKITE_BUILD_ID", "BUILDKITE_BUILD_NUMBER", "BUILDKITE_JOB_ID"),
        *("BUILDKITE_RETRY_COUNT", "BUILDKITE_STEP_KEY", "BUILDKITE_TIMEOUT"),
        *("HILGATE_JOB_ID", "HILGATE_JOB_STARTED", "HILGATE_NODE", "NO_COLOR"),
    }
)
"""All of the agent's environment that goes inside; each is a fact about the job, none opens anything."""

_IMAGE = re.compile(r"(?:[a-z0-9][a-z0-9._:/-]{0,254}@)?sha256:[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_NODE = re.compile(r"/dev/dri/renderD[0-9]{1,4}")
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62})")
_USER = re.compile(r"[1-9][0-9]{0,9}:[0-9]{1,10}")
_PATH = re.compile(r"/[^/\x00-\x1f\x7f,\"\\][^\x00-\x1f\x7f,\"\\]*")

ANSWER_SECONDS = 60
PULL_SECONDS = 3600
"""A ROCm image is about 30 GiB; a pull that is slower than an hour is a sick network."""

# mutant NumberReplacer: how often it looks changes no end
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class GpuDevices:
    """Device nodes of some GPUs, numbers of the groups that own them, and how many GPUs the driver shows this agent."""

    render_nodes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    # mutant NumberReplacer: nothing reads it of a job without GPUs
    on_host: int = 0


def gpu_devices(count: int, env: Mapping[str, str], *, kfd: Path = host.KFD, dev: Path = host.DEV) -> GpuDevices:
    """The nodes of `count` GPUs: of those that `HILGATE_RENDER_NODES` names, or of all where it names none.

    Raises:
        SickNodeError: Fewer GPUs than the step needs, or a device node that the driver lists is not there.
        CannotRunHereError: The variable is wrong, or the machine has more GPUs and nothing says which are this agent's.
    """
    if count == 0:  # mutant ReplaceComparisonOperator_Eq_LtE: a number of GPUs
        return GpuDevices()
    try:
        own = gpus.own_nodes(env, kfd)
    except DeclarationError as error:
        raise CannotRunHereError(error.what, where=error.where, remedy=error.remedy) from error
    listed = gpus.topology(kfd)
    if not own and len(listed) > count:
        raise CannotRunHereError(
            f"this machine has {len(listed)} GPUs and the step gets {count}: nothing says which are this agent's",
            where="the agent's environment hook",
            remedy=f"set {gpus.RENDER_NODES} for each agent of the machine",
        )
    chosen = [node.name for node in own or listed][:count]
    if len(chosen) < count:  # mutant ReplaceComparisonOperator_Lt_NotEq: no more than `count` are chosen
        raise host.SickNodeError(
            f"the step needs {count} GPUs and this agent has {len(chosen)}",
            where=str(kfd),
            remedy="see amd-smi list on this node, and which of its GPUs this agent may use",
        )
    try:
        groups = {path.stat().st_gid for path in (dev / "kfd", *(dev / "dri" / name for name in chosen))}
    except OSError as error:
        raise host.SickNodeError(
            f"a GPU that the driver lists has no device node: {error.strerror}",
            where=str(error.filename),
            remedy="see the kernel's log on this node",
        ) from error
    return GpuDevices(tuple(f"/dev/dri/{name}" for name in chosen), tuple(sorted(groups)), len(listed))


@dataclass(frozen=True)
class Container:
    """Everything that a container is made from.

    Attributes:
        image: By digest: `<repository>@sha256:...`, or `sha256:...` of an image in this host's own store.
        job: Buildkite's job id; names the container and labels it for the hooks that end what a job left.
        step: Planned key.
        command: What runs inside, as an argument list; no shell.
        hostname: The host's own: records must name the node, not the container.
        user: `uid:gid`, never root's.
        scratch: This job's folder on the host: `workspace`, a copy of the checkout and never the checkout itself,
            because its hooks run on the host after the container; `results`, empty; `plan.json` and, for a recheck,
            `jobs` with earlier results, both read-only inside.
        memory_gib: Its part of the host.
        fork: Whether the build is a fork's.
        network: Whether the step declares that it needs one.
        recheck: Whether there are earlier results.
        cache: A folder of models and compiled kernels that builds share; empty for none. Read-only in a fork.
        devices: Of the step's GPUs; without render nodes there is no `/dev/kfd` either.
        env: The agent's environment, of which `PASSED` goes inside, and `secrets` of a build that is no fork's.
        secrets: Names of variables; their values never stand on the command line.
        python_path: Folders of the repository that Python imports from first.
    """

    image: str
    job: str
    step: str
    command: tuple[str, ...]
    hostname: str
    user: str
    scratch: str
    memory_gib: int
    fork: bool
    network: bool
    recheck: bool = False
    cache: str = ""
    devices: GpuDevices = GpuDevices()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    python_path: tuple[str, ...] = (".",)

    @property
    def online(self) -> bool:
        """Whether it is on a network: only where declared, and never a kernel step of a fork."""
        return self.network and not (self.fork and self.devices.render_nodes)


def name(job: str) -> str:
    """The container of a job.

    Raises:
        DeclarationError: The id is not one of Buildkite's.
    """
    return "hilgate-" + _matching(_ID, job, "a job id")


def command(container: Container) -> list[str]:
    """The argument list of `docker run`; the step's command follows the image and nothing follows that.

    Options are single words (`--option=value`), so no value can be taken for an option of its own.

    Raises:
        DeclarationError: An image without digest, a device that is no render node, a mount of the host's own files, a
            user that is root, a secret whose name would change how something runs, or a value that could be read as
            more than itself.
    """
    image = _matching(_IMAGE, container.image, "an image by digest (repository@sha256:...)")
    if not container.command or not container.command[0]:
        raise DeclarationError("the container has no command", where=container.step, remedy="name what runs inside")
    memory = f"{container.memory_gib}g"
    if container.memory_gib < 1:
        raise DeclarationError(
            f"a limit of {memory} leaves the container no memory", where=container.step, remedy="give it 1 GiB or more"
        )
    return [
        *("docker", "run", "--rm", "--init", "--pull=never", "--log-driver=none"),
        f"--name={name(container.job)}",
        f"--label={host.JOB_LABEL}={container.job}",
        f"--label=hilgate.step={_matching(KEY, container.step, 'a step key')}",
        f"--hostname={_matching(_HOSTNAME, container.hostname, 'a host name')}",
        f"--user={_matching(_USER, container.user, 'a user that is not root (uid:gid)')}",
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--ipc=private", "--cgroupns=private"),
        f"--network={'bridge' if container.online else 'none'}",
        # Swap equals memory, so there is none: a step that needs more than its share ends instead of slowing the node.
        *(f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={PIDS}", f"--shm-size={SHM_GIB}g"),
        "--ulimit=core=0",
        *_devices(container),
        *_mounts(container),
        *_environment(container),
        *(f"--workdir={WORKSPACE}", "--entrypoint=", f"--stop-timeout={STOP_SECONDS}"),
        image,
        *container.command,
    ]


def _devices(container: Container) -> list[str]:
    given = container.devices
    nodes = [_matching(_NODE, node, "a render node (/dev/dri/renderD<minor>)") for node in given.render_nodes]
    # mutant ReplaceComparisonOperator_NotEq_Lt, ReplaceComparisonOperator_NotEq_IsNot: a set of few has no more
    if len(set(nodes)) != len(nodes):
        raise DeclarationError("a GPU is given twice", where=", ".join(nodes), remedy="name each render node once")
    if not nodes:
        return []
    groups = [f"--group-add={int(group)}" for group in sorted({*given.groups} - {0})]
    return [f"--device={node}:{node}:rw" for node in ("/dev/kfd", *nodes)] + groups


def _mounts(container: Container) -> list[str]:
    """`--mount`, because `-v` makes a missing source as root; its value is a line of CSV, so no commas or quotes."""
    scratch, read_only = _folder(container.scratch), ",readonly"
    mounts = [(f"{scratch}/workspace", WORKSPACE, ""), (f"{scratch}/results", RESULTS, "")]
    mounts.append((f"{scratch}/plan.json", PLAN, read_only))
    if container.recheck:
        mounts.append((f"{scratch}/jobs", JOBS, read_only))
    if container.cache:
        mounts.append((_folder(container.cache), CACHE, read_only if container.fork else ""))
    return [f"--mount=type=bind,source={source},target={target}{mode}" for source, target, mode in mounts]


def _folder(path: str) -> str:
    """A folder of the host that may be mounted."""
    _matching(_PATH, path, "a plain absolute path")
    of_host = any(f"{path}/".startswith(f"{other}/") or other.startswith(f"{path}/") for other in FORBIDDEN)
    if posixpath.normpath(path) != path or of_host:
        raise DeclarationError(f"{path!r} is never mounted", remedy="mount a folder made for this job")
    return path


def variables(container: Container) -> dict[str, str]:
    """What the runner inside finds in its environment, beside the secrets.

    Raises:
        DeclarationError: A value holds a NUL.
    """
    values = {variable: container.env[variable] for variable in PASSED if variable in container.env}
    values |= {
        "HILGATE_IMAGE": container.image.rpartition("@")[2],
        "HOME": "/tmp",  # noqa: S108 - inside the container, gone with it
        "PYTHONPATH": ":".join(container.python_path),
    }
    if container.cache:
        values["HF_HOME"] = f"{CACHE}/huggingface"
    if not container.online:
        values["HF_HUB_OFFLINE"] = "1"  # else every model costs the hub's timeouts before the cache is read
    if any("\0" in value for value in values.values()):
        raise DeclarationError("a variable holds a NUL", where=container.step, remedy="see the agent's environment")
    return values


def secrets(container: Container) -> list[str]:
    """Names of the variables that hold its secrets; none for a fork.

    Raises:
        DeclarationError: A name would change how something runs.
    """
    names = [variable for variable in sorted(check_secrets(container.secrets)) if variable in container.env]
    return [] if container.fork else names


def _environment(container: Container) -> list[str]:
    plain = [f"--env={variable}={value}" for variable, value in sorted(variables(container).items())]
    return plain + [f"--env={variable}" for variable in secrets(container)]


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise DeclarationError(f"{text!r} is not {what}", remedy="see ci/agent_host/container.py")
    return text


def require_docker() -> None:
    """Docker is installed and its daemon answers.

    Raises:
        CannotRunHereError: It is not installed.
        SickNodeError: The daemon is dead or hangs.
    """
    if failure := _docker("version", "--format", "{{.Server.Version}}"):
        raise host.SickNodeError(f"the Docker daemon does not answer: {failure}", remedy="see its service on this node")


def obtain(image: str) -> None:
    """Pull this image by its digest; one that is known by its digest alone must be in the host's store.

    Raises:
        SickNodeError: It cannot be pulled, or is not there.
    """
    if "@" in image:
        failure = _docker("pull", "--quiet", image, seconds=PULL_SECONDS)
        what = "cannot be pulled"
    else:
        failure = _docker("image", "inspect", "--format", "{{.Id}}", image)
        what = "is not in this host's store, and HILGATE_REGISTRY names no repository to pull it from"
    if failure:
        raise host.SickNodeError(f"the image {what}: {failure}", where=image, remedy="see the registry and this node")


LEAST_FREE_GIB = 1
"""Least free space of the file system that a job writes to. Without any, the agent itself cannot write the scripts that
run its hooks, and every later job fails before a line of ours could pause the agent."""


def attend(command: list[str], *, env: dict[str, str], container: str | None, seconds: float, writes: Path) -> int:
    """Run a command to its end, or end it (and its `container` by name).

    That is on SIGTERM, SIGINT or SIGHUP, after `seconds`, and when the file system of `writes` is nearly full.

    Returns:
        Its own exit status as a shell gives it (128 and the signal's number for a signal); 130 when interrupted.

    Raises:
        SickNodeError: It outlived `seconds`, there was no room, or Docker could not run the container (its status 125).
        CannotRunHereError: It cannot be started, or the image has no such program (Docker's statuses 126 and 127).
    """
    with _stop_signals() as received:
        try:
            child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            what = f"{command[0]} cannot be started: {error.strerror}"
            raise CannotRunHereError(what, remedy="see its installation on this agent") from error
        deadline = time.monotonic() + seconds
        full = False
        try:
            # mutant ReplaceComparisonOperator_Lt_LtE: two readings of a clock
            while child.poll() is None and not received and not full and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                full = shutil.disk_usage(writes).free < LEAST_FREE_GIB * 2**30
            late = child.poll() is None
        finally:
            _end(child, container, at_once=full)
    if received:
        sys.stderr.write(f"ended: {signal.Signals(received[0]).name}\n")
        return int(Exit.INTERRUPTED)
    if late and full:
        raise host.SickNodeError(
            f"ended: less than {LEAST_FREE_GIB} GiB are free where the job writes",
            where=str(writes),
            remedy="free some on this node; another may do",
        )
    if late:
        raise host.SickNodeError(
            f"ended after {seconds:.0f} s: what runs inside ends sooner, so it or this node hangs",
            remedy="see this node; another may do",
        )
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    # 125 to 127 are of `docker run` itself (Docker reference, "Exit status"); `hilgate` uses none of them.
    if container is not None and status == 125:
        raise host.SickNodeError("Docker could not run the container; its words are above", remedy="see this node")
    if container is not None and status in {126, 127}:
        raise CannotRunHereError("the image has no python3 that can be run", remedy="see the recipe of the image")
    return status


def _end(child: subprocess.Popen[bytes], container: str | None, *, at_once: bool) -> None:
    """Nothing of it is left: the container by its name, which is this job's alone, and the process group."""
    if at_once:  # while it is asked to stop it would go on writing
        pass
    elif child.poll() is None and container is not None:
        _docker("stop", f"--time={STOP_SECONDS}", container, seconds=STOP_SECONDS + ANSWER_SECONDS)
    elif child.poll() is None:
        _signal_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    if container is not None:
        _docker("rm", "--force", "--volumes", container)
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _docker(*arguments: str, seconds: float = 0) -> str:
    """Why a docker command did not succeed; empty when it did.

    Raises:
        CannotRunHereError: Docker is not installed.
    """
    ran = host.run(("docker", *arguments), seconds or ANSWER_SECONDS)
    if not ran.started:
        raise CannotRunHereError(ran.problem, remedy="install Docker on this agent")
    return ran.failure


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that asked this job to end, in order, instead of ending it at once."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
