# SPDX-License-Identifier: Apache-2.0
"""Count the kernels that Triton compiles in this process once an engine is ready: each makes a request wait.

vLLM's own monitor (`--jit-monitor-mode`) warns or ends the engine for any kernel. Here kernels are counted by name, and
a hook that was set before is still called.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from triton import knobs

names: Counter[str] = Counter()
"""Module and name of each kernel, and how many variants of it were compiled since `begin`."""

_hooked = False


def begin() -> None:
    """Count from here on. The hook is set once in a process; one that is set later must call it."""
    global _hooked  # noqa: PLW0603 - a hook is one of the process
    names.clear()
    if _hooked:
        return
    before = knobs.runtime.jit_post_compile_hook

    def note(**compiled: Any) -> Any:
        kernel = compiled["fn"]
        names[f"{kernel.module}.{kernel.name}"] += 1
        return before(**compiled) if before else None

    knobs.runtime.jit_post_compile_hook = note
    _hooked = True
