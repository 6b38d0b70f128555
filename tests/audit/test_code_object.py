# SPDX-License-Identifier: Apache-2.0
"""The readers against a kernel whose figures are known by arithmetic, and against what they must refuse."""

import pytest

from pagedkv.audit import code_object
from pagedkv.audit.code_object import Loop, UnreadableCodeObjectError, read_assembly, read_code_object, wide_share
from pagedkv.audit.compile import probe

TEXT = """\
	.file	1 "/somewhere" "attend.py"
attend:
	.loc	1 10 4
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
	global_load_dwordx4 v[0:3], v[4:5], off
	.loc	1 11 4
	global_load_lds_dword v[4:5], off
	buffer_load_ushort v0, v4, s[0:3], 0 offen
	buffer_load_dword v9, off, s[0:3], 0 offset:8 ; 4-byte Folded Reload
	.loc	1 0 0
	global_load_ubyte v0, v[4:5], off
	ds_read_b128 v[0:3], v4
	ds_write_b64 v4, v[0:1]
	s_waitcnt vmcnt(0)
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_endpgm
; Occupancy: 6
"""


@pytest.mark.parametrize(("arch", "mfma"), [("gfx90a", 8), ("gfx942", 8), ("gfx950", 4)])
def test_figures_of_the_probe(compiled, arch, mfma):
    [figures] = compiled(arch, probe)
    assert (figures.kernel, figures.code.name, figures.code.arch) == ("probe_kernel", "probe_kernel", arch)
    # One operand of 64 x 64 bf16 goes through LDS; each of 256 lanes loads 16 elements of each of two operands.
    assert figures.lds_bytes == 64 * 64 * 2
    assert [(site.width, site.count) for site in figures.text.loads] == [(16, 4)]
    assert wide_share(figures.text.loads_through("a_ptr")) == 1
    # 64 x 64 x 64 multiply-adds in 4 waves are 65536 each; the widest bf16 instruction does 32 x 32 x 8 = 8192 of them,
    # on gfx950 32 x 32 x 16.
    assert figures.text.mfma == mfma
    assert (figures.code.vgpr_spills, figures.code.sgpr_spills, figures.code.scratch_bytes) == (0, 0, 0)
    assert 0 < figures.code.vgpr <= 128
    assert figures.code.agpr <= figures.code.vgpr, "the VGPR count is the unified total"
    assert figures.register_waves == figures.text.occupancy, "our register model and LLVM's agree"


@pytest.mark.parametrize(
    "target",
    [
        "amdgcn-amd-amdhsa--gfx942",
        "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-",
        "amdgpu9.42-amd-amdhsa-unknown-gfx942",  # since Triton 3.9
        "amdgcn-amd-amdhsa",
    ],
)
def test_the_target_names_the_arch(target, monkeypatch):
    figures = dict.fromkeys(code_object._FIELDS.values(), 0)
    note = {"amdhsa.kernels": [{".name": "kernel", **figures}], "amdhsa.target": target}
    monkeypatch.setattr(code_object, "metadata", lambda _: note)
    if "gfx" in target:
        assert read_code_object(b"").arch == "gfx942"
    else:
        with pytest.raises(UnreadableCodeObjectError, match="names no gfx target"):
            read_code_object(b"")


def test_instructions_are_counted_by_width_line_and_kind():
    text = read_assembly(TEXT)
    assert [(site.source, site.width, site.count) for site in text.loads] == [
        ("attend.py:10", 16, 2),
        ("attend.py:11", 4, 1),
        ("attend.py:11", 2, 1),
        ("attend.py", 1, 1),
    ]
    assert wide_share(text.loads) == pytest.approx(32 / 39)
    assert wide_share(()) == 0
    assert text.count_loads(2, 1) == 2
    assert (text.mfma, text.ds_ops, text.waits, text.occupancy) == (1, 2, 1, 6)


def test_innermost_loops_and_their_matrix_work_are_found():
    outer, product = ".LBB0_1:\n\tv_mfma_f32_16x16x16_bf16 v0\n", "\tv_mfma_f32_32x32x8_f16 v0\n"
    inner = f".LBB0_2:\n\ts_cbranch_vccz .LBB0_3\n{product}.LBB0_3:\n{product}\ts_cbranch_scc1 .LBB0_2\n"
    text = read_assembly(
        f"{outer}.LBB0_4:\n\ts_nop 0\n\ts_cbranch_scc0 .LBB0_4\n{inner}\ts_branch .LBB0_1\n; Occupancy: 8\n"
    )
    assert text.loops == (Loop(instructions=4, mfma=2, flop=2 * 2 * 32 * 32 * 8),)


def test_packed_fma_that_broadcasts_an_upper_half_is_counted():
    fma = "\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]"
    lines = (f"{fma} op_sel:[0,1,0]", f"{fma} op_sel:[0,1,0] op_sel_hi:[1,1,0]", fma, f"{fma} op_sel_hi:[0,1,0]")
    assert read_assembly("\n".join((*lines, "; Occupancy: 8\n"))).broadcast_high == 2


def test_loads_are_found_by_the_pointer_they_go_through(tmp_path):
    lines = [
        "k = tl.load(key_cache + row)",
        "v = tl.load(value_cache_2 + key_cache)",
        "    key_cache + row,",
        "key_cache = 1",
        "tile = tl.load(pointers, mask=mask)",
        "k = tl.trans(load_tile(key_cache + row, mask))",
    ]
    (tmp_path / "attend.py").write_text("\n".join(lines))
    text = read_assembly(
        f'\t.file\t1 "{tmp_path}" "attend.py"\n\t.loc\t1 1 0\n\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\n'
        "\t.loc\t1 2 0\n\tglobal_load_ushort v0, v[4:5], off\n\t.loc\t1 3 0\n\tglobal_load_ubyte v0, v[4:5], off\n"
        "\t.loc\t1 4 0\n\tglobal_load_dword v0, v[4:5], off\n"
        "\t.loc\t1 5 0  ; attend.py:5:9 @[ attend.py:6:14 @[ attend.py:2:0 ] ]\n"
        "\tglobal_load_dwordx2 v[0:1], v[4:5], off\n"
        "; Occupancy: 8\n"
    )
    assert [site.source for site in text.loads_through("key_cache")] == ["attend.py:1", "attend.py:6", "attend.py:3"]
    assert text.loads_through("value_cache") == ()


def test_reloads_of_spills_are_no_loads():
    assert "Folded Reload" in TEXT
    assert 4 not in {site.width for site in read_assembly(TEXT.replace("global_load_lds_dword ", "s_nop ")).loads}


def test_a_load_of_unknown_width_is_refused():
    with pytest.raises(UnreadableCodeObjectError, match="buffer_load_format_xyz"):
        read_assembly(TEXT + "\tbuffer_load_format_xyz v[0:2], v4, s[0:3], 0 offen\n")


@pytest.mark.parametrize("text", ["", "; Occupancy: 8\n", "\ts_endpgm\n"])
def test_text_without_a_kernel_is_refused(text):
    with pytest.raises(UnreadableCodeObjectError, match="no instructions or no occupancy"):
        read_assembly(text)


@pytest.mark.parametrize("code", [b"", b"not an ELF file", b"\x7fELF" + bytes(60)])
def test_bytes_that_are_no_code_object_are_refused(code):
    with pytest.raises(UnreadableCodeObjectError):
        read_code_object(code)
