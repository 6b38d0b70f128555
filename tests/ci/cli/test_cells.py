"""Tables on the command line: printed, written by every command alike, and a part of one run by its labels."""

from __future__ import annotations

import json

import pytest
import typer
from support.plans import hilgate, passing, write_repository, writes_findings

from hilgate.cli.app import program
from hilgate.cli.cells import split
from hilgate.errors import Exit
from hilgate.model import RUN_OPTIONS

TESTS = """
import os, pytest
CELLS = [(fruit, way) for fruit in ("fig", "kiwi") for way in ("cut", "peel")]
@pytest.mark.parametrize(("fruit", "way"), CELLS)
def test_cell(fruit, way, record_property):
    record_property("fruit", fruit)
    record_property("way", way)
    record_property("max_abs_err", 0.25)
    if (fruit, way) == ("kiwi", "peel"):
        pytest.skip("did not run here: no peeler")
    assert (fruit, way) != ("fig", "cut") or not os.path.exists("rotten"), "rotten"
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--fruit", action="append")
    parser.addoption("--way", action="append")
def pytest_collection_modifyitems(config, items):
    asked = {name: config.getoption(name) for name in ("fruit", "way")}
    items[:] = [i for i in items if all(not v or i.callspec.params[n] in v for n, v in asked.items())]
"""
GRID = {"evidence": "junit", "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        "matrix": {"rows": "fruit", "columns": "way", "file": "cells.json"}}  # fmt: skip
COMMANDS = {"other": writes_findings(passing()), "grid": "python -m pytest tests -q -p no:cacheprovider"}


@pytest.fixture
def toys(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cells.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    return write_repository(tmp_path, COMMANDS, grid=GRID)


def cells(folder):
    found = json.loads((folder / "cells.json").read_text())
    return {(one["fruit"], one["way"]): one["outcome"] for one in found}


def command(folder):
    return {
        one["step"]["key"]: one["step"]["command"] for one in json.loads((folder / "plan.json").read_text())["steps"]
    }


def test_run_prints_the_table_and_a_green_gate_one_line_of_it(toys):
    done = hilgate(toys, "run", "toys")
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stdout.endswith(
        "\ngrid-cpu: 3 passed, 0 failed, 1 not run\n      cut  peel\nfig   ✓    ✓\nkiwi  ✓    ○\n"
        "○ peel: kiwi: did not run here: no peeler\ntable: results/run/cells.json\n"
    )
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    gate = hilgate(toys, "gate").stdout
    assert gate.endswith("grid-cpu: 3 passed, 0 failed, 1 not run\ntable: results/cells.json\n")
    assert "kiwi  ✓" not in gate
    (toys / "rotten").touch()
    assert "\nfig   ✗    ✓\n" in hilgate(toys, "gate").stdout


def test_every_command_writes_the_same_file_with_its_verdict(toys):
    hilgate(toys, "gate")
    path = toys / "results" / "cells.json"
    first = path.read_bytes()
    assert cells(toys / "results") == {
        ("fig", "cut"): "pass", ("fig", "peel"): "pass", ("kiwi", "cut"): "pass", ("kiwi", "peel"): "did not run",
    }  # fmt: skip
    for name in ("judge", "report"):
        path.unlink()
        hilgate(toys, name)
        assert path.read_bytes() == first


def test_no_table_outlives_its_verdict(toys):
    hilgate(toys, "gate")
    path = toys / "results" / "cells.json"
    first = path.read_bytes()
    hilgate(toys, "gate", "--steps", "other")
    assert not path.exists()
    assert (toys / "results" / "previous" / "cells.json").read_bytes() == first
    hilgate(toys, "gate")
    records = toys / "results" / "results.jsonl"
    records.write_bytes(records.read_bytes()[:-20])
    assert hilgate(toys, "judge").returncode == Exit.INVALID_DECLARATION
    assert not path.exists()


def test_a_step_without_evidence_leaves_no_table_that_looks_whole(toys):
    (toys / "tests" / "conftest.py").write_text("import os; os._exit(7)")
    done = hilgate(toys, "run", "grid")
    assert done.returncode == Exit.NOTHING_RAN
    assert "○ not the whole table: exit 7" in done.stdout
    assert cells(toys / "results" / "run") == {(None, None): "did not run"}


def test_jobs_of_agents_leave_tables_and_the_judge_one_of_all(toys):
    hilgate(toys, "plan", "--write", "results/plan.json")
    judge = ("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    hilgate(toys, *judge)
    assert cells(toys / "results") == {(None, None): "did not run"}
    hilgate(toys, "run", "grid-cpu", "--plan", "results/plan.json", "--results", "results/jobs/grid-cpu")
    hilgate(toys, *judge)
    of_job = (toys / "results" / "jobs" / "grid-cpu" / "cells.json").read_bytes()
    assert (toys / "results" / "cells.json").read_bytes() == of_job


@pytest.mark.parametrize(
    ("options", "added", "found"),
    [
        (("--fruit", "fig"), "--fruit fig", {("fig", "cut"), ("fig", "peel")}),
        (("--way=cut", "--fruit", "fig"), "--way cut --fruit fig", {("fig", "cut")}),
        (("--fruit", "fig", "--fruit", "kiwi", "--", "-k", "cut"), "--fruit fig --fruit kiwi -k cut",
         {("fig", "cut"), ("kiwi", "cut")}),
    ],
)  # fmt: skip
def test_a_part_is_run_by_its_labels_and_says_so(toys, options, added, found):
    done = hilgate(toys, "run", "toys", *options)
    assert done.returncode == Exit.PASS, done.stderr
    assert f"a part of grid-cpu, not the whole step: {added}" in done.stderr
    assert command(toys / "results" / "run") == {"grid": f"{COMMANDS['grid']} {added}"}
    assert set(cells(toys / "results" / "run")) == found


def test_what_a_part_needs_runs_whole(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cells.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    root = write_repository(tmp_path, COMMANDS | {"last": COMMANDS["other"]}, grid=GRID | {"needs": ["other"]})
    done = hilgate(root, "run", "toys", "--fruit", "fig")
    assert done.returncode == Exit.PASS, done.stderr
    assert command(root / "results" / "run") == COMMANDS | {"grid": f"{COMMANDS['grid']} --fruit fig"} | {
        "other": COMMANDS["other"]
    }


def test_the_line_that_a_failing_cell_prints_repeats_it(toys):
    (toys / "rotten").touch()
    line = "hilgate run grid-cpu --fruit fig --way cut"
    assert f"reproduce: {line}\n" in hilgate(toys, "gate").stdout
    done = hilgate(toys, *line.split()[1:])
    assert done.returncode == Exit.FAIL
    assert cells(toys / "results" / "run") == {("fig", "cut"): "fail"}
    assert f"reproduce: {line}\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("toys", "--friut", "fig"), "did you mean '--fruit'"),
        (("toys", "--resluts", "x"), "did you mean '--results'"),
        (("toys", "--fruit"), "--fruit needs a value"),
        (("toys", "--fruit="), "--fruit needs a value"),
        (("other", "--fruit", "fig"), "such a table has: grid"),
        (("grid-cpu", "--plan", "results/plan.json", "--fruit", "fig"), "leave out --plan"),
    ],
)
def test_misuse_is_answered_with_a_remedy(toys, arguments, message):
    hilgate(toys, "plan", "--write", "results/plan.json")
    done = hilgate(toys, "run", *arguments)
    assert done.returncode == Exit.MISUSE
    assert message in done.stderr
    assert not (toys / "results" / "run").exists()


def test_labels_of_different_tables_do_not_mix(tmp_path):
    other = {"matrix": {"rows": "nut", "columns": "tool", "file": "nuts.json"}}
    root = write_repository(tmp_path, COMMANDS, grid=GRID, other=other)
    done = hilgate(root, "run", "toys", "--fruit", "fig", "--nut", "x")
    assert done.returncode == Exit.MISUSE
    assert "no table has the labels fruit and nut together" in done.stderr


def test_a_label_beside_the_table_narrows_the_step_that_is_named(toys):
    """`--tool` names the same as `--way` to these tests; it is not a column."""
    (toys / "tests" / "conftest.py").write_text(CONFTEST.replace('"--way", ', '"--way", "--tool", '))
    write_repository(toys, COMMANDS, grid=GRID | {"matrix": GRID["matrix"] | {"also": ["tool"]}})
    done = hilgate(toys, "run", "grid", "--tool", "cut")
    assert done.returncode == Exit.PASS, done.stderr
    assert set(cells(toys / "results" / "run")) == {("fig", "cut"), ("kiwi", "cut")}
    done = hilgate(toys, "run", "toys", "--tool", "cut")
    assert done.returncode == Exit.MISUSE
    assert "such a table has: grid" in done.stderr


def test_words_are_split_as_the_command_reads_its_own_options():
    own = {"--jobs": False, "-j": False, "--help": True}
    assert split(["a", "-j", "--fruit", "b", "--fruit", "fig", "--jobs=2", "--way=x=y", "--help"], own) == (
        ["a", "-j", "--fruit", "b", "--jobs=2", "--help"],
        (("fruit", "fig"), ("way", "x=y")),
    )


def test_no_label_may_be_called_like_an_option_of_run():
    run = typer.main.get_command(program).commands["run"]
    names = {name.removeprefix("--") for one in run.params for name in one.opts if name.startswith("--")}
    assert names - RUN_OPTIONS == {"approved-by"}  # no label has a dash in it
