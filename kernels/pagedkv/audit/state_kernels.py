# SPDX-License-Identifier: Apache-2.0
"""Cases of vLLM's kernels that copy Mamba states between blocks of the pool, for the prefix cache of hybrids."""

# ruff: noqa: SLF001 - the kernels are private names of vLLM

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import torch

from . import imports
from .mamba_kernels import DTYPE, POOL_BLOCKS, SEQUENCES, Layer, configured

if TYPE_CHECKING:
    from .cases import Case


def cases() -> list[Case]:
    """Copies before and after a step, with and without drafts, and what decides on them.

    Both versions of vLLM's model runner launch them, and a page may hold the convolution's tokens or channels first.

    Raises:
        CannotRunHereError: vLLM is missing, or too different.
    """
    layer = Layer()
    module, checkpoint = imports.vllm_worker("mamba_utils"), imports.vllm("ssd_checkpoint")
    hybrid, recover = (imports.vllm_worker(f"gpu.model_states.{name}") for name in ("mamba_hybrid", "recoverssm"))
    kinds = {"v2": torch.empty(SEQUENCES, dtype=torch.int32), "v1": None}  # the index of requests
    ids = torch.empty(SEQUENCES, dtype=torch.int32)
    states = 2 * 24  # of as many layers, a convolution and a recurrent state each
    words, halves = torch.empty(states, dtype=torch.int64), torch.empty(states, dtype=torch.int32)
    context = module.MambaSpecDecodeGPUContext(
        state_base_addrs=words,
        state_block_strides=words,
        state_elem_sizes=halves,
        state_inner_sizes=words,
        state_conv_widths=halves,
        state_group_indices=halves,
        state_dim_row_count=halves,
        state_dim_row_stride=words,
        block_size=528,
        num_states=states,
        mamba_group_ids=[0],
        num_groups=1,
        num_accepted_tokens_out=ids.clone(),
        block_table_ptrs=words[:1],
        aligned_index_block_table_ptrs=words[:1],
        block_table_stride_req=512,
        aligned_state_indices=torch.empty(1, SEQUENCES, 4, dtype=torch.int32),
        is_initialized=True,
    )
    orders = {
        name: partial(mock.patch.object, module, "is_conv_state_dim_first", return_value=name == "channels-first")
        for name in ("tokens-first", "channels-first")
    }
    precopy = {
        kind: partial(context.run_fused_precopy, SEQUENCES, ids, ids, ids, index) for kind, index in kinds.items()
    }
    postprocess = {
        "v2": partial(context.run_fused_postprocess_align, SEQUENCES, ids, ids, ids, ids),
        "v1": partial(context.run_fused_postprocess, SEQUENCES, *[ids] * 5),
    }
    out = context.aligned_state_indices
    aligned = partial(
        module.get_aligned_state_indices_multi_group_kernel[(1,)],
        words[:1],
        ids,
        out,
        512,
        1,
        *out.stride(),
        SEQUENCES,
        CACHE_BLOCK_SIZE=528,
        NUM_GROUPS=1,
        BLOCK_GROUPS=1,
        NUM_STATE_SLOTS=4,
        BLOCK_STATE_SLOTS=4,
        BLOCK_ROWS=32,
        num_warps=1,
    )
    preprocess = partial(
        module.preprocess_mamba_align_fused_kernel[(1,)],
        *[ids] * 7,
        SEQUENCES,
        BLOCK_SIZE=256,
        MAMBA_BLOCK_SIZE=528,
    )
    pool = torch.empty(POOL_BLOCKS, layer.conv_width - 1, layer.conv_channels, dtype=DTYPE).transpose(1, 2)
    store = partial(
        checkpoint.store_prefill_checkpoint,
        SimpleNamespace(checkpoint_offsets=ids, state_indices=ids),
        ids,
        torch.empty(layer.tokens, layer.conv_channels, dtype=DTYPE).T,
        pool,
        layer.chunk_states(layer.chunks),
        layer.chunk_states(POOL_BLOCKS),
        layer.query_start_loc,
        state_len=layer.conv_width - 1,
    )
    counts = {
        "_scatter_num_accepted_kernel": partial(hybrid._scatter_num_accepted_kernel[(SEQUENCES,)], ids, ids, ids),
        "_fill_num_accepted_kernel": partial(hybrid._fill_num_accepted_kernel[(SEQUENCES,)], ids, ids, 1),
        "_postprocess_recoverssm_align_kernel": partial(
            recover._postprocess_recoverssm_align_kernel[(SEQUENCES,)],
            *[ids] * 6,
            MAMBA_BLOCK_SIZE=528,
            BLOCK_TABLE_WIDTH=512,
        ),
        "get_aligned_state_indices_multi_group_kernel": aligned,
        "preprocess_mamba_align_fused_kernel": preprocess,
        "_store_prefill_checkpoint_kernel": store,
        "batch_memcpy_kernel": partial(module.batch_memcpy, words, words, halves),
    }
    return [
        *(
            case
            for kernel, launches in (
                ("precopy_mamba_align_fused_kernel", precopy),
                ("postprocess_mamba_fused_kernel", postprocess),
            )
            for kind, launch in launches.items()
            for case in configured("vllm", kernel, launch, orders, variant=f"-{kind}")
        ),
        *(case for kernel, launch in counts.items() for case in configured("vllm", kernel, launch)),
    ]
