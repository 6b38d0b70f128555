# SPDX-License-Identifier: Apache-2.0
"""vLLM as it is on an AMD machine: on one, its real operators under their contracts; on a CPU, a stand-in for them.

On a CPU vLLM gets ROCm on one arch for its platform, with tensors in the memory of the host, and each operator
of aiter, of vLLM's C++ extensions and of its Triton launchers is a recorder: it notes what it got, asks the contract,
and returns what the next line of vLLM needs. Where aiter is installed its operators are called after the contract was
asked, and on a GPU so are all the others.

Importing this module changes nothing. `take_place` does, for the whole process: vLLM keeps what it found when it was
imported, so it must come first, and the process serves nothing else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from operators.calls import Access, Broken, Judge, Layer, UnknownCallError, bound, seen
from operators.contracts import Contract, places

if TYPE_CHECKING:
    from collections.abc import Callable

CAPABILITY = {"gfx942": (9, 4), "gfx950": (9, 5)}
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


@dataclass
class Watch:
    """What the operators of a case got, and what their contracts found.

    Attributes:
        layer: The layer that is running.
        memory: What operators leave for each other; `part` clears it.
        calls: Names of the operators, in the order of their calls.
        broken: Promises that were not kept.
        accesses: Sides of caches that were touched, by layer.
    """

    layer: Layer | None = None
    memory: dict[Any, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    accesses: dict[str, list[Access]] = field(default_factory=dict)

    def ask(self, contract: Contract, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Judge a call; returns its arguments by name, and whether it keeps every promise."""
        args = bound(contract.parameters, given, named, contract.operator)
        judge = Judge(contract.operator, {name: seen(value) for name, value in args.items()}, self.layer, self.memory)
        self.calls.append(contract.operator)
        contract.judge(judge)
        self.broken += judge.broken
        self.accesses.setdefault(self.layer.name if self.layer else "", []).extend(judge.accesses)
        return args, not judge.broken

    def step(self) -> None:
        """Forget what operators of one attention leave for each other; schedules stay."""
        self.memory.pop("parts with sinks", None)


WATCH = Watch()


def fresh() -> Watch:
    """Begin a case."""
    WATCH.__init__()  # type: ignore[misc]
    return WATCH


class _Launched:
    """A Triton kernel before a contract: `kernel[grid](...)`."""

    def __init__(self, call: Callable[..., Any], real: Any) -> None:
        self._call = call
        self._real = real

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._call, grid)


def judged(contract: Contract, real: Any = None) -> Any:
    """The operator as callers see it: asks its contract, then calls `real`, or answers as the stand-in does.

    A call that breaks a promise is not made: on a GPU it could end the process before anything was reported.
    """
    if contract.launched:

        def launch(grid: Any, *given: Any, **named: Any) -> Any:
            options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
            args, kept = WATCH.ask(contract, given, named)
            return real[grid](*given, **named, **options) if kept and real is not None else contract.answer(args)

        return _Launched(launch, real)

    def operator(*given: Any, **named: Any) -> Any:
        args, kept = WATCH.ask(contract, given, named)
        return real(*given, **named) if kept and real is not None else contract.answer(args)

    return operator


class _NoOperatorError(UnknownCallError, AttributeError):
    """What torch.ops says of an operator that is not there, so that `hasattr` gets its answer."""


class _Namespace(types.ModuleType):
    """A namespace of torch.ops whose operators have contracts; any other is refused when it is asked for."""

    def __init__(self, name: str, operators: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(operators)
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoOperatorError(f"{self.__name__}.{name} has no contract: write it in tests/operators/contracts.py")


class _NoContract(types.ModuleType):
    """A module of the stand-in for aiter; what has no contract is not there, and the import that asked says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{self.__name__}.{name} has no contract: write it in tests/operators/contracts.py")


def has_aiter() -> bool:
    """Whether aiter is installed here."""
    return "aiter" in sys.modules or importlib.util.find_spec("aiter") is not None


def _module(name: str) -> types.ModuleType:
    """A module of the stand-in for aiter, with its parents."""
    if name not in sys.modules:
        module = _NoContract(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        if "." in name:
            parent, _, last = name.rpartition(".")
            setattr(_module(parent), last, module)
    return sys.modules[name]


def _stand_for_aiter() -> None:
    for place, contract in places().items():
        module, _, attribute = place.partition(":")
        if module.split(".")[0] == "aiter":
            setattr(_module(module), attribute, _with_signature(contract, judged(contract)))
    dtypes: Any = _module("aiter.dtypes")
    fnuz = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
    dtypes.fp8, dtypes.fp16, dtypes.bf16, dtypes.fp32 = fnuz, torch.float16, torch.bfloat16, torch.float32


def _with_signature(contract: Contract, operator: Any) -> Any:
    """vLLM looks at the parameters of some of aiter's operators before it passes them."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in contract.parameters]
    operator.__signature__ = inspect.Signature(parameters)
    return operator


def _wrap_aiter() -> None:
    """Put the contract before each operator of the installed aiter."""
    for place, contract in places().items():
        name, _, attribute = place.partition(":")
        if name.split(".")[0] != "aiter":
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # an older or newer aiter; vLLM says which of them it needs when it calls it
        real = getattr(module, attribute, None)
        if real is not None:
            wrapper = judged(contract, real)
            try:
                wrapper.__signature__ = inspect.signature(real)
            except (TypeError, ValueError):
                _with_signature(contract, wrapper)
            setattr(module, attribute, wrapper)


def _wrap_ops(*, on_gpu: bool, aiter_here: bool) -> None:
    namespaces: dict[str, dict[str, Any]] = {}
    for place, contract in places().items():
        module, _, attribute = place.partition(":")
        if module.startswith("ops."):
            name = module.removeprefix("ops.")
            calls_through = aiter_here if name == "aiter" else on_gpu
            real = getattr(getattr(torch.ops, name), attribute, None) if calls_through else None
            namespaces.setdefault(name, {})[attribute] = judged(contract, real)
    for name, operators in namespaces.items():
        if on_gpu:
            for attribute, operator in operators.items():
                setattr(getattr(torch.ops, name), attribute, operator)
        else:
            setattr(torch.ops, name, _Namespace(f"torch.ops.{name}", operators))


def _wrap_vllm(*, on_gpu: bool) -> None:
    """Put the contract before vLLM's own launchers.

    Raises:
        UnknownCallError: One is not where its contract looks for it, or takes other arguments.
    """
    for place, contract in places().items():
        name, _, attribute = place.partition(":")
        if name.split(".")[0] != "vllm":
            continue
        try:
            module = importlib.import_module(name)
            real = getattr(module, attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownCallError(
                f"vLLM has no {place} ({error}): its backend moved, so write the contract of {contract.operator} for "
                "where it is now, in tests/operators/contracts.py"
            ) from error
        if isinstance(real, types.FunctionType) and not contract.launched:
            needed = {
                parameter.name
                for parameter in inspect.signature(real).parameters.values()
                if parameter.default is inspect.Parameter.empty
            }
            if missing := sorted(needed - set(contract.parameters)):
                raise UnknownCallError(
                    f"{place} takes {missing[0]}, which the contract of {contract.operator} does not name: extend it "
                    "in tests/operators/contracts.py"
                )
        setattr(module, attribute, judged(contract, real if on_gpu else None))


def _amdsmi(arch: str) -> types.ModuleType:
    """The library that tells vLLM's platform its arch."""
    smi: Any = types.ModuleType("amdsmi")
    for name in (
        "amdsmi_get_gpu_device_uuid",
        "amdsmi_get_gpu_memory_total",
        "amdsmi_topo_get_link_type",
        "amdsmi_topo_get_numa_node_number",
        "amdsmi_init",
        "amdsmi_shut_down",
    ):
        setattr(smi, name, lambda *_: None)
    smi.AmdSmiException, smi.AmdSmiMemoryType = Exception, types.SimpleNamespace(VRAM=0)
    smi.amdsmi_get_processor_handles = lambda: [0]
    smi.amdsmi_get_gpu_asic_info = lambda _: {"target_graphics_version": arch}
    return smi


class _Event:
    """torch.cuda.Event without a device."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def record(self) -> None:
        """Nothing follows."""


def _pretend_rocm(arch: str) -> None:
    sys.modules["amdsmi"] = _amdsmi(arch)
    # No device is visible, so vLLM keeps Triton without one, as it does before a worker has its device.
    os.environ |= {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    platforms: Any = importlib.import_module("vllm.platforms")
    with mock.patch.object(platforms, "vllm_version_matches_substr", return_value=False):
        interface = importlib.import_module("vllm.platforms.interface")
        platforms._current_platform = interface.UnspecifiedPlatform()
        rocm = importlib.import_module("vllm.platforms.rocm")

        class OnHost(rocm.RocmPlatform):  # type: ignore[name-defined,misc]
            """ROCm, with tensors in the memory of the host."""

            device_type = "cpu"
            dispatch_key = "CPU"

            @classmethod
            def num_compute_units(cls, device_id: int = 0) -> int:
                del device_id
                return COMPUTE_UNITS[arch]

            @classmethod
            def is_pin_memory_available(cls) -> bool:
                return False

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                del device_id
                return interface.DeviceCapability(*CAPABILITY[arch])

        platforms._current_platform = OnHost()
        importlib.import_module("vllm.triton_utils")
    for name in ("zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.accelerator.empty_cache = lambda: None


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def without(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        del pin_memory
        return make(*args, **named)

    return without


def take_place(arch: str) -> str:
    """Put the contracts before vLLM's operators, in this process and for good; returns the device of the tensors.

    Raises:
        UnknownCallError: vLLM is not where the contracts look for it.
    """
    on_gpu = torch.version.hip is not None and torch.cuda.is_available()
    aiter_here = has_aiter()
    if not on_gpu:
        _pretend_rocm(arch)
    if aiter_here:
        _wrap_aiter()
    else:
        _stand_for_aiter()
    _wrap_vllm(on_gpu=on_gpu)  # imports vLLM, which asks torch.ops for its extensions
    _wrap_ops(on_gpu=on_gpu, aiter_here=aiter_here)
    return "cuda" if on_gpu else "cpu"
