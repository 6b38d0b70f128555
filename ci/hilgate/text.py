# SPDX-License-Identifier: Apache-2.0
"""Escape untrusted text for terminals, Buildkite logs, Markdown, HTML and XML; word outcomes and times; split commands.

A test id, a message or a file name can hold escape sequences, links, Markdown, HTML or characters that turn the reading
direction. Each place where a person reads has one function here.
"""

from __future__ import annotations

import difflib
import html
import re
import shlex
import sys
import unicodedata
from typing import TYPE_CHECKING

from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Iterable

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a shape of their own: controls (escape sequences begin with one), directions and joiners,
surrogates, private and unassigned characters, line and paragraph separators."""

INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f")
"""Letters and marks that take room and show nothing."""

GROUPS = re.compile(r"(?m)^(?=(?:---|\+\+\+|~~~|\^\^\^))")
"""What begins a group in a Buildkite log (Buildkite, "Managing log output"), or opens the last one (`^^^ +++`)."""

_MARKDOWN = re.compile(r"([\\`*_{}\[\]|~@]|(?<=[a-z]):(?=//)|(?<=\bwww)\.)", re.IGNORECASE)
_BLOCK = re.compile(r"^(\d{0,9})([-+#=>.)])")
_NOT_PLAIN = re.compile("[^\t\n -~]")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORD = re.compile(r"[A-Za-z_][\w:+\-.\[\]\\/]*", re.ASCII)


def argument_list(command: str) -> list[str]:
    """Split a declared command; a leading `python` is the interpreter that runs hilgate.

    Raises:
        DeclarationError: The command is empty or its quotes do not close.
    """
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise DeclarationError(
            f"the command cannot be split into words: {error}", where=command, remedy="close the quotes in its area"
        ) from error
    if not arguments:
        raise DeclarationError("the command is empty", remedy="write the command in its area")
    if arguments[0] == "python":
        arguments[0] = sys.executable
    return arguments


def visible(text: str) -> str:
    r"""Text in which everything can be seen: other characters stand as `\x1b` or `\u202e`. Newlines and tabs stay."""
    return _NOT_PLAIN.sub(_shown, text.replace("\r\n", "\n"))


def line(text: str) -> str:
    """Visible text on one line."""
    return " ".join(visible(text).split())


def log(text: str) -> str:
    """Visible text for a Buildkite log, in which no line begins a group of its own."""
    return GROUPS.sub(" ", visible(text))


def markdown(text: str) -> str:
    """Text on one line that CommonMark, its GitHub dialect and HTML show as it is; addresses in it become no links."""
    escaped = _MARKDOWN.sub(r"\\\1", html.escape(line(text), quote=False))
    return _BLOCK.sub(r"\1\\\2", escaped)


def fenced(text: str) -> str:
    """A Markdown code block whose fence is longer than any run of backticks inside."""
    shown = visible(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def xml(text: str) -> str:
    """Text that XML 1.0 can hold (section 2.2), with everything visible."""
    return _NOT_XML.sub("\ufffd", visible(text))


def pytest_word(test_id: str) -> str:
    """What pytest's -k selects this test by; empty where its name is none that pytest could collect.

    -k is an expression of its own: only words of these characters are a name in it. With any others in the parameters
    the test function alone is still true, and wider.
    """
    name, bracket, parameters = test_id.partition("[")
    name = name.rsplit("::", 1)[-1]
    if not name.isidentifier() or not name.isascii():
        return ""
    exact = name + bracket + parameters
    return exact if _WORD.fullmatch(exact) else name


def finalize(value: object) -> object:
    """What jinja2 does with each value before it escapes it as HTML; markup of our own stays as it is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _shown(found: re.Match[str]) -> str:
    """A character, or its code where it has no shape."""
    character = found[0]
    has_shape = unicodedata.category(character) not in HIDDEN and character not in INVISIBLE
    return character if has_shape else _code(character)


_ASCII = {"✓": "+", "✗": "x", "○": "o", "▸": ">", "·": ".", "…": "...", "–": "-", "—": "-"}  # noqa: RUF001
_ASCII |= {bar: str(height) for height, bar in enumerate("▁▂▃▄▅▆▇█", start=1)}


def plain(error: UnicodeError) -> tuple[str, int]:
    """Handler of codecs for what an output stream cannot encode: a similar character, else its escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(c) or _code(c) for c in error.object[error.start : error.end]), error.end


def _code(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name that is not UTF-8 (PEP 383)
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


LISTED = 12
"""Names listed in full when none is close; more would bury the message."""


def suggest(name: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """A remedy for an unknown `name`: the closest known names, or what there is to choose from (`listed`, else all)."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(one) for one in close) + "?"
    names = sorted(listed) or names
    if not names:
        return "declare one first: there is nothing of this kind"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return "name one of " + ", ".join(names[:LISTED]) + more


MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?", "did not run": "○"}
"""Outcome -> its mark. By value: the command line shows its help before pydantic is imported."""

STYLES = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "did not run": "magenta"}
"""Styles of rich; did not run is not dimmed, because it is not green."""


def marked(outcome: str) -> str:
    """`✗ fail`."""
    return f"{MARKS[outcome]} {outcome!s}"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `59 s`, `12 min 03 s`, `1 h 04 min`; a dash when nothing was timed."""
    if seconds is None:
        return "–"  # noqa: RUF001 - a dash, not a minus
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rounded(seconds: float) -> str:
    """`8 s`, `45 s`, `3 min 40 s`: a forecast, so no more digits than it has."""
    unit = 1 if seconds < 20 else 5 if seconds < 60 else 10
    return duration(unit * round(seconds / unit)) if seconds >= 9.5 else f"{max(seconds, 1):.0f} s"


def count(number: int, word: str) -> str:
    """`1 step`, `22 steps`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def shorten(words: str, limit: int) -> str:
    """At most `limit` characters, saying how many are missing."""
    return words if len(words) <= limit else f"{words[:limit]}… ({len(words) - limit} more characters in results.jsonl)"
