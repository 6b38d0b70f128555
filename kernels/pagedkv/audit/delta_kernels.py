# SPDX-License-Identifier: Apache-2.0
"""Cases of vLLM's gated delta rule (Qwen3-Next, Qwen3.5) and of Kimi Delta Attention, in ROCm's configurations.

Both are chunked scans of flash-linear-attention, which vLLM carries. The layers are those of Qwen3-Next-80B (16 key
heads, 32 value heads) and Kimi-Linear-48B (32 heads), all of 128 channels, in bfloat16 with states in float32.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import imports
from .mamba_kernels import DTYPE, POOL_BLOCKS, SEQUENCE_TOKENS, SEQUENCES, autotuned, configured

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import Case

CHUNK = 64
TOKENS = SEQUENCES * SEQUENCE_TOKENS
KEY_HEADS, HEADS, SIZE = 16, 32, 128
SCALE = SIZE**-0.5


def cases() -> list[Case]:
    """Prefill and decode of both, each kernel in every configuration.

    Raises:
        CannotRunHereError: vLLM is missing, or too different.
    """
    return [*_gated_delta_rule(), *_kimi_delta_attention(), *_decode()]


def _rows(heads: int, *size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """[1, tokens, heads, *size]: sequences packed in a batch of one."""
    return torch.empty(1, TOKENS, heads, *size, dtype=dtype)


def _packed() -> dict[str, Any]:
    """How the sequences are cut into chunks, as vLLM's metadata say it."""
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32) * SEQUENCE_TOKENS
    chunks = SEQUENCE_TOKENS // CHUNK
    pairs = [(sequence, chunk) for sequence in range(SEQUENCES) for chunk in range(chunks)]
    return {"cu_seqlens": starts, "chunk_indices": torch.tensor(pairs, dtype=torch.int32)}


def _tuned(kernel: Any, launch: Callable[[], object], variant: str = "") -> list[Case]:
    """Every configuration of a kernel whose autotuner, if it has one, stands behind its heuristics."""
    tuner = kernel if hasattr(kernel, "configs") else getattr(kernel, "fn", None)
    if hasattr(tuner, "configs"):
        return autotuned("vllm", tuner, launch, variant=variant)
    name = (tuner if hasattr(tuner, "__name__") else kernel).__name__
    return configured("vllm", name, launch, variant=variant)


def _gated_delta_rule() -> list[Case]:
    cumsum, kkt, solve, wy = (
        imports.vllm_delta(name) for name in ("cumsum", "chunk_scaled_dot_kkt", "solve_tril", "wy_fast")
    )
    delta, out, norm = (imports.vllm_delta(name) for name in ("chunk_delta_h", "chunk_o", "l2norm"))
    q, k, v, w = _rows(KEY_HEADS, SIZE), _rows(KEY_HEADS, SIZE), _rows(HEADS, SIZE), _rows(HEADS, SIZE)
    g, beta = (_rows(HEADS, dtype=torch.float32) for _ in "gb")
    chunks = _packed()
    states = torch.empty(1, TOKENS // CHUNK, HEADS, SIZE, SIZE, dtype=DTYPE)
    offsets = torch.arange(SEQUENCES + 1, dtype=torch.int32) * (SEQUENCE_TOKENS // CHUNK)
    initial = torch.empty(SEQUENCES, HEADS, SIZE, SIZE)
    products, inverse = _rows(HEADS, CHUNK, dtype=torch.float32), _rows(HEADS, CHUNK)
    options = {"initial_state": initial, "output_final_state": True, "chunk_offsets": offsets}
    return [
        *_tuned(cumsum.chunk_local_cumsum_scalar_kernel, partial(cumsum.chunk_local_cumsum, g, CHUNK, **chunks)),
        *_tuned(
            kkt.chunk_scaled_dot_kkt_fwd_kernel, partial(kkt.chunk_scaled_dot_kkt_fwd, k, g=g, beta=beta, **chunks)
        ),
        *_tuned(
            solve.merge_16x16_to_64x64_inverse_kernel,
            partial(solve.solve_tril, products, output_dtype=DTYPE, **chunks),
        ),
        *_tuned(wy.recompute_w_u_fwd_kernel, partial(wy.recompute_w_u_fwd, k, v, beta, g, inverse, **chunks)),
        *_tuned(
            delta.chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
            partial(delta.chunk_gated_delta_rule_fwd_h, k, w, v, g, **options, **chunks),
        ),
        *_tuned(out.chunk_fwd_kernel_o, partial(out.chunk_fwd_o, q, k, v, states, g, SCALE, **chunks)),
        *_tuned(norm.l2norm_fwd_kernel2, partial(norm.l2norm_fwd, q)),
    ]


def _kimi_delta_attention() -> list[Case]:
    """The kernels of its own; the states between chunks are those of `chunk_delta_h` with decays for each channel."""
    kda, delta = imports.vllm_delta("kda"), imports.vllm_delta("chunk_delta_h")
    q, k, v, out = (_rows(HEADS, SIZE) for _ in "qkvo")
    g, beta = _rows(HEADS, SIZE, dtype=torch.float32), _rows(HEADS, dtype=torch.float32)
    chunks = _packed()
    products, inverse = _rows(HEADS, CHUNK, dtype=torch.float32), _rows(HEADS, CHUNK)
    states = torch.empty(1, TOKENS // CHUNK, HEADS, SIZE, SIZE, dtype=DTYPE)
    inner, blocks = 16, CHUNK // 16
    grid = len(chunks["chunk_indices"])
    pair = {"q": q, "k": k, "g": g, "beta": beta, "A": products, "Aqk": products, "scale": SCALE, **chunks}
    pair |= {"T": TOKENS, "H": HEADS, "K": SIZE, "BT": CHUNK, "BC": inner}
    inter, intra = (
        getattr(kda, f"chunk_kda_scaled_dot_kkt_fwd_kernel_intra_sub_{name}") for name in ("inter", "intra")
    )
    heads, bias = torch.empty(HEADS), torch.empty(HEADS * SIZE)
    offsets = torch.arange(SEQUENCES + 1, dtype=torch.int32) * (SEQUENCE_TOKENS // CHUNK)
    options = {"initial_state": torch.empty(SEQUENCES, HEADS, SIZE, SIZE), "output_final_state": True, "use_exp2": True}
    return [
        *_tuned(kda.kda_gate_cumsum_fwd_kernel, partial(kda.fused_kda_gate_chunk_cumsum, q, heads, bias, **chunks)),
        *_tuned(inter, partial(inter[grid, blocks * blocks, HEADS], **pair, NC=blocks)),
        *_tuned(intra, partial(intra[grid, blocks, HEADS], **pair, BK=SIZE)),
        *_tuned(
            kda.recompute_w_u_fwd_kernel, partial(kda.recompute_w_u_fwd, k, v, beta, inverse, gk=g, **chunks), "-kda"
        ),
        *_tuned(
            delta.chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
            partial(delta.chunk_gated_delta_rule_fwd_h, k, k, v, gk=g, chunk_offsets=offsets, **options, **chunks),
            "-kda",
        ),
        *_tuned(
            kda.chunk_gla_fwd_kernel_o,
            partial(kda.chunk_gla_fwd_o_gk, q, v, g, inverse, states, out, SCALE, **chunks),
        ),
    ]


def _decode() -> list[Case]:
    """One token of each sequence, the state read and written in a pool above 2 GiB."""
    update = imports.vllm_delta("fused_sigmoid_gating")
    q, k, v = (torch.empty(1, SEQUENCES, heads, SIZE, dtype=DTYPE) for heads in (KEY_HEADS, KEY_HEADS, HEADS))
    per_head = [torch.empty(SEQUENCES, HEADS, dtype=DTYPE) for _ in "ab"]
    launch = partial(
        update.fused_sigmoid_gating_delta_rule_update,
        torch.empty(HEADS),
        *per_head,
        torch.empty(HEADS),
        *(q, k, v),
        scale=SCALE,
        initial_state=torch.empty(POOL_BLOCKS * 2, HEADS, SIZE, SIZE),
        cu_seqlens=torch.arange(SEQUENCES + 1, dtype=torch.int32),
        ssm_state_indices=torch.arange(1, SEQUENCES + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    return _tuned(update.fused_sigmoid_gating_delta_rule_update_kernel, launch)
