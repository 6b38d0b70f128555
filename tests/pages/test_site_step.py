# SPDX-License-Identifier: Apache-2.0
"""The step that builds the site is selected by all that the site is made from."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def documented(page):
    """Modules of whose names a page makes entries."""
    return {name.rpartition(".")[0] for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}


def imported(source):
    """Our modules that a file imports."""
    found = {
        f"{node.module}.{name.name}" if node.module == "hilgate.model" else node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }
    return {name for name in found if name.startswith(("hilgate", "hileval", "pagedkv"))}


def left_out(modules):
    """Those that no entry of the step's `imports` is or holds."""
    (step,) = yaml.safe_load((ROOT / "ci/areas/site.yaml").read_text("utf-8"))["steps"]
    named = step["imports"]
    return {one for one in modules if not any(one == name or one.startswith(f"{name}.") for name in named)}


def test_the_site_step_imports_all_that_the_site_is_made_from():
    page = documented((ROOT / "docs/reference/python.md").read_text("utf-8"))
    code = [imported((ROOT / f"docs/{name}.py").read_text("utf-8")) for name in ("hooks", "reference", "recipes")]
    assert len(page) >= 10
    assert left_out(page.union(*code)) == set()


@pytest.mark.parametrize(
    "modules", [documented("::: pagedkv.arch.limits\n"), imported("from hilgate.plan.select import select\n")]
)
def test_a_module_that_the_step_does_not_name_is_red(modules):
    assert left_out(modules) == modules
