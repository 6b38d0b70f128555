# SPDX-License-Identifier: Apache-2.0
"""Settings of the plugin from the environment: PAGEDKV_PACKING, _MLA, _SSD, _GDN, _INTERPRETER and _VLLM.

The standard library only: `register` reads them too.
"""

from __future__ import annotations

import functools
import os
import re
from typing import cast

from pagedkv.layout import PACKINGS, Packing
from pagedkv.vllm_plugin.errors import SettingError

PACKING_VARIABLE = "PAGEDKV_PACKING"
MLA_VARIABLE = "PAGEDKV_MLA"
SSD_VARIABLE = "PAGEDKV_SSD"
GDN_VARIABLE = "PAGEDKV_GDN"
INTERPRETER_VARIABLE = "PAGEDKV_INTERPRETER"
VLLM_VARIABLE = "PAGEDKV_VLLM"


ALLOWED: dict[str, tuple[str, ...]] = {
    PACKING_VARIABLE: PACKINGS,
    MLA_VARIABLE: ("0", "1"),
    SSD_VARIABLE: ("0", "1"),
    GDN_VARIABLE: ("0", "1"),
    INTERPRETER_VARIABLE: ("plain", "fast"),
}
"""Environment variable -> its values; the first where it is not set."""
SETTINGS = (*ALLOWED, VLLM_VARIABLE)


@functools.cache
def packing() -> Packing:
    """How K and V lie in a page: the environment variable PAGEDKV_PACKING, `rows` where it is not set.

    Read once a process: layers, their backend and the allocation must agree. The workers' report tells what they read.

    Raises:
        SettingError: The variable names no packing.
    """
    return cast("Packing", read(PACKING_VARIABLE))


def enabled(variable: str) -> bool:
    """Whether one of PAGEDKV_MLA, _SSD and _GDN puts our kernels in the place of vLLM's.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    return read(variable) == "1"


def tried() -> str | None:
    """Version of vLLM that shall count as tested: the environment variable PAGEDKV_VLLM, as `0.34` or `dev`.

    Raises:
        SettingError: The variable is no such version.
    """
    value = os.environ.get(VLLM_VARIABLE)
    if value is not None and not re.fullmatch(r"\d+\.\d+|dev", value):
        raise SettingError(VLLM_VARIABLE, value, "the first two numbers of a version, such as 0.34")
    return value


def check() -> None:
    """Read every setting, so that a wrong one is reported when vLLM loads the plugin, before it makes a layer.

    Raises:
        SettingError: Of the first that means nothing.
    """
    for variable in ALLOWED:
        read(variable)
    tried()


def unknown() -> tuple[str, ...]:
    """Environment variables that look like settings of the plugin and are none: misspelt, or of another version."""
    return tuple(sorted(name for name in os.environ if name.startswith("PAGEDKV_") and name not in SETTINGS))


def read(variable: str) -> str:
    """Return the value of a setting of `ALLOWED`.

    Raises:
        SettingError: It is none of those allowed.
    """
    allowed = ALLOWED[variable]
    value = os.environ.get(variable, allowed[0])
    if value not in allowed:
        raise SettingError(variable, value, f"one of {', '.join(allowed)}")
    return value
