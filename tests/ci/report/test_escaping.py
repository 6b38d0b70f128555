# SPDX-License-Identifier: Apache-2.0
"""Hostile names, ids and messages: shown as text wherever a person reads them, and obeyed nowhere."""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from markupsafe import Markup
from rich.console import Console
from support.builds import built
from support.plans import changed, step
from support.tampering import ATTACKS, HOSTILE, MARKDOWN, SEEN

from hilgate.cli import app
from hilgate.errors import MisuseError
from hilgate.judge.verdict import reproduce_line
from hilgate.model.plan import Omission
from hilgate.model.record import LONGEST_TEXT, Check, Outcome
from hilgate.plan.estimate import estimate
from hilgate.report import annotation, terminal
from hilgate.report.view import LIMIT_BYTES, ReportView
from hilgate.report.write import Report, report_page
from hilgate.run.progress import Lines
from hilgate.text import finalize


def failure(text):
    return Check(
        id=f"t{text}"[:LONGEST_TEXT], outcome=Outcome.FAIL, message=f"m{text}", labels={"arch": text, "way": text}
    )


def evil_build(text, **changes):
    """(plan, recorded, verdict) of one step that failed, with this text wherever a change can put text."""
    table = {"rows": "arch", "columns": "way", "file": "cells.json"}
    one = step("bad", "x", label=sound(text), columns=("arch", "check"), matrix=table, reason=sound(text)[:200])
    far = Omission(key="far", area="samples", label="far", cause="not affected", reason=sound(text)[:200])
    return built((one, [failure(sound(text))]), omissions=(far,), **changes)


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


@given(HOSTILE)
def test_a_reproduce_line_is_one_command_with_one_word_more(text):
    check = Check(id=f"tests/test_x.py::{sound(text)}", outcome=Outcome.FAIL, message="wrong")
    one = step("bad", "pytest", evidence="junit")
    line = reproduce_line(one, check)
    assert SEEN.fullmatch(line)
    words = shlex.split(line)
    assert words[:3] == ["hilgate", "run", "bad-cpu"]
    assert words[3:] == [] or (words[3:5] == ["--", "-k"] and len(words) == 6 and not words[5].startswith("-"))
    assert not set(line) & set(';&|$`<>\n\\!*?(){}"')


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_no_report_obeys_it(text, tmp_path):
    build = evil_build(text, changed_files=(f"f{sound(text)}",), base=sound(text))
    page = report_page(ReportView(*build))
    tags = Tags(page)
    assert not {"script", "img", "a"} & tags.tags
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert SEEN.fullmatch(page)
    text_of_annotation = annotation.render(ReportView(*build))
    assert SEEN.fullmatch(text_of_annotation)
    tokens = MARKDOWN.parse(text_of_annotation)
    assert not {"html_block", "html_inline", "image", "link_open", "hr"} & {
        kind for token in tokens for kind in (token.type, *(child.type for child in token.children or ()))
    }
    assert [token.content for token in tokens if token.type == "inline" and token.content.startswith("# ")] == []
    assert sum(token.type == "heading_open" for token in tokens) == 2
    assert SEEN.fullmatch(annotation.write_junit(*build[1:], tmp_path).read_text())


def printed(build, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    a_plan, recorded, verdict = build
    terminal.print_verdict(Report(a_plan, recorded, verdict, Path("report.html")), every=True)
    terminal.print_checks(recorded.last("bad-cpu").checks)
    terminal.print_plan(terminal.stdout(), a_plan, estimate(a_plan), omitted=True)
    return capsys.readouterr().out


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_no_terminal_and_no_log_obeys_it(text, capsys, monkeypatch, tmp_path):
    build = evil_build(text, base=sound(text))
    shown = printed(build, capsys, monkeypatch)
    assert SEEN.fullmatch(shown)
    assert not re.search(r"(?m)^(---|\+\+\+|~~~|\^\^\^)", shown)
    out = io.StringIO()
    log = tmp_path / "log.txt"
    log.write_text(text, errors="replace")
    _, recorded, _ = build
    one = changed(step("bad", "x"), command=f"x {text}")
    attempt = recorded.last("bad-cpu")
    attempt = dataclasses.replace(attempt, record=attempt.record.model_copy(update={"message": sound(text)}))
    lines = Lines(Console(file=out, width=80, color_system=None), buildkite=True)
    lines.started(one, child=None)
    lines.finished(one, attempt, log)
    assert SEEN.fullmatch(out.getvalue())
    groups = [line for line in out.getvalue().splitlines() if re.match(r"---|\+\+\+|~~~|\^\^\^", line)]
    assert [group[:12] for group in groups] == ["--- bad-cpu:", "+++ bad-cpu:"]


def test_markup_of_our_own_stays_markup():
    environment = jinja2.Environment(autoescape=True, finalize=finalize)
    assert environment.from_string("{{ a }}{{ b }}{{ c }}").render(a=Markup("<b>"), b="<\x1b", c=7) == "<b>&lt;\\x1b7"


def test_huge_messages_and_names_end_in_small_reports():
    build = evil_build("`" * 200_000)
    assert build[2].steps[0].reproduce == "hilgate run bad-cpu"
    assert len(annotation.render(ReportView(*build)).encode()) < LIMIT_BYTES
    assert len(report_page(ReportView(*build)).encode()) < LIMIT_BYTES


def test_a_comment_is_short_enough_and_mentions_nobody():
    for text in ("`" * 200_000, "thanks to @everyone and @octo-org/team"):
        comment = annotation.comment(ReportView(*evil_build(text)))
        assert len(comment.encode()) <= annotation.COMMENT_BYTES
        outside = "".join(part for place, part in enumerate(comment.split("```")) if place % 2 == 0)
        assert "@" not in outside.replace("\\@", "")


def test_an_error_that_quotes_a_file_name_obeys_nothing(capsys):
    with pytest.raises(SystemExit):
        app._end(MisuseError("no file '\x1b]0;x\x07'\n+++ passed"), app.Settings())
    assert capsys.readouterr().err == "error: no file '\\x1b]0;x\\x07'\n +++ passed\n"
