"""The vLLM plugin: serves vLLM's paged attention with the kernels of this package.

`register` is the `vllm.general_plugins` entry point. vLLM calls it once in each of its processes (front end, engine
core, workers) before it selects backends. Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pagedkv.vllm_plugin import settings
from pagedkv.vllm_plugin.errors import BackendTakenError
from pagedkv.vllm_plugin.mla_register import register_cpu_mla, register_gpu_mla

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND = "pagedkv.vllm_plugin.backend.PagedKVBackend"
"""Class path that vLLM resolves when it selects the backend."""

NAME = "CUSTOM"
"""The member of vLLM's `AttentionBackendEnum` that selects us: `--attention-backend CUSTOM`.

vLLM can also create a member at run time, but that one is lost between processes: an enum member is pickled by value,
and a spawned engine core unpickles its configuration before it has loaded any plugin. CUSTOM exists from the start.
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
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _claim(AttentionBackendEnum.CUSTOM)
    if not current_platform.is_cpu():
        log.info("pagedkv: select it with --attention-backend %s", NAME)
        if settings.mla():
            register_gpu_mla()
    elif os.environ.get("TRITON_INTERPRET") == "1":
        _claim(AttentionBackendEnum.CPU_ATTN)
        log.info("pagedkv: CPU_ATTN is now %s (kernels interpreted)", BACKEND)
        register_cpu_mla()
    else:
        log.warning("pagedkv: CPU_ATTN stays vLLM's own, because TRITON_INTERPRET=1 is not set")


def _claim(member: AttentionBackendEnum) -> None:
    """Point one enum member at our backend.

    Raises:
        BackendTakenError: The member already points at somebody else's class.
    """
    from vllm.v1.attention.backends.registry import register_backend

    if member.is_overridden() and member.get_path() != BACKEND:
        raise BackendTakenError(member.name, member.get_path())
    register_backend(member, BACKEND)
