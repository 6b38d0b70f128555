# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; those of a page are run by tests/shown, the one that serves by
test_serve.py, and the runs of lm-eval are compared in tests/wheels/test_distribution.py.
"""

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
