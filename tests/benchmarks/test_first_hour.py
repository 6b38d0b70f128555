# SPDX-License-Identifier: Apache-2.0
"""The first hour stops at nothing, counts nothing as passed without evidence, and leaves one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import yaml

from benchmarks import first_hour, run
from benchmarks.cases import CASES
from benchmarks.first_hour import Part

ROOT = Path(__file__).parents[2]
NO_GPU = '{"gpu": "", "arch": "", "gpus": 0, "hip": "", "cuda": ""}'
JUNIT = '<testsuite tests="{}" failures="{}" errors="0" skipped="{}"/>'


def part(name, code, evidence="output", limit_s=60, **more):
    return Part(name, (sys.executable, "-c", code, "{out}"), limit_s, evidence, **more)


def junit(name, tests, failures, skipped, status):
    text = JUNIT.format(tests, failures, skipped)
    code = f"import pathlib, sys; pathlib.Path(sys.argv[1], 'junit.xml').write_text({text!r}); sys.exit({status})"
    return part(name, code, "junit.xml")


PASSES = part("passes", "print('right')")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the hour with these parts; return its status and what its file holds."""
    monkeypatch.setattr(first_hour, "PROBE", f"print({NO_GPU!r})")
    monkeypatch.setattr(first_hour, "TOOLS", {})
    monkeypatch.setattr(first_hour, "GRACE_S", 1)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*parts, arguments=()):
        known = set(tmp_path.glob("*.tar.gz"))
        status = first_hour.main(["--out", str(tmp_path), *arguments], parts)
        (file,) = set(tmp_path.glob("*.tar.gz")) - known
        return status, unpacked(file)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def unpacked(file):
    with tarfile.open(file) as archive:
        return {
            one.name.removeprefix("first-hour/"): archive.extractfile(one).read() for one in archive if one.isfile()
        }


def outcomes(files):
    return {one["name"]: (one["outcome"], one["what"]) for one in json.loads(files["summary.json"])["parts"]}


ENDINGS = [
    (PASSES, "passed", "right"),
    (junit("tests-pass", 3, 0, 1, 0), "passed", "2 passed, 1 skipped"),
    (junit("tests-fail", 3, 1, 0, 1), "failed", "2 passed, 1 failed"),
    (junit("failure-with-status-0", 3, 1, 0, 0), "failed", "2 passed, 1 failed"),
    (junit("all-skipped", 3, 0, 3, 0), "did not run", "0 passed, 3 skipped"),
    (junit("nothing-collected", 0, 0, 0, 5), "did not run", "0 passed; exit status 5"),
    (part("broken-report", "import sys; open(sys.argv[1] + '/junit.xml', 'w')", "junit.xml"), "did not run", "cannot"),
    (part("no-report", "print('all well')", "junit.xml"), "did not run", "wrote no junit.xml"),
    (part("writes-nothing", ""), "did not run", "wrote nothing"),
    (part("status-1", "print('a number is wrong'); exit(1)"), "failed", "exit status 1; a number is wrong"),
    (part("crashes", "import os; print('last', flush=True); os.abort()"), "failed", "crashed: SIGABRT"),
    (part("no-package", "", needs=("no_such_package",)), "did not run", "no no_such_package beside this Python"),
    (part("no-gpu", "", needs=("gpu",)), "did not run", "torch sees no GPU"),
    (Part("no-program", ("/no/such/program",), 9), "did not run", "could not start: No such file"),
]


def test_no_ending_of_a_part_stops_the_next(start):
    status, files = start(*(ending[0] for ending in ENDINGS), part("last", "print('reached')"))
    assert status == 1
    found = outcomes(files)
    assert found.pop("last") == ("passed", "reached")
    assert len(found) == len(ENDINGS)
    for one, outcome, words in ENDINGS:
        assert found[one.name][0] == outcome, one.name
        assert words in found[one.name][1], one.name
    summary = files["summary.md"].decode()
    assert "    last\n" in summary, "the last lines of a part that failed are shown"
    assert files["parts/crashes/log.txt"].startswith(b"last")


def test_a_part_that_hangs_is_ended_with_its_children(start):
    # The child ignores the polite signal, as an engine in the middle of a kernel does.
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=-1); "
        "p.stdout.readline(); print('child', p.pid, flush=True); time.sleep(99)"
    )
    status, files = start(part("hangs", code, limit_s=5), PASSES)
    assert status == 4
    assert outcomes(files) == {"hangs": ("did not run", "ran past its 5 s"), "passes": ("passed", "right")}
    pid = int(files["parts/hangs/log.txt"].split()[1])
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_whole_has_a_limit(start):
    status, files = start(part("long", "import time; time.sleep(99)"), PASSES, arguments=["--minutes", "0.04"])
    assert status == 4
    assert {name: outcome for name, (outcome, _) in outcomes(files).items()} == dict.fromkeys(
        ("long", "passes"), "did not run"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_packs_what_there_is(tmp_path, number):
    process = subprocess.Popen([sys.executable, "-c", _script(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(log.stat().st_size for log in tmp_path.glob("*/parts/two/log.txt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (file,) = tmp_path.glob("*.tar.gz")
    assert f"packed: {file}" in output
    assert outcomes(unpacked(file)) == {
        "one": ("passed", "right"),
        "two": ("did not run", "interrupted"),
        "three": ("did not run", "interrupted before it"),
    }


def _script(out):
    return f"""
import sys
from benchmarks import first_hour as hour
hour.PROBE, hour.TOOLS = {f"print({NO_GPU!r})"!r}, {{}}
def part(name, code):
    return hour.Part(name, (sys.executable, "-c", code), 60)
slow = part("two", "import time; print('begun', flush=True); time.sleep(99)")
sys.exit(hour.main(["--out", {str(out)!r}], (part("one", "print('right')"), slow, part("three", ""))))
"""


def test_interrupted_while_it_looks_at_the_machine(start, monkeypatch):
    def interrupted(_hour):
        raise KeyboardInterrupt

    monkeypatch.setattr(first_hour.Hour, "look", interrupted)
    status, files = start(PASSES)
    assert status == 130
    assert outcomes(files) == {"passes": ("did not run", "interrupted before it")}


def test_a_broken_installation_stops_nothing(start, tmp_path, monkeypatch):
    (tmp_path / "site" / "broken-1.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    status, files = start(PASSES)
    assert status == 0
    assert "pytest" in json.loads(files["summary.json"])["environment"]["packages"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert first_hour.main(["--out", str(tmp_path / "file" / "below")], (PASSES,)) == 4
    assert "name another folder with --out" in capsys.readouterr().err


def test_no_secret_of_the_environment_is_packed(start, monkeypatch):
    for name in ("HF_TOKEN", "VLLM_API_KEY", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "a-secret-value")
    _, files = start(PASSES)
    assert {"summary.md", "summary.json", "environment/environment.json", "environment/dmesg.txt"} <= set(files)
    assert not [name for name, content in files.items() if b"a-secret-value" in content]


TIMED = {"case": "decode bs1 2k", "ours_us": 20.0, "peer_us": 40.0, "trouble": ""}


@pytest.mark.parametrize(
    ("rows", "status", "outcome", "words"),
    [
        ([TIMED], 0, "passed", "decode bs1 2k: 20 us, peer 40 us"),
        ([TIMED | {"peer_us": None, "trouble": "peer: no vLLM"}], 5, "did not run", "20 us, peer none; peer: no vLLM;"),
        ([TIMED | {"ours_us": None, "trouble": "ours: wrong"}], 1, "failed", "decode bs1 2k: none, peer 40 us; ours"),
        ([{"id": "served", "outcome": "pass"}], 0, "passed", "1 of 1 checks passed"),
        (
            [{"id": "served", "outcome": "fail", "message": "by others"}],
            1,
            "failed",
            "0 of 1 checks passed; served: by",
        ),
        ([], 0, "did not run", "0 of 0 checks passed"),
    ],
)
def test_times_and_checks_are_in_the_summary(tmp_path, rows, status, outcome, words):
    (tmp_path / "found.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    got = first_hour.judge(part("one", "", "found.jsonl"), status, tmp_path)
    assert got[0] == outcome
    assert words in got[1]


def test_a_quick_hour_here(start):
    names = ("selfcheck", "kernels-mla", "time-1")
    real = [one for one in first_hour.PARTS if one.name in names]
    status, files = start(*real, arguments=["--quick"])
    found = outcomes(files)
    assert (status, [found[name][0] for name in names]) == (4, ["passed", "passed", "did not run"]), found


def test_the_parts_fit_the_hour_and_name_what_there_is():
    assert sum(one.limit_s for one in first_hour.PARTS) + first_hour.RESERVE_S <= 3600
    assert len({one.name for one in first_hour.PARTS}) == len(first_hour.PARTS)
    paths = [word for one in first_hour.PARTS for word in one.command if word.startswith("tests/")]
    assert len(paths) >= 9
    assert all((ROOT / path).exists() for path in paths)
    assert "pocket-hybrid" in yaml.safe_load((ROOT / "evals/gates.yaml").read_text())["gates"]
    assert len(first_hour.TIMED) == 10
    assert set(first_hour.TIMED) <= {case.name for case in CASES}


def test_a_case_is_chosen_by_its_whole_name(monkeypatch):
    chosen = []
    monkeypatch.setattr(run, "smoke", lambda cases: chosen.extend(case.name for case in cases) or 0)
    monkeypatch.setattr(run.os, "environ", dict(os.environ))
    assert run.main(["--smoke", "--case", "prefill 4 x 4k", "--case", "decode bs64 8k"]) == 0
    assert sorted(chosen) == ["decode bs64 8k", "prefill 4 x 4k"]
    with pytest.raises(SystemExit):
        run.main(["--smoke", "--case", "prefill 4 x"])
