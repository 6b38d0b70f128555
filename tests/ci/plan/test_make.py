"""Plans for a desk and for the agents: places, dependencies, omissions with reasons, files."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.declarations import EVERYTHING, EVERYWHERE, LAPTOP, MI300X, change, declare, reasons, step

from hilgate.declare.imports import build
from hilgate.declare.load import load
from hilgate.errors import CannotRunHereError, MisuseError, NothingSelectedError
from hilgate.git import tracked_files
from hilgate.plan.estimate import estimate
from hilgate.plan.make import ChangeFacts, assemble, by_model, make_plan, plan_digest

REPOSITORY = Path(__file__).resolve().parents[3]


def test_laptop_takes_the_cpu_and_says_who_runs_the_rest():
    plan = assemble(declare(a=[step("s", EVERYWHERE)]), EVERYTHING, LAPTOP, profile="gate")
    (planned,) = plan.steps
    assert (planned.key, planned.device, planned.queue, planned.label) == ("s-cpu", "cpu", "amd-cpu", "S (cpu)")
    assert reasons(plan) == {
        "s-gfx942": "needs gfx942; this machine has no GPU (agents: amd_mi300_1)",
        "s-cuda": "needs cuda; this machine has no GPU",
    }


def test_gpu_machine_takes_its_gpu_and_leaves_the_interpreter():
    plan = assemble(declare(a=[step("s", EVERYWHERE), step("t")]), EVERYTHING, MI300X, profile="gate")
    assert [planned.key for planned in plan.steps] == ["s-gfx942", "t-cpu"]
    assert reasons(plan) == {
        "s-cpu": "runs on gfx942 here, which is the stronger evidence",
        "s-cuda": "needs cuda; this machine has gfx942",
    }


def test_agents_take_every_device_with_a_queue():
    plan = assemble(declare(a=[step("s", EVERYWHERE)]), EVERYTHING, None, profile="pr")
    assert [(planned.key, planned.queue) for planned in plan.steps] == [
        ("s-cpu", "amd-cpu"),
        ("s-gfx942", "amd_mi300_1"),
    ]
    assert reasons(plan) == {"s-cuda": "no queue offers cuda; run it at a desk that has one"}


def test_step_without_a_place_is_omitted_and_so_is_what_needs_it():
    declared = declare(a=[step("gpu", ("gfx942",)), step("later", ("gfx942", "cpu"), needs=("gpu",)), step("other")])
    plan = assemble(declared, EVERYTHING, LAPTOP, profile="gate")
    assert [planned.key for planned in plan.steps] == ["other-cpu"]
    assert reasons(plan)["later-cpu"] == "needs gpu, which is omitted"


def test_missing_package_stays_planned_and_is_announced():
    plan = assemble(declare(a=[step("s", packages=("torch", "vllm"))]), EVERYTHING, LAPTOP, profile="gate")
    (planned,) = plan.steps
    assert planned.step.packages == ("torch", "vllm")
    assert planned.reason.endswith("; will not run here, vllm not installed")


def test_needs_are_met_on_the_same_device_else_on_the_cpu():
    declared = declare(
        a=[
            step("base", ("cpu", "gfx942")),
            step("fast", ("cpu",)),
            step("top", ("cpu", "gfx942"), needs=("base", "fast")),
        ]
    )
    plan = assemble(declared, EVERYTHING, None, profile="pr")
    depends = {planned.key: planned.depends_on for planned in plan.steps}
    assert depends["top-gfx942"] == ("base-gfx942", "fast-cpu")
    assert depends["top-cpu"] == ("base-cpu", "fast-cpu")


def test_needs_of_another_area_are_planned_too_and_stand_first():
    declared = declare(a=[step("top", needs=("base",))], b=[step("base"), step("beside")])
    plan = assemble(declared, change("a/x"), LAPTOP, profile="gate")
    assert [(planned.key, planned.reason) for planned in plan.steps] == [
        ("base-cpu", "needed by top"),
        ("top-cpu", "a/x changed"),
    ]
    assert reasons(plan) == {"beside": "not affected by this change"}


def test_environment_of_the_step_wins_over_the_device():
    plan = assemble(declare(a=[step("s", env={"A": "step"})]), EVERYTHING, LAPTOP, profile="gate")
    assert plan.steps[0].env == {"TRITON_INTERPRET": "1", "A": "step"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a",), ["s-cpu", "t-cpu"]),
        (("s",), ["s-cpu"]),
        (("s-cpu",), ["s-cpu"]),
        (("u",), ["t-cpu", "u-cpu"]),
        (("s", "u"), ["s-cpu", "t-cpu", "u-cpu"]),
    ],
)
def test_names_choose_areas_steps_and_devices_whatever_changed(names, expected):
    declared = declare(a=[step("s", EVERYWHERE), step("t")], b=[step("u", needs=("t",)), step("v")])
    plan = assemble(declared, change(), LAPTOP, profile="gate", select=names)
    assert sorted(planned.key for planned in plan.steps) == expected
    assert reasons(plan)["v"] == "not asked for"


def test_two_devices_asked_for_by_name():
    declared = declare(a=[step("s", EVERYWHERE)])
    plan = assemble(declared, EVERYTHING, None, profile="pr", select=("s-gfx942", "s-cpu"))
    assert [planned.key for planned in plan.steps] == ["s-cpu", "s-gfx942"]
    one = assemble(declared, EVERYTHING, None, profile="pr", select=("s-gfx942",))
    assert [planned.key for planned in one.steps] == ["s-gfx942"]


def test_unknown_name_is_misuse_with_a_suggestion():
    with pytest.raises(MisuseError) as caught:
        assemble(declare(a=[step("kernels-cache")]), EVERYTHING, LAPTOP, profile="gate", select=("kernel-cache",))
    assert "did you mean 'kernels-cache'" in caught.value.remedy


def test_device_asked_for_that_this_machine_lacks():
    with pytest.raises(CannotRunHereError) as caught:
        assemble(declare(a=[step("s", EVERYWHERE)]), EVERYTHING, LAPTOP, profile="gate", select=("s-gfx942",))
    assert "needs gfx942; this machine has no GPU" in caught.value.where


@pytest.mark.parametrize(
    "asked", [{"select": ("s",)}, {"select": ("n", "s-gfx942")}, {"select": ("n",), "models": ("m",)}]
)
def test_needs_do_not_stand_in_for_the_step_that_was_asked_for(asked):
    """They would run and pass, and the verdict would be taken for that of the step."""
    areas = declare(a=[step("n"), step("s", ("gfx942",), needs=("n",), models=("m",))])
    with pytest.raises(CannotRunHereError, match=r"nothing of (s|s-gfx942|m) can be planned") as caught:
        assemble(areas, EVERYTHING, LAPTOP, profile="gate", **asked)
    assert "s-gfx942: needs gfx942; this machine has no GPU" in caught.value.where


def test_a_step_that_some_device_can_run_is_planned():
    areas = declare(a=[step("n"), step("s", EVERYWHERE, needs=("n",))])
    planned = assemble(areas, EVERYTHING, LAPTOP, profile="gate", select=("s",))
    assert [one.key for one in planned.steps] == ["n-cpu", "s-cpu"]


def test_empty_plan_is_an_error():
    with pytest.raises(NothingSelectedError):
        assemble(declare(a=[step("s")]), change(), LAPTOP, profile="gate")
    with pytest.raises(NothingSelectedError, match="no step can be planned"):
        assemble(declare(a=[step("s", ("gfx942",))]), EVERYTHING, LAPTOP, profile="gate")


DECLARED = load(REPOSITORY)
GRAPH = build(REPOSITORY)
FILES = st.lists(st.sampled_from([*tracked_files(REPOSITORY), "new", "kernels/pagedkv/gone.py"]), max_size=6)
SITES = st.sampled_from([("gate", LAPTOP), ("gate", MI300X), ("pr", None), ("nightly", None), ("release", None)])


@settings(max_examples=40, deadline=None)
@given(FILES, FILES, SITES)
def test_one_more_file_never_removes_a_step(files, more, site):
    profile, machine = site
    before = assemble(DECLARED, change(*files), machine, profile=profile, graph=GRAPH)
    after = assemble(DECLARED, change(*files, *more), machine, profile=profile, graph=GRAPH)
    assert {s.key for s in before.steps} <= {s.key for s in after.steps}
    assert not {s.key for s in after.steps} & {o.key for o in after.omissions}


@settings(max_examples=40, deadline=None)
@given(FILES, SITES)
def test_every_step_and_omission_has_a_reason_and_no_cpu_step_takes_a_gpu(files, site):
    profile, machine = site
    plan = assemble(DECLARED, change(*files), machine, profile=profile, graph=GRAPH)
    assert all(one.reason.strip() for one in (*plan.steps, *plan.omissions))
    for planned in plan.steps:
        queue = DECLARED.agents.queues[planned.queue] if planned.queue else None
        assert queue is None or queue.device == planned.device
        if planned.device == "cpu":
            assert planned.gpus == 0
            assert queue is None or queue.gpus == 0
        else:
            assert queue is None or queue.gpus >= planned.gpus >= 1


def test_every_declared_step_is_planned_or_omitted_with_a_reason():
    declared = load(REPOSITORY)
    for machine, profile in ((LAPTOP, "gate"), (MI300X, "gate"), (None, "pr")):
        plan = assemble(declared, change("kernels/pagedkv/layout.py"), machine, profile=profile)
        told = {s.step.key for s in plan.steps} | {re.sub("-(cpu|gfx.*|cuda)$", "", o.key) for o in plan.omissions}
        assert told == {s.key for _, s in declared.steps()}
        assert all(entry.reason for entry in (*plan.steps, *plan.omissions))


def test_estimate_sums_and_finds_the_longest_chain():
    declared = declare(
        a=[step("x", minutes=1), step("y", minutes=2, needs=("x",)), step("z", ("gfx942",), minutes=2.5)]
    )
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"))
    assert (size.minutes, size.chain, size.chain_minutes, size.gpu_minutes) == (5.5, ("x-cpu", "y-cpu"), 3, 2.5)
    assert size.measured == 0


def test_estimate_takes_what_was_measured():
    declared = declare(a=[step("x", minutes=1), step("z", ("gfx942",), minutes=2.5)])
    size = estimate(assemble(declared, EVERYTHING, None, profile="pr"), {"x-cpu": 4.0, "other-cpu": 9.0})
    assert (size.minutes, size.chain, size.measured) == (6.5, ("x-cpu",), 1)


def test_facts_are_gathered_for_the_change_and_stand_in_the_plan():
    asked = []

    def gather(root, found):
        asked.append((root, found.files))
        return ChangeFacts(images={"cpu": "0" * 64}, fork=True)

    assert make_plan(REPOSITORY, base=None, profile="pr", select=("routing",), gather=gather).fork
    assert asked == [(REPOSITORY, None)]


def test_this_repository_can_be_planned_here():
    plan = make_plan(REPOSITORY, base=None, profile="pr")
    assert plan.steps
    assert plan_digest(plan) == plan_digest(make_plan(REPOSITORY, base=None, profile="pr"))


KNOWN = declare(a=[step("x", models=("jamba", "pocket-hybrid")), step("y", models=("granite-small", "jamba"))])


def test_models_are_the_steps_that_run_them():
    assert set(by_model(KNOWN, ["granite-small"])) == {"y"}
    assert set(by_model(KNOWN, ["jamba", "granite-small"])) == {"x", "y"}
    assert by_model(KNOWN, ["all"], "all") == {}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (["jmba"], "did you mean 'jamba'?"),
        (["jamba", "granite-smal"], "did you mean 'granite-small'?"),
        (["xyz"], "known: all, granite-small, jamba, pocket-hybrid"),
        (["jamba; rm"], "did you mean 'jamba'?"),
    ],
    ids=["typo", "second", "strange", "shell"],
)
def test_unknown_model_is_refused_with_what_was_meant(models, words):
    with pytest.raises(MisuseError, match="no step runs a model") as raised:
        by_model(KNOWN, models, "all")
    assert words in raised.value.remedy
