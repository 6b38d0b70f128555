# SPDX-License-Identifier: Apache-2.0
"""The faults that tests plant, by kind and name.

    cd tests && python -m support.planted_list > planted.txt     after one has come or gone

A test compares the list with `planted.txt`, so that a detection that is lost is seen as a row that is lost.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = {
    "bugs of kernels, planted by `hilgate selftest`": ("tests/bugs/*/bug.yaml",),
    "bugs of the gate": ("tests/ci/simulate/test_mutants.py:MUTANTS",),
    "faults of simulated builds": ("tests/support/simulate/scenarios.py:FaultKind",),
    "faults of models": ("tests/support/model_faults.py:plant()",),
    "faults of pocket models": tuple(
        f"evals/hileval/pocket/damage.py:{table}"
        for table in ("KV_FAULTS", "PACKED_FAULTS", "LATENT_FAULTS", "CROSS_FAULTS", "SETTINGS")
    ),
    "faults of attention that drift shows": ("tests/evals/gates/test_drift.py:FAULTS",),
    "faults of programs": tuple(
        f"tests/amdgcn/test_faults.py:{table}" for table in ("FAULTS", "PLAIN", "OUTSTANDING", "USES")
    ),
    "programs that static checks refuse": tuple(
        f"tests/amdgcn/test_static.py:{table}"
        for table in ("test_a_missing_wait_is_found", "HAZARDS", "NEWER", "OLDER", "SPOILT")
    ),
    "errors of the executor": ("tests/amdgcn/test_oracles.py:PLANTS",),
    "meanings of instructions": ("tests/amdgcn/test_pseudocode.py:test_a_planted_meaning_is_seen",),
    "lines less in the machine code of others": ("tests/mamba/compiled/test_candidates.py:PLANTED",),
    "bugs of vLLM's state copies": ("tests/mamba/test_state_copies.py:MUTANTS",),
    "schedules of MLA": ("tests/kernels/mla/test_schedule.py:WRONG",),
    "limits of other kernels": ("tests/kernels/routing/test_candidates.py:DEFECTS",),
    "kernels over budget": ("tests/audit/test_budgets.py:VIOLATIONS",),
    "recipes of images": ("tests/ci/images/test_recipe.py:FAULTS",),
    "scripts of images": ("tests/ci/images/test_scripts.py:test_planted_bug_is_found",),
    "compiled extensions": ("tests/ci/images/test_extensions.py:FAULTS",),
    "pipelines": tuple(
        f"tests/ci/buildkite/test_lint.py:test_unsound_{what}_is_found" for what in ("step", "group", "file")
    ),
    "house rules": ("tests/ci/checks/test_hygiene.py:FAULTS",),
    "nodes that are unfit": ("tests/ci/agent/test_hooks.py:BREAKS",),
    "bundles and releases that were tampered with": (
        *(f"tests/ci/release/test_bundle.py:{table}" for table in ("TAMPERED", "ARCHIVES")),
        *(f"tests/ci/release/test_release.py:{table}" for table in ("ROWS", "ALONE", "SIGNATURES")),
    ),
    "text that wants to be more than text": ("tests/support/tampering.py:ATTACKS",),
    "attacks": ("tests/attacks/test_*.py:test_",),
    "faults with a test of their own": ("tests/**/test_*.py:_seen", "tests/**/test_*.py:_noticed"),
}
"""Kind -> where its faults stand: files; or a table, a class, calls, a parametrised test, a part of tests' names."""


def faults(kind: str) -> list[str]:
    """The names of a kind's faults; a row without a name is called by its text."""
    names = []
    for place in KINDS[kind]:
        pattern, _, table = place.partition(":")
        paths = sorted(ROOT.glob(pattern))
        assert paths, f"{place}: there is no such file"
        for path in paths:
            names += _names(_parsed(path), table) if table else [path.parent.name]
    return names


def listing() -> str:
    """Every planted fault, by kind."""
    named = {kind: faults(kind) for kind in KINDS}
    rows = [(f"{kind}: {len(names)}", *(f"  {name}" for name in names)) for kind, names in named.items()]
    return "".join(f"{line}\n" for row in rows for line in row) + f"planted: {sum(map(len, named.values()))}\n"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _names(tree: ast.Module, table: str) -> list[str]:
    """Of the rows of a table, the members of an enumeration, the calls of a decorator, or the tests named like it."""
    if "_" in {table[0], table[-1]}:
        named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [name for name in named if name.startswith("test_") and table in name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and table in map(ast.unparse, _targets(node)):
            return _rows(node.value)
        if isinstance(node, ast.ClassDef) and node.name == table:
            return [_text(each.value) for each in node.body if isinstance(each, ast.Assign)]
        if isinstance(node, ast.FunctionDef) and node.name == table:
            return [name for each in node.decorator_list if isinstance(each, ast.Call) for name in _rows(each.args[1])]
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and f"{ast.unparse(node.func)}()" == table]
    assert called, f"there is no {table}"
    return [_text(node.args[0]) for node in called]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _rows(table: ast.expr | None) -> list[str]:
    assert isinstance(table, ast.Dict | ast.List | ast.Tuple), f"{table} is no table"
    return [_text(row) for row in (table.keys if isinstance(table, ast.Dict) else table.elts)]


def _text(row: ast.expr | None) -> str:
    assert row is not None, "a table is written out, row by row"
    if isinstance(row, ast.Tuple) and isinstance(row.elts[0], ast.Name) and len(row.elts) == 2:
        row = row.elts[0]
    return str(row.value) if isinstance(row, ast.Constant) else " ".join(ast.unparse(row).split())


if __name__ == "__main__":
    sys.stdout.write(listing())
