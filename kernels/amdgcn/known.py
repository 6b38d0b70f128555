# SPDX-License-Identifier: Apache-2.0
"""Launches of earlier runs by content: the same machine code on the same bytes is not executed a second time.

The key holds the instructions, the descriptor, the grid, what was looked for, every byte of every argument, and this
package. What a launch without a fault wrote is kept and put back, and the test compares it as ever. Comments, line
numbers and renamed variables are no instructions, so a change that alters no machine code executes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .arithmetic import Array
    from .memory import Memory
    from .text import Program

LARGEST = 1 << 27
"""Bytes of arguments beyond which a launch is executed each time."""
LIMIT = 1 << 28
"""Bytes that a folder keeps, those that were used last."""


@functools.cache
def _executor() -> bytes:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources) + np.__version__.encode()).digest()


def _digest(key: str, packed: bytes) -> bytes:
    return hashlib.sha256(key.encode() + packed).digest()


def machine_code(program: Program) -> str:
    """What the GPU sees of a program: SHA-256 of its instructions, its labels and its descriptor."""
    code = [(block.label, [" ".join(one.text.split()) for one in block.instructions]) for block in program.blocks]
    return hashlib.sha256(repr((program.arch, code, sorted(program.descriptor.items()))).encode()).hexdigest()


def _aliases(memory: Memory) -> list[tuple[int, int]]:
    """Of each region, with which it shares memory (the first of them all) and where in that it begins."""
    order = sorted(range(len(memory.regions)), key=lambda number: memory.regions[number].base)
    found, group, end = {}, list[int](), -1
    for number in order:
        region = memory.regions[number]
        if region.base >= end:
            group = []
        group.append(number)
        found[number] = group
        end = max(end, region.base + region.views[1].size)
    return [(min(found[k]), each.base - memory.regions[found[k][0]].base) for k, each in enumerate(memory.regions)]


@dataclasses.dataclass(frozen=True)
class Known:
    """A folder with a file for each launch."""

    folder: Path

    def key(self, program: Program, memory: Memory, settings: object) -> str:
        """Equal for two launches only if they do the same; empty if the arguments are too many bytes to say."""
        if sum(region.views[1].size for region in memory.regions) > LARGEST:
            return ""
        digest = hashlib.sha256(_executor() + repr((machine_code(program), settings)).encode())
        for region, alias in zip(memory.regions, _aliases(memory), strict=True):
            about = (region.name, region.start, region.end, region.readonly, region.steps, region.run, alias)
            digest.update(repr((about, region.views[1].size)).encode())
            digest.update(np.ascontiguousarray(region.views[1]).data)
        return digest.hexdigest()

    def replay(self, key: str, memory: Memory) -> dict[str, Any] | None:
        """Write what the launch wrote and return what was noted of it; None if it is not known.

        A file that is not what was kept under this key is deleted.
        """
        path = self.folder / key
        try:
            data = path.read_bytes()
            if data[:32] != _digest(key, data[32:]):
                path.unlink()
                return None
            os.utime(path)  # so that what is used stays
        except OSError:
            return None
        with np.load(io.BytesIO(data[32:])) as kept:
            arrays = {name: kept[name] for name in kept.files}
        about: dict[str, Any] = json.loads(arrays.pop("about").tobytes())
        for name, data in arrays.items():
            memory.regions[int(name)].views[1][:] = data
        return about

    def keep(self, key: str, memory: Memory, before: list[Array | None], about: dict[str, Any]) -> None:
        """Keep what a launch wrote: the regions that are not as `before`. A full disk costs an execution next time."""
        changed: dict[str, Any] = {
            str(number): region.views[1]
            for number, (region, old) in enumerate(zip(memory.regions, before, strict=True))
            if old is not None and not np.array_equal(old, region.views[1])
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **changed)
        unfinished = self.folder / f".{key}.{os.getpid()}.{id(memory)}"
        size = 0
        with contextlib.suppress(OSError):  # another run may prune as well
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(_digest(key, packed.getvalue()) + packed.getvalue())
                unfinished.replace(self.folder / key)
            finally:
                unfinished.unlink(missing_ok=True)
            for path in sorted(self.folder.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True):
                size += path.stat().st_size
                if size > LIMIT:
                    path.unlink(missing_ok=True)
