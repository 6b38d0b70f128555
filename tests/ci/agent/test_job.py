# SPDX-License-Identifier: Apache-2.0
"""A job on a host, from plan.json to the exit status: in a container, on the host, stopped, hung, and of a fork."""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.agent import BUILDER, CPU, DIGEST, KEY, SECRET, topology
from support.plans import wait_for

from agent_host import collect, container, gpus, host, job


@pytest.mark.parametrize("status", [0, 1, 4, 5, 6, 75, 137])
def test_the_status_inside_is_the_status(agent, monkeypatch, status):
    agent.docker(status=status)
    assert agent.run(monkeypatch) == status
    assert (agent.results / "results.jsonl").read_text() == "records\n"


def test_the_container_runs_the_step_of_the_plan_in_the_image_that_was_built(agent, monkeypatch):
    agent.env["HILGATE_REGISTRY"] = "registry.invalid/hilgate/"
    assert agent.run(monkeypatch) == 0
    image = f"registry.invalid/hilgate/rocm@{DIGEST}"
    assert [call[0] for call in agent.calls()] == ["version", "pull", "run", "rm"]
    assert agent.calls("pull") == [["pull", "--quiet", image]]
    (run,) = agent.calls("run")
    assert run[run.index(image) :] == [
        image,
        "python3",
        "-m",
        "hilgate",
        "run",
        KEY,
        "--plan",
        "/hilgate/plan.json",
        "--results",
        "/hilgate/results",
    ]
    assert f"--env=HILGATE_IMAGE={DIGEST}" in run
    assert f"--hostname={socket.gethostname()}" in run
    assert "--env=HF_TOKEN" in run
    assert SECRET not in " ".join(run)
    assert agent.calls("rm") == [["rm", "--force", "--volumes", "hilgate-j-1"]]


def test_the_container_works_in_a_copy_and_nothing_but_plain_files_comes_back(agent, monkeypatch, capsys):
    agent.results.mkdir(parents=True)
    (agent.results / "health-before.json").write_text("the hook's\n")
    hooks = "(pathlib.Path(mounts['/hilgate/workspace']) / '.git' / 'hooks').mkdir(exist_ok=True); "
    agent.docker(
        do=f"import socket\n{hooks}(pathlib.Path(mounts['/hilgate/workspace']) / 'file').write_text('changed')\n"
        "os.symlink('/etc/passwd', 'steps/log.txt'); os.symlink('/etc', 'linked'); os.mkfifo('pipe')\n"
        "os.link('results.jsonl', 'twice'); open('health-before.json', 'w').write('mine')\n"
        "open('health-after.json', 'w').write('mine'); open('steps/\\x1b[31mred', 'w').write('plain')\n"
        "os.mkdir('closed'); open('closed/in', 'w').write('x')\n"
        "socket.socket(socket.AF_UNIX).bind('socket')\n"
    )
    assert agent.run(monkeypatch) == 0
    assert (agent.checkout / "file").read_text() == "content\n"
    found = {str(path.relative_to(agent.results)): path for path in agent.results.rglob("*")}
    assert set(found) == {"closed", "closed/in", "health-before.json"}
    assert found["health-before.json"].read_text() == "the hook's\n"
    words = capsys.readouterr().err
    for name in (
        "steps/log.txt: a link",
        "linked: a link",
        "pipe: no plain file",
        "twice: a second name",
        "health-after.json: a name",
        "socket: cannot be read",
        "steps/\\x1b[31mred: a name",
    ):
        assert name in words


def test_the_copy_is_a_clone_of_its_own_that_knows_no_path_of_the_host(agent, tmp_path):
    copy = tmp_path / "workspace"
    job.copy_checkout(agent.checkout, agent.commit, copy)
    assert host.git(copy, "rev-parse", "HEAD").strip() == agent.commit
    assert host.git(copy, "remote") == ""
    assert host.git(copy, "status", "--porcelain", "--ignored=no") == ""
    assert str(agent.checkout) not in (copy / ".git/config").read_text()
    objects = [path.stat().st_nlink for path in (copy / ".git/objects").rglob("*") if path.is_file()]
    assert set(objects) == {1}
    (tmp_path / ".triton").mkdir()
    assert (copy / ".triton").samefile(tmp_path / ".triton")


def test_a_fork_brings_no_secret_into_its_container(agent, monkeypatch):
    agent.env |= {
        "BUILDKITE_PULL_REQUEST": "7",
        "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/mallory/hilgate",
        "HILGATE_CACHE": str(agent.bin),
    }
    assert agent.run(monkeypatch) == 0
    (run,) = agent.calls("run")
    assert "--env=HF_TOKEN" not in run
    assert f"--mount=type=bind,source={agent.bin},target=/hilgate/cache,readonly" in run


def test_a_recheck_reads_what_the_job_left_and_runs_there(agent, monkeypatch):
    earlier = agent.bin / "artifacts" / "results" / "jobs" / KEY
    earlier.mkdir()
    (earlier / "results.jsonl").write_text("earlier\n")
    agent.docker(do="import shutil; shutil.copytree(mounts['/hilgate/jobs'], 'seen')")
    assert agent.run(monkeypatch, KEY, "--recheck") == 0
    inside = f"hilgate recheck {KEY} --plan /hilgate/plan.json --jobs /hilgate/jobs --results /hilgate/results"
    assert agent.calls("run")[0][-9:] == inside.split()
    assert (agent.checkout / f"results/jobs/{KEY}.recheck/seen/{KEY}/results.jsonl").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("arrange", "status", "words"),
    [
        (lambda a: a.docker(fail=["version"]), 75, "daemon does not answer: docker ended with status 1: Error"),
        (lambda a: a.env.update(HILGATE_REGISTRY="r.invalid/h") or a.docker(fail=["pull"]), 75, "cannot be pulled"),
        (lambda a: a.docker(fail=["image"]), 75, "not in this host's store"),
        (lambda a: a.docker(status=125), 75, "could not run the container"),
        (lambda a: a.docker(status=126), 5, "no python3"),
        (lambda a: a.docker(status=127), 5, "no python3"),
        (lambda a: (a.bin / "docker").unlink(), 5, "docker cannot be started"),
        (lambda a: (a.bin / "docker").chmod(0o644), 5, "docker cannot be started"),
        (lambda a: a.plan(images={"rocm": "d" * 64}), 5, "other contents"),
        (lambda a: a.record(content=None), 5, "other contents"),
        (lambda a: a.record(digest="latest"), 5, "no digest"),
        (lambda a: a.record(digest=DIGEST + "\n"), 5, "no digest"),
        (lambda a: a.record(image="cpu"), 5, "left no record"),
        (lambda a: shutil.rmtree(a.bin / "artifacts"), 5, "status 1: fatal"),
        (lambda a: (a.bin / "buildkite-agent").unlink(), 5, "did not arrive"),
        (lambda a: a.plan(steps=[{"key": KEY, "image": "rocm", "timeout_minutes": 1}]), 5, "no step of the plan"),
        (lambda a: a.plan(commit="e" * 40), 3, "is checked out"),
        (lambda a: a.plan(commit="HEAD"), 3, "not a plan"),
        (lambda a: a.plan(steps=[{"key": KEY}]), 3, "not a plan: KeyError"),
        (lambda a: a.plan(steps=[{"key": KEY, "timeout_minutes": True}]), 3, "not a plan"),
        (lambda a: a.plan(steps=[{"key": KEY, "timeout_minutes": 1, "network": "no"}]), 3, "not a plan"),
        (lambda a: a.plan(steps=[]), 2, "no step"),
        (lambda a: (a.checkout / "results" / "plan.json").write_text("{"), 3, "not a plan"),
        (lambda a: (a.checkout / "results" / "plan.json").write_text("[]"), 3, "not a plan"),
        (lambda a: (a.checkout / "results" / "plan.json").unlink(), 3, "no plan"),
        (lambda a: (a.results.mkdir(parents=True), (a.results / "results.jsonl").touch()), 3, "results already"),
        (lambda a: (a.checkout / "results" / "jobs").symlink_to("/etc"), 3, "through a link"),
    ],
    ids=[
        "dead daemon",
        "no pull",
        "not in store",
        "125",
        "126",
        "127",
        "no docker",
        "docker not executable",
        "other contents",
        "no contents",
        "digest is a tag",
        "digest and more",
        "another image",
        "no artifact",
        "no agent",
        "nobody builds it",
        "other commit",
        "commit is a name",
        "no timeout",
        "timeout is a flag",
        "network is a word",
        "no such step",
        "truncated plan",
        "plan is a list",
        "no plan",
        "results already",
        "results are a link",
    ],
)
def test_what_cannot_run_is_never_a_failure_of_the_change(agent, monkeypatch, capsys, arrange, status, words):
    arrange(agent)
    assert agent.run(monkeypatch) == status
    assert words in capsys.readouterr().err


def test_an_image_of_an_earlier_build_is_reused_when_its_contents_are_the_plans(agent, monkeypatch):
    agent.plan(steps=[{"key": KEY, "image": "rocm", "timeout_minutes": 1}])
    agent.env["HILGATE_IMAGE_FROM_BUILD"] = "4711"
    assert agent.run(monkeypatch) == 0
    assert (agent.bin / "agent-calls").read_text().endswith("/ --step image-rocm-cpu --build 4711\n")
    agent.env["HILGATE_IMAGE_FROM_BUILD"] = "--help"
    shutil.rmtree(agent.results)
    assert agent.run(monkeypatch) == 5


def test_a_daemon_that_hangs_is_a_sick_node(agent, monkeypatch):
    monkeypatch.setattr(container, "ANSWER_SECONDS", 0.3)
    agent.docker(hang=["version"])
    assert agent.run(monkeypatch) == 75


def test_a_container_that_outlives_its_step_is_stopped_and_its_results_are_kept(agent, monkeypatch, capsys):
    monkeypatch.setattr(job.PlannedJob, "seconds", 3.0)
    agent.docker(seconds=60)
    assert agent.run(monkeypatch) == 75
    assert [call[0] for call in agent.calls()][-2:] == ["stop", "rm"]
    assert (agent.results / "results.jsonl").exists()
    assert "it or this node hangs" in capsys.readouterr().err


def test_a_gpu_step_gets_its_share_of_the_host_or_does_not_start(agent, monkeypatch, tmp_path, capsys):
    (tmp_path / "sys").mkdir()
    places = topology(tmp_path / "sys", [128, 136, 144, 152])
    monkeypatch.setattr(container, "gpu_devices", functools.partial(container.gpu_devices, **places))
    agent.plan(
        steps=[
            {"key": BUILDER, "provides": "rocm", "timeout_minutes": 1},
            {"key": KEY, "image": "rocm", "timeout_minutes": 1, "gpus": 2},
        ]
    )
    assert agent.run(monkeypatch) == 5
    assert "this machine has 4 GPUs and the step gets 2" in capsys.readouterr().err
    agent.env[gpus.RENDER_NODES] = "renderD152"
    assert agent.run(monkeypatch) == 75
    assert "error: the step needs 2 GPUs and this agent has 1\n" in capsys.readouterr().err
    agent.env[gpus.RENDER_NODES] = "renderD144 renderD152"
    assert agent.run(monkeypatch) == 0
    (run,) = agent.calls("run")
    given = [word for word in run if word.startswith("--device")]
    assert given == [f"--device={n}:{n}:rw" for n in ("/dev/kfd", "/dev/dri/renderD144", "/dev/dri/renderD152")]
    assert f"--memory={job.memory_gib(2, 4)}g" in run
    assert job.memory_gib(2, 4) <= job.memory_gib(0, 0) / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_stops_the_container_and_keeps_its_results(agent, number):
    agent.docker(seconds=60)
    (agent.checkout / "ci").symlink_to(Path(job.__file__).parents[1])
    where = ("--plan=results/plan.json", f"--results=results/jobs/{KEY}")
    words = [sys.executable, "-m", "agent_host.job", KEY, *where]
    env = {**agent.env, "PYTHONPATH": "ci", "TMPDIR": str(agent.bin.parent)}
    with subprocess.Popen(words, cwd=agent.checkout, env=env, stderr=subprocess.PIPE, text=True) as child:
        wait_for((agent.bin / "started").exists, 60)
        child.send_signal(number)
        assert child.wait(60) == 130
        assert f"ended: {number.name}" in child.stderr.read()
    assert [call[0] for call in agent.calls()][-2:] == ["stop", "rm"]
    assert (agent.results / "results.jsonl").exists()


SEEN = """#!/bin/sh
printf '%s\\n' "$*" > "$(dirname "$0")/seen"
env >> "$(dirname "$0")/seen"
for folder; do :; done
echo records > "$folder/results.jsonl"
ln -s /etc/passwd "$folder/log.txt"
exit 6
"""


def test_a_step_without_an_image_runs_on_the_host_with_named_variables_only(agent, monkeypatch, capsys):
    agent.program("python", SEEN)
    monkeypatch.setattr(job.sys, "executable", str(agent.bin / "python"))
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    own = Path(job.__file__).parents[1] / "hilgate/__main__.py"
    assert seen.startswith(f"-I {own} run {CPU} --plan {agent.checkout}/results/plan.json --results ")
    # A link that it leaves would make the agent upload a file of the host.
    assert [path.name for path in (agent.checkout / "results/jobs" / CPU).iterdir()] == ["results.jsonl"]
    assert "left behind: log.txt: a link" in capsys.readouterr().err
    assert f"HF_TOKEN={SECRET}" in seen
    assert "ACCESS_TOKEN" not in seen
    assert agent.calls() == []


def test_a_fork_runs_on_a_host_only_where_the_machine_is_thrown_away(agent, monkeypatch, capsys):
    agent.program("python", SEEN)
    monkeypatch.setattr(job.sys, "executable", str(agent.bin / "python"))
    agent.plan(fork=True)
    assert agent.run(monkeypatch, CPU) == 5
    assert "does not run on this host itself" in capsys.readouterr().err
    agent.env["HILGATE_DISPOSABLE"] = "1"
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert SECRET not in seen
    assert f"\nHOME={agent.bin.parent}\n" not in seen


def test_a_folder_that_a_step_closed_is_still_removed(tmp_path):
    closed = tmp_path / "scratch" / "a" / "b"
    closed.mkdir(parents=True)
    closed.chmod(0)
    closed.parent.chmod(stat.S_IXUSR)
    collect.discard(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
