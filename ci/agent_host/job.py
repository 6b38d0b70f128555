# SPDX-License-Identifier: Apache-2.0
"""Run steps of a plan on an agent: in the container of their image, in a pod, or on the host where they have no image.

    hilgate job KEY ... --plan results/plan.json --results results/jobs/KEY [--recheck | --approved]

The exit status is that of `hilgate run` (or `hilgate recheck`) inside. What Docker or this node cannot do is 5 or 75
and never 1, so that nobody is blamed for it.

Steps that share a job run one after the other, each in a container of its own. One that fails stops none; a sick node
and a signal stop all that follow, which then did not run. Buildkite retries a job as a whole, so what is wrong with a
node is the job's status only where no step of it has found anything: a second try would lose that.

A container works in a copy of the checkout, and nothing but plain result files comes back: hooks of a checkout run on
the host after the container, and a link that a step leaves among its results would make the agent upload any file of
the host. Plans and records are read as plain JSON, because an agent's own Python has no pydantic; everything that is
used is checked here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agent_host import base, collect, container, health, host, pause, pod, reap, trust
from hilgate.errors import CannotRunHereError, Exit, MisuseError, Parser, RecordsError, ending
from hilgate.names import Trust, node_name, of_build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CACHE = "HILGATE_CACHE"
"""Variable of the agent: a folder of models that its jobs share, one part for reviewed code and one for all other."""

DISPOSABLE = "HILGATE_DISPOSABLE"
"""Variable of the agent: 1 where the machine is thrown away after each job, so a fork may run on the host itself."""

FROM_BUILD = "HILGATE_IMAGE_FROM_BUILD"
"""Variable of a rerun: the build whose images are used where this one builds none."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FOLDER = re.compile(r"\.|\w[\w.-]*(?:/\w[\w.-]*)*/?")
_BUILD = re.compile(r"[0-9a-f-]{1,36}")


@dataclass(frozen=True)
class PlannedJob:
    """What `plan.json` says of one step and of the build; texts are empty for what there is not."""

    key: str
    commit: str
    fork: bool
    image: str
    content: str
    """sha256 of what the image is built from."""
    digest: str
    """Digest of the image, where an earlier build has built it."""
    provider: str
    """Planned key of the step that builds the image."""
    gpus: int
    network: bool
    secrets: tuple[str, ...]
    timeout_minutes: int
    python_path: tuple[str, ...]
    job: str
    """Key of the Buildkite step that runs it: its own, or that of the first step of the job that it shares."""

    @property
    def seconds(self) -> float:
        """The step's own time, a minute for what the runner does before and after, and one for `docker stop`."""
        return (self.timeout_minutes + 2) * 60.0


def key_of(planned: dict[str, Any]) -> str:
    """Planned key of a step in `plan.json`."""
    key, shard = f"{planned['step']['key']}-{planned['device']}", planned.get("shard")
    return f"{key}-{shard['number']}of{shard['of']}" if shard else key


def job_of(planned: dict[str, Any]) -> str:
    """Key of the Buildkite step that runs it."""
    return planned.get("job") or key_of(planned)


def read_plan(path: Path, key: str) -> PlannedJob:
    """One step of a plan.

    Raises:
        RecordsError: There is no plan, or it is not one.
        MisuseError: The plan has no such step.
    """
    try:
        plan = json.loads(path.read_bytes())
        steps = {key_of(planned): planned for planned in plan["steps"]}
        if key not in steps:
            raise MisuseError(f"the plan has no step {key!r}", where=str(path), remedy="take a key of its steps")
        planned, step = steps[key], steps[key]["step"]
        image = planned.get("image") or ""
        digest = plan.get("digests", {}).get(image, "")
        providers = [name for name, other in steps.items() if image and other["step"].get("provides") == image]
        return PlannedJob(
            key=host.expect_text(key, "its key", container.KEY),
            commit=host.expect_text(plan["commit"], "commit", host.FULL_SHA),
            fork=_flag(plan.get("fork", False), "fork"),
            image=host.expect_text(image, "image", container.KEY) if image else "",
            content=host.expect_text(plan["images"][image], f"the content of {image}", _SHA256) if image else "",
            digest=host.expect_text(digest, "a digest", _DIGEST) if digest else "",
            # mutant NumberReplacer: one step provides an image
            provider=host.expect_text(providers[0], "a key", container.KEY) if providers else "",
            job=host.expect_text(job_of(planned), "its job", container.KEY),
            gpus=host.expect_number(step.get("gpus", 0), "gpus", 0, 8) if planned["device"] != "cpu" else 0,
            network=_flag(step.get("network", False), "network"),
            secrets=trust.check_secrets(step.get("secrets", ())),
            timeout_minutes=host.expect_number(step["timeout_minutes"], "timeout_minutes", 1, 180),
            python_path=tuple(
                host.expect_text(folder, "a folder", _FOLDER) for folder in plan.get("python_path", (".",))
            ),
        )
    except OSError as error:
        raise RecordsError(f"no plan: {error.strerror}", where=str(path), remedy="download plan.json first") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordsError(
            f"not a plan: {type(error).__name__}: {error}", where=str(path), remedy="plan the build again"
        ) from error


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{what} is {value!r}")
    return value


def image_digest(planned: PlannedJob, env: Mapping[str, str], folder: Path, *, local: Path) -> str:
    """Digest of the step's image: the plan's, else by the job that built it, here or in `HILGATE_IMAGE_FROM_BUILD`.

    On an agent they are downloaded into `folder`; locally they lie in `local`, a folder of job folders.

    Raises:
        CannotRunHereError: No such record arrived, or the image was built from other contents than the plan's.
    """
    image = planned.image
    if planned.digest:
        return planned.digest
    provider = planned.provider or (f"image-{image}-cpu" if env.get(FROM_BUILD) else "")
    if not provider:
        raise CannotRunHereError(
            f"no step of the plan builds the image {image!r}",
            where=f"step {planned.key}",
            remedy=f"plan the step that provides it, or name a build that has it in {FROM_BUILD}",
        )
    results = results_of(provider, env, folder, local=local, build=env.get(FROM_BUILD, ""))
    try:
        records = [json.loads(line) for line in results.read_bytes().splitlines()]
        built = [record for record in records if record["kind"] == "image" and record["image"] == image]
        content, digest = (built[-1]["content"], built[-1]["digest"]) if built else (None, None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"its records cannot be read: {type(error).__name__}: {error}"
    else:
        if not built:
            problem = "the job that builds it left no record of it"
        elif content != planned.content:
            problem = f"it was built from other contents than the plan's ({str(content)[:12]!r})"
        elif isinstance(digest, str) and _DIGEST.fullmatch(digest):
            return digest
        else:
            problem = "no digest is recorded"
    raise CannotRunHereError(
        f"no image {image!r} of contents {planned.content[:12]}: {problem}",
        where=str(results),
        remedy="see the step that builds it, and run it again in this build",
    )


def results_of(key: str, env: Mapping[str, str], folder: Path, *, local: Path, job: str = "", build: str = "") -> Path:
    """Path of the records of a step of another job: of this build (its last retry) or `build`, downloaded.

    Locally they lie in `local`. `job` is the key of its Buildkite step, where that is another.

    Raises:
        CannotRunHereError: The agent could not download them.
    """
    if env.get("BUILDKITE") != "true":
        return local / key / "results.jsonl"
    if build and not _BUILD.fullmatch(build):
        raise CannotRunHereError(f"{FROM_BUILD}={build!r} names no build", remedy="give its number or its id")
    name = f"results/jobs/{key}/results.jsonl"
    words = [
        "buildkite-agent",
        "artifact",
        "download",
        name,
        f"{folder}/",
        *("--step", job or key),
        *(("--build", build) if build else ()),
    ]
    # mutant NumberReplacer: any time that a download takes
    failure = host.run(words, 300).failure
    if failure or not (folder / name).is_file():
        raise CannotRunHereError(
            f"the records of {key} did not arrive: {failure or 'nothing was downloaded'}",
            where=name,
            remedy=f"see the job {key} of this build",
        )
    return folder / name


def bring_earlier(planned: PlannedJob, env: Mapping[str, str], folder: Path, jobs: Path, *, local: Path) -> None:
    """Put the records that a recheck reads into `jobs`, a folder of job folders; `folder` and `local` as above.

    Raises:
        CannotRunHereError: The agent could not download them.
        RecordsError: There are none.
    """
    earlier = results_of(planned.key, env, folder, local=local, job=planned.job)
    if not earlier.is_file():
        raise RecordsError("no results to run again", where=str(earlier), remedy="run the step first")
    (jobs / planned.key).mkdir(parents=True)
    shutil.copyfile(earlier, jobs / planned.key / "results.jsonl")


def user() -> tuple[int, int]:
    """(uid, gid) of the container: the agent's own, or where that is root, of `nobody` (Debian, Ubuntu, Fedora)."""
    return (os.getuid(), os.getgid()) if os.getuid() else (65534, 65534)


def cache(env: Mapping[str, str], decided: Trust) -> str:
    """The folder of models that a build may use: of reviewed code (forks may read it) or of branches; empty for none.

    A model can bring Python that is run, so nothing that a branch has written may lie where a nightly finds it.
    `agent_host.trusted` has refused a build that only says that it is of the default branch or of the queue.
    """
    if not env.get(CACHE):
        return ""
    reviewed = "BUILDKITE_PIPELINE_DEFAULT_BRANCH" in env and base.compared(env).kind in OF_REVIEWED_CODE
    folder = Path(env[CACHE]).resolve() / ("main" if reviewed or decided.fork else "branches")
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)  # mutant ReplaceTrueWithFalse: two jobs may begin at once
        hand_over(folder)
    return str(folder)


OF_REVIEWED_CODE = frozenset({"default branch", "merge queue", "release branch"})
"""Kinds of builds (`agent_host.base`) that GitHub's rules let no unreviewed line into."""


def copy_checkout(checkout: Path, commit: str, target: Path) -> None:
    """A clone of its own at this commit: objects copied, not linked, so that nothing inside reaches the checkout's.

    Raises:
        CannotRunHereError: git failed, e.g. because the disk is full.
    """
    host.git(checkout, "clone", "--quiet", "--no-hardlinks", "--no-checkout", "--", str(checkout), str(target))
    host.git(target, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit)
    host.git(target, "remote", "remove", "origin")  # a path of the host
    # Compilers of other versions: steps name them relative to the repository, images keep them beside the workspace.
    (target / ".triton").symlink_to("../.triton")
    exclude = target / ".git/info/exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(".triton\n", encoding="utf-8")  # no file of the change, whatever its .gitignore says


def hand_over(folder: Path) -> None:
    """Make a folder and all in it the container user's where the agent is root."""
    if os.getuid():
        return
    uid, gid = user()
    for place, _, names in os.walk(folder):
        for name in (".", *names):
            os.chown(Path(place, name), uid, gid, follow_symlinks=False)


@dataclass(frozen=True)
class Arguments:
    """The command line; paths are absolute."""

    key: str
    plan: Path
    results: Path
    recheck: bool
    approved: bool

    def words(self, plan: str, results: str, jobs: str) -> list[str]:
        """Arguments of `hilgate`, with the paths of where it runs."""
        if self.recheck:
            return ["recheck", self.key, "--plan", plan, "--jobs", jobs, "--results", results]
        # Who it was, the verdict says: a name is free text, and here it would have to pass two shells.
        own_files = ["--approved-by", "the approver of this build"] if self.approved else []
        return ["run", self.key, "--plan", plan, "--results", results, *own_files]


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _interrupted(_number: int, _frame: object) -> NoReturn:
    sys.exit(Exit.INTERRUPTED)


@ending
def main(words: list[str] | None = None) -> int:
    """Run the steps of a job; returns the exit status."""
    parser = Parser(prog="hilgate job", description="Run steps of a plan.")
    parser.add_argument("keys", metavar="KEY", nargs="+", help="planned keys of the steps, in their order")
    parser.add_argument("--plan", metavar="FILE", required=True, type=_absolute)
    results = "folder of the first step; those of the others lie beside it"
    parser.add_argument("--results", metavar="DIR", required=True, type=_absolute, help=results)
    parser.add_argument("--recheck", action="store_true", help="run only the checks that failed in results/jobs/KEY")
    parser.add_argument("--approved", action="store_true", help="run it with the protected changes, once approved")
    asked = vars(parser.parse_args(words))
    first, *others = asked.pop("keys")
    if asked["recheck"] and others:
        parser.error("--recheck takes one step")
    each = [Arguments(key=first, **asked)]
    each += [Arguments(key=key, **asked | {"results": asked["results"].parent / key}) for key in others]
    # Until the container runs, a signal only has to leave nothing behind: SystemExit passes every `finally`.
    signal.signal(signal.SIGTERM, _interrupted)
    statuses: list[int] = []
    for number, arguments in enumerate(each, 1):
        if others:
            sys.stdout.write(f"--- {arguments.key} ({number} of {len(each)})\n")  # its group in Buildkite's log
            sys.stdout.flush()
        status = _ended(arguments)
        statuses.append(status)
        if status in {Exit.SICK_NODE, Exit.INTERRUPTED}:
            break
    if left := [arguments.key for arguments in each[len(statuses) :]]:
        sys.stderr.write(f"not run: {', '.join(left)}\n")
    return status_of_job(statuses)


@ending
def _ended(arguments: Arguments) -> int:
    try:
        return run(arguments, Path.cwd(), os.environ)
    except OSError as error:  # a full disk, a file system that went away: this node, whatever the change is
        sys.stderr.write(f"error: {error}\n  to do: see this node; another may do\n")
        return int(Exit.SICK_NODE)


def status_of_job(statuses: Sequence[int]) -> int:
    """The exit status of a job from those of the steps that it ran, in order.

    A failed step comes first, then whatever else Buildkite does not retry, and then what is wrong with the node.
    """
    if Exit.INTERRUPTED in statuses:
        return int(Exit.INTERRUPTED)
    answers = [status for status in statuses if status not in {Exit.PASS, Exit.CANNOT_RUN_HERE, Exit.SICK_NODE}]
    if answers:
        return int(Exit.FAIL) if Exit.FAIL in answers else answers[0]
    return max(statuses)


def run(arguments: Arguments, checkout: Path, env: Mapping[str, str]) -> int:
    """Run one step of a plan in `checkout`; returns its exit status.

    Raises:
        RecordsError: The plan is of another commit, or there are results already.
        CannotRunHereError: No git checkout, no image, no Docker, or a fork that would run on the host.
        SickNodeError: Docker does not answer, or the agent does not have the GPUs that its queue promises.
    """
    planned = read_plan(arguments.plan, arguments.key)
    commit = host.git(checkout, "rev-parse", "--verify", "HEAD^{commit}").strip()
    if commit != planned.commit:
        raise RecordsError(
            f"the plan is of commit {planned.commit[:12]} and {commit[:12]} is checked out",
            where=str(arguments.plan),
            remedy="check that commit out, or plan again",
        )
    results = arguments.results
    if results.resolve() != results or not results.is_relative_to(checkout.resolve()):
        raise RecordsError(
            "the results would be written outside of the checkout, or through a link",
            where=str(results),
            remedy="name a folder in results/jobs",
        )
    ignored = checkout / results.relative_to(checkout.resolve()).parts[0] / ".gitignore"
    ignored.parent.mkdir(exist_ok=True)
    ignored.write_text("*\n", encoding="utf-8")  # results are no change of the repository that is tested
    leftovers = (
        [path.name for path in results.iterdir() if path.name not in collect.HOOKS_OWN] if results.is_dir() else []
    )
    if leftovers:
        raise RecordsError(
            f"there are results already: {', '.join(sorted(leftovers)[:5])}",
            where=str(results),
            remedy="remove them, or name another --results; results of two jobs are never mixed",
        )
    decided = of_build(env)
    if planned.fork and not decided.fork:
        decided = Trust(fork=True, why="the plan says so")
    sys.stderr.write(f"{planned.key}: {'fork' if decided.fork else 'trusted'}: {decided.why}\n")
    if env.get(pod.POD):
        return _in_pod(planned, arguments, checkout, env, decided)
    if planned.image:
        status = _in_container(planned, arguments, checkout, env, decided)
    else:
        status = _on_host(planned, arguments, env, decided)
    if status != Exit.INTERRUPTED:
        pause.note_inside(env)
    return status


def job_id(env: Mapping[str, str]) -> str:
    """Buildkite's id of this job, by which what it leaves is found; a local run makes an id itself."""
    return env.get("BUILDKITE_JOB_ID") or str(uuid.uuid4())


def _on_host(planned: PlannedJob, arguments: Arguments, env: Mapping[str, str], decided: Trust) -> int:
    """Run a step on this host itself, which has no image; a fork's only on a machine that is thrown away."""
    # mutant ReplaceComparisonOperator_NotEq_IsNot: CPython has a text of one character once
    if decided.fork and env.get(DISPOSABLE) != "1":
        raise CannotRunHereError(
            f"{planned.key} has no image, and a fork's code ({decided.why}) does not run on this host itself",
            where="the agent's environment hook",
            remedy="ask a maintainer to read the change and to push it to a branch of this repository; or"
            f" give its queue an image, or set {DISPOSABLE}=1 where the machine is thrown away after each job",
        )
    program = [sys.executable, "-I", str(Path(__file__).resolve().parents[1] / "hilgate/__main__.py")]
    home = Path(tempfile.mkdtemp(prefix=f"hilgate-home-{job_id(env)}-")).resolve()
    try:
        made, jobs = home / "results", home / "jobs"
        made.mkdir()
        if arguments.recheck:
            bring_earlier(planned, env, home / "earlier", jobs, local=arguments.results.parent)
        inside = trust.environment(env, decided, planned.secrets)
        if decided.fork:
            inside["HOME"] = str(home)  # the agent's own holds its credentials
        words = arguments.words(str(arguments.plan), str(made), str(jobs))
        try:
            return container.attend(
                [*program, *words], env=inside, container=None, seconds=planned.seconds, writes=home
            )
        finally:
            collect.leave(made, arguments.results)
    finally:
        collect.discard(home)


def _in_container(
    planned: PlannedJob, arguments: Arguments, checkout: Path, env: Mapping[str, str], decided: Trust
) -> int:
    """Run a step in a container of its image, over a copy of the checkout; returns its exit status."""
    container.require_docker()
    devices = container.gpu_devices(planned.gpus, env)
    job = job_id(env)
    scratch = Path(tempfile.mkdtemp(prefix=f"hilgate-job-{job}-")).resolve()
    try:
        digest = image_digest(planned, env, scratch / "artifacts", local=arguments.results.parent)
        image = f"{env[reap.REGISTRY].rstrip('/')}/{planned.image}@{digest}" if env.get(reap.REGISTRY) else digest
        container.obtain(image)
        reap.note_image(env, image)
        copy_checkout(checkout, planned.commit, scratch / "workspace")
        shutil.copyfile(arguments.plan, scratch / "plan.json")
        (scratch / "results").mkdir()
        if arguments.recheck:
            bring_earlier(planned, env, scratch / "earlier", scratch / "jobs", local=arguments.results.parent)
        hand_over(scratch)
        scratch.chmod(0o711)
        uid, gid = user()
        words = arguments.words(container.PLAN, container.RESULTS, container.JOBS)
        made = container.Container(
            image=image,
            job=job,
            step=planned.key,
            command=("python3", "-m", "hilgate", *words),
            hostname=socket.gethostname(),
            user=f"{uid}:{gid}",
            scratch=str(scratch),
            recheck=arguments.recheck,
            cache=cache(env, decided),
            devices=devices,
            memory_gib=memory_gib(planned.gpus, devices.on_host),
            fork=decided.fork,
            network=planned.network,
            env=env,
            secrets=planned.secrets,
            python_path=planned.python_path,
        )
        command, name = container.command(made), container.name(made.job)
        try:
            return container.attend(command, env=dict(env), container=name, seconds=planned.seconds, writes=scratch)
        finally:
            collect.discard(scratch / "workspace")  # first, so that there is room where a step has filled the disk
            collect.leave(scratch / "results", arguments.results)
    finally:
        collect.discard(scratch)


def _in_pod(planned: PlannedJob, arguments: Arguments, checkout: Path, env: Mapping[str, str], decided: Trust) -> int:
    """Give the step to the container beside this one, which has the image, the GPUs and no token (`agent_host.pod`)."""
    root = Path(env[pod.POD])
    given, out = root / pod.GIVEN, root / pod.OUT
    if not planned.image:
        raise CannotRunHereError(
            f"{planned.key} has no image, and the agent's own containers run no code of a change",
            where=f"{pod.POD}={root}",
            remedy="give its queue an image, or name a queue of hosts",
        )
    if (given / pod.STEP).exists():
        raise CannotRunHereError(
            f"{planned.key} is the second step of a pod, and each has a pod of its own",
            where=str(given),
            remedy="plan the build again: steps of queues with pods share no job",
        )
    if planned.gpus:
        collect.take_one(given / pod.HEALTH, arguments.results, pod.BEFORE)
    scratch = Path(tempfile.mkdtemp(prefix=f"hilgate-job-{job_id(env)}-")).resolve()
    try:
        digest = image_digest(planned, env, scratch / "artifacts", local=arguments.results.parent)
        copy_checkout(checkout, planned.commit, given / "workspace")
        shutil.copyfile(arguments.plan, given / pod.PLAN)
        if arguments.recheck:
            bring_earlier(planned, env, scratch / "earlier", given / pod.JOBS, local=arguments.results.parent)
    finally:
        collect.discard(scratch)
    words = arguments.words(f"{given}/{pod.PLAN}", f"{out}/{pod.RESULTS}", f"{given}/{pod.JOBS}")
    made = container.Container(
        image=digest,
        job=job_id(env),
        step=planned.key,
        command=("python3", "-m", "hilgate", *words),
        hostname=node_name(),
        user="",  # user and memory are the pod's
        scratch="",
        memory_gib=0,  # mutant NumberReplacer: nothing reads it
        fork=decided.fork,
        network=planned.network,
        devices=container.GpuDevices(("/dev/kfd",) if planned.gpus else ()),
        env=env,
        secrets=planned.secrets,
        python_path=planned.python_path,
    )
    inside = container.variables(made) | {name: env[name] for name in container.secrets(made)}
    queue = env.get(health.QUEUE, "")
    pod.give(root, key=planned.key, command=made.command, env=inside, queue=queue, count=planned.gpus)
    try:
        return pod.attend(root, planned.seconds, sys.stdout.buffer)
    finally:
        collect.leave(out / pod.RESULTS, arguments.results)
        if planned.gpus:
            collect.take_one(out, arguments.results, pod.AFTER)


def memory_gib(gpus: int, on_host: int) -> int:
    """A job's part of the host: as many shares as it has GPUs, all of it for a job without.

    A tenth stays the agent's, the kernel's and the driver's.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, int(total * 0.9 * (gpus / on_host if gpus else 1)))


# mutant ReplaceComparisonOperator_Eq_Is, ReplaceComparisonOperator_Eq_LtE: imported, it has a name that sorts later
if __name__ == "__main__":
    sys.exit(main())
