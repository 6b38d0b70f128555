# SPDX-License-Identifier: Apache-2.0
"""Tables in pages hold what the code and the records hold."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from support.machine_code import table

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "kernels/pagedkv/vllm_plugin"


def test_the_device_tests_that_run_on_machine_code():
    """As `python -m support.machine_code` prints them."""
    assert "\n".join(table()) in (ROOT / "docs/reference/executor.md").read_text()


def test_the_versions_of_vllm_that_the_plugin_was_tried_with():
    """Read from the source: importing the plugin needs vLLM, and this runs for every change."""
    body = ast.parse((PLUGIN / "errors.py").read_text()).body
    (tested,) = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED"
    ]
    page = ROOT / "docs/reference/vllm-plugin.md"
    assert re.findall(r"^\| (\d+\.\d+) \|", page.read_text(), re.MULTILINE) == list(tested)


def test_the_contract_names_tests_that_are_there():
    table = tomllib.loads((PLUGIN / "contract.toml").read_text())
    rows = [row for part in table.values() for row in part.values() if isinstance(row, dict)]
    named = [row["test"] for row in rows if "test" in row]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []
