# SPDX-License-Identifier: Apache-2.0
"""Every budget has a planted violation, and nothing else in the kernel is wrong; what a declaration must say."""

import pytest

from pagedkv.audit.budgets import EVERY, FILE, Budgets, KernelBudget, Limits, load_budgets, load_declared
from pagedkv.audit.cases import Case, LaunchConfiguration
from pagedkv.audit.code_object import Site
from pagedkv.errors import InvalidFileError

BUDGETS = Budgets(
    every=Limits(vgpr_spills=0, scratch_bytes=0, wide_share=0.9),
    comparisons=(),
    kernels={"attend": KernelBudget(tile="TILE", mfma=1, wide=("key_cache",))},
    evidence={},
)

K_LOAD = "k = tl.load(key_cache + row[:, None] + channel[None, :], mask=mask, other=0.0)"
NARROW = (Site("attend.py:7", 16, 2, K_LOAD), Site("attend.py:7", 2, 40, K_LOAD))

VIOLATIONS = [
    pytest.param({"lds_bytes": 65537}, "65537 B of LDS, gfx942 has 65536", id="LDS"),
    pytest.param({"vgpr_spills": 1}, "1 VGPRs spilled", id="a spill without scratch, as on gfx90a"),
    pytest.param({"scratch_bytes": 4}, "4 B of scratch", id="scratch"),
    pytest.param({"mfma": 0}, "0 MFMA", id="no MFMA"),
    pytest.param({"loads": NARROW}, "29% of the bytes .* key_cache .*40 of 2 B at attend.py:7", id="narrow loads"),
    pytest.param({"loads": ()}, "no tl.load through key_cache", id="no loads at all"),
    pytest.param({"loads": (Site("a.py:1", 16, 9, "q = tl.load(query)"),)}, "no tl.load through key", id="other loads"),
    pytest.param({"pointer_choices": ("a.py:9",)}, "yields a pointer at a.py:9", id="a pointer out of a branch"),
    pytest.param({"kernel": "stranger"}, "stranger has no budget", id="a kernel without a budget"),
    pytest.param({"occupancy": 4}, "LLVM says 4", id="our occupancy model disagrees with LLVM's"),
]


def test_a_good_kernel_is_within_budget_and_sgpr_spills_are_not_judged(figures):
    assert BUDGETS.violations(figures()) == BUDGETS.violations(figures(sgpr_spills=300)) == []


@pytest.mark.parametrize(("change", "message"), VIOLATIONS)
def test_a_planted_violation_is_found_and_is_the_only_one(figures, change, message):
    [violation] = BUDGETS.violations(figures(**change))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(violation)


def test_narrow_loads_are_allowed_where_rows_are_not_dense(figures):
    assert BUDGETS.violations(figures(loads=NARROW), scattered=("key_cache", "value_cache")) == []


def test_our_budgets_allow_no_spill_and_no_scratch():
    budgets = load_budgets()
    assert budgets.every == Limits(vgpr_spills=0, scratch_bytes=0, wide_share=1)


def test_every_rule_names_kernels_that_the_file_knows():
    budgets = load_budgets()
    assert {rule.operation for rule in budgets.comparisons} == {"decode", "prefill", "mla-16", "mla-128"}
    for rule in budgets.comparisons:
        assert rule.ours in budgets.kernels
        assert rule.theirs in budgets.evidence


def test_every_kernel_with_a_dot_product_must_use_matrix_instructions():
    for name, budget in load_budgets().kernels.items():
        assert budget.mfma >= 1 or "attention" not in name or "reduce" in name, name


INVALID = [
    pytest.param("", "every: expected the keys", id="no limits"),
    pytest.param("[every]\nvgpr_spills = 0\nscratch_bytes = 0\nwide_share = 1.5\n", "is a share, got 1.5", id="share"),
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
    pytest.param({"arch": '["gfx1100"]'}, "arch: got gfx1100", id="arch"),
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
