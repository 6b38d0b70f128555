# SPDX-License-Identifier: Apache-2.0
"""What a machine may lack: how it is asked, how pytest tells what a test needs, and what becomes of the step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.plans import hilgate, plan, results_of, step, write_repository

from hilgate.conditions import Where, cpu_flags, holds, problem_of
from hilgate.errors import Exit
from hilgate.evidence import KINDS
from hilgate.model.declaration import Step
from hilgate.model.record import Outcome

NO_AMX = "processor : 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor : 1\nflags\t\t: fpu avx2\n"
HERE = Path(__file__).parents[3]


@pytest.fixture
def cpuinfo(tmp_path):
    (tmp_path / "cpuinfo").write_text(NO_AMX)
    return tmp_path / "cpuinfo"


def test_a_flag_counts_that_every_processor_has(cpuinfo, tmp_path):
    assert cpu_flags(cpuinfo) == {"fpu", "avx2"}
    assert cpu_flags(tmp_path / "missing") == set()
    assert holds("cpu:avx2", Where(cpuinfo=cpuinfo))
    assert not holds("cpu:amx_tile", Where(cpuinfo=cpuinfo))
    cpuinfo.write_text("flags : avx2 amx_tile amx_int8\n")
    assert holds("cpu:amx_tile", Where(cpuinfo=cpuinfo))
    assert holds("cpu:!avx512_bf16", Where(cpuinfo=cpuinfo))
    assert not holds("cpu:!amx_tile", Where(cpuinfo=cpuinfo))


@pytest.mark.parametrize(
    ("condition", "here", "answer"),
    [
        ("package:pytest", Where(), True),
        ("package:no-such-thing", Where(), False),
        ("package:pytest!=0.0.1", Where(), True),
        (f"package:pytest!={pytest.__version__}", Where(), False),
        ("package:no-such-thing!=1", Where(), False),
        ("program:sh", Where(), True),
        ("program:sh", Where(env={"PATH": "/nowhere"}), False),
        ("program:no-such-thing", Where(), False),
        ("variable:WORD", Where(env={"WORD": "x"}), True),
        ("variable:WORD", Where(env={"WORD": ""}), False),
        ("variable:WORD", Where(env={}), False),
        ("user:nobody-of-that-name", Where(), False),
        ("device:cuda,rocm", Where("cpu"), False),
        ("device:cuda,rocm", Where("gfx942"), True),
        ("device:gfx950", Where("gfx942"), False),
        ("device:cpu", Where("cpu"), True),
        ("gpus:2", Where("cuda", 1), False),
        ("gpus:2", Where("cuda", 2), True),
    ],
)
def test_each_kind_is_asked(condition, here, answer):
    assert problem_of(condition) == ""
    assert holds(condition, here) is answer


@pytest.mark.parametrize("text", ["amx", "amx:tile", "gpus:0", "gpus:two", "cpu:", "program:a b", "package:vllm==1"])
def test_what_is_no_condition_is_refused(text):
    assert "is no condition" in problem_of(text)
    with pytest.raises(ValueError, match="is no condition"):
        holds(text, Where())
    with pytest.raises(ValueError, match="is no condition"):
        Step.model_validate(step("a", "python -c pass").step.model_dump() | {"may_lack": {text: "what"}})


TESTS = """
import pytest

@pytest.mark.needs("program:sh")
def test_here(): ...

@pytest.mark.needs("program:sh", "program:no-such-thing")
def test_not_here(): assert False

@pytest.mark.parametrize("ranks", [1, 2])
def test_found_out(ranks, lacks):
    if ranks == 2:
        lacks("gpus:2", "a second rank")

@pytest.mark.skip(reason="no time")
def test_without(): ...
"""


def run_pytest(folder, text, *arguments):
    """Run a file of tests as a step of hilgate does, and collect what it left."""
    (folder / "test_sample.py").write_text(text)
    kind = KINDS["junit"]
    words = kind.arguments("python -m pytest test_sample.py", folder)
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder), *arguments]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(HERE / "ci")}
    command = [sys.executable, "-m", "pytest", "test_sample.py", *options, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done, kind.collect(folder, folder)


def test_pytest_tells_what_a_test_needs(tmp_path):
    done, found = run_pytest(tmp_path, TESTS)
    assert (done.returncode, found.problem) == (0, ""), done.stdout
    said = {
        one.id.partition("::")[2]: (one.outcome.value, one.labels.get("needs"), one.message) for one in found.checks
    }
    assert said == {
        "test_here": ("pass", "program:sh", ""),
        "test_not_here": ("did not run", "program:sh program:no-such-thing", "needs program:no-such-thing"),
        "test_found_out[1]": ("pass", None, ""),
        "test_found_out[2]": ("did not run", "gpus:2", "a second rank needs gpus:2"),
        "test_without": ("did not run", None, "no time"),
    }


@pytest.mark.parametrize(
    ("condition", "what"), [("amx", "is no condition"), ("gpus:2", "use the fixture `lacks`")], ids=["unknown", "gpus"]
)
def test_a_marker_that_cannot_be_asked_is_a_usage_error(tmp_path, condition, what):
    done, found = run_pytest(tmp_path, TESTS.replace("program:sh", condition))
    assert done.returncode == 4
    assert what in done.stderr
    assert found.checks == ()


def test_workers_of_xdist_tell_how_many_tests_were_collected(tmp_path):
    text = "def test_one(): ...\ndef test_two(): ...\n"
    done, found = run_pytest(tmp_path, text, "-p", "xdist.plugin", "-n", "2")
    assert (done.returncode, found.problem, len(found.checks), found.counted) == (0, "", 2, True), done.stdout
    report = (tmp_path / "junit.xml").read_text()
    assert report.count('<property name="collected" value="2"') == 1


def test_an_empty_parameter_set_is_an_error(tmp_path):
    """The setting of this repository: a folder of cases that was renamed leaves no green test behind."""
    settings = (HERE / "pyproject.toml").read_text()
    assert 'empty_parameter_set_mark = "fail_at_collect"\n' in settings
    text = "import pytest\n@pytest.mark.parametrize('case', [])\ndef test_case(case): ...\ndef test_other(): ...\n"
    done, _ = run_pytest(tmp_path, text, "-o", "empty_parameter_set_mark=fail_at_collect")
    assert done.returncode == 2, done.stdout


MAY_LACK = {
    "program:no-such-thing": {"why": "the second test needs no-such-thing", "most": 1},
    "variable:WORD_OF_A_TEST": {"why": "it needs a word", "most": 1},
}
TWO = """
import pytest
def test_one(): ...
@pytest.mark.needs("{condition}")
def test_two(): ...
"""


def ended(tmp_path, text, **declared):
    (tmp_path / "test_two.py").write_text(text)
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(HERE / "ci")}
    settings = {"evidence": "junit", "env": env, **declared}
    a_plan = plan(step("a", "python -m pytest test_two.py -c /dev/null -p no:cacheprovider", **settings))
    return results_of(a_plan, tmp_path / "out", root=tmp_path).last("a-cpu").record


def test_a_step_says_what_cannot_run_here_and_passes(tmp_path):
    record = ended(tmp_path, TWO.format(condition="program:no-such-thing"), may_lack=MAY_LACK)
    assert record.outcome is Outcome.PASS
    assert record.message == "1 check passed, 1 cannot run here: the second test needs no-such-thing"
    assert record.lacked == tuple(MAY_LACK)


def test_a_condition_is_asked_in_the_environment_of_the_step(tmp_path):
    text = TWO.format(condition="variable:WORD_OF_A_TEST")
    assert ended(tmp_path, text, may_lack=MAY_LACK).outcome is Outcome.PASS
    env = {"WORD_OF_A_TEST": "x", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(HERE / "ci")}
    record = ended(tmp_path, text, may_lack=MAY_LACK, env=env)
    assert (record.lacked, record.message) == (("program:no-such-thing",), "2 passed")


@pytest.mark.parametrize(
    ("excuse", "said"),
    [
        ("it needs AMX", "is a sentence without a number"),
        ({"why": "it needs AMX"}, "key 'most' is missing"),
        ({"why": "it needs AMX", "most": 0}, "must be greater than or equal to 1, got 0"),
        ({"why": "it needs AMX", "most": "14"}, "must be a valid integer, got '14'"),
        ({"why": "", "most": 1}, "must have at least 1 character"),
    ],
)
def test_an_excuse_without_a_number_is_refused_with_its_place(tmp_path, excuse, said):
    root = write_repository(tmp_path, {"a": "python -c pass"}, a={"may_lack": {"cpu:amx_tile": excuse}})
    done = hilgate(root, "plan")
    assert done.returncode == Exit.INVALID_DECLARATION
    assert said in done.stderr, done.stderr
    assert "where: ci/areas/samples.yaml:1 steps[0].may_lack.cpu:amx_tile" in done.stderr
    if isinstance(excuse, str):
        assert "write {why: it needs AMX, most: N}" in done.stderr
