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

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import Case

_OPS = "vllm.v1.attention.ops"
SEGMENTS = 16
"""NUM_PAR_SOFTMAX_SEGMENTS of the backend."""
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


def version() -> str:
    """Return the version of the installed vLLM, or "missing"."""
    try:
        return str(_module("vllm.version").__version__)
    except PeerMissingError:
        return "missing"


def unified_attention(case: Case, query: torch.Tensor) -> Callable[..., None]:
    """Return a function (query, key, value, out, block_table, seq_lens, query_start_loc) for the case's shapes."""
    ops = _module(f"{_OPS}.triton_unified_attention")
    threshold = LEAST_PROGRAMS // case.num_kv_heads
    width = 1 << (case.head_size - 1).bit_length()
    shape = (threshold, case.num_q_heads, SEGMENTS)
    scratch = {
        "softmax_segm_output": query.new_empty((*shape, width), dtype=torch.float32),
        "softmax_segm_max": query.new_empty(shape, dtype=torch.float32),
        "softmax_segm_expsum": query.new_empty(shape, dtype=torch.float32),
    }
    one = torch.ones(1, device=query.device).expand(case.num_seqs, case.num_kv_heads)

    def run(query, key, value, out, *, block_table, seq_lens, query_start_loc) -> None:
        ops.unified_attention(
            q=query, k=key, v=value, out=out,
            cu_seqlens_q=query_start_loc, max_seqlen_q=case.query_len, seqused_k=seq_lens, max_seqlen_k=case.seq_len,
            softmax_scale=case.head_size**-0.5, causal=True, window_size=(-1, -1), block_table=block_table, softcap=0,
            q_descale=None, k_descale=one, v_descale=one,
            seq_threshold_3D=threshold, num_par_softmax_segments=SEGMENTS, **scratch,
        )  # fmt: skip

    return run


def x_packed(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy logical K and V caches into ROCM_ATTN's: K `[b, H, d/x, n, x]`, V `[b, H, d, n]`, x = 16 bytes."""
    x = 16 // key.element_size()
    packed = key.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    return packed, value.permute(0, 2, 3, 1).contiguous()


def _rocm_platform() -> Any:
    """Return vLLM's ROCm platform; off AMD machines, where it cannot be imported, a stand-in with the one function."""
    name = "vllm.platforms.rocm"
    if _module("vllm.platforms").current_platform.is_rocm():
        return _module(name)
    stand_in: Any = types.ModuleType(name)
    stand_in.use_rocm_custom_paged_attention = None
    return sys.modules.setdefault(name, stand_in)


def paged_attention_2d(case: Case, query: torch.Tensor) -> Callable[..., None]:
    """Return a function like that of `unified_attention`; it wants the caches of `x_packed`."""
    ops = _module(f"{_OPS}.chunked_prefill_paged_decode")
    rocm = _rocm_platform()
    one = torch.ones(1, device=query.device)

    def run(query, key, value, out, *, block_table, seq_lens, query_start_loc) -> None:
        with mock.patch.object(rocm, "use_rocm_custom_paged_attention", return_value=False):
            ops.chunked_prefill_paged_decode(
                query=query, key=None, value=None, output=out, kv_cache_dtype="auto", key_cache=key, value_cache=value,
                block_table=block_table, query_start_loc=query_start_loc, seq_lens=seq_lens, max_seq_len=case.seq_len,
                max_query_len=1, k_scale=one, v_scale=one, sm_scale=case.head_size**-0.5,
            )  # fmt: skip

    return run


@functools.cache
def _gather_module() -> Any:
    _module("vllm._aiter_ops")
    _module("vllm.model_executor.layers.attention")
    platform = _module("vllm.platforms").current_platform
    with mock.patch.object(type(platform), "is_rocm", return_value=True):
        return _module("vllm.v1.attention.backends.rocm_aiter_fa")


def gather() -> Callable[..., None]:
    """Return a function (key_cache, value_cache, key, value, block_table, cu_seq_lens, token_to_seq, seq_starts)."""
    backend = _gather_module()

    def run(key_cache, value_cache, key, value, block_table, cu_seq_lens, token_to_seq, seq_starts) -> None:
        backend.cp_mha_gather_cache(
            key_cache=key_cache, value_cache=value_cache, key=key, value=value, block_tables=block_table,
            k_scales=None, v_scales=None, cu_seqlens_kv=cu_seq_lens, token_to_batch=token_to_seq,
            seq_starts=seq_starts, dequant=False, kv_cache_layout="NHD", total_tokens=len(token_to_seq),
        )  # fmt: skip

    return run


def write() -> Callable[..., None]:
    """Return a function (key, value, key_cache, value_cache, slot_mapping)."""
    ops = _module(f"{_OPS}.triton_reshape_and_cache_flash")

    def run(key, value, key_cache, value_cache, slot_mapping) -> None:
        ops.triton_reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", None, None)

    return run
