# SPDX-License-Identifier: Apache-2.0
"""Models in their published sizes, with fewer layers where two of them would not fit on one GPU. Data alone.

No weights can be downloaded where this runs: `worker.py` draws them. Sizes are those of the published config.json.
Multipliers are 1: they are tuned for trained weights, and cost no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
ONES = dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"), 1.0)


@dataclass(frozen=True)
class Model:
    """One model."""

    name: str
    """Of the published checkpoint."""
    config_class: str
    """Of transformers."""
    architecture: str
    """In vLLM's registry."""
    layers: str
    """What of the published model is here."""
    config: dict[str, Any]
    tiny: dict[str, Any]
    """What `--smoke` puts in place of it."""

    def save(self, folder: Path, *, tiny: bool = False) -> None:
        """Write config.json; there are no weights."""
        import transformers

        wanted = TOKENS | self.config | (self.tiny if tiny else {})
        config = getattr(transformers, self.config_class)(**wanted)
        config.architectures = [self.architecture]
        config.save_pretrained(folder)


_ALL = (
    Model(
        "granite-4.0-h-small",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        "20 of 40 layers, 2 of 4 with attention",
        {
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 20,
            "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 9, "attention", *["mamba"] * 4],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "attention_multiplier": 128**-0.5,
            "position_embedding_type": "nope",
        },
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "attention_multiplier": 32**-0.5,
        },
    ),
    Model(
        "Falcon-H1-7B",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        "all 44 layers, each with attention beside Mamba-2",
        {
            "vocab_size": 130048,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
            **ONES,
        },
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    Model(
        "Qwen3-30B-A3B",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "24 of 48 layers, attention in each",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
        },
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
)
MODELS: dict[str, Model] = {model.name: model for model in _ALL}


@dataclass(frozen=True)
class Case:
    """So many requests of so long a prompt, random tokens, at once."""

    requests: int
    prompt: int
    answers: int = 97
    """Tokens of each answer."""

    @property
    def name(self) -> str:
        """As `--case` takes it."""
        return f"{self.requests} x {self.prompt}"


CASES = (Case(1, 32768), Case(8, 16384), Case(32, 4096))
SMOKE = (Case(2, 80, 12), Case(3, 21, 12))
MOST = max(case.requests for case in CASES)
LONGEST = max(case.prompt + case.answers for case in CASES)
