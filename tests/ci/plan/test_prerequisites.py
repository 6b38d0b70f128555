# SPDX-License-Identifier: Apache-2.0
"""What a machine must have: asked of the repository's own command, and of this one's table."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hilgate.errors import CannotRunHereError, DeclarationError, Exit
from hilgate.model.declaration import Project
from hilgate.model.record import Outcome
from hilgate.plan.prerequisites import ask, demand

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "requirements"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import prerequisites

    yield prerequisites
    sys.modules.pop("prerequisites")


def declared(code: str) -> Project:
    return Project(prerequisites=f"python -c {shlex.quote(code)}")


def line(name: str, outcome: str, message: str = "") -> str:
    return f"print('{json.dumps({'id': name, 'outcome': outcome, 'message': message})}');"


def test_a_repository_that_declares_nothing_demands_nothing(tmp_path):
    assert ask(tmp_path, Project()) == ()
    demand(tmp_path, Project())


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    code = line("a", "fail", "a is missing") + line("b", "pass") + line("c", "fail", "c is missing") + "exit(5)"
    assert [check.outcome for check in ask(tmp_path, declared(code))] == [Outcome.FAIL, Outcome.PASS, Outcome.FAIL]
    with pytest.raises(CannotRunHereError, match="2 things") as refused:
        demand(tmp_path, declared(code))
    assert "a is missing; c is missing" in str(refused.value)


@pytest.mark.parametrize(
    "code", ["", "exit(1)", "raise SystemError('no')", "print('words')", line("a", "pass") + "exit(3)", "print('{}')"]
)
def test_a_command_that_does_not_answer_is_invalid(tmp_path, code):
    with pytest.raises(DeclarationError, match="prerequisites"):
        demand(tmp_path, declared(code))


def test_a_program_that_is_not_there_is_an_invalid_declaration(tmp_path):
    with pytest.raises(DeclarationError, match="cannot be asked"):
        ask(tmp_path, Project(prerequisites="no-such-program"))


def test_the_image_has_what_is_asked_for(table):
    packages = tomllib.loads((ROOT / "docker/pins.toml").read_text())["cpu"]["packages"]
    assert {one.debian for one in table.PREREQUISITES} <= set(packages)


def test_versions_of_python_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (FOLDER / "install.sh").read_text()


@pytest.mark.parametrize(
    ("name", "without", "package"),
    [
        ("a C++ compiler (g++)", "_program", "g++"),
        ("git", "_program", "git"),
        ("libnuma.so.1", "_library", "libnuma1"),
        ("Python's ensurepip", "_module", "python3-venv"),
    ],
)
def test_what_is_missing_is_named_with_its_packages(table, monkeypatch, tmp_path, name, without, package):
    made = getattr(table, without)("surely-no-such-thing")
    assert not made()
    found = next(one for one in table.PREREQUISITES if one.name == name)
    monkeypatch.setattr(table, "PREREQUISITES", (dataclasses.replace(found, present=made),))
    (missing,) = [one for one in table.ask(tmp_path, 0) if one.message]
    text = table.report([missing])
    assert f"{name} is missing: {found.why}" in text
    assert f"sudo apt-get install {package}" in text
    assert f"sudo dnf install {found.fedora}" in text


def test_a_home_that_cannot_be_written_is_named(table, monkeypatch):
    monkeypatch.setenv("HOME", "/no/such/home")
    assert table._home() == "/no/such/home cannot be written: set HOME to a folder that can"


def test_a_full_disk_and_a_noexec_temporary_folder_are_named(table, monkeypatch, tmp_path):
    messages = {one.name: one.message for one in table.ask(tmp_path / "not/yet", 10**9)}
    assert f"GB of disk are free in {tmp_path}" in messages["1e+09 GB of disk"]

    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(table.subprocess, "run", refuses)
    assert "cannot run programs (mounted noexec)" in table._temporary_folder()
    monkeypatch.setattr(table.tempfile, "TemporaryDirectory", refuses)
    assert "no temporary folder can be written" in table._temporary_folder()


def test_a_processor_without_avx2_and_another_system_are_refused(table, monkeypatch):
    monkeypatch.setattr(table.Path, "read_text", lambda *_, **__: "processor: 0\nflags : fpu sse4_2\n")
    assert "no AVX2" in table._avx2()
    monkeypatch.setattr(table.platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert "glibc 2.28" in table._platform()
    monkeypatch.setattr(table.platform, "machine", lambda: "aarch64")
    assert "x86-64" in table._platform()


def test_the_command_says_it_all_in_a_second(tmp_path):
    (tmp_path / "make").symlink_to(shutil.which("make"))
    done = subprocess.run(
        [sys.executable, FOLDER / "prerequisites.py"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert "git is missing" in done.stderr
    assert "a C++ compiler (g++) is missing" in done.stderr
    assert "sudo apt-get install git g++ openssh-client\n" in done.stderr


@pytest.mark.parametrize("reply", ["Python 3.10.13", "Python 3.14.0", ""])
def test_another_python_is_refused_in_a_sentence(tmp_path, reply):
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ -n '{reply}' ] || exit 127\n[ \"$1\" != -V ] || {{ echo '{reply}'; exit 0; }}\nexit 1\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        [FOLDER / "install.sh", tmp_path / "venv", python], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == Exit.CANNOT_RUN_HERE
    assert (f"is {reply}" if reply else "does not run") in done.stderr
    assert "make gate PYTHON=python3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("name", ["a place", "a:place"])
def test_a_path_that_torch_cannot_link_below_is_refused(table, tmp_path, name):
    (missing,) = [one for one in table.ask(tmp_path / name, 0) if one.message]
    assert f"{name}', and torch.compile cannot link below a path with a space or a colon" in missing.message
    assert "make gate VENV=FOLDER" in missing.message
