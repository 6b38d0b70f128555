# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of vLLM's ROCm backends, imported from the installed vLLM, called with the arguments of ours.

On a CPU, the platform of vLLM says during an import and a call that it is ROCm, so that launchers take the tiles,
warps and FP8 format of AMD. On a GPU nothing stands in for anything: what runs is what that GPU gets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pagedkv.audit import imports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pagedkv.cache.cache import PagedCache

OPS = "vllm.v1.attention.ops"
BACKENDS = "vllm.v1.attention.backends"

LAUNCHERS = {
    f"{BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache": (
        "key_cache value_cache key value block_tables k_scales v_scales cu_seqlens_kv token_to_batch seq_starts "
        "dequant kv_cache_layout total_tokens"
    ),
}
"""Launcher -> the parameters that the tests give it. One without a default that is not here is a change, too."""

KERNELS = (f"{BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache_kernel",)
"""Kernels that those launchers start."""

FP8 = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""vLLM's FP8 format of an arch."""


class MovedKernelError(Exception):
    """A kernel of vLLM, or its launcher, is not where these tests look for it, or takes other arguments."""


class _Arch:
    """The arch whose platform stands in on a CPU; `--amdgcn` sets it."""

    name = "gfx950"


def fp8_format() -> str:
    """The FP8 format that vLLM takes here, as our formats are called."""
    if torch.cuda.is_available():
        kind = importlib.import_module("vllm.platforms").current_platform.fp8_dtype()
        return "e4m3fnuz" if kind is torch.float8_e4m3fnuz else "e4m3fn"
    return FP8[_Arch.name]


def take_arch(name: str) -> None:
    """Let a CPU stand for this arch."""
    _Arch.name = name


@contextlib.contextmanager
def on_rocm() -> Iterator[None]:
    """On a CPU, let vLLM's platform say that it is ROCm on the arch."""
    platforms = importlib.import_module("vllm.platforms")
    if torch.cuda.is_available():
        yield
        return
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability
    answers = {
        "is_rocm": True,
        "is_cpu": False,
        "has_device_capability": True,
        "get_device_capability": capability(9, 4 if _Arch.name == "gfx942" else 5),
        "fp8_dtype": getattr(torch, f"float8_{fp8_format()}"),
    }
    platform = type(platforms.current_platform)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(platform, name, return_value=answer))
        yield


@functools.cache
def _with_triton() -> None:
    """Import vLLM's Triton as on a machine with a driver: its CPU build puts placeholders in place of kernels.

    It looks for a backend named "cpu", which Triton itself does not have (vllm/triton_utils/importing.py).
    """
    from triton.backends import backends

    cpu = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))
    with mock.patch.dict(backends, cpu=cpu):
        utils = importlib.import_module("vllm.triton_utils")
    if not utils.HAS_TRITON:
        raise MovedKernelError(_moved("vllm.triton_utils", "holds placeholders: something imported vLLM before"))


@functools.cache
def module(name: str) -> types.ModuleType:
    """A module of vLLM, imported as on ROCm.

    Raises:
        MovedKernelError: There is none of that name.
    """
    _with_triton()
    # What vLLM loads by platform is loaded as this machine is; only the kernels themselves are asked for as on ROCm.
    for base in ("vllm._custom_ops", "vllm._aiter_ops", "vllm.model_executor.layers.attention"):
        importlib.import_module(base)
    try:
        with on_rocm():
            return importlib.import_module(name)
    except ImportError as error:
        raise MovedKernelError(_moved(name, f"cannot be imported: {error}")) from error


def find(place: str) -> Any:
    """A kernel or a launcher, `module:name`.

    Raises:
        MovedKernelError: It is not there.
    """
    where, _, name = place.partition(":")
    found = getattr(module(where), name, None)
    if found is None:
        raise MovedKernelError(_moved(place, "is not there"))
    return found


def check_all() -> None:
    """Look for every kernel and launcher that the tests use.

    Raises:
        MovedKernelError: One is not there, or a launcher takes other arguments.
    """
    for place in KERNELS:
        find(place)
    for place, names in LAUNCHERS.items():
        given = names.split()
        parameters = inspect.signature(find(place)).parameters
        if unknown := [name for name in given if name not in parameters]:
            raise MovedKernelError(_moved(place, f"has no parameter {', '.join(unknown)}"))
        needed = [name for name, each in parameters.items() if each.default is each.empty]
        if new := [name for name in needed if name not in given]:
            raise MovedKernelError(_moved(place, f"needs {', '.join(new)}, which the tests do not give"))


def _moved(place: str, what: str) -> str:
    version = importlib.import_module("vllm").__version__
    return (
        f"vLLM {version}: {place} {what}\n"
        "  to do: look where this vLLM has the kernel, and change tests/support/vllm_kernels.py"
    )


def _launch(name: str, **arguments: Any) -> None:
    launcher: Callable[..., None] = find(name)
    with on_rocm(), imports.without_cuda():
        launcher(**arguments)


def _in_rows(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """K and V of a shuffle cache under the shape of rows, as vLLM's backend hands them to its shuffle kernels.

    The strides of a row mean nothing then; of the block, that of the pool.
    """
    if cache.packing != "shuffle":
        return cache.key, cache.value
    shape = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size)
    rest = (cache.num_kv_heads * cache.head_size, cache.head_size, 1)
    key, value = (side.as_strided(shape, (side.stride(0), *rest)) for side in (cache.key, cache.value))
    return key, value


def _codes(side: Tensor, cache: PagedCache) -> Tensor:
    """A side of a cache as vLLM's kernels take it: FP8 codes under their own dtype."""
    return side if cache.quantisation is None else side.view(getattr(torch, f"float8_{cache.quantisation.format}"))


def gather(
    cache: PagedCache,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    *,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    seq_starts: Tensor,
) -> None:
    """`cp_mha_gather_cache_kernel`, as `gather_kv_cache` is called."""
    sides = [_codes(side, cache) for side in _in_rows(cache)]
    scales = (None, None)
    if cache.quantisation is not None:
        scales = (cache.quantisation.key_scale.view(1), cache.quantisation.value_scale.view(1))
    _launch(
        f"{BACKENDS}.rocm_aiter_fa:cp_mha_gather_cache",
        key_cache=sides[0],
        value_cache=sides[1],
        key=key,
        value=value,
        block_tables=block_table,
        k_scales=scales[0],
        v_scales=scales[1],
        cu_seqlens_kv=cu_seq_lens,
        token_to_batch=token_to_seq,
        seq_starts=seq_starts,
        dequant=cache.quantisation is not None,
        kv_cache_layout="SHUFFLE" if cache.packing == "shuffle" else "NHD",
        total_tokens=len(token_to_seq),
    )
