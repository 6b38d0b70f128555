# SPDX-License-Identifier: Apache-2.0
"""Run Triton launches on CPU tensors through their AMD machine code: `with amdgcn("gfx942"): launcher(...)`.

Triton compiles as for a GPU, with the real arguments' divisibility, and hands over where it would start a grid. Every
kernel's waits are checked before it runs for the first time. A result is what the code does
on this executor; whether a GPU agrees only a GPU can say.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import compiler as triton_compiler
from triton.runtime import driver as active_driver

from .errors import LaunchError, ProgramFault
from .machine import Machine
from .memory import Memory
from .targets import TARGETS
from .text import parse
from .translate import Translated, translate
from .waits import check_waits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


_FIRST_DEVICE = 64
"""Triton caches kernels by device index; ours are used by no other device."""
_LARGEST_WORKGROUP = 1024


@dataclass(frozen=True)
class Launch:
    """What one launch did."""

    kernel: str
    grid: tuple[int, int, int]
    waves: int
    wave_instructions: int
    """Executed, over all waves."""


@dataclass
class Session:
    """What a `with amdgcn(...)` block asks for and has done."""

    arch: str
    races: bool
    outputs: Mapping[str, Collection[str]]
    mutate: Callable[[str, str], str] | None
    launches: list[Launch] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Machine code of each kernel that was launched, by its key."""


class Driver(DriverBase):
    """Triton's driver of an arch that is not there; a launch runs on the machine of the open session."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        target = TARGETS[arch]
        self.target = GPUTarget("hip", arch, target.lanes)
        self.arch, self.session, self.text = arch, None, ""
        self.translated: dict[str, Translated] = {}
        properties = {
            "max_shared_mem": target.lds_bytes,
            "arch": arch,
            "warpSize": target.lanes,
            "multiprocessor_count": target.compute_units,
            "max_num_regs": 512,
        }
        self.utils = SimpleNamespace(
            get_device_properties=lambda _device: properties,
            load_binary=lambda name, _code, _shared, _device: (name, name, 0, 0, _LARGEST_WORKGROUP),
            unload_module=lambda _module: None,
        )
        self.launcher_cls = lambda source, metadata: functools.partial(self._launch, source, metadata, self.text)
        self.get_current_device = lambda: _FIRST_DEVICE + list(TARGETS).index(arch)
        self.set_current_device = lambda _device: None
        self.get_current_stream = lambda _device: 0
        self.get_device_interface = lambda: torch.cpu

    session: Session | None
    text: str
    """Text of the kernel that is being loaded."""

    @classmethod
    def is_active(cls) -> bool:
        """Never picked by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a launcher in C needs them."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Where launchers make their tensors."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Refuses: seconds here say nothing."""
        raise NotImplementedError("an executor's seconds are not a GPU's: autotuning needs a GPU")

    def _launch(self, source: Any, metadata: Any, text: str, x: int, y: int, z: int, *rest: Any) -> None:
        """Triton's launcher: grid, stream, function, packed metadata, launch metadata, two hooks, the arguments."""
        assert self.session is not None, "the block `with amdgcn(...)` was left"
        if 0 in {x, y, z}:
            return
        arguments = _arguments(source, rest[6:])
        self.session.texts[metadata.hash] = text
        if self.session.mutate is not None:
            program = parse(self.session.mutate(metadata.name, text))
            execute(self.session, translate(program), metadata, (x, y, z), arguments)
            return
        execute(self.session, self._translated(metadata, text), metadata, (x, y, z), arguments)

    def _translated(self, metadata: Any, text: str) -> Translated:
        if metadata.hash not in self.translated:
            program = parse(text)
            if hazards := check_waits(program):
                raise ProgramFault(f"{metadata.name}: {len(hazards)} hazards; {hazards[0]}")
            self.translated[metadata.hash] = translate(program)
        return self.translated[metadata.hash]


def _arguments(source: Any, values: tuple[Any, ...]) -> list[tuple[str, str, Any]]:
    """(name, type, value) of what the kernel takes at run time; tuples in their parts, constants left out."""
    found: list[tuple[str, str, Any]] = []

    def add(name: str, path: tuple[int, ...], kind: Any, value: Any) -> None:
        if path in source.constants or kind == "constexpr":
            return
        if isinstance(kind, tuple):
            for k, (part, each) in enumerate(zip(kind, value, strict=True)):
                add(f"{name}[{k}]", (*path, k), part, each)
        else:
            found.append((name, str(kind), value))

    for k, (name, value) in enumerate(zip(source.fn.arg_names, values, strict=True)):
        add(name, (k,), source.signature.get(name), value)
    return found


def execute(
    session: Session,
    translated: Translated,
    metadata: Any,
    grid: tuple[int, int, int],
    arguments: list[tuple[str, str, Any]],
) -> None:
    """Run one launch.

    Args:
        session: Where it is noted.
        translated: The kernel.
        metadata: Triton's.
        grid: Workgroups.
        arguments: (name, Triton's type, value).

    Raises:
        LaunchError: The arguments are not those of the text.
        ProgramFault: The program did what no right program does.
    """
    program, memory = translated.program, Memory()
    slots = program.arguments
    if not len(arguments) <= len(slots) <= len(arguments) + 2:  # two scratch buffers that are not used
        raise LaunchError(f"{metadata.name} takes {len(slots)} arguments, the launch has {len(arguments)}")
    outputs = session.outputs.get(metadata.name)
    segment = bytearray(program.descriptor["kernarg_size"])
    for (offset, size), (name, kind, value) in zip(slots, arguments, strict=False):
        if isinstance(value, torch.Tensor):
            readonly = outputs is not None and name not in outputs
            word = (_region(memory, name, value, readonly=readonly) if value.numel() else 0).to_bytes(8, "little")
        elif kind.startswith("fp"):
            word = struct.pack("<f" if size == 4 else "<d", value)
        else:
            word = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        segment[offset : offset + size] = word
    extents = {"block_count": grid, "group_size": (program.target.lanes * metadata.num_warps, 1, 1)}
    for name, (offset, size) in program.hidden.items():  # offsets and remainders of a Triton launch are 0
        what, axis = name.removeprefix("hidden_")[:-2], "xyz".find(name[-1])
        if what in extents:
            segment[offset : offset + size] = extents[what][axis].to_bytes(size, "little")
    kernarg = memory.add("kernel arguments", np.frombuffer(bytes(segment), np.uint8), readonly=True)
    machine = Machine(translated, memory, metadata.shared, twins=2, races=session.races)
    machine.run(grid, metadata.num_warps, kernarg)
    waves = grid[0] * grid[1] * grid[2] * metadata.num_warps
    session.launches.append(Launch(metadata.name, grid, waves, machine.wave_instructions))


def _region(memory: Memory, name: str, tensor: torch.Tensor, *, readonly: bool) -> int:
    """Make a tensor's real bytes a region; its address is aligned as its pointer is."""
    if tensor.device.type != "cpu":
        raise LaunchError(f"{name} is on {tensor.device}; the machine's memory is that of CPU tensors")
    size, pointer, storage = tensor.element_size(), tensor.data_ptr(), tensor.untyped_storage()
    extent = (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))) * size
    base = pointer // 16 * 16
    data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).numpy()
    first = base - storage.data_ptr()
    assert first >= 0, "a storage begins at a multiple of 16 bytes"
    return memory.add(
        name,
        data[first : first + pointer - base + extent],
        start=pointer - base,
        readonly=readonly,
        shape=tensor.shape,
        strides=[stride * size for stride in tensor.stride()],
        itemsize=size,
    )


@functools.cache
def _driver(arch: str) -> Driver:
    return Driver(arch)


@contextlib.contextmanager
def amdgcn(
    arch: str,
    *,
    races: bool = True,
    outputs: Mapping[str, Collection[str]] | None = None,
    mutate: Callable[[str, str], str] | None = None,
) -> Iterator[Session]:
    """Run the launches of the block on CPU tensors through machine code of `arch`.

    Args:
        arch: One of `targets.TARGETS`.
        races: Whether to look for races in LDS and in memory.
        outputs: Kernel -> arguments that it may write; of a kernel named here, a write to any other is a fault.
        mutate: (kernel, text) -> text to run instead; it is not checked statically.

    Raises:
        LaunchError: No such arch, or Triton interprets kernels in this process.
    """
    if arch not in TARGETS:
        raise LaunchError(f"arch is {arch!r}; expected one of {', '.join(TARGETS)}")
    if knobs.runtime.interpret:
        raise LaunchError("Triton interprets kernels in this process\n  to do: set TRITON_INTERPRET=0")
    driver, load = _driver(arch), triton_compiler.CompiledKernel._init_handles  # noqa: SLF001
    outer = driver.session
    driver.session = Session(arch, races, outputs or {}, mutate)

    def load_with_text(kernel: Any) -> None:
        driver.text = kernel.asm["amdgcn"]
        load(kernel)

    triton_compiler.max_shared_mem.cache_clear()
    try:
        with (
            mock.patch.object(active_driver, "_active", driver),
            mock.patch.object(triton_compiler.CompiledKernel, "_init_handles", load_with_text),
        ):
            yield driver.session
    finally:
        driver.session = outer
        triton_compiler.max_shared_mem.cache_clear()
