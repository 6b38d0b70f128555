# SPDX-License-Identifier: Apache-2.0
"""The scales of a quantised cache as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import triton
import triton.language as tl

from pagedkv.attention.softmax import compiled_for
from pagedkv.fp8.formats import FORMATS, decode, encode, narrowed

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.arch import Arch
    from pagedkv.cache.cache import PagedCache

ScaleKind = Literal["none", "per_head", "per_token"]
"""KV_SCALES of the kernels: not quantised; a scale for each head (or one for all); a scale for each token and head."""


@dataclass(frozen=True)
class KernelScales:
    """Arguments that stand for a cache's `Quantisation`, beside `PagedCache.scales`."""

    kind: ScaleKind
    format: str
    """One of `fp8.formats.FORMATS`; "" where the cache is not quantised."""
    largest: float
    """Largest finite value of the format."""
    strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Strides of block, token and head, in elements, of K and of V; 0 where a scale does not depend on the axis."""

    def native_on(self, arch: Arch) -> bool:
        """Whether the device converts the format itself: NATIVE_FP8 of the kernels."""
        return self.kind != "none" and self.format == arch.native_fp8


def kernel_scales(cache: PagedCache) -> KernelScales:
    """Return the kernel arguments of a cache that `cache.checks.whole` has accepted."""
    if cache.quantisation is None:
        return KernelScales("none", "", 0.0, ((0, 0, 0), (0, 0, 0)))
    quantisation = cache.quantisation
    return KernelScales(
        "per_token" if quantisation.per_token else "per_head",
        quantisation.format,
        FORMATS[quantisation.format].max,
        (_strides(quantisation.key_scale), _strides(quantisation.value_scale)),
    )


def _strides(scale: Tensor) -> tuple[int, int, int]:
    if scale.dim() == 3:
        block, token, head = scale.stride()
        return block, token, head
    return 0, 0, scale.stride(0) if scale.numel() > 1 else 0


@triton.jit
def decoded(code, FP8_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of uint8 codes in DTYPE, by the device's own conversion if NATIVE_FP8, or `formats.decode`."""
    if NATIVE_FP8:
        KIND: tl.constexpr = tl.float8e4nv if FP8_FORMAT == "e4m3fn" else tl.float8e4b8
        if compiled_for("gfx950"):
            # v_cvt_scalef32_pk_f16_fp8 and _bf16_fp8: two codes at once, and a NaN stays one. Triton 3.6.0 keeps the
            # conversions of the first arch that a process compiles for: after gfx942 there would be software here,
            # which turns NaN into 480 in bf16 (found by executing it). On a machine with gfx950 that does not happen.
            value = code.to(KIND, bitcast=True).to(DTYPE)
        else:
            # By way of fp32, which is what gfx942's instructions give.
            value = narrowed(code.to(KIND, bitcast=True).to(tl.float32), DTYPE)
    else:
        value = decode(code, FP8_FORMAT, DTYPE)
    return value


@triton.jit
def operand(stored, KV_SCALES: tl.constexpr, FP8_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Return an operand of a dot product: a tile of the cache as it is, or its decoded codes."""
    return stored if KV_SCALES == "none" else decoded(stored, FP8_FORMAT, NATIVE_FP8, DTYPE)


@triton.jit
def row_unit(largest):
    """Return the power of two of each row's `largest` element [rows], relative to which a query holds in fp16."""
    bits = largest.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), 1e-30)


@triton.jit
def half_of(pair, HIGH: tl.constexpr, FP8_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Return in fp16 the values of the low or HIGH codes of int16 pairs, by `decoded` or in CUDA's instructions."""
    if NATIVE_FP8:
        # Two codes to neighbouring bytes, and both converted at once (PTX ISA, prmt and cvt.rn.f16x2.e4m3x2).
        PICK: tl.constexpr = "0x4431" if HIGH else "0x4420"
        value = tl.inline_asm_elementwise(
            "{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, "
            + PICK
            + "; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}",
            "=r,r",
            [pair],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        code = pair >> 8 if HIGH else pair
        value = decode((code & 255).to(tl.uint8), FP8_FORMAT, tl.float16)
    return value


@triton.jit
def dequantised(
    stored, scale, mask, KV_SCALES: tl.constexpr, FP8_FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, OUT: tl.constexpr
):
    """Return rows [rows, channels] of the cache as numbers of dtype OUT; `scale` [rows] points at their scales."""
    if KV_SCALES != "none":
        factor = tl.load(scale, mask=mask, other=1.0)[:, None]
        stored = (decoded(stored, FP8_FORMAT, NATIVE_FP8, tl.float32) * factor).to(OUT)
    return stored


@triton.jit
def row_scale(x, FP8_MAX: tl.constexpr):
    """Return the scale [rows] with which each row of `x` [rows, channels] fp32 fills the range of the format.

    `max(absmax / FP8_MAX, 1e-6)`, as vLLM's per-token-head caches have it. NaN does not count, and an infinity counts
    as the largest finite number, so that the scale stays finite. The quotient is correctly rounded (a plain division
    errs by two units on NVIDIA, `div.full.f32`): a scale has the same bits on every platform.
    """
    absmax = tl.max(tl.where(tl.abs(x) >= 0.0, tl.abs(x), 0.0), axis=1)
    return tl.maximum(tl.div_rn(tl.minimum(absmax, 3.4028234663852886e38), FP8_MAX), 1e-6)


@triton.jit
def quantised(x, scale, mask, KV_SCALES: tl.constexpr, FP8_FORMAT: tl.constexpr, FP8_MAX: tl.constexpr):
    """Return rows `x` [rows, channels] as the cache holds them: unchanged, or as FP8 codes.

    `scale` [rows] points at their scales. Scales per token are computed from whole rows, and stored where `mask` is.
    """
    if KV_SCALES != "none":
        x = x.to(tl.float32)
        if KV_SCALES == "per_token":
            divisor = row_scale(x, FP8_MAX)
            tl.store(scale, divisor, mask=mask)
        else:
            divisor = tl.load(scale, mask=mask, other=1.0)
        x = encode(tl.div_rn(x, divisor[:, None]), FP8_FORMAT)
    return x
