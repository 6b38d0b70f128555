# SPDX-License-Identifier: Apache-2.0
"""Tables of cells: what a cell reports, what has no place, and that a table which lost cells never looks whole."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.builds import built
from support.cell_tables import SPEC, STEP, build, cell, grid, table
from support.jobs import failed, passed
from support.plans import plan, step

from hilgate.evidence import EVIDENCE_CHECK
from hilgate.judge.verdict import judge
from hilgate.model import PLAN_FILE, RESERVED_FILES, VERDICT_FILE
from hilgate.model.plan import plan_digest
from hilgate.model.record import Check, Outcome
from hilgate.report import annotation, tables
from hilgate.report.view import ReportView
from hilgate.report.write import report_page


def written(build_, folder):
    a_plan, recorded, verdict = build_
    tables.write(folder, a_plan, plan_digest(a_plan), recorded, tables.tables(a_plan, recorded, verdict))
    return json.loads((folder / SPEC.file).read_text())


def of_attempt(build_, **changes):
    """The same build with another end of its step, judged again."""
    a_plan, recorded, _ = build_
    (attempt,) = recorded.attempts[STEP.key]
    last = dataclasses.replace(attempt, record=attempt.record.model_copy(update=changes))
    recorded = dataclasses.replace(recorded, attempts={STEP.key: (last,)})
    return a_plan, recorded, judge(a_plan, recorded, plan_digest(a_plan), decided=attempt.record.started)


def test_cells_stand_in_run_order_and_unasked_ones_are_blank():
    found = table(cell("fig", "b"), cell("fig", "a", "did not run"), cell("apple", "c", "fail"))
    assert (found.rows, found.columns) == (("fig", "apple"), ("b", "a", "c"))
    assert ("apple", "b") not in found.grid
    assert found.summary == "1 passed, 1 failed, 1 not run, 3 not asked (blank)"
    assert found.incomplete == ""


@pytest.mark.parametrize("order", [1, -1])
def test_the_worse_of_two_checks_of_a_cell_wins(order):
    twice = [cell("fig", "a", id="t.py::one", seconds=1.0), cell("fig", "a", "fail", id="t.py::two", seconds=2.0)]
    found = table(*twice[::order], cell("fig", "b")).grid["fig", "a"]
    assert found.outcome is Outcome.FAIL
    assert found.seconds == 3.0
    assert set(found.checks) == {"t.py::one", "t.py::two"}
    assert found.reason == "1 of 2 checks, the first: max_abs_err 0.5 > 0.001"


def test_a_check_without_a_label_is_reported_and_is_no_cell():
    found = table(cell("fig", "a"), cell("", "a", "did not run", id="t.py::x"), cell("", "", id="t.py::y"))
    assert set(found.grid) == {("fig", "a")}
    assert [words for _, words in tables.notes(found)] == [
        "not in the table, it has no fruit: t.py::x: did not run here: no orchard",
        "not in the table, it has no fruit and no test: t.py::y",
    ]


def test_the_file_holds_every_check_and_where_it_ran(tmp_path):
    checks = [
        cell("fig", "a", numbers={"err": 0.5}, labels={"served_by": "us"}),
        cell("fig", "b", "fail"),
        cell("", "a"),
    ]
    one = build(*checks)
    found = written(one, tmp_path)
    assert (found["table"], found["commit"], found["plan_digest"]) == (SPEC.file, one[0].commit, plan_digest(one[0]))
    assert found["checks"] == [{"step": "grid-cpu"} | check.model_dump(mode="json") for check in checks]
    (of_step,) = found["steps"]
    assert (of_step["device"], of_step["outcome"], of_step["incomplete"]) == ("cpu", "fail", "")
    assert of_step["environment"]["versions"] == {"torch": "2.13.0"}


LOST = {
    "no record": (build, "no record of it arrived"),
    "crashed after a failure": (lambda: of_attempt(build(cell("fig", "a", "fail")), exit_status=2), "exit 2"),
    "timed out": (
        lambda: of_attempt(build(cell("fig", "a", "fail")), exit_status=None, message="timed out after 60 s"),
        "timed out after 60 s",
    ),
    "failed without a failing cell": (lambda: of_attempt(build(cell("fig", "a")), exit_status=1), "exit 1 and no"),
    "evidence lost beside a failure": (
        lambda: build(cell("fig", "a", "fail"), Check(id=EVIDENCE_CHECK, outcome="fail", message="announces 9 tests")),
        "announces 9 tests",
    ),
    "too few": (lambda: build(cell("fig", "a"), one=STEP.redeclared(minimum=2)), "at least 2 must"),
    "no labels": (lambda: build(cell("", "")), "no check has the labels fruit and test"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_table_that_may_have_lost_cells_says_so(name, tmp_path):
    make, words = LOST[name]
    assert words in written(make(), tmp_path)["steps"][0]["incomplete"]


def test_damaged_results_make_no_whole_table(tmp_path):
    a_plan, recorded, _ = build(cell("fig", "a"))
    recorded = dataclasses.replace(recorded, attempts={}, damaged={STEP.key: "results.jsonl:5: truncated"})
    verdict = judge(a_plan, recorded, plan_digest(a_plan), decided=recorded.builds[0].started)
    (of_step,) = written((a_plan, recorded, verdict), tmp_path)["steps"]
    assert (of_step["incomplete"], of_step["environment"]) == ("results.jsonl:5: truncated", None)


def test_flaky_and_quarantined_cells_say_so():
    a_plan, recorded, verdict = build(cell("fig", "a", "fail"), cell("fig", "b", "fail"))
    flaky, excused = (f"t.py::test_cell[fig-{one}]" for one in "ab")
    changed = verdict.steps[0].model_copy(update={"flaky": (flaky,), "quarantined": (excused,)})
    (found,) = tables.tables(a_plan, recorded, verdict.model_copy(update={"steps": (changed,)}))
    assert found.grid["fig", "a"].outcome is Outcome.INCONCLUSIVE
    assert found.grid["fig", "a"].reason == "failed and then passed over the same files: max_abs_err 0.5 > 0.001"
    assert found.grid["fig", "b"].outcome is Outcome.FAIL
    assert found.grid["fig", "b"].reason == "in quarantine: max_abs_err 0.5 > 0.001"


def test_devices_of_one_step_share_a_file(tmp_path):
    other = STEP.model_copy(update={"device": "gfx942"})
    a_plan, recorded, _ = build(cell("fig", "a"))
    a_plan = plan(STEP, other)
    verdict = judge(a_plan, recorded, plan_digest(a_plan), decided=recorded.builds[0].started)
    found = written((a_plan, recorded, verdict), tmp_path)
    assert [(one["device"], bool(one["incomplete"])) for one in found["steps"]] == [("cpu", False), ("gfx942", True)]


def test_files_of_other_plans_go_and_files_of_others_stay(tmp_path):
    written(build(cell("fig", "a")), tmp_path)
    (tmp_path / "notes.json").write_text("[]")
    (tmp_path / "copy.json").write_bytes((tmp_path / SPEC.file).read_bytes())
    (tmp_path / "folder.json").mkdir()
    a_plan, recorded, _ = built((step("other", "x"), [passed()]))
    tables.write(tmp_path, a_plan, plan_digest(a_plan), recorded, ())
    assert {path.name for path in tmp_path.iterdir()} == {"notes.json", "copy.json", "folder.json"}


def test_forbidden_names_of_cells_files_are_those_of_builds():
    from hilgate.declare import quarantine
    from hilgate.release import bundle
    from hilgate.run import results

    theirs = {PLAN_FILE, bundle.MANIFEST_FILE, VERDICT_FILE, quarantine.USED_FILE, results.NOTE}
    assert theirs < RESERVED_FILES


def test_each_reason_is_reported_once_with_its_cells():
    fruits = [f"f{number}" for number in range(6)]

    def outcome(row, column):
        return "" if (row, column) == ("f5", "c") else "fail" if column == "b" and row < "f2" else "did not run"

    checks = [*grid(fruits, ["a", "b", "c"], outcome), cell("f0", "d"), cell("f5", "d", "fail", "other")]
    assert [(outcome.value, words) for outcome, words in tables.notes(table(*checks))] == [
        ("fail", "b: f0, f1: max_abs_err 0.5 > 0.001"),
        ("fail", "d: f5: other"),
        ("did not run", "a, c: every fruit; b: every fruit but f0, f1: did not run here: no orchard"),
    ]


def test_many_reasons_are_counted():
    many = tables.NOTES + 5
    checks = [cell(f"f{n}", "a", "fail", f"off by {n}") for n in range(many)]
    checks += [cell("", "a", id=f"t.py::x{n}") for n in range(many)]
    reported = [words for _, words in tables.notes(table(*checks))]
    assert len(reported) == 2 * (tables.NOTES + 1)
    assert "and 5 more reasons" in reported
    assert reported[-1] == "and 5 more that are not in the table"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("fig", "hilgate run grid-cpu -- --fruit fig --test a"),
        ("two words", "hilgate run grid-cpu -- --fruit 'two words' --test a"),
        ("$(x)", "hilgate run grid-cpu -- --fruit '$(x)' --test a"),
        ("-k", "hilgate run grid-cpu"),
        ("a\nb", "hilgate run grid-cpu"),
    ],
)
def test_the_line_that_repeats_a_failing_cell_names_it(row, line):
    assert build(cell(row, "a", "fail"))[2].steps[0].reproduce == line


def test_a_step_with_columns_has_a_row_for_each_check():
    one = step("a", "x", columns=("check", "arch", "err", "lds_bytes"))
    checks = [passed("p", labels={"arch": "gfx942"}, numbers={"err": 0.123456, "lds_bytes": 65536}), failed("f", "bad")]
    (found,) = tables.value_tables(*built((one, checks)))
    assert (found.rows, found.columns, found.labels[0]) == (("f", "p"), ("arch", "err", "lds_bytes"), "check")
    assert [found.grid["p", column].text for column in found.columns] == ["gfx942", "0.1235", "65\u202f536"]
    assert {found.grid["f", column].text for column in found.columns} == {tables.NO_VALUE}
    assert (found.summary, list(tables.notes(found))) == ("1 passed, 1 failed", [])


def test_steps_that_stand_together_share_a_table():
    """One table on each device, what did not pass first; a step that recorded nothing is said."""
    ours, others, lost = (
        step(key, "x", columns=("check", "err"), together="granite") for key in ("ours", "triton", "aiter")
    )
    alone = step("alone", "x", columns=("check", "err"))
    good, bad = passed("ours/accuracy", numbers={"err": 0.5}), failed("triton/accuracy", "off")
    made = built((ours, [good]), (others, [bad]), (lost, None), (alone, [passed("p", numbers={"err": 1.0})]))
    single, shared = tables.value_tables(*made)
    assert (shared.step.key, shared.rows) == ("granite-cpu", ("triton/accuracy", "ours/accuracy"))
    assert shared.verdict.outcome.value == "fail"
    ((_, words),) = tables.notes(shared)
    assert words.startswith("not the whole table: aiter-cpu: ")
    assert (single.step.key, single.incomplete) == ("alone-cpu", "")


def test_the_annotation_has_a_line_for_each_failing_cell():
    text = annotation.render(ReportView(*build(cell("fig", "a", "fail"), cell("fig", "b", "fail"), cell("fig", "c"))))
    assert (
        "\n✗ grid-cpu: fig, a: max\\_abs\\_err 0.5 > 0.001 (and 1 more of its cells failed)\n".replace(">", "&gt;")
        in text
    )
    checks = [cell("fig", "a", "did not run"), cell("fig", "c")]
    plain = build(*checks, one=STEP.redeclared(matrix=None))
    assert annotation.render(ReportView(*build(*checks))) == annotation.render(ReportView(*plain))


BACKENDS = {"models": "pagedkv", "attn": "ROCM_ATTN", "fa": "ROCM_AITER_FA", "mla": "ROCM_AITER_MLA"}


def beside(cells):
    """A build of a step for each backend, with results that were made for this test: (family, behaviour, outcome)."""
    builds = []
    for key, backend in BACKENDS.items():
        matrix = SPEC.model_copy(update={"file": f"{key}.json", "beside": "backend"})
        found = [cell(*one, id=f"t.py::{key}[{one}]", labels={"backend": backend}) for one in cells.get(key, ())]
        builds.append((step(key, "x", matrix=matrix, may_lack=STEP.step.may_lack), found or None))
    return built(*builds)


def test_steps_that_stand_beside_each_other_share_a_table():
    """One table, family x backend; each cell holds every behaviour of a family with one backend."""
    build_ = beside(
        {
            "models": [("jamba", "decode"), ("jamba", "prefill"), ("mamba2", "decode"), ("deepseek-v3", "decode")],
            "attn": [("jamba", "decode"), ("jamba", "prefill", "fail"), ("jamba", "fuzz", "fail")],
            "fa": [("jamba", "decode", "did not run"), ("jamba", "prefill")],
            "mla": [("deepseek-v3", "decode")],
        }
    )
    (found,) = tables.tables_beside(*build_)
    assert (found.rows, found.columns) == (("jamba", "mamba2", "deepseek-v3"), tuple(BACKENDS.values()))
    assert {place: str(one.outcome) for place, one in found.grid.items()} == {
        ("jamba", "pagedkv"): "pass",
        ("mamba2", "pagedkv"): "pass",
        ("deepseek-v3", "pagedkv"): "pass",
        ("jamba", "ROCM_ATTN"): "fail",
        ("jamba", "ROCM_AITER_FA"): "did not run",
        ("deepseek-v3", "ROCM_AITER_MLA"): "pass",
    }
    assert found.grid["jamba", "ROCM_ATTN"].reason == "2 of 3 checks, the first: max_abs_err 0.5 > 0.001"
    assert found.summary == "4 passed, 1 failed, 1 not run, 6 not asked (blank)"
    assert found.verdict.outcome is Outcome.FAIL
    assert len(tables.tables(*build_)) == len(BACKENDS), "each step keeps its own table"
    page = report_page(ReportView(*build_))
    assert page.index("fruit x backend") < page.index(">ROCM_AITER_MLA<") < page.index(">deepseek-v3<")


def test_a_step_without_cells_is_said_and_one_alone_stands_alone():
    (found,) = tables.tables_beside(*beside({"models": [("jamba", "decode")], "attn": [("jamba", "decode")]}))
    assert found.columns == ("pagedkv", "ROCM_ATTN")
    assert "fa" in found.incomplete
    assert "mla" in found.incomplete
    matrix = SPEC.model_copy(update={"beside": "backend"})
    alone = built((step("models", "x", matrix=matrix), [cell("jamba", "decode", labels={"backend": "pagedkv"})]))
    assert tables.tables_beside(*alone) == ()
