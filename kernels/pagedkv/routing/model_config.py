# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face `config.json`: which layers a model has, what each asks of attention, and its recurrent state.

Nothing is guessed. A model type that is not in `model_types.py` must list its layers, and a key that changes attention
or state and is not read here is an error that names it.

A block of attention that shares its pool with Mamba or linear attention layers must be at least as large as the state
of one sequence in a recurrent layer, because both are the same bytes. vLLM 0.32 (`platforms/interface.py:938`) takes
the smallest multiple of the kernels' block size that is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pagedkv.errors import InvalidFileError, MisuseError

from . import model_types
from .request import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .request import AttnType


_NAME_A_CONFIG = "name a config.json, or the folder that holds one"
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
"""Keys under which a multimodal model keeps its language model."""

MOST_LAYERS = 10_000
"""Most layers of a model; a larger number is a mistake in the file, and a list of so many would fill the memory."""


@dataclass(frozen=True)
class Config:
    """The keys of one model."""

    path: str
    keys: Mapping[str, object]
    outer: str = ""
    """Outermost model type: of a multimodal model around the language model, or of the language model itself."""
    around: frozenset[str] = frozenset()
    """Names of the keys that stand around a language model and not in it."""

    @property
    def model_type(self) -> str:
        """Type of the language model."""
        return str(self.keys.get("model_type", "unnamed"))

    def has(self, *names: str) -> bool:
        """Whether one of the keys is there and not null."""
        return any(self.keys.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of the keys that is there.

        Raises:
            InvalidFileError: none is, and there is no default; or its value is no integer >= 1.
        """
        for name in names:
            value = self.keys.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise self.error(f"{name}: got {value!r}; expected an integer >= 1")
                return value
        if default is None:
            raise self.error(f"model type {self.model_type} says none of {', '.join(names)}")
        return default

    def number(self, name: str) -> float | None:
        """Return a key that is a number > 0, or None where it is not there.

        Raises:
            InvalidFileError: it is something else.
        """
        value = self.keys.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.error(f"{name}: got {value!r}; expected a number > 0")
        return float(value)

    def words(self, name: str) -> list[str] | None:
        """Return a key that is a list of words, or None where it is not there.

        Raises:
            InvalidFileError: it is something else.
        """
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(f"{name}: got {value!r}; expected a list of words")
        return value

    def listed(self) -> bool:
        """Whether the config says of each layer what it is."""
        return self.has("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list")

    def integers(self, name: str) -> list[int]:
        """Return a key that is a list of integers.

        Raises:
            InvalidFileError: it is not there, or something else.
        """
        value = self.keys.get(name)
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.error(f"{name}: got {value!r}; expected a list of integers")
        return value

    def error(self, what: str) -> InvalidFileError:
        """Return the error that says what is wrong with this file."""
        return InvalidFileError(what, where=str(self.path))


def read_config(path: Path) -> Config:
    """Read the config of a model.

    Args:
        path: `config.json`, or the folder that holds it.

    Raises:
        InvalidFileError: it is missing, not JSON, or not an object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidFileError(f"cannot be read: {error.strerror}", where=str(file), remedy=_NAME_A_CONFIG) from error
    except ValueError as error:
        raise InvalidFileError(f"not JSON: {error}", where=str(file), remedy=_NAME_A_CONFIG) from error
    if not isinstance(keys, dict):
        what = f"got a {type(keys).__name__}; expected an object of keys"
        raise InvalidFileError(what, where=str(file), remedy=_NAME_A_CONFIG)
    outer, around = str(keys.get("model_type", "")), frozenset[str]()
    for part in _LANGUAGE_PARTS:
        if isinstance(keys.get(part), dict):
            around = frozenset(keys) - frozenset(keys[part])
            keys = {**keys, **keys[part]}
    return Config(str(file), keys, outer, around)


_LAYER_WORDS = {
    "full": ("full",),
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding": ("sliding",),
    "sliding_attention": ("sliding",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "mamba2": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),  # Zamba2: a Mamba layer that a shared attention layer feeds
    "moe": (),
    "mlp": (),
}
"""Words of `layer_types` and `layers_block_type`, and what a layer of that word holds."""

_PATTERN_LETTERS = {"M": ("state",), "*": ("full",), "-": (), "E": ()}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Kind:
    """Layers of a model that are alike. Head counts are of the whole model, before tensor parallelism."""

    name: str
    count: int
    keeps: Literal["cache", "latent", "state", "nothing"] = "cache"
    """What it keeps from step to step: a paged cache; MLA's latent; a recurrent state; nothing (an encoder)."""
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    """Channels of a head; in MLA latent and rotary channels together."""
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    causal: bool = True
    attn_type: AttnType = "decoder"
    max_seq_len: int | None = None
    """Bound of the model itself, in tokens, where it has one."""


def layer_kinds(config: Config) -> tuple[Kind, ...]:
    """Return the distinct kinds of layers, attention first.

    Raises:
        InvalidFileError: the config does not say what its layers are.
    """
    if config.model_type in model_types.RELATIVE_BIAS:
        raise config.error(f"model type {config.model_type} adds a relative position bias, which no kernel here takes")
    if config.keys.get("is_encoder_decoder") or config.model_type in model_types.ENCODER_DECODERS:
        return _encoder_decoder(config)
    _require_all_read(config)
    pattern = _pattern(config)
    if absent := model_types.missing(config.model_type, config.keys.keys()):
        raise config.error(
            f"model type {config.model_type} says nothing of {', '.join(absent)}. What its class then takes is not "
            "described here (model_types.py); add them"
        )
    counts = Counter(held for layer in pattern for held in layer)
    found = []
    if counts["full"]:
        found.append(_latent(config, counts["full"]) if config.has("kv_lora_rank") else _attention(config, counts))
    if counts["sliding"]:
        window = config.integer("sliding_window") + (config.model_type in model_types.SEES_ONE_MORE)
        found.append(_attention(config, counts, window=window))
    if counts["state"]:
        if model_types.RULES.get(config.model_type) not in {"hybrid", "states", "both"}:
            raise config.error(
                f"model type {config.model_type} has recurrent layers that are not described here (model_types.py). "
                f"Keys of the config that may describe them: {_state_keys(config)}"
            )
        found.append(Kind("state", counts["state"], keeps="state"))
    return tuple(found)


def _state_keys(config: Config) -> str:
    """Names of the keys that describe a recurrent state, for a message."""
    return ", ".join(model_types.named_like_states(config.keys)) or "none"


def _require_all_read(config: Config) -> None:
    """Refuse a config with a key that changes attention or state and that nothing here reads."""
    keys = {**_attention_keys(config).keys, **config.keys}
    if found := model_types.unread(config.model_type, keys, around=config.around, listed=config.listed()):
        raise config.error(
            f"model type {config.model_type} has keys that may change attention or what it keeps, and that are not "
            f"described here (model_types.py): {', '.join(found)}. Where the model does not use them, set them to null "
            "in a copy of the config"
        )


def _attention(config: Config, counts: Counter[str], window: int | None = None) -> Kind:
    heads, head_size = _heads(config)
    return Kind(
        name=f"sliding window of {window}" if window else "full attention",
        count=counts["sliding" if window else "full"],
        num_q_heads=heads,
        num_kv_heads=_kv_heads(config, heads),
        head_size=head_size,
        window=window,
        softcap=config.number("attn_logit_softcapping"),
        alibi=_alibi(config),
        sinks=config.model_type in model_types.SINKS,
        scale=_scale(config, head_size),
        max_seq_len=config.integer(*_LENGTHS) if config.has(*_LENGTHS) else None,
    )


def _latent(config: Config, count: int) -> Kind:
    return Kind(
        name="MLA",
        count=count,
        keeps="latent",
        num_q_heads=config.integer("num_attention_heads"),
        num_kv_heads=1,
        head_size=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim"),
    )


def _encoder_decoder(config: Config) -> tuple[Kind, ...]:
    if config.model_type not in model_types.ENCODER_DECODERS:
        raise config.error(
            f"model type {config.model_type} is an encoder-decoder that is not described here (model_types.py). "
            f"Known are {', '.join(sorted(model_types.ENCODER_DECODERS))}"
        )
    _require_all_read(config)
    width, heads = config.integer("d_model"), config.integer("decoder_attention_heads")
    source = config.integer("max_source_positions", "max_position_embeddings")
    target = config.integer("max_target_positions", "max_position_embeddings")
    own = Kind(
        "decoder self-attention",
        config.integer("decoder_layers"),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        max_seq_len=target,
    )
    cross = replace(own, name="cross attention", causal=False, attn_type="encoder_decoder", max_seq_len=source)
    return own, cross, Kind("encoder self-attention", config.integer("encoder_layers"), keeps="nothing")


def _heads(config: Config) -> tuple[int, int]:
    """Query heads, and channels of a head."""
    heads = config.integer("num_attention_heads", "n_head", "n_heads")
    if config.has("head_dim", "attention_head_dim"):
        return heads, config.integer("head_dim", "attention_head_dim")
    if config.model_type == "zamba2":  # attention reads the layer's input beside the embedding
        return heads, 2 * config.integer("hidden_size") // heads
    width = config.integer("hidden_size", "n_embed", "n_embd", "d_model")
    if width % heads:
        raise config.error(f"head_dim: got none, and {heads} heads do not divide {width} channels; add head_dim")
    return heads, width // heads


def _kv_heads(config: Config, heads: int) -> int:
    inner = _attention_keys(config)
    if inner.has("kv_n_heads"):
        return inner.integer("kv_n_heads")
    if inner.keys.get("attn_type") == "multiquery_attention":
        return 1
    if config.keys.get("multi_query") and not config.keys.get("new_decoder_architecture"):  # the older Falcons
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if not config.has(*names) and (others := model_types.named_like_kv_heads(config.keys)):
        raise config.error(f"model type {config.model_type} says none of {', '.join(names)}, but {', '.join(others)}")
    return config.integer(*names, default=heads)


def _attention_keys(config: Config) -> Config:
    """Keys of `attn_config`, in which MPT and DBRX keep those of attention; none of other types."""
    inner = config.keys.get("attn_config")
    return Config(config.path, inner if isinstance(inner, dict) else {})


def _alibi(config: Config) -> bool:
    return (
        config.model_type == "bloom"
        or (config.model_type == "baichuan" and config.keys.get("hidden_size") == 5120)  # 13B; no key says so
        or config.keys.get("alibi") is True
        or config.keys.get("position_embedding_type") == "alibi"
        or _attention_keys(config).keys.get("alibi") is True
    )


def _scale(config: Config, head_size: int) -> float | None:
    """Factor on the logits where a family has its own; None is 1/sqrt(head_size)."""
    if (scalar := config.number("query_pre_attn_scalar")) is not None:  # Gemma 2 and 3
        return float(scalar**-0.5)
    if config.model_type == "zamba2":
        return float((head_size / 2) ** -0.5)
    return config.number("attention_multiplier") or _attention_keys(config).number("softmax_scale")  # Granite; MPT


def _pattern(config: Config) -> list[tuple[str, ...]]:
    """What each layer holds: some of `full`, `sliding` and `state`."""
    listed = _listed_layers(config)
    count = config.integer(*_COUNTS, default=len(listed) if listed else None)
    if count > MOST_LAYERS:
        raise config.error(f"num_hidden_layers: got {count}; expected at most {MOST_LAYERS}")
    if listed is not None:
        if len(listed) != count:
            raise config.error(f"the config lists {len(listed)} layers, and num_hidden_layers is {count}")
        return listed
    layers = range(count)
    rule = model_types.RULES.get(config.model_type)
    if (full := _full_layers(config, layers)) is not None:
        if rule in {"states", "both"}:
            raise config.error(
                f"model type {config.model_type} has no layers of attention alone, and the config names some"
            )
        return [("full",) if layer in full else ("state",) for layer in layers]
    if rule in {None, "hybrid"} or (rule == "listed" and not config.has("sliding_window_pattern")):
        known = "does not list" if rule else "is unknown here (model_types.py), and the config does not list"
        words = "full_attention or sliding_attention"
        if rule == "hybrid":
            words = "full_attention, mamba, linear_attention or conv"
        raise config.error(
            f"model type {config.model_type} {known} its layers. If each is {words}, add layer_types with these "
            f"{count} words to a copy of the config"
        )
    if rule == "states":
        return [("state",) for _ in layers]
    if rule == "both":
        return [("full", "state") for _ in layers]
    return _sliding_pattern(config, layers)


def _listed_layers(config: Config) -> list[tuple[str, ...]] | None:
    """What each layer holds where the config has a word, letter or number for each; None where it has not."""
    if words := config.words("layer_types") or config.words("layers_block_type"):
        if unknown := sorted(set(words) - set(_LAYER_WORDS)):
            raise config.error(f"layers of type {', '.join(unknown)} are not described here (model_config.py)")
        return [_LAYER_WORDS[word] for word in words]
    if config.has("hybrid_override_pattern"):
        letters = str(config.keys["hybrid_override_pattern"])
        if unknown := sorted(set(letters) - set(_PATTERN_LETTERS)):
            raise config.error(f"hybrid_override_pattern has the letters {unknown}; expected M, *, - and E")
        return [_PATTERN_LETTERS[letter] for letter in letters]
    if config.has("attn_type_list"):  # MiniMax
        numbers = config.integers("attn_type_list")
        if others := len(numbers) - numbers.count(1):
            raise config.error(
                f"attn_type_list: {others} of {len(numbers)} layers are not of type 1, full attention, and what they "
                "keep is not described here (model_config.py)"
            )
        return [("full",) for _ in numbers]
    return None


def _linear_attention(config: Config) -> Config | None:
    """Keys of Kimi delta attention, which counts layers from 1; None of another family."""
    inner = config.keys.get("linear_attn_config")
    return Config(config.path, inner) if isinstance(inner, dict) else None


def _full_layers(config: Config, layers: range) -> set[int] | None:
    """Attention layers of a hybrid that does not list its layers; None of a model that is no hybrid."""
    found = None
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if config.has(name):
            found = set(config.integers(name))
    if (linear := _linear_attention(config)) is not None:
        full = linear.integers("full_attn_layers")
        if linear.has("kda_layers") and sorted(full + linear.integers("kda_layers")) != [layer + 1 for layer in layers]:
            raise config.error(f"full_attn_layers and kda_layers are not the {len(layers)} layers, each of them once")
        found = {layer - 1 for layer in full}
    elif config.has("attn_layer_period"):  # Jamba
        period, offset = config.integer("attn_layer_period"), config.keys.get("attn_layer_offset")
        if offset not in range(period):
            raise config.error(f"attn_layer_offset: got {offset!r}; expected an integer from 0 to {period - 1}")
        found = {layer for layer in layers if layer % period == offset}
    elif config.has("linear_num_value_heads") and found is None:  # Qwen3-Next, Qwen3.5
        interval = config.integer("full_attention_interval", default=4)
        found = {layer for layer in layers if (layer + 1) % interval == 0}
    if found is not None and not found <= set(layers):
        raise config.error(f"attention in the layers {sorted(found)}; expected some of the {len(layers)} layers")
    return found


def _sliding_pattern(config: Config, layers: range) -> list[tuple[str, ...]]:
    if not config.has("sliding_window") or config.keys.get("use_sliding_window") is False:
        return [("full",) for _ in layers]
    rule = model_types.RULES.get(config.model_type)
    if config.has("sliding_window_pattern"):  # Gemma 3, Cohere 2: each so many layers, one sees everything
        every = config.integer("sliding_window_pattern")
        slides = [(layer + 1) % every != 0 for layer in layers]
    elif rule == "even layers slide":
        slides = [layer % 2 == 0 for layer in layers]
    elif config.keys.get("use_sliding_window") is True:  # Qwen 2 and 3
        first = config.integer("max_window_layers", default=len(layers))
        slides = [layer >= first for layer in layers]
    elif rule == "slides":
        slides = [True for _ in layers]
    else:
        raise config.error(
            f"model type {config.model_type} has a sliding_window and does not say in which layers; add layer_types"
        )
    return [("sliding",) if slide else ("full",) for slide in slides]


@dataclass(frozen=True)
class State:
    """What one recurrent layer keeps of one sequence, on one rank."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Convolution window [channels, taps - 1] in the model's dtype; recurrent state, if any, in its own."""
    element_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all shapes."""
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, self.element_bytes, strict=True))


BLOCK = 16
"""Tokens of the smallest block of every attention kernel."""
MLA_BLOCK = 128
"""A block of MLA beside recurrent layers is a multiple of so many tokens (vLLM 0.32, `platforms/interface.py:1079`)."""


def hybrid_block_size(state_bytes: int, token_bytes: int, *, asked: int, latent: bool = False) -> int:
    """Return the tokens of a block that holds a state.

    `align = max(BLOCK, asked)`, `align * ceil(state / (align * token))`, rounded up to the kernels' block.

    Args:
        state_bytes: Of one sequence in one recurrent layer.
        token_bytes: Of K and V of one token in one attention layer.
        asked: The engine's block size, in tokens.
        latent: Whether the attention is MLA.
    """
    align = max(BLOCK, asked, MLA_BLOCK if latent else 0)
    tokens = align * -(-state_bytes // (align * token_bytes))
    return max(asked, BLOCK * -(-tokens // BLOCK))


def recurrent_state(config: Config, *, tp: int, dtype: str, ssm_dtype: str | None, drafts: int = 0) -> State:
    """Return the state of the recurrent layers of a model (shapes: vLLM 0.32, `mamba_utils.py:180-301`).

    Args:
        config: Of the model.
        tp: Ranks that share a layer.
        dtype: Of the model.
        ssm_dtype: Of the recurrent state; None takes the config's own, else the model's.
        drafts: Tokens that are drafted a step; the window of the convolution is so much longer, but for Mamba-1.

    Raises:
        InvalidFileError: the config names no recurrence that is described here.
        MisuseError: it cannot be shared by `tp` ranks.
    """
    recurrent = ssm_dtype or _own_state_dtype(config) or dtype
    name, channels, taps, inner = _describe(config, tp)
    if channels % tp or (inner and inner[0] % tp):
        heads = f" and {inner[0]} heads" if inner else ""
        raise MisuseError(f"--tp: got {tp}; expected a divisor of {channels} channels{heads}.")
    shapes: list[tuple[int, ...]] = [(channels // tp, taps - 1 + (0 if name == MAMBA_1 else drafts))]
    sizes = [ELEMENT_BYTES[dtype]]
    if inner:
        shapes.append((inner[0] // tp, *inner[1:]))
        sizes.append(ELEMENT_BYTES[str(recurrent)])
    return State(name, tuple(shapes), tuple(sizes))


def _own_state_dtype(config: Config) -> str | None:
    """The dtype of recurrent states as vLLM 0.32 takes it from the config; None is the model's.

    Raises:
        InvalidFileError: the config names a dtype that is none, or vLLM's use of its key is unknown.
    """
    if _linear_attention(config) is not None:
        return "float32"
    outer = config.outer or config.model_type
    named = [name for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype") if config.has(name)]
    if outer in model_types.STATE_DTYPES:
        key, default = model_types.STATE_DTYPES[outer]
        found = config.keys.get(key) or default
        if found is not None and found not in ELEMENT_BYTES:
            raise config.error(f"{key}: got {found!r}; expected one of {', '.join(ELEMENT_BYTES)}")
        return None if found is None else str(found)
    if outer not in model_types.STATES_IN_MODEL_DTYPE and (named or config.model_type == "nemotron_h"):
        says = ", ".join(f"{name}: {config.keys[name]}" for name in named) or "none"
        raise config.error(
            f"which dtype vLLM gives the states of model type {outer} is not described here (model_types.py); its "
            f"config says {says}. Give one: --ssm-dtype"
        )
    return None


MAMBA_1 = "Mamba"


def _groups(config: Config, tp: int) -> int:
    """Groups of B and C of Mamba-2; each rank needs those of its heads."""
    groups = config.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    return groups if groups % tp == 0 else tp


def _describe_alone(config: Config, tp: int) -> tuple[str, int, int, tuple[int, ...]]:
    """The same as `_describe`, of a model of Mamba layers alone, whose keys have other names."""
    size, taps = config.integer("state_size"), config.integer("conv_kernel", default=4)
    inner = config.integer("expand", default=2) * config.integer("hidden_size")
    if config.model_type != "mamba2":
        inner = config.integer("intermediate_size", default=inner)
        return MAMBA_1, inner, taps, (inner, size)
    heads = (config.integer("num_heads"), config.integer("head_dim"), size)
    return "Mamba-2", inner + 2 * _groups(config, tp) * size, taps, heads


def _describe(config: Config, tp: int) -> tuple[str, int, int, tuple[int, ...]]:
    """Name, channels of the convolution, its taps, and the shape of the recurrent state (its first axis is shared)."""
    if config.has("linear_num_value_heads"):
        key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
        key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
        channels = 2 * key_heads * key + value_heads * value
        return "gated delta net", channels, config.integer("linear_conv_kernel_dim"), (value_heads, value, key)
    if model_types.RULES.get(config.model_type) == "states":
        return _describe_alone(config, tp)
    if (linear := _linear_attention(config)) is not None:
        heads, size = linear.integer("num_heads"), linear.integer("head_dim")
        return "Kimi delta attention", 3 * heads * size, linear.integer("short_conv_kernel_size"), (heads, size, size)
    if config.has("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        heads = config.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
        size = config.integer("mamba_d_state", "ssm_state_size")
        if config.has("mamba_d_ssm"):
            inner = config.integer("mamba_d_ssm")
        elif config.has("mamba_head_dim"):
            inner = heads * config.integer("mamba_head_dim")
        else:
            inner = config.integer("mamba_expand") * config.integer("hidden_size")
        groups = _groups(config, tp)
        taps = config.integer("mamba_d_conv", "conv_kernel")
        return "Mamba-2", inner + 2 * groups * size, taps, (heads, inner // heads, size)
    if config.has("mamba_d_state"):
        inner = config.integer("mamba_expand") * config.integer("hidden_size")
        return MAMBA_1, inner, config.integer("mamba_d_conv"), (inner, config.integer("mamba_d_state"))
    if config.has("conv_L_cache"):
        return "short convolution", config.integer("conv_dim", "hidden_size"), config.integer("conv_L_cache"), ()
    raise config.error(
        f"model type {config.model_type} has recurrent layers, and their keys are not described here "
        f"(model_config.py): {_state_keys(config)}"
    )
