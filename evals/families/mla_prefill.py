# SPDX-License-Identifier: Apache-2.0
"""MLA's prefill in plain torch, on GPUs: any head size, no library. What decodes after it is ours."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

from pagedkv.vllm_plugin.inspect import WorkerReport


class PlainPrefill(CPUSDPAMLAPrefillBackend):
    """vLLM's own for CPUs, which knows nothing of CPUs."""

    @staticmethod
    def get_name() -> str:
        """Shown in vLLM's log."""
        return "PLAIN_TORCH_MLA"

    def supports_out(self) -> bool:
        """It takes no output for the tokens before a chunk, though it says so; CPUs never ask it to."""
        return False


def register() -> None:
    """Let engines choose it as `mla_prefill_backend` CUSTOM."""
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, f"{__name__}.{PlainPrefill.__name__}")


class PlainPrefillReport(WorkerReport):
    """The workers' report, for workers in processes of their own: they register the prefill when they import it."""


register()
