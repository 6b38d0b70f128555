"""What the plugin itself is told, beside what vLLM tells it."""

from __future__ import annotations

import functools
import os
from typing import cast

from pagedkv.layout import PACKINGS, Packing
from pagedkv.vllm_plugin.errors import SettingError

PACKING_VARIABLE = "PAGEDKV_PACKING"


@functools.cache
def packing() -> Packing:
    """How K and V lie in a page: the environment variable PAGEDKV_PACKING, `rows` where it is not set.

    Read once a process: layers, their backend and the allocation must agree. The workers' report tells what they read.

    Raises:
        SettingError: The variable names no packing.
    """
    value = os.environ.get(PACKING_VARIABLE, "rows")
    if value not in PACKINGS:
        raise SettingError(PACKING_VARIABLE, value, PACKINGS)
    return cast("Packing", value)
