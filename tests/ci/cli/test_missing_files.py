# SPDX-License-Identifier: Apache-2.0
"""Files and folders that somebody names and that are not there, or are something else: misuse or an invalid record."""

from __future__ import annotations

import inspect
import os
import shutil
import typing
from pathlib import Path

import pytest
import typer.testing
from support.plans import hilgate, passing, write_repository, writes_findings

import hileval.cli
from hilgate.cli.app import program
from hilgate.cli.builds import builds
from hilgate.errors import Exit

READ = {
    "plan_file of run": "run a-cpu --plan @",
    "plan_file of judge": "judge --plan @",
    "results of judge": "judge --results @",
    "plan_file of recheck": "recheck a-cpu --plan @ --jobs results/steps --results new",
    "jobs of recheck": "recheck a-cpu --plan results/plan.json --jobs @ --results new",
    "plan_file of pipeline": "pipeline --plan @",
    "required of pipeline": "pipeline --plan results/plan.json --required @",
    "results of bundle": "bundle --out new --results @",
    "file of verify_bundle": "verify-bundle @",
    "root of verify_bundle": "verify-bundle results/empty --root @",
    "signature of verify_bundle": "verify-bundle results/empty --signature @",
    "signers of verify_bundle": "verify-bundle results/empty --signers @",
    "wheels of verify_bundle": "verify-bundle results/empty --wheel @",
    "results of add": "history add --results @",
    "history of show": "history show --history @",
    "history of promote": "history promote --history @",
}
"""Parameter and command -> words with the name of something that must be there."""

FOLDERS = {
    "jobs of judge": "judge --jobs @",
    "jobs of pipeline": "pipeline --recheck --plan results/plan.json --jobs @",
    "jobs of add": "history add --jobs @",
    "built of pipeline": "pipeline --plan results/plan.json --built @",
}
"""Options that name a folder which may be missing, because no job left anything."""

WRITTEN = {
    "write of plan": "plan --write @",
    "history of plan": "plan --history @",
    "results of gate": "gate --all --results @",
    "results of run": "run a --results @",
    "results of selftest": "selftest --results @",
    "results of recheck": "recheck a-cpu --plan results/plan.json --jobs results/steps --results @",
    "out of bundle": "bundle --out @",
    "history of add": "history add --history @",
}
"""Options that name something which is made where it is missing."""

MISSING = {"missing": "no/such", "below a file": ".gitignore/x", "empty": "results/empty", "garbage": "results/garbage"}
ODD = {"below a file": ".gitignore/x", "a folder": "results", "no name": "", "a null byte": "a\0b"}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the results of a judged build, and two files that are nothing of it."""
    root = write_repository(tmp_path_factory.mktemp("judged"), {"a": writes_findings(passing())})
    assert hilgate(root, "gate", "--all").returncode == Exit.PASS
    (root / "results/empty").write_bytes(b"")
    (root / "results/garbage").write_bytes(b"\0\xff{")
    return root


def ended(root: Path, words: str, name: str, folder: Path) -> tuple[int, str]:
    """Exit status and errors of a command in a copy of a repository."""
    shutil.copytree(root, folder / "copy")
    done = hilgate(folder / "copy", *(name if word == "@" else word for word in words.split()))
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("parameter", READ)
def test_what_must_be_there_and_is_not_is_misuse_or_invalid(judged, tmp_path, parameter, name):
    status, errors = ended(judged, READ[parameter], MISSING[name], tmp_path)
    assert status in {Exit.MISUSE, Exit.INVALID_DECLARATION}, errors


@pytest.mark.parametrize("name", ["below a file", "garbage"])
@pytest.mark.parametrize("parameter", FOLDERS)
def test_a_file_is_no_folder_of_jobs(judged, tmp_path, parameter, name):
    status, errors = ended(judged, FOLDERS[parameter], MISSING[name], tmp_path)
    assert (status, "this is no folder" in errors) == (Exit.MISUSE, True)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("parameter", READ | FOLDERS | WRITTEN)
def test_no_name_of_a_file_is_a_failure_or_a_bug(judged, tmp_path, parameter, name):
    status, errors = ended(judged, (READ | FOLDERS | WRITTEN)[parameter], ODD[name], tmp_path)
    assert status not in {Exit.FAIL, Exit.BUG}, errors
    assert "Traceback" not in errors


def test_what_is_written_gets_its_folder(judged, tmp_path):
    for words in ("plan --write @", "bundle --out @"):
        status, errors = ended(judged, words, "no/such/file", tmp_path / words.partition(" ")[0])
        assert status == Exit.PASS, errors


@pytest.mark.parametrize("words", ["plan --write @", "bundle --out @"])
def test_a_device_or_a_link_is_not_replaced_by_a_file(judged, tmp_path, words):
    """As root, a plan that was written to /dev/null took its place for every program of the machine."""
    os.mkfifo(tmp_path / "pipe")
    status, errors = ended(judged, words, str(tmp_path / "pipe"), tmp_path / "a")
    assert (status, "this is a device or a pipe" in errors) == (Exit.MISUSE, True)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert ended(judged, words, str(tmp_path / "link"), tmp_path / "b")[0] == Exit.PASS
    assert ((tmp_path / "link").is_symlink(), (tmp_path / "file").is_file()) == (True, True)


@pytest.mark.parametrize("words", ["compare @ results/empty", "compare results/empty @"])
@pytest.mark.parametrize("name", MISSING)
def test_hileval_reads_no_answers_where_there_are_none(judged, monkeypatch, words, name):
    monkeypatch.chdir(judged)
    arguments = [MISSING[name] if word == "@" else word for word in words.split()]
    ended = typer.testing.CliRunner().invoke(hileval.cli.app, arguments)
    assert (ended.exit_code, ended.stderr[:7]) == (Exit.INVALID_DECLARATION, "error: "), ended.output


def takes_a_path(hint: object) -> bool:
    return hint is Path or any(takes_a_path(one) for one in typing.get_args(hint))


def test_every_parameter_that_names_a_file_is_tried():
    found = set()
    for command in [*program.registered_commands, *builds.registered_commands]:
        hints = typing.get_type_hints(command.callback, include_extras=True)
        assert command.callback is not None
        names = [name for name in inspect.signature(command.callback).parameters if takes_a_path(hints[name])]
        found |= {f"{name} of {command.callback.__name__}" for name in names}
    assert found == {*READ, *FOLDERS, *WRITTEN}
