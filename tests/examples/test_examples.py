# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; those of a page are run by tests/shown, and the one that serves by test_serve.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hilgate.model.verdict import Verdict

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])), "COLUMNS": "100"}


def lm_eval_run(path: Path, wrong: range) -> Path:
    """A file as `lm_eval --log_samples` writes it: 400 questions, these answered wrongly."""
    rows = [
        {
            "doc_id": number,
            "doc": {"question": f"what is {number} + 1?"},
            "target": str(number + 1),
            "resps": [["0" if number in wrong else f"#### {number + 1}"]],
            "filter": "strict-match",
            "exact_match": float(number not in wrong),
            "doc_hash": f"d{number}",
            "prompt_hash": f"p{number}",
        }
        for number in range(400)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [(range(10, 14), 0, "pass"), (range(80), 1, "fail"), (range(10, 22), 1, "inconclusive")],
    ids=["four others", "a drop", "too few to say"],
)
def test_two_stored_runs_are_judged(tmp_path, wrong, status, said):
    before, after = lm_eval_run(tmp_path / "before", range(4)), lm_eval_run(tmp_path / "after", wrong)
    command = [sys.executable, str(ROOT / "examples/compare_runs.py"), str(before), str(after)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.partition(":")[0]) == (status, said), done.stdout + done.stderr


def test_another_repository_is_red_by_a_planted_bug(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "examples/adopt.sh"],
        env=ENV | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    green, red = done.stdout.split("report: results/report.html")[:2]
    assert "fuse/rows.py changed, imported by tests/test_rows.py" in done.stderr
    assert "pass: 1 passed, 0 failed" in green
    assert "assert [2, 4] == [3, 7]" in red


def test_the_readme_is_short_and_shows_the_code_of_the_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    _, _, code = (ROOT / "examples/attend.py").read_text(encoding="utf-8").partition('"""\n\n')
    assert textwrap.indent(code.rpartition("\n\nheads = ")[0], "    ") in readme


@pytest.mark.parametrize(("outcome", "status"), [("pass", 0), ("fail", 1), ("did not run", 1), ("inconclusive", 1)])
def test_the_example_reads_a_verdict(tmp_path, outcome, status):
    step = {"key": "a-cpu", "area": "a", "label": "a", "outcome": outcome, "ruling": "pass", "why": "2 checks"}
    step |= {"counts": {}, "seconds": 1.0, "reproduce": "hilgate run a-cpu"}
    verdict = {"decided": "2026-01-01T00:00:00Z", "profile": "pr", "commit": "", "plan_digest": "", "outcome": outcome}
    verdict |= {"why": "1 step", "steps": [step], "omissions": []}
    path = tmp_path / "verdict.json"
    path.write_text(Verdict.model_validate_json(json.dumps(verdict)).model_dump_json(), encoding="utf-8")
    command = [sys.executable, str(ROOT / "examples/read_verdict.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (status, f"{outcome}: 1 step"), done.stderr
    assert ("repeat it with: hilgate run a-cpu" in done.stdout) == (status == 1)
