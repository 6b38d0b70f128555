"""Runs one step of a plan on an agent: in the container of its image, or on the host where it has none.

    python3 -m hilgate.agent.job KEY --plan results/plan.json --results results/jobs/KEY [--recheck]

The exit status is that of `hilgate run` (or `hilgate recheck`) inside. What Docker or this node cannot do is 5 or 75
and never 1, so that nobody is blamed for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.agent import container, devices, docker, inputs, trust, workspace
from hilgate.errors import CannotRunHereError, Exit, HilgateError, RecordsError

if TYPE_CHECKING:
    from collections.abc import Mapping

REGISTRY = "HILGATE_REGISTRY"
"""Of the agent: where images are pulled from, each below it by its name. Without it an image is taken from this host's
own store."""

CACHE = "HILGATE_CACHE"
"""Of the agent: a folder of models that its jobs share."""

DISPOSABLE = "HILGATE_DISPOSABLE"
"""Of the agent: 1 where the machine is thrown away after each job, so a fork may run on the host itself."""

MEMORY_SHARE = 0.9
"""Of the host's memory for containers; the rest is the agent's, the kernel's and the driver's."""


@dataclass(frozen=True)
class Arguments:
    """The command line, with absolute paths."""

    key: str
    plan: Path
    results: Path
    recheck: bool


def main(words: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    # Until the container runs, a signal only has to leave nothing behind: SystemExit passes every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.INTERRUPTED))
    try:
        return run(_arguments(words), Path.cwd(), os.environ)
    except HilgateError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_status)
    except OSError as error:  # a full disk, a file system that went away: this node, whatever the change is
        sys.stderr.write(f"error: {error}\n  to do: see this node; another may do\n")
        return int(Exit.SICK_NODE)


def run(arguments: Arguments, checkout: Path, env: Mapping[str, str]) -> int:
    """Run one step of a plan in `checkout`; returns its exit status.

    Raises:
        RecordsError: The plan is of another commit, or there are results already.
        CannotRunHereError: No image, no Docker, or a fork that would run on the host.
        MissingGpuError: The agent does not have the GPUs that its queue promises.
    """
    step = inputs.read_step(arguments.plan, arguments.key)
    commit = workspace.commit_of(checkout)
    if commit != step.commit:
        raise RecordsError(
            f"the plan is of commit {step.commit[:12]} and {commit[:12]} is checked out",
            where=str(arguments.plan),
            remedy="check that commit out, or plan again",
        )
    if arguments.results.resolve() != arguments.results or not arguments.results.is_relative_to(checkout.resolve()):
        raise RecordsError(
            "the results would be written outside of the checkout, or through a link",
            where=str(arguments.results),
            remedy="name a folder in results/jobs",
        )
    workspace.require_empty(arguments.results)
    decided = trust.of_build(env)
    if step.fork and not decided.fork:
        decided = trust.Trust(fork=True, why="the plan says so")
    sys.stderr.write(f"{step.key}: {'fork' if decided.fork else 'trusted'}: {decided.why}\n")
    if step.image:
        return _in_container(step, arguments, checkout, env, decided)
    return _on_host(step, arguments, env, decided)


def _on_host(step: inputs.Step, arguments: Arguments, env: Mapping[str, str], decided: trust.Trust) -> int:
    if decided.fork and env.get(DISPOSABLE) != "1":
        raise CannotRunHereError(
            f"{step.key} has no image, and a fork's code ({decided.why}) does not run on this host itself",
            where="the agent's environment hook",
            remedy=f"give its queue an image, or set {DISPOSABLE}=1 where the machine is thrown away after each job",
        )
    program = shutil.which("hilgate", path=env.get("PATH"))
    if program is None:
        raise CannotRunHereError("hilgate is not on the path", remedy="install it on this agent (SECURITY.md)")
    with tempfile.TemporaryDirectory(prefix="hilgate-home-") as home:
        inside = trust.environment(env, decided, step.secrets)
        if decided.fork:
            inside["HOME"] = home  # the agent's own holds its credentials
        words = _words(arguments, str(arguments.plan), str(arguments.results), str(arguments.results.parent))
        return docker.attend([program, *words], env=inside, stop=None, seconds=_seconds(step))


def _in_container(
    step: inputs.Step, arguments: Arguments, checkout: Path, env: Mapping[str, str], decided: trust.Trust
) -> int:
    docker.require()
    gpus = devices.of_job(step.gpus, env)
    scratch = Path(tempfile.mkdtemp(prefix="hilgate-job-")).resolve()
    try:
        digest = inputs.image_digest(step, env, scratch / "artifacts", local=arguments.results.parent)
        image = f"{env[REGISTRY].rstrip('/')}/{step.image}@{digest}" if env.get(REGISTRY) else digest
        docker.obtain(image)
        workspace.copy(checkout, step.commit, scratch / "workspace")
        shutil.copyfile(arguments.plan, scratch / "plan.json")
        (scratch / "results").mkdir()
        jobs = scratch / "jobs"
        if arguments.recheck:
            _fetch_results(step.key, env, arguments.results.parent, jobs)
        workspace.hand_over(scratch)
        scratch.chmod(0o711)
        uid, gid = workspace.user()
        job = container.Job(
            image=image,
            id=env.get("BUILDKITE_JOB_ID") or str(uuid.uuid4()),
            step=step.key,
            command=("python3", "-m", "hilgate", *_words(arguments, container.PLAN, container.RESULTS, container.JOBS)),
            hostname=socket.gethostname(),
            user=f"{uid}:{gid}",
            workspace=str(scratch / "workspace"),
            results=str(scratch / "results"),
            plan=str(scratch / "plan.json"),
            jobs=str(jobs) if arguments.recheck else "",
            cache=str(Path(env[CACHE]).resolve()) if env.get(CACHE) else "",
            render_nodes=gpus.render_nodes,
            groups=gpus.groups,
            limits=container.Limits(memory_gib=_memory_gib(step.gpus, gpus.on_host)),
            fork=decided.fork,
            network=step.network,
            env=env,
            secrets=step.secrets,
        )
        command = container.command(job)
        try:
            status = docker.attend(
                command, env=dict(env), stop=container.name(job.id), seconds=_seconds(step), decode=True
            )
        finally:
            for refused in workspace.collect(scratch / "results", arguments.results):
                sys.stderr.write(f"left behind: {refused.encode('unicode_escape').decode()}\n")
        return status
    finally:
        workspace.discard(scratch)


def _words(arguments: Arguments, plan: str, results: str, jobs: str) -> list[str]:
    if arguments.recheck:
        return ["recheck", arguments.key, "--plan", plan, "--jobs", jobs, "--results", results]
    return ["run", arguments.key, "--plan", plan, "--results", results]


def _fetch_results(key: str, env: Mapping[str, str], local: Path, jobs: Path) -> None:
    """The results of the job whose failing checks are run again, as `jobs/<key>/results.jsonl`."""
    if env.get("BUILDKITE") == "true":
        own = {name: value for name, value in env.items() if name != inputs.FROM_BUILD}
        found = inputs.download(key, own, jobs.with_name("earlier"))
    else:
        found = local / key / "results.jsonl"
    if not found.is_file():
        raise RecordsError("no results to run again", where=str(found), remedy="run the step first")
    (jobs / key).mkdir(parents=True)
    shutil.copyfile(found, jobs / key / "results.jsonl")


def _seconds(step: inputs.Step) -> float:
    """After which the runner inside must long have ended its step: two minutes more than the step's own time.

    One for what the runner does before and after, one for `docker stop`.
    """
    return (step.timeout_minutes + 2) * 60.0


def _memory_gib(gpus: int, on_host: int) -> int:
    """This job's part of the host: as many shares as it has GPUs, all of it for a job without."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, int(total * MEMORY_SHARE * (gpus / on_host if gpus else 1)))


def _arguments(words: list[str] | None) -> Arguments:
    parser = argparse.ArgumentParser(prog="python3 -m hilgate.agent.job", description="Runs one step of a plan.")
    parser.add_argument("key", metavar="KEY", help="planned key of the step")
    parser.add_argument("--plan", metavar="FILE", required=True, type=Path)
    parser.add_argument("--results", metavar="DIR", required=True, type=Path)
    parser.add_argument("--recheck", action="store_true", help="run only what failed in results/jobs/KEY")
    chosen = parser.parse_args(words)
    return Arguments(chosen.key, chosen.plan.absolute(), chosen.results.absolute(), chosen.recheck)


if __name__ == "__main__":
    sys.exit(main())
