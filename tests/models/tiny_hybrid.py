"""A tiny hybrid model with random but non-degenerate weights, and what transformers computes with it in float64.

GraniteMoeHybrid: Mamba-2, attention, Mamba-2, attention; 0.5 M parameters. The weights are drawn wide enough that every
next-token distribution depends visibly on its context: a constant model would agree with any attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import eager_attention_forward

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 128
HEAD_SIZE = 32
HEADS, KV_HEADS = 4, 2
ATTENTION_LAYERS = (1, 3)

# A Mamba page is conv (256 + 2*16)*3 and SSM 8*32*16 elements: 4960; an attention token is 2*2*32 = 128 of the same
# dtype. 4960 / 128 = 38.75 tokens, which vLLM rounds up to a multiple of the kernels' 16: 48, not a power of two.
BLOCK_SIZE = 48


def save(folder: Path, dtype: torch.dtype) -> None:
    """Write the model; the same seed gives the same weights on every machine."""
    torch.manual_seed(20)
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=128,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["full_attention" if i in ATTENTION_LAYERS else "linear_attention" for i in range(4)],
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        attention_multiplier=HEAD_SIZE**-0.5,
        position_embedding_type="rope",
        num_local_experts=0,  # the dense members of the family have none
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    GraniteMoeHybridForCausalLM(config).to(dtype).save_pretrained(folder)


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that are neither constant nor periodic; no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Oracle:
    """transformers with eager attention over the whole sequence: no cache, no blocks, no chunks."""

    exact: GraniteMoeHybridForCausalLM
    """The weights of the checkpoint, computed in float64."""
    working: GraniteMoeHybridForCausalLM
    """The same in the engine's dtype: how far rounding alone moves the answer."""

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> Oracle:
        """Load the checkpoint twice."""
        load = GraniteMoeHybridForCausalLM.from_pretrained
        return cls(*(load(folder, dtype=d, attn_implementation="eager").eval() for d in (torch.float64, dtype)))

    def log_probs(self, tokens: list[int], *, exact: bool = True) -> torch.Tensor:
        """Next-token log-probabilities [len(tokens), VOCABULARY] float64; row i follows tokens[: i + 1]."""
        model = self.exact if exact else self.working
        with torch.inference_mode():
            return model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)

    def without_keys(self, tokens: list[int], hidden: range) -> torch.Tensor:
        """What log_probs would be if attention did not see the keys at the positions `hidden`."""

        def attend(module, query, key, value, mask, **kwargs):
            mask = mask.clone()
            mask[..., hidden.stop :, hidden.start : hidden.stop] = torch.finfo(mask.dtype).min
            return eager_attention_forward(module, query, key, value, mask, **kwargs)

        AttentionInterface.register("eager_without_keys", attend)
        AttentionMaskInterface.register("eager_without_keys", eager_mask)  # without it the mask is None
        self.exact.set_attn_implementation("eager_without_keys")
        try:
            return self.log_probs(tokens)
        finally:
            self.exact.set_attn_implementation("eager")
