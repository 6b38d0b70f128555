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
from support.agent import BUILDER, CONTENT, CPU, DIGEST, KEY, SECRET, topology
from support.plans import wait_for

from agent_host import container, gpus, host, job
from hilgate.errors import DeclarationError, RecordsError


@pytest.mark.parametrize("status", [0, 1, 4, 5, 6, 75, 137])
def test_the_status_inside_is_the_status(agent, monkeypatch, status):
    agent.docker(status=status)
    assert agent.run(monkeypatch) == status
    assert (agent.results / "results.jsonl").read_text() == "records\n"


def test_the_container_runs_the_planned_step_in_the_built_image(agent, monkeypatch):
    agent.env["HILGATE_REGISTRY"] = "registry.invalid/hilgate/"
    assert agent.run(monkeypatch) == 0
    image = f"registry.invalid/hilgate/rocm@{DIGEST}"
    assert [call[0] for call in agent.calls()] == ["version", "pull", "run", "rm"]
    assert agent.calls("pull") == [["pull", "--quiet", image]]
    (run,) = agent.calls("run")
    inside = f"python3 -m hilgate run {KEY} --plan /hilgate/plan.json --results /hilgate/results"
    assert run[run.index(image) :] == [image, *inside.split()]
    assert f"--env=HILGATE_IMAGE={DIGEST}" in run
    assert f"--hostname={socket.gethostname()}" in run
    assert "--env=HF_TOKEN" in run
    assert SECRET not in " ".join(run)
    assert agent.calls("rm") == [["rm", "--force", "--volumes", "hilgate-j-1"]]


def test_the_container_works_in_a_copy_and_returns_plain_files(agent, monkeypatch, capsys):
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


def test_the_copy_is_a_clone_that_knows_no_path_of_the_host(agent, tmp_path):
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


def test_a_recheck_reads_what_the_job_left_and_runs_there(agent, monkeypatch):
    earlier = agent.bin / "artifacts" / "results" / "jobs" / KEY
    earlier.mkdir()
    (earlier / "results.jsonl").write_text("earlier\n")
    agent.docker(do="import shutil; shutil.copytree(mounts['/hilgate/jobs'], 'seen')")
    assert agent.run(monkeypatch, KEY, "--recheck") == 0
    inside = f"hilgate recheck {KEY} --plan /hilgate/plan.json --jobs /hilgate/jobs --results /hilgate/results"
    assert agent.calls("run")[0][-9:] == inside.split()
    assert (agent.checkout / f"results/jobs/{KEY}.recheck/seen/{KEY}/results.jsonl").read_text() == "earlier\n"


CANNOT_RUN = {
    "dead daemon": (
        lambda a: a.docker(fail=["version"]),
        75,
        "daemon does not answer: docker ended with status 1: Error",
    ),
    "no pull": (
        lambda a: a.env.update(HILGATE_REGISTRY="r.invalid/h") or a.docker(fail=["pull"]),
        75,
        "cannot be pulled",
    ),
    "not in store": (lambda a: a.docker(fail=["image"]), 75, "not in this host's store"),
    "125": (lambda a: a.docker(status=125), 75, "could not run the container"),
    "126": (lambda a: a.docker(status=126), 5, "no python3"),
    "127": (lambda a: a.docker(status=127), 5, "no python3"),
    "no docker": (lambda a: (a.bin / "docker").unlink(), 5, "docker cannot be started"),
    "docker not executable": (lambda a: (a.bin / "docker").chmod(0o644), 5, "docker cannot be started"),
    "other contents": (
        lambda a: a.plan(images={"rocm": "d" * 64}),
        5,
        f"of contents {'d' * 12}: it was built from other",
    ),
    "contents of its own": (
        lambda a: a.record(content="e" * 64),
        5,
        f"from other contents than the plan's ('{'e' * 12}')",
    ),
    "no contents": (lambda a: a.record(content=None), 5, "other contents"),
    "digest is a tag": (lambda a: a.record(digest="latest"), 5, "no digest"),
    "digest and more": (lambda a: a.record(digest=DIGEST + "\n"), 5, "no digest"),
    "another image": (lambda a: a.record(image="cpu"), 5, "left no record"),
    "an image with a longer name": (lambda a: a.record(image="rocm-next"), 5, "left no record"),
    "no artifact": (lambda a: shutil.rmtree(a.bin / "artifacts"), 5, "status 1: fatal"),
    "no agent": (lambda a: (a.bin / "buildkite-agent").unlink(), 5, "did not arrive"),
    "nobody builds it": (
        lambda a: a.plan(steps=[{"key": KEY, "image": "rocm", "timeout_minutes": 1}]),
        5,
        "no step of the plan",
    ),
    "other commit": (lambda a: a.plan(commit="e" * 40), 3, f"the plan is of commit {'e' * 12} and "),
    "commit is a name": (lambda a: a.plan(commit="HEAD"), 3, "not a plan"),
    "no timeout": (lambda a: a.plan(steps=[{"key": KEY}]), 3, "not a plan: KeyError"),
    "timeout is a flag": (lambda a: a.plan(steps=[{"key": KEY, "timeout_minutes": True}]), 3, "not a plan"),
    "network is a word": (
        lambda a: a.plan(steps=[{"key": KEY, "timeout_minutes": 1, "network": "no"}]),
        3,
        "not a plan",
    ),
    "no such step": (lambda a: a.plan(steps=[]), 2, "no step"),
    "truncated plan": (lambda a: (a.checkout / "results" / "plan.json").write_text("{"), 3, "not a plan"),
    "plan is a list": (lambda a: (a.checkout / "results" / "plan.json").write_text("[]"), 3, "not a plan"),
    "no plan": (lambda a: (a.checkout / "results" / "plan.json").unlink(), 3, "no plan"),
    "results already": (
        lambda a: (a.results.mkdir(parents=True), (a.results / "results.jsonl").touch()),
        3,
        "results already",
    ),
    "results are a link": (lambda a: (a.checkout / "results" / "jobs").symlink_to("/etc"), 3, "through a link"),
}
"""What is wrong: how it is arranged, the exit status, and words of the message."""


@pytest.mark.parametrize("wrong", CANNOT_RUN)
def test_what_cannot_run_is_never_a_failure_of_the_change(agent, monkeypatch, capsys, wrong):
    arrange, status, words = CANNOT_RUN[wrong]
    arrange(agent)
    assert agent.run(monkeypatch) == status
    assert words in capsys.readouterr().err


def test_an_earlier_image_is_reused_where_its_contents_match(agent, monkeypatch):
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


def test_a_late_container_is_stopped_and_its_results_are_kept(agent, monkeypatch, capsys):
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


def test_a_step_without_an_image_gets_named_variables_only(agent, monkeypatch, capsys):
    agent.program("python", SEEN)
    monkeypatch.setattr(job.sys, "executable", str(agent.bin / "python"))
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    own = Path(job.__file__).parents[1] / "hilgate/__main__.py"
    assert seen.startswith(f"-I {own} run {CPU} --plan {agent.checkout}/results/plan.json --results ")
    # A link that it leaves would make the agent upload a file of the host.
    assert [path.name for path in (agent.checkout / "results/jobs" / CPU).iterdir()] == ["results.jsonl"]
    said = capsys.readouterr().err
    assert "left behind: log.txt: a link" in said
    assert f"{CPU}: trusted: " in said
    assert f"HF_TOKEN={SECRET}" in seen
    assert "ACCESS_TOKEN" not in seen
    assert agent.calls() == []


def test_a_recheck_on_the_host_reads_what_the_job_left(agent, monkeypatch):
    earlier = agent.bin / f"artifacts/results/jobs/{CPU}/results.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("earlier\n")
    agent.program("python", '#!/bin/sh\necho "$3 $4 $7" > "$0.seen"; cat "$8"/*/results.jsonl >> "$0.seen"; exit 6\n')
    monkeypatch.setattr(job.sys, "executable", str(agent.bin / "python"))
    assert agent.run(monkeypatch, CPU, "--recheck") == 6
    assert (agent.bin / "python.seen").read_text() == f"recheck {CPU} --jobs\nearlier\n"


def test_a_fork_runs_on_a_host_only_where_it_is_thrown_away(agent, monkeypatch, capsys):
    agent.program("python", SEEN)
    monkeypatch.setattr(job.sys, "executable", str(agent.bin / "python"))
    agent.plan(fork=True)
    assert agent.run(monkeypatch, CPU) == 5
    said = capsys.readouterr().err
    assert "does not run on this host itself" in said
    assert f"{CPU}: fork: the plan says so\n" in said
    agent.env["HILGATE_DISPOSABLE"] = "1"
    assert agent.run(monkeypatch, CPU) == 6
    seen = (agent.bin / "seen").read_text()
    assert SECRET not in seen
    assert f"\nHOME={agent.bin.parent}\n" not in seen


def read(agent, key=KEY, **changes):
    agent.plan(**changes)
    return job.read_plan(agent.checkout / "results/plan.json", key)


def declared(**step):
    """The builder, and the step with these fields of its declaration."""
    return {"steps": [{"key": KEY, "image": "rocm"} | step, {"key": BUILDER, "provides": "rocm", "timeout_minutes": 1}]}


def test_what_a_plan_says_of_a_step_is_read(agent):
    found = read(agent, **declared(timeout_minutes=3, gpus=8, network=True, secrets=["HF_TOKEN"]), fork=True)
    assert found == job.PlannedJob(
        key=KEY,
        commit=agent.commit,
        fork=True,
        image="rocm",
        content=CONTENT,
        digest="",
        provider=BUILDER,
        gpus=8,
        network=True,
        secrets=("HF_TOKEN",),
        timeout_minutes=3,
        python_path=(".",),
        job=KEY,
    )
    assert found.seconds == 5 * 60
    plain = read(agent, CPU, steps=[{"key": CPU, "timeout_minutes": 1, "gpus": 2}], python_path=["ci", "."])
    assert (plain.image, plain.content, plain.digest, plain.provider, plain.gpus) == ("", "", "", "", 0)
    assert (plain.fork, plain.network, plain.secrets, plain.python_path) == (False, False, (), ("ci", "."))
    assert read(agent, **declared(timeout_minutes=1)).gpus == 0
    assert read(agent, "k-a100", steps=[{"key": "k-a100", "timeout_minutes": 1, "gpus": 2}]).gpus == 2
    assert read(agent, **declared(timeout_minutes=1), digests={"rocm": DIGEST, "cpu": "x"}).digest == DIGEST


@pytest.mark.parametrize(
    ("step", "fits"),
    [
        ({"timeout_minutes": 1}, True),
        ({"timeout_minutes": 180}, True),
        ({"timeout_minutes": 0}, False),
        ({"timeout_minutes": 181}, False),
        ({"timeout_minutes": 1, "gpus": 8}, True),
        ({"timeout_minutes": 1, "gpus": 9}, False),
        ({"timeout_minutes": 1, "gpus": -1}, False),
        ({"timeout_minutes": 1, "secrets": ["PATH"]}, False),
        ({"timeout_minutes": 1, "image": "../x"}, False),
    ],
)
def test_numbers_and_names_of_a_plan_have_bounds(agent, step, fits):
    if fits:
        read(agent, **declared(**step))
        return
    with pytest.raises((RecordsError, DeclarationError)):
        read(agent, **declared(**step))


def test_the_last_record_of_an_image_counts(agent, monkeypatch):
    path = agent.bin / f"artifacts/results/jobs/{BUILDER}/results.jsonl"
    lines = path.read_text().splitlines()
    before = lines[1].replace("ab" * 32, "0" * 64).replace(CONTENT, "d" * 64)
    path.write_text("\n".join([lines[0], before, lines[1]]) + "\n")
    assert agent.run(monkeypatch) == 0
    assert DIGEST in agent.calls("run")[0]


def test_locally_records_lie_beside_the_results(agent, monkeypatch):
    del agent.env["BUILDKITE"]
    records = agent.bin / f"artifacts/results/jobs/{BUILDER}/results.jsonl"
    (agent.checkout / "results/jobs").mkdir()
    shutil.copytree(records.parent, agent.checkout / f"results/jobs/{BUILDER}")
    del agent.env["BUILDKITE_JOB_ID"]
    assert agent.run(monkeypatch) == 0
    (name,) = [word for word in agent.calls("run")[0] if word.startswith("--name=")]
    assert len(name) == len("--name=hilgate-") + 36
    assert agent.run(monkeypatch, KEY, "--recheck") == 0
    shutil.rmtree(agent.results)
    shutil.rmtree(agent.checkout / f"results/jobs/{KEY}.recheck")
    assert agent.run(monkeypatch, KEY, "--recheck") == 3


def test_only_the_records_of_a_job_of_this_build_are_asked_for(agent, monkeypatch):
    assert agent.run(monkeypatch) == 0
    (call,) = (agent.bin / "agent-calls").read_text().splitlines()
    words = call.split()
    assert words[:3] == ["artifact", "download", f"results/jobs/{BUILDER}/results.jsonl"]
    assert words[4:] == ["--step", BUILDER]


@pytest.mark.parametrize(("uid", "expected"), [(0, (65534, 65534)), (1000, (1000, 1001))])
def test_a_container_s_user_is_the_agent_s_and_never_root(monkeypatch, tmp_path, uid, expected):
    changed = []
    monkeypatch.setattr(job.os, "getuid", lambda: uid)
    monkeypatch.setattr(job.os, "getgid", lambda: 1001)
    monkeypatch.setattr(
        job.os, "chown", lambda path, *ids, follow_symlinks: changed.append((path, ids, follow_symlinks))
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").touch()
    (tmp_path / "link").symlink_to("/etc")
    assert job.user() == expected
    job.hand_over(tmp_path)
    ours = {tmp_path, tmp_path / "a", tmp_path / "a/file"}
    assert {path for path, *_ in changed} >= (ours if uid == 0 else set())
    assert all((ids, follow) == (expected, False) for _, ids, follow in changed)
    assert bool(changed) == (uid == 0)


def test_a_job_s_memory_is_its_share_of_the_host(monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 100 * 2**30 // 4096}
    monkeypatch.setattr(job.os, "sysconf", sizes.__getitem__)
    assert [job.memory_gib(*gpus) for gpus in ((0, 0), (0, 8), (8, 8), (2, 8), (1, 8))] == [90, 90, 90, 22, 11]
    sizes["SC_PHYS_PAGES"] = 1024
    assert job.memory_gib(0, 0) == 1


def test_up_to_five_other_results_are_named(agent, monkeypatch, capsys):
    agent.results.mkdir(parents=True)
    for name in "gfedcba":
        (agent.results / name).touch()
    assert agent.run(monkeypatch) == 3
    assert "results already: a, b, c, d, e\n" in capsys.readouterr().err
    shutil.rmtree(agent.results)
    noted = []
    monkeypatch.setattr(job.pause, "note_inside", noted.append)
    for status in (130, 1, 137):
        monkeypatch.setattr(container, "attend", lambda *_, status=status, **__: status)
        assert agent.run(monkeypatch) == status
        assert len(noted) == (status != 130)
        noted.clear()
    assert (agent.checkout / "results/.gitignore").read_text() == "*\n"


def test_a_containers_folders_are_its_own_and_open_to_its_user(agent, monkeypatch):
    seen = {}

    def attend(command, *, env, container, seconds, writes):
        (made,) = [
            word.split("source=")[1].split(",")[0] for word in command if word.endswith("target=/hilgate/results")
        ]
        seen["mode"] = stat.S_IMODE(Path(made).parent.stat().st_mode)
        seen["plan"] = (Path(made).parent / "plan.json").read_text()
        seen["rest"] = (env["HF_TOKEN"], container, seconds, writes == Path(made).parent)
        return 0

    monkeypatch.setattr(container, "attend", attend)
    agent.env["HILGATE_CACHE"] = str(agent.bin / ".." / "bin")
    assert agent.run(monkeypatch) == 0
    assert seen["mode"] == 0o711
    assert seen["plan"] == (agent.checkout / "results/plan.json").read_text()
    assert seen["rest"] == (SECRET, "hilgate-j-1", 180.0, True)


@pytest.mark.parametrize("where", ["/elsewhere", "../elsewhere"])
def test_results_outside_of_the_checkout_are_refused(agent, monkeypatch, capsys, where):
    monkeypatch.chdir(agent.checkout)
    assert job.main([KEY, "--plan", "results/plan.json", "--results", where]) == 3
    assert "outside of the checkout" in capsys.readouterr().err


@pytest.mark.parametrize("digit", ["0", "f"])
def test_both_commits_are_named_in_short(agent, monkeypatch, capsys, digit):
    agent.plan(commit=digit * 40)
    assert agent.run(monkeypatch) == 3
    assert f"the plan is of commit {digit * 12} and {agent.commit[:12]} is checked out\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--plan", "p"], ["--results", "r"]])
def test_a_job_is_told_its_plan_and_where_its_results_go(words, capsys):
    with pytest.raises(SystemExit) as ended:
        job.main([KEY, *words])
    assert ended.value.code == 2
    assert "are required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "of_job"),
    [
        ((0, 0), 0),
        ((0, 1, 0), 1),
        ((6, 1), 1),
        ((0, 6), 6),
        ((6, 4), 6),
        ((4, 0), 4),
        ((0, 75), 75),
        ((0, 5), 5),
        ((5, 75), 75),
        ((1, 75), 1),
        ((6, 75), 6),
        ((4, 5), 4),
        ((1, 130), 130),
    ],
)
def test_a_shared_job_is_a_sick_nodes_only_if_nothing_failed(statuses, of_job):
    """Buildkite runs the whole job again then, and what a step had found would be lost."""
    assert job.status_of_job(statuses) == of_job


SECOND = "kernels-ssd-gfx942"


def two_in_a_job(agent, monkeypatch, *statuses):
    """Run two steps in one job; `statuses` are those of their containers."""
    steps = [{"key": key, "image": "rocm", "timeout_minutes": 1} for key in (KEY, SECOND)]
    agent.plan(steps=[{"key": BUILDER, "provides": "rocm", "timeout_minutes": 1}, *steps])
    agent.docker(
        do="wanted = " + repr(dict(zip((KEY, SECOND), statuses, strict=True))) + "\n"
        "key = next(word.split('=')[2] for word in words if word.startswith('--label=hilgate.step='))\n"
        "(results / 'results.jsonl').write_text(key)\n"
        "behaviour['status'] = wanted[key]\n"
    )
    return agent.run(monkeypatch, KEY, SECOND)


def left_by(agent):
    return {path.parent.name: path.read_text() for path in agent.checkout.glob("results/jobs/*/results.jsonl")}


def test_steps_of_a_job_have_containers_and_results_of_their_own(agent, monkeypatch, capsys):
    assert two_in_a_job(agent, monkeypatch, 1, 0) == 1
    assert left_by(agent) == {KEY: KEY, SECOND: SECOND}
    copies = [word for run in agent.calls("run") for word in run if word.endswith("target=/hilgate/workspace")]
    assert len(set(copies)) == 2
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")] == [
        f"--- {KEY} (1 of 2)",
        f"--- {SECOND} (2 of 2)",
    ]


def test_after_a_sick_node_no_further_step_of_a_job_runs(agent, monkeypatch, capsys):
    assert two_in_a_job(agent, monkeypatch, 75, 0) == 75
    assert left_by(agent) == {KEY: KEY}
    assert f"not run: {SECOND}\n" in capsys.readouterr().err


def test_a_recheck_takes_one_step(agent, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        agent.run(monkeypatch, KEY, SECOND, "--recheck")
    assert "--recheck takes one step" in capsys.readouterr().err


def test_a_recheck_reads_the_records_of_the_shared_job(agent, monkeypatch):
    steps = [{"key": key, "image": "rocm", "timeout_minutes": 1, "job": SECOND} for key in (SECOND, KEY)]
    agent.plan(steps=steps, digests={"rocm": DIGEST})
    earlier = agent.bin / f"artifacts/results/jobs/{KEY}/results.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("earlier\n")
    assert agent.run(monkeypatch, KEY, "--recheck") == 0
    (call,) = (agent.bin / "agent-calls").read_text().splitlines()
    assert call.split()[4:] == ["--step", SECOND]


def test_a_full_disk_is_the_node_s(agent, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "hand_over", full)
    assert agent.run(monkeypatch) == 75
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "words"),
    [("exit 0", "did not arrive: nothing was downloaded"), ("exit 1", "did not arrive: buildkite-agent ended")],
)
def test_records_count_where_the_agent_brought_them(agent, monkeypatch, capsys, ending, words):
    """A file that lies there although the download failed may be half of it."""
    brings = (
        f'mkdir -p "$4/results/jobs/{BUILDER}"; cp "$(dirname "$0")/artifacts/$3" "$4/$3"; ' if "1" in ending else ""
    )
    agent.program("buildkite-agent", f"#!/bin/sh\n{brings}{ending}\n")
    assert agent.run(monkeypatch) == 5
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ('{"kind": "image"}', "KeyError"),
        ("[]", "TypeError"),
        (None, "IsADirectoryError"),
    ],
)
def test_records_that_cannot_be_read_are_no_image(agent, monkeypatch, capsys, text, error):
    agent.env["BUILDKITE"] = ""
    path = agent.checkout / f"results/jobs/{BUILDER}/results.jsonl"
    path.parent.mkdir(parents=True)
    path.mkdir() if text is None else path.write_text(text)
    assert agent.run(monkeypatch) == 5
    assert f"its records cannot be read: {error}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"steps": [{"step": {"key": "a"}, "device": "cpu"}], "digests": []}', "AttributeError"),
    ],
)
def test_what_is_no_plan_says_why(tmp_path, text, error):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RecordsError, match=f"not a plan: {error}: "):
        job.read_plan(tmp_path / "plan.json", "a-cpu")
