# SPDX-License-Identifier: Apache-2.0
"""Generated pipelines: golden files of two small plans, both copies of Buildkite's schema, and random plans."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from buildkite_sdk.schema import CommandStep, CommandStepRetry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support import plans
from support.declarations import change
from support.pipelines import DECLARED, WITH_PODS, agent_plan, pod_plan, steps_of

from hilgate.buildkite.lint import lint, schema_problems
from hilgate.buildkite.steps import (
    InvalidPipelineError,
    approved_yaml,
    pipeline_yaml,
    pods_yaml,
    recheck_key,
    recheck_yaml,
    required_yaml,
)
from hilgate.errors import NothingSelectedError
from hilgate.model.declaration import POSTED_BY
from hilgate.names import APPROVED_KEY_SUFFIX, approved_key
from hilgate.plan.make import assemble
from hilgate.run.process import UPLOAD_SECONDS

GOLDEN = Path(__file__).parent / "golden"


def plan_of(*files, profile="pr"):
    return assemble(DECLARED, change(*files, base="main" if files else None), None, profile=profile)


FORK = {"image-and-secret": False, "fork": True}


def test_every_golden_file_is_compared():
    assert {path.stem for path in GOLDEN.glob("*.yml")} == {*FORK, "recheck", "pod"}


def is_golden(name, text):
    """After an intended change: HILGATE_WRITE_GOLDEN=1 pytest tests/ci/buildkite/test_steps.py, then read the diff."""
    path = GOLDEN / f"{name}.yml"
    if os.environ.get("HILGATE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} written; run again without HILGATE_WRITE_GOLDEN")
    return text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FORK)
def test_pipeline_is_the_golden_one(name):
    assert is_golden(name, pipeline_yaml(agent_plan(fork=FORK[name]), DECLARED))


def test_rechecks_are_the_golden_ones():
    failing = {"models-gfx942": ("one",), "kernels-gfx942": ("two", "three")}
    assert is_golden("recheck", recheck_yaml(agent_plan(), failing, DECLARED))


def test_pod_is_the_golden_one():
    assert is_golden("pod", pipeline_yaml(pod_plan(), WITH_PODS))


def plugin_of(text, key="models-gfx942"):
    return steps_of(text)[key]["plugins"][0]["kubernetes"]


def test_reruns_are_pods_as_well():
    pod = plugin_of(pipeline_yaml(pod_plan(), WITH_PODS))
    assert plugin_of(recheck_yaml(pod_plan(), {"models-gfx942": ("one",)}, WITH_PODS), "models-gfx942-recheck") == pod
    assert plugin_of(approved_yaml(pod_plan(), WITH_PODS), "models-gfx942-approved") == pod


def test_a_recheck_in_a_pod_asks_for_another_node():
    def affinity(node):
        text = recheck_yaml(pod_plan(), {"models-gfx942": ("one",)}, WITH_PODS, nodes={"models-gfx942": node})
        return plugin_of(text, "models-gfx942-recheck")["podSpec"].get("affinity")

    assert "'metadata.name', 'operator': 'NotIn', 'values': ['mi300-node7']" in str(affinity("mi300-node7"))
    assert affinity("") is affinity("$HOME") is affinity("a\nb") is None  # no node, and what a result may say instead


def test_a_pod_without_gpus_has_nothing_to_judge():
    step = plans.step("units", "python -m pytest", key="units-cpu", queue="amd-cpu-pods", image="cpu", network=True)
    plan = plans.plan(step, profile="pr", images={"cpu": "d" * 64}, digests={"cpu": "sha256:" + "ab" * 32})
    pod = plugin_of(pipeline_yaml(plan, WITH_PODS), "units-cpu")
    assert [one["name"] for one in pod["podSpec"]["initContainers"]] == ["hilgate", "step"]
    assert pod["metadata"]["labels"] == {"hilgate/network": "open"}
    assert "amd.com/gpu" not in str(pod)


def test_a_fork_in_a_pod_has_no_secret_and_no_network():
    step = plans.step("models", "python -m x", key="models-gfx942", network=True, secrets=("HF_TOKEN",),
                      device="gfx942", queue="amd_mi300_1_pods", gpus=1, image="rocm")  # fmt: skip
    plan = pod_plan().model_copy(update={"steps": (step,), "fork": True})
    text = pipeline_yaml(plan, WITH_PODS)
    assert "HF_TOKEN" not in text
    assert plugin_of(text)["metadata"]["labels"] == {"hilgate/network": "none"}


def plan_that_builds():
    """A plan that builds an image, a pod of it, and a step on a host that waits for the pod."""
    image = plans.step("image-rocm", "docker/build.sh rocm", provides="rocm", network=True, timeout_minutes=60)
    pod = {"device": "gfx942", "queue": "amd_mi300_1_pods", "image": "rocm", "depends_on": ("image-rocm-cpu",)}
    models = plans.step("models", "python -m x", key="models-gfx942", **pod)
    after = plans.step("after", "python -m x", key="after-cpu", depends_on=("models-gfx942",))
    return plans.plan(image, models, after, profile="pr", images={"rocm": "d" * 64})


def test_pods_of_a_new_image_are_uploaded_once_it_is_built():
    plan, digest = plan_that_builds(), "sha256:" + "cd" * 32
    first = steps_of(pipeline_yaml(plan, WITH_PODS))
    assert list(first) == ["pods", "image-rocm-cpu"]
    assert first["pods"]["depends_on"] == ["image-rocm-cpu"]
    assert first["pods"]["agents"] == {"queue": "amd-gate"}
    assert (
        "hilgate pipeline --plan results/plan.json --built results/jobs > results/pods.yml" in first["pods"]["command"]
    )
    later = steps_of(pods_yaml(plan, {"rocm": digest}, WITH_PODS))
    assert list(later) == ["models-gfx942", "after-cpu"]
    assert later["models-gfx942"]["depends_on"] == ["image-rocm-cpu"]
    image = later["models-gfx942"]["plugins"][0]["kubernetes"]["podSpec"]["initContainers"][-1]["image"]
    assert image == f"registry.example/hilgate/rocm@{digest}"


def test_pods_of_an_image_that_nobody_builds_are_refused():
    with pytest.raises(InvalidPipelineError, match="a pod of the image 'rocm', which nobody has built"):
        pipeline_yaml(pod_plan(digests={}), WITH_PODS)
    with pytest.raises(InvalidPipelineError, match="its image 'rocm' was not built"):
        pods_yaml(plan_that_builds(), {}, WITH_PODS)
    builder = plans.step("image", "x", provides="cpu", key="image-cpu", queue="amd-cpu-pods")
    with pytest.raises(InvalidPipelineError, match="'image-cpu' runs in a pod, and it has no image"):
        pipeline_yaml(plans.plan(builder, profile="pr", images={"cpu": "d" * 64}), WITH_PODS)


def test_everything_declared_is_valid_by_the_schema_a_typo_not():
    for plan in (plan_of("pyproject.toml"), plan_of(profile="nightly")):
        text = pipeline_yaml(plan, DECLARED)
        assert schema_problems(text) == []
        assert schema_problems(text.replace("timeout_in_minutes", "timeout_in_minuts", 1)) != []


ALWAYS_SET = {"key", "label", "command", "agents", "priority", "timeout_in_minutes", "artifact_paths", "retry"}
SOMETIMES_SET = {"depends_on", "secrets", "concurrency", "concurrency_group", "concurrency_method"}

REAL_PLANS = {
    "kernels": lambda: plan_of("kernels/pagedkv/layout.py"),
    "everything": lambda: plan_of("pyproject.toml"),
    "nightly": lambda: plan_of(profile="nightly"),
    "release": lambda: plan_of(profile="release"),
}
"""Plans of the real areas. What their pipelines must hold is asserted, not recorded: a record of every step would
change with each step that is added, renamed or removed."""


def find_job(plan, key):
    return next(step.job_key for step in plan.steps if step.key == key)


@pytest.mark.parametrize("name", REAL_PLANS)
def test_every_planned_step_is_in_it_as_planned(name):
    plan = REAL_PLANS[name]()
    text = pipeline_yaml(plan, DECLARED)
    assert schema_problems(text) == []
    steps, jobs = steps_of(text), plan.jobs()
    assert sorted(steps) == sorted(jobs)
    for key, together in jobs.items():
        step, planned, keys = steps[key], together[0], [one.key for one in together]
        assert step["agents"] == {"queue": planned.queue}
        assert planned.queue in DECLARED.agents.queues
        assert all(word in step["label"] for word in ([planned.label] if len(keys) == 1 else [planned.step.key]))
        own = sum(one.step.timeout_minutes for one in together)
        assert (step["timeout_in_minutes"] - own) * 60 >= UPLOAD_SECONDS + 60 * len(keys)
        assert set(step.get("depends_on", [])) == {find_job(plan, need) for need in planned.depends_on}
        assert step["artifact_paths"] == [f"results/jobs/{one}/**/*" for one in keys]
        assert step["command"] == [
            "buildkite-agent artifact download results/plan.json . --step plan",
            f"hilgate job {' '.join(keys)} --plan results/plan.json --results results/jobs/{key}",
        ]
        assert step.get("secrets", []) == list(planned.step.secrets)
        assert step["retry"]["manual"]["allowed"] is False
        assert {rule.get("exit_status") for rule in step["retry"]["automatic"]}.isdisjoint({"*", 0, 1, 6})
        assert step.keys() >= ALWAYS_SET
        assert step.keys() <= ALWAYS_SET | SOMETIMES_SET


@pytest.mark.parametrize(
    ("profile", "branch", "priority"),
    [
        ("pr", "", 100),
        ("pr", "feature", 100),
        ("pr", "gh-readonly-queue/main/pr-7-0123", 200),
        ("nightly", "main", -10),
        ("release", "main", 0),
    ],
)
def test_priority_is_that_of_who_waits(profile, branch, priority):
    steps = steps_of(pipeline_yaml(agent_plan(profile=profile), DECLARED, branch=branch))
    assert {step["priority"] for step in steps.values()} == {priority}


def test_a_need_waits_for_the_whole_shared_job():
    plan = agent_plan()
    image, kernels, models = plan.steps
    models = plans.changed(models, secrets=(), job=kernels.key)
    later = plans.step("later", "true", key="later-gfx942", queue="amd_mi300_1", depends_on=(models.key,))
    shared = plans.plan(image, kernels, models, later, profile="pr", images=plan.images)
    steps = steps_of(pipeline_yaml(shared, DECLARED))
    assert list(steps) == [image.key, later.key, kernels.key]
    assert steps[later.key]["depends_on"] == [kernels.key]
    job = steps[kernels.key]
    assert job["label"] == "2 steps (gfx942): kernels, models"
    assert job["timeout_in_minutes"] == 2 * 1 + 2 + 4 + 15
    rerun = steps_of(approved_yaml(shared, DECLARED))
    assert set(rerun) == {approved_key(key) for key in steps}
    assert rerun[approved_key(later.key)]["depends_on"] == [approved_key(kernels.key)]
    assert set(steps_of(recheck_yaml(shared, {models.key: ("a",)}, DECLARED))) == {recheck_key(models.key)}


@pytest.mark.parametrize(
    "unlike",
    [
        {"queue": "amd_mi355_1"},
        {"secrets": ("HF_TOKEN",)},
        {"image": None},
        {"gpus": 2},
        {"depends_on": ()},
        {"job": "gone-gfx942"},
    ],
    ids=str,
)
def test_a_plan_whose_steps_cannot_share_a_job_is_refused(unlike):
    image, kernels, models = agent_plan().steps
    models = plans.changed(models, **({"secrets": (), "job": kernels.key} | unlike))
    with pytest.raises(ValidationError, match="cannot share the job of"):
        plans.plan(image, kernels, models, profile="pr", images={"rocm": "d" * 64})


def test_builds_of_one_image_wait_for_each_other_only():
    same, other = agent_plan(), agent_plan(images={"rocm": "e" * 64})
    locks = [steps_of(pipeline_yaml(plan, DECLARED))["image-rocm-cpu"]["concurrency_group"] for plan in (same, other)]
    assert locks == [f"hilgate/image/rocm/{'d' * 16}", f"hilgate/image/rocm/{'e' * 16}"]
    assert "concurrency" not in steps_of(pipeline_yaml(same, DECLARED))["kernels-gfx942"]


def test_misspelt_keys_are_refused_by_the_sdk_models():
    for misspelt in ({"comand": "x"}, {"command": "x", "timeout_in_minuts": 3}):
        with pytest.raises(ValidationError):
            CommandStep(**misspelt)
    with pytest.raises(ValidationError):
        CommandStepRetry(automatic=[{"exit_statuss": 1}])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"queue": None}, "has no queue"),
        ({"label": "costs $HOME"}, "may interpolate"),
        ({"key": "dots.in"}, "has no key that Buildkite takes"),
        ({"device": "recheck"}, "ends in '-recheck'"),
        ({"depends_on": ("elsewhere",)}, "'elsewhere', which does not exist"),
    ],
)
def test_plan_that_makes_no_sound_pipeline_is_refused(change, problem):
    plan = agent_plan()
    stray = plan.model_copy(update={"steps": (plans.changed(plan.steps[0], **change),)})
    with pytest.raises(InvalidPipelineError, match=re.escape(problem)):
        pipeline_yaml(stray, DECLARED)


def test_plan_of_one_machine_and_empty_plan_are_no_pipelines():
    with pytest.raises(InvalidPipelineError, match="for one machine"):
        pipeline_yaml(agent_plan(profile="gate"), DECLARED)
    with pytest.raises(NothingSelectedError):
        pipeline_yaml(agent_plan().model_copy(update={"steps": ()}), DECLARED)


def test_title_comes_from_the_area():
    renamed = replace(DECLARED, areas=tuple(area.model_copy(update={"title": "X"}) for area in DECLARED.areas))
    text = pipeline_yaml(plan_of("README.md"), renamed)
    assert {top["group"] for top in yaml.safe_load(text)["steps"]} == {"X", "small steps, several in a job"}


KEYS = st.from_regex(r"[a-z][a-z0-9_-]{0,20}-(cpu|gfx942)", fullmatch=True)


@st.composite
def random_plans(draw):
    keys = draw(st.lists(KEYS, min_size=1, max_size=8, unique=True))
    steps = []
    for position, key in enumerate(keys):
        needs = draw(st.lists(st.sampled_from(keys[:position]), max_size=3, unique=True)) if position else []
        steps.append(
            plans.step(
                "sample",
                "true",
                key=key,
                device=key.rpartition("-")[2],
                area=draw(st.sampled_from(["one", "two", "three"])),
                label=draw(st.text(st.characters(blacklist_characters="$", blacklist_categories=["C"]), min_size=1)),
                queue=draw(st.sampled_from(["amd-cpu", "amd_mi300_1"])),
                depends_on=tuple(needs),
                timeout_minutes=draw(st.integers(1, 180)),
                image=draw(st.sampled_from([None, "rocm"])),
                provides=draw(st.sampled_from([None, "rocm", "cpu"])),
                secrets=tuple(draw(st.lists(st.sampled_from(["HF_TOKEN", "OTHER"]), unique=True))),
            )
        )
    profile = draw(st.sampled_from(["pr", "nightly", "release"]))
    images = draw(st.sampled_from([{}, {"rocm": "a" * 64}]))
    return plans.plan(*steps, fork=draw(st.booleans()), profile=profile, images=images)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=random_plans(), branch=st.sampled_from(["main", "gh-readonly-queue/main/pr-1"]), failing=st.data())
def test_any_plan_becomes_a_sound_pipeline_of_exactly_its_steps(plan, branch, failing):
    text = pipeline_yaml(plan, DECLARED, branch=branch)
    assert lint(text, secrets=not plan.fork) == []
    assert schema_problems(text) == []
    assert sorted(steps_of(text)) == sorted(step.key for step in plan.steps)
    assert ("secrets" in text) is (not plan.fork and any(step.step.secrets for step in plan.steps))
    keys = failing.draw(st.sets(st.sampled_from([step.key for step in plan.steps])))
    rechecks = recheck_yaml(plan, dict.fromkeys(keys, ("an id",)), DECLARED, branch=branch)
    assert sorted(steps_of(rechecks) if keys else rechecks) == sorted(map(recheck_key, keys))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=random_plans())
def test_any_plan_runs_again_as_approved_under_its_own_keys(plan):
    text = approved_yaml(plan, DECLARED)
    steps = steps_of(text)
    assert lint(text, secrets=not plan.fork, suffix=APPROVED_KEY_SUFFIX) == []
    assert set(steps) == {approved_key(step.key) for step in plan.steps}
    assert all(need in steps for step in steps.values() for need in step.get("depends_on", ()))
    for planned in plan.steps:
        step = steps[approved_key(planned.key)]
        assert step["command"][-1].startswith(f"hilgate job {planned.key} --approved ")
        assert step["artifact_paths"] == [f"results/jobs/{planned.key}/**/*"]


def test_recheck_of_nothing_of_a_fork_and_of_an_unknown_step():
    one = {"models-gfx942": ("a",)}
    assert recheck_yaml(agent_plan(), {}, DECLARED) == recheck_yaml(agent_plan(), {"models-gfx942": ()}, DECLARED) == ""
    assert "HF_TOKEN" in recheck_yaml(agent_plan(), one, DECLARED)
    assert "HF_TOKEN" not in recheck_yaml(agent_plan(fork=True), one, DECLARED)
    with pytest.raises(InvalidPipelineError, match="'gone' is not in the plan"):
        recheck_yaml(agent_plan(), {"gone": ("a",)}, DECLARED)


def test_long_keys_are_shortened_and_stay_distinct():
    long, longer = "k" * 95 + "-cpu", "k" * 96 + "-cpu"
    assert recheck_key("short-cpu") == "short-cpu-recheck"
    assert len({recheck_key(long), recheck_key(longer)}) == 2
    assert len(recheck_key(long)) == len(recheck_key(longer)) == 100


def test_verdict_of_a_complete_rerun_posts_the_required_context():
    (step,) = steps_of(required_yaml(DECLARED)).values()
    assert step["notify"] == [{"github_commit_status": {"context": "rocm/required"}, "if": POSTED_BY}]
    assert step["agents"] == {"queue": "amd-gate"}
