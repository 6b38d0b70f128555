# SPDX-License-Identifier: Apache-2.0
"""The reader of offload bundles, on code objects that LLVM's AMDGPU assembler and linker made here."""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from pathlib import Path

import pytest

ARCHS = ("gfx90a", "gfx942", "gfx950")
PREFIX = "hip-amdgcn-amd-amdhsa--"
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
ASSEMBLY = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl add
.p2align 8
.type add,@function
add:
  s_endpgm
.Lend:
  .size add, .Lend-add
.rodata
.p2align 6
.amdhsa_kernel add
  .amdhsa_next_free_vgpr 8
  .amdhsa_next_free_sgpr 8
  .amdhsa_accum_offset 8
.end_amdhsa_kernel
"""


@pytest.fixture(scope="session")
def codeobjects():
    path = Path(__file__).parents[3] / "docker" / "codeobjects.py"
    spec = importlib.util.spec_from_file_location("codeobjects", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["codeobjects"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> dict[str, bytes]:
    """Architecture -> a linked code object with one kernel."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    folder = tmp_path_factory.mktemp("code")
    for arch in ARCHS:
        (folder / "add.o").write_bytes(amd.assemble_amdgcn(ASSEMBLY.format(arch=arch), arch, ""))
        amd.link_hsaco(str(folder / "add.o"), str(folder / arch))
    return {arch: (folder / arch).read_bytes() for arch in ARCHS}


def bundle(entries: dict[str, bytes]) -> bytes:
    """An offload bundle as clang lays it out: table, then entries at multiples of 4096."""
    head = len(MAGIC) + 8 + sum(24 + len(name) for name in entries)
    table, body, at = MAGIC + struct.pack("<Q", len(entries)), b"", -head % 4096 + head
    for name, blob in entries.items():
        table += struct.pack("<QQQ", at, len(blob), len(name)) + name.encode()
        body += blob + bytes(-len(blob) % 4096)
        at += len(blob) + -len(blob) % 4096
    return table + bytes(-len(table) % 4096) + body


def of_archs(compiled: dict[str, bytes], *archs: str, prefix: str = "hipv4-amdgcn-amd-amdhsa--") -> bytes:
    return bundle(
        {"host-x86_64-unknown-linux--": b""} | {prefix + arch: compiled[arch.split(":")[0]] for arch in archs}
    )


def library(path: Path, section: bytes, name: bytes = b".hip_fatbin") -> Path:
    """A minimal x86-64 ELF with one section."""
    names = b"\0" + name + b"\0.shstrtab\0"
    header = 64
    end = header + len(section) + len(names)
    table = end + -end % 8

    def entry(offset_of_name: int, kind: int, at: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", offset_of_name, kind, 0, 0, at, size, 0, 0, 1, 0)

    sections = (
        bytes(64) + entry(1, 1, header, len(section)) + entry(2 + len(name), 3, header + len(section), len(names))
    )
    elf = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    path.write_bytes(elf + section + names + bytes(-end % 8) + sections)
    return path


def compressed(plain: bytes, version: int, method: int = 0) -> bytes:
    body = zlib.compress(plain)
    header, sizes = (24, "<II") if version == 2 else (32, "<QQ")
    head = b"CCOB" + struct.pack("<HH", version, method)
    return head + struct.pack(sizes, header + len(body), len(plain)) + bytes(8) + body


@pytest.mark.parametrize("version", [None, 2, 3], ids=["plain", "compressed 2", "compressed 3"])
def test_every_architecture_with_its_kernels(codeobjects, compiled, tmp_path, version):
    section = of_archs(compiled, *ARCHS)
    kernels = codeobjects.kernels_of(library(tmp_path / "a.so", compressed(section, version) if version else section))
    assert kernels == dict.fromkeys(ARCHS, 1)


def test_bundles_of_several_translation_units_follow_each_other(codeobjects, compiled, tmp_path):
    section = of_archs(compiled, *ARCHS) + bytes(100) + of_archs(compiled, "gfx942")
    section += compressed(of_archs(compiled, "gfx950"), 2)
    kernels = codeobjects.kernels_of(library(tmp_path / "a.so", section))
    assert kernels == {"gfx90a": 1, "gfx942": 2, "gfx950": 2}


@pytest.mark.parametrize("target", ["gfx942:sramecc+:xnack-", "gfx942"])
@pytest.mark.parametrize("prefix", [PREFIX, "hipv4-amdgcn-amd-amdhsa--"])
def test_target_features_are_not_part_of_the_architecture(codeobjects, compiled, tmp_path, target, prefix):
    kernels = codeobjects.kernels_of(library(tmp_path / "a.so", of_archs(compiled, target, prefix=prefix)))
    assert kernels == {"gfx942": 1}


def test_a_library_without_device_code_has_none_a_text_file_errs(codeobjects, tmp_path):
    kernels = codeobjects.kernels_of(library(tmp_path / "a.so", b"x", name=b".text"))
    assert kernels == {}
    (tmp_path / "a.so").write_text("not an ELF file")
    with pytest.raises(codeobjects.UnreadableError, match="no readable ELF"):
        codeobjects.kernels_of(tmp_path / "a.so")


def test_an_entry_without_kernels_counts_none(codeobjects, compiled, tmp_path):
    section = of_archs(compiled | {"gfx950": compiled["gfx950"].replace(b"add.kd", b"add.xx")}, "gfx942", "gfx950")
    assert codeobjects.kernels_of(library(tmp_path / "a.so", section)) == {"gfx942": 1, "gfx950": 0}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda code: bundle({f"{PREFIX}gfx950": code["gfx942"]}), "for gfx950 is built for EM_AMDGPU 0x4c"),
        (lambda _: bundle({f"{PREFIX}gfx950": b"\x7fELF"}), "code object for gfx950 is no ELF"),
        (lambda _: bundle({f"{PREFIX}gfx950": b"gfx950"}), "code object for gfx950 is no ELF"),
        (lambda code: of_archs(code, *ARCHS)[:4200], "is cut off"),
        (lambda _: MAGIC, "is cut off"),
        (lambda _: MAGIC + struct.pack("<Q", 0), "bundle without entries"),
        (lambda _: b"gfx942 gfx950", "holds no offload bundle"),
        (lambda code: compressed(of_archs(code, *ARCHS), 2)[:-9], "is cut off after"),
        (lambda code: compressed(of_archs(code, *ARCHS), 2)[:-99] + bytes(99), "cannot be read"),
        (lambda code: b"CCOB" + struct.pack("<HH", 9, 0) + of_archs(code, *ARCHS), "version 9 by method 0 is unknown"),
        (lambda _: compressed(b"no bundle", 3), "no offload bundle inside"),
    ],
)
def test_what_cannot_be_read_is_an_error_never_an_absence(codeobjects, compiled, tmp_path, spoil, message):
    with pytest.raises(codeobjects.UnreadableError, match=message):
        codeobjects.kernels_of(library(tmp_path / "a.so", spoil(compiled)))
