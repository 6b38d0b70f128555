# SPDX-License-Identifier: Apache-2.0
"""What jobs left ends when no agent runs them any more, and what is in use or belongs to anybody else stays."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from support.nodes import ROOT, FakeNode

from agent_host import health, host, reap
from agent_host.reap import Places, Reaped

if TYPE_CHECKING:
    from pathlib import Path

DEAD, LIVE = (str(uuid.uuid4()) for _ in range(2))
DAY, REGISTRY = 86400.0, "registry.invalid/hilgate"
IMAGES = [f"{REGISTRY}/{name}@sha256:{digit * 64}" for name, digit in (("rocm", "a"), ("cpu", "b"))]


@pytest.fixture
def places(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A machine on which one agent runs one job; nothing real is looked at but processes that name DEAD or LIVE."""
    for name in ("rm", "chmod"):
        (node.bin / name).symlink_to(shutil.which(name, path="/usr/bin:/bin") or name)
    monkeypatch.setattr(health, "DOCKER_ROOT", node.folder / "docker-root")
    node.env["HILGATE_KEEP_FREE_GIB"] = "0"
    made = Places(node.temporary, node.folder / "builds", node.proc)
    for pid, name, parent in ((10, "buildkite-agent", 1), (11, "buildkite-agent", 10), (12, "python3", 11)):
        process(node, pid, name, parent=parent, job=LIVE if pid > 10 else "")
    return made


def process(node: FakeNode, pid: int, name: str, *, parent: int, job: str, namespace: str = "pid:[1]") -> None:
    node.process(pid, name, parent=parent)
    (node.proc / str(pid) / "environ").write_bytes(f"BUILDKITE_JOB_ID={job}\0BUILDKITE_AGENT_NAME=host-1\0".encode())
    for folder in (str(pid), "self"):
        (node.proc / folder / "ns").mkdir(parents=True, exist_ok=True)
        link = node.proc / folder / "ns/pid"
        if not link.is_symlink():
            link.symlink_to("pid:[1]" if folder == "self" else namespace)


def old(path: Path, days: float) -> Path:
    for inner in (path, *path.rglob("*")):
        os.utime(inner, (time.time() - days * DAY,) * 2, follow_symlinks=False)
    return path


def left(temporary: Path, job: str) -> list[Path]:
    paths = [temporary / f"hilgate-{kind}-{job}-abcd_123" for kind in ("job", "home", "trusted")]
    for path in paths:
        (path / "inner").mkdir(parents=True)
    paths.append(temporary / f"job-env-{job}1234")
    paths[-1].write_text("SECRET=1")
    return paths


def test_folders_of_dead_jobs_go_and_those_of_live_ones_stay(places: Places) -> None:
    dead, live = left(places.temporary, DEAD), left(places.temporary, LIVE)
    done = Reaped()
    reap.end_dead_jobs(places, done)
    assert (sorted(done.removed), done.problems) == (sorted(map(str, dead)), [])
    assert all(path.exists() for path in live)
    assert sorted(places.temporary.iterdir()) == sorted(live)


def test_this_very_job_is_spared(places: Places) -> None:
    mine = left(places.temporary, DEAD)
    reap.end_dead_jobs(places, Reaped(), spare=DEAD)
    assert all(path.exists() for path in mine)


def test_a_deep_folder_that_a_container_closed_is_removed(places: Places) -> None:
    deep = places.temporary / f"hilgate-job-{DEAD}-abcd_123"
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    for _ in range(60):  # deeper than a path may be long
        os.mkdir("d" * 140, dir_fd=here)
        below = os.open("d" * 140, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.fchmod(here, 0)
    os.close(here)
    (deep / "link").symlink_to(ROOT)
    done = Reaped()
    reap.end_dead_jobs(places, done)
    assert done.problems == []
    assert list(places.temporary.iterdir()) == []
    assert (ROOT / "ci").is_dir()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("what", ["its agent is gone", "it is in a container", "it is a zombie", "another name"])
def test_a_process_that_only_names_a_job_does_not_keep_it_alive(what: str, node: FakeNode) -> None:
    agent, executor = {"its agent is gone": (1, "buildkite-agent"), "another name": (10, "python3")}.get(
        what, (10, "buildkite-agent")
    )
    process(node, 21, executor, parent=agent, job=DEAD, namespace="pid:[2]" if "container" in what else "pid:[1]")
    if what == "it is a zombie":
        text = (node.proc / "21/stat").read_text()
        (node.proc / "21/stat").write_text(text.replace(" S ", " Z "))
    assert host.live_jobs(node.proc) == {LIVE: "host-1"}


def test_where_a_job_cannot_be_read_nothing_of_others_is_ended(
    node: FakeNode, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = left(places.temporary, DEAD)

    def refuse(*_: object) -> dict[str, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host, "_environment", refuse)
    done = Reaped()
    reap.end_dead_jobs(places, done)
    assert done.problems[0].startswith(
        "process 11 (buildkite-agent, state S) runs a job that cannot be read: Permission"
    )
    assert all(path.exists() for path in kept)
    assert node.proc.exists()


def test_what_names_no_job_goes_after_a_day(places: Places) -> None:
    (places.temporary / "hilgate-job-abcd_123").mkdir()
    old(places.temporary / "hilgate-job-abcd_123", 0.5)
    (places.temporary / "hilgate-trusted-wxyz_123").mkdir()
    old(places.temporary / "hilgate-trusted-wxyz_123", 1.5)
    (places.temporary / "somebody-elses").mkdir()
    old(places.temporary / "somebody-elses", 100)
    done = Reaped()
    reap.remove_forgotten(places, done, time.time())
    assert done.removed == [str(places.temporary / "hilgate-trusted-wxyz_123")]
    assert (places.temporary / "somebody-elses").exists()


def checkout(places: Places, name: str, days: float, agent: str = "host-2") -> Path:
    path = places.builds / agent / "org" / name
    (path / ".git").mkdir(parents=True)
    (path / ".git/HEAD").touch()
    return old(path, days)


def test_checkouts_unused_for_two_weeks_go_and_busy_ones_stay(node: FakeNode, places: Places) -> None:
    gone, kept = checkout(places, "old", 15), checkout(places, "new", 13)
    busy = checkout(places, "busy", 99, agent="host-1")
    done = Reaped()
    reap.make_room(places, node.env, done, time.time())
    assert (done.removed, done.problems) == ([str(gone)], [])
    assert kept.exists()
    assert busy.exists()


def test_with_too_little_room_the_oldest_go_and_it_is_said(node: FakeNode, places: Places) -> None:
    first, second = checkout(places, "first", 3), checkout(places, "second", 2)
    node.env["HILGATE_KEEP_FREE_GIB"] = "99999999"
    done = Reaped()
    reap.make_room(places, node.env, done, time.time())
    assert done.removed == [str(first), str(second)]
    assert [problem.partition(" GiB free for ")[2].split()[0] for problem in done.problems] == ["builds", "scratch"]
    assert "99999999 are kept" in done.problems[0]


def test_registry_images_go_two_weeks_after_their_last_job(node: FakeNode, places: Places) -> None:
    listed = "\n".join(IMAGES)
    node.program(
        "docker", f"echo \"$*\" >> {node.folder}/docker\n[ $1 = image ] && [ $2 = ls ] && echo '{listed}'; exit 0"
    )
    node.env["HILGATE_REGISTRY"] = REGISTRY
    reap.make_room(places, node.env, Reaped(), time.time())
    assert "image rm" not in (node.folder / "docker").read_text(), "seen for the first time is not old"
    stamp = reap._stamp(node.env, IMAGES[0])
    os.utime(stamp, (time.time() - 15 * DAY,) * 2)
    done = Reaped()
    reap.make_room(places, node.env, done, time.time())
    assert done.removed == [f"image {IMAGES[0]}"]
    assert f"image rm {IMAGES[0]}\n" in (node.folder / "docker").read_text()
    reap.note_image(node.env, IMAGES[0])
    assert time.time() - stamp.stat().st_mtime < 60


def test_without_a_registry_no_image_is_removed(node: FakeNode, places: Places) -> None:
    node.program("docker", f'echo "$*" >> {node.folder}/docker')
    node.env["HILGATE_KEEP_FREE_GIB"] = "99999999"
    reap.make_room(places, node.env, Reaped(), time.time())
    assert not (node.folder / "docker").exists()


def test_a_reaper_that_was_killed_is_finished_by_the_next(places: Places) -> None:
    half = places.temporary / f"{reap.ASIDE}1-0"
    half.mkdir()
    done = Reaped()
    reap.remove_forgotten(places, done, time.time())
    assert not half.exists()


def test_by_hand_it_says_what_it_did_and_what_it_could_not(
    node: FakeNode, places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left(places.temporary, DEAD)
    monkeypatch.setenv("TMPDIR", str(places.temporary))
    monkeypatch.setattr(host, "PROC", node.proc)
    monkeypatch.setenv("HILGATE_KEEP_FREE_GIB", "0")
    assert reap.main(["--builds", str(places.builds)]) == 0
    out = capsys.readouterr()
    assert (out.out.count("removed "), out.err) == (4, "")
    node.program("docker", "echo no >&2; exit 1")
    monkeypatch.setenv("HILGATE_KEEP_FREE_GIB", "99999999")
    assert reap.main(["--builds", str(places.builds)]) == 75
    err = capsys.readouterr().err
    assert "the containers of this machine cannot be listed: docker ended with status 1: no" in err
    assert "99999999 are kept" in err


def test_the_folder_of_checkouts_is_that_of_the_configuration() -> None:
    text = (ROOT / "ci/agent/buildkite-agent.cfg").read_text()
    assert f'build-path="{reap.BUILDS}"\n' in text
