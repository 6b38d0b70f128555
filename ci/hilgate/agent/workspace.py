"""The folders of one container: a copy of the checkout to work in, and a way back for nothing but plain result files.

A container never gets the checkout itself. Its hooks run on the host after the container, and a link that a step leaves
among its results would make the agent upload any file of the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

from hilgate.errors import CannotRunHereError, RecordsError

NOBODY = 65534
"""Who a container runs as where the agent is root: the number of `nobody` on Debian, Ubuntu and Fedora."""

HOOKS_OWN = ("health-before.json", "health-after.json")
"""Written by the agent's hooks beside the results; a step that leaves files of these names is not believed."""

COMPILERS = ".triton"
"""Compilers of other versions, which steps name relative to the repository; the images keep them beside the folder that
a container works in (`docker/cpu.Dockerfile`, /hilgate)."""

COPY_BYTES = 1024 * 1024
GIT_SECONDS = 600


def user() -> tuple[int, int]:
    """(uid, gid) of the container: the agent's own, or nobody's where that is root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)


def commit_of(checkout: Path) -> str:
    """Full sha of what is checked out.

    Raises:
        CannotRunHereError: It is no git checkout.
    """
    return _git(checkout, "rev-parse", "--verify", "HEAD^{commit}").strip()


def copy(checkout: Path, commit: str, target: Path) -> None:
    """A clone of its own at this commit: objects copied, not linked, so that nothing inside reaches the checkout's.

    Raises:
        CannotRunHereError: git failed, e.g. because the disk is full.
    """
    _git(checkout, "clone", "--quiet", "--no-hardlinks", "--no-checkout", "--", str(checkout), str(target))
    _git(target, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", commit)
    _git(target, "remote", "remove", "origin")  # a path of the host
    (target / COMPILERS).symlink_to(Path("..", COMPILERS))


def hand_over(folder: Path) -> None:
    """Make a folder and all in it the container user's where the agent is root."""
    uid, gid = user()
    if uid == os.getuid():
        return
    for place, _, names in os.walk(folder):
        for name in (".", *names):
            os.chown(Path(place, name), uid, gid, follow_symlinks=False)


def collect(source: Path, target: Path) -> list[str]:
    """Move the results of a finished container into the job's folder; returns what was left behind, and why.

    Only plain files and folders come along. Links, devices, sockets, second names of a file and files of the hooks' own
    names do not. Nobody writes to `source` any more, so what is looked at is what is copied.
    """
    refused: list[str] = []
    unreadable: list[OSError] = []
    target.mkdir(parents=True, exist_ok=True)
    for place, folders, names in os.walk(source, onerror=unreadable.append):
        inner = Path(place).relative_to(source)
        refused += [f"{inner / name}: a link" for name in sorted(folders) if Path(place, name).is_symlink()]
        for name in sorted(names):
            why = _copy_file(Path(place, name), target, inner / name)
            refused += [f"{inner / name}: {why}"] if why else []
    return refused + [f"{error.filename}: {error.strerror}" for error in unreadable]


def _copy_file(path: Path, target: Path, inner: Path) -> str:
    """Copy one file; returns why it was not."""
    if str(inner) in HOOKS_OWN:
        return "a name of the agent's hooks"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return "a link" if path.is_symlink() else f"cannot be read ({error.strerror})"
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            return "no plain file"
        if state.st_nlink != 1:
            return "a second name of another file"
        destination = target / inner
        destination.parent.mkdir(parents=True, exist_ok=True)
        fresh = destination.with_name(f".{destination.name[:200]}.new")
        with fresh.open("wb") as out:
            shutil.copyfileobj(file, out, COPY_BYTES)
        fresh.replace(destination)
    return ""


def discard(folder: Path) -> None:
    """Remove a folder that a container wrote to, also where it took away the right to."""
    for place, folders, _ in os.walk(folder):
        for path in (Path(place, name) for name in folders):
            if not path.is_symlink():
                with contextlib.suppress(OSError):  # what cannot be removed stays, and rmtree says nothing either
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def require_empty(folder: Path) -> None:
    """No results may stand where a job will leave its own; the hooks' files may.

    Raises:
        RecordsError: There are some: they would be taken for this job's.
    """
    found = [path.name for path in folder.iterdir() if path.name not in HOOKS_OWN] if folder.is_dir() else []
    if found:
        raise RecordsError(
            f"there are results already: {', '.join(sorted(found)[:5])}",
            where=str(folder),
            remedy="remove them, or name another --results; results of two jobs are never mixed",
        )


def _git(folder: Path, *arguments: str) -> str:
    command = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments)
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunHereError(f"git {arguments[0]}: {error}", where=str(folder), remedy="see git there") from error
    if done.returncode != 0:
        words = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise CannotRunHereError(f"git {arguments[0]} failed: {words}", where=str(folder), remedy="see git there")
    return done.stdout.decode(errors="replace")
