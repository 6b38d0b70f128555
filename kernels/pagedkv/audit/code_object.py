"""Reader of AMD code objects: the registers, spills and scratch that the compiler wrote into the ELF file.

The figures are in a MessagePack note (AMDGPUUsage, "Code Object V3 and Above Metadata"). Two of them need care:
`.vgpr_count` is the unified total on gfx90a and later, accumulation registers included; and
`.group_segment_fixed_size` is 0 for every Triton kernel, whose LDS is dynamic, so LDS comes from Triton's metadata.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

from .errors import UnreadableCodeObjectError

_METADATA_NOTE = 32
"""NT_AMDGPU_METADATA (AMDGPUUsage, note records)."""

_FIELDS = {
    "vgpr": ".vgpr_count",
    "agpr": ".agpr_count",
    "sgpr": ".sgpr_count",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "scratch_bytes": ".private_segment_fixed_size",
    "max_workgroup": ".max_flat_workgroup_size",
}


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
    max_workgroup: int
    """Work-items."""


def read_code_object(code: bytes) -> CodeObject:
    """Read the one kernel of a code object.

    Args:
        code: The ELF file, Triton's `asm["hsaco"]`.

    Raises:
        UnreadableCodeObjectError: Not an ELF file, no metadata note, not exactly one kernel, or a figure is missing.
    """
    metadata = _metadata(code)
    kernels = metadata.get("amdhsa.kernels", [])
    if len(kernels) != 1:
        raise UnreadableCodeObjectError(f"expected one kernel in the code object, found {len(kernels)}")
    kernel = kernels[0]
    missing = [key for key in (".name", *_FIELDS.values()) if key not in kernel]
    if missing:
        raise UnreadableCodeObjectError(f"the code object's note lacks {', '.join(missing)}")
    target = str(metadata.get("amdhsa.target", ""))
    if "--" not in target:
        raise UnreadableCodeObjectError(f"the code object's note names no gfx target (got {target!r})")
    figures = {name: int(kernel[key]) for name, key in _FIELDS.items()}
    return CodeObject(name=kernel[".name"], arch=target.rsplit("--", 1)[1].split(":", maxsplit=1)[0], **figures)


def _metadata(code: bytes) -> dict[str, Any]:
    try:
        sections = [
            section for section in ELFFile(io.BytesIO(code)).iter_sections() if isinstance(section, NoteSection)
        ]
        notes = [note for section in sections for note in section.iter_notes()]
    except ELFError as error:
        raise UnreadableCodeObjectError(f"not an ELF file: {error}") from error
    for note in notes:
        if note["n_name"] == "AMDGPU" and note["n_type"] in (_METADATA_NOTE, "NT_AMDGPU_METADATA"):
            try:
                return dict(msgpack.unpackb(note["n_descdata"]))
            except ValueError as error:
                raise UnreadableCodeObjectError(f"the metadata note is not MessagePack: {error}") from error
    raise UnreadableCodeObjectError("the code object has no AMDGPU metadata note")
