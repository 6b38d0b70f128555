# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Triton kernels, imported from the installed vLLM and called through its own launchers.

`kernel_unified_attention` gets the split-KV scratch that its backend (vllm/v1/attention/backends/triton_attn.py)
allocates, so that it takes the path it takes in vLLM. Two doors are closed off AMD machines and opened here for the
import alone: the ROCm gather is defined only where the platform says ROCm, and the launcher of
`kernel_paged_attention_2d` asks the ROCm platform whether a C++ kernel would do (here: no, so the Triton kernel runs).
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pagedkv.device import current
from pagedkv.fp8.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from pagedkv.cache.cache import PagedCache

    from .cases import BenchmarkCase

_OPS = "vllm.v1.attention.ops"
SEGMENTS = 16
"""NUM_PAR_SOFTMAX_SEGMENTS of the backend."""
VENDOR_BLOCK = 64
"""Tokens of a block of FlashMLA, which takes no others."""
LEAST_PROGRAMS = 128
"""MIN_LAUNCH_GRID_SIZE_2D of the backend: more sequences than this over the KV heads are not split."""


class PeerMissingError(Exception):
    """vLLM, or one of its kernels, cannot be imported here."""


@functools.cache
def _triton_utils() -> None:
    """Import `vllm.triton_utils` so that it keeps Triton where a CPU build of vLLM meets a GPU.

    Raises:
        PeerMissingError: vLLM is not installed, or it replaced its kernels with placeholders.
    """
    try:
        platforms = importlib.import_module("vllm.platforms")
        _ = platforms.current_platform  # resolved before the version is masked
        with mock.patch.object(platforms, "vllm_version_matches_substr", return_value=False):
            utils = importlib.import_module("vllm.triton_utils")
    except ImportError as error:
        raise PeerMissingError(
            f"vLLM cannot be imported: {error}. Install the vLLM release to compare with."
        ) from error
    if not utils.HAS_TRITON:
        raise PeerMissingError(
            "vLLM replaced its Triton kernels with placeholders: import nothing of vLLM before this."
        )


@functools.cache
def _module(name: str) -> Any:
    _triton_utils()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissingError(f"{name} cannot be imported: {error}") from error


def unified_attention(case: BenchmarkCase, query: Tensor, options: Mapping[str, Any]) -> Callable[..., None]:
    """Return a function (query, cache, metadata, out) for the case's shapes; `options` are those of ours."""
    ops = _module(f"{_OPS}.triton_unified_attention")
    mode = _module("vllm.v1.kv_cache_interface").KVQuantMode
    threshold = LEAST_PROGRAMS // case.num_kv_heads
    width = 1 << (case.head_size - 1).bit_length()
    shape = (threshold, case.num_q_heads, SEGMENTS)
    scratch = {
        "softmax_segm_output": query.new_empty((*shape, width), dtype=torch.float32),
        "softmax_segm_max": query.new_empty(shape, dtype=torch.float32),
        "softmax_segm_expsum": query.new_empty(shape, dtype=torch.float32),
    }
    one = torch.ones(1, device=query.device)
    max_seq_len, max_query_len = (max(lens) for lens in zip(*case.lens, strict=True))
    window = case.window - 1 if case.window else -1

    def run(query, cache, metadata, out) -> None:
        key, value, key_scale, value_scale, scales = cache.key, cache.value, one, one, {}
        if cache.quantisation is not None:
            quantisation = cache.quantisation
            key, value = (side.view(FORMATS[quantisation.format].dtype) for side in (key, value))
            key_scale, value_scale = quantisation.key_scale, quantisation.value_scale
            scales = {"kv_quant_mode": mode.FP8_PER_TENSOR}
            if quantisation.per_token:
                scales = {"k_scale_cache": key_scale, "v_scale_cache": value_scale}
                scales |= {"kv_quant_mode": mode.FP8_PER_TOKEN_HEAD}
                key_scale = value_scale = one
        per_head = (len(case.lens), case.num_kv_heads)
        ops.unified_attention(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=metadata["query_start_loc"],
            max_seqlen_q=max_query_len,
            seqused_k=metadata["seq_lens"],
            max_seqlen_k=max_seq_len,
            softmax_scale=case.head_size**-0.5,
            causal=True,
            window_size=(window, 0 if case.window else -1),
            block_table=metadata["block_table"],
            softcap=options.get("softcap", 0),
            sinks=options.get("sinks"),
            q_descale=None,
            k_descale=key_scale.expand(per_head),
            v_descale=value_scale.expand(per_head),
            **scales,
            seq_threshold_3D=threshold if case.num_splits is None else None,
            num_par_softmax_segments=SEGMENTS,
            **scratch,
        )

    return run


def _rocm_platform() -> Any:
    """Return vLLM's ROCm platform; off AMD machines, where it cannot be imported, a stand-in with the one function."""
    name = "vllm.platforms.rocm"
    if _module("vllm.platforms").current_platform.is_rocm():
        return _module(name)
    stand_in: Any = types.ModuleType(name)
    stand_in.use_rocm_custom_paged_attention = None
    return sys.modules.setdefault(name, stand_in)


def paged_attention_2d(case: BenchmarkCase, query: Tensor) -> Callable[..., None]:
    """Return a function (query, cache, metadata, out); it wants the cache in the native packing."""
    ops = _module(f"{_OPS}.chunked_prefill_paged_decode")
    rocm = _rocm_platform()
    one = torch.ones(1, device=query.device)

    def run(query, cache, metadata, out) -> None:
        with mock.patch.object(rocm, "use_rocm_custom_paged_attention", return_value=False):
            ops.chunked_prefill_paged_decode(
                query=query,
                key=None,
                value=None,
                output=out,
                kv_cache_dtype="auto",
                key_cache=cache.key,
                value_cache=cache.value,
                **metadata,
                max_seq_len=case.seq_len,
                max_query_len=1,
                k_scale=one,
                v_scale=one,
                sm_scale=case.head_size**-0.5,
            )

    return run


def mla_decode(case: BenchmarkCase, query: Tensor, seq_lens: Tensor, scale: Tensor | None) -> Callable[..., None]:
    """Return a function (query, cache, block_table, out) with the splits and the scratch of the TRITON_MLA backend.

    The cache is `[num_blocks, block_size, 1, head_size]`; the scale is that of one of FP8.
    """
    ops = _module(f"{_OPS}.triton_decode_attention")
    backend = _module("vllm.v1.attention.backends.mla.triton_mla")
    splits = backend._compute_num_kv_splits(case.seq_len, current().compute_units)  # noqa: SLF001
    logits = query.new_empty((*query.shape[:2], splits, case.latent_size + 1), dtype=torch.float32)
    lse = query.new_empty(query.shape[:2])
    scale = torch.ones((), device=query.device) if scale is None else scale

    def run(query, cache, block_table, out) -> None:
        ops.decode_attention_fwd(
            query,
            cache,
            cache[..., : case.latent_size],
            out,
            lse,
            block_table,
            seq_lens,
            logits,
            splits,
            case.head_size**-0.5,
            case.block_size,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )

    return run


def ssd(case: BenchmarkCase, starts: Tensor, *, A: Tensor, D: Tensor) -> Callable[..., None]:
    """Return a function (x, dt, B, C, initial, states, out); Triton tunes it at its first call.

    It returns a tensor of its own for the states, so that nothing is written to `states`.
    """
    ops = _module("vllm.model_executor.layers.mamba.ops.ssd_combined")
    chunks_of_each = -(-case.seq_len // case.block_size)
    begins = [start + case.block_size * chunk for start in starts.tolist()[:-1] for chunk in range(chunks_of_each)]
    as_index = functools.partial(torch.tensor, device=starts.device, dtype=torch.int32)
    chunks = {
        "cu_seqlens": starts,
        "cu_chunk_seqlens": as_index([*begins, int(starts[-1])]),
        "seq_idx": as_index([sequence for sequence in range(case.num_seqs) for _ in range(chunks_of_each)]),
        "last_chunk_indices": as_index(range(chunks_of_each - 1, len(begins), chunks_of_each)),
    }

    def run(x, dt, B, C, initial, _, out) -> None:
        ops._mamba_chunk_scan_combined_fwd(  # noqa: SLF001
            x, dt, A, B, C, case.block_size, out, D=D, initial_states=initial, state_dtype=torch.float32, **chunks
        )

    return run


def gdn(
    case: BenchmarkCase,
    starts: Tensor,
    sources: Tensor,
    known: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    flashinfer: bool = False,
) -> Callable[..., None]:
    """Return a function (mixed, a, b, pool, out), as vLLM's layer calls its kernels; Triton tunes at its first call.

    Chunks are listed before, as vLLM's metadata builder does once a step. The states after lie `case.num_seqs` blocks
    farther than those before. With `flashinfer` its kernel is between the same others, as by default on Hopper.
    """
    rule = _module("flashinfer.gdn_prefill").chunk_gated_delta_rule if flashinfer else None
    ends = starts.long()
    ops = _module("vllm.third_party.flash_linear_attention.ops")
    of_each = -(-case.seq_len // _module(f"{ops.__name__}.utils").FLA_CHUNK_SIZE)
    pairs = [(sequence, number) for sequence in range(case.num_seqs) for number in range(of_each)]
    as_index = functools.partial(torch.tensor, device=starts.device, dtype=torch.int32)
    chunks = {
        "cu_seqlens": starts,
        "chunk_indices": as_index(pairs),
        "chunk_offsets": as_index([of_each * sequence for sequence in range(case.num_seqs + 1)]),
    }
    targets = sources + case.num_seqs

    def run(mixed, a, b, pool, out) -> None:
        q, k, v, g, beta = (
            each[None]
            for each in ops.fused_post_conv_prep(
                mixed, a, b, A_log, dt_bias, case.num_kv_heads, case.state_size, case.head_size
            )
        )
        initial = pool[sources]
        initial[~known, ...] = 0
        if rule is not None:
            given = {"initial_state": initial, "output_final_state": True, "cu_seqlens": ends}
            out[:], pool[targets] = rule(q[0], k[0], v[0], torch.exp(g[0]), beta[0].float(), **given)
            return
        rows, states = ops.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=False, **chunks
        )
        pool[targets] = states
        out[:] = rows[0]

    return run


def kda(
    case: BenchmarkCase, starts: Tensor, sources: Tensor, known: Tensor, *, A_log: Tensor, dt_bias: Tensor
) -> Callable[..., None]:
    """Return a function with the arguments of `gdn`'s, as Kimi Linear's layer calls its kernels on this platform.

    There the convolution writes q, k and v apart: they are copied once for each set of inputs, before the first call of
    a graph is captured.
    """
    platform = "amd" if torch.version.hip else "nvidia"
    ops = _module(f"vllm.models.kimi_k3.{platform}.ops.third_party.kda")
    gather = _module("vllm.model_executor.layers.mamba.ops.gather_initial_states").gather_initial_states
    targets, widths = sources + case.num_seqs, [case.num_q_heads * case.state_size] * 3
    dense: dict[int, list[Tensor]] = {}

    def run(mixed, a, b, pool, out) -> None:
        if mixed.data_ptr() not in dense:
            parts = mixed.split(widths, dim=1)
            dense[mixed.data_ptr()] = [each.unflatten(1, (case.num_q_heads, -1)).contiguous()[None] for each in parts]
        _, states = ops.chunk_kda_with_fused_gate(
            *dense[mixed.data_ptr()],
            raw_g=a[None],
            raw_beta=b[None],
            A_log=A_log,
            g_bias=dt_bias,
            initial_state=gather(pool, sources, known),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
            out=out[None],  # vLLM's layer has it write over v, and copies
        )
        pool[targets] = states

    return run


def gdn_decode(case: BenchmarkCase, *, A_log: Tensor, dt_bias: Tensor) -> Callable[..., None]:
    """Return a function (step, layer, out) of `GdnStep` and `GdnLayer`; with drafts a sequence has a state a token."""
    ops = "vllm.third_party.flash_linear_attention.ops"
    decoding, verifying = _module(f"{ops}.fused_recurrent"), _module(f"{ops}.fused_sigmoid_gating")

    def decode(step, layer, out) -> None:
        decoding.fused_recurrent_gated_delta_rule_packed_decode(
            step.mixed,
            step.a,
            step.b,
            A_log,
            dt_bias,
            case.state_size**-0.5,
            layer.pool,
            out[:, None],
            layer.indices[:, 0],
            use_qk_l2norm_in_kernel=True,
        )

    def verify(step, layer, out) -> None:
        found, _ = verifying.fused_sigmoid_gating_delta_rule_update(
            A_log,
            step.a[None],
            step.b[None],
            dt_bias,
            *(each[None] for each in step.dense),
            initial_state=layer.pool,
            cu_seqlens=step.starts,
            ssm_state_indices=layer.indices,
            num_accepted_tokens=step.accepted,
            use_qk_l2norm_in_kernel=True,
        )
        out.set_(found[0])  # it returns a tensor of its own: no copy is timed

    return decode if case.query_len == 1 else verify


@functools.cache
def _aiter_backend() -> Any:
    _module("vllm._aiter_ops")
    _module("vllm.model_executor.layers.attention")
    platform = _module("vllm.platforms").current_platform
    with mock.patch.object(type(platform), "is_rocm", return_value=True):
        return _module("vllm.v1.attention.backends.rocm_aiter_fa")


def _in_rows(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Return the planes of a shuffle cache under the shape of rows, as vLLM hands them to its shuffle kernels."""
    shape = (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_size)
    return cache.key.view(shape), cache.value.view(shape)


def gather() -> Callable[..., None]:
    """Return a function (cache, key, value, block_table, cu_seq_lens, token_to_seq, seq_starts)."""
    backend = _aiter_backend()

    def run(cache, key, value, block_table, cu_seq_lens, token_to_seq, seq_starts) -> None:
        key_cache, value_cache = _in_rows(cache) if cache.packing == "shuffle" else (cache.key, cache.value)
        backend.cp_mha_gather_cache(
            key_cache=key_cache,
            value_cache=value_cache,
            key=key,
            value=value,
            block_tables=block_table,
            k_scales=None,
            v_scales=None,
            cu_seqlens_kv=cu_seq_lens,
            token_to_batch=token_to_seq,
            seq_starts=seq_starts,
            dequant=False,
            kv_cache_layout="SHUFFLE" if cache.packing == "shuffle" else "NHD",
            total_tokens=len(token_to_seq),
        )

    return run


def write() -> Callable[..., None]:
    """Return a function (key, value, cache, slot_mapping); vLLM has one kernel for rows and native, one for shuffle."""
    ops = _module(f"{_OPS}.triton_reshape_and_cache_flash")

    def run(key, value, cache, slot_mapping) -> None:
        if cache.packing == "shuffle":
            sides = _in_rows(cache)
            _aiter_backend().reshape_and_cache_shuffle_triton(key, value, *sides, slot_mapping, "auto", None, None)
        else:
            sides = (cache.key, cache.value)
            ops.triton_reshape_and_cache_flash(key, value, *sides, slot_mapping, "auto", None, None)

    return run


def vendor_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of whole prompts by the vendor's library, `[num_seqs, heads, tokens, head_size]`.

    That of NVIDIA is cuDNN, asked for by torch; elsewhere torch chooses among its own.
    """
    backends = torch.nn.attention.SDPBackend
    chosen = [backends.CUDNN_ATTENTION] if torch.version.cuda else [backends.FLASH_ATTENTION, backends.MATH]
    with torch.nn.attention.sdpa_kernel(chosen):
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=True)


def vendor_mla(case: BenchmarkCase, seq_lens: Tensor) -> Callable[..., None]:
    """Return a function (query, cache, out) of FlashMLA, which vLLM's wheel for Hopper holds.

    The cache is `[num_blocks, VENDOR_BLOCK, 1, head_size]`, sequence after sequence. Its schedule is made at the first
    call and serves all of a step's layers.

    Raises:
        PeerMissingError: This build of vLLM, or this GPU, has none.
    """
    ops = _module(f"{_OPS}.flashmla")
    there, why_not = ops.is_flashmla_dense_supported()
    if not there:
        raise PeerMissingError(f"FlashMLA cannot run: {why_not}")
    blocks = -(-case.seq_len // VENDOR_BLOCK)
    table = torch.arange(case.num_seqs * blocks, device=seq_lens.device, dtype=torch.int32).view(case.num_seqs, blocks)
    schedule, _ = ops.get_mla_metadata()

    def run(query, cache, out) -> None:
        ops.flash_mla_with_kvcache(
            q=query[:, None],
            k_cache=cache,
            block_table=table,
            cache_seqlens=seq_lens,
            head_dim_v=case.latent_size,
            tile_scheduler_metadata=schedule,
            softmax_scale=case.head_size**-0.5,
            causal=True,
            out=out[:, None],
        )

    return run
