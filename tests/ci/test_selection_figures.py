# SPDX-License-Identifier: Apache-2.0
"""The script that prints what selection by launched kernels saves: what it reads, edits and plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci import selection_figures
from hilgate import git
from hilgate.cli.planted_bugs import PLANTED, load_bugs
from hilgate.errors import MisuseError
from hilgate.plan.launched import edited_bodies

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = "tests/test_tiny.py"


KERNELS = """
import triton

@triton.jit
def load(at):
    return at + 1

def launch():
    pass

@triton.jit
def kernel(at, TILE):
    if TILE:
        load(at)
"""


def test_every_body_of_a_kernel_file_is_edited_in_turn():
    edits = dict(selection_figures.bodies(KERNELS))
    assert edits.keys() == {"load", "kernel"}
    for name, edited in edits.items():
        assert edited_bodies(KERNELS.encode(), edited.encode()) == {name}


def test_a_record_that_is_not_whole_is_none(tmp_path):
    texts = {"a-cpu": "k.py::f\n", "b-cpu": "not whole: lost\nk.py::f\n", "c-cpu": "", "b-cpu/steps/a-cpu": "other"}
    for key, text in texts.items():
        (tmp_path / "steps" / key).mkdir(parents=True)
        (tmp_path / "steps" / key / "kernels.txt").write_text(text)
    assert selection_figures.read_records([tmp_path]) == {"a-cpu": {"k.py::f"}, "c-cpu": set()}
    with pytest.raises(MisuseError, match=r"there is no whole kernels\.txt"):
        selection_figures.read_records([tmp_path / "steps/b-cpu"])


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Figures of a clone of this repository, without a record."""
    clone = tmp_path_factory.mktemp("clone") / "tree"
    git.clone_at(REPOSITORY, git.inspect(REPOSITORY, None).commit, clone)
    return selection_figures.Figures(REPOSITORY, clone, {})


def test_a_silent_record_takes_out_its_step_and_its_gpu_twins(figures):
    before = (figures.clone / TINY).read_bytes()
    figures.records = {"kernels-cache-cpu": frozenset()}
    (imports, _), (records, _), (twins, _) = figures.worst(TINY).values()
    assert records == imports - 1
    assert twins < records
    assert (figures.clone / TINY).read_bytes() == before


BUGS = [bug for bug in load_bugs(REPOSITORY) if not bug.package]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.id for bug in BUGS])
def test_records_plan_fewer_steps_and_miss_no_planted_bug(figures, bug):
    """Needed steps that passed drop out for any bug; for one of a body, so do steps that did not launch it."""
    patch = REPOSITORY / PLANTED / bug.id / "bug.patch"
    files = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    before = git.files_at(figures.clone, figures.head, files)
    selection_figures.git_says(figures.clone, "apply", str(patch))
    try:
        bodies = {name: edited_bodies(before[name], (figures.clone / name).read_bytes()) for name in files}
        edited = bodies if all(bodies.values()) else {}
        launched = frozenset(f"{file}::{min(names)}" for file, names in edited.items())
        figures.records = dict.fromkeys((one.key for one in figures.all.steps), frozenset())
        figures.records |= {key: launched for key in figures.records if key.startswith(f"{bug.turns_red}-")}
        graph = figures.graph()
        imports, records = (figures.plan(way, graph) for way in ("imports", "records"))
    finally:
        figures.restore()
    assert bug.turns_red in {one.step.key for one in records.steps}
    assert len(records.steps) <= len(imports.steps) - bool(edited)
