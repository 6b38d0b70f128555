# SPDX-License-Identifier: Apache-2.0
"""What counts as another environment, in which `--resume` continues no run."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import hilgate, python, write_repository

from hilgate.errors import Exit
from hilgate.plan.machine import detect
from hilgate.run import surroundings

CODE = """
import os, pathlib
good = pathlib.Path(os.environ["STATE"]).exists()
found = '{"id": "a", "outcome": "pass"}' if good else '{"id": "a", "outcome": "did not run", "message": "m"}'
pathlib.Path(os.environ["HILGATE_OUT"], "findings.jsonl").write_text(found)
"""


@pytest.mark.parametrize(
    ("env", "ended"), [({}, Exit.PASS), ({"TERM": "dumb"}, Exit.PASS), ({"BAD": "1"}, Exit.INVALID_DECLARATION)]
)
def test_a_run_is_resumed_in_its_own_environment_alone(env, ended, tmp_path):
    state = tmp_path / "state"
    root = write_repository(tmp_path / "clone", {"a": python(CODE)})
    assert hilgate(root, "gate", STATE=str(state)).returncode == Exit.NOTHING_RAN
    state.touch()
    done = hilgate(root, "gate", "--resume", STATE=str(state), **env)
    assert done.returncode == ended, done.stderr
    refused = "the environment changed since these results were recorded" in done.stderr
    assert refused is (ended is not Exit.PASS)


def test_every_variable_counts_but_those_of_a_terminal():
    known = {"PATH": "/usr/bin", "HOME": "/root"}
    digest = surroundings.variables_digest(known)
    terminal = {"TERM": "dumb", "SSH_TTY": "x", "MAKEFLAGS": "-j", "SHLVL": "9"}
    assert surroundings.variables_digest(known | terminal) == digest
    for name in ("PYTEST_ADDOPTS", "TERMINATE_EARLY", "MAKE_IT_FAIL", "LC_ALL", "PATH"):
        assert surroundings.variables_digest(known | {name: "x"}) != digest, name


def importable(site):
    (site / "sitecustomize.py").write_text("")


def record(site):
    (site / "one-1.0.dist-info/RECORD").write_text("one/a.py,sha256=2,9\none/a.so,,\n")


def installed_file(site):
    (site / "one/a.so").write_bytes(b"another library")


@pytest.mark.parametrize("change", [importable, record, installed_file])
def test_what_can_be_imported_counts(change, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one-1.0.dist-info").mkdir()
    (tmp_path / "one/a.so").write_bytes(b"library")
    (tmp_path / "one-1.0.dist-info/RECORD").write_text("one/a.py,sha256=1,9\none/a.so,,\n")
    before = surroundings.installed(tmp_path)
    assert surroundings.installed(tmp_path) == before
    change(tmp_path)
    assert surroundings.installed(tmp_path) != before


def test_a_file_of_the_tree_is_left_to_its_fingerprint(tmp_path):
    (tmp_path / "ours.py").write_text("")
    (tmp_path / "other.py").write_text("")
    tree = {f"{os.path.realpath(tmp_path)}/ours.py"}
    assert surroundings.installed(tmp_path, tree).keys() == {"other.py"}


@pytest.mark.parametrize("what", ["host", "limit", "affinity", "umask", "flags"])
def test_the_machine_and_the_limits_count(what, monkeypatch):
    machine = detect()
    before, text = surroundings.machine_digest(machine), surroundings._text
    assert surroundings.machine_digest(machine) == before
    if what == "host":
        monkeypatch.setattr("socket.gethostname", lambda: "another")
    elif what == "limit":
        monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    elif what == "affinity":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
    else:
        line = {"umask": "Umask:\t0777\n", "flags": "flags : none\n"}[what]
        monkeypatch.setattr(surroundings, "_text", lambda name: line if name.startswith("/proc/") else text(name))
    assert surroundings.machine_digest(machine) != before


def test_arguments_of_make_are_no_part_of_the_environment(tmp_path):
    """`make gate ARGS=--resume` continues `make gate`: make itself tells programs of its command line."""
    root = Path(__file__).parents[3]
    kept = next(line for line in (root / "Makefile").read_text().splitlines() if line.startswith("unexport"))
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    (tmp_path / "Makefile").write_text(f"{kept}\nall:\n\t@{sys.executable} -c '{dump}'\n")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of a `make test`
    plain, given = (
        json.loads(
            subprocess.run(
                ["make", *words], cwd=tmp_path, env=outside, capture_output=True, text=True, check=True
            ).stdout
        )
        for words in ((), ("ARGS=--resume",))
    )
    assert plain != given
    assert surroundings.variables_digest(plain) == surroundings.variables_digest(given)
