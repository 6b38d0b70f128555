# SPDX-License-Identifier: Apache-2.0
"""Who: whoever set up a clone, often without a thought. What: git is told not to see that a file differs.

What must happen: the bytes of the working tree decide what changed, and the first line says which files git would not
have shown. What git itself writes from a commit's own attributes is no change.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from typing import TYPE_CHECKING

import pytest
from support.plans import git, hilgate, write_repository

from hilgate.errors import Exit
from hilgate.git import fingerprint, inspect

if TYPE_CHECKING:
    from pathlib import Path

TESTS = "import pathlib\ndef test_rows(): assert pathlib.Path('data.csv').read_bytes() == b'1\\n2\\n'\n"
FILES = {
    "data.csv": "1\n2\n",
    "tests/test_rows.py": TESTS,
    "ci/protected.yaml": "rules:\n  - {paths: ['**'], flag: nothing}\n",
    "ci/project.yaml": "quick: [quick]\n",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A green repository whose one test reads a file, and a step that stands for the quick ones."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = {
        "unit": "python -m pytest tests -q -p no:cacheprovider",
        "quick": "python -m pytest tests -q -k nothing",
    }
    root = write_repository(tmp_path, commands, unit={"evidence": "junit"}, quick={"evidence": "junit"})
    git(root, "branch", "-f", "base")
    return root


def breaks(root: Path) -> None:
    (root / "data.csv").write_text("1\n3\n")


def by_a_filter_of_the_clone(root: Path) -> None:
    (root / ".git/info/attributes").write_text("*.csv filter=as-it-was\n")
    git(root, "config", "filter.as-it-was.clean", "git show HEAD:%f")
    breaks(root)


def by_a_filter_of_the_tree(root: Path) -> None:
    (root / ".gitattributes").write_text("*.csv filter=as-it-was\n")
    git(root, "config", "filter.as-it-was.clean", "git show HEAD:%f")
    breaks(root)


def by_the_attribute_text(root: Path) -> None:
    (root / ".git/info/attributes").write_text("*.csv text\n")
    (root / "data.csv").write_bytes(b"1\r\n2\r\n")


def by_autocrlf(root: Path) -> None:
    git(root, "config", "core.autocrlf", "true")
    (root / "data.csv").write_bytes(b"1\r\n2\r\n")


def by_keywords(root: Path) -> None:
    (root / ".git/info/attributes").write_text("*.csv ident\n")
    (root / "data.csv").write_text("1\n2\n$Id: 3 $\n")
    git(root, "commit", "-qam", "with a keyword")
    git(root, "branch", "-f", "base")
    (root / "data.csv").write_text("1\n2\n$Id: 4 $\n")


def by_an_encoding(root: Path) -> None:
    (root / ".git/info/attributes").write_text("*.csv text working-tree-encoding=UTF-16LE\n")
    (root / "data.csv").write_bytes("1\n2\n".encode("utf-16-le"))


def by_assume_unchanged(root: Path) -> None:
    git(root, "update-index", "--assume-unchanged", "data.csv")
    breaks(root)


def by_skip_worktree(root: Path) -> None:
    git(root, "update-index", "--skip-worktree", "data.csv")
    breaks(root)


def by_a_sparse_checkout(root: Path) -> None:
    git(root, "sparse-checkout", "set", "--no-cone", "/*", "!/data.csv")


def by_replacing_the_tree(root: Path) -> None:
    breaks(root)
    git(root, "add", "-A")
    broken = git(root, "write-tree")
    git(root, "replace", git(root, "rev-parse", "base^{tree}"), broken)


def by_replacing_the_blob(root: Path) -> None:
    breaks(root)
    git(root, "replace", git(root, "rev-parse", "base:data.csv"), git(root, "hash-object", "-w", "data.csv"))


def by_replacing_the_commit(root: Path) -> None:
    breaks(root)
    git(root, "add", "-A")
    other = git(root, "commit-tree", git(root, "write-tree"), "-m", "other")
    git(root, "replace", git(root, "rev-parse", "base"), other)


def by_a_graft(root: Path) -> None:
    breaks(root)
    git(root, "commit", "-qam", "broken")
    head, base = git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "base")
    git(root, "branch", "-f", "base", git(root, "commit-tree", f"{base}^{{tree}}", "-p", base, "-m", "newer"))
    (root / ".git/info/grafts").write_text(f"{git(root, 'rev-parse', 'base')} {base} {head}\n")


def by_times_that_are_not_looked_at(root: Path) -> None:
    git(root, "config", "core.checkStat", "minimal")
    git(root, "config", "core.trustctime", "false")
    path = root / "data.csv"
    before = path.stat()
    breaks(root)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


WAYS = [way for name, way in globals().items() if name.startswith("by_")]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_whose_bytes_differ_is_changed(clone: Path, way) -> None:
    way(clone)
    found = inspect(clone, "base")
    assert "data.csv" in (found.files or ()), found


@pytest.mark.parametrize("way", [by_autocrlf, by_a_filter_of_the_clone, by_skip_worktree, by_a_sparse_checkout])
def test_a_step_that_can_notice_runs_and_what_git_hides_is_named(clone: Path, way) -> None:
    way(clone)
    done = hilgate(clone, "gate", "--base", "base")
    assert done.returncode == Exit.FAIL, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "1 of them git does not show (data.csv)" in said
    assert "core.autocrlf" in said


def test_variables_of_a_shell_send_git_to_no_other_repository(clone: Path, monkeypatch, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    git(other, "clone", "-q", str(clone), "clone")
    breaks(clone)
    git(clone, "commit", "-qam", "broken")
    git(other / "clone", "branch", "base")
    for name, value in {"GIT_DIR": ".git", "GIT_INDEX_FILE": "index", "GIT_OBJECT_DIRECTORY": ".git/objects"}.items():
        monkeypatch.setenv(name, str(other / "clone" / value))
    assert inspect(clone, "base").files == ("data.csv",)


@pytest.mark.parametrize("committed", [False, True], ids=["clone", "submodule"])
def test_files_of_a_repository_inside_a_folder_of_this_one_count(clone: Path, committed: bool) -> None:
    inner = clone / "tests/inner"
    git(clone, "init", "-q", str(inner))
    (inner / "conftest.py").write_text("")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    if committed:
        git(clone, "add", "tests/inner")
        git(clone, "commit", "-qm", "submodule")
        git(clone, "branch", "-f", "base")
        assert inspect(clone, "base").files == ()
        assert not inspect(clone, "base").dirty
    before = fingerprint(clone)
    git(inner, "update-index", "--assume-unchanged", "conftest.py")
    (inner / "conftest.py").write_text("collect_ignore_glob = ['*']\n")
    assert inspect(clone, "base").files == ("tests/inner/conftest.py",)
    assert inspect(clone, "base").dirty
    assert fingerprint(clone) != before


# Honest clones.


def test_line_endings_that_the_commit_asks_for_are_no_change(clone: Path) -> None:
    (clone / ".gitattributes").write_text("*.bat text eol=crlf\n*.csv text\n*.txt ident\n")
    (clone / "run.bat").write_text("echo\n")
    (clone / "id.txt").write_text("$Id$\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "for another system")
    git(clone, "branch", "-f", "base")
    for name in ("run.bat", "id.txt"):
        (clone / name).unlink()
        git(clone, "checkout", "--", name)
    assert (clone / "run.bat").read_bytes() == b"echo\r\n"
    found = inspect(clone, "base")
    assert (found.files, found.dirty, found.unseen) == ((), False, ())
    (clone / "run.bat").write_bytes(b"echo 2\r\n")
    assert inspect(clone, "base").files == ("run.bat",)


def test_a_file_stored_elsewhere_is_held_against_its_digest(clone: Path) -> None:
    """Git LFS commits a pointer, and its filter writes the file; here `cat` stands for both."""
    digest = hashlib.sha256(b"1\n2\n").hexdigest()
    (clone / "data.csv").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize 4\n")
    (clone / ".gitattributes").write_text("*.csv filter=lfs -text\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "stored elsewhere")
    git(clone, "branch", "-f", "base")
    pointer = shlex.quote(git(clone, "show", "HEAD:data.csv"))
    git(clone, "config", "filter.lfs.clean", f"printf '%s\\n' {pointer}")
    (clone / "data.csv").write_text("1\n2\n")
    found = inspect(clone, "base")
    assert (found.files, found.dirty) == ((), False)
    breaks(clone)
    assert inspect(clone, "base").files == ("data.csv",)


def test_a_clone_of_another_project_at_the_top_is_one_name(clone: Path) -> None:
    git(clone, "init", "-q", str(clone / "vllm"))
    (clone / "vllm/setup.py").write_text("")
    git(clone / "vllm", "add", "-A")
    git(clone / "vllm", "commit", "-qm", "theirs")
    assert inspect(clone, "base").files == ("vllm/",)
