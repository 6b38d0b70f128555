# SPDX-License-Identifier: Apache-2.0
"""Every budget has a planted violation, and nothing else in the kernel is wrong; what a declaration must say."""

import functools
import re
from dataclasses import replace

import pytest
from support.planted import instead, must_be_noticed, planted

from pagedkv.audit.budgets import (
    EVERY,
    FILE,
    Budgets,
    Ceiling,
    DeclaredSpill,
    KernelBudget,
    Limits,
    LoopBudget,
    load_budgets,
    load_declared,
)
from pagedkv.audit.cases import Case, LaunchConfiguration, cases_of
from pagedkv.audit.code_object import Loop, Site
from pagedkv.audit.machine import MACHINES
from pagedkv.errors import InvalidFileError

BUDGETS = Budgets(
    every=Limits(vgpr_spills=0, scratch_bytes=0, wide_share=0.9),
    comparisons=(),
    loops=(LoopBudget("gfx942/.*/prefill", flop_per_instruction=600, waves_per_simd=2),),
    kernels={"attend": KernelBudget(tile="BLOCK_N", rows="BLOCK_M", channels=("D", "D"), mfma=1, wide=("key_cache",))},
    evidence={},
    ceilings={"3.8.0": {"gfx942/ours/prefill/attend": Ceiling(loop_instructions=200, mfma=16, waves_per_simd=4)}},
)

K_LOAD = "k = tl.load(key_cache + row[:, None] + channel[None, :], mask=mask, other=0.0)"
NARROW = (Site("attend.py:7", 16, 2, K_LOAD), Site("attend.py:7", 2, 40, K_LOAD))

NARROWLY = re.compile("29% of the bytes .* key_cache .*40 of 2 B at attend.py:7")
QUERY = Site("a.py:1", 16, 9, "q = tl.load(query)")
VIOLATIONS = {
    "LDS": ({"lds_bytes": 65537}, "65537 B of LDS, gfx942 has 65536"),
    "a spill without scratch, as on gfx90a": ({"vgpr_spills": 1}, "1 VGPRs spilled"),
    "scratch": ({"scratch_bytes": 4}, "4 B of scratch"),
    "no MFMA": ({"mfma": 0}, "0 MFMA"),
    "narrow loads": ({"loads": NARROW}, NARROWLY),
    "no loads at all": ({"loads": ()}, "no tl.load through key_cache"),
    "other loads": ({"loads": (QUERY,)}, "no tl.load through key"),
    "a pointer out of a branch": ({"pointer_choices": ("a.py:9",)}, "yields a pointer at a.py:9"),
    "a kernel without a budget": ({"kernel": "stranger"}, "stranger has no budget"),
    "what gfx950 errs in": ({"arch": "gfx950", "broadcast_high": 2}, "2 v_pk_fma_f32"),
    "our occupancy model disagrees with LLVM's": ({"occupancy": 4}, "LLVM says 4"),
}


def test_a_good_kernel_is_in_budget_whatever_its_sgpr_spills(figures):
    assert BUDGETS.violations(figures()) == BUDGETS.violations(figures(sgpr_spills=300)) == []


def test_llvm_counts_no_more_waves_than_the_launch_asked_for(figures):
    assert BUDGETS.violations(replace(figures(occupancy=2), waves_per_eu=2)) == []


@planted(VIOLATIONS)
def test_a_planted_violation_is_found_and_is_the_only_one(figures, fault):
    must_be_noticed(fault, BUDGETS.violations, instead(figures(**fault.change)), figures())


SHAPE = {"BLOCK_N": "32", "BLOCK_M": "32", "D": "128"}
"""Shape of 4 waves: 2 x 2 x 32 x 32 x 128 / 4 operations each, 16 instructions of 16 x 16 x 16."""

LOOPS = [
    pytest.param((Loop(200, 16, 16 * 8192),), 655.4, [], id="as it should be"),
    pytest.param((Loop(200, 32, 32 * 8192),), 655.4, ["issues 32 MFMA .* needs 16"], id="each product twice"),
    pytest.param((Loop(200, 8, 8 * 32768),), 655.4, ["issues 8 MFMA .* needs 4"], id="twice, of 32 rows and columns"),
    pytest.param((Loop(400, 16, 16 * 8192),), 327.7, ["327.7 FLOP for each of the 400"], id="too many others"),
]


@pytest.mark.parametrize(("loops", "flop", "problems"), LOOPS)
def test_a_loop_is_judged_by_what_its_products_need(figures, loops, flop, problems):
    kernel = figures(loops=loops)
    numbers = BUDGETS.loop_numbers(kernel, SHAPE)
    assert numbers["flop_per_instruction"] == flop
    found = BUDGETS.loop_violations("gfx942/ours/prefill/attend", numbers, kernel)
    assert len(found) == len(problems)
    assert all(re.search(problem, text) for problem, text in zip(problems, found, strict=True))
    elsewhere = BUDGETS.loop_violations("gfx90a/ours/prefill/attend", numbers, kernel)
    assert len(elsewhere) == sum("MFMA" in problem for problem in problems), "the [[loop]] is of gfx942"


def test_a_loop_of_too_few_waves_is_over_budget(figures):
    kernel = figures(vgpr=300, occupancy=1)
    [found] = BUDGETS.loop_violations("gfx942/ours/prefill/attend", BUDGETS.loop_numbers(kernel, SHAPE), kernel)
    assert "at 1 waves a SIMD (at least 2)" in found


CEILINGS = [
    pytest.param({}, [], id="as measured"),
    pytest.param({"loops": (Loop(201, 16, 16 * 8192),)}, ["loop_instructions is 201 .ceiling 200"], id="instructions"),
    pytest.param({"loops": (Loop(200, 17, 17 * 8192),)}, ["mfma_issued is 17 .ceiling 16"], id="MFMA"),
    pytest.param({"vgpr": 300}, ["1 waves a SIMD .at least 4"], id="waves"),
    pytest.param({"loops": ()}, ["loop_instructions is unknown", "mfma_issued is unknown"], id="no loop"),
]


@pytest.mark.parametrize(("changes", "problems"), CEILINGS)
def test_a_row_may_not_exceed_its_ceiling(figures, changes, problems):
    kernel = figures(**changes)
    numbers = BUDGETS.loop_numbers(kernel, SHAPE)
    found = BUDGETS.ceiling_violations("gfx942/ours/prefill/attend", "3.8.0", numbers, kernel)
    assert len(found) == len(problems)
    assert all(re.search(problem, text) for problem, text in zip(problems, found, strict=True))
    for row, triton in (("gfx942/ours/prefill/attend", "3.6.0"), ("gfx950/ours/prefill/attend", "3.8.0")):
        assert BUDGETS.ceiling_violations(row, triton, numbers, kernel) == []


def test_a_loop_has_figures_where_its_channels_are_not_known(figures):
    budgets = replace(BUDGETS, kernels={"attend": KernelBudget(mfma=1)})
    assert budgets.loop_numbers(figures(), SHAPE) == {"loop_instructions": 200, "mfma_issued": 16}
    assert budgets.loop_violations("gfx942/ours/prefill/attend", {"mfma_issued": 16}, figures()) == []


@pytest.mark.parametrize(("spills", "allowed"), [(18, False), (19, True), (20, False), (0, False)])
def test_a_declared_spill_is_allowed_to_the_register(figures, spills, allowed):
    declared = DeclaredSpill("3.6.0", "gfx942/ours/prefill/attend", 19, 76, "it does")
    kernel = figures(vgpr_spills=spills, scratch_bytes=4 * spills)
    assert (BUDGETS.violations(kernel, spill=declared) == []) == allowed
    assert bool(BUDGETS.violations(kernel)) == bool(spills)


def test_ceilings_and_declared_spills_are_of_rows_that_exist():
    known = {case.id(arch, kernel) for case in cases_of("ours") for arch in MACHINES for kernel in case.kernels}
    named = {row for rows in load_budgets().ceilings.values() for row in rows} | {e.row for e in load_declared().spills}
    assert named <= known
    assert {each.triton for each in load_declared().spills} == {"3.6.0"}, "3.8.0 spills nothing"


@pytest.mark.parametrize("triton", ["3.6.0", "3.8.0"])
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_rdna_is_promised_most_of_what_cdna_is(arch, triton):
    promise = functools.partial(load_budgets().promise, triton=triton)
    cases = [case for case in cases_of("ours") if not case.name.startswith("mla-")]
    lost = [case.name for case in cases if any(promise(case.id(arch, kernel)) for kernel in case.kernels)]
    assert len(lost) <= 0.4 * len(cases)
    named = {"gdn_decode_kernel", "_write_kernel", "packed_gather_kernel", "gdn_prefill_kernel", "ssd_prefill_kernel"}
    kept = {kernel for case in cases if case.name not in lost for kernel in case.kernels}
    assert named | {"attention_kernel", "reduce_kernel"} <= kept
    assert not any(promise(case.id("gfx942", kernel)) for case in cases for kernel in case.kernels)


def test_no_products_or_no_loop_means_no_loop_figures(figures):
    assert BUDGETS.loop_numbers(figures(kernel="other"), SHAPE) == {}
    assert BUDGETS.loop_numbers(figures(loops=()), SHAPE) == {}
    assert BUDGETS.loop_violations("gfx942/ours/prefill/attend", {}, figures()) == []


def test_narrow_loads_are_allowed_where_rows_are_not_dense(figures):
    assert BUDGETS.violations(figures(loads=NARROW), scattered=("key_cache", "value_cache")) == []


def test_every_rule_names_kernels_that_the_file_knows():
    budgets = load_budgets()
    assert {rule.operation for rule in budgets.comparisons} == {"decode", "prefill", "mla-16", "mla-128"}
    for rule in budgets.comparisons:
        assert rule.ours in budgets.kernels
        assert rule.theirs in budgets.evidence


INVALID = [
    pytest.param("", "every: expected the keys", id="no limits"),
    pytest.param(
        "[every]\nvgpr_spills = 0\nscratch_bytes = 0\nwide_share = 1.5\n",
        "is a share, got 1.5",
        id="share",
    ),
    pytest.param(
        "[every]\nvgpr_spills = 0\nscratch_bytes = 0\nwide_share = 1.0\n"
        '[[loop]]\nrows = "("\nflop_per_instruction = 1\nwaves_per_simd = 1\n',
        "is no regular expression",
        id="rows of a loop",
    ),
    pytest.param("[kernel]\n", "got kernel; known: every", id="misspelt table"),
]


@pytest.mark.parametrize(("text", "message"), INVALID)
def test_invalid_budgets_are_refused(tmp_path, text, message):
    path = tmp_path / FILE.name
    path.write_text(text)
    with pytest.raises(InvalidFileError, match=message):
        load_budgets(path)


DECLARATION = """[[narrow]]
triton = "3.8.0"
row = "gfx942/ours/a/attend"
pointers = ["value_cache"]
why = "it does"
"""


def test_a_narrow_load_is_declared_for_its_row_and_its_compiler(tmp_path):
    path = tmp_path / "declared.toml"
    path.write_text(DECLARATION)
    declared = load_declared(path)
    rows = [("gfx942", "3.8.0"), ("gfx950", "3.8.0"), ("gfx942", "3.6.0")]
    found = [declared.narrow_pointers(f"{arch}/ours/a/attend", triton) for arch, triton in rows]
    assert found == [("value_cache",), (), ()]


VALID = {
    "kernel": '"vllm/scan"',
    "triton": '"3.6.0"',
    "arch": '["gfx942"]',
    "configurations": '["a"]',
    "says": '"assert"',
    "why": '"because"',
}

UNDECLARED = [
    pytest.param({"kernel": '"vllm/scam"'}, "got vllm/scam; known: vllm/scan", id="kernel"),
    pytest.param({"arch": '["gfx1030"]'}, "arch: got gfx1030", id="arch"),
    pytest.param({"configurations": '["z"]'}, "configurations: got z; known: every, a, b", id="configuration"),
    pytest.param({"says": '"("'}, "no regular expression", id="expression"),
]


def declare(tmp_path, **changes):
    path = tmp_path / "declared.toml"
    path.write_text("[[crash]]\n" + "".join(f"{key} = {value}\n" for key, value in (VALID | changes).items()))
    declared = load_declared(path)
    configurations = [LaunchConfiguration("vllm/scan", name, 2, autotuned=True) for name in "ab"]
    declared.check_names(Case("mamba", "scan", ("scan",), list, {}, configuration=each) for each in configurations)
    return declared.crashes


def test_a_declaration_is_read(tmp_path):
    [one] = declare(tmp_path)
    assert (one.arch, one.configurations) == (("gfx942",), ("a",))
    [every] = declare(tmp_path, configurations='["every"]')
    assert every.configurations == (EVERY,)


@pytest.mark.parametrize(("change", "message"), UNDECLARED)
def test_an_invalid_declaration_is_refused(tmp_path, change, message):
    with pytest.raises(InvalidFileError, match=message):
        declare(tmp_path, **change)
