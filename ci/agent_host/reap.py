# SPDX-License-Identifier: Apache-2.0
"""End and remove what jobs left on this machine, and keep room on its disks: at an agent's start and by a timer.

    agent_host/__main__.py reap [--builds DIR]

A job whose agent was killed, or whose machine went down, ran no last hook. Its container runs on, and its folders stay.
Whatever names a job that no agent of this machine runs any more is ended and removed. Then, oldest first, go checkouts
and images that nothing has used for two weeks, and, while a disk has less room than it should, those used since.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent_host import health, host
from hilgate.errors import Exit, Parser, ending

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BUILDS = Path("/var/lib/buildkite-agent/builds")
"""`build-path` of ci/agent/buildkite-agent.cfg."""

REGISTRY = "HILGATE_REGISTRY"
"""Variable of the agent: where images are pulled from, each below it by its name. Without it an image is taken from
this host's own store."""

KEEP_FREE = "HILGATE_KEEP_FREE_GIB"
"""Variable of the agent: room that the reaper keeps on the disks of builds, TMPDIR and Docker. It is more than what
makes a node unfit (`HILGATE_MIN_DISK_GIB`), so that one image and one build fit before the next run of the timer."""

KEEP_FREE_GIB = 60
"""Or a quarter of the disk, where that is less."""

UNUSED_SECONDS = 14 * 86400.0
FORGOTTEN_SECONDS = 86400.0
"""Age at which things that name no job are removed: no job runs for a day."""

IN_USE_SECONDS = 3600.0
"""An image that a job has asked for so lately may be about to be started."""

OF_THE_AGENT = ("job-env-*", "buildkite-agent-*", "hook-before-env*", "hook-after-env*", "hook-script-wrapper*")
"""What buildkite-agent leaves in TMPDIR when it is killed; the first holds a job's variables and names the job."""

ASIDE = ".hilgate-reaped-"
"""What is removed gets such a name first, so that nobody finds half of it."""

DOCKER_SECONDS = 600.0
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


@dataclass(frozen=True)
class Places:
    """Where a machine keeps what jobs leave."""

    temporary: Path
    builds: Path
    proc: Path = host.PROC


@dataclass
class Reaped:
    """What was ended and removed, and what could not be."""

    ended: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def end_dead_jobs(places: Places, done: Reaped, *, spare: str = "") -> None:
    """End the containers, processes and folders of every job that no agent of this machine runs, but for `spare`."""
    named = {host.job_of_folder(path.name) for path in places.temporary.glob("*")} - {""}
    listing = (
        "docker",
        "ps",
        "--all",
        f"--filter=label={host.JOB_LABEL}",
        f'--format={{{{.Label "{host.JOB_LABEL}"}}}}',
    )
    listed = host.run(listing, host.DOCKER_SECONDS)
    if listed.started and listed.failure:
        done.problems.append(f"the containers of this machine cannot be listed: {listed.failure}")
    named |= {job for job in listed.out.split() if _JOB.fullmatch(job)}
    try:
        dead = sorted(named - {spare} - host.live_jobs(places.proc).keys())  # in this order: a new job is not known
    except host.SickNodeError as error:
        done.problems.append(f"{error.what}, so nothing of other jobs is ended ({error.where})")
        return
    for job in dead:
        left = host.end_job(job)
        done.ended += [f"{what} of job {job}" for what in left.ended]
        done.problems += left.problems
        for folder in host.left_folders(places.temporary, job):
            _remove(folder, done)


def remove_forgotten(places: Places, done: Reaped, now: float) -> None:
    """Remove what names no job and is a day old: of older versions, of a killed agent, of a reaper that was killed."""
    patterns = ("hilgate-job-*", "hilgate-home-*", "hilgate-trusted-*", *OF_THE_AGENT)
    for path in [path for pattern in patterns for path in places.temporary.glob(pattern)]:
        if not host.job_of_folder(path.name) and now - _used(path) > FORGOTTEN_SECONDS:
            _remove(path, done)
    for path in (*places.temporary.glob(f"{ASIDE}*"), *places.builds.glob(f"*/*/{ASIDE}*")):
        _remove(path, done)


def make_room(places: Places, env: Mapping[str, str], done: Reaped, now: float) -> None:
    """Remove checkouts and images unused for two weeks; then the oldest, while there is too little room."""
    try:
        busy = {_folder_of(agent) for agent in host.live_jobs(places.proc).values()}
    except host.SickNodeError as error:
        done.problems.append(f"{error.what}, so no checkout is removed ({error.where})")
        busy = {path.name for path in places.builds.glob("*")}
    idle = [path for path in places.builds.glob("*/*/*") if path.is_dir() and path.parts[-3] not in busy]
    removable: list[tuple[float, Path | str]] = [(_used(path), path) for path in idle]
    removable += [(used, image) for image, used in _images(env, now, done) if now - used > IN_USE_SECONDS]
    for used, what in sorted(removable, key=operator.itemgetter(0)):
        short = _short(places, env)
        on = "builds" if isinstance(what, Path) else "images" if "images" in disks(places) else "scratch"
        if now - used <= UNUSED_SECONDS and on not in short:
            continue
        if isinstance(what, Path):
            _remove(what, done)
        else:
            _remove_image(what, env, done)
    done.problems += _short(places, env).values()


def _short(places: Places, env: Mapping[str, str]) -> dict[str, str]:
    """What has less room on its disk than is kept, and a sentence about it."""
    wanted = health.whole_number(env, KEEP_FREE, KEEP_FREE_GIB)
    short = {}
    for what, path in disks(places).items():
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            least = wanted if KEEP_FREE in env else min(wanted, usage.total / 4 / 2**30)
            if usage.free / 2**30 < least:
                short[what] = f"{usage.free / 2**30:.1f} GiB free for {what} in {path}; {least:.0f} are kept"
    return short


def disks(places: Places) -> dict[str, Path]:
    """What the folders are for, by the disks that they lie on."""
    found = {"builds": places.builds, "scratch": places.temporary, "images": health.DOCKER_ROOT}
    return {what: path for what, path in found.items() if path.is_dir()}


def _folder_of(agent: str) -> str:
    """The folder below `build-path` that buildkite-agent makes for an agent's name."""
    return re.sub(r"[^A-Za-z0-9-]", "-", agent)


def _used(path: Path) -> float:
    """When a checkout, folder or file was last worked with; now where that cannot be read."""
    times = []
    for name in ("", ".git/HEAD", ".git/index", ".git/FETCH_HEAD"):
        with contextlib.suppress(OSError):
            times.append((path / name).lstat().st_mtime)
    return max(times, default=time.time())


def _remove(path: Path, done: Reaped) -> None:
    aside = path if path.name.startswith(ASIDE) else path.with_name(f"{ASIDE}{os.getpid()}-{len(done.removed)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        done.problems.append(f"{path} cannot be removed: {error.strerror}")
        return
    if failure := host.remove(aside):
        done.problems.append(f"{path} cannot be removed: {failure}")
    else:
        done.removed.append(str(path))


def note_image(env: Mapping[str, str], image: str) -> None:
    """A job uses this image now; Docker itself does not remember when."""
    with contextlib.suppress(OSError):
        stamp = _stamp(env, image)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def _stamp(env: Mapping[str, str], image: str) -> Path:
    digest = image.rpartition("sha256:")[2]
    return host.state_file(env, "x").parent / "images" / (digest if re.fullmatch("[0-9a-f]{64}", digest) else "none")


def _images(env: Mapping[str, str], now: float, done: Reaped) -> Iterator[tuple[str, float]]:
    """The images of the registry that this host has, and when a job last used each; first seen now counts as used.

    An image that no registry has is not among them: nobody could pull it again.
    """
    registry = env.get(REGISTRY, "").rstrip("/")
    if not registry:
        return
    words = ("docker", "image", "ls", "--digests", f"--filter=reference={registry}/*")
    listed = host.run((*words, "--format={{.Repository}}@{{.Digest}}"), host.DOCKER_SECONDS)
    if listed.failure:
        done.problems.append(f"the images of this machine cannot be listed: {listed.failure}")
    for image in dict.fromkeys(listed.out.split()):
        if re.fullmatch(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}", image):
            stamp = _stamp(env, image)
            if not stamp.exists():
                note_image(env, image)
            yield image, stamp.stat().st_mtime if stamp.exists() else now


def _remove_image(image: str, env: Mapping[str, str], done: Reaped) -> None:
    """Docker refuses while a container uses it, and that is no problem."""
    if not host.run(("docker", "image", "rm", image), DOCKER_SECONDS).failure:
        _stamp(env, image).unlink(missing_ok=True)
        done.removed.append(f"image {image}")


def reap(places: Places, env: Mapping[str, str]) -> Reaped:
    """All of it, in this order; nothing that fails stops the rest."""
    done, now = Reaped(), time.time()
    end_dead_jobs(places, done)
    remove_forgotten(places, done, now)
    make_room(places, env, done, now)
    return done


@ending
def main(words: list[str] | None = None) -> int:
    """End and remove what jobs left on this machine; 75 if something could not be, or a disk has too little room."""
    parser = Parser(prog="agent_host.reap", description="End and remove what jobs left.")
    parser.add_argument("--builds", type=Path, default=BUILDS, metavar="DIR", help=f"the agents' build-path ({BUILDS})")
    places = Places(host.temporary(os.environ), parser.parse_args(words).builds)
    done = reap(places, os.environ)
    for verb, lines in (("ended", done.ended), ("removed", done.removed)):
        sys.stdout.write("".join(f"{verb} {host.printable(line)}\n" for line in lines))
    sys.stderr.write("".join(f"{host.printable(line)}\n" for line in done.problems))
    return int(Exit.SICK_NODE) if done.problems else int(Exit.PASS)


if __name__ == "__main__":
    sys.exit(main())
