# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers with an FP8 cache or with a lost block, in plain torch: the reference of tests.

Codes are torch's; nothing here is of ours. Every key and value is rounded, those of the newest tokens too: our backend
writes them before it attends, in prompts and chunks as in decode, and reads nothing but the cache.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

if TYPE_CHECKING:
    from collections.abc import Callable

GFX = torch.cuda.get_device_properties(0).gcnArchName if torch.version.hip and torch.cuda.is_available() else ""
E4M3 = "e4m3fnuz" if GFX.startswith("gfx94") else "e4m3fn"
"""The 8-bit format that the device computes with: MI300 has one of its own."""


def rounded(rows: torch.Tensor, *, per_token: bool = False, kind: str = E4M3) -> torch.Tensor:
    """The values that codes of `rows` [..., head_size] mean, in the dtype of `rows`.

    Args:
        rows: Keys or values.
        per_token: Whether each row has a scale of its own; else the scale is 1.
        kind: Format of the codes, as torch and `pagedkv` name it. What is larger than its largest value becomes that.
    """
    form = getattr(torch, f"float8_{kind}")
    largest = torch.finfo(form).max
    scale = (rows.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-6) if per_token else torch.ones(())
    codes = (rows / scale).float().clamp(-largest, largest).to(form)
    return codes.to(rows.dtype) * scale.to(rows.dtype)


def through(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A model's own eager attention over a cache that makes `change(rows)` of keys and of values."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, change(key), change(value), mask, **kwargs)

    return attend


def register(name: str, attend: Callable[..., Any]) -> str:
    """Let models attend so: `model.set_attn_implementation(name)`. Returns the name."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)  # without it the mask is None
    return name


def nudged(by: float) -> str:
    """Name of an attention whose keys and values are moved before they are rounded.

    Whatever is so near the boundary of a code that another order of summation would round it to the other is rounded to
    the other; by one sign those below it, by the other those above.

    Args:
        by: Away from zero, as a share of the largest channel of the row; less than 0 for towards zero. The error of a
            sum goes with its summands, and they are alike in a row, however small the sum.
    """

    def move(rows: torch.Tensor) -> torch.Tensor:
        return rounded(rows + by * rows.sign() * rows.abs().amax(-1, keepdim=True))

    return register(f"fp8 moved by {by}", through(move))


def noted(into: list[torch.Tensor]) -> str:
    """Name of an attention that rounds nothing and notes keys and values, two tensors a layer, in float64."""

    def note(rows: torch.Tensor) -> torch.Tensor:
        into.append(rows.double())
        return rows

    return register("noted", through(note))


def without_keys(hidden: range, kept: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Name of an attention that hides some keys from the queries after them; `kept` is what a cache makes of keys."""

    def attend(_module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_kwargs: Any) -> Any:
        mask = mask.clone()
        mask[..., hidden.stop :, hidden.start : hidden.stop] = torch.finfo(mask.dtype).min
        key, value = (kept(rows).repeat_interleave(query.shape[1] // rows.shape[1], 1) for rows in (key, value))
        weights = (query @ key.mT * scaling + mask).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return register("without_keys", attend)


KEPT = {"eager": torch.Tensor.clone, "fp8": rounded, "fp8_per_token_head": partial(rounded, per_token=True)}
"""What a cache makes of keys and of values, by vLLM's `kv_cache_dtype`: codes with the scale 1, or with one for each
token and head. Each is the name of an attention, too, of which "eager" is the model's own, with nothing rounded."""

for _name, _change in KEPT.items():
    if _name != "eager":
        register(_name, through(_change))
