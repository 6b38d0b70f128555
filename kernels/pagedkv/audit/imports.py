# SPDX-License-Identifier: Apache-2.0
"""Import the Triton kernels of mamba-ssm, causal-conv1d and vLLM where their compiled halves are missing.

On a machine without a GPU mamba-ssm and causal-conv1d are installed from source without their extensions, and then
`import mamba_ssm` fails on the first of them although the Triton kernels beside it need none. The stand-ins below are
made in this process only; where an extension is installed, as in an image, nothing stands in for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from triton.backends import backends

from pagedkv.errors import CannotRunHereError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_VLLM_MAMBA = "vllm.model_executor.layers.mamba.ops"
_VLLM_ATTENTION = "vllm.v1.attention.ops"
_VLLM_DELTA = "vllm.third_party.flash_linear_attention.ops"
_VLLM_KIMI = "vllm.models.kimi_k3.amd.ops.third_party.kda"
_VLLM_WITH_CPU_TWINS = {
    "mamba_ssm": "selective_state_update",
    "ssd_combined": "_mamba_chunk_scan_combined_fwd",
    "causal_conv1d": "causal_conv1d_fn",
}
"""Modules of vLLM that, on a CPU platform, replace this function of theirs, a launcher of Triton, by another one."""


def mamba_ssm(module: str) -> ModuleType:
    """A module of `mamba_ssm.ops.triton`, such as "ssd_chunk_scan".

    Raises:
        CannotRunHereError: mamba-ssm is not installed, or cannot be imported for another reason than its extension.
    """
    missing = _stand_in("selective_scan_cuda") and "mamba_ssm" not in sys.modules
    if missing and (spec := importlib.util.find_spec("mamba_ssm")):
        # Its __init__, which also imports whole models and their hub, does not run.
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
    return _import("mamba_ssm", f"mamba_ssm.ops.triton.{module}")


def causal_conv1d(module: str) -> ModuleType:
    """A module of `causal_conv1d`, such as "causal_conv1d_varlen".

    Raises:
        CannotRunHereError: As `mamba_ssm`.
    """
    _stand_in("causal_conv1d_cuda")
    return _import("causal_conv1d", f"causal_conv1d.{module}")


def vllm(module: str) -> ModuleType:
    """A module of vLLM's Mamba operations with its Triton launchers in place.

    Beside a Triton backend, a CPU build of vLLM needs a platform that is not a CPU to show them, else each launcher is
    replaced by a CPU function, nothing is compiled and everything passes. Both hold only while the module is imported.

    Raises:
        CannotRunHereError: vLLM is missing or too different, or was imported earlier with the CPU functions.
    """
    name = f"{_VLLM_MAMBA}.{module}"
    with _triton_backend(), _not_a_cpu():
        imported = _import("vllm", name)
    launcher = _VLLM_WITH_CPU_TWINS.get(module)
    if launcher and getattr(imported, launcher).__module__ != name:
        raise CannotRunHereError(
            f"{name}.{launcher} is vLLM's CPU function: something imported that module before.\n"
            "  to do: import pagedkv.audit.imports first, in a process of its own"
        )
    return imported


def vllm_delta(module: str) -> ModuleType:
    """A module of vLLM's delta rules with the configurations of ROCm; "kimi.chunk" is one of Kimi's own copy.

    One of them shortens its list where torch was built for ROCm, because some crash the compiler; a CPU build of torch
    would be given those too.

    Raises:
        CannotRunHereError: vLLM is missing or too different.
    """
    from .compile import offline  # whose driver says that the device is AMD's, which these modules ask

    rocm = mock.patch.object(torch.version, "hip", torch.version.hip or "7.2.0")
    with _triton_backend(), _not_a_cpu(), offline("gfx942"), rocm:
        own = module.removeprefix("kimi.")
        return _import("vllm", f"{_VLLM_DELTA if own == module else _VLLM_KIMI}.{own}")


def vllm_attention(module: str) -> ModuleType:
    """A module of vLLM's attention operations.

    Raises:
        CannotRunHereError: vLLM is missing, too different, or has replaced its Triton kernels with placeholders.
    """
    with _triton_backend():
        imported = _import("vllm", f"{_VLLM_ATTENTION}.{module}")
        unified = _import("vllm", f"{_VLLM_ATTENTION}.triton_unified_attention")
    if not hasattr(getattr(unified, "kernel_unified_attention", None), "device_caches"):
        raise CannotRunHereError(
            "vLLM imported, but its attention kernels are placeholders: it found no Triton driver it trusts.\n"
            "  to do: import pagedkv.audit before anything imports vllm.triton_utils"
        )
    return imported


def without_cuda() -> AbstractContextManager[object]:
    """Let launchers that enter `torch.cuda.device(...)` run on CPU tensors; where there is a GPU, change nothing."""
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    return mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext())


def pinned(tuner: Any, config: Any) -> AbstractContextManager[object]:
    """Let an autotuned kernel take this configuration without timing any.

    Args:
        tuner: triton.runtime.Autotuner.
        config: triton.Config, one of `tuner.configs` or another.
    """
    return mock.patch.object(tuner, "configs", [config])


def _stand_in(extension: str) -> bool:
    """Put an empty module in the place of a compiled extension, where that is missing; return whether it was now."""
    if extension in sys.modules or importlib.util.find_spec(extension) is not None:
        return False
    sys.modules[extension] = ModuleType(extension, "Empty: the package is installed here without it.")
    sys.modules[extension].__spec__ = ModuleSpec(extension, None)
    return True


def _import(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotRunHereError(
            f"the kernels of {package} cannot be imported ({error}).\n"
            f"  to do: requirements/install.sh installs {package} as pinned, or leave them out with --source"
        ) from error


def _triton_backend() -> AbstractContextManager[object]:
    """Register a backend named "cpu", for want of which vLLM's CPU build puts placeholders in place of Triton.

    See its `triton_utils/importing.py`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return mock.patch.dict(backends, cpu=SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))


def _not_a_cpu() -> AbstractContextManager[object]:
    """Let vLLM's platform deny that it is a CPU."""
    platform = type(_import("vllm", "vllm.platforms").current_platform)
    return mock.patch.object(platform, "is_cpu", return_value=False)
