"""The vLLM plugin: serves vLLM's paged attention with the kernels of this package.

`register` is the `vllm.general_plugins` entry point. vLLM calls it once in each of its processes (front end, engine
core, workers) before it selects backends. Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import os

from pagedkv.vllm_plugin import settings
from pagedkv.vllm_plugin.errors import BackendTakenError

BACKEND = "pagedkv.vllm_plugin.backend.PagedKVBackend"
"""Class path that vLLM resolves when it selects the backend."""

NAME = "CUSTOM"
"""The member of vLLM's `AttentionBackendEnum` that selects us: `--attention-backend CUSTOM`.

vLLM can also create a member at run time, but that one is lost between processes: an enum member is pickled by value,
and a spawned engine core unpickles its configuration before it has loaded any plugin. CUSTOM exists from the start.
"""

CPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVMLABackend"
"""Class path of our MLA on vLLM's CPU platform."""

GPU_MLA_BACKEND = "pagedkv.vllm_plugin.mla_backend.PagedKVGPUMLABackend"
"""The same on ROCm and CUDA."""

GPU_MLA_NAME = "TRITON_MLA"
"""The member of vLLM's `AttentionBackendEnum` that selects it there.

Not CUSTOM, which names the backend of all other layers: vLLM asks a class whether it is for MLA, and the answer of one
class is the same for all layers. A model may have both.
"""

log = logging.getLogger("vllm.pagedkv")
"""A child of vLLM's logger, so that vLLM's handlers print it. The front end loads plugins before it has any, and shows
warnings only; the backend therefore speaks up once more when it is built."""


def register() -> None:
    """Make the backend selectable; on vLLM's CPU platform put it in the place of CPU_ATTN.

    The CPU platform ignores every selection but CPU_ATTN, so there the name is overridden, and only when Triton runs
    interpreted (`TRITON_INTERPRET=1`): without it the kernels could not run. On ROCm and CUDA nothing changes until
    `--attention-backend CUSTOM` asks for it; and TRITON_MLA is ours only with PAGEDKV_MLA=1. Calling it again changes
    nothing.

    Raises:
        BackendTakenError: Another plugin has registered the same name.
        SettingError: PAGEDKV_MLA is neither 0 nor 1.
    """
    from vllm.platforms import current_platform

    _claim(BACKEND, NAME)
    if not current_platform.is_cpu():
        log.info("pagedkv: select it with --attention-backend %s", NAME)
        if settings.mla():
            _claim(GPU_MLA_BACKEND, GPU_MLA_NAME)
            log.info("pagedkv: %s is now %s", GPU_MLA_NAME, GPU_MLA_BACKEND)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        _claim(BACKEND, "CPU_ATTN")
        log.info("pagedkv: CPU_ATTN is now %s (kernels interpreted)", BACKEND)
        _claim(CPU_MLA_BACKEND, "CPU_MLA", "AMX_MLA")  # the CPU platform chooses by what the processor has
        log.info("pagedkv: CPU_MLA is now %s (kernels interpreted)", CPU_MLA_BACKEND)
    else:
        log.warning("pagedkv: CPU_ATTN stays vLLM's own, because TRITON_INTERPRET=1 is not set")


def _claim(path: str, *names: str) -> None:
    """Point members of vLLM's enum at one of our backends.

    Raises:
        BackendTakenError: A member already points at somebody else's class.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for member in (AttentionBackendEnum[name] for name in names):
        if member.is_overridden() and member.get_path() != path:
            raise BackendTakenError(member.name, member.get_path())
        register_backend(member, path)
