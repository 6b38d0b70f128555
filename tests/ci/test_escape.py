"""Hostile names, ids and messages: shown as text wherever a person reads them, and obeyed nowhere."""

from __future__ import annotations

import datetime as dt
import io
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markupsafe import Markup
from rich.console import Console
from toyplans import ENVIRONMENT, plan, step

from hilgate import annotate, escape, judge, report, results
from hilgate.cli import app, gating, printing
from hilgate.model import Check, Outcome, StepRecord
from hilgate.plan import plan_digest
from hilgate.progress import Lines

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
ATTACKS = {
    "colour": "\x1b[31mred",
    "hyperlink": "\x1b]8;;https://evil.invalid\x1b\\click\x1b]8;;\x1b\\",
    "buildkite image": "\x1b]1338;url=https://evil.invalid/x.gif;alt=ok\x07",
    "buildkite link": "\x1b]1339;url=javascript:alert(1);content=ok\x07",
    "c1 sequence": "\x9b31mred",
    "overwritten": "FAILED\rpassed",
    "erased": "FAILED\b\b\b\b\b\bpassed",
    "group": "\n+++ :white_check_mark: all passed",
    "opens the last group": "\n^^^ +++",
    "faint group": "\n~~~ x",
    "direction": "\u202egnp.exe",
    "isolate": "\u2066x\u2069",
    "line separator": "a\u2028+++ b",
    "next line": "a\x85+++ b",
    "vertical tab": "a\x0b+++ b",
    "nothing": "\u3164\u200b\ufeff",
    "tag characters": "a\U000e0041",
    "NUL": "a\x00b",
    "script": "<script>alert(1)</script>",
    "image": "<img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover=alert(1) x='",
    "markdown link": "[x](javascript:alert(1))",
    "markdown image": "![x](https://evil.invalid/x.png)",
    "autolink": "<https://evil.invalid> https://evil.invalid www.evil.invalid @everyone",
    "fence": "```\n# broken out\n````",
    "tilde fence": "~~~\n# broken out",
    "heading": "# heading",
    "list": "- item",
    "number": "1) item",
    "table": "a | b",
    "rule": "***",
    "entity": "&lt;b&gt; &#x202e;",
    "markup of rich": "[bold red]x[/] [link=https://evil.invalid]y[/link]",
    "jinja": "{{ config }} {% for x in y %}",
    "surrogate": "\ud800",
}
HOSTILE = st.one_of(
    st.text(max_size=60),
    st.lists(st.one_of(st.sampled_from(sorted(ATTACKS.values())), st.text(max_size=8)), max_size=4).map("".join),
)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SEEN = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*")


def failure(text):
    return Check(id=f"t{text}", outcome=Outcome.FAIL, message=f"m{text}", labels={"arch": text})


def attempt_at(one, check, message=""):
    record = StepRecord(
        key=one.key, started=NOW, seconds=1.0, exit_status=1, outcome=Outcome.FAIL, message=message, checks=1,
        command=one.command, environment=ENVIRONMENT,
    )  # fmt: skip
    return results.Attempt(record, (check,))


def evil_build(text, **changes):
    """(plan, recorded, verdict) of one step that failed, with this text wherever a change can put text."""
    one = step("bad", "x", label=sound(text), columns=("arch", "check"))
    a_plan = plan(one, **changes)
    recorded = results.Recorded((), {one.key: (attempt_at(one, failure(sound(text))),)})
    return a_plan, recorded, judge.judge(a_plan, recorded, plan_digest(a_plan), decided=NOW)


def sound(text):
    """Without surrogates, which no record can hold."""
    return text.encode(errors="replace").decode()


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_what_is_shown_has_a_shape(text):
    assert SEEN.fullmatch(escape.visible(text))
    assert "\n" not in escape.line(text)
    assert not re.search(r"(?m)^(---|\+\+\+|~~~|\^\^\^)", escape.log(text))


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
    assert escape.visible(text) == shown


@given(HOSTILE)
def test_visible_text_has_nothing_hidden_and_stays_visible(text):
    shown = escape.visible(text)
    assert SEEN.fullmatch(shown)
    assert escape.visible(shown) == shown
    shown.encode()


@settings(max_examples=300)
@given(HOSTILE)
def test_markdown_shows_the_text_itself_and_nothing_else(text):
    """An independent parser reads one paragraph whose only content is the text."""
    for prefix in ("", "- a: "):
        tokens = MARKDOWN.parse(prefix + escape.markdown(text))
        inline = [token for token in tokens if token.type == "inline"]
        kinds = {token.type for token in tokens} - {"inline", "paragraph_open", "paragraph_close"}
        assert kinds <= (
            {"bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"} if prefix else set()
        )
        assert {child.type for token in inline for child in token.children} <= {"text"}
        assert (
            "".join(c.content for token in inline for c in token.children) == (prefix[2:] + escape.line(text)).strip()
        )


@given(HOSTILE)
def test_a_fence_is_closed_by_its_own_end_only(text):
    tokens = MARKDOWN.parse(escape.fenced(text) + "\n\nafter")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    assert tokens[0].content.rstrip("\n") == escape.visible(text).rstrip("\n")


def test_addresses_become_no_links():
    shown = escape.markdown("see https://evil.invalid, HTTP://x and www.evil.invalid or @team")
    assert shown == r"see https\://evil.invalid, HTTP\://x and www\.evil.invalid or \@team"


@pytest.mark.parametrize(
    ("path", "href"),
    [
        ("steps/a-cpu/log.txt", "./steps/a-cpu/log.txt"),
        ("steps/a b/\u202e?#%.txt", "./steps/a%20b/%E2%80%AE%3F%23%25.txt"),
        ("javascript:alert(1)", "./javascript%3Aalert%281%29"),
        ("//evil.invalid/x", ""),
        ("/etc/passwd", ""),
        ("../../x", ""),
        ("a/../../x", ""),
        ("a/..", ""),
        ("a//b", ""),
        ("", ""),
        ("a\0", ""),
    ],
)
def test_links_lead_to_files_below_the_page(path, href):
    assert escape.address(path) == href


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
    assert escape.pytest_word(test_id) == word


@given(HOSTILE)
def test_a_reproduce_line_is_one_command_with_one_word_more(text):
    check = Check(id=f"tests/test_x.py::{sound(text)}", outcome=Outcome.FAIL, message="wrong")
    one = step("bad", "pytest", evidence="junit")
    line = judge.reproduce_line(one, attempt_at(one, check))
    assert SEEN.fullmatch(line)
    words = shlex.split(line)
    assert words[:3] == ["hilgate", "run", "bad-cpu"]
    assert words[3:] == [] or (words[3:5] == ["--", "-k"] and len(words) == 6 and not words[5].startswith("-"))
    assert not set(line) & set(';&|$`<>\n\\!*?(){}"')


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_no_report_obeys_it(text, tmp_path):
    build = evil_build(text, changed_files=(f"f{sound(text)}",), base=sound(text))
    page = report.render(*build)
    tags = Tags(page)
    assert not {"script", "img", "a"} & tags.tags
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert SEEN.fullmatch(page)
    text_of_annotation = annotate.render(*build)
    assert SEEN.fullmatch(text_of_annotation)
    tokens = MARKDOWN.parse(text_of_annotation)
    assert not {"html_block", "html_inline", "image", "link_open", "hr"} & {
        kind for token in tokens for kind in (token.type, *(child.type for child in token.children or ()))
    }
    assert [token.content for token in tokens if token.type == "inline" and token.content.startswith("# ")] == []
    assert sum(token.type == "heading_open" for token in tokens) == 2
    assert SEEN.fullmatch(annotate.write_junit(*build, tmp_path).read_text())


def printed(build, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(printing, "stdout", lambda: Console(file=out, width=80, color_system=None))
    a_plan, recorded, verdict = build
    printing.print_verdict(gating.Judged(a_plan, recorded, verdict, Path("report.html")))
    printing.print_checks(recorded.last("bad-cpu").checks)
    return out.getvalue()


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_no_terminal_and_no_log_obeys_it(text, monkeypatch, tmp_path):
    build = evil_build(text)
    shown = printed(build, monkeypatch)
    assert SEEN.fullmatch(shown)
    assert not re.search(r"(?m)^(---|\+\+\+|~~~|\^\^\^)", shown)
    out = io.StringIO()
    log = tmp_path / "log.txt"
    log.write_text(text, errors="replace")
    _, recorded, _ = build
    one = step("bad", f"x {text}")
    attempt = recorded.last("bad-cpu")
    attempt = attempt_at(one, attempt.checks[0], sound(text))
    with Lines(Console(file=out, width=80, color_system=None), buildkite=True) as lines:
        lines.started(one, child=None)
        lines.finished(one, attempt, log)
    assert SEEN.fullmatch(out.getvalue())
    groups = [line for line in out.getvalue().splitlines() if re.match(r"---|\+\+\+|~~~|\^\^\^", line)]
    assert [group[:12] for group in groups] == ["--- bad-cpu:", "+++ bad-cpu:"]


def test_markup_of_our_own_stays_markup():
    environment = jinja2.Environment(autoescape=True, finalize=escape.finalize)
    assert environment.from_string("{{ a }}{{ b }}{{ c }}").render(a=Markup("<b>"), b="<\x1b", c=7) == "<b>&lt;\\x1b7"


def test_a_huge_message_ends_in_a_small_annotation():
    build = evil_build("`" * 200_000)
    assert len(annotate.render(*build).encode()) < report.LIMIT_BYTES
    assert len(report.render(*build).encode()) < report.LIMIT_BYTES


def test_an_error_that_quotes_a_file_name_obeys_nothing(capsys):
    app._complain("no file '\x1b]0;x\x07'\n+++ passed")
    assert capsys.readouterr().err == "error: no file '\\x1b]0;x\\x07'\n +++ passed\n"


def test_plans_of_hostile_names_are_printed_as_text(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(printing, "stderr", lambda: Console(file=out, width=80, color_system=None))
    printing.print_plan(plan(step("a", "x", reason="f\x1b]8;;x\x07\n+++ y changed")))
    assert SEEN.fullmatch(out.getvalue())
    assert "\n+++" not in out.getvalue()
