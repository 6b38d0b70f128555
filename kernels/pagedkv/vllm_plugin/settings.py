# SPDX-License-Identifier: Apache-2.0
"""Settings of the plugin from the environment: PAGEDKV_PACKING, _MLA, _SSD, _GDN, _INTERPRETER and _VLLM.

The standard library only: `register` reads them too.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, cast

from pagedkv.layout import PACKINGS, Packing
from pagedkv.vllm_plugin.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

PACKING_VARIABLE = "PAGEDKV_PACKING"
MLA_VARIABLE = "PAGEDKV_MLA"
SSD_VARIABLE = "PAGEDKV_SSD"
GDN_VARIABLE = "PAGEDKV_GDN"
INTERPRETER_VARIABLE = "PAGEDKV_INTERPRETER"
VLLM_VARIABLE = "PAGEDKV_VLLM"


@functools.cache
def packing() -> Packing:
    """How K and V lie in a page: the environment variable PAGEDKV_PACKING, `rows` where it is not set.

    Read once a process: layers, their backend and the allocation must agree. The workers' report tells what they read.

    Raises:
        SettingError: The variable names no packing.
    """
    return cast("Packing", _read(PACKING_VARIABLE, PACKINGS, "rows"))


def mla() -> bool:
    """Whether TRITON_MLA shall be ours on ROCm and CUDA: the environment variable PAGEDKV_MLA, 0 where it is not set.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    return _read(MLA_VARIABLE, ("0", "1"), "0") == "1"


def ssd() -> bool:
    """Whether Mamba-2's prefill shall be ours: the environment variable PAGEDKV_SSD, 0 where it is not set.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    return _read(SSD_VARIABLE, ("0", "1"), "0") == "1"


def gdn() -> bool:
    """Whether gated delta nets shall be ours: the environment variable PAGEDKV_GDN, 0 where it is not set.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    return _read(GDN_VARIABLE, ("0", "1"), "0") == "1"


def fast_interpreter() -> bool:
    """Whether functions of Triton's interpreter shall be replaced by faster ones: PAGEDKV_INTERPRETER, else `plain`.

    Raises:
        SettingError: The variable is neither plain nor fast.
    """
    return _read(INTERPRETER_VARIABLE, ("plain", "fast"), "plain") == "fast"


def tried() -> str | None:
    """Version of vLLM that shall count as tested: the environment variable PAGEDKV_VLLM, as `0.34` or `dev`.

    Raises:
        SettingError: The variable is no such version.
    """
    value = os.environ.get(VLLM_VARIABLE)
    if value is not None and not re.fullmatch(r"\d+\.\d+|dev", value):
        raise SettingError(VLLM_VARIABLE, value, "the first two numbers of a version, such as 0.34")
    return value


SETTINGS: dict[str, Callable[[], object]] = {
    PACKING_VARIABLE: lambda: _read(PACKING_VARIABLE, PACKINGS, "rows"),  # `packing` keeps what it has read
    MLA_VARIABLE: mla,
    SSD_VARIABLE: ssd,
    GDN_VARIABLE: gdn,
    INTERPRETER_VARIABLE: fast_interpreter,
    VLLM_VARIABLE: tried,
}
"""Environment variable -> what reads and checks it."""


def check() -> None:
    """Read every setting, so that a wrong one is reported when vLLM loads the plugin, before it makes a layer.

    Raises:
        SettingError: Of the first that means nothing.
    """
    for read in SETTINGS.values():
        read()


def unknown() -> tuple[str, ...]:
    """Environment variables that look like settings of the plugin and are none: misspelt, or of another version."""
    return tuple(sorted(name for name in os.environ if name.startswith("PAGEDKV_") and name not in SETTINGS))


def _read(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, default)
    if value not in allowed:
        raise SettingError(variable, value, f"one of {', '.join(allowed)}")
    return value
