# SPDX-License-Identifier: Apache-2.0
"""A kernel that can want more LDS than a workgroup may have, to try `python -m pagedkv.audit FILE.py::attend` with."""

import triton
import triton.language as tl


@triton.jit
def attend(
    q_ptr,  # [ROWS, D]
    k_ptr,  # [slots, D]
    v_ptr,  # [slots, D]
    slots_ptr,  # [tokens], a multiple of TOKENS of them
    out_ptr,  # [ROWS, D]
    tokens,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend with ROWS queries to a paged cache. Each turn stages the keys and values of TOKENS tokens in LDS."""
    rows, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + rows * D + channels)
    total, weight = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, tokens, TOKENS):
        slots = tl.load(slots_ptr + start + tl.arange(0, TOKENS))
        at = slots[:, None] * D + channels
        p = tl.exp(tl.dot(q, tl.trans(tl.load(k_ptr + at))))
        total += tl.dot(p.to(q.dtype), tl.load(v_ptr + at))
        weight += tl.sum(p, 1)
    tl.store(out_ptr + rows * D + channels, (total / weight[:, None]).to(q.dtype))
