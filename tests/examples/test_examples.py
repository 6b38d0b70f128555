# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; those of a page are run by tests/pages, and the one that serves by test_serve.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_another_repository_is_green_and_then_red_by_the_planted_bug(tmp_path):
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
