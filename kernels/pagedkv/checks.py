# SPDX-License-Identifier: Apache-2.0
"""Argument checks that the launchers share. Cheap ones always run; those that read device memory need debug=True."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.device import INTERPRETED
from pagedkv.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedkv.errors import Kind

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

FARTHEST_TOKEN = 1 << 24
"""Greatest stride of a token: those of a tile are addressed with 32 bits."""


def shape(name: str, tensor: torch.Tensor, expected: tuple[int | None, ...], axes: str) -> None:
    """Check rank and extents; None leaves an extent free.

    Raises:
        ArgumentError: if they differ.
    """
    actual = tensor.shape
    if actual == expected or (len(actual) == len(expected) and actual == _filled(expected, actual)):
        return
    wanted = tuple("any" if e is None else e for e in expected)
    raise ArgumentError(
        "shape", name, got=tuple(actual), expected=f"{wanted} = {axes}", remedy="Pass a view with these axes."
    )


def _filled(expected: tuple[int | None, ...], actual: tuple[int, ...]) -> tuple[int, ...]:
    """Return the expected extents, and of those left free the actual ones."""
    return tuple([a if e is None else e for e, a in zip(expected, actual, strict=True)])


def dense(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension has stride 1; every other stride is free.

    Raises:
        ArgumentError: if it has not.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            "stride",
            name,
            got=f"stride {tensor.stride(-1)} in the last dimension (strides {tensor.stride()})",
            expected="stride 1 there, any strides elsewhere",
            remedy="Transpose the other axes only, or call .contiguous().",
        )


def dtype(name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype], why: str) -> None:
    """Check the dtype.

    Raises:
        ArgumentError: if it is none of `allowed`.
    """
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        raise ArgumentError("dtype", name, got=tensor.dtype, expected=" or ".join(map(str, allowed)), remedy=why)


def head_size(name: str, size: int, what: str = "head_size", least: int = 32, most: int = 256) -> None:
    """Check the head size of attention; write and gather take any.

    Raises:
        ArgumentError: if it is outside `least .. most` or not a multiple of 8 (16 bytes of a two-byte element).
    """
    if not least <= size <= most or size % 8:
        raise ArgumentError(
            "head size",
            name,
            got=f"{what} {size}",
            expected=f"a multiple of 8 in {least} .. {most}",
            remedy="Pad the head, or use another backend for this model.",
        )


def device(reference: tuple[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Check that all tensors lie where the first one does.

    Raises:
        ArgumentError: if one does not.
    """
    name, first = reference
    for other, tensor in others.items():
        if tensor.device != first.device:
            raise ArgumentError(
                "device",
                other,
                got=tensor.device,
                expected=f"{first.device}, where {name} is",
                remedy="Move it with .to().",
            )


def sequences(block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> int:
    """Check the tensors that describe the sequences of a step, without reading them; return how many there are.

    Raises:
        ArgumentError: if a shape does not follow from the others, or one is not int32 with a dense last dimension.
    """
    shape("block_table", block_table, (None, None), "[num_seqs, max_blocks]")
    num_seqs = block_table.shape[0]
    shape("seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    indices({"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc})
    return num_seqs


def lengths(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    num_tokens: int,
    max_query_len: int,
    num_blocks: int,
    block_size: int,
    sliding_window: int | None = None,
) -> None:
    """Check the lengths of a step and the block ids of its visible tokens (reads device memory).

    Args:
        block_table: `[num_seqs, max_blocks]` int32.
        seq_lens: `[num_seqs]` int32.
        query_start_loc: `[num_seqs + 1]` int32.
        num_tokens: Query tokens.
        max_query_len: Upper bound of the query lengths.
        num_blocks: Blocks of the cache.
        block_size: Tokens of a block.
        sliding_window: Tokens that a query sees; None for all.

    Raises:
        ArgumentError: of kind "length" or "block table".
    """
    query_lens = query_start_loc.diff()
    within("query_start_loc", query_start_loc, num_tokens + 1, "num_tokens + 1")
    within("query_start_loc (its differences)", query_lens, max_query_len + 1, "max_query_len + 1")
    within("seq_lens", seq_lens, block_table.shape[1] * block_size + 1, "max_blocks * block_size + 1")
    oldest = torch.zeros_like(seq_lens)
    if sliding_window is not None:
        oldest = (seq_lens - query_lens - sliding_window + 1).clamp(min=0)
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = (column >= (oldest // block_size)[:, None]) & (column * block_size < seq_lens[:, None])
    used &= (query_lens > 0)[:, None]
    blocks_exist(block_table, used, num_blocks)


def computable(name: str, tensor: torch.Tensor) -> None:
    """Check that the device can compute in the dtype: Triton 3.6 to 3.9 interpret bf16 on the bit patterns.

    Raises:
        ArgumentError: if it is bf16 under the interpreter.
    """
    if INTERPRETED:
        dtype(
            name,
            tensor,
            (torch.float32, torch.float16),
            "Take one of these: Triton's interpreter computes bf16 wrongly.",
        )


def blocks_exist(block_table: torch.Tensor, used: torch.Tensor, num_blocks: int) -> None:
    """Check the block ids that a call will use (reads device memory).

    Args:
        block_table: `[num_seqs, max_blocks]` int32.
        used: `[num_seqs, max_blocks]` bool, the entries that the call looks up.
        num_blocks: Blocks of the cache.

    Raises:
        ArgumentError: if a used entry names no block.
    """
    wrong = used & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        seq, column = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            "block table",
            "block_table",
            got=f"block {int(block_table[seq, column])} at sequence {seq}, column {column} ({int(wrong.sum())} in all)",
            expected=f"0 <= block < {num_blocks}",
            remedy="Look for a freed block, a stale row or an id of another KV group.",
        )


def slots_exist(slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Check that every non-negative slot is inside the pool and named once (reads device memory).

    Raises:
        ArgumentError: if one is beyond the pool, or two tokens would be written to the same slot in no defined order.
    """
    written = slot_mapping[slot_mapping >= 0]
    if (written >= num_slots).any():
        token = int((slot_mapping >= num_slots).nonzero()[0])
        raise ArgumentError(
            "slot",
            "slot_mapping",
            got=f"slot {int(slot_mapping[token])} for token {token}",
            expected=f"slot < {num_slots} = num_blocks * block_size, or negative for a token that is not written",
            remedy="Look for a block id of another pool or a wrong block_size.",
        )
    once(
        "slot_mapping",
        slot_mapping,
        written,
        "tokens",
        "Look for a block shared between two sequences: two writers race.",
    )


def once(name: str, slots: torch.Tensor, used: torch.Tensor, owners: str, remedy: str) -> None:
    """Check that no slot is named twice (reads device memory).

    Args:
        name: Argument of the caller.
        slots: Slot of each token or sequence.
        used: Those of `slots` that are written.
        owners: What has a slot: tokens, sequences.
        remedy: What to do.

    Raises:
        ArgumentError: of kind "slot".
    """
    unique, counts = used.unique(return_counts=True)
    if (counts > 1).any():
        slot = int(unique[counts > 1][0])
        raise ArgumentError(
            "slot",
            name,
            got=f"slot {slot} for {owners} {(slots == slot).nonzero().flatten().tolist()}",
            expected="each slot at most once",
            remedy=remedy,
        )


def at_most(name: str, count: int, most: int, of: str) -> None:
    """Check an extent against its bound.

    Raises:
        ArgumentError: if it is larger.
    """
    if count > most:
        raise ArgumentError(
            "shape", name, got=f"{count} entries", expected=f"at most {most} ({of})", remedy="Slice it."
        )


def positive(name: str, scale: torch.Tensor) -> None:
    """Check that scales are finite and positive (reads device memory): with 0 a cache means zeros, with inf NaN.

    Raises:
        ArgumentError: if one is not.
    """
    wrong = ~(scale.isfinite() & (scale > 0))
    if wrong.any():
        raise ArgumentError(
            "scale",
            name,
            got=float(scale[wrong].flatten()[0]),
            expected="finite and > 0",
            remedy="Look at the scales of the checkpoint, or pass 1.0 where it has none.",
        )


def indices(tensors: dict[str, torch.Tensor]) -> None:
    """Check that index tensors are int32 with a dense last dimension.

    Raises:
        ArgumentError: if one is not.
    """
    for name, tensor in tensors.items():
        dtype(name, tensor, (torch.int32,), "Cast with .to(torch.int32).")
        dense(name, tensor)


def within(name: str, values: torch.Tensor, end: int, what: str) -> None:
    """Check that all values lie in 0 .. end - 1 (reads device memory).

    Raises:
        ArgumentError: if one does not.
    """
    wrong = (values < 0) | (values >= end)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ArgumentError(
            "length",
            name,
            got=f"{int(values[at])} at index {at}",
            expected=f"0 <= value < {end} ({what})",
            remedy="Look for stale or uninitialised metadata.",
        )


def near(name: str, tensor: torch.Tensor) -> None:
    """Check that the tokens of a tile can be addressed with 32 bits.

    Raises:
        ArgumentError: if two tokens lie farther apart than FARTHEST_TOKEN.
    """
    if tensor.stride(0) > FARTHEST_TOKEN:
        raise ArgumentError(
            "stride",
            name,
            got=f"{tensor.stride(0)} elements between two tokens",
            expected=f"at most {FARTHEST_TOKEN}",
            remedy="Pass rows that lie closer together.",
        )


def at_least_one(kind: Kind, name: str, count: int | None, remedy: str = "Pass None to let tuning decide.") -> None:
    """Check a bound or a number of parts; None is fine.

    Raises:
        ArgumentError: if it is less than one.
    """
    if count is not None and count < 1:
        raise ArgumentError(kind, name, got=count, expected=">= 1", remedy=remedy)
