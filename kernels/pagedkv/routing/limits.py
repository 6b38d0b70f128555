"""One limit of one kernel: which values of a feature it takes, in a form that data can state and a person can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CandidateError

_INTEGERS = ("from", "to", "step")
_KEYS = {"takes", "power_of_two", "branches", "rows_per_compute_unit", "source", *_INTEGERS}


@dataclass(frozen=True)
class Limit:
    """What a kernel takes of one feature, and where that is written. A feature that is not asked for fits any limit."""

    source: str
    """File and function, or line, or pull request."""
    any: bool = False
    values: tuple[str | int, ...] | None = None
    """Exactly these; empty is none at all."""
    least: int | None = None
    most: int | None = None
    step: int = 1
    power_of_two: bool = False
    branches: tuple[str, ...] = ()
    """Kernels between which it changes by the size of the batch."""
    rows_per_compute_unit: int = 0
    """Sequences x query heads for each compute unit, above which it changes."""

    def admits(self, value: object) -> bool:
        """Whether the kernel takes `value`; None is a feature that is not asked for."""
        if value is None or self.any:
            return True
        if self.values is not None:
            return value in self.values
        assert isinstance(value, int)
        low, high = self.least or 0, value if self.most is None else self.most
        return low <= value <= high and value % self.step == 0 and not (self.power_of_two and value & (value - 1))

    def __str__(self) -> str:
        if self.any:
            return "any"
        if self.values is not None:
            return f"{' or '.join(map(str, self.values))} only" if self.values else "none"
        words = ["powers of two"] if self.power_of_two else []
        words += [f"multiples of {self.step}"] if self.step > 1 else []
        words += [f"at least {self.least}"] if self.least else []
        words += [f"at most {self.most}"] if self.most else []
        return ", ".join(words)


def parse(where: str, data: object) -> Limit:
    """Read a limit.

    Args:
        where: File, kernel and feature, for messages.
        data: `{takes = "any" | "none" | [values]}`, or `{from, to, step, power_of_two}` (some of them), or
            `{branches = [kernels], rows_per_compute_unit}`; with a `source`.

    Raises:
        CandidateError: it is none of these, or names no source.
    """
    if not isinstance(data, Mapping) or not set(data) <= _KEYS:
        raise CandidateError(f"{where}: got {data!r}; expected a table of {', '.join(sorted(_KEYS))}.")
    source = data.get("source")
    if not isinstance(source, str) or not source.strip():
        raise CandidateError(f"{where}: got source {source!r}; expected where the limit is written.")
    kinds = [kind for kind in (("takes",), (*_INTEGERS, "power_of_two"), ("branches",)) if set(kind) & set(data)]
    if len(kinds) != 1:
        raise CandidateError(f"{where}: expected one of takes, a range, or branches; got {sorted(data)}.")
    if kinds[0] == ("takes",):
        return _parse_takes(where, data["takes"], source)
    if kinds[0] == ("branches",):
        return _parse_branches(where, data, source)
    for key in _INTEGERS:
        value = data.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CandidateError(f"{where}: {key}: got {value!r}; expected an integer >= 1.")
    if data.get("power_of_two", True) is not True:
        raise CandidateError(f"{where}: power_of_two: got {data['power_of_two']!r}; expected true, or leave it out.")
    return Limit(
        source,
        least=data.get("from"),
        most=data.get("to"),
        step=data.get("step", 1),
        power_of_two="power_of_two" in data,
    )


def _parse_takes(where: str, takes: object, source: str) -> Limit:
    if takes == "any":
        return Limit(source, any=True)
    if takes == "none":
        return Limit(source, values=())
    if isinstance(takes, list) and takes and all(isinstance(value, (str, int)) for value in takes):
        return Limit(source, values=tuple(takes))
    raise CandidateError(f'{where}: takes: got {takes!r}; expected "any", "none" or a list of values.')


def _parse_branches(where: str, data: Mapping[str, object], source: str) -> Limit:
    branches, rows = data["branches"], data.get("rows_per_compute_unit")
    if not isinstance(branches, list) or len(branches) < 2 or not isinstance(rows, int) or rows < 1:
        raise CandidateError(f"{where}: expected at least two branches and rows_per_compute_unit >= 1; got {data!r}.")
    return Limit(source, branches=tuple(branches), rows_per_compute_unit=rows, any=True)
