# SPDX-License-Identifier: Apache-2.0
"""The hooks themselves, as the agent runs them: sourced in a wrapper, from a checkout, against a node made of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.nodes import JOB, QUIET, ROOT, FakeNode

HOOKS = ROOT / "ci/hooks"
HOST = ROOT / "ci/agent_host/host.py"
STARTED = "1700000000"

WRAPPER = """\
. "{hook}"
status=$?
echo "after: ${{HILGATE_JOB_ID:-}} ${{HILGATE_JOB_STARTED:-}} ${{SPT_NOENV:-}}"
exit $status
"""
"""What buildkite-agent writes around a hook (internal/job/hook/wrapper.go): sourced, then its environment is taken."""


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """A checkout with the hooks and the package, of which two lines make it look at this node and not the machine."""
    node = FakeNode(tmp_path / "node", "amd_mi355_1")
    shutil.copytree(HOOKS, node.checkout / "ci/hooks")
    shutil.copytree(ROOT / "ci/agent_host", node.checkout / "ci/agent_host")
    (node.checkout / "ci/hilgate").mkdir()
    for name in ("__init__.py", "errors.py", "names.py"):
        shutil.copy(ROOT / "ci/hilgate" / name, node.checkout / "ci/hilgate" / name)
    shutil.copy(ROOT / "ci/agents.yaml", node.checkout / "ci")
    host = node.checkout / "ci/agent_host/host.py"
    text = HOST.read_text()
    for real, fake in (("/proc", node.proc), ("/sys/class/kfd/kfd", node.kfd)):
        assert text.count(f'= Path("{real}")') == 1
        text = text.replace(f'= Path("{real}")', f"= Path({str(fake)!r})")
    host.write_text(text)
    node.program("python3", f'exec "{sys.executable}" "$@"')  # not a link: it would lose the environment, and PyYAML
    node.env["PATH"] = f"{node.bin}:/usr/bin:/bin"
    node.env |= {"PYTHONPATH": "ci", "HILGATE_JOB_STARTED": STARTED}
    return node


def run(node: FakeNode, hook: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = node.proc / str(os.getpid())  # the hook's parent is this process
    own.mkdir(exist_ok=True)
    (own / "stat").write_text(Path("/proc/self/stat").read_text())
    wrapper = node.folder / "wrapper"
    wrapper.write_text(WRAPPER.format(hook=node.checkout / "ci/hooks" / hook))
    return subprocess.run(
        ["/bin/bash", str(wrapper)],
        cwd=node.checkout,
        env={**node.env, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def exported(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stdout.splitlines()[-1].removeprefix("after:").split()


def test_a_fit_node_runs_the_job_with_what_the_hook_exports(node: FakeNode) -> None:
    done = run(node, "pre-command")
    assert (done.returncode, done.stderr) == (0, "")
    assert exported(done) == [JOB, STARTED, "1"]
    assert node.record("before").healthy


def test_the_environment_hook_alone_takes_the_starting_time(node: FakeNode) -> None:
    done = run(node, "environment", HILGATE_JOB_STARTED="9999999999")
    assert abs(int(exported(done)[0]) - time.time()) < 30
    assert run(node, "pre-command", HILGATE_JOB_STARTED="").returncode == 75


def test_an_unfit_node_ends_with_75_and_nothing_is_exported(node: FakeNode) -> None:
    node.log(QUIET + "[  200.000000] amdgpu 0000:75:00.0: amdgpu: GPU reset begin!\n")
    done = run(node, "pre-command")
    assert done.returncode == 75
    assert "after:" not in done.stdout
    assert "unfit: the kernel's log has a line of GPU trouble" in done.stdout
    assert node.agent_calls()[0].startswith("pause --note the kernel's log has a line of GPU trouble")
    assert not node.record("before").healthy


def test_a_wrong_queue_fails_the_job_and_pauses_nothing(node: FakeNode) -> None:
    done = run(node, "pre-command", BUILDKITE_AGENT_META_DATA_QUEUE="default")
    assert done.returncode == 3
    assert "error: nothing is known of the queue 'default'" in done.stderr
    assert "Traceback" not in done.stderr
    assert node.agent_calls() == []


@pytest.mark.parametrize("damage", ["crash", "no python", "no package"])
def test_a_preflight_that_cannot_run_is_an_unfit_node(damage: str, node: FakeNode) -> None:
    if damage == "crash":
        (node.checkout / "ci/agent_host/gpus.py").write_text("raise RuntimeError\n")
    elif damage == "no python":
        (node.bin / "python3").unlink()
        node.program("python3", "exit 127")
    else:
        shutil.rmtree(node.checkout / "ci/agent_host")
    done = run(node, "pre-command")
    assert done.returncode == 75
    assert "the preflight itself ended with status" in done.stdout
    assert node.agent_calls()[0].startswith("pause --note hilgate preflight ended with status")


def test_a_file_of_the_checkout_does_not_shadow_the_package(node: FakeNode) -> None:
    for name in ("hilgate", "json", "subprocess"):
        (node.checkout / f"{name}.py").write_text("raise RuntimeError('the change runs on the host')\n")
    (node.checkout / "sitecustomize.py").write_text("raise RuntimeError('the change runs on the host')\n")
    for env in ({}, {"PYTHONPATH": str(node.checkout), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": "json.py"}):
        assert run(node, "post-checkout", **env).returncode == 0
        assert run(node, "pre-command", **env).returncode == 0


FORK = {
    "BUILDKITE_REPO": "git@github.com:rocm/hilgate.git",
    "BUILDKITE_PULL_REQUEST": "7",
    "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/somebody/hilgate.git",
}


def test_a_forks_job_sees_no_secret_of_its_agent(node: FakeNode) -> None:
    secrets = {"HF_TOKEN": "hf_abc", "BUILDKITE_API_TOKEN": "bkua_abc", "AWS_PROFILE": "ci", "lower": "1"}
    kept = {"HOME": "/var/lib/agent", "BUILDKITE_AGENT_ACCESS_TOKEN": "needed", "BUILDKITE_BRANCH": "main"}
    (node.checkout / "ci/hooks/seen").write_text(f". {node.checkout}/ci/hooks/pre-command\nenv > {node.folder}/env\n")
    assert run(node, "seen", **FORK, **secrets, **kept).returncode == 0
    seen = dict(line.split("=", 1) for line in (node.folder / "env").read_text().splitlines() if "=" in line)
    assert secrets.keys() & seen.keys() == set()
    assert kept.items() <= seen.items()
    assert seen["HILGATE_JOB_ID"] == JOB
    assert run(node, "seen", **secrets, **kept).returncode == 0
    assert "HF_TOKEN=hf_abc" in (node.folder / "env").read_text().splitlines()


def test_a_fork_with_unknown_changes_is_refused_after_checkout(node: FakeNode) -> None:
    assert run(node, "post-checkout").returncode == 0
    done = run(node, "post-checkout", **FORK)
    assert done.returncode == 5
    assert "does not say what it is compared with" in done.stderr
    assert "after:" not in done.stdout


@pytest.mark.parametrize(("name", "status"), [("trust", 3), ("host", 75)])
def test_without_the_guard_nothing_is_built(name: str, status: int, node: FakeNode) -> None:
    (node.checkout / f"ci/agent_host/{name}.py").write_text("raise RuntimeError\n")
    assert run(node, "post-checkout").returncode not in {0, 75}
    # On a fit node too the job ends: what a fork must not see is not known.
    assert run(node, "pre-command").returncode == status
    shutil.rmtree(node.checkout / "ci/hilgate")
    assert run(node, "post-checkout").returncode != 0


@pytest.mark.parametrize("damage", ["none", "sick", "crash", "no package"])
@pytest.mark.parametrize("hook", ["post-command", "pre-exit"])
def test_the_hooks_afterwards_never_fail(hook: str, damage: str, node: FakeNode) -> None:
    if damage == "sick":
        node.program("amd-smi", "exit 1")
    elif damage == "crash":
        (node.checkout / "ci/agent_host/host.py").write_text("raise RuntimeError\n")
    elif damage == "no package":
        shutil.rmtree(node.checkout / "ci/agent_host")
    assert [run(node, hook, BUILDKITE_COMMAND_EXIT_STATUS=status).returncode for status in ("0", "-1")] == [0, 0]


def test_after_the_command_there_is_a_record(node: FakeNode) -> None:
    node.log(QUIET + "[  200.000000] amdgpu 0000:75:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0)\n")
    done = run(node, "post-command")
    record = node.record("after")
    assert record.healthy
    assert len(record.dmesg) == 1
    assert "kernel: [200.000000] amdgpu" in done.stdout


def test_pre_exit_ends_what_is_left_and_spares_its_own_agent(node: FakeNode) -> None:
    """The real /proc: the wrapper and this test's server both carry the job's id."""
    shutil.copy(HOST, node.checkout / "ci/agent_host/host.py")
    env = {**os.environ, "BUILDKITE_JOB_ID": JOB}
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    done = run(node, "pre-exit")
    assert server.wait(5) == -15
    assert f"ended {server.pid} (" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("name", sorted(path.name for path in HOOKS.iterdir() if path.suffix != ".md"))
def test_a_hook_is_short_and_executable(name: str) -> None:
    path = HOOKS / name
    assert os.access(path, os.X_OK)
    assert len(path.read_text().splitlines()) < 30
