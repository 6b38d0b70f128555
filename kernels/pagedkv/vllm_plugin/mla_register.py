"""Puts our MLA in the place of the CPU platform's; imports nothing of vLLM before it is called."""

from __future__ import annotations

import logging

from pagedkv.vllm_plugin.errors import BackendTakenError

MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVMLABackend"
"""Class path that vLLM resolves when it selects the backend."""

log = logging.getLogger("vllm.pagedkv")


def register_mla() -> None:
    """Override CPU_MLA and AMX_MLA, between which the CPU platform chooses by what the processor has.

    Calling it again changes nothing.

    Raises:
        BackendTakenError: Another plugin has registered one of the names.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        if member.is_overridden() and member.get_path() != MLA_BACKEND:
            raise BackendTakenError(member.name, member.get_path())
        register_backend(member, MLA_BACKEND)
    log.info("pagedkv: CPU_MLA is now %s (kernels interpreted)", MLA_BACKEND)
