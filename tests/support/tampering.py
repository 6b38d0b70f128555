# SPDX-License-Identifier: Apache-2.0
"""Text that wants to be more than text."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from markdown_it import MarkdownIt

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
    "markup": "[/x] [bold] [link=https://evil.invalid]x[/link] :boom:",
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
