# SPDX-License-Identifier: Apache-2.0
"""When tests are looked for that a change has taken away, what counts as a list of tests, and how losses are said."""

from __future__ import annotations

import json

import pytest
from support.plans import plan, step

from hilgate.model.record import LONGEST_ID, MOST_TESTS, ListingRecord
from hilgate.plan.jobs import lay_out
from hilgate.run.listing import BaseListing, named_tests, paths_to_list, vanished, wrongly_sharded

BASE = "b" * 40


def a_step(command="python -m pytest tests/kernels --ignore=tests/kernels/far -k fast", **changes):
    return step("unit", command, **({"evidence": "junit"} | changes))


@pytest.mark.parametrize(
    ("file", "due"),
    [
        ("tests/kernels/test_a.py", True),
        ("tests/kernels/mla/test_b.py", True),
        ("tests/kernels/far/test_c.py", False),  # of another step
        ("tests/models/test_d.py", False),
        ("tests/kernels/oracle.py", True),
        ("tests/support/cases.py", True),
        ("tests/data/cases.json", True),
        ("tests/conftest.py", True),
        ("conftest.py", True),
        ("src/conftest.py", True),
        ("pyproject.toml", True),
        ("pytest.ini", True),
        ("src/layout.py", False),
        ("docs/test_page.md", False),
    ],
)
def test_tests_are_listed_where_a_change_can_remove_some(file, due):
    paths = paths_to_list(a_step(), plan(merge_base=BASE, changed_files=("README.md", file)))
    assert paths == (("tests/kernels",) if due else ())


@pytest.mark.parametrize(
    ("a_step", "merge_base"),
    [
        (a_step(), ""),
        (a_step("python -m pytest tests").part("-k one"), BASE),
        (a_step("python ci/lint.py", evidence="findings"), BASE),
        (a_step("make junit"), BASE),
    ],
    ids=["no-merge-base", "a-part", "no-tests", "another-program"],
)
def test_nothing_is_listed_without_a_base_or_a_whole_pytest_run(a_step, merge_base):
    assert paths_to_list(a_step, plan(merge_base=merge_base, changed_files=("tests/test_a.py",))) == ()


def test_declared_tests_count_and_not_the_commands_words():
    tests = ("tests/kernels", "!tests/kernels/far")
    found = a_step("python -m pytest --family jamba tests/kernels --ignore=tests/kernels/far", tests=tests)
    assert named_tests(found) == ("tests/kernels",)
    assert named_tests(a_step("make junit", tests=tests)) == ()


def test_a_command_without_paths_takes_every_change_for_its_test():
    a_plan = plan(merge_base=BASE, changed_files=("src/layout.py",))
    assert paths_to_list(a_step("python -m pytest -q"), a_plan) == (".",)


TOO_LONG, TOO_MANY = json.dumps(["x" * (LONGEST_ID + 1)]), json.dumps(["x"] * (MOST_TESTS + 1))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '[""]', "[" * 100_000, TOO_LONG, TOO_MANY],
    ids=["empty", "object", "number", "no-name", "deep", "long", "many"],
)
def test_what_is_no_list_of_ids_is_recorded_by_nobody(tmp_path, text):
    (tmp_path / "tests.json").write_text(text)
    with pytest.raises(ValueError, match=r"tests\.json"):
        BaseListing(a_step(), tmp_path, None).poll()


def test_a_list_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "tests.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="no list of at most"):
        BaseListing(a_step(), tmp_path, None).poll()


def test_ids_that_are_no_text_are_recorded_as_text(tmp_path):
    (tmp_path / "tests.json").write_text('["t.py::test_\\udcff"]')
    record = BaseListing(a_step(), tmp_path, None).poll()
    assert record == ListingRecord(step="unit-cpu", here=("t.py::test_\\udcff",), at_base=())
    assert ListingRecord.model_validate_json(record.model_dump_json()) == record


def listed(key, at_base, here=(), **more):
    return ListingRecord(step=key, here=here, at_base=at_base, **more)


def test_losses_of_a_file_are_one_sentence_with_a_count():
    steps = (a_step("python -m pytest tests"), a_step("python -m pytest tests", key="other-cpu"))
    a_plan = plan(*steps, merge_base=BASE, changed_files=("tests/conftest.py",))
    ids = tuple(f"tests/t.py::test_it[{n}]" for n in range(9))
    lists = {"unit-cpu": listed("unit-cpu", ids, ids[1:2]), "other-cpu": listed("other-cpu", ids[:1])}
    (one,) = vanished(steps, a_plan, lists)
    assert one.what == "8 tests are gone: test_it (8 cases) (unit-cpu and 1 more)"
    assert (one.path, one.tests) == ("tests/t.py", (ids[0], *ids[2:]))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["test_it"], "1 test is gone: test_it (unit-cpu)"),
        (["A::test_it[1]", "A::test_it[2]"], "2 tests are gone: A::test_it[1], A::test_it[2] (unit-cpu)"),
        (
            [*(f"test_{letter}" for letter in "abcdef"), "test_a[1]"],
            "7 tests are gone: test_a (2 cases), test_b, test_c, test_d, test_e and 1 more (unit-cpu)",
        ),
    ],
    ids=["one", "few", "many"],
)
def test_few_losses_are_named_one_by_one(names, said):
    steps = (a_step("python -m pytest tests"),)
    a_plan = plan(*steps, merge_base=BASE, changed_files=("tests/conftest.py",))
    (one,) = vanished(steps, a_plan, {"unit-cpu": listed("unit-cpu", tuple(f"tests/t.py::{name}" for name in names))})
    assert one.what == said


def test_losses_of_many_files_are_counted():
    steps = (a_step("python -m pytest tests"),)
    a_plan = plan(*steps, merge_base=BASE, changed_files=("tests/conftest.py",))
    ids = tuple(f"tests/test_{n:02}.py::test_it" for n in range(25))
    found = vanished(steps, a_plan, {"unit-cpu": listed("unit-cpu", ids)})
    assert [one.path for one in found] == [*(f"tests/test_{n:02}.py" for n in range(20)), "(more)"]
    assert found[-1].what == "5 tests of 5 more files are gone"


def test_a_list_that_nobody_asked_for_says_nothing():
    steps = (a_step("python -m pytest tests"),)
    a_plan = plan(*steps, merge_base=BASE, changed_files=("src/layout.py",))
    assert vanished(steps, a_plan, {"unit-cpu": listed("unit-cpu", ("tests/t.py::test_it",))}) == ()


SHARDS = lay_out([a_step("python -m pytest tests", minutes=2.0, shard_minutes=1.0)])
FIRST, SECOND = (shard.key for shard in SHARDS)


def shards(first, second, of_first="ab", of_second="ab"):
    parts = ((FIRST, first, of_first), (SECOND, second, of_second))
    return {
        key: ListingRecord(step=key, here=tuple(here), at_base=(), of_all_shards=tuple(all_))
        for key, here, all_ in parts
    }


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        (shards("a", "b"), ""),
        (shards("b", "a"), ""),
        (shards("a", ""), "b ran in 0 shards of unit-cpu"),
        (shards("ab", "b"), "b ran in 2 shards of unit-cpu"),
        (shards("a", "bx"), "x ran in 1 shard of unit-cpu"),
        (shards("", ""), "a (and 1 more) ran in 0 shards of unit-cpu"),
        (shards("a", "b", of_second="abc"), f"{SECOND} found other tests to deal out than {FIRST}"),
        (shards("", "", "", ""), "its shards ran no test"),
        (
            {FIRST: shards("a", "b")[FIRST]},
            f"{SECOND} left no list of its tests, so it is unknown whether all of them ran",
        ),
        ({}, f"{FIRST} left no list of its tests, so it is unknown whether all of them ran"),
    ],
)
def test_shards_are_whole_where_each_test_began_in_exactly_one(lists, why):
    assert wrongly_sharded(SHARDS, lists) == why


def test_the_first_shard_lists_for_all_and_losses_need_all():
    a_plan = plan(*SHARDS, merge_base=BASE, changed_files=("tests/test_a.py",))
    assert [bool(paths_to_list(shard, a_plan)) for shard in SHARDS] == [True, False]
    lists = shards("a", "b")
    lists[FIRST] = lists[FIRST].model_copy(update={"at_base": ("t.py::gone", "a", "b")})
    (one,) = vanished(SHARDS, a_plan, lists)
    assert one.tests == ("t.py::gone",)
    assert vanished(SHARDS[:1], a_plan, lists) == ()
