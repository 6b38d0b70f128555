# SPDX-License-Identifier: Apache-2.0
"""Layers and batches that vLLM's ROCm backends are run with: what hybrids serve, and what the five reports saw."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

BATCHES = {
    "decode": ((1, 0), (1, 32), (1, 299)),
    "prefill": ((40, 0), (7, 0)),
    "mixed": ((1, 32), (1, 69), (20, 50), (9, 0)),
    "extend": ((24, 100), (5, 64)),
}
"""Sequences as (new tokens, tokens in the cache), in the order that vLLM sorts them: decodes, extends, prompts."""

BLOCKS = (16, 32, 64, 544, 784, 2048, 2144)
"""Hybrids inflate blocks until a page of attention holds a state of a state-space layer."""
WIDTHS = (64, 128, 256)


@dataclass(frozen=True)
class Case:
    """One layer, or two that share a pool, and the batches that it serves one after the other.

    Attributes:
        id: Its name.
        backend: As vLLM calls it.
        arch: Whose platform it is.
        batches: Keys of `BATCHES`.
        heads: Query heads of this rank.
        kv_heads: KV heads of this rank.
        head_size: Channels of a head.
        block_size: Tokens of a block of the manager.
        cache: `--kv-cache-dtype`.
        packed: Whether pages have room after them for a bigger page of another group, as in hybrids.
        window: Tokens that a row sees.
        softcap: Cap of the scores.
        sinks: Whether the layer has sinks.
        shuffle: Whether VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set.
        fused: Whether rope and the write to the cache are one operator.
        cross: Cross-attention beside a self-attention layer of this backend that shares its pool.
        dtype: Of the model.
        latent: Channels of a latent row of MLA, without and with position.
    """

    id: str
    backend: str
    arch: str = "gfx942"
    batches: tuple[str, ...] = ("prefill", "mixed", "extend", "decode")
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    block_size: int = 16
    cache: str = "auto"
    packed: bool = False
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    shuffle: bool = False
    fused: bool = False
    cross: str = ""
    dtype: str = "bfloat16"
    latent: tuple[int, int] = (512, 64)


def _grid(backend: str, blocks: tuple[int, ...], *, packed: tuple[bool, ...] = (False, True)) -> list[Case]:
    """Block sizes and head sizes, dense and packed."""
    return [
        Case(
            f"{backend}-block{block}-head{width}{'-packed' * gaps}",
            backend,
            block_size=block,
            head_size=width,
            packed=gaps,
        )
        for block, width, gaps in product(blocks, WIDTHS, packed)
    ]


def _features(backend: str, blocks: tuple[int, ...], *, packed: bool = True) -> list[Case]:
    """One feature at a time, on two block sizes."""
    cases = []
    for block in blocks:
        name = f"{backend}-block{block}"
        caches = ("fp8", "fp8_e5m2", "bfloat16")
        cases += [Case(f"{name}-cache-{cache}", backend, block_size=block, cache=cache) for cache in caches]
        cases.append(Case(f"{name}-float16", backend, block_size=block, dtype="float16"))
        cases.append(Case(f"{name}-window", backend, block_size=block, window=48))
        cases.append(Case(f"{name}-softcap", backend, block_size=block, softcap=30.0))
        cases.append(Case(f"{name}-sinks", backend, block_size=block, sinks=True))
        if packed:
            cases.append(Case(f"{name}-fp8-packed", backend, block_size=block, cache="fp8", packed=True))
        cases.append(Case(f"{name}-one-kv-head", backend, block_size=block, heads=16, kv_heads=1))
        cases.append(Case(f"{name}-fused", backend, block_size=block, fused=True))
        cases.append(Case(f"{name}-fused-fp8", backend, block_size=block, fused=True, cache="fp8"))
    return cases


def _shuffled(backend: str = "ROCM_AITER_FA") -> list[Case]:
    """The SHUFFLE packing of ROCM_AITER_FA."""
    cases = [
        Case(f"{backend}-shuffle-block{block}-head{width}", backend, block_size=block, head_size=width, shuffle=True)
        for block, width in product((16, 32), WIDTHS)
    ]
    cases += [
        Case(f"{backend}-shuffle-fp8", backend, cache="fp8", shuffle=True),
        Case(f"{backend}-shuffle-fp8-head256", backend, cache="fp8", head_size=256, shuffle=True),
        # Pages of another group after each page: no plane for each side is left.
        Case(f"{backend}-shuffle-packed-prompts", backend, packed=True, shuffle=True, batches=("prefill", "extend")),
        Case(f"{backend}-shuffle-window-prompts", backend, window=48, shuffle=True, batches=("prefill", "extend")),
        Case(f"{backend}-shuffle-softcap", backend, softcap=30.0, shuffle=True),
    ]
    return cases


def _latent(arch: str) -> list[Case]:
    """MLA: ranks of one head count and another, which kernels exist for and which are padded."""
    backend, cases = "ROCM_AITER_MLA", []
    for heads, cache in product((8, 12, 16, 24, 32, 64, 128), ("auto", "fp8")):
        name = f"{backend}-{arch}-heads{heads}{'-fp8' * (cache == 'fp8')}"
        cases.append(Case(name, backend, arch=arch, heads=heads, kv_heads=1, cache=cache))
    cases += [
        Case(f"{backend}-{arch}-block{block}", backend, arch=arch, heads=16, kv_heads=1, block_size=block)
        for block in (1, 64, 544, 2048)
    ]
    cases.append(Case(f"{backend}-{arch}-packed", backend, arch=arch, heads=16, kv_heads=1, packed=True))
    return cases


def _cross() -> list[Case]:
    """Encoder-decoder models: self-attention and cross-attention take blocks of one pool."""
    shape = {"cross": "ROCM_AITER_UNIFIED_ATTN", "batches": ("prefill", "decode"), "heads": 8, "head_size": 64}
    return [
        Case(f"cross-attention-{name}-kv{kv_heads}", own, kv_heads=kv_heads, **shape)
        for (name, own), kv_heads in product((("unified", "ROCM_AITER_UNIFIED_ATTN"), ("native", "ROCM_ATTN")), (2, 4))
    ]


CASES = (
    *_grid("ROCM_ATTN", BLOCKS),
    *_features("ROCM_ATTN", (16, 544)),
    *_grid("ROCM_AITER_UNIFIED_ATTN", BLOCKS),
    *_features("ROCM_AITER_UNIFIED_ATTN", (16, 544)),
    *_grid("ROCM_AITER_FA", (16, 32, 544, 2048, 2144), packed=(False,)),
    *_grid("ROCM_AITER_FA", (16, 32), packed=(True,)),
    *_features("ROCM_AITER_FA", (16, 32)),
    *_shuffled(),
    *_latent("gfx942"),
    *_latent("gfx950"),
    *_cross(),
)
