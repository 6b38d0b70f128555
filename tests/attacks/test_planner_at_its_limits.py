# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: a change that keeps the planner busy for hours, fills its memory, or asks for thousands of hours
of GPUs.

What must happen: a glob takes no longer than it is long; a declaration has a size; planning has a minute and 4 GiB,
after which it is a mistake in the change (3) and its processes are gone; a fork adds few steps of its own. An honest
change is planned as before, and what a plan or an error says is the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from support.forks import AREA, project
from support.plans import alive, breaks, dies, environ, git, grows, hilgate, wait_for

from hilgate.declare import protected
from hilgate.errors import MisuseError
from hilgate.model.plan import plan_digest
from hilgate.plan import limits, make

if TYPE_CHECKING:
    from pathlib import Path

    from support.forks import Project

PR = ("plan", "--profile", "pr", "--base", "main")


@pytest.mark.timeout(60)
def test_a_glob_of_many_stars_and_a_name_that_nearly_matches(change: Project) -> None:
    glob = "tests/" + "*a" * 24 + "*b"
    change.write("ci/areas/a.yaml", AREA.replace("ci/]", f'ci/, "{glob}"]'))
    change.write("tests/" + "a" * 120, "")
    change.commit()
    assert hilgate(change.theirs, *PR).returncode == 0


SIZES = {
    "comments": ("ci/areas/a.yaml", f"{AREA}{'# a comment' * 50_000}\n", "has more than 256 KiB"),
    "values": ("ci/areas/a.yaml", f"{AREA}more: [{'a,' * 120_000}]\n", "values"),
    "a glob": ("ci/areas/a.yaml", AREA.replace("paths: [", f"paths: [{'x' * 501}, "), "at most 500 characters"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", SIZES)
def test_a_declaration_has_a_size(change: Project, size: str) -> None:
    name, text, words = SIZES[size]
    change.write(name, text)
    change.commit()
    done = hilgate(change.theirs, *PR)
    assert (done.returncode, words in done.stderr) == (3, True), done.stderr


NESTED = {
    "brackets": "[(" * 100_000 + ")]" * 100_000,
    "open brackets": "[(" * 100_000,
    "attributes": "a" + ".a" * 100_000,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nested", NESTED)
def test_python_that_is_nested_without_end(tmp_path: Path, nested: str) -> None:
    """What cannot be read as Python is said once and short: a plan repeats it for each step."""
    area = AREA.replace("evidence:", "imports: [one], evidence:")
    own = {"ci/project.yaml": "python_path: [src]\n", "src/one/__init__.py": "", "ci/areas/a.yaml": area}
    change = project(tmp_path, **own)
    change.write("src/one/kernel.py", f"x = {NESTED[nested]}\n")
    change.commit()
    # A program of its own: a fork of this one would wait for threads that grimp has started for an earlier test.
    words = [sys.executable, "-m", "hilgate", "--root", str(change.theirs), *PR, "--json"]
    done = subprocess.run(words, env=environ(), capture_output=True, text=True, check=False)
    if done.returncode == 3:  # the parser used up its stack, and the process of its own ended
        assert "ended by signal" in done.stderr
        return
    (step,) = json.loads(done.stdout)["steps"]
    assert "what imports it is not known: Syntax error in " in step["reason"]
    assert len(done.stdout) < 20_000


@pytest.mark.timeout(60)
def test_there_are_not_thousands_of_declarations(change: Project) -> None:
    for number in range(150):
        text = AREA.replace("area: a", f"area: x{number}").replace("key: one", f"key: x{number}")
        change.write(f"ci/areas/x{number}.yaml", text)
    change.commit()
    done = hilgate(change.theirs, *PR)
    assert (done.returncode, "has 151 files" in done.stderr) == (3, True), done.stderr


@pytest.mark.timeout(120)
def test_thousands_of_protected_files_need_few_processes(change: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"src/file-{number}.toml" for number in range(1500)]
    for name in names:
        change.write(name, "floor = 0.01\n")
    commit = change.commit()
    started: list[object] = []
    run = protected.git.subprocess.run
    monkeypatch.setattr("subprocess.run", lambda words, **more: started.append(words) or run(words, **more))
    base = git(change.ours, "rev-parse", "main")
    started.clear()
    found = protected.protected_changes(change.theirs, base, names, commit)
    assert [one.path for one in found] == sorted(names)
    assert len(started) < 12


def test_a_planner_that_hangs_is_ended_with_its_children(
    change: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hangs(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        (tmp_path / "pids").write_text(f"{os.getpid()} {child}")
        time.sleep(300)

    monkeypatch.setattr(make, "make_plan", hangs)
    monkeypatch.setattr(limits, "SECONDS", 5.0)  # a loaded machine takes a while to start both
    began = time.monotonic()
    done = hilgate(change.theirs, *PR, limited=True)
    assert (done.returncode, "planning took more than 5 s" in done.stderr) == (3, True)
    assert time.monotonic() - began < 250, "they would have slept for 300 s"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(alive(pid) for pid in pids))  # a killed process ends when it gets the processor again


@pytest.mark.parametrize(
    ("work", "status", "words"),
    [(grows, 3, "planning took more than"), (dies, 3, "ended by signal 11"), (breaks, 70, "a bug in hilgate")],
)
def test_what_ends_the_planner_is_no_plan(
    change: Project, monkeypatch: pytest.MonkeyPatch, work: object, status: int, words: str
) -> None:
    monkeypatch.setattr(make, "make_plan", work)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2**28)
    done = hilgate(change.theirs, *PR, "--write", "plan.json", limited=True)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert not (change.theirs / "plan.json").exists()


def test_the_same_plan_and_the_same_words_as_without_limits(change: Project) -> None:
    change.write("src/limits.toml", "floor = 0.9\n")
    change.commit()
    asked = {"base": "main", "profile": "pr"}
    within = limits.within_limits(make.make_plan, change.theirs, **asked)
    assert plan_digest(within) == plan_digest(make.make_plan(change.theirs, **asked))
    for wrong in ({"base": "nowhere"}, {"select": ("nothing",)}, {"models": ("none",)}):
        with pytest.raises(MisuseError) as plain:
            make.make_plan(change.theirs, **{**asked, **wrong})
        with pytest.raises(MisuseError) as reported:
            limits.within_limits(make.make_plan, change.theirs, **{**asked, **wrong})
        assert str(reported.value) == str(plain.value)


AGENTS = """\
devices: {cpu: {}, gfx942: {}, gfx950: {}}
queues:
  cpus: {device: cpu, gpus: 0, memory_gib: 8}
  one: {device: gfx942, gpus: 1, memory_gib: 192}
  two: {device: gfx950, gpus: 8, memory_gib: 192}
"""


def asks(folder: Path, steps: int, *, fork: bool, devices: str = "[gfx942, gfx950]", known: str = "[cpu]") -> int:
    """Status of planning a change that adds so many steps, and lets ours run on more devices."""
    base = {"ci/agents.yaml": AGENTS, "ci/areas/a.yaml": AREA.replace("minutes: 5", "minutes: 90")}
    change = project(folder, **base)
    change.write("ci/areas/a.yaml", base["ci/areas/a.yaml"].replace("[cpu]", known).replace("title: A", "title: B"))
    head, _, step = AREA.replace("area: a", "area: x").replace("[cpu]", devices).partition("  - ")
    more = "".join(f"  - {step.replace('key: one', f'key: x{number}')}" for number in range(steps))
    if steps:
        change.write("ci/areas/x.yaml", head + more.replace("minutes: 5", "minutes: 1"))
    change.commit()
    done = hilgate(change.theirs, *PR, "--json", **({"HILGATE_FORK": "1"} if fork else {}))
    assert done.returncode == 0 or "GPU-minutes" in done.stderr
    assert done.returncode or json.loads(done.stdout)["steps"]
    return done.returncode


def test_a_fork_adds_few_steps_and_few_gpu_minutes(tmp_path: Path) -> None:
    folders = iter(range(9))

    def status(steps: int, **more: object) -> int:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        return asks(folder, steps, **more)

    assert status(4, fork=True) == 0, "4 steps on two devices, 30 minutes each"
    assert status(5, fork=True) == 3
    assert status(20, fork=True, devices="[cpu]") == 0
    assert status(21, fork=True, devices="[cpu]") == 3
    assert status(0, fork=True, known="[cpu, gfx942]") == 0
    assert status(0, fork=True, known="[cpu, gfx942, gfx950]") == 3, "a step of ours on devices of its choice"
    assert status(21, fork=False) == 0, "a branch's plan says what it takes, and its members are trusted with it"
