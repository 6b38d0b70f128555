"""Puts our MLA in the place of vLLM's; imports nothing of vLLM before it is called."""

from __future__ import annotations

import logging

from pagedkv.vllm_plugin.errors import BackendTakenError

CPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVMLABackend"
"""Class path that vLLM resolves when it selects the backend on its CPU platform."""

GPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVGPUMLABackend"
"""The same on ROCm and CUDA."""

GPU_MLA_NAME = "TRITON_MLA"
"""The member of vLLM's `AttentionBackendEnum` that selects it there.

Not CUSTOM, which names the backend of all other layers: vLLM asks a class whether it is for MLA, and the answer of one
class is the same for all layers. A model may have both.
"""

log = logging.getLogger("vllm.pagedkv")


def register_cpu_mla() -> None:
    """Override CPU_MLA and AMX_MLA, between which the CPU platform chooses by what the processor has.

    Calling it again changes nothing.

    Raises:
        BackendTakenError: Another plugin has registered one of the names.
    """
    _override(("CPU_MLA", "AMX_MLA"), CPU_MLA_BACKEND)
    log.info("pagedkv: CPU_MLA is now %s (kernels interpreted)", CPU_MLA_BACKEND)


def register_gpu_mla() -> None:
    """Override TRITON_MLA. Calling it again changes nothing.

    Raises:
        BackendTakenError: Another plugin has registered the name.
    """
    _override((GPU_MLA_NAME,), GPU_MLA_BACKEND)
    log.info("pagedkv: %s is now %s", GPU_MLA_NAME, GPU_MLA_BACKEND)


def _override(names: tuple[str, ...], path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in (AttentionBackendEnum[name] for name in names):
        if member.is_overridden() and member.get_path() != path:
            raise BackendTakenError(member.name, member.get_path())
        register_backend(member, path)
