# SPDX-License-Identifier: Apache-2.0
"""Argument checks of Mamba-2's prefill; only `pieces` reads device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv import checks
from pagedkv.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor


def tensors(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    states: Tensor,
    starts: Tensor,
    last_pieces: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
) -> None:
    """Check the tensors without reading them."""
    checks.shape("x", x, (None, None, None), "[tokens, heads, head_size]")
    tokens, heads, head_size = x.shape
    checks.shape("B", B, (tokens, None, None), "[tokens, groups, state]")
    groups, state = B.shape[1:]
    if not groups or heads % groups:
        raise ArgumentError(
            "head ratio",
            "B",
            got=f"{groups} groups for {heads} heads",
            expected="groups that divide the heads",
            remedy="Pass the heads and groups of one rank.",
        )
    checks.shape("states", states, (None, heads, head_size, state), "[pieces, heads, head_size, state]")
    per_token = {"out": out, "C": C}
    checks.shape("C", C, (tokens, groups, state), "[tokens, groups, state]")
    checks.shape("out", out, (tokens, heads, head_size), "[tokens, heads, head_size]")
    checks.shape("dt", dt, (tokens, heads), "[tokens, heads]")
    checks.shape("A", A, (heads,), "[heads]")
    checks.shape("starts", starts, (len(states) + 1,), "[pieces + 1]")
    given = {"dt": dt, "A": A, "B": B, "C": C, "out": out, "states": states, "starts": starts}
    indices = {"starts": starts}
    sequences = len(states)
    if last_pieces is not None:
        checks.shape("last_pieces", last_pieces, (None,), "[sequences]")
        indices["last_pieces"] = given["last_pieces"] = last_pieces
        sequences = len(last_pieces)
    if z is not None:
        checks.shape("z", z, (tokens, heads, head_size), "[tokens, heads, head_size]")
        per_token["z"] = given["z"] = z
    if D is not None:
        checks.shape("D", D, (heads,) if D.dim() == 1 else (heads, head_size), "[heads] or [heads, head_size]")
        given["D"] = D
    if dt_bias is not None:
        checks.shape("dt_bias", dt_bias, (heads,), "[heads]")
        given["dt_bias"] = dt_bias
    if initial_states is not None:
        wanted = (sequences, heads, head_size, state)
        checks.shape("initial_states", initial_states, wanted, "[sequences, heads, head_size, state]")
        given["initial_states"] = initial_states
    checks.dtype("x", x, checks.DTYPES, "Cast it.")
    checks.computable("x", x)
    for name, tensor in {"B": B, **per_token}.items():
        checks.dtype(name, tensor, (x.dtype,), "Cast it to the dtype of x.")
    for name in {"dt", "A", "dt_bias", "D", "states", "initial_states"} & set(given):
        checks.dtype(name, given[name], checks.DTYPES, "Cast it.")
        checks.computable(name, given[name])
    checks.indices(indices)
    for name, tensor in {"x": x, **given}.items():
        if tensor.dim() > 1 or name in {"A", "dt_bias", "D"}:
            checks.dense(name, tensor)
    for name, tensor in {"x": x, "B": B, **per_token}.items():
        checks.near(name, tensor)
    checks.device(("x", x), given)


def options(dt_limit: tuple[float, float], num_segments: int | None) -> None:
    """Check what is no tensor."""
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ArgumentError(
            "option",
            "dt_limit",
            got=dt_limit,
            expected="0 <= lower <= upper",
            remedy="Pass (0, inf) for no bounds.",
        )
    checks.at_least_one("split", "num_segments", num_segments)


def pieces(starts: Tensor, last_pieces: Tensor | None, tokens: int) -> None:
    """Check where pieces begin and whose they are (reads device memory).

    Raises:
        ArgumentError: of kind "length": a start beyond the tokens or before another, a sequence without a piece.
    """
    checks.within("starts", starts, tokens + 1, "tokens + 1")
    checks.within("starts (its differences)", starts.diff(), tokens + 1, "tokens + 1")
    if last_pieces is not None:
        checks.within("last_pieces", last_pieces, len(starts) - 1, "the number of pieces")
        later = last_pieces.diff() - 1
        checks.within("last_pieces (its differences, less 1)", later, len(starts) - 1, "the number of pieces")
