# SPDX-License-Identifier: Apache-2.0
"""What the audit hook notes of a Python process and its children: files, folders, connections, git commands."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hilgate import pytest_recorder

SYSTEM = ("/bin/", "/dev/", "/etc/", "/lib/", "/lib64/", "/proc/", "/sys/", "/usr/")
START = """

watch({folder!r}, {root!r}, {held!r}, {began!r})
"""
IMPORTS = "import os, pathlib, shutil, socket, subprocess, sys, tempfile\n"


@pytest.fixture
def root(tmp_path):
    """A folder under test, with a compiled-module folder and files that nothing reads."""
    for name in ("inside/__pycache__/x", "inside/module.py", "ignored/file", "read.txt", "opened.bin", "untouched"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text("")
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path):
    """A folder, a file in it, a service and a socket that are there before the process starts."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("x")
    server, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    with server, local:
        local.bind(str(tmp_path / "out/socket"))
        local.listen()
        yield {"OUT": str(tmp_path / "out"), "PORT": str(server.getsockname()[1])}


def notes_of(code: str, root: Path, tmp_path: Path) -> tuple[set[str], bool]:
    """The notes of a process that runs `code` in `root`, and whether all of them could be written."""
    site = tmp_path / "site"
    (site / "lists").mkdir(parents=True, exist_ok=True)
    time.sleep(0.02)  # times of files have the grain of the kernel's clock: what was there is older by more
    (site / "whole").touch()
    (tmp_path / "tmp").mkdir(exist_ok=True)
    held = (*SYSTEM, *(f"{Path(one).resolve()}/" for one in (sys.prefix, sys.base_prefix, site, *sys.path) if one))
    began = (site / "whole").stat().st_ctime_ns
    start = START.format(folder=str(site), root=str(root.resolve()), held=held, began=began)
    (site / "sitecustomize.py").write_text(Path(pytest_recorder.__file__).read_text(encoding="utf-8") + start)
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    env |= {"PYTHONPATH": str(site), "TMPDIR": str(tmp_path / "tmp"), "SITE": str(site)}
    subprocess.run([sys.executable, "-c", IMPORTS + code], cwd=root, env=env, check=True, timeout=60)
    lists = (path.read_bytes().split(b"\0") for path in (site / "lists").glob("*"))
    return {os.fsdecode(note) for notes in lists for note in notes if note}, (site / "whole").exists()


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
        notes, whole = notes_of(CODE, root, tmp_path)
        assert {note for note in notes if not note.endswith("/")} == expected
        assert whole
    assert list((root / "inside/__pycache__").glob("module.*.pyc"))


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("open('OUT/file')", "OUT/file"),
        ("os.listdir('OUT')", "OUT/"),
        ("list(os.scandir('OUT'))", "OUT/"),
        ("sys.path.insert(0, 'OUT')\ntry:\n import absent\nexcept ImportError: pass\n", "OUT/"),
        ("subprocess.run([sys.executable, '-c', 'open(\"OUT/file\")'], cwd='/')", "OUT/file"),
        ("open('ignored/file')", "ignored/file"),
        ("os.listdir('ignored')", "ignored/"),
        ("socket.create_connection(('127.0.0.1', PORT))", "tcp://127.0.0.1:PORT"),
        ("socket.socket(socket.AF_UNIX).connect('OUT/socket')", "OUT/socket"),
        ("s = socket.socket(); s.settimeout(0.01); s.connect_ex(('192.0.2.1', 80))", "tcp://192.0.2.1:80"),
        ("subprocess.run(['git', 'tag'], stderr=-3)", "git://tag"),
        (
            "subprocess.run(['git', '-c', 'a.b=c', '-C', os.getcwd() + '/inside', 'log'], cwd='/', stderr=-3)",
            "git://log",
        ),
        # Of the process itself, of the system, of the environment, or nothing is sent.
        ("subprocess.run(['git', '--version'])", ""),
        ("subprocess.run(['git', 'init', '-q', tempfile.mkdtemp()], cwd='/')", ""),
        ("socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 80))", ""),
        ("import json.tool; open('/etc/hostname'); os.listdir('/usr/lib')", ""),
        ("p = pathlib.Path(tempfile.mkdtemp(), 'own'); p.write_text('x'); p.read_text(); os.listdir(p.parent)", ""),
        ("pathlib.Path('ignored/written').write_text('x')", ""),
    ],
)
def test_each_kind_of_read_is_noted_once(code, note, root, outside, tmp_path):
    for name, value in outside.items():
        code, note = code.replace(name, value), note.replace(name, value)
    notes, whole = notes_of(code, root, tmp_path)
    assert notes == ({note} if note else set())
    assert whole


def test_a_note_that_cannot_be_written_is_said(root, tmp_path):
    """Without a whole list nobody may rest on it: the mark `whole` goes."""
    notes, whole = notes_of("shutil.rmtree(os.environ['SITE'] + '/lists'); open('read.txt')", root, tmp_path)
    assert (notes, whole) == (set(), False)
