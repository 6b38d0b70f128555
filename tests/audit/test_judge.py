# SPDX-License-Identifier: Apache-2.0
"""What makes a row pass or fail: budgets, evidence, the planted defect, comparisons, declared crashes."""

import re
from dataclasses import replace

import pytest

from pagedkv.audit.budgets import (
    EVERY,
    Comparison,
    Declared,
    DeclaredCrash,
    DeclaredNarrow,
    KernelBudget,
    Unpromised,
    load_budgets,
)
from pagedkv.audit.cases import Case, LaunchConfiguration, cases_of
from pagedkv.audit.code_object import Site
from pagedkv.audit.compile import LdsExceededError
from pagedkv.audit.findings import Finding, format_report
from pagedkv.audit.fit_table import format_table
from pagedkv.audit.isolation import Crash
from pagedkv.audit.judge import Row, compare, judge, judge_row
from pagedkv.errors import Exit

BUDGETS = replace(load_budgets(), kernels={"attend": KernelBudget(wide=("key_cache",))})
OVERSIZE = LdsExceededError("attend", 262144, 65536)


def judged(result, source="ours", declared=None, *, expected_lds=0):
    case = Case(source, "a", ("attend",), list, {"operation": "decode"}, expected_lds=expected_lds)
    row = Row(case, "gfx942", "attend", (), result, 1.0)
    return judge_row(row, BUDGETS, declared or Declared(), triton="3.6.0")


def test_a_declared_narrow_load_fails_once_it_is_wide(figures):
    declared = Declared(narrow=(DeclaredNarrow("3.6.0", "gfx942/ours/a/attend", ("key_cache",), "it does"),))
    narrow = figures(loads=(Site("attend.py:7", 2, 40, "k = tl.load(key_cache + row)"),))
    assert (judged(narrow).outcome, judged(narrow, declared=declared).outcome) == ("fail", "pass")
    assert judged(figures()).outcome == "pass"
    wide = judged(figures(), declared=declared)
    assert (wide.outcome, "remove that entry" in wide.message) == ("fail", True)


def test_a_crash_of_ours_fails_and_a_timeout_is_no_answer():
    died = judged(Crash("SIGABRT; the compiler printed: cannot select"))
    assert (died.outcome, died.message) == ("fail", "SIGABRT; the compiler printed: cannot select")
    assert judged(Crash("time limit", timed_out=True)).outcome == "inconclusive"


def test_the_proof_needs_the_defect_and_its_figure(figures):
    assert judged(OVERSIZE, "vllm", expected_lds=262144).outcome == "pass"
    for other in (figures(), LdsExceededError("k", 131072, 65536), Crash("died"), RuntimeError("no")):
        finding = judged(other, "vllm", expected_lds=262144)
        assert finding.outcome == "fail"
        assert "the audit is broken" in finding.message


def test_their_kernels_never_fail_our_gate(figures):
    spilled = judged(figures(vgpr_spills=175), "vllm")
    assert (spilled.outcome, spilled.numbers["vgpr_spills"]) == ("pass", 175)
    assert "175 VGPRs spilled" in spilled.message
    assert judged(OVERSIZE, "vllm").outcome == "pass"
    assert judged(Crash("died"), "vllm").outcome == "inconclusive"


RULE = Comparison("decode", "attend", "their_attend", "waves_per_simd")
LABELS = {
    "arch": "gfx942",
    "operation": "decode",
    "dtype": "bf16",
    "head_size": "64",
    "block_size": "2048",
    "cache": "2GiB+",
    "layout": "interleaved",
}


def mine(waves=4.0, **labels):
    numbers = {} if waves is None else {"waves_per_simd": waves}
    labels = LABELS | {"side": "ours", "kernel": "attend"} | labels
    return Finding("gfx942/ours/decode-bf16-hd64/attend", "pass", labels=labels, numbers=numbers)


def theirs(waves=4.0, **labels):
    labels = {"side": "vllm", "kernel": "their_attend"} | labels
    return replace(mine(waves, **labels), id="gfx942/vllm/decode-bf16-hd64/their_attend")


@pytest.mark.parametrize(("ours", "other", "outcome"), [(4, 4, "pass"), (5, 4, "pass"), (3, 4, "fail")])
def test_ours_must_reach_theirs(ours, other, outcome):
    [finding] = compare([mine(ours), theirs(other)], [RULE])
    assert finding.outcome == outcome
    assert finding.id == "gfx942/compare/decode-bf16-hd64/their_attend"
    assert f"ours {ours}, theirs {other}" in finding.message


def test_what_was_not_compiled_is_not_compared():
    assert compare([mine(None), theirs()], [RULE])[0].outcome == "inconclusive"
    assert compare([mine(), theirs(None)], [RULE])[0].outcome == "inconclusive"


def test_theirs_over_the_lds_limit_cannot_beat_ours():
    stopped = replace(theirs(None), numbers={"lds_bytes": 131072, "lds_limit_bytes": 65536})
    [finding] = compare([mine(), stopped], [RULE])
    assert (finding.outcome, "cannot start" in finding.message) == ("pass", True)


def test_what_spills_on_rdna_is_no_measure():
    spilling = replace(theirs(4), numbers={"waves_per_simd": 4, "vgpr_spills": 82})
    assert [found.outcome for found in compare([mine(3)], [RULE]) + compare([mine(3), spilling], [RULE])] == ["fail"]
    on_rdna = [replace(each, labels=each.labels | {"arch": "gfx1201"}) for each in (mine(3), spilling)]
    assert compare(on_rdna, [RULE]) == []


@pytest.mark.parametrize("label", ["arch", "operation", "dtype", "head_size", "block_size"])
def test_different_things_are_not_compared(label):
    assert compare([mine(), theirs(**{label: "other"})], [RULE]) == []


def test_every_shape_of_theirs_has_ours_beside_it():
    def shape(case):
        return tuple(case.labels[label] for label in ("operation", "dtype", "head_size", "block_size"))

    shapes = {shape(case) for case in cases_of("ours") if case.labels["cache"] == "2GiB+"}
    compared = {comparison.operation for comparison in load_budgets().comparisons}
    for case in cases_of("vllm"):
        if not case.expected_lds:
            assert case.labels["operation"] in compared
            assert shape(case) in shapes, case.name


def test_a_packed_cache_is_compared_with_what_reads_one():
    packed = mine(3, layout="native-interleaved")
    assert compare([packed, theirs(4, layout="packed")], [RULE]) == []
    [finding] = compare([packed, theirs(4, layout="x-packed")], [RULE])
    assert finding.outcome == "fail"


CRASHED = RuntimeError("PassManager::run failed")
CRASHED.add_note("; the compiler printed: CanonicalizePointers.cpp:1433: ConvertSCFIfOp")
TOO_LARGE = LdsExceededError("scan", 98304, 65536)
TIMED_OUT = Crash("no answer within the time limit", timed_out=True)
DECLARED = DeclaredCrash(
    "vllm/scan", "3.6.0", ("gfx942",), (EVERY,), "Canonicalize.*ConvertSCFIf", "a pointer in an if"
)


def configurations(results, declared=None, *, tuned=True, arch="gfx942", version="3.6.0", missing=0):
    """Findings of the configurations of a kernel by name, and that of the kernel under "kernel"."""
    rows = []
    for name, result in results.items():
        configuration = LaunchConfiguration("vllm/scan", name, len(results) + missing, autotuned=tuned)
        labels = {"package": "vllm", "configuration": name}
        case = Case("mamba", f"vllm/scan/{name}", ("scan",), list, labels, configuration=configuration)
        rows.append(Row(case, arch, "scan", (), result, 1.0))
    findings = judge(rows, BUDGETS, Declared((declared,) if declared else ()), triton=version)
    return {each.labels.get("configuration", "kernel"): each for each in findings}


GOOD = "compiles and fits"
CONFIGURATIONS = [
    pytest.param({"a": GOOD, "b": GOOD}, {}, "pass pass pass", {}, id="what compiles and fits"),
    pytest.param(
        {"a": GOOD, "b": CRASHED},
        {},
        "pass fail pass",
        {"b": "nobody declared: RuntimeError: PassManager::run failed; the compiler printed: Canon"},
        id="a crash that nobody declared: the autotuner compiles every configuration and catches no such error",
    ),
    pytest.param(
        {"a": CRASHED, "b": CRASHED},
        {"declared": DECLARED},
        "pass pass pass",
        {"kernel": "none of 2 configurations.*a pointer in an if"},
        id="declared crashes",
    ),
    pytest.param(
        {"a": CRASHED, "b": GOOD, "c": TOO_LARGE},
        {"declared": DECLARED},
        "pass fail fail pass",
        {"b": "remove the declaration"},
        id="a declared crash that does not happen",
    ),
    pytest.param(
        {"a": RuntimeError("out of registers")},
        {"declared": DECLARED},
        "fail pass",
        {"a": "otherwise than declared"},
        id="another crash than the declared one",
    ),
    pytest.param(
        {"a": CRASHED}, {"declared": DECLARED, "arch": "gfx950"}, "fail fail", {}, id="declared for another arch"
    ),
    pytest.param(
        {"a": CRASHED}, {"declared": DECLARED, "version": "3.8.0"}, "fail fail", {}, id="declared for another Triton"
    ),
    pytest.param({"a": GOOD, "b": TOO_LARGE}, {}, "pass pass pass", {}, id="an autotuner drops what is too large"),
    pytest.param(
        {"a": GOOD, "b": TOO_LARGE},
        {"tuned": False},
        "pass fail pass",
        {"b": "98304 B of LDS"},
        id="nothing else drops what is too large",
    ),
    pytest.param({"a": TOO_LARGE, "b": TOO_LARGE}, {}, "pass pass fail", {"kernel": "2 oversize"}, id="none that fits"),
    pytest.param({"a": TIMED_OUT}, {"declared": DECLARED}, "inconclusive inconclusive", {}, id="no answer in time"),
    pytest.param({"a": TIMED_OUT, "b": GOOD}, {}, "inconclusive pass pass", {}, id="one that fits, and a timeout"),
    pytest.param({"a": TOO_LARGE}, {"missing": 1}, "pass", {}, id="some of its configurations judge no kernel"),
]


@pytest.mark.parametrize(("results", "how", "outcomes", "messages"), CONFIGURATIONS)
def test_configurations_and_their_kernel(figures, results, how, outcomes, messages):
    compiled = {name: figures(kernel="scan") if result is GOOD else result for name, result in results.items()}
    findings = configurations(compiled, **how)
    assert [each.outcome for each in findings.values()] == outcomes.split()
    for name, text in messages.items():
        assert re.search(text, findings[name].message, re.DOTALL)
    if "kernel" in findings:
        assert findings["kernel"].numbers.get("usable", 0) == list(results.values()).count(GOOD)


def test_the_report_fits_80_columns_and_names_what_is_declared():
    findings = list(configurations({"a": CRASHED}, DECLARED).values())
    report = format_report(findings, status=Exit.PASS, seconds=1.0)
    assert "declared: gfx942/vllm/scan\n" in report
    assert max(map(len, report.splitlines())) <= 80


UNPROMISED = replace(BUDGETS, unpromised=(Unpromised("^gfx942/ours/gdn-.*join", "it spills"),))


@pytest.mark.parametrize(("spills", "outcome"), [(95, "pass"), (0, "fail")])
def test_what_is_not_promised_is_reported_until_it_fits(figures, spills, outcome):
    cases = [case for case in cases_of("ours") if "gdn_join_kernel" in case.kernels]
    of_each = figures(kernel="attend", vgpr_spills=spills)
    rows = [Row(case, "gfx942", "gdn_join_kernel", (), of_each) for case in cases]
    found = judge(rows, UNPROMISED, Declared(), triton="3.6.0")
    assert found[0].outcome == "pass"
    assert found[0].message.startswith(f"not promised (it spills): {f'{spills} VGPRs spilled' if spills else 'within'}")
    assert found[-1].outcome == outcome
    assert outcome == "pass" or "promise them" in found[-1].message
    other = replace(BUDGETS, unpromised=(replace(UNPROMISED.unpromised[0], triton="3.8.0"),))
    promised = judge(rows, other, Declared(), triton="3.6.0")
    assert {finding.outcome for finding in promised} == {"fail" if spills else "pass"}
    assert len(promised) == len(rows)


def test_the_table_shows_what_cannot_start_in_red():
    labels = LABELS | {"side": "vllm", "kernel": "their_attend", "tile": "64", "triton": "3.6.0"}
    numbers = {"lds_bytes": 65792.0, "lds_limit_bytes": 65536.0}
    red = Finding("gfx942/vllm/decode-d256/their_attend", "pass", labels=labels, numbers=numbers)
    fits = {"lds_bytes": 8192.0, "vgpr": 96.0, "waves_per_simd": 5.0, "vgpr_spills": 7.0}
    good = replace(red, id="gfx950/vllm/decode-d256/their_attend", labels=labels | {"arch": "gfx950"})
    table = format_table([red, replace(good, numbers=numbers | fits)])
    assert '| decode | 64 / 2048 | 16 bit | vLLM `their_attend` | <span style="color: red">**65792 B of 65' in table
    assert "| **5**, 96, 8192, *7 spilled* |" in table
    fewer = replace(good, id="gfx950/vllm/decode-d256-window/their_attend", numbers=numbers | fits)
    fewer.numbers["vgpr_spills"] = 0.0
    assert format_table([fewer, red, replace(good, numbers=numbers | fits)]) == table, "the worst case of a row"
    assert format_table([]) == ""
