# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a container gets, its command line word by word, and what no input can bring into it."""

from __future__ import annotations

import dataclasses
import os
import signal
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent import topology
from support.plans import alive, wait_for

from agent_host import container, gpus, host
from hilgate.errors import CannotRunHereError, DeclarationError, Exit, HilgateError

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry.invalid/hilgate/rocm@{DIGEST}"
JOB_ID = "01931f3e-7a4b-4c1c-9c1e-0123456789ab"
SECRET = "hf_0123456789"
AGENT = {
    "BUILDKITE": "true",
    "BUILDKITE_JOB_ID": JOB_ID,
    "BUILDKITE_TIMEOUT": "32",
    "HILGATE_JOB_STARTED": "1763700000",
    "HF_TOKEN": SECRET,
    "BUILDKITE_AGENT_ACCESS_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
}
INSIDE = ("python3", "-m", "hilgate", "run", "kernels-mla-gfx942")


def nodes(*names):
    return container.GpuDevices(names, (44, 109) if names else ())


def made(gpus=0, **changes):
    values = {
        "image": IMAGE,
        "job": JOB_ID,
        "step": "kernels-mla-gfx942",
        "command": INSIDE,
        "hostname": "mi300-07",
        "user": "1001:1001",
        "scratch": "/scratch/j",
        "memory_gib": 200,
        "fork": False,
        "network": False,
        "devices": nodes(*(f"/dev/dri/renderD{128 + 8 * n}" for n in range(gpus))),
        "env": AGENT,
    }
    return container.Container(**values | changes)


def golden(*, devices=(), mounts=(), env=(), network="none"):
    options = f"""
        docker run --rm --init --pull=never --log-driver=none --name=hilgate-{JOB_ID}
        --label=hilgate.job={JOB_ID} --label=hilgate.step=kernels-mla-gfx942 --hostname=mi300-07 --user=1001:1001
        --cap-drop=ALL --security-opt=no-new-privileges --ipc=private --cgroupns=private --network={network}
        --memory=200g --memory-swap=200g --pids-limit=16384 --shm-size=16g --ulimit=core=0
    """
    folders = """
        --mount=type=bind,source=/scratch/j/workspace,target=/hilgate/workspace
        --mount=type=bind,source=/scratch/j/results,target=/hilgate/results
        --mount=type=bind,source=/scratch/j/plan.json,target=/hilgate/plan.json,readonly
    """
    last = ["--workdir=/hilgate/workspace", "--entrypoint=", "--stop-timeout=30", IMAGE, *INSIDE]
    return [*options.split(), *devices, *folders.split(), *mounts, *env, *last]


FACTS = ["--env=BUILDKITE=true", f"--env=BUILDKITE_JOB_ID={JOB_ID}", "--env=BUILDKITE_TIMEOUT=32"]
OFFLINE = [
    *FACTS,
    "--env=HF_HUB_OFFLINE=1",
    f"--env=HILGATE_IMAGE={DIGEST}",
    "--env=HILGATE_JOB_STARTED=1763700000",
    "--env=HOME=/tmp",
    "--env=PYTHONPATH=.",
]
CACHED = sorted([*OFFLINE, "--env=HF_HOME=/hilgate/cache/huggingface"])
ONE_GPU = [
    "--device=/dev/kfd:/dev/kfd:rw",
    "--device=/dev/dri/renderD128:/dev/dri/renderD128:rw",
    "--group-add=44",
    "--group-add=109",
]


def test_a_cpu_step_gets_no_device_and_local_images_go_by_digest():
    assert container.command(made()) == golden(env=OFFLINE)
    own_store = [DIGEST if word == IMAGE else word for word in golden(env=OFFLINE)]
    assert container.command(made(image=DIGEST)) == own_store


def test_a_step_with_one_gpu_and_a_declared_secret_and_network():
    given = made(1, network=True, secrets=("HF_TOKEN",), cache="/srv/models")
    assert container.command(given) == golden(
        devices=ONE_GPU,
        mounts=["--mount=type=bind,source=/srv/models,target=/hilgate/cache"],
        env=[*(word for word in CACHED if "OFFLINE" not in word), "--env=HF_TOKEN"],
        network="bridge",
    )


def test_a_step_with_eight_gpus_gets_each_render_node_once():
    nodes = [f"/dev/dri/renderD{minor}" for minor in (128, 136, 144, 152, 160, 168, 176, 184)]
    devices = [f"--device={node}:{node}:rw" for node in ("/dev/kfd", *nodes)]
    assert container.command(made(8)) == golden(devices=[*devices, "--group-add=44", "--group-add=109"], env=OFFLINE)


def test_a_fork_gets_no_secret_no_network_and_a_read_only_cache():
    given = made(1, fork=True, network=True, secrets=("HF_TOKEN",), cache="/srv/models")
    assert container.command(given) == golden(
        devices=ONE_GPU,
        mounts=["--mount=type=bind,source=/srv/models,target=/hilgate/cache,readonly"],
        env=CACHED,
    )


def test_a_fork_has_a_network_where_it_has_no_gpu():
    given = made(fork=True, network=True)
    online = [word for word in OFFLINE if "OFFLINE" not in word]
    assert container.command(given) == golden(env=online, network="bridge")


def test_the_group_of_root_is_not_given_and_a_gibibyte_is_enough():
    devices = container.GpuDevices(("/dev/dri/renderD128",), (44, 0, 109, 44))
    words = container.command(made(devices=devices, memory_gib=1))
    assert [word for word in words if word.startswith("--group-add")] == ONE_GPU[2:]
    assert "--memory=1g" in words


def test_a_recheck_reads_earlier_results_and_cannot_change_them():
    earlier = ["--mount=type=bind,source=/scratch/j/jobs,target=/hilgate/jobs,readonly"]
    assert container.command(made(recheck=True)) == golden(mounts=earlier, env=OFFLINE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "rocm/vllm-dev:latest"}, "by digest"),
        ({"image": f"--privileged@{DIGEST}"}, "by digest"),
        ({"image": DIGEST[:-1]}, "by digest"),
        ({"image": IMAGE + "\n"}, "by digest"),
        ({"command": ()}, "no command"),
        ({"command": ("",)}, "no command"),
        ({"user": "0:0"}, "not root"),
        ({"user": "root"}, "not root"),
        ({"user": "1001:1001 --privileged"}, "not root"),
        ({"job": "../x"}, "job id"),
        ({"job": ""}, "job id"),
        ({"step": "a,b"}, "step key"),
        ({"hostname": "-x"}, "host name"),
        ({"devices": nodes("/dev/dri")}, "render node"),
        ({"devices": nodes("/dev/dri/card0")}, "render node"),
        ({"devices": nodes("/dev/mem")}, "render node"),
        ({"devices": nodes("/dev/dri/renderD128:/dev/sda")}, "render node"),
        ({"devices": nodes("/dev/dri/renderD128", "/dev/dri/renderD128")}, "twice"),
        ({"scratch": "relative"}, "absolute path"),
        ({"scratch": "/"}, "absolute path"),
        ({"scratch": "//"}, "absolute path"),
        ({"cache": "//etc"}, "absolute path"),
        ({"scratch": "/a/../run"}, "never mounted"),
        ({"scratch": "/b/../a"}, "never mounted"),
        ({"scratch": "/a,readonly=false"}, "absolute path"),
        ({"scratch": '/a"'}, "absolute path"),
        ({"scratch": "/a\nb"}, "absolute path"),
        ({"scratch": "/proc/1/root"}, "never mounted"),
        ({"scratch": "/sys"}, "never mounted"),
        ({"cache": "/var/run/docker.sock"}, "never mounted"),
        ({"cache": "/var"}, "never mounted"),
        ({"cache": "/run"}, "never mounted"),
        ({"cache": "/etc/ssl"}, "never mounted"),
        ({"secrets": ("LD_PRELOAD",)}, "name of a secret"),
        ({"memory_gib": 0}, "limit"),
        ({"env": {"HILGATE_JOB_ID": "a\0b"}}, "NUL"),
    ],
    ids=lambda value: next(iter(value)) + "=" + repr(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_what_no_container_gets_is_refused(changes, words):
    with pytest.raises(DeclarationError, match=words):
        container.command(made(**changes))


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "--privileged",
            "--privileged=true",
            "-v=/:/host",
            "--device=/dev/mem",
            "--pid=host",
            "--network=host",
            "x --privileged",
            "a,b",
            "a\n--privileged",
            "/run/docker.sock",
            "/scratch/x",
            IMAGE,
            DIGEST,
            "1:1",
            "k",
        ]
    ),
)
DEVICES = st.builds(
    container.GpuDevices,
    st.lists(st.one_of(st.integers(128, 191).map("/dev/dri/renderD{}".format), HOSTILE), max_size=9).map(tuple),
    st.lists(st.integers(0, 70000), max_size=3).map(tuple),
)
MUTATIONS = {
    "image": HOSTILE,
    "job": HOSTILE,
    "step": HOSTILE,
    "hostname": HOSTILE,
    "user": HOSTILE,
    "scratch": HOSTILE,
    "cache": HOSTILE,
    "devices": DEVICES,
    "fork": st.booleans(),
    "network": st.booleans(),
    "recheck": st.booleans(),
    "command": st.lists(HOSTILE, max_size=4).map(tuple),
    "secrets": st.lists(st.one_of(HOSTILE, st.just("HF_TOKEN")), max_size=2).map(tuple),
    "env": st.dictionaries(
        st.one_of(st.sampled_from(sorted(container.PASSED)), st.text(string.ascii_uppercase, min_size=1)), HOSTILE
    ).map(lambda env: {**AGENT, **env}),
}
ALLOWED = {word.split("=")[0] for word in golden(devices=ONE_GPU, env=OFFLINE) if word.startswith("--")}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_input_adds_an_option_device_mount_or_secret(data):
    names = data.draw(st.sets(st.sampled_from(sorted(MUTATIONS)), max_size=4))
    given = dataclasses.replace(made(1), **{name: data.draw(MUTATIONS[name], label=name) for name in sorted(names)})
    try:
        words = container.command(given)
    except HilgateError:
        return
    place = words.index("--stop-timeout=30") + 1
    options = words[2:place]
    assert words[:2] == ["docker", "run"]
    assert words[place:] == [given.image, *given.command]
    assert {word.split("=", 1)[0] for word in options} <= ALLOWED
    assert [w for w in options if w.startswith("--security-opt")] == ["--security-opt=no-new-privileges"]
    assert [w for w in options if w.startswith("--network=")] in (["--network=none"], ["--network=bridge"])
    devices = {word.removeprefix("--device=").split(":")[0] for word in options if word.startswith("--device=")}
    nodes = given.devices.render_nodes
    assert devices == ({"/dev/kfd", *nodes} if nodes else set())
    mounted = [word.split(",")[1].removeprefix("source=") for word in options if word.startswith("--mount=")]
    of_job = ["workspace", "results", "plan.json", *(["jobs"] if given.recheck else [])]
    assert mounted == [*(f"{given.scratch}/{name}" for name in of_job), *([given.cache] if given.cache else [])]
    assert not any("docker.sock" in word for word in options if word.startswith("--mount="))
    assert SECRET not in " ".join(words)
    if given.fork:
        assert {"--env=HF_TOKEN", "--network=bridge" if nodes else ""}.isdisjoint(options)


@pytest.mark.parametrize(
    ("minors", "mine", "count", "nodes"),
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
def test_a_job_gets_its_agents_gpus_and_no_more_than_it_needs(tmp_path, minors, mine, count, nodes):
    found = container.gpu_devices(count, {gpus.RENDER_NODES: mine}, **topology(tmp_path, minors))
    assert found.render_nodes == tuple(f"/dev/dri/{node}" for node in nodes)
    assert found.groups == ((tmp_path.stat().st_gid,) if nodes else ())


@pytest.mark.parametrize(
    ("minors", "mine", "count", "error", "words"),
    [
        ([], "", 1, host.SickNodeError, "the step needs 1 GPUs and this agent has 0"),
        ([128], "", 2, host.SickNodeError, "the step needs 2 GPUs and this agent has 1"),
        ([128, 136], "renderD136", 2, host.SickNodeError, "the step needs 2 GPUs and this agent has 1"),
        ([128, 136], "", 1, CannotRunHereError, "nothing says which are this agent's"),
        ([128], "renderD136", 1, CannotRunHereError, "renderD136 not among the driver's: renderD128"),
        ([128], "card0", 1, CannotRunHereError, "card0 not among"),
        ([128], "../mem", 1, CannotRunHereError, "../mem not among"),
        ([128], "renderD128 renderD128", 1, CannotRunHereError, "twice"),
    ],
    ids=["no GPU", "one is missing", "mine are too few", "whose?", "not listed", "a card", "a path", "twice"],
)
def test_gpus_that_are_not_there_or_not_ours_are_refused(tmp_path, minors, mine, count, error, words):
    with pytest.raises(error, match=words):
        container.gpu_devices(count, {gpus.RENDER_NODES: mine}, **topology(tmp_path, minors))


def test_gpus_the_driver_withholds_are_not_counted_or_given(tmp_path, monkeypatch):
    places, read_text = topology(tmp_path, [128, 136]), Path.read_text

    def closed(path, **how):
        if path.parts[-2:] == ("2", "properties"):
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, **how)

    monkeypatch.setattr(Path, "read_text", closed)
    assert container.gpu_devices(1, {}, **places).render_nodes == ("/dev/dri/renderD128",)
    with pytest.raises(host.SickNodeError, match="the step needs 2 GPUs and this agent has 1"):
        container.gpu_devices(2, {}, **places)
    with pytest.raises(CannotRunHereError, match="renderD136 not among the driver's: renderD128"):
        container.gpu_devices(1, {gpus.RENDER_NODES: "renderD136"}, **places)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: (root / "dev/dri/renderD136").unlink(), "no device node"),
        (
            lambda root: (root / "kfd/topology/nodes/2/properties").write_text("drm_render_minor many\n"),
            "cannot be read",
        ),
        (lambda root: (root / "kfd/topology/nodes/2/gpu_id").unlink(), "cannot be read"),
    ],
    ids=["no node", "no number", "no id"],
)
def test_a_gpu_that_is_only_half_described_is_a_sick_node(tmp_path, damage, words):
    places = topology(tmp_path, [128, 136])
    damage(tmp_path)
    with pytest.raises(host.SickNodeError, match=words):
        container.gpu_devices(2, {}, **places)


class Attended:
    """Commands that are attended on this host, without Docker; `pid` of what they started is in a file."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.calls, self.answer = folder, [], 0
        monkeypatch.setattr(container, "STOP_SECONDS", 0.5)
        monkeypatch.setattr(container.host, "run", self._docker)

    def _docker(self, words, seconds, **_):
        self.calls.append((list(words), seconds))
        return host.CommandResult("docker", self.answer)

    def __call__(self, script, seconds=30.0, name=None):
        script = f"echo $$ > {self.folder}/pid; {script}"
        return container.attend(
            ["sh", "-c", script], env=dict(os.environ), container=name, seconds=seconds, writes=self.folder
        )

    @property
    def gone(self):
        """Whether the group that the command led has ended."""
        pids = [int(text) for file in self.folder.glob("pid*") for text in file.read_text().split()]
        assert pids
        return not any(alive(pid) for pid in pids)


@pytest.fixture
def attended(tmp_path, monkeypatch):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield Attended(tmp_path, monkeypatch)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.parametrize(
    ("script", "name", "status"),
    [
        ("exit 0", None, 0),
        ("exit 3", "hilgate-j", 3),
        ("kill -9 $$", None, 137),
        ("exit 124", "hilgate-j", 124),
        ("exit 128", "hilgate-j", 128),
        ("exit 125", None, 125),
        ("exit 126", None, 126),
        ("exit 127", None, 127),
    ],
)
def test_a_command_keeps_its_status_and_its_container_is_removed(attended, script, name, status):
    assert attended(script, name=name) == status
    removed = [(["docker", "rm", "--force", "--volumes", name], container.ANSWER_SECONDS)]
    assert attended.calls == (removed if name else [])


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (125, host.SickNodeError, "could not run"),
        (126, CannotRunHereError, "no python3"),
        (127, CannotRunHereError, "no python3"),
    ],
)
def test_statuses_of_docker_itself_blame_no_change(attended, status, error, words):
    with pytest.raises(error, match=words):
        attended(f"exit {status}", name="hilgate-j")


def test_what_outlives_its_time_is_ended_with_its_children(attended):
    with pytest.raises(host.SickNodeError, match="ended after 1 s"):
        attended(f"trap '' TERM; sleep 60 & echo $! > {attended.folder}/pid2; while :; do wait; done", seconds=1)
    wait_for(lambda: attended.gone, 5)
    assert attended.calls == []


def test_what_a_command_left_running_is_ended(attended):
    assert attended(f"sleep 60 & echo $! > {attended.folder}/pid2; exit 4") == 4
    wait_for(lambda: attended.gone, 5)


def test_a_command_is_asked_to_end_before_it_is_killed(attended):
    with pytest.raises(host.SickNodeError):
        attended(f"trap 'echo asked > {attended.folder}/asked; exit' TERM; while :; do sleep 0.1; done", seconds=1)
    assert (attended.folder / "asked").exists()


def test_a_late_container_is_stopped_and_then_removed(attended):
    with pytest.raises(host.SickNodeError):
        attended("exec sleep 60", seconds=0.3, name="hilgate-j")
    stop, remove = attended.calls
    assert stop == (["docker", "stop", "--time=0.5", "hilgate-j"], 0.5 + container.ANSWER_SECONDS)
    assert remove[0][1] == "rm"
    assert attended.gone


@pytest.mark.parametrize("number", ["HUP", "INT", "TERM"])
def test_a_signal_ends_the_command_and_is_named(attended, capsys, number):
    assert attended(f"kill -{number} $PPID; exec sleep 60") == Exit.INTERRUPTED
    assert capsys.readouterr().err == f"ended: SIG{number}\n"
    assert attended.gone


def test_the_first_of_two_signals_is_named(attended, capsys):
    assert attended("kill -HUP $PPID; kill -TERM $PPID; exec sleep 60") == Exit.INTERRUPTED
    assert capsys.readouterr().err == "ended: SIGHUP\n"


@pytest.mark.parametrize(("free", "ended"), [(2**30, False), (2**30 - 1, True)])
def test_a_job_that_fills_its_disk_is_killed_at_once(attended, monkeypatch, free, ended):
    monkeypatch.setattr(container.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    script = f"trap 'echo asked > {attended.folder}/asked' TERM; "
    assert attended("exit 3") == 3  # it has ended already
    (attended.folder / "pid").unlink()
    if not ended:
        assert attended(f"{script} sleep 0.3") == 0
        return
    with pytest.raises(host.SickNodeError, match="less than 1 GiB are free"):
        attended(f"{script} while :; do sleep 0.1; done", name="hilgate-j")
    assert [words[1] for words, _ in attended.calls] == ["rm"]
    assert not (attended.folder / "asked").exists()
    assert attended.gone


def test_a_command_reads_nothing_of_the_agent_s_own_input(attended):
    assert attended("read line && exit 1; exit 0") == 0


def test_a_program_that_is_not_there_cannot_run_here(tmp_path):
    with pytest.raises(CannotRunHereError, match="no-such cannot be started: No such file"):
        container.attend(["/no-such"], env={}, container=None, seconds=1, writes=tmp_path)


def test_images_by_address_are_pulled_those_by_digest_must_exist(attended):
    container.obtain(IMAGE)
    container.obtain(DIGEST)
    container.require_docker()
    assert attended.calls == [
        (["docker", "pull", "--quiet", IMAGE], 3600),
        (["docker", "image", "inspect", "--format", "{{.Id}}", DIGEST], 60),
        (["docker", "version", "--format", "{{.Server.Version}}"], 60),
    ]
    attended.answer = 1
    for call in (lambda: container.obtain(IMAGE), lambda: container.obtain(DIGEST), container.require_docker):
        with pytest.raises(host.SickNodeError, match="docker ended with status 1: no message"):
            call()
