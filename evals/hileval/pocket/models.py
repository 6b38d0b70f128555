# SPDX-License-Identifier: Apache-2.0
"""The pocket models and their tokenizers: one for each class of KV cache that the kernels serve. Untrained, fp32.

hybrid    attention and Mamba-2 (GraniteMoeHybrid)     rows of a pool that attention and state share
window    soft cap, every second layer sees 8 tokens   two cache groups of one pool (Gemma 2)
latent    multi-head latent attention                  one latent row per token (DeepSeek V2)
packed    attention with normed queries and keys       served from aiter's SHUFFLE packing with FP8 codes (Qwen 3)
speech    cross attention to 50 tokens of an encoder   two cache groups of one pool, one written once (Whisper)

An answer needs the number that stands two tokens after a name. A Mamba layer's short convolution carries the name those
two tokens along; attention alone has to find three things at once (look back, match, copy) and did not, in 3,000 steps
of any recipe tried. So a model without state layers starts with purely positional heads in its first layer, which look
one and two tokens back, and with keys equal to queries in every later one, which attends to what is alike. Everything
is trained from there; nothing is frozen.

The tokenizers are word-level and lose nothing: decoding the tokens of a text gives the text back. A blank belongs to
the word after it (` Bob`), punctuation stands alone, a number is one token. lm-eval's regular expressions therefore
read exactly what the model wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hileval.pocket.data import COUNTS, ITEMS, MAX_COUNT, NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HIDDEN = 128
LAYERS = 4
LONGEST = 512
MEL_BINS = 16
"""Bands of the spectrogram that the speech model hears."""
SLOW = 1e6
"""RoPE's theta: most channels hardly turn within a question, so that names match wherever they stand."""


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_key_value_heads": 2,
            "attention_multiplier": 32**-0.5,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": HIDDEN,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
        },
    ),
    "window": (
        "Gemma2",
        {
            "intermediate_size": 256,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": None,
        },
    ),
    "latent": (
        "DeepseekV2",
        {
            "tie_word_embeddings": False,
            "intermediate_size": 256,
            "num_key_value_heads": 4,
            "kv_lora_rank": 256,  # vLLM knows latent rows of 256 + 64 and 512 + 64 channels
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": LAYERS,  # no mixture of experts
            "n_routed_experts": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "packed": ("Qwen3", {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}),
}
"""Decoder -> class of transformers and its settings; the encoder-decoder is `speech`. The folder of a trained one is
evals/pocket/<name>."""


def build(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained model; `name` is `speech` or a key of `ARCHITECTURES`."""
    if name == "speech":
        return _speech(tokenizer)
    kind, settings = ARCHITECTURES[name]
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if name != "hybrid":
        common["rope_parameters"] = {"rope_type": "default", "rope_theta": SLOW}
    config = getattr(transformers, f"{kind}Config")(**(common | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if name != "hybrid":
        structure(model)
    return model


def _speech(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    width = 64
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MEL_BINS,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_source_positions=50,
        max_target_positions=32,
        init_std=0.06,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float32",
    )
    return transformers.WhisperForConditionalGeneration(config)


OFFSETS = (1, 2)
"""Tokens that the heads of the first layer look back, in turn; heads in turn share keys, values and output."""
CONSTANT = 0
"""Channel of the embedding that is the same for every token: what a positional head can make its query of."""
LEVEL = 8.0
"""Standard deviations of an embedding that the constant channel holds."""
SHARPNESS = 4.0
"""Size of a positional query and key, per channel that turns fast."""
QUIET = 0.1
"""Share of the random start that is left where another signal must prevail."""
FAST = 0.05
"""Radians per token above which a pair of channels tells neighbours apart."""
MATCH = 2.0
"""Factor of a matching query."""


def structure(model: PreTrainedModel) -> None:
    """Overwrite the random start of a decoder's attention in place."""
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[:, CONSTANT] = LEVEL * table.std()
        first, *others = (layer.self_attn for layer in model.model.layers)
        latent = hasattr(first, "kv_a_proj_with_mqa")
        (_look_back_latent if latent else _look_back)(first)
        for attention in others:
            (_match_latent if latent else _match)(attention)


def angles(channels: int, theta: float) -> torch.Tensor:
    """Radians per token of each pair of channels, [channels / 2]."""
    return theta ** (-torch.arange(0, channels, 2) / channels)


def _positional(turns: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both channels of each pair of a query whose product with the key (1, 0) is largest `offset` tokens back."""
    fast = (turns > FAST) * SHARPNESS
    return fast * torch.cos(turns * offset), -fast * torch.sin(turns * offset)


def _look_back(attention: Any) -> None:
    size, per_key = attention.head_dim, attention.num_key_value_groups
    turns = angles(size, _theta(attention))
    hidden = attention.q_proj.in_features
    query = attention.q_proj.weight.view(-1, size, hidden)
    key = attention.k_proj.weight.view(-1, size, hidden)
    query *= QUIET
    key *= QUIET
    key[:, :, CONSTANT] = torch.cat(_positional(turns, 0)) / LEVEL
    for head in range(len(query)):
        query[head, :, CONSTANT] = torch.cat(_positional(turns, OFFSETS[head % len(OFFSETS)])) / LEVEL
    attention.v_proj.weight[:, CONSTANT] = 0
    out = attention.o_proj.weight.view(hidden, -1, size)
    for head in range(0, len(query), per_key):
        out[:, head : head + per_key] = out[:, head : head + 1].clone()


def _match(attention: Any) -> None:
    size, per_key = attention.head_dim, attention.num_key_value_groups
    hidden = attention.q_proj.in_features
    query = attention.q_proj.weight.view(-1, size, hidden)
    query.copy_(MATCH * attention.k_proj.weight.view(-1, size, hidden).repeat_interleave(per_key, 0))


def _look_back_latent(attention: Any) -> None:
    hidden, plain = attention.q_proj.in_features, attention.qk_nope_head_dim
    turns = angles(attention.qk_rope_head_dim, _theta(attention))
    query = attention.q_proj.weight.view(attention.num_heads, -1, hidden)
    query *= QUIET
    rope = attention.kv_a_proj_with_mqa.weight[attention.kv_lora_rank :]
    rope *= QUIET
    rope[:, CONSTANT] = torch.stack(_positional(turns, 0), -1).flatten() / LEVEL
    attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank, CONSTANT] = 0
    out = attention.o_proj.weight.view(hidden, attention.num_heads, -1)
    values = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)[:, plain:]
    for head in range(attention.num_heads):
        query[head, plain:, CONSTANT] = (
            torch.stack(_positional(turns, OFFSETS[head % len(OFFSETS)]), -1).flatten() / LEVEL
        )
        shared = head - head % len(OFFSETS)
        out[:, head], values[head] = out[:, shared].clone(), values[shared].clone()


def _match_latent(attention: Any) -> None:
    hidden, plain, rank = attention.q_proj.in_features, attention.qk_nope_head_dim, attention.kv_lora_rank
    query = attention.q_proj.weight.view(attention.num_heads, -1, hidden)
    up = attention.kv_b_proj.weight.view(attention.num_heads, -1, rank)[:, :plain]
    down = attention.kv_a_proj_with_mqa.weight[:rank]
    alike = up @ down
    query[:, :plain] = MATCH * alike * (query.std() / alike.std())
    query[:, plain:] *= QUIET


def _theta(attention: Any) -> float:
    return float(attention.config.rope_parameters["rope_theta"])


PAD, UNKNOWN, END = SPECIAL = ("<pad>", "<unk>", "</s>")
START = "<s>"
"""Beginning of the speech decoder's text."""
PATTERN = r" ?[A-Za-z]+| ?[0-9]+| [+=-]|####|[.,?:\n]"


def words() -> list[str]:
    """Every token in the order of its id."""
    fixed = ["Question", ":", "\n", "Answer", "####", ".", ",", "?", " +", " -", " ="]
    spoken = ["How", "many", "more", "do", "does", "have", "has", "than", "and", "together"]
    numbers = [str(n) for n in range(3 * MAX_COUNT + 1)]
    return [*SPECIAL, *fixed, *(f" {word}" for word in [*spoken, *numbers, *NAMES, *ITEMS])]


def spoken_words() -> list[str]:
    """Every token of the speech model: lines of a document begin with a name."""
    return [*SPECIAL, START, "\n", *NAMES, *(f" {word}" for word in [*COUNTS, *ITEMS])]


def build_tokenizer(name: str = "hybrid") -> PreTrainedTokenizerFast:
    """The tokenizer of a pocket model as transformers' fast class; `save_pretrained` lets AutoTokenizer load it."""
    vocabulary = spoken_words() if name == "speech" else words()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        bos_token=START if name == "speech" else None,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
