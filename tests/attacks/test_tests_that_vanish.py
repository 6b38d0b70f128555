# SPDX-License-Identifier: Apache-2.0
"""Who: the author of a change. What: a test that would fail is taken away in one of the many ways that pytest has, and
what is left is green.

What must happen: the verdict is no pass without a named approval, and the report, the terminal and the annotation name
the test. Lists that are missing or no lists are no pass either, and no name approves them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from support.plans import git, hilgate, write_repository

from hilgate.errors import Exit
from hilgate.model.plan import Plan
from hilgate.plan.jobs import lay_out
from hilgate.run.results import with_digest

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
import pytest
import lib

@pytest.mark.parametrize("size", [16, 48, 528])
def test_gather(size):
    assert lib.rounded(size) % 16 == 0

class TestWrite:
    def test_strides(self):
        assert lib.rounded(17) == 32
"""
CASES = "SIZES = [1, 2, 3]\n"
HELD = "import pytest\nfrom cases import SIZES\n@pytest.mark.parametrize('n', SIZES)\ndef test_held(n): assert n\n"
SETTINGS = "[tool.pytest.ini_options]\npythonpath = ['.', 'tests']\n"
FILES = {
    "lib.py": "def rounded(n):\n    return (n + 15) // 16 * 16\n",
    "pyproject.toml": SETTINGS,
    "ci/protected.yaml": "rules:\n  - {paths: ['**'], flag: nothing}\n",
    "tests/conftest.py": "",
    "tests/cases.py": CASES,
    "tests/test_gather.py": TESTS,
    "tests/test_held.py": HELD,
}
STEP = {
    "evidence": "junit",
    "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    "may_lack": {"program:no-such-thing": {"why": "it needs no-such-thing", "most": 1}},
}
COMMAND = "python -m pytest tests -q -p no:cacheprovider"
STRIDES, GATHER = "tests/test_gather.py::TestWrite::test_strides", "tests/test_gather.py::test_gather"
WITHOUT_CLASS = TESTS.partition("class ")[0]
DROPS = "def {hook}:\n    {items}[:] = [one for one in {items} if 'strides' not in one.name]\n"
REPORTS = ("report.html", "annotation.md")
NOT_STRIDES = "'-k \"not strides\"'"


@pytest.fixture
def repository(tmp_path):
    """A green repository, whose change begins on a branch of its own."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = write_repository(tmp_path, {"unit": COMMAND}, unit=STEP)
    git(root, "branch", "-f", "base")
    return root


def change(root: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        if text is None:
            (root / name).unlink()
        else:
            (root / name).write_text(text)


WAYS = {
    "another-name": ({"tests/test_gather.py": WITHOUT_CLASS + "def test_x(): pass\n"}, STRIDES),
    "emptied-and-renamed": (
        {
            "tests/test_gather.py": TESTS.replace(
                "test_strides(self):\n        assert", "test_other(self):\n        return"
            )
        },
        STRIDES,
    ),
    "file-deleted": ({"tests/test_gather.py": None}, STRIDES),
    "class-renamed": ({"tests/test_gather.py": TESTS.replace("TestWrite", "TestPages")}, STRIDES),
    "not-a-test": ({"tests/test_gather.py": TESTS.replace("Write:", "Write:\n    __test__ = False")}, STRIDES),
    "parameters-thinned": ({"tests/test_gather.py": TESTS.replace("[16, 48, 528]", "[16, 528]")}, f"{GATHER}[48]"),
    "parameters-of-a-helper": ({"tests/cases.py": "SIZES = [1, 2]\n"}, "tests/test_held.py::test_held[3]"),
    "collect-ignore": ({"tests/conftest.py": "collect_ignore = ['test_gather.py']\n"}, STRIDES),
    "modifyitems": (
        {"tests/conftest.py": DROPS.format(hook="pytest_collection_modifyitems(items)", items="items")},
        STRIDES,
    ),
    "collection-finish": (
        {"tests/conftest.py": DROPS.format(hook="pytest_collection_finish(session)", items="session.items")},
        STRIDES,
    ),
    "runtestloop": (
        {
            "tests/conftest.py": "import pytest\n@pytest.hookimpl(tryfirst=True)\n"
            + DROPS.format(hook="pytest_runtestloop(session)", items="session.items")
        },
        STRIDES,
    ),
    "addopts": ({"pyproject.toml": f"{SETTINGS}addopts = {NOT_STRIDES}\n"}, STRIDES),
    "pytest.ini": ({"pytest.ini": "[pytest]\npythonpath = . tests\npython_classes = Checks\n"}, STRIDES),
    "import-error-hidden": (
        {"tests/test_gather.py": TESTS.replace("import lib", "lib = pytest.importorskip('lib_of_yesterday')")},
        STRIDES,
    ),
}


NOT_RUN_EITHER = {
    "runtestloop": "pytest collected 7 tests, and its junit.xml reports 6",
    "import-error-hidden": "tests.test_gather did not run without a declared reason",
}
"""Ways after which the step did not run, whoever approves: why."""


@pytest.mark.parametrize("way", WAYS)
def test_a_test_that_is_gone_needs_a_named_approval(repository, way):
    files, name = WAYS[way]
    change(repository, files)
    done = hilgate(repository, "gate", "--base", "base")
    verdict = json.loads((repository / "results/verdict.json").read_text())
    if why := NOT_RUN_EITHER.get(way):
        assert (verdict["outcome"], why in verdict["why"]) == ("did not run", True), verdict["why"]
    else:
        assert (done.returncode, verdict["outcome"]) == (Exit.INCONCLUSIVE, "inconclusive"), done.stdout + done.stderr
        assert verdict["why"].startswith("needs a named approval: tests/")
    assert name in [test for one in verdict["protected_changes"] for test in one["tests"]]
    shown = name.partition("::")[2]
    for said in (done.stdout, *((repository / "results" / file).read_text() for file in REPORTS)):
        assert shown in re.sub(r"\\|\n *", "", said)
    judged = hilgate(repository, "judge", "--approved-by", "A. Owner")
    assert judged.returncode == (Exit.NOTHING_RAN if why else Exit.PASS)


def test_nothing_is_said_where_every_test_is_still_there(repository):
    """A function of the product is renamed, so that the merge base's tests fit no tree but their own."""
    change(repository, {"lib.py": FILES["lib.py"].replace("rounded", "aligned")})
    change(repository, {"tests/test_gather.py": TESTS.replace("rounded", "aligned") + "def test_more(): pass\n"})
    done = hilgate(repository, "gate", "--base", "base")
    assert done.returncode == Exit.PASS, done.stdout + done.stderr
    listed = [line for line in records(repository, "steps/unit-cpu") if line["kind"] == "listing"]
    assert [(len(one["here"]), len(one["at_base"]), one["problem"]) for one in listed] == [(8, 7, "")]


def records(root: Path, folder: str) -> list[dict[str, object]]:
    lines = (root / "results" / folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_nothing_is_listed_where_no_test_can_have_gone(repository):
    change(repository, {"lib.py": FILES["lib.py"] + "\n"})
    assert hilgate(repository, "gate", "--base", "base").returncode == Exit.PASS
    assert not [line for line in records(repository, "steps/unit-cpu") if line["kind"] == "listing"]


def test_an_uncollectable_merge_base_needs_a_named_approval(repository):
    change(repository, {"tests/test_held.py": "import a_module_that_nobody_has\n"})
    git(repository, "commit", "-qam", "broken")
    git(repository, "branch", "-f", "base")
    change(repository, {"tests/test_held.py": HELD})
    done = hilgate(repository, "gate", "--base", "base")
    assert done.returncode == Exit.INCONCLUSIVE, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "pytest could not list the merge base's tests of unit-cpu: exit 2 (the test run was interrupted)" in said
    assert "a_module_that_nobody_has" in said


def test_a_step_is_held_to_what_its_own_command_selects_and_has(repository):
    """Options of the command hold for both trees, and a file that the merge base lacks has lost nothing."""
    command = f"{COMMAND.replace('tests', 'tests/test_gather.py tests/test_new.py')} -k 'not strides' -n 2"
    step = STEP | {"env": STEP["env"] | {"PYTEST_PLUGINS": "xdist"}}
    root = write_repository(repository, {"unit": command}, unit=step)
    git(root, "branch", "-f", "base")
    change(root, {"tests/test_new.py": "def test_new(): pass\n"})
    done = hilgate(root, "gate", "--base", "base")
    assert done.returncode == Exit.PASS, done.stdout + done.stderr
    change(root, {"tests/test_gather.py": TESTS.replace("528", "544")})
    done = hilgate(root, "gate", "--base", "base")
    assert "1 test is gone: test_gather[528] (unit-cpu)" in " ".join(done.stdout.split()), done.stdout


def test_a_resumed_run_lists_what_an_interrupted_one_had_not(repository):
    change(repository, WAYS["class-renamed"][0])
    hilgate(repository, "gate", "--base", "base")
    path = repository / "results/steps/unit-cpu/results.jsonl"
    lines = [line for line in path.read_bytes().splitlines(keepends=True)[:-1] if b'"kind":"listing"' not in line]
    path.write_bytes(with_digest(b"".join(lines)))
    assert hilgate(repository, "judge").returncode == Exit.NOTHING_RAN
    done = hilgate(repository, "gate", "--base", "base", "--resume")
    assert (done.returncode, "unit-cpu: started" in done.stderr) == (Exit.INCONCLUSIVE, False), done.stderr


# What an agent's job leaves, judged beside the token.

JUDGE = ("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
RUN = ("run", "unit-cpu", "--plan", "results/plan.json", "--results", "results/jobs/unit-cpu")


def job(root: Path, files: dict[str, str | None]) -> int:
    """Plan a change for agents and run its job; the exit status of that."""
    change(root, files)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "change")
    assert hilgate(root, "plan", "--base", "base", "--write", "results/plan.json").returncode == 0
    path = root / "results/plan.json"
    made = Plan.model_validate_json(path.read_text())
    path.write_text(made.model_copy(update={"profile": "pr"}).model_dump_json())
    return hilgate(root, *RUN).returncode


def test_planner_and_judge_run_nothing_of_the_change(repository, tmp_path):
    """Only the job does: collecting runs a conftest.py, which must not happen beside a token."""
    mark = tmp_path / "results" / "executed"
    files, name = WAYS["class-renamed"]
    trap = f"import pathlib\npathlib.Path({str(mark)!r}).write_text('')\n"
    job(repository, {**files, "tests/conftest.py": trap, "conftest.py": trap})
    mark.unlink()
    hilgate(repository, "plan", "--base", "base")
    assert hilgate(repository, *JUDGE).returncode == Exit.INCONCLUSIVE
    assert name in (repository / "results/verdict.json").read_text()
    assert not mark.exists()


def test_on_agents_the_verdict_asks_for_a_name_and_is_green(repository):
    files, name = WAYS["class-renamed"]
    assert job(repository, files) == Exit.PASS, "its dependants may start"
    assert hilgate(repository, *JUDGE).returncode == Exit.INCONCLUSIVE
    (one,) = json.loads((repository / "results/verdict.json").read_text())["protected_changes"]
    assert (one["path"], one["tests"]) == ("tests/test_gather.py", [name])
    assert one["what"] == "1 test is gone: TestWrite::test_strides (unit-cpu)"
    assert hilgate(repository, *JUDGE, "--approved-by", "A. Owner").returncode == Exit.PASS


FORGED = """
import atexit, os, pathlib
OUT = pathlib.Path(os.environ["HILGATE_OUT"], "tests.json")
atexit.register(lambda: OUT.{how})
def test_x(): pass
"""


@pytest.mark.parametrize("how", ["unlink()", "write_text('[1]')"], ids=["none", "numbers"])
def test_a_list_that_is_none_did_not_run_and_no_name_approves_it(repository, how):
    job(repository, {"tests/test_gather.py": FORGED.format(how=how)})
    done = hilgate(repository, *JUDGE, "--approved-by", "A. Owner")
    assert done.returncode == Exit.NOTHING_RAN, done.stdout
    assert "its job left no list of its tests and the merge base's" in " ".join(done.stdout.split())


def test_a_test_file_may_excuse_only_so_many_tests(repository):
    """19 of 20 were, and each kept its step green."""
    excused = TESTS.replace("\nclass", "\n@pytest.mark.needs('program:no-such-thing')\nclass")
    change(repository, {"tests/test_gather.py": excused, "lib.py": "def rounded(n):\n    return (n + 15) // 16 * 16\n"})
    assert hilgate(repository, "gate", "--base", "base").returncode == Exit.PASS, "the one that the step declares"
    change(repository, {"tests/test_held.py": HELD.replace("@", "@pytest.mark.needs('program:no-such-thing')\n@", 1)})
    done = hilgate(repository, "gate", "--base", "base")
    assert done.returncode == Exit.NOTHING_RAN, done.stdout
    said = "4 checks did not run for lack of program:no-such-thing, and at most 1 may; the last: tests/test_held.py"
    assert said in " ".join(done.stdout.split())


# Shards: the tests of a step in several jobs.

FIRST, SECOND = "unit-cpu-1of2", "unit-cpu-2of2"


def shards(root: Path, files: dict[str, str | None], *keys: str, seconds: dict[str, float] | None = None) -> str:
    """Run these shards of the step over a change; what the verdict says of each, a line a shard."""
    change(root, files)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "change", "--allow-empty")
    assert hilgate(root, "plan", "unit", "--base", "base", "--write", "results/plan.json").returncode == 0
    path = root / "results/plan.json"
    made = Plan.model_validate_json(path.read_text())
    steps = lay_out([step.redeclared(minutes=2.0, shard_minutes=1.0) for step in made.steps])
    took = {"unit-cpu": seconds or {}}
    path.write_text(made.model_copy(update={"profile": "pr", "steps": steps, "test_seconds": took}).model_dump_json())
    for key in keys:
        hilgate(root, "run", key, "--plan", "results/plan.json", "--results", f"results/jobs/{key}")
    return judged(root)


def judged(root: Path) -> str:
    hilgate(root, *JUDGE)
    verdict = json.loads((root / "results/verdict.json").read_text())
    return "\n".join(f"{one['key']}: {one['outcome']}: {one['why']}" for one in verdict["steps"])


def test_shards_are_the_whole_step_together(repository):
    said = shards(repository, {}, FIRST, SECOND)
    counts = [int(number) for number in re.findall(r": pass: (\d+) passed", said)]
    assert (len(counts), sum(counts), 0 in counts) == (2, 7, False), said


def test_tests_are_split_by_what_they_took(repository):
    ids = [
        *(f"{GATHER}[{size}]" for size in (16, 48, 528)),
        *(f"tests/test_held.py::test_held[{n}]" for n in (1, 2, 3)),
    ]
    said = shards(repository, {}, FIRST, SECOND, seconds={**dict.fromkeys(ids, 1.0), STRIDES: 9.0})
    assert f"{FIRST}: pass: 1 passed, 6 deselected" in said, said
    assert f"{SECOND}: pass: 6 passed, 1 deselected" in said, said


def test_a_red_shard_is_repeated_as_a_file_and_shown_as_its_step(repository):
    said = shards(repository, {"lib.py": "def rounded(n):\n    return n + 15\n"}, FIRST, SECOND)
    assert ": fail: " in said
    (red, *_) = [
        one
        for one in json.loads((repository / "results/verdict.json").read_text())["steps"]
        if one["outcome"] == "fail"
    ]
    assert red["reproduce"].startswith("hilgate run unit-cpu --")
    again = (repository / f"results/jobs/{red['key']}/steps/{red['key']}/again/log.txt").read_text()
    assert "4 failed" in again or "3 failed" in again, "with what the other shard has of the file"


def test_a_step_without_one_of_its_shards_did_not_run(repository):
    said = shards(repository, {}, FIRST)
    assert f"{FIRST}: did not run: {SECOND} left no list of its tests" in said
    assert f"{SECOND}: did not run: no record of it arrived" in said


AS_THE_FIRST = "def pytest_configure(config):\n    config.option.group = 1\n"
DROPS_LATE = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    yield
    items[:] = [one for one in items if "strides" not in one.name]
"""
ANOTHER_IN_EACH = """
def pytest_collection_modifyitems(config, items):
    del items[config.option.group or 0]
"""


@pytest.mark.parametrize(
    ("conftest", "why"),
    [
        (AS_THE_FIRST, "ran in 0 shards of unit-cpu"),
        (DROPS_LATE, f"{STRIDES} ran in 0 shards of unit-cpu"),
        (ANOTHER_IN_EACH, f"{SECOND} found other tests to deal out than {FIRST}"),
    ],
    ids=["twice the same index", "dropped after the deal", "another deal"],
)
def test_a_test_that_no_shard_ran_is_no_pass(repository, conftest, why):
    said = shards(repository, {"tests/conftest.py": conftest}, FIRST, SECOND)
    assert ": pass: " not in said
    assert why in said


def test_records_of_one_shard_are_none_of_another(repository):
    shards(repository, {}, FIRST)
    (repository / "results/jobs" / SECOND).mkdir()
    path = repository / "results/jobs" / SECOND / "results.jsonl"
    path.write_bytes((repository / "results/jobs" / FIRST / "results.jsonl").read_bytes())
    assert f"{SECOND}: did not run: its results cannot be believed" in judged(repository)
    forged = path.read_text().splitlines(keepends=True)[:-1]
    lines = [line.replace(f'"{FIRST}"', f'"{SECOND}"') for line in forged]
    path.write_bytes(with_digest("".join(lines).encode()))
    said = judged(repository)
    assert ": pass: " not in said
    assert "ran in 0 shards of unit-cpu" in said


def test_tests_removed_from_all_shards_are_reported_once(repository):
    files, name = WAYS["class-renamed"]
    said = shards(repository, files, FIRST, SECOND)
    assert said.count(": pass: ") == 2, said
    (one,) = json.loads((repository / "results/verdict.json").read_text())["protected_changes"]
    assert (one["path"], one["tests"]) == ("tests/test_gather.py", [name])
