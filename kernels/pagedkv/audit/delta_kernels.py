# SPDX-License-Identifier: Apache-2.0
"""Cases of vLLM's gated delta rule (Qwen3-Next, Qwen3.5) and of Kimi Delta Attention, in ROCm's configurations.

Both are chunked scans of flash-linear-attention, which vLLM carries. The layers are those of Qwen3-Next-80B (16 key
heads, 32 value heads) and Kimi-Linear-48B (32 heads), all of 128 channels, in bfloat16 with states in float32.
"""

from __future__ import annotations

from functools import cache, partial
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
    return [*_gated_delta_rule(), *_kimi_delta_attention(), *_kimi_on_rocm(), *_decode(), *_kimi_decode()]


def _rows(heads: int, *size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """[1, tokens, heads, *size]: sequences packed in a batch of one."""
    return torch.empty(1, TOKENS, heads, *size, dtype=dtype)


def _packed() -> dict[str, Any]:
    """How the sequences are cut into chunks, as vLLM's metadata say it."""
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32) * SEQUENCE_TOKENS
    chunks = SEQUENCE_TOKENS // CHUNK
    pairs = [(sequence, chunk) for sequence in range(SEQUENCES) for chunk in range(chunks)]
    return {"cu_seqlens": starts, "chunk_indices": torch.tensor(pairs, dtype=torch.int32)}


@cache
def _states() -> torch.Tensor:
    return torch.empty(POOL_BLOCKS * 2 * HEADS, SIZE, SIZE)


def _pool(heads: int = HEADS) -> torch.Tensor:
    """[blocks, heads, SIZE, SIZE] above 2 GiB, the same memory for all cases."""
    return _states().view(-1, heads, SIZE, SIZE)


def _tuned(kernel: Any, launch: Callable[[], object], variant: str = "") -> list[Case]:
    """Every configuration of a kernel whose autotuner, if it has one, comes after its heuristics."""
    tuner: Any = kernel if hasattr(kernel, "configs") else getattr(kernel, "fn", None)
    if hasattr(tuner, "configs"):
        return autotuned("vllm", tuner, launch, variant=variant)
    name = (tuner if hasattr(tuner, "__name__") else kernel).__name__
    return configured("vllm", name, launch, variant=variant)


def _gated_delta_rule() -> list[Case]:
    """Cases of vLLM's kernels of a prefill of the gated delta rule."""
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


def _kimi_on_rocm() -> list[Case]:
    """Kimi's own copy of its kernels, which Kimi Linear takes on ROCm; those above are Bailing's."""
    chunk, intra = imports.vllm_delta("kimi.chunk"), imports.vllm_delta("kimi.chunk_intra")
    by_token = imports.vllm_delta("kimi.chunk_intra_token_parallel")
    q, k, v, out = (_rows(HEADS, SIZE) for _ in "qkvo")
    g, beta, chunks = _rows(HEADS, SIZE, dtype=torch.float32), _rows(HEADS, dtype=torch.float32), _packed()
    inverse, diagonal = _rows(HEADS, CHUNK), _rows(HEADS, 16, dtype=torch.float32)
    states = torch.empty(1, TOKENS // CHUNK, HEADS, SIZE, SIZE, dtype=DTYPE)
    pair = {"q": q, "k": k, "g": g, "beta": beta, "Aqk": inverse, "scale": SCALE, **chunks}
    pair |= {"T": TOKENS, "H": HEADS, "HV": HEADS, "K": SIZE, "BT": CHUNK, "BC": 16}
    grid, sub, solve = (
        len(chunks["chunk_indices"]),
        *(getattr(intra, f"chunk_kda_fwd_kernel_{name}") for name in ("intra_sub_chunk", "inter_solve_fused")),
    )
    gate = partial(
        chunk.fused_kda_gate_chunk_cumsum, q, _rows(HEADS), torch.empty(HEADS), torch.empty(HEADS * SIZE), **chunks
    )
    tokens = partial(
        by_token.chunk_kda_fwd_intra_token_parallel,
        q,
        k,
        g,
        beta,
        inverse,
        diagonal,
        SCALE,
        cu_seqlens=chunks["cu_seqlens"],
        chunk_size=CHUNK,
        sub_chunk_size=16,
    )
    return [
        *_tuned(chunk.kda_gate_chunk_cumsum_vector_kernel, gate, "-kimi"),
        *_tuned(sub, partial(sub[grid, CHUNK // 16, HEADS], **pair, Akk=diagonal, BK=SIZE, USE_GATHER=True), "-kimi"),
        *_tuned(by_token.chunk_kda_fwd_kernel_intra_token_parallel, tokens, "-kimi"),
        *_tuned(
            solve,
            partial(
                solve[grid, HEADS],
                **pair,
                Akkd=diagonal,
                Akk=inverse,
                USE_SAFE_GATE=True,
                SOLVE_TRIL_DOT_PRECISION="ieee",
            ),
            "-kimi",
        ),
        *_tuned(
            chunk.recompute_w_u_fwd_kernel,
            partial(chunk.recompute_w_u_fwd, k, v, beta, inverse, gk=g, **chunks),
            "-kimi",
        ),
        *_tuned(
            chunk.chunk_gla_fwd_kernel_o,
            partial(chunk.chunk_gla_fwd_o_gk, q, v, g, inverse, states, out, SCALE, **chunks),
            "-kimi",
        ),
    ]


def _kimi_decode() -> list[Case]:
    """A token of each sequence, and four with drafts: a launch depends on sequences times heads (4 heads: TP 8)."""
    module = imports.vllm_delta("kimi.fused_recurrent")

    def rows(count: int, heads: int) -> list[torch.Tensor]:
        """q, k, v, gates and betas."""
        return [torch.empty(1, count, heads, *size, dtype=DTYPE) for size in ([SIZE], [SIZE], [SIZE], [SIZE], [])]

    def weights(heads: int) -> list[torch.Tensor]:
        return [torch.empty(heads), torch.empty(heads * SIZE)]

    def step(sequences: int, heads: int, tokens: int) -> Callable[[], object]:
        ids, starts = (torch.empty(size, dtype=torch.int32) for size in ((sequences, tokens), (sequences + 1,)))
        accepted = {"num_accepted_tokens": torch.empty(sequences, dtype=torch.int32)} if tokens > 1 else {}
        return partial(
            module.fused_recurrent_kda,
            *rows(sequences * tokens, heads),
            *weights(heads),
            None,
            _pool(heads),
            starts,
            ids if tokens > 1 else ids[:, 0],
            **accepted,
        )

    ids = torch.empty(SEQUENCES, dtype=torch.int32)
    decode = partial(
        module.fused_recurrent_kda_packed_decode,
        torch.empty(SEQUENCES, 3 * HEADS * SIZE, dtype=DTYPE),
        *rows(SEQUENCES, HEADS)[3:],
        *weights(HEADS),
        None,
        _pool(),
        ids,
    )
    name = "fused_recurrent_kda_fwd_kernel"
    return [
        *configured("vllm", "fused_recurrent_kda_packed_decode_kernel", decode),
        *configured("vllm", name, step(SEQUENCES, HEADS, 1)),
        *configured("vllm", name, step(1, HEADS, 4), variant="-drafts-1x32"),
        *configured("vllm", name, step(4, 4, 4), variant="-drafts-4x4"),
        *configured("vllm", name, step(10, 4, 4), variant="-drafts-10x4"),
        *configured("vllm", name, step(SEQUENCES, HEADS, 4), variant="-drafts-16x32"),
    ]


def _decode() -> list[Case]:
    """One token of each sequence, the state read and written in a pool above 2 GiB; and what makes its inputs."""
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
        initial_state=_pool(),
        cu_seqlens=torch.arange(SEQUENCES + 1, dtype=torch.int32),
        ssm_state_indices=torch.arange(1, SEQUENCES + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    ids, gates = torch.empty(SEQUENCES, dtype=torch.int32), [each[None].float() for each in per_head]
    module, prepare = imports.vllm_delta("fused_recurrent"), imports.vllm_delta("fused_gdn_prefill_post_conv")
    rows = torch.empty(SEQUENCES, (2 * KEY_HEADS + HEADS) * SIZE, dtype=DTYPE)
    recurrent = partial(
        module.fused_recurrent_gated_delta_rule_fwd,
        q,
        k,
        v,
        *gates,
        SCALE,
        _pool(),
        cu_seqlens=torch.empty(SEQUENCES + 1, dtype=torch.int32),
        ssm_state_indices=ids,
        use_qk_l2norm_in_kernel=True,
    )
    packed = partial(
        module.fused_recurrent_gated_delta_rule_packed_decode,
        rows,
        *per_head,
        torch.empty(HEADS),
        torch.empty(HEADS),
        SCALE,
        _pool(),
        torch.empty(SEQUENCES, 1, HEADS, SIZE, dtype=DTYPE),
        ids,
        use_qk_l2norm_in_kernel=True,
    )
    post_conv = partial(
        prepare.fused_post_conv_prep, rows, *per_head, torch.empty(HEADS), torch.empty(HEADS), KEY_HEADS, SIZE, SIZE
    )
    return [
        *_tuned(update.fused_sigmoid_gating_delta_rule_update_kernel, launch),
        *_tuned(module.fused_recurrent_gated_delta_rule_fwd_kernel, recurrent),
        *configured("vllm", "fused_recurrent_gated_delta_rule_packed_decode_kernel", packed),
        *configured("vllm", "_fused_post_conv_kernel", post_conv),
    ]
