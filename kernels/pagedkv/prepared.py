# SPDX-License-Identifier: Apache-2.0
"""Cache of checked calls with their compiled kernels, keyed by signature.

What a launcher checks and chooses, and which machine code Triton takes, follows from the signature of a call: dtypes,
extents, strides, devices and addresses modulo 16 of its tensors, the values of everything else, the device's driver and
Triton's settings. A call whose signature has occurred before therefore skips all of it and launches at once. Under
Triton's interpreter, and where the audit compiles for devices that are not there, nothing is kept.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from pagedkv.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MOST = 1024
"""Calls that are kept, each a few kilobytes; the oldest is dropped first. A service in graphs has as many as batch
sizes and bounds of lengths, times kinds of layers; prefill without graphs has one for each number of tokens."""
TWO_GIB = 1 << 31
"""Bytes of a tensor's storage above which Triton for AMD addresses it otherwise (buffer operations have 32 bits)."""

_SETTINGS = (b"TRITON_", b"AMDGCN_", b"LLVM_", b"MLIR_")
"""Beginnings of environment variables that change what Triton makes of a kernel."""

_calls: dict[Hashable, Any] = {}
"""Launches of the calls with one signature, by that; none holds a tensor."""
_warmed: set[Hashable] = set()
"""Signatures of layers that a warm-up of this process has seen."""


def _driver() -> object:
    """Triton's driver; None under its interpreter, which has none.

    Raises:
        ArgumentError: there is no GPU that Triton knows.
    """
    if knobs.runtime.interpret:
        return None
    try:
        return driver.active
    except RuntimeError as error:
        remedy = "To compute on the CPU, set TRITON_INTERPRET=1 before Python starts."
        raise ArgumentError("device", "Triton", got="no GPU", expected="a GPU that it knows", remedy=remedy) from error


class _CompilerSettings:
    """Number of Triton's driver and settings; it changes whenever any of them changes."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._known: list[tuple[Any, ...]] = []
        self._number = 0

    def number(self) -> int:
        """Return the number of the current driver and settings; settings that come back get their number back.

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


_compiler_settings = _CompilerSettings()


def compiler_settings() -> int:
    """Return the number of the driver and the settings that Triton compiles with now."""
    return _compiler_settings.number()


def signature(tensor: Tensor | None) -> Hashable:
    """Return everything that checks and Triton see of a tensor except its contents."""
    if tensor is None:
        return None
    far = tensor.untyped_storage().nbytes() >= TWO_GIB
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.data_ptr() % 16, far


class Launch:
    """A kernel with its grid and its constants; all calls pass it arguments of one signature."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        """Prepare `kernel[grid](..., **constants)`."""
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


def find(key: Hashable) -> Any:
    """Return the call that was kept under a key; None where there is none, and for the key None."""
    return _calls.get(key)


def keep(key: Hashable, call: Any) -> None:
    """Keep a call once each `Launch` among its attributes is compiled; under the key None it is not kept."""
    if key is not None and all(each.compiled for each in vars(call).values() if isinstance(each, Launch)):
        if len(_calls) >= MOST:
            del _calls[next(iter(_calls))]
        _calls[key] = call


def first_warm_up(which: str, *given: Any, **options: Any) -> bool:
    """Return whether this is the first warm-up of a signature in this process: of 44 equal layers one compiles.

    Args:
        which: Name of the warm-up.
        given: Everything that Triton compiles for: tensors, which count by their signature, and comparable values.
        options: More of it, by name.
    """
    values = (*given, *sorted(options.items()))
    key = (which, *map(_signature_of, values), compiler_settings())
    if key in _warmed:
        return False
    _warmed.add(key)
    return True


def _signature_of(value: Any) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_signature_of, value))
    return signature(value) if isinstance(value, Tensor) else value


def clear() -> None:
    """Forget every call, warm-up and loaded kernel: each is compiled, or read from Triton's cache, again.

    Captured graphs stay as they are.
    """
    _calls.clear()
    _warmed.clear()
    for name in [name for name in sys.modules if name.startswith("pagedkv.")]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
