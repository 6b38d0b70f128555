# SPDX-License-Identifier: Apache-2.0
"""Load a model without weight files: the load format `drawn`, which vLLM's worker imports before it loads.

vLLM's own format for that, `dummy`, leaves weights so small that all answers are alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from pagedkv.vllm_plugin.inspect import WorkerReport

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SEED = 1


class Worker(WorkerReport):
    """vLLM adds these methods to its worker class, for which it imports this module (`worker_extension_cls`)."""


@register_model_loader("drawn")
class DrawnLoader(BaseModelLoader):
    """Draws all weights; the same model gets the same weights on the same device.

    Products keep the variance of what comes in, but for queries, keys and values, which are twice as large: scores
    deviate by 4, so that an answer depends on few of the tokens before it and a lost block shows. Logits deviate by 3.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:  # noqa: ARG002
        """Draw in place, each weight with a generator of its own."""
        for index, (name, weight) in enumerate(sorted(model.named_parameters())):
            _draw(name.removesuffix(".weight"), weight, torch.Generator(weight.device).manual_seed(SEED + index))


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
