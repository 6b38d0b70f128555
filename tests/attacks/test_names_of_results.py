# SPDX-License-Identifier: Apache-2.0
"""Who: a fork. What: its container leaves files with names, sizes, numbers and depths that are not those of results.

A buildkite-agent that downloads an artifact takes `\\` for `/`, so `x\\..\\..\\other\\results.jsonl` is a file of
another step, or `.git/config` of the checkout of what decides.

What must happen: such a file stays in the container; one that was uploaded all the same lands in a folder that nothing
but its own step's results is taken out of; what a container leaves changes no status, fills no host, and is removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from typing import TYPE_CHECKING

import pytest
from support.flow import FORK, OURS
from support.nodes import ROOT
from support.store import Upload, serving

from agent_host import collect, fetch

if TYPE_CHECKING:
    from pathlib import Path

    from support.agent import Agent
    from support.flow import Build, Machine

AGENTS = [
    "stand-in",
    pytest.param("real", marks=pytest.mark.needs("variable:HILGATE_REAL_AGENT")),
]
HONEST = [
    Upload("one-cpu", "results/jobs/one-cpu/results.jsonl", "honest"),
    Upload("one-cpu", "results/jobs/one-cpu/steps/log.txt", "honest"),
    Upload("two-cpu", "results/jobs/two-cpu/results.jsonl", "honest"),
    Upload("one-cpu-recheck", "results/jobs/one-cpu.recheck/results.jsonl", "honest"),
]
UP = (
    (1, "one-cpu/results.jsonl"),
    (1, "one-cpu/health-before.json"),
    (1, "two-cpu/results.jsonl"),
    (2, "plan.json"),
    (3, ".git/config"),
    (4, "above"),
    (40, "etc/passwd"),
)
FORGED = [
    Upload("evil-cpu", "results/jobs/evil-cpu/" + f"{'x/' * n}{'../' * (n + up)}{name}".replace("/", "\\"), "forged")
    for n in (1, 2, 9)
    for up, name in UP
]


@pytest.mark.parametrize("agent", AGENTS)
def test_no_name_reaches_another_step_the_plan_or_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    checkout, temporary = tmp_path / "above" / "checkout", tmp_path / "tmp"
    (checkout / ".git").mkdir(parents=True)
    temporary.mkdir()
    (checkout / ".git/config").write_text("honest")
    (checkout / "results").mkdir()
    steps = [{"step": {"key": key}, "device": "cpu"} for key in ("one", "two", "evil")]
    (checkout / "results/plan.json").write_text(json.dumps({"steps": steps}))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = (checkout / "results/plan.json").read_text()
    with serving(tmp_path, [*HONEST, *FORGED], agent, monkeypatch):
        problems = fetch.fetch(checkout / "results/plan.json", checkout)
    assert (checkout / ".git/config").read_text() == "honest"
    assert (checkout / "results/plan.json").read_text() == before
    jobs = {str(path.relative_to(checkout)): path.read_text() for path in checkout.rglob("jobs/**/*") if path.is_file()}
    assert jobs == {one.path: "honest" for one in HONEST}
    assert sorted(path.name for path in checkout.iterdir()) == [".git", "results"]
    assert [path.name for path in (tmp_path / "above").iterdir()] == ["checkout"]
    assert list(temporary.iterdir()) == [], "what was downloaded is removed"
    outside = "something lies outside of it, as if it were of another job"
    assert problems == [f"results/jobs/evil-cpu: {outside}"]


NAMES = [r"x\..\..\one-cpu\results.jsonl", "\x1b[31mred", "new\nline", "\u202etxt.exe", "nul\x7f", "€" * 80, "n" * 201]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_name_that_is_not_of_a_result_stays_behind(tmp_path: Path, name: str, folder: bool) -> None:
    made = tmp_path / "made"
    (made / (name if folder else ".")).mkdir(parents=True)
    ((made / name / "inner") if folder else made / name).write_text("x")
    (made / "results.jsonl").write_text("honest")
    refused = collect.collect(made, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").rglob("*")] == ["results.jsonl"]
    assert len(refused) == 1
    assert "name" in refused[0]


def test_a_name_that_is_not_utf8_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / os.fsdecode(b"\xff")).write_text("x")
    (refused,) = collect.collect(tmp_path / "made", tmp_path / "kept")
    assert "name" in refused
    refused.encode()
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("name", ["health-before.json", "health-after.json"])
def test_a_folder_where_the_hooks_write_stays_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "made" / name).mkdir(parents=True)
    (tmp_path / "made" / name / "x").write_text("x")
    (tmp_path / "made/results.jsonl").write_text("honest")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/health-before.json").write_text("the hook's")
    (refused,) = collect.collect(tmp_path / "made", tmp_path / "kept")
    assert refused == f"{name}: a name of the agent's hooks"
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"health-before.json", "results.jsonl"}
    assert (tmp_path / "kept/health-before.json").read_text() == "the hook's"


def test_depth_and_bytes_have_a_budget_and_holes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_host.collect.MOST_BYTES", 10_000)
    made = tmp_path / "made"
    (made / "/".join("d" * 11)).mkdir(parents=True)
    (made / "/".join("d" * 11) / "deep").write_text("x")
    with (made / "aa-sparse").open("wb") as file:
        file.truncate(2**40)
    for number in range(60):
        (made / f"many-{number:02}").write_text("x" * 1000)
    (made / "results.jsonl").write_text("honest")
    refused = collect.collect(made, tmp_path / "kept")
    kept = {path.name: path.stat().st_size for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert "results.jsonl" in kept, "results go first"
    assert sum(kept.values()) <= 10_000
    assert "deep" not in kept
    assert "aa-sparse" not in kept
    assert len(refused) < 70
    assert not [name for name in kept if name.endswith(".new")]


def test_files_without_end_stay_behind_and_the_results_do_not(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for number in range(60):
        (made / f"many-{number:02}").touch()
    (made / "results.jsonl").write_text("honest")
    refused = collect.collect(made, tmp_path / "kept", most_files=20)
    kept = [path.name for path in (tmp_path / "kept").iterdir()]
    assert "results.jsonl" in kept
    assert len(kept) <= 20
    assert any("at most" in line for line in refused)


def deep(folder: Path, levels: int, name: str) -> None:
    """Folders below each other whose path no call takes whole."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=place))
    os.close(place)


def test_folders_deeper_than_a_path_change_no_status(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    agent.docker(
        status=1,
        do="for place in ('.', mounts['/hilgate/workspace']):\n"
        "    os.chdir(place)\n"
        "    for _ in range(60):\n"
        "        os.mkdir('d' * 140)\n"
        "        os.chdir('d' * 140)\n"
        "    open('file', 'w').close(); os.chmod('.', 0)\n"
        "    os.chdir(results)\n"
        "os.mkdir('health-before.json'); open('\\U0001f600' * 63, 'w').close()\n"
        "os.truncate(os.open('big', os.O_RDWR | os.O_CREAT), 2 ** 41)",
    )
    agent.env["TMPDIR"] = str(tmp_path / "scratch")
    assert agent.run(monkeypatch) == 1, "a failing test stays one"
    assert (agent.results / "results.jsonl").read_text() == "records\n"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_a_step_leaves_is_removed_at_any_depth_and_mode(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    deep(tmp_path / "scratch", 60, "d" * 140)
    closed = tmp_path / "scratch/a/b"
    closed.mkdir(parents=True)
    (tmp_path / "kept").write_text("kept")
    (closed / "link").symlink_to(tmp_path)
    closed.chmod(0)
    closed.parent.chmod(stat.S_IXUSR)
    collect.discard(tmp_path / "scratch")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_step_that_fills_the_disk_is_ended_before_it_is_full(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(agent.checkout)
    started = agent.bin / "started"
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=2**29 if started.exists() else usage.free))
    agent.docker(seconds=60)
    assert agent.run(monkeypatch) == 75
    assert [call[0] for call in agent.calls()][-2:] == ["run", "rm"], "it is not asked to stop"
    assert "less than 1 GiB are free" in capsys.readouterr().err


OWN = {"results/plan.json", "results/verdict.json", "'results/*.json'", "'results/*'", "results/evidence.tar"}
OWN_STEPS = {"plan", "verdict", "bundle"}
"""What steps of the flow itself leave: `plan`, and in a release `verdict` and `bundle`."""


def test_only_what_the_flow_made_is_downloaded() -> None:
    flows = [*(ROOT / ".buildkite").glob("*.yml"), *(ROOT / "tests/ci/buildkite/golden").glob("*.yml")]
    text = "".join(path.read_text() for path in flows)
    asked = re.findall(r"artifact download (.*?)(?: \|\||$)", text, re.MULTILINE)
    assert len(asked) > 10
    assert [line for line in asked if line.split()[0] not in OWN or line.split()[-1] not in OWN_STEPS] == []


FORGES = """\
import os, pathlib

RUN = "touch {mark}; git-upload-pack"
CONFIG = f'[core]\\n\\trepositoryformatversion = 0\\n[remote "{ours}"]\\n\\tuploadpack = {{RUN}}\\n'


def test_it():
    out = pathlib.Path(os.environ["HILGATE_OUT"])
    while out.name != "results":
        out = out.parent
    for n in range(1, 9):
        for up in range(1, 6):
            for name, text in ((".git\\\\config", CONFIG), ("plan.json", "{{}}"), ("one-cpu\\\\verdict.json", "{{}}")):
                (out / ("x\\\\" * n + "..\\\\" * (n + up) + name)).write_text(text)
    assert True
"""


def test_a_fork_that_forges_names_gets_the_verdict_it_deserves(host: Machine, main: Build, tmp_path: Path) -> None:
    """A whole build; the agent of this test reads names as the real one does."""
    assert main.posted == 0, main.log()
    mark = tmp_path / "executed"
    commit = host.change("0.5", **{"tests/test_forges.py": FORGES.format(mark=mark, ours=OURS)})
    found = host.build(host.clone, commit, **FORK)
    assert "left behind" in found.logs["one-cpu"]
    assert not mark.exists()
    assert (found.statuses["one-cpu"], found.posted) == (1, 1), found.log()
