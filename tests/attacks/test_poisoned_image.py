# SPDX-License-Identifier: Apache-2.0
"""Who: a branch that may push images, or a job that records one. What: the tag of an image is what it is built from;
another image under it would decide what every later build runs in.

What must happen: the default branch believes no tag: what others run in it has built itself (the build of images:
tests/ci/images/test_build.py). Other builds run in what it recorded, by digest, wherever a tag points to and whatever a
job records. A result from another image counts for nothing, and one from the right image does.

A model can bring Python that is run (`modules/transformers_modules` of its cache), so main, its nightly and the merge
queue have a cache that no branch can write.

A source that the image is built from comes by its commit: whatever a forge, a mirror or the engine delivers instead is
refused before it is compiled, and no recipe can name less than a commit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.agent import KEY, Agent
from support.images import ROOT, checkout, git
from support.jobs import DIGEST, GATHER, Jobs, agents_plan, environment, finished, image, passed

from agent_host import job
from hilgate.errors import DeclarationError
from hilgate.images import __main__ as command
from hilgate.images.pins import BUILD_FILE, PINS_FILE, read
from hilgate.model.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hilgate.images.build import ImageBuild

OURS, POISONED = "sha256:" + "a" * 64, "sha256:" + "e" * 64
MAIN = {"BUILDKITE_PIPELINE_DEFAULT_BRANCH": "main", "BUILDKITE_BRANCH": "main", "BUILDKITE_PULL_REQUEST": "false"}
OUR_REPOSITORY = "https://github.com/rocm/hilgate"
BUILDS = {
    "main": (MAIN, True),
    "pull request": ({**MAIN, "BUILDKITE_BRANCH": "evil", "BUILDKITE_PULL_REQUEST": "7"}, False),
    "a fork's branch main": ({**MAIN, "BUILDKITE_PULL_REQUEST": "8"}, False),
    "merge queue": ({**MAIN, "BUILDKITE_BRANCH": "gh-readonly-queue/main/pr-7"}, False),
    "local": ({}, False),
}


QUEUE = {
    "BUILDKITE_BRANCH": "gh-readonly-queue/main/pr-7",
    "BUILDKITE_MERGE_QUEUE_BASE_BRANCH": "main",
    "BUILDKITE_MERGE_QUEUE_BASE_COMMIT": "b" * 40,
}
CACHES = {
    "main": (MAIN, "main"),
    "merge queue": ({**MAIN, **QUEUE}, "main"),
    "a branch called like the queue's": ({**MAIN, "BUILDKITE_BRANCH": QUEUE["BUILDKITE_BRANCH"]}, "branches"),
    "release": ({**MAIN, "BUILDKITE_BRANCH": "release/1.2", "HILGATE_FLOW": "release"}, "main"),
    "release branch in another flow": ({**MAIN, "BUILDKITE_BRANCH": "release/1.2"}, "branches"),
    "branch": ({**MAIN, "BUILDKITE_BRANCH": "evil"}, "branches"),
    "pull request": (
        {**MAIN, "BUILDKITE_PULL_REQUEST": "7", "BUILDKITE_PULL_REQUEST_REPO": OUR_REPOSITORY},
        "branches",
    ),
    "fork": ({**MAIN, "BUILDKITE_PULL_REQUEST": "8"}, "main,readonly"),
    "local": ({}, "branches"),
}


@pytest.mark.parametrize("build", CACHES)
def test_a_branch_writes_no_model_where_main_finds_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str
) -> None:
    env, place = CACHES[build]
    models = tmp_path / "models"
    models.mkdir()
    agent.env |= {**env, "HILGATE_CACHE": str(models)}
    assert agent.run(monkeypatch) == 0
    (run,) = agent.calls("run")
    folder, comma, mode = place.partition(",")
    expected = f"--mount=type=bind,source={models}/{folder},target=/hilgate/cache{comma}{mode}"
    assert [word for word in run if "target=/hilgate/cache" in word] == [expected]
    assert (models / folder).stat().st_uid == job.user()[0], "the container of the step writes there"


@pytest.mark.parametrize("build", BUILDS)
def test_the_default_branch_alone_builds_whatever_the_tag_says(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    env, fresh = BUILDS[build]
    for name in MAIN:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    asked: list[ImageBuild] = []
    monkeypatch.setattr(command, "build", lambda wanted, _: asked.append(wanted) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(["build", "cpu"])
    assert [one.fresh for one in asked] == [fresh]


def test_a_job_runs_in_the_planned_image_whatever_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(tmp_path)
    agent.record(digest=POISONED)
    agent.plan(digests={"rocm": OURS})
    agent.env["HILGATE_REGISTRY"] = "registry.invalid/hilgate"
    assert agent.run(monkeypatch, KEY) == 0
    assert not (agent.bin / "agent-calls").exists(), "nobody is asked"
    assert [call[-1] for call in agent.calls("pull")] == [f"registry.invalid/hilgate/rocm@{OURS}"]
    (run,) = agent.calls("run")
    assert f"registry.invalid/hilgate/rocm@{OURS}" in run
    assert POISONED not in " ".join(run)


@pytest.mark.parametrize(("ran_in", "outcome"), [(DIGEST, Outcome.PASS), (POISONED, Outcome.DID_NOT_RUN)])
def test_a_result_counts_from_the_image_of_the_plan_alone(tmp_path: Path, ran_in: str, outcome: Outcome) -> None:
    jobs = Jobs(tmp_path, agents_plan(digests={"rocm": DIGEST}))
    jobs.job("image-rocm-cpu", image(digest=POISONED))
    jobs.job(GATHER.key, *finished(GATHER, passed(), environment=environment(image=ran_in)))
    assert jobs.ruled().outcome is outcome
    assert jobs.verdict().images == {"rocm": DIGEST}


def another_commit(tree: Path) -> None:
    (tree / "setup.py").write_text("steal()")
    git(tree, "commit", "--quiet", "--all", "--message", "two")


def branch_of_its_name(tree: Path) -> None:
    pinned = git(tree, "rev-parse", "HEAD")
    another_commit(tree)
    git(tree, "update-ref", f"refs/heads/{pinned}", "HEAD")


def another_commit_of_the_submodule(tree: Path) -> None:
    another = checkout(tree.parent / "evil", {"ck.hpp": "steal()"})
    inner = tree / "3rdparty/ck"
    git(inner, "fetch", "--quiet", str(tree.parent / "evil"), another["COMMIT"])
    git(inner, "checkout", "--quiet", another["COMMIT"])


def submodule_of_another_commit_hidden(tree: Path) -> None:
    another_commit_of_the_submodule(tree)
    git(tree, "config", "submodule.3rdparty/ck.ignore", "all")


def submodule_more(tree: Path) -> None:
    git(tree, "submodule", "--quiet", "add", str(tree.parent / "inner"), "3rdparty/more")


def no_submodule(tree: Path) -> None:
    shutil.rmtree(tree / "3rdparty/ck")
    (tree / "3rdparty/ck").mkdir()


def another_file(tree: Path) -> None:
    (tree / "setup.py").write_text("steal()")
    git(tree, "update-index", "--assume-unchanged", "setup.py")


def another_file_of_the_submodule(tree: Path) -> None:
    (tree / "3rdparty/ck/ck.hpp").write_text("steal()")


def file_more(tree: Path) -> None:
    (tree / ".git/info/exclude").write_text("*.so\n")
    (tree / "stolen.so").touch()


def object_of_another_content(tree: Path) -> None:
    """Under the name of the pinned file's blob is another; git's own comparison goes by names."""
    blob, evil = git(tree, "rev-parse", "HEAD:setup.py"), tree / "evil"
    evil.write_text("steal()")
    other = git(tree, "hash-object", "-w", "evil")
    evil.unlink()
    objects = tree / ".git/objects"
    path = objects / blob[:2] / blob[2:]
    path.chmod(0o644)
    path.write_bytes((objects / other[:2] / other[2:]).read_bytes())


def no_git(tree: Path) -> None:
    shutil.rmtree(tree / ".git")


def nothing(_: Path) -> None:
    """An honest tree."""


DELIVERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "honest": (nothing, ""),
    "another commit": (another_commit, "is at commit"),
    "a branch by the name of the commit": (branch_of_its_name, "is at commit"),
    "a submodule of another commit": (another_commit_of_the_submodule, "is not what its commit holds:  M 3rdparty/ck"),
    "a submodule of another commit, hidden": (submodule_of_another_commit_hidden, "is not what its commit holds"),
    "a submodule more": (submodule_more, "is not what its commit holds"),
    "a submodule that was not fetched": (no_submodule, "has no .git"),
    "another file": (another_file, "is not what its commit holds:  M setup.py"),
    "another file of a submodule": (another_file_of_the_submodule, "is not what its commit holds"),
    "a file more": (file_more, "is not what its commit holds: !! stolen.so"),
    "an object of another content": (object_of_another_content, "objects that are not what their hashes say"),
    "no git": (no_git, "has no .git"),
}


def checked(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "docker/scripts/commit.sh"
    return subprocess.run([script, tree, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("what", DELIVERED)
def test_a_source_that_is_not_its_pinned_commit_is_not_compiled(tmp_path: Path, what: str) -> None:
    spoil, complaint = DELIVERED[what]
    inner = checkout(tmp_path / "inner", {"ck.hpp": ""})
    pinned = checkout(tmp_path / "tree", {"setup.py": "build()"}, {"3rdparty/ck": inner})
    spoil(tmp_path / "tree")
    done = checked(tmp_path / "tree", pinned["COMMIT"], pinned["SUBMODULES"])
    assert (done.returncode, complaint in done.stderr) == (3 if complaint else 0, True), done.stderr
    if not complaint:
        assert not list((tmp_path / "tree").rglob(".git"))


@pytest.mark.parametrize("named", ["main", "HEAD", "", "short", "of another submodule", "no submodules", "one more"])
def test_a_check_against_less_than_the_commits_is_none(tmp_path: Path, named: str) -> None:
    inner = checkout(tmp_path / "inner", {"ck.hpp": ""})
    pinned = checkout(tmp_path / "tree", {"setup.py": ""}, {"3rdparty/ck": inner})
    commit, submodules = pinned["COMMIT"], pinned["SUBMODULES"]
    given = {
        "short": (commit[:12], submodules),
        "of another submodule": (commit, f"3rdparty/ck={commit}"),
        "no submodules": (commit, ""),
        "one more": (commit, f"{submodules} 3rdparty/more={commit}"),
    }
    done = checked(tmp_path / "tree", *given.get(named, (named, submodules)))
    assert done.returncode == 3
    assert ("is not the 40 hex digits" in done.stderr) != ("has the submodules" in done.stderr)


@pytest.mark.parametrize(
    "commit", ["main", "v0.1.20.post1", "refs/heads/main", "de07f3885ee5", "HEAD", "12" * 20 + "#x"]
)
def test_the_pins_name_no_branch_and_no_short_commit(tmp_path: Path, commit: str) -> None:
    shutil.copytree(ROOT / "docker/patches", tmp_path / "docker/patches")
    for name in (PINS_FILE, BUILD_FILE):
        shutil.copyfile(ROOT / name, tmp_path / name)
    text = (tmp_path / PINS_FILE).read_text()
    for place in re.findall(r'commit = "[0-9a-f]{40}"', text):
        (tmp_path / PINS_FILE).write_text(text.replace(place, f'commit = "{commit}"'))
        with pytest.raises(DeclarationError, match="must be the 40 hex digits of a commit"):
            read(tmp_path)
