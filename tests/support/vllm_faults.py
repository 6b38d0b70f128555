# SPDX-License-Identifier: Apache-2.0
"""Declared faults of vLLM's kernels: a test that meets one must fail for the declared reason, and for no other."""

from __future__ import annotations

import re
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).parents[1] / "vllm_kernels/declared.toml"


@dataclass(frozen=True)
class Fault:
    """An entry of declared.toml."""

    kernel: str
    does: str
    raises: str
    """Name of the exception, or several with | between them."""
    says: str
    """Regular expression of its message; {names} are filled in by the test."""
    address: str = ""
    """Upstream's; empty where the test itself is the reproduction."""


def faults() -> dict[str, Fault]:
    """Name -> fault."""
    return {name: Fault(**entry) for name, entry in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()}


@contextmanager
def declared(name: str, **facts: object) -> Iterator[None]:
    """A block that must raise what the fault declares; any other exception goes on, and none is a failure."""
    fault = faults()[name]
    says = re.sub(r"\{(\w+)\}", lambda found: re.escape(str(facts[found[1]])), fault.says)
    try:
        yield
    except Exception as error:
        # Triton says where in a kernel it failed, and has what Python raised as the cause.
        words = f"{error}\n{error.__cause__ or ''}"
        if type(error).__name__ not in fault.raises.split("|") or not re.search(says, words, re.MULTILINE):
            raise
    else:
        pytest.fail(f"{fault.kernel} is right where it is declared wrong: take {name} out of {TABLE.name} and its test")


def unrecorded(*_: object) -> None:
    """Stand-in for `record_property`: figures of a wrong answer are no figures of the kernel."""
