# SPDX-License-Identifier: Apache-2.0
"""What a step is seen to read, in a small repository: children and compiled modules included, what it writes not."""

import contextlib

import pytest
from support.plans import git, python, write_repository

from hilgate.checks import reads
from hilgate.errors import CannotRunHereError, RecordsError

CODE = """
import os, pathlib, subprocess, sys
sys.path.insert(0, 'inside')
import module
open('read.txt').read()
open('read.txt').read()
os.close(os.open('opened.bin', os.O_RDONLY))
open('untracked').read(), open('/etc/hostname').read()
pathlib.Path('written.txt').write_text('x')
if os.fork() == 0:
    open('by the fork').read()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', "open('by_the_child').read()"], check=True)
pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl').write_text('{\"id\": \"a\", \"outcome\": \"OUTCOME\"}')
"""
READ = ("by the fork", "by_the_child", "inside/module.py", "opened.bin", "read.txt")


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "inside").mkdir()
    for name in (*READ, "written.txt", "untouched.txt"):
        (tmp_path / name).write_text("")
    commands = {"good": python(CODE.replace("OUTCOME", "pass")), "bad": python(CODE.replace("OUTCOME", "fail"))}
    (tmp_path / "untracked").write_text("")
    write_repository(tmp_path, commands)
    (tmp_path / ".gitignore").write_text("results/\nuntracked\n")
    git(tmp_path, "rm", "-q", "--cached", "untracked")
    return tmp_path


def test_files_that_a_step_and_its_children_read(repository, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert reads.record(repository, "good") == READ
    # The second run finds the compiled module, which counts as its source.
    assert list((repository / "inside" / "__pycache__").glob("module.*.pyc"))
    assert reads.record(repository, "good") == READ


def test_step_that_does_not_pass_is_not_recorded(repository):
    with pytest.raises(CannotRunHereError, match="did not pass"):
        reads.record(repository, "bad")


def test_command_keeps_what_other_steps_read_and_drops_steps_that_are_gone(repository, capsys):
    (repository / "ci" / "areas" / "samples.yaml").write_text(
        (repository / "ci" / "areas" / "samples.yaml").read_text().replace('"always": true', '"always": false')
    )
    (repository / reads.READS_FILE).write_text('{"bad": ["kept"], "gone": ["dropped"]}')
    with contextlib.chdir(repository):
        assert reads.main(["good"]) == 0
        assert reads.main(["godo"]) == 2
    streams = capsys.readouterr()
    assert streams.out == "good: 5 files\n"
    assert "did you mean 'good'" in streams.err
    assert reads.read(repository / reads.READS_FILE) == {"bad": ("kept",), "good": READ}


@pytest.mark.parametrize("text", ["", "[]", '{"s": "a"}', '{"s": [1]}'])
def test_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "reads.json").write_text(text)
    with pytest.raises(RecordsError):
        reads.read(tmp_path / "reads.json")
    with pytest.raises(RecordsError):
        reads.read(tmp_path / "absent.json")


def test_written_file_is_sorted_and_read_back(tmp_path):
    (tmp_path / "reads.json").write_text(reads.text_of({"b": ["y"], "a": ["x", "z"]}))
    assert list(reads.read(tmp_path / "reads.json").items()) == [("a", ("x", "z")), ("b", ("y",))]
