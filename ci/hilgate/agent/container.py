"""The command line of a step's container. Pure: one function, everything it may contain is in this file.

What ROCm needs, and nothing more:

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

import posixpath
import re
from collections.abc import Mapping  # noqa: TC003 - dataclasses resolve it on Python 3.10
from dataclasses import dataclass, field

from hilgate.agent.trust import check_secrets
from hilgate.errors import Exit, HilgateError

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
        *("HILGATE_JOB_ID", "HILGATE_JOB_STARTED", "NO_COLOR"),
    }
)
"""All of the agent's environment that goes inside; each is a fact about the job, none opens anything."""

_IMAGE = re.compile(r"(?:[a-z0-9][a-z0-9._:/-]{0,254}@)?sha256:[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_KEY = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_NODE = re.compile(r"/dev/dri/renderD[0-9]{1,4}")
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62})")
_USER = re.compile(r"[1-9][0-9]{0,9}:[0-9]{1,10}")
_PATH = re.compile(r"/[^\x00-\x1f\x7f,\"\\]+")


class UnsafeJobError(HilgateError):
    """A job names something that no container of ours gets."""

    exit_status = Exit.INVALID_DECLARATION


@dataclass(frozen=True)
class Limits:
    """What one container may use of its host."""

    memory_gib: int
    pids: int = PIDS
    shm_gib: int = SHM_GIB


@dataclass(frozen=True)
class Job:
    """Everything that a container is made from.

    Attributes:
        image: By digest: `<repository>@sha256:...`, or `sha256:...` of an image in this host's own store.
        id: Buildkite's job id; names the container and labels it for the hooks that end what a job left.
        step: Planned key.
        command: What runs inside, as an argument list; no shell.
        hostname: The host's own: records must name the node, not the container.
        user: `uid:gid`, never root's.
        workspace: A copy of the checkout. Never the checkout itself: its hooks run on the host after the container.
        results: An empty folder of this job's own.
        plan: `plan.json`, read-only inside.
        jobs: Results of earlier jobs, read-only inside; empty for none.
        cache: A folder of models and compiled kernels that builds share; empty for none. Read-only in a fork.
        render_nodes: `/dev/dri/renderD*` of the step's GPUs; none means no `/dev/kfd` either.
        groups: Numbers of the groups that own these devices on the host.
        env: The agent's environment, of which `PASSED` goes inside, and `secrets` of a build that is no fork's.
        secrets: Names of variables; their values never stand on the command line.
    """

    image: str
    id: str
    step: str
    command: tuple[str, ...]
    hostname: str
    user: str
    workspace: str
    results: str
    plan: str
    limits: Limits
    fork: bool
    network: bool
    jobs: str = ""
    cache: str = ""
    render_nodes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()


def name(job_id: str) -> str:
    """The container of a job.

    Raises:
        UnsafeJobError: The id is not one of Buildkite's.
    """
    return "hilgate-" + _matching(_ID, job_id, "a job id")


def command(job: Job) -> list[str]:
    """The argument list of `docker run`; the step's command follows the image and nothing follows that.

    Options are single words (`--option=value`), so no value can be taken for an option of its own.

    Raises:
        UnsafeJobError: An image without digest, a device that is no render node, a mount of the host's own files, a
            user that is root, a value that could be read as more than itself.
        DeclarationError: A secret has a name that would change how something runs.
    """
    image = _matching(_IMAGE, job.image, "an image by digest (repository@sha256:...)")
    if not job.command or not job.command[0]:
        raise UnsafeJobError("the container has no command", where=job.step, remedy="name what runs inside")
    return [
        *("docker", "run", "--rm", "--init", "--pull=never", "--log-driver=none"),
        f"--name={name(job.id)}",
        f"--label=hilgate.job={job.id}",
        f"--label=hilgate.step={_matching(_KEY, job.step, 'a step key')}",
        f"--hostname={_matching(_HOSTNAME, job.hostname, 'a host name')}",
        f"--user={_matching(_USER, job.user, 'a user that is not root (uid:gid)')}",
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--ipc=private", "--cgroupns=private"),
        f"--network={'bridge' if job.network and not (job.fork and job.render_nodes) else 'none'}",
        *_limits(job.limits),
        *_devices(job),
        *_mounts(job),
        *_environment(job),
        *(f"--workdir={WORKSPACE}", "--entrypoint=", f"--stop-timeout={STOP_SECONDS}"),
        image,
        *job.command,
    ]


def _limits(limits: Limits) -> list[str]:
    for what, value in (("memory", limits.memory_gib), ("pids", limits.pids), ("shm", limits.shm_gib)):
        if value < 1:
            raise UnsafeJobError(f"a limit of {value} for {what} is none", remedy="give each container its share")
    memory = f"{limits.memory_gib}g"
    return [
        # Swap equals memory, so there is none: a step that needs more than its share ends instead of slowing the node.
        *(f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.pids}"),
        *(f"--shm-size={limits.shm_gib}g", "--ulimit=core=0"),
    ]


def _devices(job: Job) -> list[str]:
    nodes = [_matching(_NODE, node, "a render node (/dev/dri/renderD<minor>)") for node in job.render_nodes]
    if len(set(nodes)) != len(nodes):
        raise UnsafeJobError("a GPU is given twice", where=", ".join(nodes), remedy="name each render node once")
    if not nodes:
        return []
    groups = [f"--group-add={int(group)}" for group in sorted({*job.groups} - {0})]
    return [f"--device={node}:{node}:rw" for node in ("/dev/kfd", *nodes)] + groups


def _mounts(job: Job) -> list[str]:
    mounts = [
        _mount(job.workspace, WORKSPACE, writable=True),
        _mount(job.results, RESULTS, writable=True),
        _mount(job.plan, PLAN, writable=False),
    ]
    if job.jobs:
        mounts.append(_mount(job.jobs, JOBS, writable=False))
    if job.cache:
        mounts.append(_mount(job.cache, CACHE, writable=not job.fork))
    return mounts


def _mount(source: str, target: str, *, writable: bool) -> str:
    """`--mount`, because `-v` makes a missing source as root; its value is a line of CSV, so no commas or quotes."""
    _matching(_PATH, source, "a plain absolute path")
    near = [f for f in FORBIDDEN if _within(source, f) or _within(f, source)]
    if posixpath.normpath(source) != source or source == "/" or near:
        raise UnsafeJobError(f"{source!r} is never mounted", remedy="mount a folder made for this job")
    return f"--mount=type=bind,source={source},target={target}{'' if writable else ',readonly'}"


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _environment(job: Job) -> list[str]:
    values = {variable: job.env[variable] for variable in PASSED if variable in job.env}
    values |= {
        "HILGATE_IMAGE": job.image.rsplit("@", 1)[-1],
        "HOME": "/tmp",  # noqa: S108 - inside the container, gone with it
        "PYTHONPATH": "ci:kernels:evals",
    }
    if job.cache:
        values["HF_HOME"] = f"{CACHE}/huggingface"
    if not job.network or (job.fork and job.render_nodes):
        values["HF_HUB_OFFLINE"] = "1"  # else every model costs the hub's timeouts before the cache is read
    if any("\0" in value for value in values.values()):
        raise UnsafeJobError("a variable holds a NUL", where=job.step, remedy="see the agent's environment")
    plain = [f"--env={variable}={value}" for variable, value in sorted(values.items())]
    secret = check_secrets(job.secrets)
    return plain + [f"--env={variable}" for variable in sorted(secret) if not job.fork and variable in job.env]


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise UnsafeJobError(f"{text!r} is not {what}", remedy="see ci/hilgate/agent/container.py")
    return text
