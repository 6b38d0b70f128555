# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata of one step, as far as our metadata builder reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pagedkv.device import current

if TYPE_CHECKING:
    import torch


def computes(e4m3: str) -> bool:
    """Whether kernels run where this kind of e4m3 is served: under the interpreter both are, on a GPU its own."""
    return current().native_fp8 in {"", e4m3}


def common_metadata(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, **changes: Any
) -> SimpleNamespace:
    """A causal step over these tensors [sequences + 1], [sequences], [sequences, blocks], but for what is named."""
    common = {
        "num_actual_tokens": int(query_start_loc[-1]),
        "max_query_len": int(query_start_loc.diff().max()),
        "max_seq_len": int(seq_lens.max()),
        "query_start_loc": query_start_loc,
        "query_start_loc_cpu": query_start_loc.cpu().clone(),
        "seq_lens": seq_lens,
        "block_table_tensor": block_table,
        "causal": True,
        "mm_req_doc_ranges": None,
        "rswa_prefix_lens": None,
        "dcp_local_seq_lens": None,
    }
    return SimpleNamespace(**common | changes)
