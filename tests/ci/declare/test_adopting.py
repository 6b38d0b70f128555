# SPDX-License-Identifier: Apache-2.0
"""The page for adopters, executed: another repository is planned, gated and piped as the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import shown
from support.pipelines import DECLARED
from support.plans import git, hilgate

from agent_host import health, trust
from hilgate.buildkite.lint import lint_files
from hilgate.declare.init import flow
from hilgate.declare.load import load
from hilgate.errors import CannotRunHereError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/adopt.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
OTHERS = {
    "acme/__init__.py": "",
    "acme/layout.py": "def blocks(tokens, size):\n    return -(-tokens // size)\n",
    "tests/test_layout.py": "from acme.layout import blocks\n\n\ndef test_blocks():\n    assert blocks(17, 16) == 2\n",
    "csrc/ops.cpp": "int main() { return 0; }\n",
    "docker/acme-rocm.Dockerfile": "FROM rocm/pytorch\n",
}


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-qm", "more")


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    """The page's repository, before hilgate."""
    root = tmp_path_factory.mktemp("acme")
    sources = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
    for name, text in {**OTHERS, **sources}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    for key, value in (("user.name", "samples"), ("user.email", "samples@example.invalid")):
        git(root, "config", key, value)
    commit(root)
    return root


def run(root, line):
    words = shlex.split(line)
    if words[0] == "hilgate":
        return hilgate(root, *words[1:], COLUMNS="120", PYTHONDONTWRITEBYTECODE="1")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # as with the environment activated
    env = os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["bash", "-c", line], cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def adopted(acme):
    """The repository after every command of the page, each compared with what the page says."""
    assert shown.run(PAGE, acme, how=run) == []
    return acme


@pytest.mark.timeout(300)
def test_every_command_of_the_page_prints_what_the_page_says(adopted):
    assert (adopted / "results/report.html").is_file()
    assert git(adopted, "status", "--porcelain") == "M acme/ops.py", "results are no change"
    again = hilgate(adopted, "plan", "--base", "main")
    assert "acme/ops.py changed, imported by tests/test_ops.py" in again.stdout


def test_a_second_init_overwrites_nothing(adopted, tmp_path):
    before = git(adopted, "status", "--porcelain")
    assert hilgate(adopted, "init").stdout.count("kept ") == 7
    assert git(adopted, "status", "--porcelain") == before
    for prepare, words in ((lambda: None, "no test"), (lambda: git(tmp_path, "init", "-q"), "git lists no file")):
        prepare()
        refused = hilgate(tmp_path, "init")
        assert refused.returncode == 2
        assert words in refused.stderr or "git checkout" in refused.stderr


def test_a_step_asks_for_the_packages_that_its_test_reaches(adopted):
    declared = {step.key: step.packages for _, step in load(adopted).steps()}
    assert declared["ops"] == ("pytest", "torch", "triton"), "triton is imported by acme/ops.py alone"
    assert declared["layout"] == ("pytest",)
    assert (adopted / ".gitignore").read_text() == "__pycache__/\n"


def test_what_is_about_other_kernels_says_so_in_a_line(adopted):
    for words in (["explain-kernel"], ["selftest"]):
        done = hilgate(adopted, *words)
        assert done.returncode in (2, 5)
        assert "a bug in hilgate" not in done.stderr
    bug = {"id": "a", "title": "t", "source": "s", "symptom": "s", "turns_red": "ops", "expect": "x"}
    (adopted / "tests/bugs/a").mkdir(parents=True)
    (adopted / "tests/bugs/a/bug.yaml").write_text(yaml.safe_dump(bug))
    assert "no kernels to plant bugs in" in hilgate(adopted, "selftest").stderr
    (adopted / "tests/bugs/a/bug.yaml").unlink()


def test_its_flow_agrees_with_the_declaration_and_our_template(adopted):
    names = ("pipeline.yml", "approve.yml")
    theirs = {name: (adopted / ".buildkite" / name).read_text() for name in names}
    assert lint_files(theirs, load(adopted)) == []
    foreign = " ".join(lint_files(theirs, DECLARED))
    assert "lets ['hilgate-approvers'] approve, and not rocm-gate-owners" in foreign
    assert "rocm/required is posted by verdict" in foreign
    for name in names:
        assert (ROOT / ".buildkite" / name).read_text(encoding="utf-8") == flow(name, DECLARED)


def test_its_hosts_know_its_queues_and_nobody_elses(adopted):
    own = {"HILGATE_REPOSITORY": str(adopted)}
    promise = health.promised({**own, health.QUEUE: "acme-mi300"})
    assert (promise.gpus, promise.arch, promise.memory_gib) == (1, "gfx942", 192)
    with pytest.raises(Exception, match="known are cpu, acme-mi300"):
        health.promised({**own, health.QUEUE: "amd_mi300_1"})


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("acme/ops.py", False),
        ("docker/acme-rocm.Dockerfile", True),
        ("ci/hooks/environment", True),
        ("ci/project.yaml", True),
        ("conftest.py", True),
    ],
)
def test_a_fork_of_its_sources_is_planned_one_of_its_hosts_not(adopted, tmp_path, path, refused):
    git(tmp_path, "clone", "-q", str(adopted), "theirs")
    theirs = tmp_path / "theirs"
    (theirs / path).parent.mkdir(parents=True, exist_ok=True)
    text = "forks_may_change: [ci/, json/, docker/]\n" if path == "ci/project.yaml" else "# theirs\n"
    (theirs / path).write_text(text + ((theirs / path).read_text() if path.endswith("ops.py") else ""))
    commit(theirs)
    env = {
        "BUILDKITE_REPO": str(adopted),
        "BUILDKITE_PULL_REQUEST": "7",
        "BUILDKITE_PULL_REQUEST_REPO": str(theirs),
        "BUILDKITE_PULL_REQUEST_BASE_BRANCH": "main",
        "BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main",
        "HILGATE_REPOSITORY": str(adopted),
    }
    if refused:
        with pytest.raises(CannotRunHereError, match="changes what runs on the agents' hosts"):
            trust.refuse_changed_hosts(str(theirs), env)
        return
    assert "none of its 1 changed files" in trust.refuse_changed_hosts(str(theirs), env)
    planned = hilgate(theirs, "plan", "--profile", "pr", "--base", "origin/main", "--json", HILGATE_FORK="1")
    assert planned.returncode == 0
    assert '"fork": true' in planned.stdout


def test_a_source_folder_is_importable_and_equal_test_names_kept(tmp_path):
    for name in ("src/acme/__init__.py", "src/acme/ops.py", "tests/a/test_ops.py", "a/test_ops.py", "json/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from acme import ops\n" if "test" in name else "")
    git(tmp_path, "init", "-q")
    assert hilgate(tmp_path, "init").returncode == 0
    declared = load(tmp_path)
    assert declared.project.python_path == ("src", ".")
    assert declared.project.forks_may_change == ("a/", "src/", "tests/"), "json/ could stand before Python's own"
    assert sorted(step.imports for _, step in declared.steps()) == [("a/test_ops.py",), ("tests/a/test_ops.py",)]
    git(tmp_path, "config", "user.name", "samples")
    git(tmp_path, "config", "user.email", "samples@example.invalid")
    commit(tmp_path)
    (tmp_path / "src/acme/ops.py").write_text("x = 1\n")
    assert (
        "src/acme/ops.py changed, imported by a/test_ops.py"
        in hilgate(tmp_path, "plan", "--base", "HEAD", COLUMNS="120").stdout
    )
