# SPDX-License-Identifier: Apache-2.0
"""Which AMD architectures a shared library holds code for: its offload bundles, read down to the code objects.

clang puts one bundle per translation unit into section `.hip_fatbin`: a table of (offset, size, target) and its code
objects, or the same compressed (`CCOB`). An entry alone proves nothing, so each code object is opened: it must be an
AMDGPU ELF whose own header names the architecture of its entry, and kernels are counted by their descriptors.
"""

from __future__ import annotations

import io
import struct
import subprocess
import zlib
from typing import TYPE_CHECKING

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTION = ".hip_fatbin"
PLAIN = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
MACHINE = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}
"""EF_AMDGPU_MACH_AMDGCN_*, the low byte of e_flags (LLVM's User Guide for AMDGPU Backend, table of e_flags)."""


class UnreadableError(Exception):
    """A file that is no ELF, or a bundle that is not what clang writes."""


def kernels_of(path: Path) -> dict[str, int]:
    """Architecture -> kernels in the code objects of a shared library; empty for one without device code.

    Raises:
        UnreadableError: It is no ELF, a bundle is cut off or unknown, or a code object is not what its entry says.
    """
    kernels: dict[str, int] = {}
    for arch, blob in code_objects(path):
        kernels[arch] = kernels.get(arch, 0) + _kernels(blob, arch)
    return kernels


def code_objects(path: Path) -> list[tuple[str, bytes]]:
    """(architecture, code object) of a library or an object file, in its order; errors as of `kernels_of`."""
    return [entry for bundle in _bundles(_fatbin(path)) for entry in _entries(bundle)]


def _fatbin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            section = ELFFile(file).get_section_by_name(SECTION)
            return section.data() if section else b""
    except (ELFError, OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"is no readable ELF: {error}") from error


def _bundles(data: bytes) -> Iterator[bytes]:
    """Each bundle of a section, decompressed. They follow each other with padding between."""
    at = 0
    while data:
        places = [data.find(magic, at) for magic in (PLAIN, COMPRESSED)]
        found = [place for place in places if place >= 0]
        if not found:
            if at == 0:
                raise UnreadableError(f"{SECTION} holds no offload bundle")
            return
        start = min(found)
        if data.startswith(PLAIN, start):
            yield data[start:]
            at = start + max(offset + size for _, offset, size in _table(data[start:]))
        else:
            bundle, length = _decompressed(data[start:])
            yield bundle
            at = start + length


def _decompressed(data: bytes) -> tuple[bytes, int]:
    """A compressed bundle and its length in the file. Versions differ in the width of the two sizes."""
    version, method = _unpack("<HH", data, 4)
    if version not in {2, 3} or method not in {0, 1}:
        raise UnreadableError(f"compressed bundle of version {version} by method {method} is unknown")
    total, plain = _unpack("<II" if version == 2 else "<QQ", data, 8)
    header = 24 if version == 2 else 32
    if not header < total <= len(data):
        raise UnreadableError(f"compressed bundle of {total} bytes is cut off after {len(data)}")
    body = data[header:total]
    try:
        if method == 0:
            bundle = zlib.decompress(body)
        else:
            bundle = subprocess.run(["zstd", "-dc"], input=body, capture_output=True, check=True).stdout
    except (zlib.error, OSError, subprocess.CalledProcessError) as error:
        raise UnreadableError(f"compressed bundle cannot be read: {error}") from error
    if len(bundle) != plain:
        raise UnreadableError(f"compressed bundle holds {len(bundle)} bytes and announces {plain}")
    return bundle, total


def _table(bundle: bytes) -> list[tuple[str, int, int]]:
    """(target, offset, size) of each entry."""
    if not bundle.startswith(PLAIN):
        raise UnreadableError("no offload bundle inside the compressed one")
    (count,) = _unpack("<Q", bundle, len(PLAIN))
    at, table = len(PLAIN) + 8, []
    for _ in range(count):
        offset, size, length = _unpack("<QQQ", bundle, at)
        target = bundle[at + 24 : at + 24 + length]
        if len(target) != length or offset + size > len(bundle):
            raise UnreadableError(f"bundle of {len(bundle)} bytes is cut off")
        table.append((target.decode("ascii", errors="replace"), offset, size))
        at += 24 + length
    if not table:
        raise UnreadableError("bundle without entries")
    return table


def _entries(bundle: bytes) -> Iterator[tuple[str, bytes]]:
    for target, offset, size in _table(bundle):
        if target.startswith(("hip-amdgcn", "hipv4-amdgcn")):
            yield target.rsplit("--", 1)[-1].split(":")[0], bundle[offset : offset + size]


def _kernels(blob: bytes, arch: str) -> int:
    """Kernel descriptors (`<name>.kd`) of one code object."""
    try:
        elf = ELFFile(io.BytesIO(blob))
    except ELFError as error:
        raise UnreadableError(f"code object for {arch} is no ELF: {error}") from error
    machine = elf.header.e_flags & 0xFF
    if elf.header.e_machine != "EM_AMDGPU" or machine != MACHINE.get(arch, machine):
        raise UnreadableError(f"code object for {arch} is built for {elf.header.e_machine} {machine:#x}")
    symbols = elf.get_section_by_name(".dynsym")
    return sum(symbol.name.endswith(".kd") for symbol in symbols.iter_symbols()) if symbols else 0


def _unpack(form: str, data: bytes, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, data, at)
    except struct.error as error:
        raise UnreadableError(f"bundle of {len(data)} bytes is cut off") from error
