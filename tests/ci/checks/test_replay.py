# SPDX-License-Identifier: Apache-2.0
"""The selection measured on changes that happened, and the committed list of them."""

import re
from pathlib import Path

import pytest
import yaml
from support.declarations import declare, step

from hilgate.checks.replay import PastChange, parse, replay_changes
from hilgate.declare.imports import build
from hilgate.declare.load import load
from hilgate.errors import MisuseError

REPOSITORY = Path(__file__).resolve().parents[3]
CHANGES = REPOSITORY / "ci" / "replay.txt"
DECLARED = load(REPOSITORY)
STEPS = [one.key for _, one in DECLARED.steps()]
GRAPH = build(REPOSITORY, DECLARED.project.python_path)


def test_lists_are_read_with_names_that_hold_spaces_and_steps_that_broke():
    text = '# remark\n\na/x b/y\n"a file" #x => s t\n#odd => s\n'
    assert parse(text, "f", ["s", "t"]) == (
        PastChange(3, ("a/x", "b/y")),
        PastChange(4, ("a file", "#x"), ("s", "t")),
        PastChange(5, ("#odd",), ("s",)),
    )


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("a\n=> s\n", "names no changed file", "f:2"),
        ("a => kernel\n", "no step is called 'kernel'", "f:1"),
        ('"a\n', "cannot be split: No closing quotation", "f:1"),
        ("# nothing\n", "there is no list", "f"),
        ("", "there is no list", "f"),
    ],
)
def test_line_that_is_no_list_is_named(text, what, where):
    with pytest.raises(MisuseError, match=re.escape(what)) as caught:
        parse(text, "f", ["s"])
    assert caught.value.where == where


SMALL = declare(a=[step("cheap"), step("gpu", ("gfx942",), minutes=2)], b=[step("other", ("gfx942",), minutes=3)])


def replayed(history, *changes):
    return replay_changes(changes, SMALL, None, history)


def test_gpu_minutes_against_running_everything():
    changes = PastChange(1, ("a/x",)), PastChange(2, ("b/x",)), PastChange(3, ("unclaimed",))
    found = replayed({"gpu-gfx942": 4.0}, *changes)
    assert [(line.steps, line.gpu_minutes) for line in found.lines] == [(2, 4), (1, 3), (3, 7)]
    assert (found.of, found.gpu_minutes, found.run_all_gpu_minutes, found.missed) == (3, 14, 21, 0)


def test_step_that_broke_is_missed_when_not_selected():
    found = replayed({}, PastChange(1, ("a/x",), ("cheap",)), PastChange(2, ("a/y",), ("other",)))
    assert [line.missed for line in found.lines] == [{}, {"other": "it is known to break"}]
    assert found.missed == 1


def test_committed_changes_miss_no_step():
    found = replay_changes(parse(CHANGES.read_text(encoding="utf-8"), "f", STEPS), DECLARED, GRAPH, {})
    assert [(line.change.files, line.missed) for line in found.lines if line.missed] == []
    assert len(found.lines) >= 150
    assert 0 < found.gpu_minutes < 0.7 * found.run_all_gpu_minutes


def test_every_planted_bug_is_among_the_changes():
    changes = parse(CHANGES.read_text(encoding="utf-8"), "f", STEPS)
    reported = {(frozenset(change.files), change.broke) for change in changes}
    for bug in sorted((REPOSITORY / "tests" / "bugs").glob("*/bug.yaml")):
        patch = bug.with_name("bug.patch").read_text(encoding="utf-8")
        files = frozenset(re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE))
        assert (files, (yaml.safe_load(bug.read_text(encoding="utf-8"))["turns_red"],)) in reported, bug
