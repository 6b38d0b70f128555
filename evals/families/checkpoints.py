# SPDX-License-Identifier: Apache-2.0
"""Write a family's tiny model: seeded weights under which every next-token distribution depends on its context."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from families import mtp, speech

if TYPE_CHECKING:
    from pathlib import Path

    from families.family import Family

SEED = 20


def save(family: Family, folder: Path, dtype: torch.dtype) -> None:
    """Write the model; the same seed gives the same weights on every machine.

    Args:
        family: Which one.
        folder: Where to; made if need be.
        dtype: Of the weights as stored.
    """
    if not family.config_class:  # enough for vLLM to say what it says of the family
        folder.mkdir(parents=True, exist_ok=True)
        config = {"architectures": [family.architecture], "model_type": family.name}
        (folder / "config.json").write_text(json.dumps(config))
        return
    if family.attention == "cross":
        speech.save(family.make_config(), folder, dtype)
        return
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(family.make_config(), dtype=torch.float32)
    spread(model, torch.Generator().manual_seed(SEED))
    deepcopy(model).to(dtype).save_pretrained(folder)
    if family.drafter:
        mtp.save(model, folder, dtype, torch.Generator().manual_seed(SEED + 1))


@torch.no_grad()
def spread(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Redraw what initialisation leaves alike: gains of one, biases of zero, time steps that hardly move a state.

    A model whose norms all have gain one would agree with an engine that forgot to load them. Decay is drawn so that
    a state forgets over about 2 to 50 tokens: what a lost state costs is then seen, and so is a state never reset.
    """

    def draw(low: float, high: float, like: torch.Tensor) -> torch.Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator)

    for name, weight in model.named_parameters():
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last == "A_log":
            weight.copy_(draw(0.1, 1.0, weight).log())
        elif last == "dt_bias" or name.endswith("dt_proj.bias"):
            weight.copy_(draw(-2.0, 0.5, weight))
        elif weight.dim() == 1 or "conv1d" in name:
            weight.add_(draw(-0.25, 0.25, weight))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a router's, which is stored with the weights
            buffer.copy_(draw(-0.25, 0.25, buffer))
