# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the chunked scan; only `chunks` reads device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv import checks
from pagedkv.errors import ArgumentError
from pagedkv.launch import LARGEST_CHUNK

if TYPE_CHECKING:
    from torch import Tensor


def tensors(
    products: Tensor,
    x: Tensor,
    dt: Tensor,
    sums: Tensor,
    C: Tensor,
    states: Tensor,
    out: Tensor,
    chunk_starts: Tensor,
    sequences: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_states: Tensor | None,
) -> None:
    """Check the tensors without reading them."""
    checks.shape("x", x, (None, None, None), "[tokens, heads, head_size]")
    checks.shape("C", C, (x.shape[0], None, None), "[tokens, groups, state]")
    tokens, heads, head_size = x.shape
    groups, state = C.shape[1:]
    if not groups or heads % groups:
        raise ArgumentError(
            "head ratio",
            "C",
            got=f"{groups} groups for {heads} heads",
            expected="groups that divide the heads",
            remedy="Pass the heads and groups of one rank.",
        )
    checks.shape("products", products, (None, groups, None, None), "[chunks, groups, chunk_size, chunk_size]")
    chunks, _, _, chunk_size = products.shape
    if not 16 <= chunk_size <= LARGEST_CHUNK or chunk_size & (chunk_size - 1):
        raise ArgumentError(
            "option",
            "products",
            got=f"chunk_size {chunk_size}",
            expected=f"a power of two in 16 .. {LARGEST_CHUNK}",
            remedy="Set the model's chunk_size, or use another implementation of the scan.",
        )
    for name, tensor, wanted, axes in (
        ("products", products, (chunks, groups, chunk_size, chunk_size), "[chunks, groups, chunk_size, chunk_size]"),
        ("dt", dt, (heads, chunks, chunk_size), "[heads, chunks, chunk_size]"),
        ("sums", sums, (heads, chunks, chunk_size), "[heads, chunks, chunk_size]"),
        ("states", states, (chunks, heads, head_size, state), "[chunks, heads, head_size, state]"),
        ("out", out, (tokens, heads, head_size), "[tokens, heads, head_size]"),
        ("chunk_starts", chunk_starts, (chunks + 1,), "[chunks + 1]"),
        ("sequences", sequences, (chunks,), "[chunks]"),
    ):
        checks.shape(name, tensor, wanted, axes)
    given = {"products": products, "dt": dt, "sums": sums, "C": C, "states": states, "out": out}
    given |= {"chunk_starts": chunk_starts, "sequences": sequences}
    if z is not None:
        checks.shape("z", z, (tokens, heads, head_size), "[tokens, heads, head_size]")
        given["z"] = z
    if D is not None:
        checks.shape("D", D, (heads,) if D.dim() == 1 else (heads, head_size), "[heads] or [heads, head_size]")
        given["D"] = D
    if initial_states is not None:
        checks.shape(
            "initial_states", initial_states, (None, heads, head_size, state), "[sequences, heads, head_size, state]"
        )
        given["initial_states"] = initial_states
    checks.dtype("x", x, checks.DTYPES, "Cast it.")
    checks.computable("x", x)
    for name in {"C", "out", "z"} & set(given):
        checks.dtype(name, given[name], (x.dtype,), "Cast it to the dtype of x.")
    for name in ("products", "dt", "sums"):
        checks.dtype(name, given[name], (torch.float32,), "Keep it in float32: it is exponentiated, or summed up.")
    for name in {"states", "initial_states", "D"} & set(given):
        checks.dtype(name, given[name], checks.DTYPES, "Cast it.")
        checks.computable(name, given[name])
    checks.indices({"chunk_starts": chunk_starts, "sequences": sequences})
    for name, tensor in {"x": x, **given}.items():
        if tensor.dim() > 1:
            checks.dense(name, tensor)
    checks.device(("x", x), given)


def chunks(
    chunk_starts: Tensor, sequences: Tensor, tokens: int, chunk_size: int, initial_states: Tensor | None
) -> None:
    """Check where chunks begin and whose they are (reads device memory).

    Raises:
        ArgumentError: of kind "length": a start beyond the tokens, a chunk too long, a sequence without a state.
    """
    checks.within("chunk_starts", chunk_starts, tokens + 1, "tokens + 1")
    checks.within("chunk_starts (its differences)", chunk_starts.diff(), chunk_size + 1, "chunk_size + 1")
    if initial_states is not None:
        checks.within("sequences", sequences, len(initial_states), "the number of initial states")
