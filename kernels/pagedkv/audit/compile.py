# SPDX-License-Identifier: Apache-2.0
"""List what a Triton launcher would compile for an AMD GPU that is not there, and compile it.

With our HIP driver active, a real Python launcher runs on CPU tensors. Triton specialises on the real arguments
(divisibility by 16, pointer range, strides equal to 1) for the wanted gfx arch, and tells us what it would compile.
Nothing is executed, so outputs keep whatever they held.

LDS is looked at first. The compiler knows it after a fraction of a second, whereas compiling an oversize tile to the
end takes minutes, so such a kernel is stopped there with its figure.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import amd, ir, passes
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime import driver as active_driver

from pagedkv.errors import CannotRunHereError, CommandError

from .code_object import Assembly, CodeObject, machine_code, read_assembly, read_code_object
from .machine import ANY_MACHINE, any_limits, register_waves, waves_per_simd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from pagedkv.arch import Arch


class LdsExceededError(CommandError):
    """A kernel wants more LDS than a workgroup may have; raised before the expensive half of the compilation.

    Args:
        kernel: Name of the Triton function.
        lds_bytes: What it wants.
        limit: What the arch has.
    """

    def __init__(self, kernel: str, lds_bytes: int, limit: int) -> None:
        self.kernel, self.lds_bytes, self.limit = kernel, lds_bytes, limit
        super().__init__(kernel)
        self.args = kernel, lds_bytes, limit  # as they are, because it is pickled on its way out of a child

    def __str__(self) -> str:
        return f"{self.kernel} wants {self.lds_bytes} B of LDS, the arch has {self.limit} B per workgroup"


@dataclass
class OfflineHipDriver(DriverBase):
    """Driver of one gfx arch that is not there.

    Every arch has its own device index, because Triton caches targets and binders of arguments per device: with one
    index for all, the second arch would be answered with the first one's code.
    """

    arch: Arch

    def __post_init__(self) -> None:
        super().__init__()
        properties = {
            "max_shared_mem": self.arch.lds_bytes,
            "arch": self.arch.name,
            "warpSize": self.arch.lanes,
            "multiprocessor_count": self.arch.compute_units,
            "max_num_regs": self.arch.registers,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda _device: properties)
        self.get_current_device = lambda: list(ANY_MACHINE).index(self.arch.name)
        self.set_current_device = lambda _device: None
        self.get_current_stream = lambda _device: 0
        self.get_device_interface = _torch_cpu

    @classmethod
    def is_active(cls) -> bool:
        """Never picked by itself, only by `offline`."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only a real launcher needs C types."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("hip", self.arch.name, self.arch.lanes)

    def get_active_torch_device(self) -> torch.device:
        """Where launchers make their tensors."""
        import torch  # what compiles a kernel of a file needs none

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Refuses: nothing runs."""
        raise NotImplementedError("nothing runs on this driver, so nothing can be timed: autotuning needs a GPU")


def _torch_cpu() -> Any:
    import torch

    return torch.cpu


@contextlib.contextmanager
def offline(arch: str) -> Iterator[None]:
    """Make `arch`, one of `ANY_MACHINE`, the active device for the duration of the block."""
    # Triton offers a setter of the active driver, and no getter that does not probe GPUs.
    with mock.patch.object(active_driver, "_active", OfflineHipDriver(any_limits(arch))):
        yield


@dataclass(frozen=True)
class Specialisation:
    """One kernel as Triton would compile it for a launch: same arch and key, same machine code."""

    kernel: str
    arch: str
    key: str
    constants: tuple[tuple[str, str], ...]
    """Compile-time arguments by name."""
    source: ASTSource = field(repr=False, compare=False)
    options: Mapping[str, Any] = field(repr=False, compare=False)
    """Options of the AMD backend, by name: warps, stages, flags."""


@dataclass(frozen=True)
class MachineCode:
    """What the compiler wrote of one kernel, before anybody has read it."""

    kernel: str
    lds_bytes: int
    num_waves: int
    code: bytes
    """The ELF file."""
    text: str
    """The AMDGCN text."""
    compile_seconds: float
    waves_per_eu: int
    """What the launch asked of LLVM; 0 for nothing."""
    pointer_choices: list[str] = field(default_factory=list)
    """Where an `if` or a `tl.where` yields pointers, as `file.py:line`."""


@dataclass(frozen=True)
class Figures:
    """One compiled kernel."""

    kernel: str
    arch: str
    lds_bytes: int
    num_waves: int
    """Waves of a workgroup."""
    code: CodeObject
    text: Assembly
    compile_seconds: float
    """When it was compiled, in this run or in an earlier one."""
    kept: bool = False
    """Whether an earlier run compiled it."""
    pointer_choices: tuple[str, ...] = ()
    """The value of `MachineCode`."""
    waves_per_eu: int = 0
    """The value of `MachineCode`."""
    machine_code: str = ""
    """What a GPU is given, as a hash (`code_object.machine_code`)."""

    @property
    def waves_per_simd(self) -> float:
        """Occupancy by registers, LDS and barriers."""
        registers = {"vgpr": self.code.vgpr, "sgpr": self.code.sgpr}
        return waves_per_simd(self.arch, **registers, lds_bytes=self.lds_bytes, num_waves=self.num_waves)

    @property
    def register_waves(self) -> int:
        """Occupancy by registers alone, as LLVM computes it too: no more than the launch asked for."""
        waves = register_waves(self.arch, vgpr=self.code.vgpr, sgpr=self.code.sgpr)
        return min(waves, self.waves_per_eu or waves)


def specialisations(arch: str, launch: Callable[[], object]) -> list[Specialisation]:
    """What `launch` would compile, without compiling it.

    Args:
        arch: A gfx name.
        launch: Runs a launcher on CPU tensors.

    Returns:
        In order of first launch, without repetitions.
    """
    found: dict[str, Specialisation] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002 - Triton's keyword
        function, full_key = fn.jit_function, f"{fn.module}.{fn.name} {key}"
        source = ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
        named = [(function.arg_names[path[0]], value) for path, value in source.constants.items()]
        # Options that travel as a named tuple are told apart by their own names.
        constants = tuple(
            (field, str(each))
            for name, value in named
            for field, each in (value._asdict() if hasattr(value, "_asdict") else {name: value}).items()
        )
        options = json.loads(compile["specialization_data"])["options"]  # the hook names only a few of them itself
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        found[full_key] = Specialisation(fn.name, arch, full_key, constants, source, options)
        return True  # "do not compile"

    with mock.patch.object(knobs.runtime, "jit_cache_hook", note), offline(arch):
        launch()
    return list(found.values())


def compile_kernel(wanted: Specialisation) -> MachineCode:
    """Compile one kernel from source, with no cache of Triton's.

    Meant for a worker process: MLIR aborts the process when one of its own checks fails.

    Raises:
        LdsExceededError: It needs more LDS than the arch has.
    """
    started = time.perf_counter()
    choices: list[str] = []
    target = GPUTarget("hip", wanted.arch, any_limits(wanted.arch).lanes)
    hook = mock.patch.object(knobs.runtime, "add_stages_inspection_hook", partial(_look_first, choices))
    with tempfile.TemporaryDirectory(prefix="audit-") as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        with hook, offline(wanted.arch):
            compiled = triton.compile(wanted.source, target=target, options=dict(wanted.options))
    return MachineCode(
        kernel=compiled.metadata.name,
        lds_bytes=compiled.metadata.shared,
        num_waves=compiled.metadata.num_warps,
        code=compiled.asm["hsaco"],
        text=compiled.asm["amdgcn"],
        compile_seconds=time.perf_counter() - started,
        pointer_choices=choices,
        waves_per_eu=compiled.metadata.waves_per_eu,
    )


def read_figures(arch: str, compiled: MachineCode, *, kept: bool = False) -> Figures:
    """Figures of a compiled kernel.

    Raises:
        UnreadableCodeObjectError: See `read_code_object` and `read_assembly`.
    """
    return Figures(
        kernel=compiled.kernel,
        arch=arch,
        lds_bytes=compiled.lds_bytes,
        num_waves=compiled.num_waves,
        code=read_code_object(compiled.code),
        text=read_assembly(compiled.text),
        compile_seconds=compiled.compile_seconds,
        kept=kept,
        pointer_choices=tuple(compiled.pointer_choices),
        waves_per_eu=compiled.waves_per_eu,
        machine_code=machine_code(compiled.code),
    )


def _look_first(choices: list[str], *args: Any) -> tuple[str, str] | None:
    """Put an LDS check in front of the stage that lowers to LLVM, and note chosen pointers before AMD's own passes.

    Triton >= 3.8 also calls the hook without arguments, for something to add to its cache keys.
    """
    if not args:
        return "look-first", "look-first"
    _backend, stages, options, _language, _capability = args
    lower, optimise = stages["llir"], stages["ttgir"]

    def optimise_what_was_read(module: Any, metadata: dict[str, Any]) -> Any:
        choices.extend(_pointer_choices(module))
        if choices:  # for the message of a crash, which takes this process with it
            sys.stderr.write(f"error: a branch yields a pointer: {', '.join(choices)}\n")
            sys.stderr.flush()
        return optimise(module, metadata)

    def lower_if_it_fits(module: Any, metadata: dict[str, Any]) -> Any:
        lds_bytes = _lds_bytes(module, options.arch)
        limit = any_limits(options.arch).lds_bytes
        if lds_bytes > limit:
            raise LdsExceededError(module.get_entry_func_name(), lds_bytes, limit)
        lowered = lower(module, metadata)
        assert metadata["shared"] == lds_bytes, f"LDS differs: {lds_bytes} B ahead, {metadata['shared']} B at the end"
        return lowered

    stages["llir"], stages["ttgir"] = lower_if_it_fits, optimise_what_was_read
    return None


def _pointer_choices(module: Any) -> list[str]:
    """Where an `if` or a select of a kernel in Triton's dialect yields pointers.

    AMD's CanonicalizePointers (Triton 3.6) aborts on an `if` that yields pointers of two tensors with offsets; a select
    of such pointers fails later. Values loaded through either compile.
    """
    found: set[str] = set()

    def look(operation: Any) -> None:
        if operation.get_name() in {"scf.if", "arith.select"}:
            results = [operation.get_result(index) for index in range(operation.get_num_results())]
            pointers = [result for result in results if "!tt.ptr" in str(result.get_type())]
            places = [re.findall(r'(\w+\.py)":(\d+)', str(result.get_loc())) for result in pointers]
            found.update(":".join(place[-1]) if place else "a place unknown" for place in places)

    module.walk(look)
    return sorted(found)


def _lds_bytes(module: Any, arch: str) -> int:
    """LDS of a kernel in Triton's GPU dialect, from the compiler's own allocation pass run on a copy.

    The pipeline is the head of the AMD backend's `make_llir`, up to the allocation.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as copy:
        copy.write(str(module))
        copy.flush()
        clone = ir.parse_mlir_module(copy.name, module.context)
    manager = ir.pass_manager(module.context)
    gpu = amd.passes.ttgpuir
    gpu.add_update_async_wait_count(manager, arch)
    before_3_8 = hasattr(gpu, "add_optimize_lds_usage")
    if before_3_8:
        gpu.add_optimize_lds_usage(manager, arch, 0)
    else:
        gpu.add_warp_pipeline_conversion(manager, arch)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    passes.convert.add_index_to_llvmir(manager)
    gpu.add_allocate_shared_memory(manager, *(() if before_3_8 else (arch,)))
    manager.run(clone, "lds_first")
    return int(clone.get_int_attr("ttg.shared"))


@triton.jit
def probe_kernel(
    a_ptr,  # [SIDE, SIDE]
    b_ptr,  # [SIDE, SIDE]
    out_ptr,  # [SIDE, SIDE], float32
    SIDE: tl.constexpr,
):
    """Compute out = a @ b.

    Small enough to know by heart: each of its 256 lanes reads 16 elements of each operand, 32 bytes, hence two 16-byte
    loads a lane and operand; the second operand of the dot product goes through 64 x 64 x 2 = 8192 bytes of LDS.
    """
    rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    offsets = rows * SIDE + columns
    tl.store(out_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


def probe(side: int = 64) -> None:
    """Launch the kernel on bf16 tiles of `side` x `side`."""
    import torch

    tile = torch.empty(side, side, dtype=torch.bfloat16)
    probe_kernel[(1,)](tile, tile, torch.empty(side, side), SIDE=side)


def start_compiler() -> None:
    """Start LLVM once, before the forks, with the one kernel that compiles wherever anything does.

    It converts nothing: what Triton 3.6.0 keeps of conversions is each worker's own (see `runner.compile_all`).

    Raises:
        CannotRunHereError: Not even that one compiles.
    """
    try:
        compiled = [compile_kernel(wanted) for wanted in specialisations("gfx942", probe)]
    except Exception as error:
        raise CannotRunHereError(f"the AMD compiler does not work here: {type(error).__name__}: {error}") from error
    if not compiled:
        raise CannotRunHereError("the AMD compiler was called and compiled nothing\n  to do: look at compile.py")
