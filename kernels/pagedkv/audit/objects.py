# SPDX-License-Identifier: Apache-2.0
"""Content-addressed cache of compiled kernels: what a kernel's machine code depends on, and a folder of code objects.

Triton's own cache is not enough. Its key leaves out three things that change the code (a `tl.dtype` among the globals,
a value reached through a module, flags such as AMDGCN_SCALARIZE_PACKED_FOPS), and it uses a truncated or edited file as
it is. Its walk over a kernel and all functions that it calls, and its fingerprint of the compiler, are used here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import platform
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.language import constexpr
from triton.runtime.cache import triton_key
from triton.runtime.jit import DependenciesFinder, JITCallable

from .compile import MachineCode, compile_kernel, read_figures

if TYPE_CHECKING:
    from .compile import Figures, Specialisation

_FLAGS = ("AMDGCN_", "LLVM_", "MLIR_", "TRITON_")
"""Beginnings of the names of settings; Triton lists some of them, and reads others in Python."""


class _Reads(DependenciesFinder):
    """Hash of a function's source, of all that it calls, and of every value that any of them reads."""

    placed: bool

    def record_reference(self, val: Any, var_dict: dict[str, Any] | None = None, name: str | None = None) -> None:
        super().record_reference(val, var_dict, name)
        if isinstance(val, (type, constexpr)) or not callable(val):
            fields = getattr(val, "_fields", ())  # of a named tuple, which helpers fill by place and read by name
            self.hasher.update(repr((name, val, fields)).encode())

    def _update_hash(self, func: JITCallable) -> None:
        self.hasher.update(source_key(func, placed=self.placed).encode())


@functools.cache
def source_key(function: JITCallable, *, placed: bool = True) -> str:
    """What a Triton function is made of, with its place: figures of loads name the file and the line.

    Args:
        function: As Triton has it.
        placed: Whether the place counts. Without it the key is that of the machine code alone.
    """
    scope = inspect.getclosurevars(function.fn).nonlocals
    reads = _Reads(function.fn.__qualname__, function.__globals__, scope, function.src)
    reads.placed = placed
    reads.visit(function.parse())
    place = (inspect.getsourcefile(function.fn), function.starting_line_number) if placed else ()
    return hashlib.sha256(repr((reads.ret, *place, getattr(function, "noinline", None))).encode()).hexdigest()


MAKERS = (
    *("audit/compile.py", "audit/code_object.py", "audit/imports.py", "audit/machine.py", "audit/objects.py"),
    "arch.py",
)
"""Files below `pagedkv` whose code makes what is kept, or reads it."""


@functools.cache
def _makers() -> str:
    package = Path(__file__).parents[1]
    return hashlib.sha256(b"".join((package / name).read_bytes() for name in MAKERS)).hexdigest()


def object_key(wanted: Specialisation) -> str:
    """Equal for two kernels only if the compiler is given the same: source, arguments, options, flags, version.

    And only if the code that asks it, and that reads its answer, is the same (`MAKERS`).
    """
    return _key(wanted, _makers(), placed=True)


def given_key(wanted: Specialisation) -> str:
    """Equal for two kernels of two checkouts only if the compiler makes the same machine code of both.

    Neither the place of a source nor the code of the audit counts. Two different keys say nothing: then compile.
    """
    return _key(wanted, "", placed=False)


def _key(wanted: Specialisation, makers: str, *, placed: bool) -> str:
    source = wanted.source

    def known(value: Any) -> object:
        if isinstance(value, JITCallable):
            return source_key(value, placed=placed)
        return type(value), getattr(value, "value", value)

    constants = {path: known(value) for path, value in source.constants.items()}
    flags = {name: value for name, value in os.environ.items() if name.startswith(_FLAGS)}
    content = [
        *(triton_key(), platform.python_version(), makers),
        *(source_key(source.fn, placed=placed), source.signature, source.attrs, constants),
        *(wanted.arch, wanted.options, sorted((get_cache_invalidating_env_vars() | flags).items())),
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


@dataclass(frozen=True)
class ObjectStore:
    """Code objects of earlier runs, a file each: SHA-256 of the key and the rest, then MessagePack, compressed."""

    folder: Path
    limit: int = 2**28
    """Bytes that are kept."""

    def get(self, key: str) -> MachineCode | None:
        """What was kept; None where nothing was. A file that is not what was written under this key is deleted."""
        path = self.folder / key
        try:
            data = path.read_bytes()
            os.utime(path)  # so that what is used stays
        except OSError:
            return None
        digest, packed = data[:32], data[32:]
        if digest != _digest(key, packed):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return MachineCode(**msgpack.unpackb(zlib.decompress(packed)))

    def put(self, key: str, compiled: MachineCode) -> None:
        """Keep a code object, whole or not at all; a full or read-only disk costs a compilation next time, no more."""
        packed = zlib.compress(msgpack.packb(asdict(compiled)), level=1)
        part = self.folder / f".{key}.{os.getpid()}"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(_digest(key, packed) + packed)
                part.replace(self.folder / key)
            finally:
                part.unlink(missing_ok=True)

    def prune(self) -> None:
        """Delete what was not used for the longest time, until the limit is kept."""
        with contextlib.suppress(OSError):  # another run prunes too
            found = [(stat.st_mtime, stat.st_size, path) for path in self.folder.iterdir() for stat in [path.stat()]]
            size = 0
            for _, bytes_, path in sorted(found, reverse=True):
                size += bytes_
                if size > self.limit:
                    path.unlink(missing_ok=True)


def _digest(key: str, packed: bytes) -> bytes:
    return hashlib.sha256(key.encode() + packed).digest()


def find_or_compile(wanted: Specialisation, store: ObjectStore | None) -> Figures:
    """Figures of a kernel, compiled unless the store has it.

    Raises:
        LdsExceededError: See `compile_kernel`; what fails is not kept.
        UnreadableCodeObjectError: See `read_figures`.
    """
    key = object_key(wanted) if store else ""
    if store and (compiled := store.get(key)):
        return read_figures(wanted.arch, compiled, kept=True)
    compiled = compile_kernel(wanted)
    figures = read_figures(wanted.arch, compiled)
    if store:
        store.put(key, compiled)
    return figures
