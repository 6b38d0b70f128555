# SPDX-License-Identifier: Apache-2.0
"""Extension that vLLM's workers import: a report of which backend serves each attention layer."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class EngineWorkerReport:
    """A method that vLLM adds to its worker class (`worker_extension_cls`)."""

    def hileval_report(self: Any) -> list[dict[str, Any]]:
        """Every attention layer of this worker: class paths, and the names by which vLLM knows the backend.

        The names are those of the registry: `get_name()` of ROCM_AITER_FA says FLASH_ATTN.
        """
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        return [
            {"layer": name, "impl": _path(type(layer.impl)), "block_size": _block_size(layer), **_backend(layer)}
            for name, layer in layers
            if isinstance(layer, AttentionLayerBase) and not isinstance(layer, MambaBase)
        ]


def _backend(layer: Any) -> dict[str, Any]:
    path = _path(layer.get_attn_backend())
    names = [member.name for member in AttentionBackendEnum if member.value and member.get_path() == path]
    return {"backend": path, "names": names}


def _block_size(layer: Any) -> int | None:
    return int(layer.kv_cache.shape[-2]) if layer.kv_cache.dim() > 2 else None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
