# SPDX-License-Identifier: Apache-2.0
"""Features that a request can ask for, in the order in which a rejection names them, and a kernel's limits on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagedkv.arch import limits
from pagedkv.errors import InvalidFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .request import Request


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
        assert isinstance(value, int | float)
        low, high = self.least or 0, value if self.most is None else self.most
        fits = self.step == 1 or value % self.step == 0
        return low <= value <= high and fits and not (self.power_of_two and int(value) & (int(value) - 1))

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


def parse_limit(where: str, data: object) -> Limit:
    """Read a limit from data.

    Args:
        where: File, kernel and feature, for messages.
        data: `{takes = "any" | "none" | [values]}`, or `{from, to, step, power_of_two}` (some of them), or
            `{branches = [kernels], rows_per_compute_unit}`; with a `source`.

    Raises:
        InvalidFileError: it is none of these, or names no source.
    """
    if not isinstance(data, Mapping) or not set(data) <= _KEYS:
        raise InvalidFileError(f"{where}: got {data!r}; expected a table of {', '.join(sorted(_KEYS))}.")
    source = data.get("source")
    if not isinstance(source, str) or not source.strip():
        raise InvalidFileError(f"{where}: got source {source!r}; expected where the limit is written.")
    kinds = [kind for kind in (("takes",), (*_INTEGERS, "power_of_two"), ("branches",)) if set(kind) & set(data)]
    if len(kinds) != 1:
        raise InvalidFileError(f"{where}: expected one of takes, a range, or branches; got {sorted(data)}.")
    if "takes" in data:
        takes = data["takes"]
        if takes == "any":
            return Limit(source, any=True)
        if takes != "none" and not (
            isinstance(takes, list) and takes and all(isinstance(v, (str, int)) for v in takes)
        ):
            raise InvalidFileError(f'{where}: takes: got {takes!r}; expected "any", "none" or a list of values.')
        return Limit(source, values=() if takes == "none" else tuple(takes))
    if "branches" in data:
        branches, rows = data["branches"], data.get("rows_per_compute_unit")
        if not isinstance(branches, list) or len(branches) < 2 or not isinstance(rows, int) or rows < 1:
            raise InvalidFileError(
                f"{where}: expected at least two branches and rows_per_compute_unit >= 1; got {data!r}."
            )
        return Limit(source, branches=tuple(branches), rows_per_compute_unit=rows, any=True)
    for key in _INTEGERS:
        value = data.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidFileError(f"{where}: {key}: got {value!r}; expected an integer >= 1.")
    if data.get("power_of_two", True) is not True:
        raise InvalidFileError(f"{where}: power_of_two: got {data['power_of_two']!r}; expected true, or leave it out.")
    return Limit(
        source,
        least=data.get("from"),
        most=data.get("to"),
        step=data.get("step", 1),
        power_of_two="power_of_two" in data,
    )


Task = Literal["decode", "prefill", "write", "gather"]
"""`prefill` is every query with more than a decode step's tokens: prefill, and extend of a cached context."""
TASKS: tuple[Task, ...] = ("decode", "prefill", "write", "gather")
READERS: tuple[Task, ...] = ("decode", "prefill")

UNKNOWN_BLOCKS = 1 << 62
"""Stands for a pool of unknown size: more than any limit."""


@dataclass(frozen=True)
class Feature:
    """One column of the table of limits."""

    key: str
    """Name in the data."""
    value: Callable[[Request, Task], object]
    """What a request asks of a kernel that does a task; None is nothing."""
    describe: Callable[[Request], str]
    """Description for a person."""
    tasks: tuple[Task, ...] = TASKS
    """Tasks that have it; a kernel of another task does not state it."""


def _kv_cache_dtype(request: Request, _task: Task) -> str:
    native = limits(request.arch).native_fp8
    return "hardware_fp8" if request.kv_cache_dtype == native else request.kv_cache_dtype


INTERPRETED_BFLOAT16 = "interpreted_bfloat16"
"""bfloat16 under Triton's interpreter, which computes it wrongly; compiled kernels take bfloat16."""


def asked_dtype(dtype: str, arch: str) -> str:
    """What a layer's dtype asks of kernels on an arch."""
    return INTERPRETED_BFLOAT16 if (dtype, arch) == ("bfloat16", "interpreter") else dtype


def _describe_dtype(request: Request) -> str:
    under = " under Triton's interpreter" if asked_dtype(request.dtype, request.arch) != request.dtype else ""
    return f"dtype {request.dtype}{under}"


def _plain(key: str, tasks: tuple[Task, ...] = TASKS) -> Feature:
    def value(request: Request, _task: Task) -> object:
        return getattr(request, key) or None  # False is not asked for

    return Feature(key, value, lambda request: f"{key} {getattr(request, key)}", tasks)


FEATURES: tuple[Feature, ...] = (
    _plain("arch"),
    _plain("attn_type", READERS),
    _plain("head_size"),
    Feature("dtype", lambda r, _: asked_dtype(r.dtype, r.arch), _describe_dtype),
    Feature("kv_cache_dtype", _kv_cache_dtype, lambda r: f"kv_cache_dtype {r.kv_cache_dtype} on {r.arch}"),
    Feature(
        "kv_scales",
        lambda r, _: None if r.kv_scales == "none" else r.kv_scales,
        lambda r: f"kv_scales {r.kv_scales}",
    ),
    _plain("packing"),
    _plain("sides"),
    _plain("block_size"),
    Feature(
        "num_blocks",
        lambda r, _: r.num_blocks or UNKNOWN_BLOCKS,
        lambda r: f"num_blocks {r.num_blocks or 'not given'}",
    ),
    Feature(
        "gqa",
        lambda r, _: r.num_q_heads // r.num_kv_heads,
        lambda r: f"gqa {r.num_q_heads // r.num_kv_heads}",
        READERS,
    ),
    _plain("window", READERS),
    _plain("softcap", READERS),
    _plain("alibi", READERS),
    _plain("sinks", READERS),
    Feature("scale", lambda r, _: r.custom_scale, lambda r: f"scale {r.scale:g}", READERS),
    Feature("q_len", lambda r, task: r.q_len if task == "decode" else None, lambda r: f"q_len {r.q_len}", READERS),
    Feature(
        "mask",
        lambda r, _: "causal" if r.causal else "full",
        lambda r: f"mask {'causal' if r.causal else 'full'}",
        READERS,
    ),
    _plain("max_seq_len", READERS),
)


def stated(tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """Return the features that a kernel of these tasks must state; of a reader also its dependence on `batch_size`."""
    keys = tuple(feature.key for feature in FEATURES if set(tasks) & set(feature.tasks))
    return (*keys, "batch_size") if set(tasks) & set(READERS) else keys
