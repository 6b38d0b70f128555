# SPDX-License-Identifier: Apache-2.0
"""Read the kernels of each provider and their order of preference from `candidates/*.toml` and `preference.toml`.

Nothing has a default: a kernel that does not state a limit, or where it is written, is an error and not a kernel
without that limit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagedkv import toml
from pagedkv.arch import ARCHES
from pagedkv.errors import InvalidFileError

from .features import READERS, TASKS, Limit, Task, parse_limit, stated

FOLDER = Path(__file__).parent / "candidates"
PREFERENCE = Path(__file__).parent / "preference.toml"
PROVIDERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Packages that bring kernels."""

POLICY = "policy"
MEASURED = "measured on "
GPU_ARCHES = {
    "MI250X": "gfx90a",
    "MI300X": "gfx942",
    "MI308X": "gfx942",
    "MI325X": "gfx942",
    "MI355X": "gfx950",
    "H100": "sm_90",
    "H200": "sm_90",
}
"""GPUs on which a kernel may have been measured. A time says nothing about another arch."""

_SERVES: dict[str, Task] = {
    "decode": "decode",
    "extend": "prefill",
    "prefill": "prefill",
    "write": "write",
    "gather": "gather",
}
_OPERANDS = ("cache", "dense", "none")


@dataclass(frozen=True)
class Kernel:
    """One kernel that may serve a layer."""

    name: str
    """`<provider>.<function>`."""
    summary: str
    serves: tuple[str, ...]
    """Tasks, out of decode, extend, prefill, write, gather."""
    reads: str
    """`cache`; `dense`: gathered keys and values; `none`: it does not attend."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Limits by feature."""

    @property
    def provider(self) -> str:
        """The package that brings it."""
        return self.name.partition(".")[0]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What it does."""
        return tuple(dict.fromkeys(_SERVES[word] for word in self.serves))


@dataclass(frozen=True)
class Preferred:
    """A place in the order of one task on one arch."""

    kernel: Kernel
    reason: str
    """`policy`, or `measured on` a GPU of that very arch."""
    why: str


Orders = Mapping[str, Mapping[Task, tuple[Preferred, ...]]]
"""The kernels by arch and task, best first."""


@functools.cache
def load() -> Orders:
    """Return the kernels of each task on each arch, best first.

    Raises:
        InvalidFileError: the data is incomplete or contradicts itself.
    """
    kernels: dict[str, Kernel] = {}
    for provider in PROVIDERS:
        kernels |= read_kernels((FOLDER / f"{provider}.toml").read_text(encoding="utf-8"), provider)
    return read_preference(PREFERENCE.read_text(encoding="utf-8"), kernels)


def read_kernels(text: str, provider: str) -> dict[str, Kernel]:
    """Read the kernels of one provider, by name.

    Raises:
        InvalidFileError: a kernel lacks a limit that its tasks have, states another, or names no source.
    """
    where = f"candidates/{provider}.toml"
    kernels = {}
    for entry in toml.rows(where, toml.parse(where, text, ["kernel"], needed=["kernel"])["kernel"]):
        kernel = _read_kernel(where, provider, entry)
        if kernel.name in kernels:
            raise InvalidFileError(f"{where}: {kernel.name} is there twice.")
        kernels[kernel.name] = kernel
    return kernels


def read_preference(text: str, kernels: Mapping[str, Kernel]) -> Orders:
    """Read the order of the kernels of each task on each arch.

    Raises:
        InvalidFileError: a task of an arch has no order or two; a kernel is missing in a task that it does, or is named
            in one that it does not; a place rests on a measurement on another arch; or a branch of one kernel is no
            kernel that reads the same cache.
    """
    where = "preference.toml"
    found: dict[str, dict[Task, tuple[Preferred, ...]]] = {arch: {} for arch in ARCHES}
    for number, table in enumerate(toml.rows(where, toml.parse(where, text, ["order"], needed=["order"])["order"]), 1):
        order = f"{where}: order {number}"
        toml.among(f"{order}: keys", table, ["arches", *TASKS])
        arches = table.get("arches")
        if not isinstance(arches, list) or not arches:
            raise InvalidFileError(f"{order}: arches: got {arches!r}; expected a list of {', '.join(ARCHES)}.")
        toml.among(f"{order}: arches", arches, ARCHES)
        for task in TASKS:
            if task not in table:
                continue
            places = _read_order(f"{order}: {task}", task, toml.rows(f"{order}: {task}", table[task]), arches, kernels)
            for arch in arches:
                if task in found[arch]:
                    raise InvalidFileError(f"{order}: {task}: {arch} has an order already; expected one.")
                found[arch][task] = places
    if lacking := [f"{task} on {arch}" for arch, tasks in found.items() for task in TASKS if task not in tasks]:
        raise InvalidFileError(f"{where}: no order of {', '.join(lacking)}. Add the arch to an order of that task.")
    for kernel in kernels.values():
        for branch in kernel.limits["batch_size"].branches if set(kernel.tasks) & set(READERS) else ():
            if branch not in kernels or not set(kernel.tasks) <= set(kernels[branch].tasks):
                raise InvalidFileError(f"{kernel.name}: batch_size: {branch} is no kernel that does {kernel.tasks[0]}.")
    return found


def _read_kernel(where: str, provider: str, entry: Mapping[str, object]) -> Kernel:
    where = f"{where}: {entry.get('name')}"
    limits = entry.get("limits")
    kernel = toml.entry(where, {key: value for key, value in entry.items() if key != "limits"}, Kernel)
    if not kernel.name.startswith(f"{provider}."):
        raise InvalidFileError(f"{where}: expected a name that begins with {provider!r} and a dot.")
    toml.among(f"{where}: serves", kernel.serves, _SERVES)
    tasks = kernel.tasks
    if kernel.reads not in _OPERANDS or (kernel.reads == "none") != (not set(tasks) & set(READERS)):
        raise InvalidFileError(
            f"{where}: reads: got {kernel.reads!r}; expected cache or dense of a reader, none of another."
        )
    if not isinstance(limits, Mapping) or set(limits) != set(stated(tasks)):
        unlike = sorted(set(limits if isinstance(limits, Mapping) else ()) ^ set(stated(tasks)))
        raise InvalidFileError(
            f"{where}: limits: missing or unknown: {', '.join(unlike)}. Say every limit, "
            'with takes = "any" or "none" where there is nothing to limit.'
        )
    return replace(kernel, limits={key: parse_limit(f"{where}: {key}", limits[key]) for key in stated(tasks)})


def _read_order(
    where: str,
    task: Task,
    entries: list[dict[str, object]],
    arches: list[str],
    kernels: Mapping[str, Kernel],
) -> tuple[Preferred, ...]:
    able = {name for name, kernel in kernels.items() if task in kernel.tasks}
    named = [entry.get("kernel") for entry in entries]
    if sorted(map(str, named)) != sorted(able):
        raise InvalidFileError(f"{where}: got {named}; expected each of {sorted(able)} once.")
    return tuple(_read_preferred(where, entry, arches, kernels) for entry in entries)


def _read_preferred(
    where: str, entry: Mapping[str, object], arches: list[str], kernels: Mapping[str, Kernel]
) -> Preferred:
    where = f"{where}: {entry['kernel']}"
    if set(entry) != {"kernel", "reason", "why"} or not entry["why"]:
        raise InvalidFileError(f"{where}: got {dict(entry)}; expected kernel, reason and why.")
    reason, why = str(entry["reason"]), str(entry["why"])
    gpu = reason.removeprefix(MEASURED)
    if reason != POLICY and (not reason.startswith(MEASURED) or gpu not in GPU_ARCHES):
        raise InvalidFileError(
            f"{where}: reason: got {reason!r}; expected {POLICY!r}, or {MEASURED!r} and one of {', '.join(GPU_ARCHES)}."
        )
    # A policy is no measurement, so that no time of another GPU may stand in its words either.
    cited = [name for name in GPU_ARCHES if re.search(rf"\b{name}\b", f"{reason} {why}")]
    for name in cited:
        if elsewhere := [arch for arch in arches if arch != GPU_ARCHES[name]]:
            raise InvalidFileError(
                f"{where}: got a time of the {name} ({GPU_ARCHES[name]}) as the reason for {', '.join(elsewhere)}; "
                f"expected a measurement on that arch. Say {POLICY!r} and what it rests on."
            )
    return Preferred(kernels[str(entry["kernel"])], reason, why)
