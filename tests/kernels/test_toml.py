# SPDX-License-Identifier: Apache-2.0
"""Typed tables: what a key must be, and the sentence for one that is not."""

from dataclasses import dataclass

import pytest

from pagedkv import toml
from pagedkv.errors import InvalidFileError


@dataclass(frozen=True)
class Table:
    name: "str"
    names: "tuple[str, ...]" = ()
    count: "int" = 0
    share: "float" = 0.0


def test_a_table_is_read():
    assert toml.entry("f", {"name": "a", "names": ["b"], "share": 1}, Table) == Table("a", ("b",), 0, 1)


INVALID = [
    pytest.param({}, "f: expected the keys count, name, names, share; got ", id="missing"),
    pytest.param({"name": "a", "nam": "b"}, "got nam, name", id="misspelt"),
    pytest.param({"name": ""}, "f: name: got ''; expected a text, not empty", id="empty"),
    pytest.param({"name": 32}, "got 32; expected a text", id="a number is no text"),
    pytest.param({"name": "a", "names": "b"}, "names: got 'b'; expected a list of texts", id="a text is no list"),
    pytest.param({"name": "a", "names": []}, "names: got []; expected a list of texts, not empty", id="empty list"),
    pytest.param({"name": "a", "count": -1}, "count: got -1; expected int of at least 0", id="negative"),
    pytest.param({"name": "a", "count": True}, "count: got True; expected int", id="a boolean is no number"),
    pytest.param([], "expected the keys count, name, names, share; got []", id="no table"),
    pytest.param({"name": "a", "count": 0.5}, "count: got 0.5; expected int", id="a share is no count"),
]


@pytest.mark.parametrize(("table", "message"), INVALID)
def test_an_invalid_table_is_refused(table, message):
    with pytest.raises(InvalidFileError) as refused:
        toml.entry("f", table, Table)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[crash", "f.toml is not TOML"),
        ("[crush]", "got crush; known: crash"),
        ("", "got the tables ; expected every one of crash"),
        ("[crash]", "got {}; expected tables in double brackets"),
        ("crash = [1]", r"got \[1\]; expected tables in double brackets"),
    ],
)
def test_a_file_that_is_not_one_is_refused(text, message):
    with pytest.raises(InvalidFileError, match=message):
        toml.entries("f.toml: crash", toml.parse("f.toml", text, ["crash"], needed=["crash"])["crash"], Table)
