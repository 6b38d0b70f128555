# SPDX-License-Identifier: Apache-2.0
"""What vLLM's workers import: a report of which backend serves each attention layer, and a loader that draws weights.

vLLM's own format without weight files, `dummy`, leaves weights so small that all answers are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
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


SEED = 1
"""Of drawn weights."""


@register_model_loader("drawn")
class DrawnLoader(BaseModelLoader):  # type: ignore[misc]
    """Draws all weights in bfloat16; the same model gets the same weights on the same device, whatever it computes in.

    Products keep the variance of what comes in, but for queries, keys and values, which are twice as large: scores
    deviate by 4, so that an answer depends on few of the tokens before it and a lost block shows. Logits deviate by 3.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:  # noqa: ARG002
        """Draw in place, each weight with a generator of its own."""
        for index, (name, weight) in enumerate(sorted(model.named_parameters())):
            drawn = torch.empty_like(weight, dtype=torch.bfloat16)
            _draw(name.removesuffix(".weight"), drawn, torch.Generator(weight.device).manual_seed(SEED + index))
            weight.copy_(drawn)


def _draw(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    last = name.rpartition(".")[2]
    if last == "A":  # minus the rate of decay
        weight.uniform_(-1.0, -0.1, generator=generator)
    elif last == "dt_bias":
        weight.uniform_(-2.0, 0.5, generator=generator)
    elif last in ("q_norm", "k_norm"):
        weight.fill_(2.0)
    elif last == "bias":
        weight.zero_()
    elif weight.dim() == 1:
        weight.normal_(1.0, 0.1, generator=generator)
    elif last == "embed_tokens":
        weight.normal_(0.0, 1.0, generator=generator)
    else:
        gain = {"qkv_proj": 2.0, "lm_head": 3.0}.get(last, 1.0)
        weight.normal_(0.0, gain * weight.shape[-1] ** -0.5, generator=generator)
