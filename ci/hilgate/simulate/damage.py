"""Damage to a `results.jsonl`: works on bytes, knows no model. One changed byte makes the whole file worthless."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from hilgate.simulate.faults import Kind

if TYPE_CHECKING:
    from collections.abc import Callable


def damage(kind: Kind, number: int, whole: bytes) -> bytes:
    """Damage a file; `number` says where."""
    return _HOW[kind](random.Random(number), whole)


def _flip(rng: random.Random, whole: bytes) -> bytes:
    place = rng.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]


def _truncate(rng: random.Random, whole: bytes) -> bytes:
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    return whole[: rng.randrange(last, len(whole))]


def _not_a_number(rng: random.Random, whole: bytes) -> bytes:
    return _replace_value(rng, whole, lambda _: rng.choice(["NaN", "Infinity", "-Infinity"]))


def _wrong_type(rng: random.Random, whole: bytes) -> bytes:
    return _replace_value(
        rng, whole, lambda value: json.dumps(rng.choice([[value], {"value": value}, str(value), None]))
    )


def _replace_value(rng: random.Random, whole: bytes, other: Callable[[object], str]) -> bytes:
    """Put another text where a number of a step's or a check's record stands."""
    lines = whole.split(b"\n")
    numbers = [
        (place, name)
        for place, line in enumerate(lines)
        for name, value in _fields(line).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if not numbers:
        return whole[:-1]
    place, name = rng.choice(numbers)
    record = json.loads(lines[place])
    text = other(record[name])
    record[name] = "@here@"
    lines[place] = json.dumps(record).replace('"@here@"', text).encode()
    return b"\n".join(lines)


def _fields(line: bytes) -> dict[str, object]:
    """The fields of a line; none where an earlier damage left no JSON."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _remove(rng: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _reorder(rng: random.Random, whole: bytes) -> bytes:
    lines = whole.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _fill_up(rng: random.Random, whole: bytes) -> bytes:
    return whole[: rng.randrange(len(whole))]


_HOW: dict[Kind, Callable[[random.Random, bytes], bytes]] = {
    Kind.FLIPPED_BIT: _flip,
    Kind.TRUNCATED: _truncate,
    Kind.NOT_A_NUMBER: _not_a_number,
    Kind.WRONG_TYPE: _wrong_type,
    Kind.LINE_REMOVED: _remove,
    Kind.LINES_REORDERED: _reorder,
    Kind.DISK_FULL: _fill_up,
    Kind.DUPLICATED: lambda _, whole: whole + whole,
}
DAMAGING = frozenset(_HOW)
"""Kinds that damage the file itself."""
