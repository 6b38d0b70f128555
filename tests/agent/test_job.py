"""A job on a host, from plan.json to the exit status, with a docker and a buildkite-agent that record their calls."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hilgate.agent import devices, docker, job, workspace
from hilgate.errors import CannotRunHereError

DIGEST = "sha256:" + "ab" * 32
CONTENT = "c" * 64
KEY, CPU, BUILDER = "kernels-mla-gfx942", "units-cpu", "image-rocm-cpu"
SECRET = "hf_0123456789"

FAKE_DOCKER = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
behaviour = json.loads((here / "docker.json").read_text())
if words[0] in behaviour.get("hang", ()):
    time.sleep(60)
if words[0] == "stop":
    (here / "stopped").touch()
if words[0] != "run":
    if words[0] in behaviour.get("fail", ()):
        sys.exit("Error response from daemon: " + words[0] + " failed")
    sys.exit(0)
(here / "env.json").write_text(json.dumps(dict(os.environ)))
mounts = dict(
    [(part.split("=", 1)[1]) for part in word.split(",")[1:3]][::-1] for word in words if word.startswith("--mount=")
)
results = pathlib.Path(mounts["/hilgate/results"])
(results / "steps").mkdir()
(results / "results.jsonl").write_text("records\\n")
os.chdir(results)
exec(behaviour.get("do", ""))
(here / "started").touch()
end = time.monotonic() + behaviour.get("seconds", 0)
while time.monotonic() < end and not (here / "stopped").exists():
    time.sleep(0.02)
sys.exit(behaviour.get("status", 0))
"""

FAKE_AGENT = """#!{python}
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
(here / "agent-calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
name, target = sys.argv[3], pathlib.Path(sys.argv[4])
found = here / "artifacts" / name
if not found.exists():
    sys.exit("fatal: Failed to download artifacts: No artifacts found for downloading")
(target / name).parent.mkdir(parents=True, exist_ok=True)
shutil.copy(found, target / name)
"""


class Agent:
    """A checkout, a plan, programs on the path, and what they were asked."""

    def __init__(self, root: Path) -> None:
        self.bin, self.checkout = root / "bin", root / "checkout"
        self.bin.mkdir()
        self.checkout.mkdir()
        for name, text in (("docker", FAKE_DOCKER), ("buildkite-agent", FAKE_AGENT)):
            self.program(name, text.replace("{python}", sys.executable))
        (self.checkout / "file").write_text("content\n")
        for words in (["init", "-q"], ["add", "-A"],
                      ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "t"]):  # fmt: skip
            subprocess.run(["git", *words], cwd=self.checkout, check=True)
        self.commit = workspace.commit_of(self.checkout)
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(root), "BUILDKITE": "true", "BUILDKITE_JOB_ID": "j-1",
            "BUILDKITE_REPO": "https://github.com/rocm/hilgate", "BUILDKITE_PULL_REQUEST": "false",
            "HF_TOKEN": SECRET, "BUILDKITE_AGENT_ACCESS_TOKEN": SECRET,
        }  # fmt: skip
        self.docker()
        self.plan()
        self.record()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def docker(self, **behaviour: object) -> None:
        (self.bin / "docker.json").write_text(json.dumps(behaviour))

    def plan(self, **changes: object) -> None:
        step = {"timeout_minutes": 1, "gpus": 0, "secrets": ["HF_TOKEN"]}
        steps = [
            {**step, "key": BUILDER, "provides": "rocm"},
            {**step, "key": KEY, "image": "rocm"},
            {**step, "key": CPU},
        ]
        plan = {"commit": self.commit, "images": {"rocm": CONTENT}, "steps": steps} | changes
        (self.checkout / "results").mkdir(exist_ok=True)
        (self.checkout / "results" / "plan.json").write_text(json.dumps(plan))

    def record(self, **changes: object) -> None:
        record = {"kind": "image", "image": "rocm", "content": CONTENT, "digest": DIGEST} | changes
        path = self.bin / "artifacts" / "results" / "jobs" / BUILDER / "results.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"kind": "build"}\n' + json.dumps(record) + "\n")

    def run(self, monkeypatch: pytest.MonkeyPatch, key: str = KEY, *more: str) -> int:
        folder = f"results/jobs/{key}" + (".recheck" if more else "")
        monkeypatch.chdir(self.checkout)
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return job.main([key, "--plan", "results/plan.json", "--results", folder, *more])

    def calls(self, verb: str = "") -> list[list[str]]:
        path = self.bin / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if not verb or call[0] == verb]

    @property
    def results(self) -> Path:
        return self.checkout / "results" / "jobs" / KEY


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "STOP_SECONDS", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield Agent(tmp_path)
    signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.glob("hilgate-*")) == []  # nothing is left, however it ended


@pytest.mark.parametrize("status", [0, 1, 4, 5, 6, 75, 137])
def test_the_status_inside_is_the_status(agent, monkeypatch, status):
    agent.docker(status=status)
    assert agent.run(monkeypatch) == status
    assert (agent.results / "results.jsonl").read_text() == "records\n"


def test_the_container_runs_the_step_of_the_plan_in_the_image_that_was_built(agent, monkeypatch):
    agent.env["HILGATE_IMAGES"] = "registry.invalid/hilgate/"
    assert agent.run(monkeypatch) == 0
    image = f"registry.invalid/hilgate/rocm@{DIGEST}"
    assert [call[0] for call in agent.calls()] == ["version", "pull", "run", "rm"]
    assert agent.calls("pull") == [["pull", "--quiet", image]]
    (run,) = agent.calls("run")
    assert run[run.index(image) :] == [
        image, "python3", "-m", "hilgate", "run", KEY, "--plan", "/hilgate/plan.json", "--results", "/hilgate/results"
    ]  # fmt: skip
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
    assert set(found) == {"closed", "closed/in", "health-before.json", "steps", "steps/\x1b[31mred"}
    assert found["health-before.json"].read_text() == "the hook's\n"
    words = capsys.readouterr().err
    for name in ("steps/log.txt: a link", "linked: a link", "pipe: no plain file", "twice: a second name",
                 "health-after.json: a name", "socket: cannot be read"):  # fmt: skip
        assert name in words


def test_a_fork_brings_no_secret_into_its_container(agent, monkeypatch):
    agent.env |= {"BUILDKITE_PULL_REQUEST": "7", "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/mallory/hilgate",
                  "HILGATE_CACHE": str(agent.bin)}  # fmt: skip
    assert agent.run(monkeypatch) == 0
    (run,) = agent.calls("run")
    assert "--env=HF_TOKEN" not in run
    assert f"--mount=type=bind,source={agent.bin},target=/hilgate/cache,readonly" in run


def test_a_plan_that_says_fork_is_believed(agent, monkeypatch):
    agent.plan(fork=True)
    assert agent.run(monkeypatch) == 0
    assert "--env=HF_TOKEN" not in agent.calls("run")[0]


def test_a_recheck_reads_what_the_job_left_and_runs_there(agent, monkeypatch):
    earlier = agent.bin / "artifacts" / "results" / "jobs" / KEY
    earlier.mkdir()
    (earlier / "results.jsonl").write_text("earlier\n")
    agent.docker(do="import shutil; shutil.copytree(mounts['/hilgate/jobs'], 'seen')")
    assert agent.run(monkeypatch, KEY, "--recheck") == 0
    inside = [
        "hilgate",
        "recheck",
        KEY,
        "--plan",
        "/hilgate/plan.json",
        "--jobs",
        "/hilgate/jobs",
        "--results",
        "/hilgate/results",
    ]
    assert agent.calls("run")[0][-9:] == inside
    assert (agent.checkout / f"results/jobs/{KEY}.recheck/seen/{KEY}/results.jsonl").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("arrange", "status", "words"),
    [
        (lambda a: a.docker(fail=["version"]), 75, "daemon does not answer: Error response"),
        (lambda a: a.env.update(HILGATE_IMAGES="r.invalid/h") or a.docker(fail=["pull"]), 75, "cannot be pulled"),
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
        (lambda a: shutil.rmtree(a.bin / "artifacts"), 5, "did not arrive: fatal"),
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
    ids=["dead daemon", "no pull", "not in store", "125", "126", "127", "no docker", "docker not executable",
         "other contents", "no contents", "digest is a tag", "digest and more", "another image", "no artifact",
         "no agent", "nobody builds it", "other commit", "commit is a name", "no timeout", "timeout is a flag",
         "network is a word",
         "no such step", "truncated plan", "plan is a list", "no plan", "results already", "results are a link"],
)  # fmt: skip
def test_what_cannot_run_is_never_a_failure_of_the_change(agent, monkeypatch, capsys, arrange, status, words):
    arrange(agent)
    assert agent.run(monkeypatch) == status
    assert words in capsys.readouterr().err


def test_an_image_of_an_earlier_build_is_reused_when_its_contents_are_the_plans(agent, monkeypatch):
    agent.plan(steps=[{"key": KEY, "image": "rocm", "timeout_minutes": 1}])
    agent.env["HILGATE_IMAGE_FROM_BUILD"] = "4711"
    assert agent.run(monkeypatch) == 0
    assert (agent.bin / "agent-calls").read_text().endswith("/ --build 4711\n")
    agent.env["HILGATE_IMAGE_FROM_BUILD"] = "--help"
    shutil.rmtree(agent.results)
    assert agent.run(monkeypatch) == 5


def test_a_daemon_that_hangs_is_a_sick_node(agent, monkeypatch):
    monkeypatch.setattr(docker, "ANSWER_SECONDS", 0.3)
    agent.docker(hang=["version"])
    assert agent.run(monkeypatch) == 75


def test_a_container_that_outlives_its_step_is_stopped_and_its_results_are_kept(agent, monkeypatch, capsys):
    monkeypatch.setattr(job, "_seconds", lambda _step: 0.5)
    agent.docker(seconds=60)
    assert agent.run(monkeypatch) == 75
    assert [call[0] for call in agent.calls()][-2:] == ["stop", "rm"]
    assert (agent.results / "results.jsonl").exists()
    assert "it or this node hangs" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_stops_the_container_and_keeps_its_results(agent, number):
    agent.docker(seconds=60)
    (agent.checkout / "ci").symlink_to(Path(job.__file__).parents[2])
    words = [
        sys.executable,
        "-m",
        "hilgate.agent.job",
        KEY,
        "--plan",
        "results/plan.json",
        "--results",
        f"results/jobs/{KEY}",
    ]
    env = {**agent.env, "PYTHONPATH": "ci", "TMPDIR": str(agent.bin.parent)}
    with subprocess.Popen(words, cwd=agent.checkout, env=env, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 20
        while not (agent.bin / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(number)
        assert child.wait(20) == 130
        assert f"ended: {number.name}" in child.stderr.read()
    assert [call[0] for call in agent.calls()][-2:] == ["stop", "rm"]
    assert (agent.results / "results.jsonl").exists()


SEEN = """#!/bin/sh
printf '%s\\n' "$*" > "$(dirname "$0")/seen"
env >> "$(dirname "$0")/seen"
exit 6
"""


def test_a_step_without_an_image_runs_on_the_host_with_named_variables_only(agent, monkeypatch):
    agent.program("hilgate", SEEN)
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert seen.startswith(
        f"run {CPU} --plan {agent.checkout}/results/plan.json --results {agent.checkout}/results/jobs/{CPU}\n"
    )
    assert f"HF_TOKEN={SECRET}" in seen
    assert "ACCESS_TOKEN" not in seen
    assert agent.calls() == []


def test_a_fork_runs_on_a_host_only_where_the_machine_is_thrown_away(agent, monkeypatch, capsys):
    agent.program("hilgate", SEEN)
    agent.plan(fork=True)
    assert agent.run(monkeypatch, CPU) == 5
    assert "does not run on this host itself" in capsys.readouterr().err
    agent.env["HILGATE_DISPOSABLE"] = "1"
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert SECRET not in seen
    assert f"\nHOME={agent.bin.parent}\n" not in seen


def test_a_host_without_hilgate_cannot_run_it(agent, monkeypatch):
    assert agent.run(monkeypatch, CPU) == 5


def topology(root, minors):
    for number, minor in enumerate([0, *minors]):
        (root / "kfd" / str(number)).mkdir(parents=True)
        (root / "kfd" / str(number) / "properties").write_text(f"cpu_cores_count 0\ndrm_render_minor {minor}\n")
    (root / "dev" / "dri").mkdir(parents=True)
    for name in ("kfd", *(f"dri/renderD{minor}" for minor in minors)):
        (root / "dev" / name).touch()
    return {"kfd": root / "kfd", "dev": root / "dev"}


@pytest.mark.parametrize(
    ("minors", "mine", "gpus", "nodes"),
    [
        ([128], "", 1, ["renderD128"]),
        ([128, 136], "", 2, ["renderD128", "renderD136"]),
        ([128, 136], "renderD136", 1, ["renderD136"]),
        ([128, 136, 144], "renderD144,renderD128", 2, ["renderD144", "renderD128"]),
        ([128, 136, 144], "renderD144 renderD128", 1, ["renderD144"]),
        ([], "", 0, []),
    ],
    ids=["all of one", "all of two", "mine", "mine in my order", "fewer than mine", "none"],
)
def test_a_job_gets_the_gpus_of_its_agent_and_no_more_than_its_step_has(tmp_path, minors, mine, gpus, nodes):
    found = devices.of_job(gpus, {devices.VARIABLE: mine}, **topology(tmp_path, minors))
    assert found.render_nodes == tuple(f"/dev/dri/{node}" for node in nodes)
    assert found.groups == ((tmp_path.stat().st_gid,) if nodes else ())


@pytest.mark.parametrize(
    ("minors", "mine", "gpus", "error"),
    [
        ([], "", 1, devices.MissingGpuError),
        ([128], "", 2, devices.MissingGpuError),
        ([128, 136], "", 1, CannotRunHereError),
        ([128], "renderD136", 1, CannotRunHereError),
        ([128], "card0", 1, CannotRunHereError),
        ([128], "../mem", 1, CannotRunHereError),
        ([128], "renderD128 renderD128", 1, CannotRunHereError),
    ],
    ids=["no GPU", "one is missing", "whose?", "not listed", "a card", "a path", "twice"],
)
def test_gpus_that_are_not_there_or_not_ours_are_refused(tmp_path, minors, mine, gpus, error):
    with pytest.raises(error):
        devices.of_job(gpus, {devices.VARIABLE: mine}, **topology(tmp_path, minors))


def test_a_gpu_step_gets_its_share_of_the_host(agent, monkeypatch, tmp_path):
    (tmp_path / "sys").mkdir()
    places = topology(tmp_path / "sys", [128, 136, 144, 152])
    monkeypatch.setattr(job.devices, "of_job", functools.partial(devices.of_job, **places))
    agent.plan(steps=[{"key": BUILDER, "provides": "rocm", "timeout_minutes": 1},
                      {"key": KEY, "image": "rocm", "timeout_minutes": 1, "gpus": 2}])  # fmt: skip
    assert agent.run(monkeypatch) == 5  # four GPUs, and nothing says which are this agent's
    agent.env[devices.VARIABLE] = "renderD144 renderD152"
    assert agent.run(monkeypatch) == 0
    (run,) = agent.calls("run")
    given = [word for word in run if word.startswith("--device")]
    assert given == [f"--device={n}:{n}:rw" for n in ("/dev/kfd", "/dev/dri/renderD144", "/dev/dri/renderD152")]
    assert f"--memory={job._memory_gib(2, 4)}g" in run
    assert job._memory_gib(2, 4) <= job._memory_gib(0, 0) / 2


def test_a_gpu_without_its_device_node_is_missing(tmp_path):
    places = topology(tmp_path, [128])
    (tmp_path / "dev" / "dri" / "renderD128").unlink()
    with pytest.raises(devices.MissingGpuError, match="no device node"):
        devices.of_job(1, {}, **places)


def test_a_folder_that_a_step_closed_is_still_removed(tmp_path):
    closed = tmp_path / "scratch" / "a" / "b"
    closed.mkdir(parents=True)
    closed.chmod(0)
    closed.parent.chmod(stat.S_IXUSR)
    workspace.discard(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
