# SPDX-License-Identifier: Apache-2.0
"""Evidence of steps: real pytest runs and damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.jobs import CONTENT, DIGEST, TEST, agents_plan, failed, passed
from support.plans import hilgate, step, write_repository

from hilgate import evidence
from hilgate.errors import Exit, RecordsError
from hilgate.evidence import EVIDENCE_CHECK, KINDS, Collected, EvidenceKind
from hilgate.model.record import LONGEST_TEXT, Check, Outcome
from hilgate.plan.make import read_plan

TESTS = """
import pytest

def test_measures(record_property):
    record_property("max_abs_err", 0.25)
    record_property("lanes", 64)
    record_property("dtype", "fp8")
    record_property("worst", float("nan"))

class TestGather:
    @pytest.mark.parametrize("case", ["bs16-hnd", "a::b.c"])
    def test_wrong(self, case):
        got = 0.5
        assert got < 0.001, "max_abs_err too large"

@pytest.mark.skip(reason="needs gfx950")
def test_far(): ...

@pytest.mark.xfail(reason="vllm 0.31 cannot")
def test_known(): assert False

@pytest.fixture
def broken(): raise RuntimeError("no device")
def test_setup(broken): ...

def test_helped():
    import attending
    attending.check(0.5)

@pytest.fixture
def late():
    yield
    raise RuntimeError("left dirty")
def test_teardown(late): assert False, "first"

def same(one, other): return one == other
def test_bare():
    assert same(
        ["a"] * 400,
        ["b"] * 400,
    )
@pytest.fixture
def uneven():
    E, size = "E", 3
    assert not size
def test_bare_setup(uneven): ...
def test_compared(): assert "".join(["a"] * 600) == ""
"""


def pytest_junit(root, text, *arguments):
    """Run pytest over one file of `root/tests/deep` and collect its junit.xml."""
    file = root / "tests" / "deep" / "test_sample.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    file.with_name("attending.py").write_text("def check(got):\n    assert got < 0.001\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", root]
    options = [
        "--import-mode=importlib",
        "-o",
        f"pythonpath={root}/tests/deep",
        f"--junitxml={root}/junit.xml",
        *arguments,
    ]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half the start-up time
    subprocess.run(
        [*command, *options, "tests/deep/test_sample.py"], cwd=root, env=env, capture_output=True, check=False
    )
    return KINDS["junit"].collect(root, root)


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    return pytest_junit(tmp_path_factory.mktemp("repo"), TESTS)


def test_every_test_becomes_one_check_named_by_its_node_id(collected):
    assert collected.problem == ""
    prefix = "tests/deep/test_sample.py::"
    assert {check.id.removeprefix(prefix): check.outcome for check in collected.checks} == {
        "test_measures": Outcome.PASS,
        "TestGather::test_wrong[bs16-hnd]": Outcome.FAIL,
        "TestGather::test_wrong[a::b.c]": Outcome.FAIL,
        "test_far": Outcome.DID_NOT_RUN,
        "test_known": Outcome.DID_NOT_RUN,
        "test_setup": Outcome.FAIL,
        "test_helped": Outcome.FAIL,
        "test_teardown": Outcome.FAIL,
        "test_bare": Outcome.FAIL,
        "test_bare_setup": Outcome.FAIL,
        "test_compared": Outcome.FAIL,
    }


def test_messages_say_why_and_where(collected):
    messages = {check.id.rsplit("::", 1)[1]: check.message for check in collected.checks}
    assert messages["test_far"] == "needs gfx950"
    assert messages["test_known"] == "expected to fail: vllm 0.31 cannot"
    assert messages["test_wrong[bs16-hnd]"].startswith("AssertionError: max_abs_err too large")
    assert messages["test_wrong[bs16-hnd]"].endswith("\ntests/deep/test_sample.py:14: AssertionError")
    helped = (
        "\ntests/deep/test_sample.py:28: AssertionError (tests/deep/attending.py:2)"  # its own line, then the helper
    )
    assert messages["test_helped"].endswith(helped)
    assert messages["test_setup"].startswith("failed on setup: RuntimeError: no device\n")


def test_first_line_of_a_failure_says_what_is_wrong(collected):
    """pytest 9 cuts the attribute, and shows the value of an assertion without a comparison as `assert False`."""
    messages = {check.id.rsplit("::", 1)[1]: check.message.splitlines() for check in collected.checks}
    assert messages["test_bare"][0] == 'assert same(["a"] * 400, ["b"] * 400)'
    assert messages["test_bare"][1].startswith(" +  where False = same((['a'")
    assert messages["test_bare_setup"][:2] == ["failed on setup: assert not size", "assert not 3"]
    assert messages["test_compared"][0].startswith("assert 'aaa")
    assert "full report in element text" not in str(messages)


def test_recorded_properties_are_numbers_or_else_labels(collected):
    check = next(check for check in collected.checks if check.id.endswith("test_measures"))
    assert check.numbers == {"max_abs_err": 0.25, "lanes": 64}
    assert check.labels == {"dtype": "fp8", "worst": "nan"}


SUBTESTS = """
import logging, unittest
import pytest

def test_all(subtests):
    for i in range(2):
        with subtests.test(i=i): assert i >= 0

class TestOld(unittest.TestCase):
    def test_old(self):
        for i in range(3):
            with self.subTest(i=i): self.assertGreaterEqual(i, 0)
"""
FAILING_SUBTESTS = """
def test_odd(subtests):
    for i in range(4):
        with subtests.test("parity", i=i): assert i % 2 == 0, f"{i} is odd"

def test_own(subtests):
    with subtests.test(i=1): ...
    assert 1 == 2

class TestOld(unittest.TestCase):
    def test_odd(self):
        for i in range(3):
            with self.subTest(i=i): self.assertEqual(i % 2, 0)

def test_skips(subtests):
    for i in range(3):
        with subtests.test(i=i):
            if i: pytest.skip(f"no {i}")

@pytest.fixture
def late():
    yield
    raise RuntimeError("left dirty")

def test_late(subtests, late):
    for i in range(2):
        with subtests.test(i=i): assert not i
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_tests_with_subtests_pass(workers, tmp_path):
    found = pytest_junit(tmp_path, SUBTESTS, "-p", "hilgate.pytest_plugin", *workers)
    assert found.problem == ""
    assert {(check.id.rpartition("::")[2], check.outcome) for check in found.checks} == {
        ("test_all", Outcome.PASS),
        ("test_old", Outcome.PASS),
    }
    numbers = {check.id.rpartition("::")[2]: check.numbers for check in found.checks}  # xdist keeps no order
    assert numbers == {"test_all": {"subtest_reports": 2}, "test_old": {"subtest_reports": 3}}


def test_a_failing_subtest_fails_its_test_and_nothing_else(tmp_path):
    found = pytest_junit(tmp_path, SUBTESTS + FAILING_SUBTESTS, "-p", "hilgate.pytest_plugin")
    assert found.problem == ""
    checks = {check.id.partition("test_sample.py::")[2]: check for check in found.checks}
    assert {name: check.outcome for name, check in checks.items()} == {
        "test_all": Outcome.PASS,
        "TestOld::test_odd": Outcome.FAIL,
        "test_odd": Outcome.FAIL,
        "test_own": Outcome.FAIL,
        "test_skips": Outcome.DID_NOT_RUN,
        "test_late": Outcome.FAIL,
    }
    assert checks["test_odd"].message.startswith("AssertionError: 1 is odd\n")
    assert checks["test_own"].message.startswith("assert 1 == 2")
    assert checks["TestOld::test_odd"].message.startswith("AssertionError: 1 != 0")


LOSES = """
import pytest
from _pytest.junitxml import xml_key

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    del session.config.stash[xml_key].node_reporters_ordered[1:]
"""


@pytest.mark.parametrize("plugin", [(), ("-p", "hilgate.pytest_plugin")], ids=["without plugin", "with plugin"])
def test_a_count_of_subtests_excuses_no_lost_test(plugin, tmp_path, monkeypatch):
    (tmp_path / "losing.py").write_text(LOSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = (
        "def test_kept(record_property, subtests):\n"
        "    record_property('subtest_reports', '4')\n"
        "def test_b(): ...\n"
        "def test_c(subtests):\n"
        "    with subtests.test(): ...\n"
    )
    found = pytest_junit(tmp_path, code, *plugin, "-p", "losing")
    assert [check.outcome for check in found.checks] == [Outcome.PASS]
    assert found.problem in {
        "its junit.xml announces 4 tests and holds 1",
        "pytest collected 3 tests, and its junit.xml reports 1",
    }


def test_large_output_loses_no_result(tmp_path):
    code = (
        "def test_prints(): print('x' * 12_000_000)\n"
        "def test_says(): raise ValueError('y' * 12_000_000)\n"
        "def test_records(record_property): record_property('what', 'z' * 1_000_000)\n"
    )
    found = pytest_junit(tmp_path, code, "-o", "junit_logging=all")
    assert found.problem == ""
    assert [check.outcome for check in found.checks] == [Outcome.PASS, Outcome.FAIL, Outcome.PASS]
    assert found.checks[1].message.startswith("ValueError: yyy")
    texts = [found.checks[1].message, found.checks[2].labels["what"]]
    assert all(LONGEST_TEXT - 100 < len(text) <= LONGEST_TEXT for text in texts)
    assert texts[0].endswith(".py:2: ValueError")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it left no junit.xml"),
        ("", "is empty"),
        ("<testsuites><testsuite", "cannot be read"),
        ("not xml", "cannot be read"),
        ("<html/>", "cannot be read"),
        ('<testsuites><testsuite name="a" tests="0"/></testsuites>', "holds no tests"),
        (
            '<!DOCTYPE a [<!ENTITY b "c">]><testsuites><testsuite><testcase name="&b;"/></testsuite></testsuites>',
            "cannot be read: it has a DOCTYPE",
        ),
        (f"<testsuites>{'<testsuite>' * 9999}{'</testsuite>' * 9999}</testsuites>", "nested more than 50 deep"),
        ('<testsuites><testsuite><testcase name="a" time="long"/></testsuite></testsuites>', "time is 'long'"),
    ],
)
def test_damaged_junit_is_a_problem(tmp_path, text, why):
    if text is not None:
        (tmp_path / "junit.xml").write_text(text)
    assert why in KINDS["junit"].collect(tmp_path, tmp_path).problem


FILE = TEST.partition("::")[0]
CASE = '<testcase classname="t" name="a"/>'
CONTRADICTIONS = {
    "an error of the suite": (
        f'<testsuite tests="1">{CASE}<error message="m"/></testsuite>',
        "has <error> in a testsuite",
    ),
    "an inner suite": (
        f'<testsuite><testsuite tests="9">{CASE}</testsuite></testsuite>',
        "announces 9 tests and holds 1",
    ),
    "inner failures": (f'<testsuite><testsuite failures="1">{CASE}</testsuite></testsuite>', "announces 1 failures"),
    "of all suites": (f'<testsuites tests="3"><testsuite>{CASE}</testsuite></testsuites>', "announces 3 tests"),
    "a rerun that failed": (
        f'<testsuite>{CASE[:-2]}><rerunFailure message="m"/></testcase></testsuite>',
        "has <rerunFailure> in a testcase",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_junit_that_contradicts_itself_is_a_problem(name, tmp_path):
    text, why = CONTRADICTIONS[name]
    (tmp_path / "junit.xml").write_text(text if text.startswith("<testsuites") else f"<testsuites>{text}</testsuites>")
    found = KINDS["junit"].collect(tmp_path, tmp_path)
    assert why in found.problem
    assert len(found.checks) == 1


STATES = {
    'status="run" result="completed"': Outcome.PASS,  # googletest, Bazel
    'status="passed"': Outcome.PASS,  # Ginkgo
    'status="notrun" result="suppressed"': Outcome.DID_NOT_RUN,
    'status="run" result="skipped"': Outcome.DID_NOT_RUN,
    'status="NotRun"': Outcome.DID_NOT_RUN,
    'status="disabled"': Outcome.DID_NOT_RUN,
    'result="suppressed"': Outcome.DID_NOT_RUN,
    'status="Quarantined"': Outcome.DID_NOT_RUN,
    'status=""': Outcome.DID_NOT_RUN,
    'status="fail"': Outcome.FAIL,  # CTest
    'status="notrun" result="Failed"': Outcome.FAIL,
}


@pytest.mark.parametrize("state", STATES)
def test_a_case_that_says_it_did_not_run_is_no_pass(state, tmp_path):
    (tmp_path / "junit.xml").write_text(
        f'<testsuites><testsuite disabled="1">{CASE[:-2]} {state}/></testsuite></testsuites>', "utf-8"
    )
    found = KINDS["junit"].collect(tmp_path, tmp_path)
    assert [check.outcome for check in found.checks] == [STATES[state]]
    said_so = any(word in state.lower() for word in ("notrun", "skipped", "disabled", "suppressed"))
    assert ("announces 1 tests that did not run" in found.problem) != said_so


@pytest.mark.parametrize(("said", "most"), [("", 1), ("2", 3), ("2 2", 1), ("two", 1)])
def test_subtests_of_a_case_may_be_announced_as_tests(said, most, tmp_path):
    """Where they are said once, as pytest's plugin says them; a second time is the test's own doing."""
    values = "".join(f'<property name="subtest_reports" value="{word}"/>' for word in said.split())
    values = f'<property name="a" value="9"/>{values}<property name="z" value="9"/>'
    case = f"{CASE[:-2]}><properties>{values}</properties></testcase>"
    for tests, problem in ((most, ""), (most + 1, f"its junit.xml announces {most + 1} tests and holds 1")):
        told = '<properties><property name="collected" value="1"/></properties>'
        (tmp_path / "junit.xml").write_text(
            f'<testsuites><testsuite tests="{tests}">{told}{case}</testsuite></testsuites>'
        )
        assert KINDS["junit"].collect(tmp_path, tmp_path, OURS).problem == problem


@pytest.mark.parametrize(
    "order", [("fail", "pass"), ("pass", "fail"), ("fail", "skip"), ("skip", "fail")], ids=" ".join
)
def test_of_two_cases_of_a_test_the_failure_counts(order, tmp_path):
    inside = {"fail": '<failure message="m"/>', "pass": "", "skip": '<skipped message="m"/>'}
    cases = "".join(f"{CASE[:-2]}>{inside[one]}</testcase>" for one in order)
    (tmp_path / "junit.xml").write_text(
        f'<testsuites><testsuite tests="2" failures="1">{cases}</testsuite></testsuites>'
    )
    (check,) = KINDS["junit"].collect(tmp_path, tmp_path).checks
    assert check.outcome is Outcome.FAIL


def test_a_test_that_ends_the_session_with_status_0_is_seen(tmp_path):
    code = (
        "import pytest\ndef test_a(): ...\ndef test_b(): pytest.exit('enough', returncode=0)\ndef test_c(): assert 0\n"
    )
    (tmp_path / "test_x.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "test_x.py", "--junitxml=junit.xml", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    (tmp_path / "log.txt").write_bytes(done.stdout)
    found = KINDS["junit"].collect(tmp_path, tmp_path)
    assert found.problem == "its junit.xml is of a session that a test ended (pytest.exit: enough)"
    assert {check.outcome for check in found.checks} == {Outcome.PASS}


@pytest.mark.parametrize(
    ("text", "why", "checks"),
    [
        (None, "it left no findings.jsonl", 0),
        ("", "is empty", 0),
        ('{"id": "a", "outcome": "pass"}\n{"id": "b", "outc', "findings.jsonl:2", 1),
        ('{"id": "a", "outcome": "fail"}\n', "without a message", 0),
        ('{"id": "a", "outcome": "pass", "surprise": 1}\n', "findings.jsonl:1: surprise", 0),
        ('{"schema_version": 1, "id": "a", "outcome": "pass"}\n{"outc', "findings.jsonl:2", 1),
        ('{"schema_version": 2, "key": "a"}\n', "findings.jsonl:1: schema 2, this reads 1", 0),
        ('{"id": "a", "outcome": "pass", "numbers": {"x": NaN}}\n', "findings.jsonl:1", 0),
        ('{"id": "a", "outcome": "pass"}\n{"id": "a", "outcome": "pass"}\n', "appears twice", 1),
        ('{"id": "a", "outcome": "fail", "message": "m", "outcome": "pass"}\n', "the key 'outcome' appears twice", 1),
        ('{"id": "a", "outcome": "pass", "numbers": {"n": 1, "n": 2}}\n', "the key 'n' appears twice", 1),
        ("\xff\n\xff\n", "(and 1 more lines)", 0),
    ],
)
def test_damaged_findings_are_a_problem_and_sound_lines_are_kept(tmp_path, text, why, checks):
    if text is not None:
        (tmp_path / "findings.jsonl").write_text(text)
    found = KINDS["findings"].collect(tmp_path, tmp_path)
    assert why in found.problem
    assert ("more lines" in found.problem) == ("more lines" in why)
    assert len(found.checks) == checks


def test_lost_evidence_beside_a_failure_is_a_failure_of_its_own():
    """A record keeps one reason, and the failure beside it may be in quarantine."""
    lost = Collected((failed(),), "it is cut", counted=True).with_problem_as_failure()
    assert [check.id for check in lost.checks] == [TEST, EVIDENCE_CHECK]
    assert lost.checks[-1] == failed(EVIDENCE_CHECK, "it is cut")
    assert lost.problem == "it is cut"
    for whole in (Collected((failed(),)), Collected((passed(),), "it is cut"), Collected((), "it is cut")):
        assert whole.with_problem_as_failure() == whole


def test_findings_are_written_and_read_back(tmp_path):
    checks = (
        Check(id="a", outcome=Outcome.PASS, numbers={"n": 3}),
        Check(id="b", outcome=Outcome.FAIL, message="line 1\nline 2 \u2028 end"),
    )
    Check.write_all(tmp_path / "out", checks)
    found = KINDS["findings"].collect(tmp_path / "out", tmp_path)
    assert (found.checks, found.problem, found.counted, found.deselected) == (checks, "", False, 0)


def test_a_plan_with_unknown_evidence_is_refused(tmp_path):
    root = write_repository(tmp_path, {"a": "true"})
    assert hilgate(root, "plan", "--write", "plan.json").returncode == 0
    (root / "plan.json").write_text((root / "plan.json").read_text().replace('"findings"', '"tap"'))
    with pytest.raises(RecordsError, match="a-cpu leaves evidence of the kind 'tap', which is unknown here"):
        read_plan(root / "plan.json")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m pytest tests/a.py tests/b.py -q", f"python -m pytest -q {FILE}"),
        ("python -m pytest tests/a.py::test_x", f"python -m pytest {FILE}"),
        ("pytest --ignore tests/a.py tests -x", f"pytest --ignore tests/a.py -x {FILE}"),
        ("pytest --ignore=tests/a.py tests", f"pytest --ignore=tests/a.py {FILE}"),
        ("pytest -q", ""),
        ("pytest no/such/path", ""),
        ("python -m hileval tests/a.py", ""),
    ],
    ids=["paths", "node-id", "ignored-word", "ignored-joined", "no-path", "missing-path", "not-pytest"],
)
def test_a_command_is_narrowed_or_left_alone(tmp_path, command, expected):
    (tmp_path / "tests").mkdir()
    for name in "ab":
        (tmp_path / "tests" / f"{name}.py").write_text("")
    assert KINDS["junit"].narrow(command, (TEST,), tmp_path) == expected


def test_more_failures_than_flakes_are_not_run_again():
    many = [failed(f"tests/t.py::test_{n}") for n in range(21)]
    for some in (many[1:], many[:1], []):
        assert KINDS["junit"].failing_ids([*some, passed()]) == tuple(check.id for check in some)
    assert KINDS["junit"].failing_ids(many) == ()


@pytest.mark.parametrize("name", ["-p evil", "--co", "/etc/x.py::a", "it breaks", "a.py", "(the evidence is whole)"])
def test_pytest_is_not_given_what_it_could_misread(name):
    assert KINDS["junit"].failing_ids([failed(name)]) == ()


OURS = "python -m pytest tests"
"""A command in which our plugins run."""


def junit(tmp_path, *cases, collected="", more=""):
    """A junit.xml of these cases, as it is collected from a step of `OURS`."""
    told = f'<properties><property name="collected" value="{collected}"/></properties>' if collected else ""
    text = f"<testsuites><testsuite>{told}{''.join(cases)}{more}</testsuite></testsuites>"
    (tmp_path / "junit.xml").write_text(text)
    return KINDS["junit"].collect(tmp_path, tmp_path, OURS)


def test_our_pytest_gets_our_plugins_and_any_other_none(tmp_path):
    file = f"--junitxml={tmp_path}/junit.xml"
    plugins = ["-p", "hilgate.pytest_plugin", "-p", "hilgate.pytest_listing"]
    assert KINDS["junit"].arguments(OURS, tmp_path) == [*plugins, file]
    assert KINDS["junit"].arguments("pytest tests", tmp_path) == [file]
    assert KINDS["findings"].arguments(OURS, tmp_path) == []


def test_our_pytest_must_say_how_many_tests_it_collected(tmp_path):
    other = CASE.replace('"a"', '"b"')
    assert "does not say how many tests pytest collected" in junit(tmp_path, CASE).problem
    assert junit(tmp_path, CASE, other, collected="2") == KINDS["junit"].read(tmp_path / "junit.xml", tmp_path)
    assert KINDS["junit"].read(tmp_path / "junit.xml", tmp_path).counted
    assert "does not say how many" in junit(tmp_path, CASE, collected="1" * 10).problem
    assert junit(tmp_path, CASE, collected="2").problem == ("pytest collected 2 tests, and its junit.xml reports 1")
    assert "does not say how many" in junit(tmp_path, CASE, collected="-1").problem
    assert KINDS["junit"].collect(tmp_path, tmp_path, "pytest tests").problem == ""
    assert junit(tmp_path, CASE, other, collected="1").problem == ""  # more is no loss
    inner = f"<testsuite>{other}</testsuite>"
    assert [check.id for check in junit(tmp_path, CASE, collected="2", more=inner).checks] == ["t::a", "t::b"]


def test_the_numbers_of_a_suite_are_told_apart_by_name(tmp_path):
    said = {"aside": 7, "collected": 1, "deselected": 3, "zone": 9}
    values = "".join(f'<property name="{name}" value="{number}"/>' for name, number in said.items())
    suite = f"<testsuite><properties>{values}</properties>{CASE}</testsuite>"
    (tmp_path / "junit.xml").write_text(f"<testsuites>{suite}{suite.replace(CASE, '')}</testsuites>")
    found = KINDS["junit"].collect(tmp_path, tmp_path, OURS)
    assert (found.problem, found.deselected) == ("pytest collected 2 tests, and its junit.xml reports 1", 0)
    (tmp_path / "junit.xml").write_text(f"<testsuites>{suite}</testsuites>")
    found = KINDS["junit"].collect(tmp_path, tmp_path, OURS)
    assert (found.problem, found.counted, found.deselected) == ("", True, 3)


@pytest.mark.parametrize(("levels", "problem"), [(46, ""), (47, "nested more than 50 deep")])
def test_suites_are_nested_as_deep_as_any_writer_nests_them(levels, problem, tmp_path):
    """Cases that stand beside each other are no level, wherever they stand."""
    cases = f"{CASE[:-2]}><properties><property name='n' value='1'/></properties></testcase>" * 60
    inner = f"{'<testsuite>' * levels}{CASE}{'</testsuite>' * levels}"
    (tmp_path / "junit.xml").write_text(
        f"<testsuites><testsuite>{cases}<testsuite>{cases}{inner}</testsuite></testsuite></testsuites>"
    )
    found = KINDS["junit"].collect(tmp_path, tmp_path).problem
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("inside", "outcome", "message"),
    [
        ('<failure message=" said "/>', Outcome.FAIL, "said"),
        ("<failure> text </failure>", Outcome.FAIL, "text"),
        ("<failure/>", Outcome.FAIL, "failure without a message"),
        ("<error/>", Outcome.FAIL, "error without a message"),
        ('<error message="first"/><failure message="second"/>', Outcome.FAIL, "first"),
        ('<failure message="first"/><skipped message="second"/>', Outcome.FAIL, "first"),
        (
            '<failure message="said with "><![CDATA[>   run()\nE   ValueError: 1]]></failure>',
            Outcome.FAIL,
            "ValueError: 1",
        ),
        ('<error message="failed on setup with x"><![CDATA[E   X]]></error>', Outcome.FAIL, "failed on setup: X"),
        ("<skipped/>", Outcome.DID_NOT_RUN, "skipped without a reason"),
        ('<skipped message=" far "/>', Outcome.DID_NOT_RUN, "far"),
        ('<skipped type="pytest.xfail" message="known"/>', Outcome.DID_NOT_RUN, "expected to fail: known"),
        ('<skipped type="pytest.skip" message="known"/>', Outcome.DID_NOT_RUN, "known"),
    ],
)
def test_what_a_case_says_is_its_outcome_and_message(tmp_path, inside, outcome, message):
    (check,) = junit(tmp_path, f"{CASE[:-2]}>{inside}</testcase>").checks
    assert (check.outcome, check.message) == (outcome, message)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("1.5", 1.5), ("0", 0.0), ("0.25", 0.25), ("-2", 0.0), ("inf", 0.0), ("nan", 0.0), (None, 0.0)],
)
def test_seconds_of_a_case_are_finite_and_not_negative(tmp_path, time, seconds):
    (check,) = junit(tmp_path, CASE.replace("/>", f' time="{time}"/>') if time else CASE).checks
    assert check.seconds == seconds


@pytest.mark.parametrize("others", [[CASE], []], ids=["one of two", "the only one"])
def test_an_unrecordable_case_is_a_problem_and_others_are_kept(tmp_path, others):
    found = junit(tmp_path, CASE.replace('"a"', f'"{"a" * LONGEST_TEXT}"'), *others, collected="1")
    assert found.problem.startswith("its junit.xml holds a test that cannot be recorded: id: ")
    assert [check.id for check in found.checks] == ["t::a"] * len(others)


def test_properties_of_a_case_without_name_or_value_are_kept(tmp_path):
    said = {"n": "0", "x": "-1e3", "inf": "inf", "most": str(2**63 - 1), "more": str(2**63), "huge": "9" * 400}
    values = "".join(f'<property name="{name}" value="{value}"/>' for name, value in said.items())
    text = f"{CASE[:-2]}><properties>{values}<property name='empty'/><property value='v'/></properties></testcase>"
    (check,) = junit(tmp_path, text).checks
    assert check.numbers == {"n": 0, "x": -1000.0, "most": 2**63 - 1, "more": 2.0**63}
    assert [type(number) for number in check.numbers.values()] == [int, float, int, float]
    assert check.labels == {"inf": "inf", "huge": "9" * 400, "empty": "", "(no name)": "v"}


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [
        ("tests.deep.test_x", "tests/deep/test_x.py::test_a"),
        ("tests.deep.test_x.TestX", "tests/deep/test_x.py::TestX::test_a"),
        ("tests.deep.test_x.TestX.TestY", "tests/deep/test_x.py::TestX::TestY::test_a"),
        ("top", "top.py::test_a"),
        ("top.TestX", "top.py::TestX::test_a"),
        ("tests.gone", "tests.gone::test_a"),
        ("", "test_a"),
        ("..deep", "..deep::test_a"),
        ("a" * 999, f"{'a' * 999}::test_a"),
    ],
)
def test_an_id_names_the_longest_prefix_that_is_a_file(tmp_path, class_name, expected):
    (tmp_path / "tests/deep").mkdir(parents=True)
    for name in ("tests/deep/test_x.py", "top.py", "tests/deep.py"):
        (tmp_path / name).touch()
    case = CASE.replace('"t"', f'"{class_name}"').replace('"a"', '"test_a"')
    assert [check.id for check in junit(tmp_path, case).checks] == [expected]


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (["t.py:3: ", "help.py:7: ValueError"], "t.py:3: ValueError (help.py:7)"),
        (["t.py:3: ", "t.py:5: ", "help.py:7: X"], "t.py:5: X (help.py:7)"),
        (["t.py:3: ", "z.py:7: X"], "t.py:3: X (z.py:7)"),
        (["t.py:3: ", "t.py:5: X"], "t.py:5: X"),
        (["help.py:7: X"], "help.py:7: X"),
        (["t.py:3: "], ""),
        ([], ""),
    ],
)
def test_a_failures_place_is_the_tests_line_then_the_helpers(tmp_path, frames, place):
    (tmp_path / "t.py").touch()
    text = "\n\n".join(["def test_a():", *frames])
    (check,) = junit(tmp_path, f'{CASE[:-2]}><failure message="m">{text}</failure></testcase>').checks
    assert check.message == (f"m\n{place}" if place else "m")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (">   assert same(a, b)\nE   assert False", "assert same(a, b)"),
        (
            ">   assert same(a, b)\nE   assert False\nE    +  where False = same(1)",
            "assert same(a, b)\n +  where False = same(1)",
        ),
        (">   assert not a\nE   assert not 3", "assert not a\nassert not 3"),
        (">   assert a == b\nE   assert 1 == 2", "assert 1 == 2"),
        (">   assert f() == b\nE   assert 1 == 2\nE    +  where 1 = f()", "assert 1 == 2\n +  where 1 = f()"),
        (">   assert a\nE   AssertionError: assert 0\nE    +  where", "assert a\nassert 0\n +  where"),
        (">   assert 0\nE   assert 0", "assert 0"),
        (">   assert RUNS\nE   assert []", "assert RUNS\nassert []"),
        (">   run()\nE   assert False", "assert False"),
        (">   run(\n        1,\n    )\nE   ValueError: x\nE     y", "ValueError: x\n  y"),
        (">   assert same(\n        1,\n    )\nE   assert False", "assert same(1)"),
        (">   first()\nE   X\n\n>   second()\nE   Y", "Y"),
        ("E   X\n\nsize = 3\nE    = 4", "= 4"),
        (">   first()\nE   X\n\nE          = 4", "X"),
    ],
)
def test_a_failure_is_explained_by_statement_and_pytests_words(tmp_path, body, message):
    (check,) = junit(tmp_path, f'{CASE[:-2]}><failure message="cut"><![CDATA[{body}]]></failure></testcase>').checks
    assert check.message == message


@pytest.mark.parametrize(
    ("command", "id_", "reached"),
    [
        ("python -m pytest tests/a.py", "tests/a.py::test_a", True),
        ("python -m pytest tests/a.py::test_b", "tests/a.py::test_a", True),
        ("python -m pytest tests/a.py", "tests/ab.py::test_a", False),
        ("python -m pytest tests", "tests/a.py::test_a", True),
        ("python -m pytest ./tests/", "tests/a.py::test_a", True),
        ("python -m pytest more tests", "tests/a.py::test_a", True),
        ("python -m pytest tests --ignore tests/a.py", "tests/a.py::test_a", False),
        ("python -m pytest tests --ignore=tests/deep", "tests/deep/a.py::test_a", False),
        ("python -m pytest tests --ignore=tests/deep", "tests/a.py::test_a", True),
        ("python -m pytest -q", "tests/a.py::test_a", True),
        ("pytest -q", "tests/a.py::test_a", True),
        ("nice pytest -q", "tests/a.py::test_a", True),
        ("python -m pytest .", "tests/a.py::test_a", True),
        ("python -m pytest .", "/elsewhere/a.py::test_a", False),
        ("python -m hileval tests", "tests/a.py::test_a", False),
        ("python -m hileval tests", "no node id", True),
        ("python -m pytest more", "tests/a.py", True),
        ("python -m pytest more", "a::b", True),
    ],
)
def test_a_command_reaches_the_tests_it_names_and_keeps(command, id_, reached):
    assert KINDS["junit"].reaches(command, id_) is reached
    assert KINDS["findings"].reaches(command, id_)


@pytest.mark.parametrize(
    ("command", "tests"),
    [
        ("python -m pytest tests/a.py -k word tests/b.py::test_x -q", ("tests/a.py", "tests/b.py::test_x")),
        ("python -m pytest -q", (".",)),
        ("pytest tests/a.py", ()),
        ("python3 -m pytest tests/a.py", ()),
        ("python -m hileval tests/a.py", ()),
    ],
)
def test_the_tests_of_a_command_stand_where_paths_do(command, tests):
    assert KINDS["junit"].tests(command) == tests
    assert KINDS["findings"].tests(command) == ()


def test_a_command_over_another_tree_names_what_is_there(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for file in (here / "a.py", here / "new.py", there / "a.py", there / "old.py"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    over = KINDS["junit"].over_other_tree
    assert over("pytest a.py new.py::test_x old.py -o option", here, there) == "pytest a.py old.py -o option"
    assert over("pytest new.py", here, there) == ""
    assert over("pytest nowhere.py new.py", here, there) == ""
    assert over("pytest -q", here, there) == "pytest -q"
    assert over("pytest nowhere.py a.py", here, there) == "pytest nowhere.py a.py"
    assert KINDS["findings"].over_other_tree("pytest a.py", here, there) == ""


def test_a_narrowed_command_keeps_the_named_tests_of_a_file(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    narrow = KINDS["junit"].narrow
    assert narrow("pytest a.py::x a.py::y b.py", ("a.py::x", "a.py::y"), tmp_path) == "pytest a.py::x a.py::y"
    assert narrow("pytest a.py::x b.py", ("b.py::z",), tmp_path) == "pytest b.py"
    assert narrow("pytest a.py b.py", (), tmp_path) == ""
    assert KINDS["findings"].narrow("pytest a.py", ("a.py::x",), tmp_path) == ""
    assert KINDS["junit"].selector("a.py::test_x") == "-k test_x"
    assert KINDS["junit"].selector("no node id") == ""
    assert KINDS["findings"].selector("a.py::test_x") == ""


LONG = "9" * 61
QUOTED = "9" * 60


@pytest.mark.parametrize(
    ("suite", "case", "problem"),
    [
        (f'tests="{"9" * 9}"', "", f"announces {'9' * 9} tests and holds 1"),
        (f'tests="{LONG}"', "", f"announces tests={QUOTED}"),
        ('errors="x" failures="y"', "", "announces failures=y"),
        ('skipped="1" disabled="1"', "", "announces 2 tests that did not run and holds 0"),
        ('skipped="2" disabled="1"', "<skipped/>", "announces 3 tests that did not run and holds 1"),
        ('skipped="1"', "<skipped/>", ""),
        ('failures="2" errors="1"', "<failure/><error/>", "announces 3 failures and holds 2"),
        ('failures="1" errors="1"', "<failure/><error/>", ""),
        ('failures="1" errors="1"', "<failure/>", "announces 2 failures and holds 1"),
        ('failures="2" errors="1"', "<failure/><failure/><error/>", ""),
        ('skipped="1" disabled="1"', "<skipped/>", "announces 2 tests that did not run and holds 1"),
        ('skipped="2" disabled="1"', "<skipped/><skipped/><skipped/>", ""),
        ("", "<strange/><stranger/>", "has <strange> in a testcase, which is no result of a test"),
    ],
)
def test_what_a_suite_announces_and_does_not_hold_is_a_problem(tmp_path, suite, case, problem):
    case = f"{CASE[:-2]}>{case}</testcase>"
    (tmp_path / "junit.xml").write_text(f"<testsuites><system-out/><testsuite {suite}>{case}</testsuite></testsuites>")
    assert KINDS["junit"].collect(tmp_path, tmp_path).problem == (f"its junit.xml {problem}" if problem else "")


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        (f'time="x{LONG}"', f"has a testcase whose time is {'x' + QUOTED[:-1]!r}"),
        (f'status="x{LONG}"', f"has a testcase whose status is {'x' + QUOTED[:-1]!r}, of which nothing is known"),
    ],
)
def test_what_a_case_says_and_nobody_knows_is_quoted_in_part(tmp_path, attributes, problem):
    found = junit(tmp_path, CASE.replace("/>", f" {attributes}/>"), collected="1")
    assert found.problem == f"its junit.xml {problem}"
    if "status" in attributes:
        assert (found.checks[0].outcome, found.checks[0].message) == (
            Outcome.DID_NOT_RUN,
            f"its status is {'x' + QUOTED[:-1]!r}",
        )


@pytest.mark.parametrize(("said", "reason"), [("", "no reason given"), (": enough: 3", "enough: 3")])
def test_a_session_that_was_ended_says_why(tmp_path, said, reason):
    (tmp_path / "log.txt").write_text(f"first\n!!!! _pytest.outcomes.Exit{said} !!!!\nlast\n")
    assert junit(tmp_path, CASE, collected="1").problem == (
        f"its junit.xml is of a session that a test ended (pytest.exit: {reason})"
    )


def test_an_exit_status_has_a_meaning():
    assert set(KINDS["junit"].exits) <= {status.value for status in pytest.ExitCode}
    assert KINDS["junit"].exit_meaning(5) == "exit 5 (no tests were collected)"
    assert KINDS["junit"].exit_meaning(6) == "exit 6"
    assert (KINDS["junit"].no_checks, KINDS["findings"].no_checks) == (5, Exit.PASS)
    assert KINDS["findings"].exit_meaning(-1) == "killed by SIGHUP"
    assert [KINDS[name].cannot_run_here(status) for name in ("junit", "findings") for status in (5, 4, None)] == [
        *(False, False, False),
        *(True, False, False),
    ]
    with pytest.raises(TypeError, match="abstract"):
        EvidenceKind()


IMAGE = step("image", "python -c pass", key="image-rocm-cpu", provides="rocm")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"content": "0" * 64}, f"its image.json is of rocm of {'0' * 64}; planned: rocm of {CONTENT}"),
        ({"image": "cpu"}, f"its image.json is of cpu of {CONTENT}; planned: rocm of {CONTENT}"),
        ({"step": "other"}, f"its image.json is of rocm of {CONTENT}"),
        ({"digest": "latest"}, "its image.json is not a record of an image: 1 validation error for ImageRecord"),
        (None, "it left no image.json, and it builds the image 'rocm'"),
        ("[]", "its image.json is not a record of an image: "),
        ("{", "its image.json is not a record of an image: "),
        ("[" * 100_000, "its image.json is not a record of an image: "),
    ],
)
def test_a_step_that_builds_an_image_leaves_its_record(tmp_path, changes, why):
    if changes is not None:
        fields = {"image": "rocm", "content": CONTENT, "digest": DIGEST}
        text = changes if isinstance(changes, str) else json.dumps(fields | changes)
        (tmp_path / "image.json").write_text(text)
    record, problem = evidence.collect_image(IMAGE, agents_plan(), tmp_path)
    assert problem.startswith(why)
    assert bool(problem) == bool(why)
    assert "\n" not in problem
    assert (record is not None) == (not why)
    if record:
        assert (record.step, record.digest) == (IMAGE.key, DIGEST)
    assert evidence.collect_image(step("a", "x"), agents_plan(), tmp_path) == (None, "")
    (tmp_path / "image.json").unlink(missing_ok=True)
    (tmp_path / "image.json").mkdir()
    assert "[Errno 21]" in evidence.collect_image(IMAGE, agents_plan(), tmp_path)[1]
