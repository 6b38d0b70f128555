# SPDX-License-Identifier: Apache-2.0
"""Templates of pages."""

from __future__ import annotations

import functools

import jinja2

from hilgate import text
from hilgate.report.view import at_most


@functools.cache
def pages() -> jinja2.Environment:
    """Templates in which every value is escaped as HTML and an unknown name is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("hilgate.report"),
        autoescape=True,
        finalize=text.finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "mark": lambda outcome: text.MARKS[outcome],
        "slug": lambda word: str(word).replace(" ", "-"),
        "duration": text.duration,
        "shorten": text.shorten,
        "at_most": at_most,
    }
    return made
