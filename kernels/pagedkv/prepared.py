# SPDX-License-Identifier: Apache-2.0
"""Calls that look like an earlier one: their checks, their launch and Triton's look at each argument are done already.

What a launcher checks and chooses, and which machine code Triton takes, follows from dtypes, extents, strides, devices
and addresses modulo 16 of its tensors, from the values of everything else, from the device's driver and from Triton's
settings. So a call of which all this has occurred before does what the earlier one did. Under Triton's interpreter, and
where the audit compiles for devices that are not there, nothing is kept.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Prepared = tuple[Callable[..., None], Sequence["Launch"]]
    """What runs a call, without holding a tensor, and the launches in that."""

MOST = 1024
"""Calls that are kept, each a few kilobytes; the oldest makes room. A service in graphs has as many as batch sizes and
bounds of lengths, times kinds of layers; prefill without graphs has one for each number of tokens."""
TWO_GIB = 1 << 31
"""Bytes of a tensor's storage above which Triton for AMD addresses it otherwise (buffer operations have 32 bits)."""

_SETTINGS = (b"TRITON_", b"AMDGCN_", b"LLVM_", b"MLIR_")
"""Beginnings of environment variables that change what Triton makes of a kernel."""

_runs: dict[Hashable, Callable[..., None]] = {}
_warmed: set[Hashable] = set()
"""What layers look like that a warm-up of this process has seen."""


def _driver() -> object:
    """Triton's driver; None under its interpreter, which has none."""
    return None if knobs.runtime.interpret else driver.active


class _Surroundings:
    """What Triton compiles with, as a number that is another one once any of it has changed."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._known: list[tuple[Any, ...]] = []
        self._number = 0

    def number(self) -> int:
        """Return the number of the driver and the settings of this moment; settings that come back have theirs again.

        The environment is compared as bytes, without decoding: that is a microsecond, and a call has a few.
        """
        environment = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
        now = (_driver(), environment, vars(knobs.amd), vars(knobs.runtime), vars(knobs.compilation))
        if now != self._seen:
            self._seen = (now[0], *(dict(each) for each in now[1:]))
            flags = {name: value for name, value in environment.items() if name.startswith(_SETTINGS)}
            found = (now[0], flags, *self._seen[2:])
            if found not in self._known:
                self._known.append(found)
            self._number = self._known.index(found)
        return self._number


_surroundings = _Surroundings()


def surroundings() -> int:
    """Return a number that stands for the driver and the settings that Triton compiles with at this moment."""
    return _surroundings.number()


def look(tensor: Tensor | None) -> Hashable:
    """Return all that checks and Triton see of a tensor, but for what it holds."""
    if tensor is None:
        return None
    far = tensor.untyped_storage().nbytes() >= TWO_GIB
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.data_ptr() % 16, far


class Launch:
    """A kernel with its grid and its constants, whose arguments look the same each time."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        """Take what `kernel[grid](..., **constants)` would."""
        self._kernel, self._grid, self._constants = kernel, grid, constants
        self._rest: tuple[None, ...] = ()
        self._compiled: Callable[..., None] | None = None

    @property
    def compiled(self) -> bool:
        """Whether it has run as machine code."""
        return self._compiled is not None

    def __call__(self, *arguments: Any) -> None:
        """Launch; `arguments` are those of the kernel before its constants."""
        if self._compiled is not None:
            self._compiled(*arguments, *self._rest)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if compiled is not None and not getattr(self._kernel, "pre_run_hooks", None):  # which want each launch
            # Constants are in the machine code; what is passed in their place is not looked at.
            self._rest = (None,) * (len(self._kernel.arg_names) - len(arguments))
            self._compiled = compiled[(*self._grid, 1, 1)[:3]]


def call(looks: Hashable, prepare: Callable[[], Prepared | None], *arguments: Any) -> None:
    """Run what an earlier call with the same looks prepared, else what `prepare` returns.

    Args:
        looks: All that `prepare` may use, or None to keep nothing.
        prepare: Checks the call; None if there is nothing to do.
        arguments: Of what runs the call.
    """
    if looks is not None:
        looks = (looks, surroundings())
    run = _runs.get(looks)
    if run is not None:
        run(*arguments)
        return
    prepared = prepare()
    if prepared is None:
        return
    run, launches = prepared
    run(*arguments)
    if looks is not None and all(launch.compiled for launch in launches):
        if len(_runs) >= MOST:
            del _runs[next(iter(_runs))]
        _runs[looks] = run


def first(which: str, *given: Any, **options: Any) -> bool:
    """Whether no layer that looks so has been warmed up in this process; it then counts as warmed up.

    Args:
        which: Warm-up. Of 44 alike layers one has something to do.
        given: All that Triton compiles for: tensors, which count by their look, and what can be compared.
        options: Likewise.
    """
    values = (*given, *sorted(options.items()))
    known = (which, *map(_look_of, values), surroundings())
    if known in _warmed:
        return False
    _warmed.add(known)
    return True


def _look_of(value: Any) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_look_of, value))
    return look(value) if isinstance(value, Tensor) else value


def forget() -> None:
    """Make the process one that has launched no kernel of ours: each is compiled, or read from Triton's cache, again.

    Graphs that were captured stay as they are.
    """
    _runs.clear()
    _warmed.clear()
    for name in [name for name in sys.modules if name.startswith("pagedkv.")]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
