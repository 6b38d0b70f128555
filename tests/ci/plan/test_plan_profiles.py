"""Whose plan it is: profiles, models, tools, GPUs, images, forks."""

from dataclasses import replace

import pytest
from support.declarations import AGENTS, EVERYTHING, LAPTOP, MI300X, change, declare, reasons, step

from hilgate.errors import CannotRunHereError, DeclarationError, MisuseError
from hilgate.model import Agents, Loosening
from hilgate.plan.make import ChangeFacts, assemble, gather_facts


def keys(plan):
    return [planned.key for planned in plan.steps]


def test_step_of_other_profiles_is_omitted_and_says_when_it_runs():
    declared = declare(
        a=[
            step("always"),
            step("night", profiles=("nightly", "release")),
            step("desk", profiles=("gate",)),
            step("change", profiles=("pr", "nightly")),
        ]
    )
    plan = assemble(declared, change("a/x"), None, profile="pr")
    assert keys(plan) == ["always-cpu", "change-cpu"]
    assert reasons(plan) == {"night": "runs nightly and for a release", "desk": "runs at a desk"}
    assert keys(assemble(declared, EVERYTHING, LAPTOP, profile="gate")) == ["always-cpu", "desk-cpu"]


@pytest.mark.parametrize("profile", ["nightly", "release"])
def test_night_and_release_run_everything_on_every_arch_whatever_changed(profile):
    declared = declare(a=[step("s", ("cpu", "gfx942"))], b=[step("t")])
    plan = assemble(declared, change("a/x"), None, profile=profile)
    assert keys(plan) == ["s-cpu", "s-gfx942", "t-cpu"]
    assert {planned.reason for planned in plan.steps} == {
        "everything runs nightly" if profile == "nightly" else "everything runs for a release"
    }
    assert plan.changed_files == ("a/x",)


def test_what_is_asked_for_by_name_runs_whatever_its_profiles():
    declared = declare(a=[step("night", profiles=("nightly",)), step("other")])
    assert keys(assemble(declared, EVERYTHING, LAPTOP, profile="gate", select=("night",))) == ["night-cpu"]


def test_models_select_their_steps_and_what_these_need():
    declared = declare(
        a=[step("base"), step("jamba", models=("jamba", "bamba"), needs=("base",)), step("zamba", models=("zamba",))]
    )
    plan = assemble(declared, change("b/x"), LAPTOP, profile="gate", models=("bamba",))
    assert [(planned.key, planned.reason) for planned in plan.steps] == [
        ("base-cpu", "needed by jamba"),
        ("jamba-cpu", "asked for: model bamba"),
    ]
    assert plan.steps[1].step.models == ("jamba", "bamba")
    assert reasons(plan) == {"zamba": "not asked for"}
    both = assemble(declared, EVERYTHING, LAPTOP, profile="gate", models=("zamba",), select=("base",))
    assert keys(both) == ["base-cpu", "zamba-cpu"]


def test_unknown_model_is_misuse_with_a_suggestion():
    declared = declare(a=[step("s", models=("pocket-hybrid",))])
    with pytest.raises(MisuseError, match="no step runs a model 'pocket-hybird'") as caught:
        assemble(declared, EVERYTHING, LAPTOP, profile="gate", models=("pocket-hybird",))
    assert "did you mean 'pocket-hybrid'" in caught.value.remedy


def test_missing_tool_omits_the_step_here_and_not_on_the_agents():
    declared = declare(a=[step("build", tools=("buildah", "skopeo"), provides="rocm"), step("s")])
    plan = assemble(declared, EVERYTHING, LAPTOP, profile="gate", absent=frozenset({"buildah"}))
    assert keys(plan) == ["s-cpu"]
    assert reasons(plan) == {"build-cpu": "needs buildah; not installed here (agents: amd-cpu)"}
    agents = assemble(declared, EVERYTHING, None, profile="pr", absent=frozenset({"buildah"}))
    assert keys(agents) == ["build-cpu", "s-cpu"]
    with pytest.raises(CannotRunHereError) as caught:
        assemble(declared, EVERYTHING, LAPTOP, profile="gate", select=("build",), absent=frozenset({"skopeo"}))
    assert "needs skopeo" in caught.value.where


FLEET = Agents.model_validate(
    {
        "devices": AGENTS.model_dump()["devices"],
        "queues": {
            **AGENTS.model_dump()["queues"],
            "amd_mi300_4": {"device": "gfx942", "gpus": 4, "memory_gib": 192},
            "amd_mi300_8": {"device": "gfx942", "gpus": 8, "memory_gib": 192},
        },
    }
)


def test_gpus_choose_the_smallest_queue_that_has_them():
    declared = declare(FLEET, a=[step("one", ("gfx942",)), step("two", ("cpu", "gfx942"), gpus=2)])
    plan = assemble(declared, EVERYTHING, None, profile="pr")
    assert [(planned.key, planned.queue, planned.gpus) for planned in plan.steps] == [
        ("one-gfx942", "amd_mi300_1", 1),
        ("two-cpu", "amd-cpu", 0),
        ("two-gfx942", "amd_mi300_4", 2),
    ]


def test_more_gpus_than_there_are():
    declared = declare(a=[step("s", ("cpu", "gfx942"), gpus=2), step("g", ("gfx942",), gpus=2), step("t")])
    plan = assemble(declared, EVERYTHING, None, profile="pr")
    assert reasons(plan)["s-gfx942"] == "no queue offers 2 x gfx942; run it at a desk that has them"
    desk = assemble(declared, EVERYTHING, replace(MI300X, gpus=1), profile="gate")
    assert keys(desk) == ["s-cpu", "t-cpu"]
    assert reasons(desk)["g-gfx942"] == "needs 2 x gfx942; this machine has 1"
    assert keys(assemble(declared, EVERYTHING, MI300X, profile="gate")) == ["s-gfx942", "g-gfx942", "t-cpu"]


WITH_IMAGE = Agents.model_validate(
    {
        "devices": AGENTS.model_dump()["devices"],
        "queues": {
            "amd-cpu": {"device": "cpu", "gpus": 0, "memory_gib": 64},
            "amd_mi300_1": {"device": "gfx942", "gpus": 1, "memory_gib": 192, "image": "rocm"},
        },
    }
)
IMAGES = {
    "a": [step("s", ("cpu", "gfx942"))],
    "images": [step("image-rocm", provides="rocm"), step("image-cpu", provides="cpu")],
}
FACTS = ChangeFacts(images={"rocm": "1" * 64, "cpu": "2" * 64})


def test_job_on_a_queue_with_an_image_waits_for_the_step_that_builds_it():
    plan = assemble(declare(WITH_IMAGE, **IMAGES), change("a/x"), None, profile="pr", facts=FACTS)
    steps = {planned.key: planned for planned in plan.steps}
    assert set(steps) == {"s-cpu", "s-gfx942", "image-rocm-cpu"}
    assert (steps["s-gfx942"].image, steps["s-gfx942"].depends_on) == ("rocm", ("image-rocm-cpu",))
    assert (steps["s-cpu"].image, steps["s-cpu"].depends_on) == (None, ())
    assert steps["image-rocm-cpu"].reason == "builds the image of s"
    assert (steps["image-rocm-cpu"].step.provides, steps["image-rocm-cpu"].image) == ("rocm", None)
    assert plan.images == {"rocm": "1" * 64}
    order = keys(plan)
    assert order.index("image-rocm-cpu") < order.index("s-gfx942")


def test_only_devices_that_were_asked_for_need_their_image():
    plan = assemble(declare(WITH_IMAGE, **IMAGES), EVERYTHING, None, profile="pr", select=("s-cpu",), facts=FACTS)
    assert keys(plan) == ["s-cpu"]


def test_at_a_desk_nothing_runs_in_an_image():
    plan = assemble(declare(WITH_IMAGE, **IMAGES), change("a/x"), MI300X, profile="gate", facts=FACTS)
    assert [(planned.key, planned.image, planned.depends_on) for planned in plan.steps] == [("s-gfx942", None, ())]
    assert plan.images == {}


def test_image_of_which_nobody_says_what_it_is_built_from():
    with pytest.raises(DeclarationError, match="nothing says what the image 'rocm' is built from"):
        assemble(declare(WITH_IMAGE, **IMAGES), change("a/x"), None, profile="pr", facts=ChangeFacts())


def test_fork_gets_no_secrets_and_the_plan_says_so():
    declared = declare(a=[step("s", secrets=("HF_TOKEN",), network=True)])
    ours = assemble(declared, EVERYTHING, None, profile="pr", facts=ChangeFacts())
    forked = assemble(declared, EVERYTHING, None, profile="pr", facts=ChangeFacts(fork=True))
    assert (ours.fork, ours.steps[0].step.secrets, ours.steps[0].step.network) == (False, ("HF_TOKEN",), True)
    assert (forked.fork, forked.steps[0].step.secrets) == (True, ())


def test_plan_records_what_is_loosened_and_the_merge_base():
    loosened = (Loosening(path="tests/support/tolerances.py", what="1e-3 -> 1e-1"),)
    at = replace(change("a/x"), merge_base="b" * 40)
    plan = assemble(declare(a=[step("s")]), at, LAPTOP, profile="gate", facts=ChangeFacts(loosened=loosened))
    assert (plan.loosened, plan.merge_base) == (loosened, "b" * 40)


@pytest.mark.parametrize(
    ("theirs", "fork"), [("git@github.com:them/it.git", True), ("git@github.com:us/it.git", False)]
)
def test_pull_request_of_another_repository_is_a_fork(monkeypatch, tmp_path, theirs, fork):
    monkeypatch.delenv("HILGATE_FORK", raising=False)
    for name, value in {
        "BUILDKITE": "true",
        "BUILDKITE_PULL_REQUEST": "7",
        "BUILDKITE_REPO": "git@github.com:us/it.git",
        "BUILDKITE_PULL_REQUEST_REPO": theirs,
    }.items():
        monkeypatch.setenv(name, value)
    assert gather_facts(tmp_path, EVERYTHING).fork is fork
