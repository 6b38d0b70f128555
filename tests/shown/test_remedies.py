# SPDX-License-Identifier: Apache-2.0
"""What errors say to do: an action, never the meaning of a word or a fact alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hilgate.declare.yaml import Document, validate
from hilgate.model.declaration import Area

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGES = ("ci/hilgate", "ci/agent_host", "evals/hileval", "kernels/pagedkv")
STATEMENT = re.compile(
    r"(an?|all|any|both|each|every|it|its|none|nothing|only|some|that|the|there|these|they|this|those|two|what|which|"
    r"without)\b|[-`]",
    re.IGNORECASE,
)
"""How a statement begins, or an option or a command that nobody is told to give."""


def written(value: ast.expr) -> list[str]:
    """How the texts begin that an expression may be."""
    if isinstance(value, ast.IfExp):
        return [*written(value.body), *written(value.orelse)]
    if isinstance(value, ast.JoinedStr) and value.values:
        return written(value.values[0])
    return [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []


def remedies() -> Iterator[tuple[str, str]]:
    """Place and text of each remedy: `remedy=...`, and a later argument of the functions that take it there."""
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            given: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                given = [node.value]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                place = {"blame": 2, "dtype": 3}.get(node.func.attr, len(node.args))
                given = node.args[place : place + 1]
            for value in given:
                yield from ((f"{path.relative_to(ROOT)}:{value.lineno}", text) for text in written(value))


def test_every_remedy_begins_with_an_action() -> None:
    found = list(remedies())
    assert len(found) > 300
    assert [(place, text) for place, text in found if text and STATEMENT.match(text)] == []


@pytest.mark.parametrize(
    ("step", "begins"),
    [({}, "add label ("), ({"label": 7}, "correct label ("), ({"label": "x", "minuts": 1}, "did you mean 'minutes'")],
)
def test_the_remedy_of_a_wrong_key_ends_with_its_meaning(step, begins) -> None:
    document: Document[Area] = Document("ci/areas/a.yaml")
    usual = {"key": "a", "command": "true", "devices": ["cpu"], "evidence": {"kind": "findings"}}
    validate({"area": "a", "title": "A", "why": "x", "paths": ["*"], "steps": [usual | step]}, Area, document)
    assert [one.remedy for one in document.mistakes if one.remedy.startswith(begins)]
