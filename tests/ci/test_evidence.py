# SPDX-License-Identifier: Apache-2.0
"""Evidence of steps: real pytest runs and damaged files."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import pytest
from support.jobs import TEST, failed, passed
from support.plans import hilgate, runner, write_repository

from hilgate import evidence
from hilgate.errors import Exit, RecordsError
from hilgate.evidence import EVIDENCE_CHECK, KINDS, MOST_IDS, MOST_TEXT, Collected, EvidenceKind, register
from hilgate.judge.verdict import read_verdict
from hilgate.model.record import Check, Outcome
from hilgate.model.verdict import Ruling
from hilgate.plan.make import plan_digest, read_plan
from hilgate.run import recheck
from hilgate.run.results import RESULTS_FILE, read, read_all

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


def test_values_of_showlocals_are_no_message(tmp_path):
    checks = pytest_junit(tmp_path, TESTS, "--showlocals", "-k", "bare_setup").checks
    assert checks[0].message.startswith("failed on setup: assert not size\nassert not 3\n")


def test_recorded_properties_are_numbers_when_they_are_and_labels_otherwise(collected):
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
    assert [check.numbers for check in found.checks] == [{"subtest_reports": 2}, {"subtest_reports": 3}]


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
@pytest.mark.parametrize("said", ["4", "2", "9" * 5000, "-1"], ids=["4", "2", "huge", "negative"])
def test_a_count_of_subtests_excuses_no_lost_test(plugin, said, tmp_path, monkeypatch):
    (tmp_path / "losing.py").write_text(LOSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = (
        "def test_kept(record_property, subtests):\n"
        f"    record_property('subtest_reports', '{said}')\n"
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
    assert all(MOST_TEXT < len(text) < MOST_TEXT + 60 for text in texts)


def test_no_tests_is_a_problem(tmp_path):
    assert "holds no tests" in pytest_junit(tmp_path, TESTS, "-k", "nothing_like_this").problem


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
            '<testsuites><testsuite name="a" tests="2"><testcase classname="a" name="b"/></testsuite></testsuites>',
            "announces 2 tests and holds 1",
        ),
        (
            '<!DOCTYPE a [<!ENTITY b "c">]><testsuites><testsuite><testcase name="&b;"/></testsuite></testsuites>',
            "cannot be read: it has a DOCTYPE",
        ),
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
    "announced failures": (
        f'<testsuite tests="1" failures="2" errors="1">{CASE}</testsuite>',
        "announces 3 failures and holds 0",
    ),
    "an announced error": (f'<testsuite tests="1" errors="1">{CASE}</testsuite>', "announces 1 failures and holds 0"),
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
    "a flaky failure": (
        f'<testsuite>{CASE[:-2]}><flakyFailure message="m"/></testcase></testsuite>',
        "has <flakyFailure> in a testcase",
    ),
    "no count": (f'<testsuite tests="{"9" * 5000}">{CASE}</testsuite>', "announces tests=999"),
    "announced skips": (f'<testsuite skipped="1">{CASE}</testsuite>', "announces 1 tests that did not run and holds 0"),
    "announced disabled": (f'<testsuite disabled="1">{CASE}</testsuite>', "announces 1 tests that did not run"),
    "a state that nobody knows": (
        f'<testsuite>{CASE[:-2]} status="Quarantined"/></testsuite>',
        "has a testcase whose status is 'quarantined', of which nothing is known",
    ),
    "no number": (f'<testsuite failures="-1">{CASE}</testsuite>', "announces failures=-1"),
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
        f"<testsuites><testsuite>{CASE[:-2]} {state}/></testsuite></testsuites>", "utf-8"
    )
    (check,) = KINDS["junit"].collect(tmp_path, tmp_path).checks
    assert check.outcome is STATES[state]


@pytest.mark.parametrize(
    "order", [("fail", "pass"), ("pass", "fail"), ("fail", "skip"), ("skip", "fail")], ids=" ".join
)
def test_of_two_cases_of_one_test_the_failure_counts_in_either_order(order, tmp_path):
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
    assert KINDS["findings"].collect(tmp_path / "out", tmp_path) == evidence.Collected(checks)


TAP_SCRIPT = """
import pathlib, sys
out = next(word[6:] for word in sys.argv if word.startswith("--tap="))
names = [word[7:] for word in sys.argv if word.startswith("--only=")] or ["steady", "moody"]
seen = pathlib.Path("results/seen")
broken = [] if seen.exists() else ["moody"]
seen.write_text("")
pathlib.Path(out).write_text("".join(f"{'not ok' if name in broken else 'ok'} {name}\\n" for name in names))
sys.exit(1 if broken else 0)
"""


class TapEvidence(EvidenceKind):
    """A third kind, which the product does not have: lines of `ok name` and `not ok name`."""

    name = "tap"
    file = "checks.tap"
    exits: ClassVar = {5: "no test points"}

    def arguments(self, command, folder):  # noqa: ARG002
        return [f"--tap={folder / self.file}"]

    def read(self, path, root):  # noqa: ARG002
        found = [line.rpartition(" ") for line in path.read_text().splitlines()]
        outcomes = [(name, Outcome.PASS if word == "ok" else Outcome.FAIL) for word, _, name in found]
        return Collected(tuple(Check(id=name, outcome=one, message="not ok") for name, one in outcomes))

    def failing_ids(self, checks):
        return tuple(check.id for check in checks if check.outcome is Outcome.FAIL)

    def narrow(self, command, ids, root):  # noqa: ARG002
        return " ".join([command, *(self.selector(name) for name in ids)])

    def selector(self, check):
        return f"--only={check}"


@pytest.fixture
def tap():
    register(TapEvidence())
    yield
    del KINDS["tap"]


@pytest.mark.usefixtures("tap")
def test_every_stage_honours_a_kind_that_is_registered(tmp_path):
    (tmp_path / "tap.py").write_text(TAP_SCRIPT)
    root = write_repository(tmp_path, {"a": "python tap.py"}, a={"evidence": "tap"})
    done = hilgate(root, "gate")
    assert done.returncode == Exit.INCONCLUSIVE, done.stderr
    plan, verdict = read_plan(root / "results" / "plan.json"), read_verdict(root / "results" / "verdict.json")
    (ruled,) = verdict.steps
    assert (plan.steps[0].step.evidence, ruled.ruling, ruled.flaky) == ("tap", Ruling.FLAKY, ("moody",))
    assert ruled.reproduce == "hilgate run a-cpu -- --only=moody"
    for report in ("report.html", "annotation.md", "junit.xml"):
        assert "moody" in (root / "results" / report).read_text(), report
    digest = plan_digest(plan)
    recorded = read_all(root / "results", None, plan, digest)
    ids = recheck.pending(plan, recorded)["a-cpu"]
    assert ids == ("moody",)
    key = frozenset({"a-cpu"})
    runner(plan, root / "results" / "again", root=root, only=key, job="a-cpu", only_ids=ids).run()
    (rerun,) = read(root / "results" / "again" / RESULTS_FILE, plan, digest, "a-cpu", elsewhere=True).reruns
    assert (rerun.check, rerun.outcome) == ("moody", Outcome.PASS)
    assert not KINDS["tap"].cannot_run_here(5)
    assert KINDS["tap"].exit_meaning(5) == "exit 5 (no test points)"


def test_a_plan_whose_kind_of_evidence_is_unknown_here_is_refused(tmp_path):
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
    many = [failed(f"tests/t.py::test_{n}") for n in range(MOST_IDS + 1)]
    assert KINDS["junit"].failing_ids(many) == ()
    assert len(KINDS["junit"].failing_ids(many[1:])) == MOST_IDS


@pytest.mark.parametrize("name", ["-p evil", "--co", "/etc/x.py::a", "it breaks", "a.py", "(the evidence is whole)"])
def test_what_pytest_could_read_as_something_else_is_not_given_to_it(name):
    assert KINDS["junit"].failing_ids([failed(name)]) == ()
