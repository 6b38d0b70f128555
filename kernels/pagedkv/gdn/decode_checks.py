# SPDX-License-Identifier: Apache-2.0
"""Argument checks of decode of the gated delta rule; `slots` and `steps` read device memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pagedkv import checks
from pagedkv.errors import ArgumentError
from pagedkv.gdn.checks import bound

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.gdn.decode import Drafts


def tensors(layer_tensors: dict[str, Tensor], state_indices: Tensor) -> None:
    """Check the slots of the states, and the device of all tensors, without reading them."""
    each = (None,) if state_indices.dim() == 2 else ()
    checks.shape("state_indices", state_indices, (None, *each), "[sequences] or [sequences, 1 + drafts]")
    if each:
        checks.dense("state_indices", state_indices)
    checks.dtype("state_indices", state_indices, (torch.int32,), "Cast with .to(torch.int32).")
    checks.device(("k", layer_tensors["k"]), layer_tensors | {"state_indices": state_indices})


def options(scale: float | None, lower_bound: float | None) -> None:
    """Check what is no tensor."""
    if scale is not None and not 0 < scale < math.inf:
        raise ArgumentError(
            "option", "scale", got=scale, expected="finite and > 0", remedy="Pass None for 1 / sqrt(keys)."
        )
    bound(lower_bound)


def drafts(
    k: Tensor,
    a: Tensor,
    states: Tensor,
    state_indices: Tensor,
    room: Drafts | None,
    draft_indices: Tensor | None,
    at: dict[str, Tensor | None],
    max_query_len: int,
) -> None:
    """Check the room for drafts, and what says which tokens are whose, without reading them."""
    given = {name: tensor for name, tensor in at.items() if tensor is not None}
    each, sequences = state_indices.dim() == 2, len(state_indices)
    if each and (room is not None or draft_indices is not None or "seq_lens" in given):
        raise ArgumentError(
            "drafts",
            "drafts",
            got="room for drafts, and a slot for each token in state_indices",
            expected="one of both, and seq_lens with room alone",
            remedy="Pass state_indices of [sequences], or no drafts, draft_indices and seq_lens.",
        )
    if room is None and not each:
        if given or draft_indices is not None or max_query_len != 1:
            raise ArgumentError(
                "drafts",
                "drafts",
                got="None, and sequences of several tokens",
                expected="room for what a step keeps of its drafts",
                remedy="Pass what allocate_drafts returns, or only q, k, v, a and b of one token a sequence.",
            )
        checks.shape("state_indices", state_indices, (len(k),), "[sequences] of one token each")
        return
    for name in sorted(at.keys() - given.keys() - ({"seq_lens"} if each else set())):
        raise ArgumentError(
            "drafts", name, got=None, expected="a tensor, because drafts are verified", remedy="Pass it."
        )
    checks.shape("num_accepted_tokens", given["num_accepted_tokens"], (sequences,), "[sequences]")
    checks.shape("query_start_loc", given["query_start_loc"], (sequences + 1,), "[sequences + 1]")
    of_room: dict[str, Tensor] = {}
    if room is None:
        most, place = state_indices.shape[1] - 1, "state_indices has so many slots"
    else:
        checks.shape("seq_lens", given["seq_lens"], (sequences,), "[sequences]")
        of_room = _room(room, k, a, states)
        most, place = room.most, f"drafts has a ring of {room.keys.shape[1]} places"
    if not 1 <= max_query_len <= most + 1:
        raise ArgumentError(
            "drafts",
            "max_query_len",
            got=f"{max_query_len} tokens of a sequence",
            expected=f"1 .. {most + 1}: {place}",
            remedy="Allocate drafts for as many as the server proposes.",
        )
    checks.indices(given)
    if draft_indices is not None:
        checks.shape("draft_indices", draft_indices, (sequences,), "[sequences]")
        checks.dtype("draft_indices", draft_indices, (torch.int32,), "Cast with .to(torch.int32).")
        given["draft_indices"] = draft_indices
    checks.device(("k", k), given | of_room)


def _room(room: Drafts, k: Tensor, a: Tensor, states: Tensor) -> dict[str, Tensor]:
    """Check the tensors of the room for drafts, and return them by name."""
    heads, values, keys = states.shape[1:]
    checks.shape("drafts.keys", room.keys, (None, None, k.shape[1], keys), "[slots, ring, key heads, keys]")
    ring = room.keys.shape[:2]
    by_key = (keys,) if a.dim() == 3 else ()
    checks.shape("drafts.updates", room.updates, (*ring, heads, values), "[slots, ring, heads, values]")
    checks.shape("drafts.decays", room.decays, (*ring, heads, *by_key), "[slots, ring, heads], and keys as a has")
    checks.dtype("drafts.keys", room.keys, (k.dtype,), "Cast it to the dtype of k.")
    single = {"drafts.updates": room.updates, "drafts.decays": room.decays}
    for name, tensor in single.items():
        checks.dtype(name, tensor, (torch.float32,), "Allocate it in fp32.")
    tensors_of_room = {"drafts.keys": room.keys, **single}
    for name, tensor in tensors_of_room.items():
        checks.dense(name, tensor)
    return tensors_of_room


def slots(name: str, indices: Tensor, pad_index: int, count: int) -> None:
    """Check that each sequence has a slot of its own (reads device memory).

    Raises:
        ArgumentError: of kind "slot".
    """
    used = indices[indices > pad_index]
    beyond = used[(used < 0) | (used >= count)]
    if len(beyond):
        raise ArgumentError(
            "slot",
            name,
            got=f"slot {int(beyond[0])} ({len(beyond)} in all)",
            expected=f"0 <= slot < {count}, or at most pad_index = {pad_index}",
            remedy="Look for a freed block, a stale row or an index of another KV group.",
        )
    remedy = "Look for a slot shared between two sequences: two writers race."
    checks.once(name, indices, used, "sequences", remedy)


def steps(
    state_indices: Tensor,
    draft_indices: Tensor | None,
    pad_index: int,
    room: Drafts | None,
    at: dict[str, Tensor | None],
    tokens: int,
    max_query_len: int,
) -> None:
    """Check which tokens are whose and how many count (reads device memory).

    Raises:
        ArgumentError: of kind "slot" or "length".
    """
    used = (state_indices if room is not None else state_indices[:, 0]) > pad_index
    most = state_indices.shape[1] - 1 if room is None else room.most
    if room is not None:
        places = state_indices if draft_indices is None else draft_indices
        slots("state_indices" if draft_indices is None else "draft_indices", places[used], -1, len(room.keys))
    starts, lens, accepted = at["query_start_loc"], at["seq_lens"], at["num_accepted_tokens"]
    assert starts is not None
    assert accepted is not None
    query_lens = starts.diff()
    checks.within("query_start_loc", starts, tokens + 1, "tokens + 1")
    checks.within("query_start_loc (its differences)", query_lens, max_query_len + 1, "max_query_len + 1")
    used &= query_lens > 0
    checks.within("num_accepted_tokens", accepted[used], most + 2, "the drafts that there is room for, + 2")
    if lens is None:
        return
    before = (lens - query_lens - (accepted - 1).clamp(min=0))[used]
    checks.within(
        "seq_lens (less the tokens of this step and the accepted drafts)", before, (1 << 31) - 1, "any length"
    )
