# SPDX-License-Identifier: Apache-2.0
"""Old bytecode never runs in the place of its source, whatever size and time the source has."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.plans import hilgate, python, write_repository

from hilgate.errors import CannotRunHereError, Exit
from hilgate.run import leftovers

CODE = """
import os, pathlib
import mod
found = '{"id": "a", "outcome": "pass"}' if mod.x == 1 else '{"id": "a", "outcome": "fail", "message": "m"}'
pathlib.Path(os.environ["HILGATE_OUT"], "findings.jsonl").write_text(found)
raise SystemExit(mod.x != 1)
"""


def write(path, text):
    """With the same time each time, as an unpacked archive has it."""
    path.write_text(text)
    os.utime(path, (1e9, 1e9))


def test_an_edit_of_the_same_size_and_time_is_what_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    write(tmp_path / "mod.py", "x = 1\n")
    root = write_repository(tmp_path, {"a": python(CODE)})
    (root / ".gitignore").write_text("results/\n__pycache__/\n")
    assert hilgate(root, "gate").returncode == Exit.PASS
    time.sleep(0.02)  # the kernel's clock ticks every few milliseconds
    write(root / "mod.py", "x = 2\n")
    assert hilgate(root, "gate").returncode == Exit.FAIL


def compiled(root, text="x = 1\n"):
    root.mkdir(exist_ok=True)
    write(root / "mod.py", text)
    time.sleep(0.02)
    subprocess.run([sys.executable, "-c", "import mod"], cwd=root, check=True, env=os.environ | {"PYTHONPATH": "."})
    (path,) = root.glob("__pycache__/mod.*.pyc")
    return path


def test_bytecode_that_is_newer_than_its_source_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = compiled(tmp_path)
    path.with_name("mod.cpython-39-pytest-9.0.pyc").write_bytes(b"")
    assert leftovers.remove_stale(tmp_path, ["mod.py", "gone.py", "page.md"]) == ()
    time.sleep(0.02)
    write(tmp_path / "mod.py", "x = 2\n")
    assert leftovers.remove_stale(tmp_path, ["mod.py"]) == ("mod.py",)
    assert not list(path.parent.iterdir())


def test_bytecode_that_cannot_be_removed_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    compiled(tmp_path)
    time.sleep(0.02)
    write(tmp_path / "mod.py", "x = 2\n")

    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(CannotRunHereError, match="bytecode that may be of other code cannot be removed"):
        leftovers.remove_stale(tmp_path, ["mod.py"])
