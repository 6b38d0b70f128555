# SPDX-License-Identifier: Apache-2.0
"""Plans for local runs and for agents: dependencies, omissions with reasons, profiles, images, forks, and the file."""

import datetime as dt
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.declarations import AGENTS, EVERYTHING, EVERYWHERE, LAPTOP, MI300X, change, declare, reasons, step

from hilgate.declare.imports import build
from hilgate.declare.load import load
from hilgate.errors import CannotRunHereError, DeclarationError, MisuseError, NothingSelectedError, RecordsError
from hilgate.git import tracked_files
from hilgate.model.declaration import Agents
from hilgate.model.plan import Plan, ProtectedChange, plan_digest
from hilgate.plan.machine import find_packages
from hilgate.plan.make import ChangeFacts, assemble, make_plan, read_plan
from hilgate.plan.select import by_model

REPOSITORY = Path(__file__).resolve().parents[3]


def test_laptop_takes_the_cpu_and_says_who_runs_the_rest():
    plan = assemble(declare(a=[step("s", EVERYWHERE)]), EVERYTHING, LAPTOP, profile="gate")
    (planned,) = plan.steps
    assert (planned.key, planned.device, planned.queue, planned.label) == ("s-cpu", "cpu", "amd-cpu", "S (cpu)")
    assert reasons(plan) == {
        "s-gfx942": "needs gfx942; this machine has no GPU (agents: amd_mi300_1)",
        "s-cuda": "needs cuda; this machine has no GPU",
    }


def test_agents_take_every_device_with_a_queue():
    plan = assemble(declare(a=[step("s", EVERYWHERE)]), EVERYTHING, None, profile="pr")
    assert [(planned.key, planned.queue) for planned in plan.steps] == [
        ("s-cpu", "amd-cpu"),
        ("s-gfx942", "amd_mi300_1"),
    ]
    assert reasons(plan) == {"s-cuda": "no queue offers cuda; run it on a machine that has one"}


def test_step_without_a_place_is_omitted_and_so_is_what_needs_it():
    declared = declare(a=[step("gpu", ("gfx942",)), step("later", ("gfx942", "cpu"), needs=("gpu",)), step("other")])
    plan = assemble(declared, EVERYTHING, LAPTOP, profile="gate")
    assert [planned.key for planned in plan.steps] == ["other-cpu"]
    assert reasons(plan)["later-cpu"] == "needs gpu, which is omitted"
    assert next(one.cause for one in plan.omissions if one.key == "later-cpu") == "need omitted"


@pytest.mark.parametrize(
    ("machine", "causes"),
    [
        (None, {"s-cuda": "no queue"}),
        (LAPTOP, {"s-gfx942": "not here", "s-cuda": "not here", "later-gfx942": "not here"}),
        (MI300X, {"s-cpu": "not here", "s-cuda": "not here"}),
    ],
    ids=["agents", "laptop", "GPUs"],
)
def test_every_omission_has_its_cause(machine, causes):
    steps = [step("s", EVERYWHERE), step("later", ("gfx942",)), step("night", profiles=("nightly",))]
    declared, profile = declare(a=steps, b=[step("far")]), "gate" if machine else "pr"
    plan = assemble(declared, change("a/x"), machine, profile=profile)
    others = {"night": "other profiles", "far": "not affected"}
    assert {one.key: one.cause for one in plan.omissions} == causes | others
    plan = assemble(declared, EVERYTHING, machine, profile=profile, select=("s",))
    assert next(one.cause for one in plan.omissions if one.key == "far") == "not asked for"


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
    for names in (("s-cpu", "s-gfx942"), ("s-gfx942",)):
        plan = assemble(declared, EVERYTHING, None, profile="pr", select=names)
        assert [planned.key for planned in plan.steps] == list(names)


@pytest.mark.parametrize(
    "asked", [{"select": ("s",)}, {"select": ("n", "s-gfx942")}, {"select": ("n",), "models": ("m",)}]
)
def test_needs_do_not_stand_in_for_the_step_that_was_asked_for(asked):
    """They would run and pass, and the verdict would be taken for that of the step."""
    areas = declare(a=[step("n"), step("s", ("gfx942",), needs=("n",), models=("m",))])
    with pytest.raises(CannotRunHereError, match=r"nothing of (s|s-gfx942|m) can be planned") as caught:
        assemble(areas, EVERYTHING, LAPTOP, profile="gate", **asked)
    assert "s-gfx942: needs gfx942; this machine has no GPU" in caught.value.where


def test_empty_plan_is_an_error():
    with pytest.raises(NothingSelectedError):
        assemble(declare(a=[step("s")]), change(), LAPTOP, profile="gate")
    with pytest.raises(NothingSelectedError, match="no step can be planned"):
        assemble(declare(a=[step("s", ("gfx942",))]), EVERYTHING, LAPTOP, profile="gate")


DECLARED = load(REPOSITORY)
GRAPH = build(REPOSITORY, DECLARED.project.python_path)
FILES = st.lists(st.sampled_from([*tracked_files(REPOSITORY), "new", "kernels/pagedkv/gone.py"]), max_size=6)
SITES = st.sampled_from([("gate", LAPTOP), ("gate", MI300X), ("pr", None), ("nightly", None), ("release", None)])


@settings(max_examples=40, deadline=None)
@given(FILES, SITES)
def test_every_step_is_planned_or_omitted_with_a_reason(files, site):
    profile, machine = site
    plan = assemble(DECLARED, change(*files), machine, profile=profile, graph=GRAPH)
    assert all(one.reason.strip() for one in (*plan.steps, *plan.omissions))
    named = {s.step.key for s in plan.steps} | {re.sub("-(cpu|gfx.*|cuda)$", "", o.key) for o in plan.omissions}
    assert named == {s.key for _, s in DECLARED.steps()}
    for planned in plan.steps:
        queue = DECLARED.agents.queues[planned.queue] if planned.queue else None
        assert queue is None or queue.device == planned.device
        if planned.device == "cpu":
            assert planned.gpus == 0
            assert queue is None or queue.gpus == 0
        else:
            assert queue is None or queue.gpus >= planned.gpus >= 1


KNOWN = declare(a=[step("x", models=("jamba", "pocket-hybrid")), step("y", models=("granite-small", "jamba"))])


def test_models_are_the_steps_that_run_them():
    assert set(by_model(KNOWN, ["granite-small"])) == {"y"}
    assert set(by_model(KNOWN, ["jamba", "granite-small"])) == {"x", "y"}
    assert by_model(KNOWN, ["all"], "all") == {}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (["jamba", "granite-smal"], "did you mean 'granite-small'?"),
        (["xyz"], "name one of all, granite-small, jamba, pocket-hybrid"),
    ],
    ids=["typo", "strange"],
)
def test_unknown_model_is_refused_with_what_was_meant(models, words):
    with pytest.raises(MisuseError, match="no step runs a model") as raised:
        by_model(KNOWN, models, "all")
    assert words in raised.value.remedy


def keys(plan):
    return [planned.key for planned in plan.steps]


def test_step_of_other_profiles_is_omitted_and_says_when_it_runs():
    declared = declare(
        a=[
            step("always"),
            step("night", profiles=("nightly", "release")),
            step("local", profiles=("gate",)),
            step("change", profiles=("pr", "nightly")),
        ]
    )
    plan = assemble(declared, change("a/x"), None, profile="pr")
    assert keys(plan) == ["always-cpu", "change-cpu"]
    assert reasons(plan) == {"night": "runs nightly and for a release", "local": "runs locally"}
    assert keys(assemble(declared, EVERYTHING, LAPTOP, profile="gate")) == ["always-cpu", "local-cpu"]


@pytest.mark.parametrize("profile", ["nightly", "release"])
def test_night_and_release_run_everything_on_every_arch(profile):
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


def fleet(**queues):
    """Agents with these queues of gfx942 besides those of every declaration."""
    known = AGENTS.model_dump()
    offers = {name: {"device": "gfx942", "memory_gib": 192, **offer} for name, offer in queues.items()}
    return Agents.model_validate({**known, "queues": {**known["queues"], **offers}})


FLEET = fleet(amd_mi300_4={"gpus": 4}, amd_mi300_8={"gpus": 8})


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
    assert reasons(plan)["s-gfx942"] == "no queue offers 2 x gfx942; run it on a machine that has them"
    local = assemble(declared, EVERYTHING, MI300X.model_copy(update={"gpus": 1}), profile="gate")
    assert keys(local) == ["s-cpu", "t-cpu"]
    assert reasons(local)["g-gfx942"] == "needs 2 x gfx942; this machine has 1"
    assert keys(assemble(declared, EVERYTHING, MI300X, profile="gate")) == ["s-gfx942", "g-gfx942", "t-cpu"]


WITH_IMAGE = fleet(amd_mi300_1={"gpus": 1, "image": "rocm"})
IMAGES = {
    "a": [step("s", ("cpu", "gfx942"))],
    "images": [step("image-rocm", provides="rocm"), step("image-cpu", provides="cpu")],
}
FACTS = ChangeFacts(images={"rocm": "1" * 64, "cpu": "2" * 64})


def test_a_job_with_an_image_waits_for_the_step_that_builds_it():
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


@pytest.mark.parametrize("profile", ["pr", "nightly"])
def test_an_image_main_has_built_needs_no_step(profile):
    digest = "sha256:" + "d" * 64
    facts, declared = replace(FACTS, digests={"rocm": digest}), declare(WITH_IMAGE, **IMAGES)
    plan = assemble(declared, change("a/x"), None, profile=profile, facts=facts)
    steps = {planned.key: planned for planned in plan.steps}
    assert ("image-rocm-cpu" in steps, "image-cpu-cpu" in steps) == (False, profile == "nightly")
    assert (steps["s-gfx942"].image, steps["s-gfx942"].depends_on) == ("rocm", ())
    assert (plan.images["rocm"], plan.digests) == ("1" * 64, {"rocm": digest})
    assert reasons(plan)["image-rocm"].startswith("a build of the default branch built the same: rocm is sha256:dddd")
    asked = assemble(declared, EVERYTHING, None, profile=profile, select=("image-rocm",), facts=facts)
    assert keys(asked) == ["image-rocm-cpu"]


def test_a_fork_reads_what_it_cannot_run_and_who_can():
    declared = declare(WITH_IMAGE, a=[step("s", ("cpu", "gfx942"), network=True)], images=IMAGES["images"])
    cases = (({}, {"image-rocm-cpu", "s-cpu", "s-gfx942"}), ({"rocm": "sha256:" + "d" * 64}, {"s-cpu", "s-gfx942"}))
    for digests, reported in cases:
        plan = assemble(declared, change("a/x"), None, profile="pr", facts=replace(FACTS, fork=True, digests=digests))
        who = f"{declared.project.approvers} may push the commit to a branch here"
        assert {one.key for one in plan.steps if who in one.reason} == reported


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
    protected_changes = (ProtectedChange(path="tests/support/tolerances.py", what="1e-3 -> 1e-1"),)
    at = replace(change("a/x"), merge_base="b" * 40)
    plan = assemble(
        declare(a=[step("s")]), at, LAPTOP, profile="gate", facts=ChangeFacts(protected_changes=protected_changes)
    )
    assert (plan.protected_changes, plan.merge_base) == (protected_changes, "b" * 40)


@pytest.mark.parametrize(
    ("theirs", "fork"), [("git@github.com:them/it.git", True), ("git@github.com:us/it.git", False)]
)
def test_pull_request_of_another_repository_is_a_fork(monkeypatch, theirs, fork):
    monkeypatch.delenv("HILGATE_FORK", raising=False)
    for name, value in {
        "BUILDKITE": "true",
        "BUILDKITE_PULL_REQUEST": "7",
        "BUILDKITE_REPO": "git@github.com:us/it.git",
        "BUILDKITE_PULL_REQUEST_REPO": theirs,
    }.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(REPOSITORY, base=None, profile="pr", select=("routing",))
    assert (plan.fork, plan.images.keys()) == (fork, {"cpu"})


PLAN = plans.plan(plans.step("s", "true"), base=None, omissions=())


def test_digest_ignores_when_and_sees_everything_else():
    later = PLAN.model_copy(update={"created": PLAN.created + dt.timedelta(days=1)})
    assert plan_digest(PLAN) == plan_digest(later)
    assert re.fullmatch("[0-9a-f]{64}", plan_digest(PLAN))
    for change_ in (
        {"commit": "d"},
        {"dirty": True},
        {"base": "b"},
        {"profile": "pr"},
        {"changed_files": ("f",)},
        {"steps": ()},
        {"omissions": ({"key": "k", "area": "a", "label": "l", "cause": "no queue", "reason": "r"},)},
    ):
        assert plan_digest(Plan.model_validate({**PLAN.model_dump(), **change_})) != plan_digest(PLAN), change_


def test_plan_survives_its_file(tmp_path):
    path = tmp_path / "results" / "plan.json"
    with pytest.raises(RecordsError, match="there is no plan"):
        read_plan(path)
    PLAN.save(path)
    assert read_plan(path) == PLAN
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[:100], "not a plan"),
        (lambda text: text.replace('"profile"', '"profil"'), "not a plan"),
        (
            lambda text: text.replace('"schema_version": 9', '"schema_version": 2'),
            "not a plan: schema 2, this reads 9",
        ),
        (lambda text: text.replace('"schema_version": 9,', ""), "it has no schema_version"),
        (lambda text: json.dumps({**json.loads(text), "steps": json.loads(text)["steps"] * 2}), "stands twice"),
        (lambda text: text.replace('"depends_on": []', '"depends_on": ["gone"]'), "depends on gone"),
    ],
)
def test_damaged_plan_is_refused(tmp_path, damage, expected):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordsError, match=expected):
        read_plan(path)


def test_make_test_runs_tests_without_engines_and_ci_the_others():
    """`make test`: no engine, backend of vLLM, compiler or attack. `.ci/run` runs each step of the whole gate once."""
    makefile, ci = ((REPOSITORY / name).read_text().replace("\\\n", "") for name in ("Makefile", ".ci/run"))
    named = set(re.search(r"^TESTS := (.+)$", makefile, re.MULTILINE)[1].split())
    for area, one in load(REPOSITORY).steps():
        if "cpu" in one.devices and "gate" in one.profiles:
            wanted = "-m pytest " in one.command and not re.search(
                "tests/(attacks|models|families|examples|vllm_kernels|operators)|--amdgcn", one.command
            )
            assert bool({area.area, one.key} & named) is wanted, one.key
    assert ".ci/bare-machine 'make test && make rest && make test ARGS=tests/bugs'" in ci
    assert "gate --all $(TESTS:%=--except %)" in makefile


def test_a_step_that_passed_elsewhere_is_left_out():
    declared = declare(a=[step("s"), step("t", needs=("s",))], b=[step("u", needs=("t",))])
    plan = assemble(declared, EVERYTHING, LAPTOP, profile="gate", whole=True, leave_out=("a",))
    assert [(one.key, one.depends_on) for one in plan.steps] == [("u-cpu", ())]
    assert reasons(plan) == {"s": "left out (--except)", "t": "left out (--except)"}
    with pytest.raises(MisuseError, match="no area or step is called 'c'"):
        assemble(declared, EVERYTHING, LAPTOP, profile="gate", leave_out=("c",))


def test_an_area_stands_for_its_steps_of_the_profile():
    declared = declare(a=[step("s"), step("n", profiles=("nightly",))], b=[step("m", profiles=("nightly",))])

    def planned(*names):
        return [one.key for one in assemble(declared, EVERYTHING, LAPTOP, profile="gate", select=names).steps]

    assert planned("a") == ["s-cpu"]
    assert planned("b") == ["m-cpu"], "it has none of the profile, so all of them"
    assert planned("n") == ["n-cpu"], "a step's own name takes it"


def test_packages_are_found_where_python_would_find_them(tmp_path):
    for name in ("root/a/one", "root/b/one", "root/b/two", "root/b/no.package", "elsewhere/three"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    root = tmp_path / "root"
    (root / "b" / "three").symlink_to("../../elsewhere/three")
    (root / "b" / "folder").mkdir()
    elsewhere = str(tmp_path / "elsewhere" / "three")
    assert find_packages(root, ("a", "b")) == {"one": "a/one", "two": "b/two", "three": elsewhere}
    assert find_packages(root, ()) == {}
