# SPDX-License-Identifier: Apache-2.0
"""Read AMD code objects: registers, spills and scratch from the ELF note, instructions and loads from the AMDGCN text.

The figures are in a MessagePack note (AMDGPUUsage, "Code Object V3 and Above Metadata"). Two of them need care:
`.vgpr_count` is the unified total on gfx90a and later, accumulation registers included; and
`.group_segment_fixed_size` is 0 for every Triton kernel, whose LDS is dynamic, so LDS comes from Triton's metadata.

Counts of the text are static: an instruction in a loop counts once. That is enough to tell a kernel that reads the KV
cache in 16-byte pieces from one that reads it two bytes at a time, and it is all that can be said without running it.
A backward branch marks a loop; what a turn of one issues beside its matrix instructions is what it costs.
"""

from __future__ import annotations

import hashlib
import io
import linecache
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from pagedkv.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterable

_METADATA_NOTE = 32
"""NT_AMDGPU_METADATA (AMDGPUUsage, note records)."""

_FIELDS = {
    "vgpr": ".vgpr_count",
    "agpr": ".agpr_count",
    "sgpr": ".sgpr_count",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "scratch_bytes": ".private_segment_fixed_size",
}


class UnreadableCodeObjectError(CommandError):
    """A code object is not the ELF file, or has not the metadata, that the AMD compiler writes."""


@dataclass(frozen=True)
class CodeObject:
    """What the note says of one kernel."""

    name: str
    arch: str
    """gfx name without the xnack and sramecc suffixes."""
    vgpr: int
    """Unified total of a wave: architectural and accumulation registers."""
    agpr: int
    sgpr: int
    vgpr_spills: int
    """Registers that did not fit. On gfx90a they may go to AGPRs, so this can be above 0 with no scratch."""
    sgpr_spills: int
    """Scalar registers parked in lanes of a VGPR."""
    scratch_bytes: int
    """Per work-item, in device memory."""


def read_code_object(code: bytes) -> CodeObject:
    """Read the one kernel of a code object.

    Args:
        code: The ELF file, Triton's `asm["hsaco"]`.

    Raises:
        UnreadableCodeObjectError: Not an ELF file, no metadata note, not exactly one kernel, or a figure is missing.
    """
    note = metadata(code)
    kernels = note.get("amdhsa.kernels", [])
    if len(kernels) != 1:
        raise UnreadableCodeObjectError(f"expected one kernel in the code object, found {len(kernels)}")
    kernel = {_FIELDS["agpr"]: 0} | kernels[0]  # RDNA has no accumulation registers
    missing = [key for key in (".name", *_FIELDS.values()) if key not in kernel]
    if missing:
        raise UnreadableCodeObjectError(f"the code object's note lacks {', '.join(missing)}")
    target = str(note.get("amdhsa.target", ""))
    processor = _PROCESSOR.search(target)
    if processor is None:
        raise UnreadableCodeObjectError(f"the code object's note names no gfx target (got {target!r})")
    figures = {name: int(kernel[key]) for name, key in _FIELDS.items()}
    return CodeObject(name=kernel[".name"], arch=processor[1], **figures)


_PROCESSOR = re.compile(r"-amdhsa-\w*-(gfx[\w-]+)")
"""Processor in a target: `amdgcn-amd-amdhsa--gfx942:xnack-`, and since Triton 3.9
`amdgpu9.42-amd-amdhsa-unknown-gfx942`."""

_ENTRY = slice(16, 24)
"""Bytes of a kernel descriptor with the distance to its code (AMDGPUUsage, "Kernel Descriptor"): a longer name in the
note changes it, and nothing that runs."""


def machine_code(code: bytes) -> str:
    """What a GPU is given of a code object, as a hash: the instructions, constants and the kernel's descriptor.

    The descriptor holds registers, scratch and what a wave begins with. Paths, lines, names and notes do not run, and
    do not count. LDS is not in it (see `CodeObject`).

    Args:
        code: An ELF file, for an AMD GPU or, without a descriptor, for an NVIDIA one.

    Raises:
        UnreadableCodeObjectError: Not an ELF file, or one without instructions.
    """
    try:
        elf = ELFFile(io.BytesIO(code))
        loaded = [
            (section.name, section["sh_addr"], bytearray(section.data()))
            for section in elf.iter_sections()
            if section["sh_type"] == "SHT_PROGBITS" and section["sh_flags"] & SH_FLAGS.SHF_ALLOC
        ]
        table = elf.get_section_by_name(".dynsym")
        symbols = list(table.iter_symbols()) if isinstance(table, SymbolTableSection) else []
    except (ELFError, ValueError, KeyError) as error:
        raise UnreadableCodeObjectError(f"not an ELF file: {error}") from error
    if not any(name.startswith(".text") and data for name, _, data in loaded):
        raise UnreadableCodeObjectError("the code object has no instructions")
    for symbol in symbols:
        for _, begin, data in loaded:
            offset = symbol["st_value"] - begin
            if symbol.name.endswith(".kd") and 0 <= offset < len(data):
                data[offset + _ENTRY.start : offset + _ENTRY.stop] = bytes(8)
    return hashlib.sha256(repr([(name, bytes(data)) for name, _, data in loaded]).encode()).hexdigest()


def metadata(code: bytes) -> dict[str, Any]:
    """The metadata note of a code object, as it is; raises UnreadableCodeObjectError."""
    try:
        sections = ELFFile(io.BytesIO(code)).iter_sections()
        notes = [note for section in sections if isinstance(section, NoteSection) for note in section.iter_notes()]
    except ELFError as error:
        raise UnreadableCodeObjectError(f"not an ELF file: {error}") from error
    for note in notes:
        if note["n_name"] == "AMDGPU" and note["n_type"] in (_METADATA_NOTE, "NT_AMDGPU_METADATA"):
            try:
                return dict(msgpack.unpackb(note["n_descdata"]))
            except ValueError as error:
                raise UnreadableCodeObjectError(f"the metadata note is not MessagePack: {error}") from error
    raise UnreadableCodeObjectError("the code object has no AMDGPU metadata note")


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_CALLER = re.compile(r"@\[ ([^:\s]+):(\d+)")
"""Line that calls an inlined function, in LLVM's comment on a `.loc`; the innermost call stands first."""
_HELPER = re.compile(r"\btl\.load\(\s*pointers\b")
"""Load of a helper that loads through what its caller names: such a load counts as one of the caller's line."""
_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]*)\b")
_LABEL = re.compile(r"^(\.LBB\w+):")
_BRANCH = re.compile(r"^\s+s_c?branch\w*\s+(\.LBB\w+)")
_MFMA = re.compile(r"v_(?:s?mfmac?|s?wmmac?)_\w+?_(\d+)x(\d+)x(\d+)")
"""Rows, columns and depth of a matrix instruction, MFMA or WMMA: so many multiplications and additions each."""
_BROADCAST_HIGH = re.compile(r"^\s+v_pk_fma_f32\b.*\bop_sel:\[0,1,0\]")
_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(?:f16|f32)")
_LDS = re.compile(r"ds_[a-z]+(?P<pair>2?|_2addr)(?:_?st(?:ride)?64)?(?:_rtn)?_[biuf](?P<bits>\d+)")
"""Pieces and bits that each lane moves."""
_LDS_WAIT = re.compile(r"\s+(?:s_waitcnt .*lgkmcnt|s_wait_(?:loadcnt_)?dscnt|s_wait_kmcnt)")
_OCCUPANCY = re.compile(r"^;\s*Occupancy:\s*(\d+)", re.MULTILINE)
_RELOAD = "Folded Reload"
"""LLVM's comment on a load that only brings back a spilled register; gfx90a spills with buffer instructions."""
_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(?:lds_)?(\w+)$")

_LOADS = {
    16: ("dwordx4", "b128"),
    12: ("dwordx3", "b96"),
    8: ("dwordx2", "b64"),
    4: ("dword", "b32"),
    2: ("ushort", "sshort", "short_d16", "short_d16_hi", "u16", "i16", "d16_b16", "d16_hi_b16"),
    1: (
        *("ubyte", "sbyte", "ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi"),
        *("u8", "i8", "d16_u8", "d16_hi_u8", "d16_i8", "d16_hi_i8"),
    ),
}
_LOAD_BYTES = {kind: width for width, kinds in _LOADS.items() for kind in kinds}
"""Bytes each lane reads; CDNA3 and RDNA4 ISA, microcode formats MUBUF and FLAT (VBUFFER, VFLAT). Scratch loads are
spills and counted as such."""


@dataclass(frozen=True)
class Site:
    """The loads of one width that come from one line of Python."""

    source: str
    """`file.py:line`; the file alone where the compiler merged lines."""
    width: int
    """Bytes per lane."""
    count: int
    code: str = ""
    """The line itself, where the file is at hand."""


@dataclass(frozen=True)
class Loop:
    """One innermost loop with matrix instructions: what a wave issues in a turn."""

    instructions: int
    mfma: int
    flop: int
    """Operations of those: two for each multiplication with its addition."""
    vector: int = 0
    """Instructions of the vector ALU, transcendental ones included."""
    transcendental: int = 0
    lds_bytes: int = 0
    """Bytes that each lane moves to, from or through LDS, as many as its instructions say."""
    lds_waits: int = 0
    """Waits for LDS or scalar loads."""
    barriers: int = 0
    moves: int = 0
    """Copies between VGPRs and AGPRs."""


@dataclass(frozen=True)
class Assembly:
    """Static counts of one kernel."""

    instructions: int
    mfma: int
    broadcast_high: int
    """Number of `v_pk_fma_f32` with `op_sel:[0,1,0]`: both results take the upper half of the second source."""
    loops: tuple[Loop, ...]
    """Loops in their order; in attention the first is over full tiles."""
    ds_ops: int
    waits: int
    loads: tuple[Site, ...]
    """Vector-memory loads, widest first."""
    occupancy: int
    """LLVM's own estimate from the registers alone, waves per SIMD."""

    def count_loads(self, *widths: int) -> int:
        """Number of loads of one of these widths in bytes; one of less than a dword costs a whole request too."""
        return sum(site.count for site in self.loads if site.width in widths)

    def loads_through(self, pointer: str) -> tuple[Site, ...]:
        """Loads through the kernel argument `pointer`, by their line of Python.

        The line is that of `tl.load(pointer ...` or of a helper's `load_...(pointer ...` (`_HELPER`), or of
        `pointer ...` alone where the call goes over several lines.
        """
        pattern = re.compile(rf"(?:\bload\w*\(\s*|^){re.escape(pointer)}\b(?!\s*=)")
        return tuple(site for site in self.loads if pattern.search(site.code))


def wide_share(sites: Iterable[Site], wide: int = 16) -> float:
    """Share of the bytes of these loads that arrive in pieces of `wide` bytes or more; 0 where nothing is loaded."""
    sizes = [(site.width * site.count, site.width >= wide) for site in sites]
    total = sum(size for size, _ in sizes)
    return sum(size for size, wide in sizes if wide) / total if total else 0.0


def read_assembly(text: str) -> Assembly:
    """Count what is in the AMDGCN text of one kernel.

    Args:
        text: What Triton keeps as `asm["amdgcn"]`.

    Raises:
        UnreadableCodeObjectError: No instruction, no occupancy comment, or a load of unknown width. A load we cannot
            measure would otherwise be missing from a ratio, and the ratio would look better than it is.
    """
    mnemonics: Counter[str] = Counter()
    lines: list[tuple[str, str]] = []  # mnemonic and line of each instruction
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    broadcast_high = 0
    loads: Counter[tuple[str, int, str]] = Counter()
    files = {number: Path(folder or "", name) for number, folder, name in _FILE.findall(text)}
    paths = {path.name: path for path in files.values()}
    source, code = "unknown", ""
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            mnemonic = found[1]
            mnemonics[mnemonic] += 1
            lines.append((mnemonic, line))
            broadcast_high += bool(_BROADCAST_HIGH.match(line))
            if (branch := _BRANCH.match(line)) and branch[1] in labels:
                spans.append((labels[branch[1]], len(lines)))
            if (load := _LOAD.match(mnemonic)) and _RELOAD not in line:
                if load[1] not in _LOAD_BYTES:
                    raise UnreadableCodeObjectError(
                        f"load of unknown width: {mnemonic}; teach it to pagedkv/audit/code_object.py"
                    )
                loads[source, _LOAD_BYTES[load[1]], code] += 1
        elif found := _LABEL.match(line):
            labels[found[1]] = len(lines)
        elif found := _LOC.match(line):
            source, code = _place(files.get(found[1], Path("unknown")), int(found[2]))
            callers = iter(_CALLER.findall(line))
            while _HELPER.search(code) and (caller := next(callers, None)):
                source, code = _place(paths.get(caller[0], Path(caller[0])), int(caller[1]))
    occupancy = _OCCUPANCY.search(text)

    def count(*prefixes: str) -> int:
        return sum(number for mnemonic, number in mnemonics.items() if mnemonic.startswith(prefixes))

    if not mnemonics or occupancy is None:
        raise UnreadableCodeObjectError("the AMDGCN text holds no instructions or no occupancy comment")
    return Assembly(
        instructions=mnemonics.total(),
        mfma=count("v_mfma_", "v_smfmac_", "v_wmma_", "v_swmmac_"),
        broadcast_high=broadcast_high,
        loops=_loops(spans, lines),
        ds_ops=count("ds_"),
        waits=count("s_wait"),
        loads=tuple(
            Site(source, width, number, code)
            for (source, width, code), number in sorted(loads.items(), key=lambda item: (-item[0][1], item[0][0]))
        ),
        occupancy=int(occupancy[1]),
    )


def _place(path: Path, number: int) -> tuple[str, str]:
    """Name of a line of Python, and the line itself; both of the file alone for line 0."""
    if not number:
        return path.name, ""
    return f"{path.name}:{number}", linecache.getline(str(path), number).strip()


def _loops(spans: list[tuple[int, int]], lines: list[tuple[str, str]]) -> tuple[Loop, ...]:
    """The innermost of `spans` (instructions after the first number, up to the second) with matrix instructions."""
    loops = [
        _loop(lines[begin:end])
        for begin, end in sorted(spans)
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in spans)
    ]
    return tuple(loop for loop in loops if loop.mfma)


def _loop(lines: list[tuple[str, str]]) -> Loop:
    flop, lds, vector = [], 0, 0
    for name, line in lines:
        matrix, access, load = _MFMA.match(name), _LDS.match(name), _LOAD.match(name)
        if matrix:
            flop.append(2 * math.prod(map(int, matrix.groups())))
        elif name.startswith("v_"):
            vector += 1
        if access:
            lds += int(access["bits"]) // 8 * (2 if access["pair"] else 1)
        if load and " lds" in line:
            lds += _LOAD_BYTES.get(load[1], 0)
    return Loop(
        instructions=len(lines),
        mfma=len(flop),
        flop=sum(flop),
        vector=vector,
        transcendental=sum(bool(_TRANSCENDENTAL.match(name)) for name, _ in lines),
        lds_bytes=lds,
        lds_waits=sum(bool(_LDS_WAIT.match(line)) for _, line in lines),
        barriers=sum(name in {"s_barrier", "s_barrier_wait"} for name, _ in lines),
        moves=sum(name.startswith("v_accvgpr_") for name, _ in lines),
    )
