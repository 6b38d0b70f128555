# SPDX-License-Identifier: Apache-2.0
"""From a launch to a finding, with kernels that are right, too large, absent, or fatal to the compiler."""

import pytest
import torch

from hilgate.model.record import Check
from pagedkv.audit.budgets import Budgets, Declared, KernelBudget, Limits
from pagedkv.audit.cases import Case, cases_of
from pagedkv.audit.compile import probe
from pagedkv.audit.findings import Finding, exit_status, write_findings
from pagedkv.audit.judge import judge
from pagedkv.audit.runner import compile_all, make_plan
from pagedkv.audit.tensors import Batch
from pagedkv.errors import Exit

BUDGETS = Budgets(
    every=Limits(vgpr_spills=0, scratch_bytes=0, wide_share=1.0),
    loops=(),
    comparisons=(),
    kernels={"probe_kernel": KernelBudget(tile="SIDE", mfma=1, wide=("a_ptr", "b_ptr"))},
    evidence={},
)
BATCH = Batch(torch.bfloat16, head_size=64, num_heads=8, num_kv_heads=2, block_size=16, big=False)


def case(launch=probe, *, name="probe"):
    return Case("ours", name, ("probe_kernel",), launch, BATCH.labels("decode", "nhd"))


def audit(*cases):
    rows = compile_all(make_plan([("gfx942", each) for each in cases]), jobs=2, timeout=60)
    return judge(rows, BUDGETS, Declared(), triton="x")


def read_codes(arch):
    """A decode over codes of the device's own format, which its instructions convert."""
    end = {"gfx942": "d64-bs784-interleaved-e4m3fnuz-head", "gfx950": "d64-bs48-packed-e4m3fn-tensor"}[arch]
    cases = (each for each in cases_of("ours") if each.name.startswith("attention-decode"))
    return arch, next(each for each in cases if each.name.endswith(end))


def test_what_an_arch_gets_does_not_depend_on_another_before_it():
    """Triton 3.6.0 keeps the conversions of the first arch that a process compiles for."""

    def machine_code(*arches):
        rows = compile_all(make_plan([read_codes(arch) for arch in arches]), jobs=1, timeout=120)
        return [row.result.machine_code for row in rows if row.arch == "gfx950"]

    assert machine_code("gfx942", "gfx950") == machine_code("gfx950")


def too_large():
    probe(512)


def test_a_good_kernel_passes_with_its_figures():
    [finding] = audit(case())
    assert (finding.id, finding.outcome) == ("gfx942/ours/probe/probe_kernel", "pass")
    assert finding.numbers["lds_bytes"] == 8192
    assert finding.numbers["lds_limit_bytes"] == 65536
    assert finding.numbers["mfma"] == 8
    assert finding.numbers["kv_tokens_in_flight"] == 64 * finding.numbers["waves_per_simd"]
    assert finding.labels["tile"] == "64"
    assert finding.labels["arch"] == "gfx942"


def test_an_oversize_tile_fails_at_once_and_says_by_how_much(figures):
    [finding] = audit(case(lambda: probe(256)))
    assert finding.outcome == "fail"
    assert "131072 B of LDS, gfx942 has 65536 B" in finding.message
    assert finding.numbers == {"lds_bytes": 131072, "lds_limit_bytes": 65536}
    fits = figures(kernel="probe_kernel", lds_bytes=131072, arch="gfx950", occupancy=5)
    assert BUDGETS.violations(fits, scattered=("a_ptr", "b_ptr")) == []


def refuse():
    raise ValueError("head_size 64: expected 128")


@pytest.mark.parametrize(
    ("launch", "message"), [(list, "it launched nothing"), (refuse, "ValueError: head_size 64: expected 128")]
)
def test_a_launch_that_compiles_nothing_fails(launch, message):
    [finding] = audit(case(launch))
    assert (finding.id, finding.outcome) == ("gfx942/ours/probe/launch", "fail")
    assert message in finding.message


def test_equal_code_is_compiled_once_and_reported_twice():
    plan = make_plan([("gfx942", case()), ("gfx942", case(name="again")), ("gfx950", case())])
    assert [(kernel.arch, first) for kernel, first in plan.kernels.items()] == [
        ("gfx942", "gfx942/ours/probe/probe_kernel"),
        ("gfx950", "gfx950/ours/probe/probe_kernel"),
    ]
    first, again, _ = compile_all(plan, jobs=2, timeout=60)
    assert (again.result, again.twin) == (first.result, "gfx942/ours/probe/probe_kernel")


STATUS = [
    pytest.param(["pass"], 1, Exit.PASS, id="all pass"),
    pytest.param(["pass", "fail", "inconclusive"], 1, Exit.FAIL, id="a failure outweighs doubt"),
    pytest.param(["pass", "inconclusive"], 1, Exit.INCONCLUSIVE, id="doubt"),
    pytest.param(["pass"], 0, Exit.NOTHING_COMPILED, id="nothing was read"),
    pytest.param([], 1, Exit.NOTHING_COMPILED, id="nothing was judged"),
]


@pytest.mark.parametrize(("outcomes", "compiled", "status"), STATUS)
def test_exit_status(outcomes, compiled, status):
    findings = [Finding(f"f{index}", outcome, message="why") for index, outcome in enumerate(outcomes)]
    assert exit_status(findings, compiled=compiled) == status


def test_findings_are_what_hilgate_reads(tmp_path):
    findings = audit(case(), case(too_large, name="large"))
    write_findings(tmp_path / "findings.jsonl", findings)
    checks = [Check.model_validate_json(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    assert [check.outcome for check in checks] == ["pass", "fail"]
    assert checks[0].numbers == findings[0].numbers
