# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the gated delta rule, prefill's and shared ones; `blocks` and `decays` read device memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pagedkv import checks
from pagedkv.errors import ArgumentError
from pagedkv.launch import GDN_HEAD_SIZES

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG = 88.0
"""Largest A_log whose exponential is finite in fp32 (e^88.7 is not)."""


def layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    states: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> dict[str, Tensor]:
    """Check the tensors that prefill and decode share, but for their device; return them by name."""
    checks.shape("k", k, (None, None, None), "[tokens, key heads, keys]")
    tokens, key_heads, keys = k.shape
    checks.shape("v", v, (tokens, None, None), "[tokens, heads, values]")
    heads, values = v.shape[1:]
    if not key_heads or not heads or heads % key_heads:
        raise ArgumentError(
            "head ratio",
            "k",
            got=f"{key_heads} key heads for {heads} heads",
            expected="key heads that divide the heads",
            remedy="Pass the heads and key heads of one rank.",
        )
    for name, size, what in (("k", keys, "keys"), ("v", values, "values")):
        if size not in GDN_HEAD_SIZES:
            raise ArgumentError(
                "head size",
                name,
                got=f"{size} {what} a head",
                expected=" or ".join(map(str, GDN_HEAD_SIZES)),
                remedy="Leave this model to vLLM's kernels.",
            )
    checks.shape("q", q, (tokens, key_heads, keys), "[tokens, key heads, keys]")
    checks.shape("out", out, (tokens, heads, values), "[tokens, heads, values]")
    checks.shape("states", states, (None, heads, values, keys), "[slots, heads, values, keys]")
    by_key = (keys,) if a.dim() == 3 else ()
    checks.shape("a", a, (tokens, heads, *by_key), "[tokens, heads] or [tokens, heads, keys]")
    checks.shape("dt_bias", dt_bias, (heads, *by_key), "[heads] or [heads, keys], as a has")
    checks.shape("b", b, (tokens, heads), "[tokens, heads]")
    checks.shape("A_log", A_log, (heads,), "[heads]")
    given = {"k": k, "q": q, "v": v, "out": out, "a": a, "b": b, "states": states, "A_log": A_log, "dt_bias": dt_bias}
    for name, tensor in given.items():
        checks.dtype(name, tensor, checks.DTYPES, "Cast it.")
        checks.computable(name, tensor)
        checks.dense(name, tensor)
    for name in ("q", "v", "out"):
        checks.dtype(name, given[name], (k.dtype,), "Cast it to the dtype of k.")
    contiguous("dt_bias", dt_bias)
    return given


def prefill(
    layer_tensors: dict[str, Tensor],
    starts: Tensor,
    sources: Tensor,
    targets: Tensor,
    known: Tensor | None,
    last_pieces: Tensor | None,
) -> None:
    """Check what prefill asks of its tensors beside `layer`, and what says which tokens and states are whose."""
    near = ("q", "k", "v", "out", "a") if layer_tensors["a"].dim() == 3 else ("q", "k", "v", "out")
    for name in near:
        checks.near(name, layer_tensors[name])
    checks.shape("targets", targets, (None,), "[pieces]")
    checks.shape("starts", starts, (len(targets) + 1,), "[pieces + 1]")
    count = len(targets)
    given = {"starts": starts, "targets": targets, "sources": sources}
    if last_pieces is not None:
        checks.shape("last_pieces", last_pieces, (None,), "[sequences]")
        given["last_pieces"] = last_pieces
        count = len(last_pieces)
    checks.shape("sources", sources, (count,), "[sequences]")
    checks.indices(given)
    if known is not None:
        checks.shape("known", known, (count,), "[sequences]")
        checks.dtype("known", known, (torch.bool,), "Cast with .bool().")
        checks.dense("known", known)
        given["known"] = known
    checks.device(("k", layer_tensors["k"]), layer_tensors | given)


def contiguous(name: str, tensor: Tensor) -> None:
    """Check that a parameter is contiguous.

    Raises:
        ArgumentError: if it is not.
    """
    if not tensor.is_contiguous():
        raise ArgumentError(
            "stride",
            name,
            got=f"strides {tensor.stride()}",
            expected="contiguous",
            remedy="Call .contiguous() when the model is loaded.",
        )


def bound(lower_bound: float | None, *, by_key: bool = True) -> None:
    """Check the lower bound of the logarithms of decays.

    Raises:
        ArgumentError: if it is no finite number below 0, or is given although decays are not `by_key`.
    """
    if lower_bound is None:
        return
    if not -math.inf < lower_bound < 0:
        raise ArgumentError(
            "option", "lower_bound", got=lower_bound, expected="finite and < 0", remedy="Pass None for no bound."
        )
    if not by_key:
        raise ArgumentError(
            "option",
            "lower_bound",
            got=lower_bound,
            expected="None, because a has a decay for each head",
            remedy="Pass a of [tokens, heads, key size], or no bound.",
        )


def blocks(sources: Tensor, targets: Tensor, known: Tensor | None, last_pieces: Tensor | None, num_blocks: int) -> None:
    """Check which states are read and written (reads device memory).

    Raises:
        ArgumentError: of kind "block table": a block beyond the pool, one that two pieces write, or one that one
            sequence reads and another writes.
    """
    for name, ids in {"sources": sources, "targets": targets}.items():
        wrong = ids >= num_blocks
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ArgumentError(
                "block table",
                name,
                got=f"block {int(ids[at])} at index {at}",
                expected=f"block < {num_blocks}, or negative for no state",
                remedy="Look for a freed block, a stale row or an id of another KV group.",
            )
    ends = range(1, len(sources) + 1) if last_pieces is None else [last + 1 for last in last_pieces.tolist()]
    has = sources >= 0 if known is None else known & (sources >= 0)
    readers = {block: reader for reader, block in enumerate(sources.tolist()) if has[reader]}
    sequence, writers = 0, set()
    for piece, block in enumerate(targets.tolist()):
        sequence += piece >= ends[sequence]
        if block >= 0 and (block in writers or readers.get(block, sequence) != sequence):
            raise ArgumentError(
                "block table",
                "targets",
                got=f"block {block} at index {piece}, which another piece writes or another sequence reads",
                expected="blocks of its own for each piece",
                remedy="Look for a block that two sequences share: the order of reads and writes is undefined.",
            )
        writers.add(block)


def decays(A_log: Tensor, dt_bias: Tensor) -> None:
    """Check that decays are numbers (reads device memory).

    Raises:
        ArgumentError: of kind "decay": exp(A_log) overflows, or a parameter is NaN.
    """
    bias = dt_bias if dt_bias.dim() == 1 else dt_bias.amax(dim=1)
    for name, values, most in (("A_log", A_log, LARGEST_LOG), ("dt_bias", bias, float("inf"))):
        wrong = ~(values <= most)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ArgumentError(
                "decay",
                name,
                got=f"{float(values[at])} of head {at}",
                expected=f"at most {most:g}: exp(A_log) must be finite in fp32" if name == "A_log" else "a number",
                remedy="Look at the checkpoint: this parameter is overwritten or of another layer.",
            )
