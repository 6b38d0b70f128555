"""Files of the merge base in place of the change's: there while steps run, and gone afterwards whatever happens."""

from __future__ import annotations

import subprocess

import pytest
from support.plans import IDENTITY

from hilgate.errors import CannotRunHereError
from hilgate.run.results import NOTE, put_back, read_restored

FILES = ("tests/kept.py", "tests/gone.py", "tests/new.py")


@pytest.fixture
def checkout(tmp_path):
    """A change that edits one file, deletes one and adds one; its results folder and its merge base."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    for name in ("kept", "gone"):
        (root / "tests" / f"{name}.py").write_text("old\n")
    for arguments in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "base"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True).stdout
    (root / "tests" / "kept.py").write_text("mine\n")
    (root / "tests" / "gone.py").unlink()
    (root / "tests" / "new.py").write_text("mine\n")
    (tmp_path / "job").mkdir()
    return root, sha.strip(), tmp_path / "job"


def state(root):
    return {path.name: path.read_text() for path in sorted((root / "tests").iterdir())}


def test_the_files_are_the_merge_bases_and_then_the_changes_again(checkout):
    root, sha, job = checkout
    before = state(root)
    with put_back(root, sha, FILES, job):
        assert state(root) == {"gone.py": "old\n", "kept.py": "old\n"}
    assert state(root) == before == {"kept.py": "mine\n", "new.py": "mine\n"}
    assert read_restored(job) == (tuple(sorted(FILES)), "")


def test_an_interrupt_brings_them_back_too(checkout):
    root, sha, job = checkout
    before = state(root)
    with pytest.raises(KeyboardInterrupt), put_back(root, sha, FILES, job):
        raise KeyboardInterrupt
    assert state(root) == before


def test_without_files_nothing_is_noted(checkout):
    root, _, job = checkout
    with put_back(root, "no such commit", (), job):
        pass
    assert not (job / NOTE).exists()
    assert read_restored(job) == ((), "")


def test_a_link_is_replaced_and_not_followed(checkout, tmp_path):
    root, sha, job = checkout
    outside = tmp_path / "outside"
    outside.write_text("precious\n")
    (root / "tests" / "kept.py").unlink()
    (root / "tests" / "kept.py").symlink_to(outside)
    with put_back(root, sha, FILES[:1], job):
        assert (root / "tests" / "kept.py").read_text() == "old\n"
    assert outside.read_text() == "precious\n"


def test_a_folder_that_leads_out_of_the_checkout_stops_the_job(checkout, tmp_path):
    root, sha, job = checkout
    (tmp_path / "elsewhere").mkdir()
    for path in (root / "tests").iterdir():
        path.unlink()
    (root / "tests").rmdir()
    (root / "tests").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotRunHereError, match="leads out of the checkout"), put_back(root, sha, FILES[:1], job):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 5}', '{"files": [5]}', '{"merge_base": "b"}'])
def test_a_note_that_is_none_is_said_to_be(tmp_path, text):
    (tmp_path / NOTE).write_text(text)
    assert read_restored(tmp_path) == ((), "restored.json: not a note of restored files")
