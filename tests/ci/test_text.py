# SPDX-License-Identifier: Apache-2.0
"""What each place shows of hostile text, by example and by an independent parser."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.tampering import HOSTILE, MARKDOWN, SEEN

from hilgate.text import fenced, line, markdown, pytest_word, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ascii", "plain, ascii"),
        ("größer 漢字 ✗ …", "größer 漢字 ✗ …"),
        ("a\r\nb\tc\n", "a\nb\tc\n"),
        ("\x1b[0m", "\\x1b[0m"),
        ("\u202e", "\\u202e"),
        ("\U000e0041", "\\U000e0041"),
        ("👩\u200d🔬", "👩\\u200d🔬"),
    ],
)
def test_readable_text_stays_as_it_is(text, shown):
    assert visible(text) == shown


@given(HOSTILE)
def test_visible_text_has_nothing_hidden_and_stays_visible(text):
    shown = visible(text)
    assert SEEN.fullmatch(shown)
    assert visible(shown) == shown
    shown.encode()


@settings(max_examples=300)
@given(HOSTILE)
def test_markdown_shows_the_text_itself_and_nothing_else(text):
    """An independent parser reads one paragraph whose only content is the text."""
    for prefix in ("", "- a: "):
        tokens = MARKDOWN.parse(prefix + markdown(text))
        inline = [token for token in tokens if token.type == "inline"]
        kinds = {token.type for token in tokens} - {"inline", "paragraph_open", "paragraph_close"}
        assert kinds <= (
            {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"} if prefix else set()
        )
        assert {child.type for token in inline for child in token.children} <= {"text"}
        assert "".join(c.content for token in inline for c in token.children) == (prefix[2:] + line(text)).strip()


@given(HOSTILE)
def test_a_fence_is_closed_by_its_own_end_only(text):
    tokens = MARKDOWN.parse(fenced(text) + "\n\nafter")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    assert tokens[0].content.rstrip("\n") == visible(text).rstrip("\n")


def test_addresses_become_no_links():
    shown = markdown("see https://evil.invalid, HTTP://x and www.evil.invalid or @team")
    assert shown == r"see https\://evil.invalid, HTTP\://x and www\.evil.invalid or \@team"


@pytest.mark.parametrize(
    ("test_id", "word"),
    [
        ("tests/test_a.py::test_b[bs16-HND-fp8]", "test_b[bs16-HND-fp8]"),
        ("tests/test_a.py::TestC::test_b", "test_b"),
        ("tests/test_a.py::test_b[a::b]", "test_b[a::b]"),
        ("tests/test_a.py::test_b[a b]", "test_b"),
        ("tests/test_a.py::test_b[; rm -rf ~]", "test_b"),
        ("tests/test_a.py::test_b[\x1b]", "test_b"),
        ("a.py::; rm -rf ~", ""),
        ("a.py::$(x)", ""),
        ("a.py::--pdb", ""),
        ("a.py::t\n+++ x", ""),
        ("a.py::t\u200b", ""),
        ("a.py::tést", ""),
        ("", ""),
    ],
)
def test_words_that_select_a_test(test_id, word):
    assert pytest_word(test_id) == word
