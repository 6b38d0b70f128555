"""Every budget has a planted violation, and nothing else in the kernel is wrong."""

import pytest

from pagedkv.audit.budgets import FILE, Budgets, KernelBudget, Limits, load_budgets
from pagedkv.audit.code_object import Site
from pagedkv.audit.errors import InvalidDataError

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
    pytest.param({"kernel": "stranger"}, "stranger has no budget", id="a kernel without a budget"),
    pytest.param({"occupancy": 4}, "LLVM says 4", id="our occupancy model disagrees with LLVM's"),
]


def test_a_good_kernel_is_within_budget(figures):
    assert BUDGETS.violations(figures()) == []


@pytest.mark.parametrize(("change", "message"), VIOLATIONS)
def test_a_planted_violation_is_found_and_is_the_only_one(figures, change, message):
    [violation] = BUDGETS.violations(figures(**change))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(violation)


def test_narrow_loads_are_allowed_where_rows_are_not_dense(figures):
    assert BUDGETS.violations(figures(loads=NARROW), scattered=("key_cache", "value_cache")) == []


def test_sgpr_spills_are_reported_and_not_judged(figures):
    assert BUDGETS.violations(figures(sgpr_spills=300)) == []


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
    pytest.param("[every", "not TOML", id="syntax"),
    pytest.param(
        "[every]\nvgpr_spills = 0\n",
        "every: expected the keys scratch_bytes, vgpr_spills, wide_share; got vgpr_spills",
        id="a limit is missing",
    ),
    pytest.param("{every}\n[kernel.a]\nmfma = 1\n", "kernel", id="misspelt table"),
    pytest.param("{every}\n[kernels.a]\nmmfa = 1\n", "got mmfa", id="misspelt key"),
    pytest.param("{every}\n[kernels.a]\nmfma = -1\n", "at least 0", id="negative"),
    pytest.param("{every}\n[kernels.a]\nmfma = true\n", "got True; expected int", id="a boolean is no number"),
    pytest.param("{every}\n[kernels.a]\nwide = 'key'\n", "expected a list of texts", id="a string is no list"),
    pytest.param(
        "{every}\n[[compare]]\noperation = 'decode'\n",
        "expected the keys figure, operation, ours, theirs",
        id="half a rule",
    ),
    pytest.param("[every]\nvgpr_spills = 0\nscratch_bytes = 0\nwide_share = 1.5\n", "is a share", id="more than all"),
    pytest.param("{every}\n[kernels.a]\ntile = 32\n", "got 32; expected a text", id="a tile is a name"),
]


@pytest.mark.parametrize(("text", "message"), INVALID)
def test_invalid_budgets_are_refused(tmp_path, text, message):
    path = tmp_path / FILE.name
    path.write_text(
        text.format(every="[every]\nvgpr_spills = 0\nscratch_bytes = 0\nwide_share = 0.9") if "{" in text else text
    )
    with pytest.raises(InvalidDataError, match=message):
        load_budgets(path)
