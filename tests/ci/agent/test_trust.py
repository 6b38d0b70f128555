# SPDX-License-Identifier: Apache-2.0
"""Who is a fork, what a fork may not do, and which files nobody from outside may change."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forks import project
from support.plans import git

from agent_host import trust
from hilgate import names
from hilgate.declare.load import load_project
from hilgate.errors import CannotRunHereError, DeclarationError

OURS = "git@github.com:rocm/hilgate.git"
BUILD = {"BUILDKITE": "true", "BUILDKITE_REPO": OURS, "BUILDKITE_PULL_REQUEST": "7"}


@pytest.mark.parametrize(
    "spelling",
    [
        "https://github.com/rocm/hilgate",
        "https://github.com/rocm/hilgate.git",
        "https://github.com/rocm/hilgate/",
        "https://github.com/ROCm/Hilgate.git",
        "http://github.com:80/rocm/hilgate",
        "https://GITHUB.com:443/rocm/hilgate",
        "https://x-access-token:secret@github.com/rocm/hilgate.git",
        "ssh://git@github.com/rocm/hilgate.git",
        "ssh://git@github.com:22/rocm/hilgate",
        "git://github.com/rocm/hilgate.git",
        "git@github.com:rocm/hilgate",
        "git@github.com:/rocm/hilgate.git",
        "github.com:rocm/hilgate",
    ],
)
def test_every_spelling_of_our_repository_is_ours(spelling):
    assert names.repository(spelling) == "github.com/rocm/hilgate"
    assert not names.of_build({**BUILD, "BUILDKITE_PULL_REQUEST_REPO": spelling}).fork


@pytest.mark.parametrize(
    "spelling",
    [
        "https://github.com/mallory/hilgate",
        "https://github.com/rocm/hilgate2",
        "https://github.com/rocm/hilgate/x",
        "https://github.com.evil.example/rocm/hilgate",
        "https://evil.example/github.com/rocm/hilgate",
        "https://github.com:8443/rocm/hilgate",
        "https://github.com@evil.example/rocm/hilgate",
        "https://evil.example/?https://github.com/rocm/hilgate",
        "https://evil.example#@github.com/rocm/hilgate",
        "https://github.com\\@evil.example/rocm/hilgate",
        "https://github.com/mallory/../rocm/hilgate",
        "https://github.com/mallory/%2e%2e/rocm/hilgate",
        "https://github.com//rocm/hilgate",
        "https://github.com/rocm/hilgate.git.git",
        "https://github.com/hilgate",
        "file:///rocm/hilgate",
        "/srv/github.com/rocm/hilgate",
        "https://github.com/rocm/hilgate\n",
        " https://github.com/rocm/hilgate",
        "https://github.com/r\u043ecm/hilgate",
        "https://[::1]/rocm/hilgate",
        "https://",
        "ext::sh -c x",
        "x",
        "-x:y/z",
    ],
)
def test_everything_else_is_a_fork(spelling):
    decided = names.of_build({**BUILD, "BUILDKITE_PULL_REQUEST_REPO": spelling})
    assert (decided.fork, bool(decided.why)) == (True, True)
    # Hosts other than GitHub tell upper from lower case.
    assert names.repository("https://git.example/A/b") != names.repository("https://git.example/a/b")


IS_FORK = {
    "local": ({}, False),
    "declared not": ({"HILGATE_FORK": "0"}, False),
    "declared": ({"HILGATE_FORK": "1"}, True),
    "in a trusted build": ({**BUILD, "HILGATE_FORK": "yes", "BUILDKITE_PULL_REQUEST": "false"}, True),
    "branch": ({**BUILD, "BUILDKITE_PULL_REQUEST": "false"}, False),
    "branch, empty": ({**BUILD, "BUILDKITE_PULL_REQUEST": "false", "BUILDKITE_PULL_REQUEST_REPO": ""}, False),
    "number alone": (BUILD, True),
    "no number": ({**BUILD, "BUILDKITE_PULL_REQUEST": ""}, True),
    "no own": ({"BUILDKITE_PULL_REQUEST_REPO": "https://github.com/a/b"}, True),
    "own empty": ({**BUILD, "BUILDKITE_REPO": "", "BUILDKITE_PULL_REQUEST_REPO": OURS}, True),
    "a part of Buildkite": ({"BUILDKITE_BRANCH": "main"}, True),
}


@pytest.mark.parametrize("build", IS_FORK)
def test_what_is_unknown_is_a_fork(build):
    env, fork = IS_FORK[build]
    assert names.of_build(env).fork is fork


PROJECT = load_project(Path(__file__).parents[3])
SECRET = "hf_0123456789"
AGENT = {
    "PATH": "/bin",
    "HF_TOKEN": SECRET,
    "BUILDKITE_AGENT_ACCESS_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "DOCKER_CONFIG": "/agent/.docker",
    "MY_NEW_SECRET": SECRET,
}


def test_a_step_sees_named_variables_and_forks_see_no_secret():
    kept = trust.environment(AGENT, names.Trust(fork=False, why=""), ("HF_TOKEN", "ABSENT"))
    assert kept == {"PATH": "/bin", "HF_TOKEN": SECRET, "DOCKER_CONFIG": "/agent/.docker"}
    kept = trust.environment(AGENT, names.Trust(fork=True, why=""), ("HF_TOKEN", "MY_NEW_SECRET"))
    assert kept == {"PATH": "/bin", "HILGATE_FORK": "1"}


@given(env=st.dictionaries(st.text(min_size=1), st.just(SECRET)), secrets=st.lists(st.text()))
def test_no_name_brings_a_secret_into_a_fork(env, secrets):
    kept = trust.environment(env, names.Trust(fork=True, why=""), secrets)
    assert set(kept) - {"HILGATE_FORK"} <= trust.KEPT


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "BUILDKITE_AGENT_ACCESS_TOKEN",
        "DOCKER_HOST",
        "GIT_SSH_COMMAND",
        "BASH_ENV",
        "BASH_FUNC_x%%",
        "HIP_VISIBLE_DEVICES",
        "A=B",
        "a b",
        "",
        "-x",
        "A\nB",
        "HILGATE_FORK",
    ],
)
def test_a_secret_is_never_a_variable_that_programs_read(name):
    with pytest.raises(DeclarationError, match="name of a secret"):
        trust.check_secrets([name])


@pytest.mark.parametrize(
    ("path", "on_host"),
    [
        ("ci/hooks/pre-command", True),
        (".buildkite", True),
        ("ci/agent_host/job.py", True),
        ("ci", True),
        ("ci/agents.yaml", True),
        ("docker/build.sh", True),
        ("hilgate/__init__.py", True),
        ("sitecustomize.py", True),
        ("ci/sitecustomize.py", True),
        ("kernels/usercustomize/__init__.py", True),
        ("argparse.py", True),
        ("json/__init__.py", True),
        ("ci/argparse.py", True),
        ("kernels/json.py", True),
        ("evals/socket.so", True),
        ("results", True),
        ("results/plan.json", True),
        (".gitattributes", True),
        (".gitmodules", True),
        ("kernels/pyproject.toml", True),
        ("Makefile", True),
        ("tests", True),
        ("kernels/pagedkv", True),
        ("", True),
        ("ci/areas/x/y.yaml", True),
        ("ci/areas", True),
        (".md/x.py", True),
        ("kernels/pagedkv/attention/paged.py", False),
        ("tests/kernels/test_mla.py", False),
        ("README.md", False),
        ("ci/areas/kernels.yaml", False),
        ("tests/argparse.py", False),
        ("tests/a\nb.py", False),
        ("evals/gates.yaml", False),
        ("benchmarks/run.py", False),
        ("docs/how-to/run-the-gate.md", False),
    ],
)
def test_files_that_agents_execute_outside_of_containers(path, on_host):
    assert names.stays_inside(path, PROJECT.forks_may_change) is not on_host


def changed(theirs, path, move=None):
    """Commit a new file of a fork, or one that moved there."""
    if move:
        git(theirs.theirs, "mv", move, path)
    else:
        theirs.write(path, "new\n")
    theirs.commit()
    return str(theirs.theirs)


@pytest.mark.parametrize(
    ("path", "move", "branch", "words"),
    [
        ("ci/hooks/environment", None, "main", "changes what runs on the agents' hosts"),
        ("agent_host/trust.py", None, "main", "changes what runs on the agents' hosts"),
        ("moved.toml", "src/limits.toml", "main", "changes what runs on the agents' hosts"),
        ("tests/moved.yaml", "ci/agents.yaml", "main", "changes what runs on the agents' hosts"),
        ("tests/\udcff.py", None, "main", "changes what runs on the agents' hosts"),
        ("README.md", None, "", "does not say what it is compared with"),
        ("README.md", None, "gone", "git fetch failed"),
    ],
    ids=["hook", "shadow", "moved out", "moved away", "no UTF-8", "no branch", "branch is gone"],
)
def test_a_fork_that_changes_host_code_or_is_unknown_is_refused(tmp_path, path, move, branch, words):
    theirs = project(tmp_path, **{"ci/project.yaml": "forks_may_change:\n  - src/  # sources\n  - tests/\n"})
    checkout, env = changed(theirs, path, move), theirs.env(BUILDKITE_PIPELINE_DEFAULT_BRANCH=branch)
    with pytest.raises(CannotRunHereError, match=words):
        trust.refuse_changed_hosts(checkout, env)


def test_the_guard_ends_with_the_status_of_its_refusal(tmp_path, monkeypatch, capsys):
    theirs = project(tmp_path)
    monkeypatch.chdir(changed(theirs, "docker/build.sh"))
    for name, value in theirs.env().items():
        monkeypatch.setenv(name, value)
    assert trust.main(["guard"]) == 5
    assert "ask a maintainer to read it" in capsys.readouterr().err
    monkeypatch.setenv("BUILDKITE_PULL_REQUEST_REPO", "")
    monkeypatch.setenv("BUILDKITE_PULL_REQUEST", "false")
    assert trust.main(["guard"]) == 0


FACTS = {
    "PATH": "/usr/bin",
    "BUILDKITE": "true",
    "BUILDKITE_AGENT_ACCESS_TOKEN": "of this job",
    "SPT_NOENV": "1",
    "BUILDKITE_STEP_KEY": "kernels",
    "HILGATE_RENDER_NODES": "renderD128",
    "HTTPS_PROXY": "http://proxy",
}
FORK = {**FACTS, "HILGATE_FORK": "1"}


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "BUILDKITE_API_TOKEN",
        "BUILDKITE_ANALYTICS_TOKEN",
        "BUILDKITE_S3_SECRET_ACCESS_KEY",
        "BUILDKITE_PLUGIN_DOCKER_LOGIN_PASSWORD",
        "HILGATE_API_KEY",
        "SSH_AUTH_SOCK",
        "LD_PRELOAD",
        "BUILDKITEX",
        "anything_else",
        "A" * 200,
    ],
)
def test_what_may_open_something_is_withheld_from_forks_alone(name):
    assert trust.withheld({**FORK, name: "value"}) == [name]
    assert trust.withheld({**FACTS, "BUILDKITE_PULL_REQUEST": "false", name: "value"}) == []


def test_facts_of_the_job_stay_and_unsettable_names_are_hidden():
    assert trust.withheld(FORK) == []
    env = {"BASH_FUNC_which%%": "() { :; }", "a b": "1", "$(reboot)": "1", "OK_1": "1"}
    assert trust.withheld({**FORK, **env}) == ["OK_1"]
