# SPDX-License-Identifier: Apache-2.0
"""One entry for each cause: what is put together, what never is, and two days of other projects as shown here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.builds import built
from support.jobs import failed, gpu_step, health, passed
from support.plans import step

from hilgate.model.record import Check, Outcome
from hilgate.model.verdict import Ruling
from hilgate.report import annotation, terminal
from hilgate.report.causes import causes, shape_of
from hilgate.report.view import ReportView
from hilgate.report.write import Report, report_page

FILE = "tests/kernels/test_paged.py"
HELPER = "tests/support/attending.py:80"
ROWS = "AssertionError: {n} of 40 (token, head) rows are off by more than {limit} of their norm; off by {by}"


def case(name, n=4, by="[0.43, 0.4]", test="test_paged", line=50, limit="3.6e-06", **more):
    message = f"{ROWS.format(n=n, by=by, limit=limit)}\nassert not True\n{FILE}:{line}: AssertionError ({HELPER})"
    return failed(f"{FILE}::{test}[{name}]", message, **more)


def good(name, test="test_paged"):
    return passed(f"{FILE}::{test}[{name}]")


def entries(*steps_and_checks):
    """(number, extent) of each entry."""
    return [(len(one.failures), one.extent) for one in causes(*built(*steps_and_checks))]


def of(*checks):
    return entries((step("attention", "x"), checks))


GRID = [f"{phase}-{dtype}-bs{n}" for phase in ("decode", "prefill") for dtype in ("fp16", "fp32") for n in (16, 48, 64)]


def test_similar_failures_are_one_entry_with_the_smallest_case():
    checks = [
        case(name, n=number, by=f"[0.{number}]", labels={"shape": f"{9 - number}x4x64"})
        if name.startswith("decode")
        else good(name)
        for number, name in enumerate(GRID)
    ]
    (found,) = causes(*built((step("attention", "x"), checks)))
    assert (len(found.failures), found.extent) == (6, "6 of 12 cases of test_paged")
    assert found.failures[0].check.labels["shape"] == "4x4x64"


@pytest.mark.parametrize(
    ("other", "number"),
    [
        (case("decode-b", n=40, by="[0.1, 0.2, 0.3]"), 1),
        (case("decode-b", limit="9.8e-04"), 1),
        (case("decode-b", line=67), 2),
        (failed(f"{FILE}::test_paged[decode-b]", "RuntimeError: no kernel"), 2),
        (case("decode-b", by="[nan, nan]"), 1),
        (Check(id="decode-b", outcome=Outcome.INCONCLUSIVE, message=case("a").message), 2),
    ],
    ids=["other numbers", "another limit", "another line", "another message", "no number", "not decided"],
)
def test_what_makes_a_signature(other, number):
    assert len(of(case("decode-a"), other)) == number


def test_another_device_and_another_kernel_log_are_other_causes():
    cpu, gpu = (step("units", "x"), [case("a")]), (gpu_step("units"), [case("a")])
    assert len(entries(cpu, gpu)) == 2
    plan, recorded, verdict = built((gpu_step("one"), [case("a")]), (gpu_step("two"), [case("a")]))
    assert len(causes(plan, recorded, verdict)) == 1
    log = health("after", dmesg=("amdgpu 0000:05:00.0: [gfxhub] page fault (src_id:0 ring:24)",))
    known = dataclasses.replace(recorded, health={"two-gfx942": (log,)})
    assert len(causes(plan, known, verdict)) == 2


def test_two_tests_that_fail_in_one_helper_are_two_entries():
    first = [case(name) if "fp16" in name else good(name) for name in GRID]
    second = [case(name, test="test_scale", line=90) for name in GRID]
    assert of(*first, *second) == [(12, "every case of test_scale"), (6, "6 of 12 cases of test_paged")]


def test_two_tests_with_one_message_and_one_place_are_one_entry():
    first = [case(name) if "fp16" in name else good(name) for name in GRID]
    second = [case(name, test="test_scale") for name in GRID]
    assert of(*first, *second) == [(18, "18 of 24 cases of 2 tests")]


def test_every_case_is_said_only_where_it_is_every_case():
    """Failures of one test at two places are two entries, and neither has every case."""
    first = [case(name) if "fp16" in name else case(name, line=67) for name in GRID]
    assert of(*first) == [(6, "6 of 12 cases of test_paged")] * 2
    mixed = [case(name, line=50 if number in (0, 1, 2, 9) else 67) for number, name in enumerate(GRID)]
    assert of(*mixed) == [(8, "8 of 12 cases of test_paged"), (4, "4 of 12 cases of test_paged")]


def test_one_test_at_one_place_is_one_entry_whatever_it_says():
    checks = [case(name, by="[nan]" if number % 3 else "[0.3]") for number, name in enumerate(GRID)]
    checks.append(failed(f"{FILE}::test_paged[odd]", f"ValueError: no\n{FILE}:50: ValueError ({HELPER})"))
    assert of(*checks) == [(13, "every case of test_paged")]


def test_tests_without_parameters_have_no_extent():
    checks = [failed(f"t.py::test_{n}", f"assert same(a, b)\nt.py:{n}: AssertionError (h.py:3)") for n in range(2)]
    found = ReportView(*built((step("attention", "x"), checks))).problems(5)[0].findings
    assert [one.alike for one in found] == ["", ""]
    checks = [failed(f"t.py::test_{n}", "assert same(a, b)\nt.py:3: AssertionError") for n in range(2)]
    found = ReportView(*built((step("attention", "x"), checks))).problems(5)[0].findings
    assert [one.alike for one in found] == ["2 failures look like this, the smallest is shown"]


@pytest.mark.parametrize(
    ("names", "smallest"),
    [
        (("bs64", "bs16", "bs48"), "bs16"),
        (("float32-bs16", "float16-bs64", "gfx942-bs48"), "float32-bs16"),
        (("0.5-q8kv2", "0.25-q8kv2"), "0.25-q8kv2"),
    ],
    ids=["sizes", "types are no sizes", "several"],
)
def test_the_case_with_the_smallest_numbers_is_shown(names, smallest):
    (found,) = causes(*built((step("attention", "x"), [case(name) for name in names])))
    assert found.failures[0].id.endswith(f"[{smallest}]")


@pytest.mark.parametrize(
    ("message", "shape"),
    [
        ("12 of 640 rows off by 3.6e-06", "# of # rows off by #"),
        ("off by [[0, 0], [0, 1]] and [nan, 1.0]", "off by [#] and [nan]"),
        ("got -0.73828125, expected 0.0", "got #, expected #"),
        ("at 0x7fa48824eb80 in deadbeef01", "at # in #"),
        ("float16 of a head is off", "@ of a head is off"),
        ("Mismatched elements: 40 / 512 (7.8%)", "Mismatched elements: # / # (#%)"),
        ("cc tmph44dlp_c/launcher.c failed", "cc #/launcher.c failed"),
        (f"no file .triton/cache/{'ZMMO4TZ' * 7}NHW/a.cubin", "no file .triton/cache/#/a.cubin"),
        ("tmpfolder2 is full", "tmpfolder# is full"),
    ],
    ids=["numbers", "lists", "signs", "addresses", "its own parameters", "percent", "drawn", "cached", "a word"],
)
def test_a_messages_shape_leaves_out_what_differs_by_case(message, shape):
    assert shape_of(message, "t[head-float16-bs16]") == shape


# The replays: failures as users of two other projects met them, in the words of our own records.


def replay_of_a_hung_tool():
    """ROCm/TheRock#5468: 27 of 38 jobs fail, one because `hipInfo` hangs and 26 behind it."""
    first = gpu_step("hipinfo")
    behind = [gpu_step(f"lib-{n}", depends_on=("hipinfo-gfx942",)) for n in range(26)]
    beside = [gpu_step(f"other-{n}") for n in range(11)]
    plan, recorded, verdict = built((first, []), *((one, []) for one in behind), *((one, [passed()]) for one in beside))
    known = {
        "hipinfo-gfx942": (Ruling.UNFINISHED, "timed out after 600 s; its last line: hipInfo: device 0"),
        **{one.key: (Ruling.NOT_STARTED, "not started: it needs hipinfo-gfx942, which did not run") for one in behind},
    }
    steps = tuple(
        one.model_copy(update={"outcome": Outcome.DID_NOT_RUN, "ruling": known[one.key][0], "why": known[one.key][1]})
        if one.key in known
        else one
        for one in verdict.steps
    )
    return plan, recorded, verdict.model_copy(update={"steps": steps, "outcome": Outcome.DID_NOT_RUN})


def test_27_of_38_jobs_behind_one_hung_tool_are_one_entry(capsys):
    build = replay_of_a_hung_tool()
    assert sum(one.outcome is not Outcome.PASS for one in build[2].steps) == 27
    (found,) = causes(*build)
    assert found.failures[0].id == "hipinfo-gfx942"
    assert len(found.waiting) == 26
    terminal.print_verdict(Report(*build, Path("report.html")))
    assert capsys.readouterr().out.count("hipInfo: device 0") == 1
    assert annotation.render(ReportView(*build)).count("hipInfo: device 0") == 1


def test_123_failures_of_one_bug_are_a_few_lines_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    types = ("fp16", "bf16", "fp32")
    names = [f"{phase}-{dtype}-bs{n}" for phase in ("decode", "prefill") for dtype in types for n in range(1, 42)]
    bad = [name for name in names if name.startswith("decode")]
    assert len(bad) == 123
    checks = [case(name) if name in bad else good(name) for name in names]
    build = built((step("attention", "x"), checks))
    terminal.print_verdict(Report(*build, Path("report.html")))
    out = capsys.readouterr().out.splitlines()
    assert len(out) <= 24
    assert any("123 failures look like this" in line for line in out)
    for shown in (annotation.render(ReportView(*build)), report_page(ReportView(*build))):
        assert shown.count("rows are off") <= 3
