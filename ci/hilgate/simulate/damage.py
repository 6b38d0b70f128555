"""Damage to a `results.jsonl`, and whether it changes anything that decides. Works on bytes; knows no model."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from hilgate.simulate.faults import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

DECISIVE: dict[str, tuple[str, ...]] = {
    "build": ("schema_version", "plan_digest", "commit", "tree"),
    "check": ("step", "check.id", "check.outcome"),
    "step": ("key", "exit_status", "outcome", "checks", "command", "environment.image"),
    "rerun": ("step", "check", "elsewhere", "outcome"),
    "image": ("step", "image", "content", "digest"),
}
"""Fields that a verdict may rest on. Damage elsewhere (a message, a time) makes nothing false that decides."""


def damage(kind: Kind, number: int, whole: bytes) -> bytes:
    """Damage a file; `number` says where."""
    return _HOW[kind](random.Random(number), whole)


def harmless(before: bytes, after: bytes) -> bool:
    """Whether a damaged file still says, in sound JSON and in the same order of steps, all that decides."""
    try:
        told, told_now = _told(before), _told(after)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return told == told_now and after.endswith(b"\n")


def _told(whole: bytes) -> list[str]:
    """The decisive fields of each line; neighbouring checks may stand in any order."""
    lines = [_projected(json.loads(line, parse_constant=_refuse)) for line in whole.split(b"\n")[:-1]]
    for start in range(len(lines)):
        end = start
        while end < len(lines) and lines[end].startswith('["check"'):
            end += 1
        lines[start:end] = sorted(lines[start:end])
    return lines


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _projected(record: dict[str, Any]) -> str:
    values: list[object] = [record["kind"], sorted(record)]
    for path in DECISIVE[record["kind"]]:
        value: Any = record
        for name in path.split("."):
            value = value[name]
        values.append(value)
    return json.dumps(values)


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
        if line
        for name, value in json.loads(line).items()
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
