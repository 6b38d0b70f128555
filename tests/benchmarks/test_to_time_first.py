# SPDX-License-Identifier: Apache-2.0
"""What hardware is asked first can be asked: each case of the page is one of the benchmark's."""

import re
from pathlib import Path

from benchmarks.cases import CASES

PAGE = Path(__file__).parents[2] / "benchmarks/to-time-first.md"


def test_the_page_names_cases_that_there_are():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row[2]) if not name.startswith("_")}
    assert len(named) > 8
    assert named <= {case.name for case in CASES}
