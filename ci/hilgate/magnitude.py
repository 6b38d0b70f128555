"""By how much a check is wrong, and for which shape, dtype, layout and arch: read from what the check recorded.

Tests record numbers and labels (`record_property`), findings carry them; what a check did not record is read from the
parameters in its id, or left out. Nothing is computed here: a figure that is shown is one that was recorded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate import rules

if TYPE_CHECKING:
    from hilgate.model import Check

_ERROR = re.compile(r"(?:^|_)(?:err|error|errors|diff|difference|ulps)(?:_|$)")
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})  # JSON has neither, so `hilgate.evidence` keeps them as labels
_CASE = ("shape", "dtype", "layout", "kernel", "arch")
_DTYPE = re.compile(r"(?<![a-z0-9])(?:b?float\d+|fp8\w*|e[45]m[23]\w*|[bf]f?p?16|fp32|tf32|int8|uint8)(?![a-z0-9])")
_ARCH = re.compile(r"(?<![a-z0-9])gfx[0-9a-f]{3,4}(?![a-z0-9])")
_PLACE = re.compile(r"(\S+\.py:\d+): \S+")
_SCORE = ("exact_match", "ci_low", "ci_high", "n")


@dataclass(frozen=True)
class Magnitude:
    """What an engineer asks first of a check that is not green; empty where it was not recorded.

    Attributes:
        assertion: The first failing assertion, on one line.
        place: `file:line` of it.
        error: `max_abs_err 0.5, max_row_relative_err 0.031 (1.2e-07 allowed), 12 of 640 rows off`.
        case: `shape 160x4x64, dtype float16, layout interleaved, arch gfx942`.
    """

    assertion: str
    place: str
    error: str
    case: str


def magnitude(check: Check, device: str) -> Magnitude:
    """The magnitude of one check.

    Args:
        check: As recorded.
        device: Where it ran (`PlannedStep.device`); the arch of a check that names none.
    """
    return Magnitude(rules.first_line(check.message), place(check), error(check), case(check, device))


def place(check: Check) -> str:
    """`file:line` where a test failed: the last line of its message (see `hilgate.evidence`)."""
    last = check.message.splitlines()[-1:]
    found = _PLACE.fullmatch(last[0].strip()) if last else None
    return found[1] if found else ""


def error(check: Check) -> str:
    """Errors with what was allowed, rows off, or a score beside its baseline, as recorded; empty when nothing was."""
    words = [_with_limit(name, check) for name in _error_names(check)]
    if "rows_off" in check.numbers:
        of = f" of {shortest(check.numbers['rows'])}" if "rows" in check.numbers else ""
        words.append(f"{shortest(check.numbers['rows_off'])}{of} rows off")
    if all(name in check.numbers for name in _SCORE):
        words.append(_score(check))
    return ", ".join(words)


def case(check: Check, device: str) -> str:
    """What the check was about, in the order in which a kernel engineer asks for it."""
    parameters = check.id[check.id.index("[") :] if "[" in check.id else ""
    known = {name: check.labels[name] for name in _CASE if check.labels.get(name)}
    if "dtype" not in known and (found := _DTYPE.search(parameters)):
        known["dtype"] = found[0]
    if "arch" not in known:
        found = _ARCH.search(parameters)
        known["arch"] = found[0] if found else device
    return ", ".join(f"{name} {known[name]}" for name in _CASE if name in known)


def shortest(number: float) -> str:
    """A number with at most four significant digits; whole numbers as they are."""
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def _error_names(check: Check) -> list[str]:
    """Absolute errors, then relative ones, then any others; what was allowed stands beside its error."""
    numbers = [name for name in check.numbers if _ERROR.search(name)]
    wild = [name for name, value in check.labels.items() if _ERROR.search(name) and value in _NOT_FINITE]
    names = [name for name in dict.fromkeys(wild + numbers) if not name.endswith("_allowed")]
    return sorted(names, key=lambda name: (name not in wild, "abs" not in name, "rel" not in name))


def _with_limit(name: str, check: Check) -> str:
    value = shortest(check.numbers[name]) if name in check.numbers else check.labels[name]
    limit = check.numbers.get(f"{name}_allowed")
    return f"{name} {value}" + (f" ({shortest(limit)} allowed)" if limit is not None else "")


def _score(check: Check) -> str:
    score, low, high, n = (check.numbers[name] for name in _SCORE)
    text = f"exact_match {score:.1%} [{low:.1%}, {high:.1%}], n={n:g}"
    before = check.numbers.get("baseline_exact_match")
    return text if before is None else f"{text}, baseline {before:.1%}"
