# SPDX-License-Identifier: Apache-2.0
"""Which lane each lane reads: DPP controls, `ds_swizzle`, swaps of rows and halves (CDNA3 ISA, section on DPP)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .arithmetic import Array

LANE = np.arange(64)


def across_rows(x: Array, low: Array, high: Array) -> Array:
    """`v_permlanex16_b32`: lane k of a row reads the lane of the other row that nibble k of high:low names."""
    chosen = np.broadcast_to((high.astype(np.uint64) << np.uint64(32)) | low, x.shape[:1])
    lane = (chosen[:, None] >> (LANE[:16] * 4).astype(np.uint64) & np.uint64(15)).astype(np.int64)
    return np.take_along_axis(x, np.concatenate((lane + 16, lane), 1), 1)


def dpp_source(modifiers: Mapping[str, str]) -> tuple[Array, Array]:
    """Source lane of each lane, and whether there is one.

    Raises:
        NotImplementedError: A control that no kernel here uses.
    """
    row, always = LANE % 16, LANE >= 0
    [control] = [each for each in modifiers if each.startswith(("quad_perm", "row_", "wave_")) and each != "row_mask"]
    if control == "quad_perm":
        order = np.array([int(each) for each in modifiers[control].strip("[]").split(",")])
        return LANE // 4 * 4 + order[LANE % 4], always
    distance = int(modifiers[control] or 0)
    if control in {"row_mirror", "row_half_mirror"}:
        return LANE ^ (15 if control == "row_mirror" else 7), always
    if control == "row_shr":
        return LANE - distance, row >= distance
    if control == "row_shl":
        return LANE + distance, row + distance < 16
    if control in {"wave_shl", "wave_shr"} and distance == 1:
        source = LANE + (1 if control == "wave_shl" else -1)
        return source, (source >= 0) & (source < 64)
    if control == "row_ror":
        return LANE // 16 * 16 + (row - distance) % 16, always
    if control == "row_bcast" and distance in {15, 31}:
        width = distance + 1
        return LANE // width * width - 1, width <= LANE
    raise NotImplementedError(f"DPP control {control}")


def dpp_lanes(modifiers: Mapping[str, str]) -> Array:
    """Lanes that row_mask and bank_mask let write."""
    rows, banks = (int(modifiers.get(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    lanes: Array = ((rows >> (LANE // 16)) & (banks >> (LANE % 16 // 4)) & 1) == 1
    return lanes


def swizzle_source(control: str) -> Array:
    """Source lane of each lane of `ds_swizzle_b32 offset:swizzle(...)`.

    Raises:
        NotImplementedError: A control that is not known.
    """
    found = re.fullmatch(r"swizzle\((\w+),(.*)\)", control)
    if not found:
        raise NotImplementedError(f"swizzle {control}")
    mode, words = found[1], found[2].split(",")
    if mode == "SWAP":
        return LANE ^ int(words[0])
    if mode == "REVERSE":
        return LANE ^ (int(words[0]) - 1)
    if mode == "BROADCAST":
        return LANE // int(words[0]) * int(words[0]) + int(words[1])
    if mode == "QUAD_PERM":
        return LANE // 4 * 4 + np.array([int(word) for word in words])[LANE % 4]
    if mode == "BITMASK_PERM":
        source = LANE.copy()
        for bit, change in zip((16, 8, 4, 2, 1), words[0].strip('"'), strict=True):
            source = {"0": source & ~bit, "1": source | bit, "p": source, "i": source ^ bit}[change]
        return source
    raise NotImplementedError(f"swizzle {control}")


def swap_halves(d: Array, s: Array) -> tuple[Array, Array]:
    """`v_permlane32_swap`: lanes 32..63 of the first with 0..31 of the second."""
    a, b = d.copy(), s.copy()
    a[:, 32:], b[:, :32] = s[:, :32], d[:, 32:]
    return a, b


def swap_rows(d: Array, s: Array) -> tuple[Array, Array]:
    """`v_permlane16_swap`: odd rows of 16 of the first with even rows of the second."""
    a, b = d.copy(), s.copy()
    for row in (0, 32):
        a[:, row + 16 : row + 32], b[:, row : row + 16] = s[:, row : row + 16], d[:, row + 16 : row + 32]
    return a, b


def swizzle(x: Array, source: Array, enabled: Array | None) -> Array:
    """What each lane reads; a lane that is off gives 0."""
    taken = x[:, source]
    return taken if enabled is None else np.where(enabled[:, source], taken, np.uint32(0))


def gather(x: Array, address: Array, enabled: Array | None) -> Array:
    """`ds_bpermute_b32`: lane `address / 4` of each lane's own choosing; a lane that is off gives 0."""
    source = ((address >> np.uint32(2)) & np.uint32(x.shape[1] - 1)).astype(np.int64)
    taken = np.take_along_axis(x, source, 1)
    return taken if enabled is None else np.where(np.take_along_axis(enabled, source, 1), taken, np.uint32(0))


def scatter(x: Array, address: Array, enabled: Array | None) -> Array:
    """`ds_permute_b32`: each lane gives to lane `address / 4`; of several the last one does, of none it is 0."""
    target = ((address >> np.uint32(2)) & np.uint32(x.shape[1] - 1)).astype(np.int64)
    rows, lanes = np.nonzero(np.ones(x.shape, bool) if enabled is None else enabled)
    given = np.zeros(x.shape, np.uint32)
    given[rows, target[rows, lanes]] = x[rows, lanes]  # in the order of the lanes
    return given
