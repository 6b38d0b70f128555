"""Block size of a model whose attention shares its pool with Mamba or linear attention layers.

A block of attention must be at least as large as the state of one sequence in a recurrent layer, because both are the
same bytes. vLLM 0.32 (`platforms/interface.py:938`) takes the smallest multiple of the kernels' block size that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import MisuseError
from .request import ELEMENT_BYTES

if TYPE_CHECKING:
    from .model_config import Config


@dataclass(frozen=True)
class State:
    """What one recurrent layer keeps of one sequence, on one rank."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Convolution window [channels, taps - 1] in the model's dtype; recurrent state, if any, in its own."""
    element_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all shapes."""
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, self.element_bytes, strict=True))


def block_size(state_bytes: int, token_bytes: int, *, asked: int, kernel_block: int = 16) -> int:
    """Return the tokens of a block that holds a state.

    `align = max(kernel_block, asked)`, `align * ceil(state / (align * token))`, rounded up to the kernels' block.

    Args:
        state_bytes: Of one sequence in one recurrent layer.
        token_bytes: Of K and V of one token in one attention layer.
        asked: The engine's block size, in tokens.
        kernel_block: Smallest block of every attention kernel, in tokens.
    """
    align = max(kernel_block, asked)
    tokens = align * -(-state_bytes // (align * token_bytes))
    return max(asked, kernel_block * -(-tokens // kernel_block))


def state(config: Config, *, tp: int, dtype: str, ssm_dtype: str | None) -> State:
    """Return the state of the recurrent layers of a model (shapes: vLLM 0.32, `mamba_utils.py:180-301`).

    Args:
        config: Of the model.
        tp: Ranks that share a layer.
        dtype: Of the model.
        ssm_dtype: Of the recurrent state; None takes the config's own, else the model's.

    Raises:
        ConfigError: the config names no recurrence that is described here.
        MisuseError: it cannot be shared by `tp` ranks.
    """
    own = config.keys.get("mamba_ssm_dtype") or config.keys.get("mamba_ssm_cache_dtype")
    recurrent = ssm_dtype or (own if own in ELEMENT_BYTES else dtype)
    name, channels, taps, inner = _describe(config, tp)
    if channels % tp or (inner and inner[0] % tp):
        raise MisuseError(f"--tp: got {tp}; expected a divisor of {channels} channels and {inner[:1]} heads.")
    shapes: list[tuple[int, ...]] = [(channels // tp, taps - 1)]
    sizes = [ELEMENT_BYTES[dtype]]
    if inner:
        shapes.append((inner[0] // tp, *inner[1:]))
        sizes.append(ELEMENT_BYTES[str(recurrent)])
    return State(name, tuple(shapes), tuple(sizes))


def _describe(config: Config, tp: int) -> tuple[str, int, int, tuple[int, ...]]:
    """Name, channels of the convolution, its taps, and the shape of the recurrent state (its first axis is shared)."""
    if config.has("linear_num_value_heads"):
        key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
        key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
        channels = 2 * key_heads * key + value_heads * value
        return "gated delta net", channels, config.integer("linear_conv_kernel_dim"), (value_heads, value, key)
    if config.has("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        heads = config.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
        size = config.integer("mamba_d_state", "ssm_state_size")
        inner = _mamba2_inner(config, heads)
        groups = config.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
        groups += 0 if groups % tp == 0 else tp - groups  # each rank needs the groups of its heads
        taps = config.integer("mamba_d_conv", "conv_kernel")
        return "Mamba-2", inner + 2 * groups * size, taps, (heads, inner // heads, size)
    if config.has("mamba_d_state"):
        inner = config.integer("mamba_expand") * config.integer("hidden_size")
        return "Mamba", inner, config.integer("mamba_d_conv"), (inner, config.integer("mamba_d_state"))
    if config.has("conv_L_cache"):
        return "short convolution", config.integer("conv_dim", "hidden_size"), config.integer("conv_L_cache"), ()
    raise config.error(f"model type {config.model_type} has recurrent layers that are not described here (hybrid.py)")


def _mamba2_inner(config: Config, heads: int) -> int:
    if config.has("mamba_d_ssm"):
        return config.integer("mamba_d_ssm")
    if config.has("mamba_head_dim"):
        return heads * config.integer("mamba_head_dim")
    return config.integer("mamba_expand") * config.integer("hidden_size")
