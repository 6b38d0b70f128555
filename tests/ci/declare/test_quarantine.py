# SPDX-License-Identifier: Apache-2.0
"""The quarantine: which mistakes are refused and where, and whose file counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plans import git, write_repository

from hilgate.declare import quarantine
from hilgate.declare.load import InvalidDeclarationsError, load
from hilgate.errors import CannotRunHereError

ENTRY = {
    "test": "t::a",
    "step": "a",
    "reason": "wrong lane",
    "owner": "kernels",
    "added": "2026-11-20",
    "expires": "2026-12-04",
}


@pytest.fixture
def root(tmp_path):
    return write_repository(tmp_path, {"a": "true", "b": "true"})


def write(root, *entries):
    (root / quarantine.QUARANTINE_FILE).write_text(json.dumps({"tests": list(entries)}, indent=1))


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-qm", "more")
    return git(root, "rev-parse", "HEAD")


def loaded(root):
    return quarantine.load_quarantine(root, load(root))


MISTAKES = {
    "unknown-step": ([ENTRY | {"step": "aa"}], "no step is called 'aa'; did you mean"),
    "unknown-device": ([ENTRY | {"devices": ["gfx942"]}], "the step a does not run on 'gfx942'; name one of cpu"),
    "fifteen-days": ([ENTRY | {"expires": "2026-12-05"}], "expires 15 days after it was added; choose a day 1 to 14"),
    "expires-on-the-day": ([ENTRY | {"expires": "2026-11-20"}], "expires 0 days after it was added"),
    "expires-before": ([ENTRY | {"expires": "2026-11-01"}], "expires -19 days after it was added"),
    "no-date": ([ENTRY | {"added": "soon"}], "added"),
    "twice": ([ENTRY, ENTRY], "t::a of a is in quarantine already; keep one of them"),
    "twice-everywhere-and-here": ([ENTRY, ENTRY | {"devices": ["cpu"]}], "is in quarantine already"),
    "no-owner": ([{name: value for name, value in ENTRY.items() if name != "owner"}], "key 'owner' is missing"),
    "empty-owner": ([ENTRY | {"owner": ""}], "owner"),
    "misspelt": ([ENTRY | {"expirs": "2026-12-01"}], "unknown key 'expirs'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_file_and_line(root, name):
    entries, message = MISTAKES[name]
    write(root, *entries)
    with pytest.raises(InvalidDeclarationsError) as refused:
        loaded(root)
    mistake = str(refused.value.mistakes[0])
    assert message in mistake
    assert mistake.startswith("ci/quarantine.yaml:")


def test_an_unquoted_date_says_to_quote_it(root):
    (root / quarantine.QUARANTINE_FILE).write_text("tests:\n  - {test: t, added: 2026-11-20}\n")
    with pytest.raises(InvalidDeclarationsError, match="quote it"):
        loaded(root)


def test_the_merge_bases_quarantine_counts_whatever_is_removed(root):
    kept, added, gone = ENTRY, ENTRY | {"test": "t::mine"}, ENTRY | {"test": "t::mended"}
    write(root, kept, gone)
    merge_base = commit(root)
    write(root, kept, added)
    assert [one.test for one in quarantine.effective(root, merge_base, loaded(root)).tests] == ["t::a"]
    assert [one.test for one in quarantine.effective(root, "", loaded(root)).tests] == ["t::a", "t::mine"]


def test_a_longer_promise_and_more_devices_do_not_count(root):
    write(root, ENTRY | {"devices": ["cpu"]}, ENTRY | {"step": "b"})
    merge_base = commit(root)
    write(root, ENTRY, ENTRY | {"step": "b", "added": "2026-11-21", "expires": "2026-12-05"})
    counts = quarantine.effective(root, merge_base, loaded(root)).tests
    assert [(one.step, str(one.expires)) for one in counts] == [("b", "2026-12-04")]


def test_a_merge_base_without_the_file_has_nothing_in_quarantine(root):
    merge_base = git(root, "rev-parse", "HEAD")
    assert loaded(root).tests == ()
    write(root, ENTRY)
    assert quarantine.effective(root, merge_base, loaded(root)).tests == ()


@pytest.mark.parametrize("sha", ["0" * 40, "HEAD", "--help"])
def test_a_merge_base_that_is_not_here_is_no_empty_quarantine(root, sha):
    with pytest.raises(CannotRunHereError, match="is not in this checkout"):
        quarantine.effective(root, sha, loaded(root))


def test_an_invalid_file_of_the_merge_base_is_refused(root):
    (root / quarantine.QUARANTINE_FILE).write_text("tests: 5\n")
    merge_base = commit(root)
    write(root)
    with pytest.raises(InvalidDeclarationsError):
        quarantine.effective(root, merge_base, loaded(root))


def test_the_projects_own_file_is_sound():
    root = Path(__file__).parents[3]
    assert quarantine.load_quarantine(root, load(root)) is not None
