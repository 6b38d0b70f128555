# SPDX-License-Identifier: Apache-2.0
"""What the audit hook notes of a Python process and its children: files, folders, and what command lines name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hilgate.run import reads

IMPORTS = "import os, pathlib, shutil, subprocess, sys, tempfile\n"


@pytest.fixture
def root(tmp_path):
    """A folder under test, with a compiled-module folder and files that nothing reads."""
    for name in ("inside/__pycache__/x", "inside/module.py", "ignored/file", "read.txt", "opened.bin", "untouched"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text("")
    return tmp_path / "root"


def notes_of(code: str, root: Path, tmp_path: Path, **env: str) -> tuple[set[str], str]:
    """The notes of a process that runs `code` in `root`, and why they are not all."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    path = os.pathsep.join([reads.record(out, root)[0], *env.values()])
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [sys.executable, "-c", IMPORTS + code]
    subprocess.run(command, cwd=root, env=kept | {"PYTHONPATH": path, "OUT": str(out)}, check=True, timeout=60)
    noted, lost = reads.collect(out)
    return set(noted) - {""}, lost


CODE = """
sys.path.insert(0, 'inside')
import module
open('read.txt').read()
os.close(os.open('opened.bin', os.O_RDONLY))
pathlib.Path('written.txt').write_text('x')
if os.fork() == 0:
    open('ignored/file').read()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, '-c', "open('inside/module.py').read()"], check=True)
"""


def test_a_process_and_its_children_note_what_they_read(root, tmp_path):
    expected = {"inside/module.py", "read.txt", "opened.bin", "ignored/file"}
    for _ in range(2):  # the second run imports the compiled module, which counts as its source
        assert notes_of(CODE, root, tmp_path) == (expected, "")
    assert list((root / "inside/__pycache__").glob("module.*.pyc"))
    assert set((tmp_path / "out" / reads.READS_FILE).read_text().splitlines()) == expected


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("open('ignored/file')", "ignored/file"),
        ("pathlib.Path('/proc/self/cwd/read.txt').read_text()", "read.txt"),
        ("os.listdir('ignored')", "ignored/"),
        ("list(pathlib.Path('ignored').glob('*'))", "ignored/"),
        ("os.link('read.txt', tempfile.mkdtemp() + '/x')", "read.txt"),
        (
            "os.chdir('/'); subprocess.run(['cat', 'read.txt'], cwd=sys.argv[0] and os.environ['OUT'] + '/../root')",
            "read.txt",
        ),
        ("subprocess.run('cat <read.txt; true', shell=True)", "read.txt"),
        ("os.system('cat read.txt')", "read.txt"),
        ("os.posix_spawnp('cat', ['cat', 'read.txt'], os.environ); os.wait()", "read.txt"),
        ("subprocess.run(['dd', 'if=read.txt'], stdout=-3, stderr=-3)", "read.txt"),
        ("subprocess.run(['git', 'show', 'HEAD:read.txt'], cwd='inside', stderr=-3)", "read.txt"),
        ("subprocess.run(['git', '-C', os.getcwd(), 'show', 'HEAD:read.txt'], cwd='/', stderr=-3)", "read.txt"),
        # Nothing is read: an option of git, a name of another folder's file, a written file, a digest, no name at all.
        ("subprocess.run(['git', 'ls-files', '--exclude-per-directory=read.txt'], stdout=-3, stderr=-3)", ""),
        ("subprocess.run(['echo', 'read.txt'], cwd='/', stdout=-3)", ""),
        ("pathlib.Path('ignored/written').write_text('x')", ""),
        ("def bytes_to_compare(): open('read.txt')\nbytes_to_compare()", ""),
        ("try: open('a\\0b')\nexcept ValueError: pass", ""),
        ("os.chdir(d := tempfile.mkdtemp()); os.rmdir(d); subprocess.run(['true'])", ""),
    ],
)
def test_each_kind_of_read_is_noted_once(code, note, root, tmp_path):
    assert notes_of(code, root, tmp_path) == ({note} if note else set(), "")


def test_a_recorder_starts_the_one_that_stands_after_it(root, tmp_path):
    """That of an outer run, whose step reads what the steps of an inner one read."""
    (tmp_path / "outer").mkdir()
    outer, *_ = reads.record(tmp_path / "outer", root)
    assert notes_of("open('read.txt')", root, tmp_path, outer=outer) == ({"read.txt"}, "")
    assert reads.collect(tmp_path / "outer") == ({"", "read.txt"}, "")


@pytest.mark.parametrize("gone", ["lists", ""])
def test_a_note_that_cannot_be_written_is_said(root, tmp_path, gone):
    code = f"shutil.rmtree(os.environ['OUT'] + '/recorder/{gone}'); open('read.txt')"
    assert "not all that it read could be noted" in notes_of(code, root, tmp_path)[1]
