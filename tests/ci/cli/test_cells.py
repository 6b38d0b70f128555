# SPDX-License-Identifier: Apache-2.0
"""Tables on the command line: printed, written by every command alike, and a part of one run by its labels."""

from __future__ import annotations

import json

import pytest
from support.plans import hilgate, passing, write_repository, writes_findings

from hilgate.errors import Exit

TESTS = """
import os, pytest
CELLS = [(fruit, way) for fruit in ("fig", "kiwi") for way in ("cut", "peel")]
@pytest.mark.parametrize(("fruit", "way"), CELLS)
def test_cell(fruit, way, record_property):
    record_property("fruit", fruit)
    record_property("way", way)
    record_property("max_abs_err", 0.25)
    if (fruit, way) == ("kiwi", "peel"):
        record_property("needs", "program:no-peeler")
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
GRID = {
    "evidence": "junit",
    "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    "may_lack": {"program:no-peeler": {"why": "whoever peels needs a peeler", "most": 1}},
    "matrix": {"rows": "fruit", "columns": "way", "file": "cells.json"},
}
COMMANDS = {"other": writes_findings(passing()), "grid": "python -m pytest tests -q -p no:cacheprovider"}


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cells.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    return write_repository(tmp_path, COMMANDS, grid=GRID)


def test_the_plan_of_a_step_tells_of_its_table(repository):
    assert "fruit x way, in cells.json" in hilgate(repository, "plan", "grid").stdout


def cells(folder):
    found = json.loads((folder / "cells.json").read_text())["checks"]
    return {(one["labels"]["fruit"], one["labels"]["way"]): one["outcome"] for one in found}


def incomplete(folder):
    return [one["incomplete"] for one in json.loads((folder / "cells.json").read_text())["steps"]]


def test_run_prints_the_table_and_a_green_gate_one_line_of_it(repository):
    done = hilgate(repository, "run", "samples")
    assert done.returncode == Exit.PASS, done.stderr
    assert done.stdout.endswith(
        "\ngrid-cpu: 3 passed, 0 failed, 1 not run\n      cut  peel\nfig   ✓    ✓\nkiwi  ✓    ○\n"
        "○ peel: kiwi: did not run here: no peeler\ntable: results/run/cells.json\n"
    )
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    gate = hilgate(repository, "gate").stdout
    assert gate.endswith("grid-cpu: 3 passed, 0 failed, 1 not run\ntable: results/cells.json\n")
    assert "kiwi  ✓" not in gate
    (repository / "rotten").touch()
    assert "\nfig   ✗    ✓\n" in hilgate(repository, "gate").stdout


def test_commands_write_one_cells_file_that_a_gate_sets_aside(repository):
    hilgate(repository, "gate")
    path = repository / "results" / "cells.json"
    first = path.read_bytes()
    assert cells(repository / "results") == {
        ("fig", "cut"): "pass",
        ("fig", "peel"): "pass",
        ("kiwi", "cut"): "pass",
        ("kiwi", "peel"): "did not run",
    }
    path.unlink()
    hilgate(repository, "judge")
    assert path.read_bytes() == first
    records = (repository / "results" / "steps" / "grid-cpu" / "results.jsonl").read_bytes()
    hilgate(repository, "gate", "--steps", "other")
    assert not path.exists()
    assert not (repository / "results" / "steps" / "grid-cpu").exists()
    assert (repository / "results" / "previous" / "steps" / "grid-cpu" / "results.jsonl").read_bytes() == records
    assert (repository / "results" / "previous" / "cells.json").read_bytes() == first


def test_a_step_without_evidence_leaves_no_whole_looking_table(repository):
    (repository / "tests" / "conftest.py").write_text("import os; os._exit(7)")
    done = hilgate(repository, "run", "grid")
    assert done.returncode == Exit.NOTHING_RAN
    assert "○ not the whole table: exit 7" in done.stdout
    assert (cells(repository / "results" / "run"), incomplete(repository / "results" / "run")) == ({}, ["exit 7"])


def test_jobs_of_agents_leave_tables_and_the_judge_one_of_all(repository):
    hilgate(repository, "plan", "--write", "results/plan.json")
    judge = ("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    hilgate(repository, *judge)
    assert (cells(repository / "results"), incomplete(repository / "results")) == ({}, ["no record of it arrived"])
    hilgate(repository, "run", "grid-cpu", "--plan", "results/plan.json", "--results", "results/jobs/grid-cpu")
    hilgate(repository, *judge)
    of_job = (repository / "results" / "jobs" / "grid-cpu" / "cells.json").read_bytes()
    assert (repository / "results" / "cells.json").read_bytes() == of_job


def test_a_part_is_run_by_its_labels_and_its_needs_run_whole(repository):
    write_repository(repository, COMMANDS, grid=GRID | {"needs": ["other"]})
    done = hilgate(repository, "run", "grid", "--", "--fruit", "fig", "-k", "cut or peel")
    assert done.returncode == Exit.PASS, done.stderr
    added = "--fruit fig -k 'cut or peel'"
    assert f"a part of grid-cpu, not the whole step: {added}" in done.stderr
    planned = json.loads((repository / "results" / "run" / "plan.json").read_text())["steps"]
    commands = {one["step"]["key"]: one["step"]["command"] for one in planned}
    assert commands == COMMANDS | {"grid": f"{COMMANDS['grid']} {added}"}
    assert set(cells(repository / "results" / "run")) == {("fig", "cut"), ("fig", "peel")}


def test_the_line_that_a_failing_cell_prints_repeats_it(repository):
    (repository / "rotten").touch()
    line = "hilgate run grid-cpu -- --fruit fig --way cut"
    assert f"reproduce: {line}\n" in hilgate(repository, "gate").stdout
    done = hilgate(repository, *line.split()[1:])
    assert done.returncode == Exit.FAIL
    assert cells(repository / "results" / "run") == {("fig", "cut"): "fail"}
    assert f"reproduce: {line}\n" in done.stdout


def test_a_part_without_a_test_is_misuse_and_no_regression(repository):
    done = hilgate(repository, "run", "grid", "--", "-k", "window")
    assert (done.returncode, done.stdout) == (Exit.MISUSE, "")
    assert "error: -k window selects none of 4 tests\n  where: grid-cpu\n" in done.stderr
    assert "python -m pytest tests -q -p no:cacheprovider --collect-only -q" in done.stderr
    assert not (repository / "results" / "run" / "verdict.json").exists()
    (repository / "tests" / "conftest.py").unlink()
    write_repository(repository, COMMANDS | {"grid": COMMANDS["grid"] + " -k window"}, grid=GRID)  # as declared
    assert "○ did not run: unfinished: grid-cpu" in hilgate(repository, "run", "grid").stdout


def test_of_several_parts_those_with_tests_are_judged(repository):
    (repository / "tests" / "test_more.py").write_text("def test_window(): ...")
    commands = {key: COMMANDS["grid"].replace("tests", f"tests/test_{key}.py") for key in ("grid", "more")}
    (repository / "tests" / "test_cells.py").rename(repository / "tests" / "test_grid.py")
    write_repository(repository, commands, grid=GRID, more={"evidence": "junit"})
    done = hilgate(repository, "run", "samples", "--", "-k", "window")
    assert done.returncode == Exit.PASS, done.stdout
    assert "nothing is said of grid-cpu: -k window selects no test of it" in done.stderr
    assert "1 of 1 step passed" in done.stdout


def test_a_part_without_a_failing_test_is_repeated_as_asked(repository):
    (repository / "tests" / "conftest.py").write_text("import os; os._exit(7)")
    done = hilgate(repository, "run", "grid", "--", "-k", "fig or kiwi")
    assert "reproduce: hilgate run grid-cpu -- -k 'fig or kiwi'\n" in done.stdout
