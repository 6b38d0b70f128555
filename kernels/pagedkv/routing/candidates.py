# SPDX-License-Identifier: Apache-2.0
"""Read the kernels of each provider and their order of preference from `candidates/*.toml` and `preference.toml`.

Nothing has a default: a kernel that does not state a limit, or where it is written, is an error and not a kernel
without that limit.
"""

from __future__ import annotations

import functools
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
    """Of decode, extend, prefill, write, gather."""
    reads: str
    """`cache`; `dense`: keys and values that somebody gathered; `none`: it does not attend."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """By feature."""

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
    """A place in the order of one task."""

    kernel: Kernel
    basis: str
    """`measured` or `policy`."""
    why: str
    arch: str
    """Where it was measured, if we did that; empty for a policy and for a figure that we read."""


@functools.cache
def load() -> Mapping[Task, tuple[Preferred, ...]]:
    """Return the kernels of each task, best first.

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
    for entry in toml.rows(where, toml.parse(where, text, ["kernel"], every=True)["kernel"]):
        kernel = _read_kernel(where, provider, entry)
        if kernel.name in kernels:
            raise InvalidFileError(f"{where}: {kernel.name} is there twice.")
        kernels[kernel.name] = kernel
    return kernels


def read_preference(text: str, kernels: Mapping[str, Kernel]) -> dict[Task, tuple[Preferred, ...]]:
    """Read the order of the kernels of each task.

    Raises:
        InvalidFileError: a kernel is missing in a task that it does, or is named in one that it does not; or a branch
            of one kernel is no kernel that reads the same cache.
    """
    where = "preference.toml"
    tables = toml.parse(where, text, TASKS, every=True)
    order: dict[Task, tuple[Preferred, ...]] = {}
    for task in TASKS:
        able = {name for name, kernel in kernels.items() if task in kernel.tasks}
        entries = toml.rows(f"{where}: {task}", tables[task])
        named = [entry.get("kernel") for entry in entries]
        if sorted(map(str, named)) != sorted(able):
            raise InvalidFileError(f"{where}: {task}: got {named}; expected each of {sorted(able)} once.")
        order[task] = tuple(_read_preferred(f"{where}: {task}", entry, kernels) for entry in entries)
    for kernel in kernels.values():
        for branch in kernel.limits["batch_size"].branches if set(kernel.tasks) & set(READERS) else ():
            if branch not in kernels or not set(kernel.tasks) <= set(kernels[branch].tasks):
                raise InvalidFileError(f"{kernel.name}: batch_size: {branch} is no kernel that does {kernel.tasks[0]}.")
    return order


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


def _read_preferred(where: str, entry: Mapping[str, object], kernels: Mapping[str, Kernel]) -> Preferred:
    keys, arch = set(entry) - {"arch"}, str(entry.get("arch", ""))
    if keys != {"kernel", "basis", "why"} or entry["basis"] not in {"measured", "policy"} or not entry["why"]:
        raise InvalidFileError(f"{where}: got {dict(entry)}; expected kernel, basis (measured or policy) and why.")
    if arch and (entry["basis"] != "measured" or arch not in ARCHES):
        raise InvalidFileError(
            f"{where}: arch: got {arch!r} with basis {entry['basis']}; expected that of a measurement, one of "
            f"{', '.join(ARCHES)}."
        )
    return Preferred(kernels[str(entry["kernel"])], str(entry["basis"]), str(entry["why"]), arch)
