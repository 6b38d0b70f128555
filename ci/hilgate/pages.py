"""The templates of all pages, with what they share: escaping, words and marks of outcomes."""

from __future__ import annotations

import jinja2

from hilgate import escape as safe
from hilgate import shown


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, saying how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters in results.jsonl)"


def environment() -> jinja2.Environment:
    """Templates in which every value is escaped as HTML and an unknown name is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("hilgate"),
        autoescape=True,
        finalize=safe.finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "mark": lambda outcome: shown.MARKS[outcome],
        "slug": lambda word: str(word).replace(" ", "-"),
        "duration": shown.duration,
        "shorten": shorten,
    }
    return made
