# SPDX-License-Identifier: Apache-2.0
"""Pages that begin somebody's work are executed: each command that they show ends and prints as they say."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from support import shown
from support.shown import ROOT

PAGES = ("README.md", "docs/tutorial.md", "docs/how-to/add-a-step.md", "docs/how-to/add-a-queue.md")
"""`docs/how-to/adopt.md` is another repository's and run by tests/ci/declare/test_adopting.py."""
MOST_NOT_RUN = 10


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_happens(page, checkout):
    assert [one for one in shown.commands(text_of(page)) if not one.mark], "a page that shows no command"
    assert shown.run(text_of(page), checkout) == []


def test_what_is_not_run_says_why_and_is_little():
    pages = [text_of(page) for page in (*PAGES, "docs/how-to/adopt.md")]
    assert [shown.wrong_marks(page) for page in pages] == [[]] * len(pages)
    assert sum(len(re.findall(f"^```console {shown.NO_RUN}", page, re.MULTILINE)) for page in pages) <= MOST_NOT_RUN


RIGHT = "```console\n$ printf 'took 3.5 s\\nof 2,000\\n'\ntook 1 s\n...\nof 7\n$ false\nexit 1\n```\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("$ false", "$ hilgate no-such-command", "exit 2, the page says 1"),
        ("exit 1", "exit 0", "exit 1, the page says 0"),
        ("took 1 s", "took all of 1 s", "does not print 'took all of 1 s'"),
        ("took 1 s\n...\nof 7", "of 7\ntook 1 s", "does not print 'took 1 s'"),
    ],
    ids=["a wrong command", "a wrong status", "a wrong output", "another order"],
)
def test_a_page_that_lies_is_red(tmp_path, old, new, words):
    assert shown.run(RIGHT, tmp_path) == []
    (problem,) = shown.run(RIGHT.replace(old, new), tmp_path)
    assert words in problem


@pytest.mark.parametrize(
    ("mark", "wrong"), [(" no-run:", 1), (" no-run: it asks for a password", 0), (" fast", 1), ("", 0)]
)
def test_a_mark_needs_a_reason(mark, wrong):
    assert len(shown.wrong_marks(f"```console{mark}\n$ true\n```\n")) == wrong


@pytest.fixture
def prerequisites(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    import prerequisites

    yield prerequisites.PREREQUISITES
    sys.modules.pop("prerequisites")


def test_the_readme_installs_what_is_asked_for(prerequisites):
    named = {
        program: re.search(rf"^ *sudo {program} install ([^#\n]+)", text_of("README.md"), re.MULTILINE)[1].split()
        for program in ("apt-get", "dnf")
    }
    assert sorted(named["apt-get"]) == sorted({one.debian for one in prerequisites})
    # Fedora's python3 has ensurepip.
    assert sorted(named["dnf"]) == sorted({one.fedora for one in prerequisites} - {"python3"})


def test_the_planner_still_says_what_the_page_says_runs():
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    said = [
        row.split(" | ")
        for row in re.findall(r"^\| (.+ \| [\d |]+) \|$", text_of("docs/concepts/what-runs.md"), re.MULTILINE)
    ]
    planned = reference.what_runs()
    assert [row[:2] for row in said] == [[kind, f"`{name}`"] for kind, name, *_ in planned]
    for row, (_, _, *figures) in zip(said, planned, strict=True):
        # A quarter: a new step alone makes no page wrong. `python docs/reference.py --what-runs` writes it anew.
        assert [int(one) for one in row[2:]] == pytest.approx(figures, rel=0.25, abs=3), row[0]
