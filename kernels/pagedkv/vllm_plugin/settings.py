# SPDX-License-Identifier: Apache-2.0
"""Settings of the plugin from the environment: PAGEDKV_PACKING, PAGEDKV_MLA, PAGEDKV_SSD and PAGEDKV_VLLM.

The standard library only: `register` reads them too.
"""

from __future__ import annotations

import functools
import os
from typing import cast

from pagedkv.layout import PACKINGS, Packing
from pagedkv.vllm_plugin.errors import SettingError

PACKING_VARIABLE = "PAGEDKV_PACKING"
MLA_VARIABLE = "PAGEDKV_MLA"
SSD_VARIABLE = "PAGEDKV_SSD"


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
    """Whether Mamba-2's chunk_scan shall be ours: the environment variable PAGEDKV_SSD, 0 where it is not set.

    Raises:
        SettingError: The variable is neither 0 nor 1.
    """
    return _read(SSD_VARIABLE, ("0", "1"), "0") == "1"


def tried() -> str | None:
    """Version of vLLM, as `0.34`, that shall count as tested: the environment variable PAGEDKV_VLLM."""
    return os.environ.get("PAGEDKV_VLLM")


def _read(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, default)
    if value not in allowed:
        raise SettingError(variable, value, ", ".join(allowed))
    return value
