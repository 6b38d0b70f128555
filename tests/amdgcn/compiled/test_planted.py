# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the machine code of the kernels are caught, each with its place; so is a miscompile of Triton's."""

import re

import pytest
import torch
import triton
from support import mla_steps
from support.attending import attend, expected, small
from support.machine_code import OUTPUTS
from support.tolerances import ROW_RELATIVE

from amdgcn.errors import ProgramFault
from amdgcn.launch import amdgcn
from amdgcn.text import parse
from amdgcn.waits import check_waits
from pagedkv.attention import reference
from pagedkv.mla.kernel import mla_decode_kernel


@pytest.fixture
def arch(request):
    return request.config.getoption("amdgcn")


def wrong(out, golden, bound):
    """What is wrong with rows: NaN where there is none or none where there is one, or an error beyond the bound."""
    if not torch.equal(out.isnan(), golden.isnan()):
        return "NaN"
    error = (out.double() - golden).nan_to_num(0.0, float("inf"), float("inf")).norm(dim=-1)
    return "" if (error <= bound * golden.nan_to_num(0.0).norm(dim=-1)).all() else f"error {error.max():.2g}"


def decode(query_lens=(1, 1)):
    """K and V in every block, K first: 16 tokens of 2 heads of 64 channels, 4096 bytes each."""
    data = small("cpu", list(query_lens), [100, 37], dtype="bfloat16", num_q_heads=8)
    return wrong(attend(data, num_splits=1), expected(data), ROW_RELATIVE["attention", "bfloat16"])


def extend():
    """Programs of several waves; those of a decode have one."""
    return decode((16, 2))


def planted(arch, kernel, pattern, change, number, run=decode):
    """The fault, or what is wrong with the result, when the `number`th match is changed; None if there is no such."""
    text = ""

    def mutate(name, old):
        nonlocal text
        found = list(re.finditer(pattern, old.partition(".amdhsa_kernel")[0], re.MULTILINE))
        if name != kernel or number >= len(found):
            return old
        text = old[: found[number].start()] + found[number].expand(change) + old[found[number].end() :]
        return text

    with amdgcn(arch, outputs=OUTPUTS, mutate=mutate):
        try:
            result = run()
        except ProgramFault as fault:
            return fault
    assert not result or text, result
    return (result or [str(each) for each in check_waits(parse(text))] or "nothing") if text else None


def every(arch, kernel, pattern, change, run=decode):
    found = []
    while (one := planted(arch, kernel, pattern, change, len(found), run)) is not None:
        found.append(one)
    assert found, f"{kernel} has no {pattern}"
    return found


STORE = r"^(\t(?:buffer|global)_store_\w+ [^;\n]*?)( offset:\d+)?$"
LOAD_16 = r"^(\t(?:buffer|global)_load_(?:dwordx4|b128) [^;\n]*?)( offset:\d+)?$"
BARRIER = r"^\ts_barrier(?:_signal -1\n((?:.*\n)*?)\ts_barrier_wait -1)?$"
WAIT = r"\ts_wait(?:cnt vmcnt\((\d+)\)|_loadcnt (0x\w+))"


def test_a_store_out_of_bounds_is_caught(arch):
    for fault in every(arch, "attention_kernel", STORE, r"\1 offset:4080"):
        assert re.match(r"write of \d+ bytes at offset \d+ of (out|lse) \(\d+ bytes", str(fault))
        assert fault.where.keys() >= {"kernel", "buffer", "workgroup", "wave", "lane", "instruction", "line"}
        assert re.fullmatch(r"(kernel|merge)\.py:\d+", fault.where["line"])


def test_v_read_as_k_and_k_as_v_is_caught(arch):
    """Every wide load of the kernel, 4080 bytes on: inside the pool, and in the other side's bytes."""
    names = [
        getattr(fault, "where", {}).get("buffer")
        for fault in every(arch, "attention_kernel", LOAD_16, r"\1 offset:4080")
    ]
    assert {"key_cache", "value_cache"} <= set(names)


def test_a_barrier_less_is_a_race(arch):
    found = every(arch, "attention_kernel", BARRIER, "\ts_nop 0\n\\1", extend)
    assert sum(str(each).startswith("LDS race") for each in found) >= 2, found


def test_a_wait_less_is_caught(arch):
    """By the twins while it runs, or by the static check where no value of it is used before the next wait."""
    texts = {}
    with amdgcn(arch, outputs=OUTPUTS, mutate=texts.setdefault):
        decode()
    # A wait after one for as much, without an access or a label between them, waits for nothing.
    idle, waited = [], None
    for line in texts["attention_kernel"].partition(".amdhsa_kernel")[0].splitlines():
        if re.match(r"\t(buffer|global)_|\.LBB", line):
            waited = None
        elif wait := re.match(f"{WAIT}(.*)", line):
            outstanding = int(wait[1] or wait[2], 0)
            idle += [] if wait[3] else [waited is not None and outstanding >= waited]
            waited = outstanding if waited is None else min(waited, outstanding)
    found = every(arch, "attention_kernel", f"^{WAIT}$", "\ts_nop 0")
    assert "nothing" not in [one for one, needless in zip(found, idle, strict=True) if not needless]
    assert any("its load not waited for" in str(each) for each in found)


def test_a_write_to_an_input_is_caught(arch):
    with (
        pytest.raises(ProgramFault, match=r"of out \(\d+ bytes, read-only\)"),
        amdgcn(arch, outputs={"attention_kernel": []}),
    ):
        decode()


class OfSixteenChannels:
    """The kernel as it was launched before: with halves of 16 channels."""

    arg_names = mla_decode_kernel.arg_names

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            halves = {"OPTIONS": constants["OPTIONS"]._replace(HALF_RANK=16)}
            return mla_decode_kernel[grid](*arguments, **(constants | halves))

        return launch


def test_a_miscompile_is_caught(arch, monkeypatch):
    """Triton 3.6.0 on gfx942 halves the accumulator that comes into a product of 16 channels; others do not."""
    monkeypatch.setattr("pagedkv.mla.decode.mla_decode_kernel", OfSixteenChannels())
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # the same bytes each time
    data = mla_steps.step("cpu", 4, [50, 9], latent=32, dtype="float16")
    rows = data.cache[:, :, None]
    golden, _ = reference.attention(data.query, rows, rows[..., :32], **data.metadata, scale=data.scale)
    found = wrong(mla_steps.decode(data, programs=3)[0], golden, ROW_RELATIVE["mla", "float16"])
    assert bool(found) == ((arch, triton.__version__) == ("gfx942", "3.6.0")), found


def test_two_archs_in_one_process(arch):
    """One after the other, and one inside the other: each runs its own machine code of the same prepared call."""
    other = {"gfx942": "gfx950", "gfx950": "gfx1201", "gfx1201": "gfx942"}[arch]
    names = []
    for name in (arch, other, arch):
        with amdgcn(name) as session:
            assert not decode()
            with amdgcn({arch: other, other: arch}[name]) as inner:
                assert not decode()
            assert not decode()
        assert (len(session.launches), len(inner.launches)) == (2, 1)
        names += [{parse(text).target.name for text in each.texts.values()} for each in (session, inner)]
    assert names == [{arch}, {other}, {other}, {arch}, {arch}, {other}]
