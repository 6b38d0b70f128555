# SPDX-License-Identifier: Apache-2.0
"""What git says about a change, in throw-away repositories."""

import os
import re
import subprocess
import sys

import pytest
from support.plans import git, write_repository

from hilgate.errors import CannotRunHereError, MisuseError
from hilgate.git import (
    Changes,
    clone_at,
    default_base,
    file_at,
    fingerprint,
    inspect,
    no_checkout,
    tracked_files,
    tracks,
)


def commit(root, **files):
    for name, text in files.items():
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "c")


@pytest.fixture
def checkout(tmp_path):
    """main has `old` and `kept`; the branch `work` is one commit ahead of it and main has moved on."""
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, old="a line\n" * 20, kept="k\n")
    git(tmp_path, "checkout", "-q", "-b", "work")
    commit(tmp_path, mine="m\n")
    git(tmp_path, "checkout", "-q", "main")
    commit(tmp_path, theirs="t\n")
    git(tmp_path, "checkout", "-q", "work")
    return tmp_path


def test_tests_in_a_hook_of_git_leave_its_repository_alone(checkout):
    """GIT_DIR is set as under `git bisect run`: these tests make repositories of their own."""
    before = git(checkout, "for-each-ref"), (checkout / ".git/config").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "rename_counts_both"]
    hook = os.environ | {"GIT_DIR": str(checkout / ".git")}
    done = subprocess.run(command, env=hook, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert (git(checkout, "for-each-ref"), (checkout / ".git/config").read_text()) == before


def test_compares_with_the_merge_base_not_with_the_tip(checkout):
    found = inspect(checkout, "main")
    assert (found.files, found.appeared) == (("mine",), ("mine",))
    assert found.merge_base == git(checkout, "rev-parse", "main~1")
    assert not found.dirty
    assert len(found.commit) == 40


def test_rename_counts_both_names(checkout):
    git(checkout, "mv", "old", "new")
    commit(checkout)
    found = inspect(checkout, "main")
    assert found.files == ("mine", "new", "old")
    assert found.appeared == ("mine", "new")


def test_the_working_tree_counts_untracked_and_not_ignored_files(checkout):
    (checkout / ".gitignore").write_text("ignored\n")
    (checkout / "ignored").write_text("")
    (checkout / "ünicode name").write_text("")
    (checkout / "kept").unlink()
    (checkout / "staged").write_text("")
    git(checkout, "add", "staged")
    found = inspect(checkout, "main")
    assert found.dirty
    assert found.files == (".gitignore", "kept", "mine", "staged", "ünicode name")
    assert found.appeared == (".gitignore", "mine", "staged", "ünicode name")


def test_a_non_utf8_name_can_be_opened_and_recorded(checkout):
    name = os.fsdecode(b"odd\xff\n.py")
    (checkout / name).write_text("1")
    assert inspect(checkout, "main").files == ("mine", "odd\\xff\n.py")
    assert name in tracked_files(checkout)
    before = fingerprint(checkout)
    (checkout / name).write_text("2")
    assert fingerprint(checkout) != before


def test_which_folders_hold_tracked_files(checkout, tmp_path_factory):
    (checkout / "results").mkdir()
    (checkout / "results" / "mine").write_text("")
    assert tracks(checkout)
    assert not tracks(checkout / "results")
    assert not tracks(checkout / "none")
    assert not tracks(tmp_path_factory.mktemp("outside"))


@pytest.mark.parametrize("base", ["nope", "origin/main", "--output=x", "main^{tree}", ""])
def test_unknown_base_is_misuse(checkout, base):
    with pytest.raises(MisuseError, match="git knows no commit") as refused:
        inspect(checkout, base)
    assert "(there are: main" in refused.value.remedy


def test_base_without_common_history_is_misuse(checkout):
    git(checkout, "checkout", "-q", "--orphan", "island")
    commit(checkout, alone="x\n")
    with pytest.raises(MisuseError, match="share no history"):
        inspect(checkout, "main")


def test_without_a_base_only_the_state_is_reported(checkout, tmp_path_factory):
    found = inspect(checkout, None)
    assert (found.base, found.files, found.dirty, found.merge_base) == (None, None, False, "")
    (checkout / "copy").mkdir()  # a folder inside another checkout is not that checkout
    for outside in (checkout / "copy", tmp_path_factory.mktemp("outside")):
        assert inspect(outside, None) == Changes("", dirty=False, base=None, files=None)
        with pytest.raises(MisuseError, match="not a git checkout"):
            inspect(outside, "main")


def test_without_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert inspect(checkout, None).commit == ""
    with pytest.raises(CannotRunHereError, match="git is not installed"):
        inspect(checkout, "main")


def test_tracked_files_leave_out_deleted_and_ignored_ones(checkout):
    (checkout / ".gitignore").write_text("ignored\n")
    (checkout / "ignored").write_text("")
    (checkout / "kept").unlink()
    assert tracked_files(checkout) == (".gitignore", "mine", "old")


def test_a_file_is_read_as_a_commit_has_it(checkout):
    head = inspect(checkout, None).commit
    (checkout / "mine").write_bytes(b"\xff\x00 edited")
    commit(checkout)
    assert file_at(checkout, head, "mine") == b"m\n"
    assert file_at(checkout, inspect(checkout, None).commit, "mine") == b"\xff\x00 edited"
    assert file_at(checkout, head, "none") is None
    assert file_at(checkout, head, "") is None


@pytest.mark.parametrize("sha", ["", "HEAD", "main", "--all", "0" * 40, "z" * 40])
def test_a_commit_that_is_not_here_is_not_a_missing_file(checkout, sha):
    with pytest.raises(CannotRunHereError, match="is not in this checkout"):
        file_at(checkout, sha, "mine")


@pytest.fixture
def clone(checkout):
    """A clean clone of `checkout` on its main."""
    git(checkout, "checkout", "-q", "main")
    git(checkout, "clone", "-q", ".", "clone")
    return checkout / "clone"


ORIGIN = ("refs/remotes/origin/main", "")
UNKNOWN = ("", "no default branch to compare with is known (--base HEAD: with the last commit)")


NO_REMOTE = "remote remove origin"
CLONES = {
    "as it was cloned": ([], ORIGIN),
    "detached": (["checkout -q --detach HEAD~1"], ORIGIN),
    "without the remote's HEAD": (["remote set-head origin --delete"], ORIGIN),
    "with an upstream": (["remote add upstream ..", "fetch -q upstream"], ("refs/remotes/upstream/main", "")),
    "another name of the remote": (["remote rename origin theirs"], ("refs/remotes/theirs/main", "")),
    "the remote's HEAD was pruned": (["symbolic-ref refs/remotes/origin/HEAD refs/remotes/origin/trunk"], ORIGIN),
    "no remote": ([NO_REMOTE], UNKNOWN),
    "no remote, on a branch": ([NO_REMOTE, "checkout -q -b work"], ("refs/heads/main", "")),
    "no remote, detached": ([NO_REMOTE, "checkout -q --detach"], UNKNOWN),
    "never fetched": ([NO_REMOTE, "remote add origin .."], UNKNOWN),
    "unborn": (["checkout -q --orphan fresh"], ("", "nothing is committed yet")),
    "unrelated": (["checkout -q --orphan fresh", "commit -qm c"], ("", "origin/main and HEAD share no history")),
}


@pytest.mark.parametrize("name", CLONES)
def test_the_default_branch_is_found_or_nothing_is_compared(clone, name):
    commands, found = CLONES[name]
    for command in commands:
        git(clone, *command.split())
    assert default_base(clone) == found


def test_a_shallow_clone_compares_with_what_it_has(checkout):
    git(checkout, "checkout", "-q", "main")
    url = f"file://{checkout}"
    git(checkout, "clone", "-q", "--depth", "1", "--branch", "main", url, "tip")
    assert default_base(checkout / "tip") == ORIGIN, "the tip itself is in it"
    git(checkout, "clone", "-q", "--depth", "1", "--branch", "work", url, "alone")
    alone = default_base(checkout / "alone")
    git(checkout, "clone", "-q", "--depth", "1", "--no-single-branch", "--branch", "work", url, "both")
    both = default_base(checkout / "both")
    hint = " in this shallow clone (git fetch --unshallow)"
    assert (alone, both) == (
        ("", "no default branch to compare with is known" + hint),
        ("", "origin/main and HEAD share no history" + hint),
    )


def test_the_base_is_shown_as_people_write_it(clone):
    assert inspect(clone, ORIGIN[0]).base == "origin/main"
    git(clone, "tag", "origin/main")  # nothing that bears the same name is taken for it
    (clone / "more").write_text("")
    commit(clone)
    assert inspect(clone, ORIGIN[0]).files == ("more",)


def test_without_git_nothing_is_compared(checkout, monkeypatch, tmp_path_factory):
    assert default_base(tmp_path_factory.mktemp("unpacked")) == ("", "this is no git checkout")
    monkeypatch.setenv("PATH", "")
    assert default_base(checkout) == ("", "git is not installed")


def test_why_git_is_silent_about_a_tree_is_in_its_own_words(clone, monkeypatch, tmp_path_factory):
    assert no_checkout(clone) == ""
    monkeypatch.setattr("hilgate.git._KEPT", ("GIT_TEST_",))  # of git itself, for its own tests
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert re.fullmatch(
        r"git does not take this for a checkout \(fatal: detected dubious ownership .*\)", no_checkout(clone)
    )
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    (clone / ".git").rename(clone / "git")
    assert no_checkout(clone) == "this is no git checkout"
    unpacked = tmp_path_factory.mktemp("unpacked")
    with pytest.raises(CannotRunHereError, match="this is no git checkout") as raised:
        tracked_files(unpacked)
    assert raised.value.remedy == "clone the repository, or run `git init && git add --all` here"
    monkeypatch.setenv("PATH", str(unpacked))
    assert no_checkout(clone) == "git is not installed"


def test_bytecode_that_python_writes_is_no_change(tmp_path):
    """Python writes it while a step runs, in repositories that ignore it and in others; sources beside it count."""
    git(tmp_path, "init", "-q")
    (tmp_path / "package/__pycache__").mkdir(parents=True)
    (tmp_path / "package/one.py").write_text("")
    before = fingerprint(tmp_path)
    (tmp_path / "package/__pycache__/one.cpython-311.pyc").write_bytes(b"code")
    assert fingerprint(tmp_path) == before
    (tmp_path / "package/__pycache__/conftest.py").write_text("")
    assert fingerprint(tmp_path) != before


def test_a_shallow_checkout_is_cloned_at_one_of_its_commits(tmp_path):
    """`git clone --shared` refuses a shallow checkout, and agents may have one."""
    source, shallow, tree = (tmp_path / name for name in ("source", "shallow", "tree"))
    write_repository(source, {"a": "true"})
    git(source, "commit", "--allow-empty", "-qm", "second")
    git(tmp_path, "clone", "-q", "--depth", "1", source.as_uri(), str(shallow))
    head = git(shallow, "rev-parse", "HEAD")
    clone_at(shallow, head, tree)
    assert git(tree, "rev-parse", "HEAD") == head
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "for-each-ref", "--format=%(objectname)", "refs/remotes/origin") == head
    assert (tree / "ci/areas/samples.yaml").is_file()
