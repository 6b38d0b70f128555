# SPDX-License-Identifier: Apache-2.0
"""LDS of all workgroups that run together, and races between their waves.

For every element (1, 2 or 4 bytes, the smallest that the program uses) it is kept which wave last wrote and read it,
and in which interval between barriers. A write meets a race where another wave read or wrote the element in the same
interval, a read where another wave wrote it. Writing the value that is already there is none: Triton's replicated
layouts do that in every prefill.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Array, L, U


class Lds:
    """LDS of `rows` workgroups of `size` bytes; the second half of the rows is that of the twins."""

    def __init__(self, rows: int, size: int, element: int, twins: int, junk: tuple[int, int]) -> None:
        self.size, self.element, self.first = size, element, rows // twins
        self.pitch = (size + 15) // 16 * 16
        self.bytes = np.empty(max(rows * self.pitch, 16), np.uint8)
        words = self.bytes.view(U)
        words[:] = junk[0]
        words[self.first * self.pitch // 4 :] = junk[twins - 1]
        self.views: dict[int, Array] = {1: self.bytes, 2: self.bytes.view(np.uint16), 4: words}
        count = rows * self.pitch // element + 1
        self.written, self.read, self.readers = (np.full(count, -1, np.int32) for _ in range(3))
        self.written_at, self.read_at = (np.full(count, -1, np.int32) for _ in range(2))

    def note(self, at: Array, size: int, mine: Array, *, writes: bool) -> None:
        """Tag elements anew, for an access that is not finished at a barrier."""
        for k in range(max(1, size // self.element)):
            j = at // self.element + k
            if writes:
                self.written[j] = mine
            else:
                self.readers[j[(self.read[j] >> 4 == mine >> 4) & (self.read[j] != mine)]] = mine[:1] >> 4
                self.read[j] = mine

    def race(
        self, at: Array, size: int, mine: Array, index: int, values: tuple[Array, Array] | None
    ) -> tuple[int, int, int, int] | None:
        """Note an access and look for a race.

        Args:
            at: Byte of each access.
            size: Bytes of an access.
            mine: Interval * 16 + wave, of each access.
            index: Of the instruction.
            values: For a write, whether it changes what was there, and whether what is there now is not what it wrote.

        Returns:
            None, or of the first race: position in `at`, how many there are, the other wave, its instruction (-1 for
            this very one).
        """
        now = int(mine[0]) >> 4 if mine.size else 0
        for k in range(max(1, size // self.element)):
            j = at // self.element + k
            writer, reader, together = self.written[j], self.read[j], np.zeros(j.shape, bool)
            bad = (writer >> 4 == now) & (writer != mine)
            if values is not None:
                changes, lost = values
                bad &= changes
                bad |= ((self.readers[j] == now) | ((reader >> 4 == now) & (reader != mine))) & changes
                self.written[j] = mine
                together = (self.written[j] != mine) & lost & ~bad
                bad |= together
            else:
                self.readers[j[(reader >> 4 == now) & (reader != mine)]] = now
                self.read[j] = mine
                self.readers[j[self.read[j] != mine]] = now
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                if together[first]:
                    return first, int(bad.sum()), int(self.written[j[first]]) & 15, -1
                by_writer = writer[first] >> 4 == now and writer[first] != mine[first]
                other = writer[first] if by_writer else reader[first]
                where = self.written_at if by_writer else self.read_at
                return first, int(bad.sum()), int(other) & 15, int(where[j[first]])
            (self.read_at if values is None else self.written_at)[j] = index
        return None


def offsets(address: Array) -> Array:
    """int64 of LDS addresses."""
    return address.astype(L)
