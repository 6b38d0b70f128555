# SPDX-License-Identifier: Apache-2.0
"""What the first screen says of a red build: what broke, by how much, on the merge base too, and how to repeat it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.builds import Outline, built
from support.jobs import failed, gpu_step, passed, skipped
from support.plans import step

from hilgate.model.plan import ProtectedChange
from hilgate.model.record import Check, Outcome
from hilgate.model.verdict import Ruling
from hilgate.report import annotation, causes, terminal, view
from hilgate.report.history import StepThen
from hilgate.report.merge_base import MergeBase
from hilgate.report.view import ReportView
from hilgate.report.write import Report, report_page
from hilgate.text import MARKS, STYLES

DIGEST = "sha256:" + "3f" * 32
TEST = "tests/kernels/test_x.py::test_x[decode-float16-gfx942]"
MESSAGE = "AssertionError: 2 of 80 rows are off\nassert not True\ntests/kernels/test_x.py:67: AssertionError"
THERE = StepThen(Outcome.PASS, "", {TEST: (Outcome.PASS, "")})
FACTS = MergeBase(commit="b" * 40, steps={"bad-gfx942": THERE})


def red(facts=FACTS, **changes):
    """A build with one regression, one step of another ruling, and what a verdict may say beside."""
    wrong = failed(TEST, MESSAGE, numbers={"max_abs_err": 0.5, "rows_off": 2, "rows": 80}, labels={"shape": "5x16x64"})
    plan, recorded, verdict = built(
        (gpu_step("bad"), [passed(), wrong, failed("second", "also")]),
        (step("sick", "x"), None),
        (step("kept", "x"), [passed()]),
    )
    steps = {one.key: one for one in verdict.steps}
    reported = {
        "bad-gfx942": {
            "image": DIGEST,
            "node": "mi300-07",
            "evidence": ("VRAM 312 MiB before, 318 MiB after", "dmesg: nothing"),
        },
        "sick-cpu": {"ruling": Ruling.INFRA, "node": "mi355-02", "evidence": ("GPU reset begin!",)},
        "kept-cpu": {"quarantined": ("q1",), "unexpected_passes": ("u1",), "flaky": tuple(f"f{n}" for n in range(25))},
    }
    updated = tuple(steps[key].model_copy(update=values) for key, values in reported.items())
    return plan, recorded, verdict.model_copy(update={"steps": updated} | changes), facts


def page(*parts):
    *build, facts = parts
    return " ".join(Outline(report_page(ReportView(*build, facts=facts))).text.split())


def note(*parts):
    *build, facts = parts
    return annotation.render(ReportView(*build, facts=facts))


def below_the_headline(text):
    """What follows the line that counts the steps."""
    text = text.replace("\\", "")
    return text[text.index("1 step regressed") :]


@pytest.mark.parametrize("show", [page, note], ids=["report", "annotation"])
def test_what_broke_is_said_in_the_order_in_which_it_is_asked(show):
    text = below_the_headline(show(*red()))
    order = [
        "regression",
        "bad-gfx942",
        TEST,
        "AssertionError: 2 of 80 rows are off",
        "max_abs_err 0.5, 2 of 80 rows off",
        "shape 5x16x64, dtype float16, arch gfx942",
        "new here: it passed at bbbbbbbbbbbb",
        "tests/kernels/test_x.py:67",
        "mi300-07",
        "VRAM 312 MiB before, 318 MiB after",
        "hilgate run bad-gfx942 -- -k",
        "docker run",
        DIGEST,
        "assert not True",
        "second",
        "sick-cpu",
        "GPU reset begin!",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize("show", [page, note], ids=["report", "annotation"])
def test_green_steps_with_flaky_or_quarantined_checks_are_named(show):
    text = show(*red())
    for words in ("quarantined", "q1", "unexpected pass", "u1", "flaky", "f19", "and 5 more in verdict.json"):
        assert words in text
    assert "f20" not in text


def test_a_pass_that_does_not_prove_all_it_is_for_is_listed(capsys):
    """In a build without a problem too; a check that fails is listed once, as what it is."""
    but = {"passed_but": "no baseline yet, so only the floor holds"}
    build = built(
        (gpu_step("gate"), [passed("g/floor"), passed("g/accuracy", labels=but)]), (step("x", "x"), [passed("y")])
    )
    terminal.print_verdict(Report(*build, Path("report.html")))
    for shown in (
        page(*build, FACTS),
        note(*build, FACTS).replace("\\", ""),
        " ".join(capsys.readouterr().out.split()),
    ):
        assert shown.count("Passed, but") == 1
        assert "g/accuracy: no baseline yet, so only the floor holds" in shown
        assert "g/floor:" not in shown


@pytest.mark.parametrize("show", [page, note], ids=["report", "annotation"])
@pytest.mark.parametrize(
    ("approved", "words"),
    [("", "an owner who did not start this build must"), ("A Name <a@example.invalid>", "approved by A Name")],
    ids=["nobody yet", "somebody"],
)
def test_a_loosened_gate_is_said_before_what_broke(show, approved, words):
    protected_changes = (
        ProtectedChange(path="tests/support/tolerances.py", what="changed", hunk="-A = 2 * U\n+A = 4 * U"),
    )
    text = below_the_headline(
        show(*red(protected_changes=protected_changes, approved_by=approved)).replace("&gt;", ">")
    )
    assert text.index(words) < text.index("tests/support/tolerances.py") < text.index("bad-gfx942")
    assert "+A = 4 * U" in text


def test_the_line_of_the_image_is_one_that_a_shell_understands():
    plan, _, verdict, _ = red()
    line = view.container_line(verdict.steps[0], plan.steps[0], plan.python_path)
    words = shlex.split(line)
    at = words.index(f"$HILGATE_IMAGES/rocm@{DIGEST}")
    assert words[:3] == ["docker", "run", "--rm"]
    assert all(word.startswith("--") for word in words[2:at])
    assert words[at + 1 : at + 6] == ["python3", "-m", "hilgate", "run", "bad-gfx942"]
    assert {"--device=/dev/kfd", "--network=none", "--cap-drop=ALL"} <= set(words)
    assert "--privileged" not in line


@pytest.mark.parametrize(
    ("image", "planned", "missing", "present"),
    [
        ("", {}, "docker", ""),
        ("sha256:1; rm -rf x", {}, "docker", ""),
        (DIGEST, {}, "--device", f" {DIGEST} "),
        (DIGEST, {"network": True, "image": "cpu"}, "--network", f"cpu@{DIGEST}"),
    ],
    ids=["no image", "not a digest", "no GPU", "network"],
)
def test_the_line_of_the_image_follows_the_step(image, planned, missing, present):
    verdict = red()[2].steps[0].model_copy(update={"image": image})
    line = view.container_line(verdict, step("bad", "x", **planned), ("src", "."))
    assert missing not in line
    assert present in line


def test_the_terminal_says_it_too(capsys):
    plan, recorded, verdict, facts = red(protected_changes=(ProtectedChange(path="p", what="w"),))
    agents = plan.model_copy(update={"profile": "pr"})
    terminal.print_verdict(Report(agents, recorded, verdict, Path("report.html"), facts))
    out = capsys.readouterr().out
    order = [
        "✗ fail: regression: bad-gfx942",
        TEST,
        "error: max_abs_err 0.5",
        "case: shape",
        "merge base: new here: it passed at b",
        "node: mi300-07",
        "reproduce: hilgate run bad-gfx942",
        "○ did not run: infra: sick-cpu",
        "quarantined in",
        "1 step regressed, 1 step stopped by the machine",
        "changes its own gate: an owner",
    ]
    places = [out.index(words) for words in order]
    assert places == sorted(places)
    terminal.print_verdict(
        Report(plan, recorded, verdict, Path("report.html"))
    )  # a local run says nothing of what it is
    assert not re.search("merge base|node:", capsys.readouterr().out)


def test_a_ruling_that_repeats_the_outcome_is_said_once():
    verdict = red()[2].steps[0]
    assert view.ruled(verdict) == "✗ fail: regression"
    same = verdict.model_copy(update={"outcome": Outcome.INCONCLUSIVE, "ruling": Ruling.INCONCLUSIVE})
    assert view.ruled(same) == "? inconclusive"


def test_every_ruling_and_outcome_has_words():
    assert set(view.RULINGS) == set(Ruling)
    assert set(MARKS) == set(STYLES) == set(Outcome)


def test_the_annotation_is_commonmark_of_which_each_block_closes():
    tokens = MarkdownIt("commonmark").parse(note(*red()))
    assert sum(token.nesting for token in tokens) == 0
    assert next(token.content for token in tokens if token.type == "fence").startswith("AssertionError: 2 of 80")
    assert not {"html_block", "html_inline"} & {token.type for token in tokens}


ROWS = (
    "AssertionError: 12 of 640 (token, head) rows are off by more than 9.8e-04 of their norm\n"
    "assert not True\n +  where True = any()\n"
    "tests/kernels/attention/test_paged.py:67: AssertionError (tests/support/attending.py:79)"
)


def wrong_check(name="t", message="it is off", **more):
    return Check(id=name, outcome=Outcome.FAIL, message=message, **more)


def test_a_failed_kernel_test():
    found = view.finding(
        wrong_check(
            "tests/kernels/attention/test_paged.py::test_paged_attention[attention-decode-float16-d256]",
            ROWS,
            labels={"layout": "interleaved", "dtype": "float16", "shape": "5x16x256"},
            numbers={
                "max_row_relative_err": 0.0312345,
                "max_row_relative_err_allowed": 0.0009765625,
                "max_abs_err": 0.5,
                "rows_off": 12,
                "rows": 640,
                "seconds_median": 3.0,
            },
        ),
        "gfx942",
    )
    assert found.assertion == "AssertionError: 12 of 640 (token, head) rows are off by more than 9.8e-04 of their norm"
    assert found.place == "tests/kernels/attention/test_paged.py:67 (tests/support/attending.py:79)"
    assert found.error == "max_abs_err 0.5, max_row_relative_err 0.03123 (0.0009766 allowed), 12 of 640 rows off"
    assert found.case == "shape 5x16x256, dtype float16, layout interleaved, arch gfx942"


def test_nan_comes_first_because_it_is_no_number():
    found = view.error(wrong_check(labels={"max_abs_err": "nan", "note": "nan"}, numbers={"max_rel_err": 2.0}))
    assert found == "max_abs_err nan, max_rel_err 2"


@pytest.mark.parametrize(
    ("name", "labels", "words"),
    [
        ("t[decode-bfloat16-d64-gfx950]", {}, "dtype bfloat16, arch gfx950"),
        ("t[fp8_e4m3-bs16]", {}, "dtype fp8_e4m3"),
        ("t[bf16]", {"dtype": ""}, "dtype bf16"),
        ("t[int32-block]", {}, ""),
        ("float16 in a name, not in parameters", {}, ""),
        ("gfx942/x", {"arch": "gfx90a", "kernel": "reduce"}, "kernel reduce, arch gfx90a"),
    ],
    ids=["both", "fp8", "short", "no dtype", "no parameters", "labels win"],
)
def test_the_case_comes_from_labels_then_the_id_then_the_device(name, labels, words):
    assert view.case(wrong_check(name, labels=labels), "cpu") == words
    on_gpu = words if "arch" in words else ", ".join(filter(None, [words, "arch gfx942"]))
    assert view.case(wrong_check(name, labels=labels), "gfx942") == on_gpu


def test_a_score_stands_beside_its_baseline():
    numbers = {"exact_match": 0.71, "ci_low": 0.64, "ci_high": 0.77, "n": 200, "baseline_exact_match": 0.78}
    assert view.error(wrong_check(numbers=numbers)) == "exact_match 71.0% [64.0%, 77.0%], n=200, baseline 78.0%"


@pytest.mark.parametrize(
    "message", ["it is off", "see a.py:3", "a\nb.py:x: Error", "tests/t.py:3: E rest of it\nmore"], ids=repr
)
def test_no_place_is_invented(message):
    assert causes.place(wrong_check(message=message)) == ""


def test_nothing_recorded_is_nothing_shown():
    assert view.error(wrong_check(numbers={"seconds": 1.0}, labels={"error": "TimeoutError"})) == ""


def test_a_red_headline_is_what_decided_and_not_a_skip():
    needs = {"needs": "device:gfx942"}
    skips = [skipped(f"s{number}", "no GPU").model_copy(update={"labels": needs}) for number in range(5)]
    lacks = {"may_lack": {"device:gfx942": {"why": "a CPU captures no graphs", "most": 5}}}
    plan, recorded, verdict = built(
        (step("families", "x", minimum=9, **lacks), [passed(), passed("p2"), *skips]), (step("units", "x"), [passed()])
    )
    found = ReportView(plan, recorded, verdict).headline
    assert found.startswith(
        "3 passed, 0 failed, 5 not run; families-cpu: 2 checks ran, 5 cannot run here: a CPU captures"
    )
    green = built((step("units", "x", **lacks), [passed(), *skips]))
    assert ReportView(*green).headline == "1 passed, 0 failed, 5 not run (no GPU)"


def test_headline_is_the_first_line_of_the_top_cause():
    """Not of the first check that failed: the cause of most failures stands first below it."""
    many = [failed(f"t.py::test_many[{n}]", "AssertionError: 4 of 8 rows are off\nassert not 4") for n in range(3)]
    one = failed("t.py::test_one", "assert torch.equal(a, b)\nassert False")
    whole = built((step("first", "x"), [one, passed()]), (step("second", "x"), many))
    counted = "1 passed, 4 failed; "
    assert ReportView(*whole).headline == f"{counted}second-cpu: 4 of 8 rows are off (and 1 more step)"
    *_, verdict = whole
    other = verdict.model_copy(update={"why": "the quarantine: is damaged"})
    assert ReportView(*whole[:2], other).headline == f"{counted}the quarantine: is damaged"


def test_steps_are_counted_in_a_sentence():
    plan, recorded, verdict, _ = red()
    steps = [
        verdict.steps[0].model_copy(update={"ruling": ruling, "outcome": Outcome.FAIL})
        for ruling in (*Ruling, Ruling.REGRESSION)
        if ruling is not Ruling.PASS
    ]
    counted = verdict.model_copy(update={"steps": tuple(steps), "omissions": ()})
    assert ReportView(plan, recorded, counted).step_counts == (
        "0 of 8 steps passed, 2 steps regressed, 1 step unfinished, 1 step stopped by the machine, "
        "1 step not started, 1 step flaky, 1 step in quarantine, 1 step inconclusive"
    )
