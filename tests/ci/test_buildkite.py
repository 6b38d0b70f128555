"""Pipelines: golden files for named changes, both copies of Buildkite's schema, and each guard seen to work."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import yaml
from buildkite_sdk.schema import CommandStep, CommandStepRetry
from pydantic import ValidationError

from hilgate.buildkite import InvalidPipelineError, lint, pipeline_yaml, schema_problems, sdk_schema
from hilgate.changes import Changes
from hilgate.declare import load
from hilgate.plan import assemble

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
DECLARED = load(REPOSITORY)
VENDORED = json.loads(
    resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/buildkite.json").read_text("utf-8")
)
NAMED_CHANGES = {
    "docs-only": ("README.md",),
    "gather-kernel": ("kernels/pagedkv/cache_gather.py",),
    "vllm-plugin": ("kernels/pagedkv/vllm_plugin/impl.py",),
    "unclaimed-file": ("pyproject.toml",),
}


def plan_of(*files, declared=DECLARED):
    return assemble(declared, Changes("c" * 40, dirty=False, base="main", files=files), None, profile="pr")


@pytest.mark.parametrize("name", NAMED_CHANGES)
def test_pipeline_of_a_named_change_is_the_golden_one(name):
    """After an intended change: HILGATE_WRITE_GOLDEN=1 pytest tests/ci/test_buildkite.py, then read the diff."""
    text = pipeline_yaml(plan_of(*NAMED_CHANGES[name]), DECLARED)
    path = GOLDEN / f"{name}.yml"
    if os.environ.get("HILGATE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} written; run again without HILGATE_WRITE_GOLDEN")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("schema", [VENDORED, sdk_schema()], ids=["check-jsonschema", "buildkite-sdk"])
@pytest.mark.parametrize("name", NAMED_CHANGES)
def test_pipeline_is_valid_by_both_copies_of_the_schema(name, schema):
    text = pipeline_yaml(plan_of(*NAMED_CHANGES[name]), DECLARED)
    assert schema_problems(text, schema) == []
    assert schema_problems(text.replace("timeout_in_minutes", "timeout_in_minuts", 1), schema) != []


def test_bootstrap_is_valid_and_runs_the_commands_that_exist():
    text = (REPOSITORY / ".buildkite" / "pipeline.yml").read_text(encoding="utf-8")
    assert schema_problems(text, VENDORED) == []
    (step,) = yaml.safe_load(text)["steps"]
    assert step["key"] == "plan"
    assert "--reject-parse-warnings --no-interpolation" in "".join(step["command"])
    assert "soft_fail" not in text
    script = "\n".join(step["command"]).replace("$$", "$")
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    assert "|| true" not in script


def steps_of(text):
    pipeline = yaml.safe_load(text)
    return {step["key"]: step for top in pipeline["steps"] for step in top.get("steps", [top])}


def test_every_planned_step_and_the_verdict_are_in_it():
    plan = plan_of("kernels/pagedkv/layout.py")
    steps = steps_of(pipeline_yaml(plan, DECLARED))
    assert set(steps) == {planned.key for planned in plan.steps} | {"verdict"}
    assert set(steps["verdict"]["depends_on"]) == {planned.key for planned in plan.steps}
    assert steps["verdict"]["allow_dependency_failure"] is True
    for planned in plan.steps:
        step = steps[planned.key]
        assert step["agents"] == {"queue": planned.queue}
        assert step["timeout_in_minutes"] * 60 - planned.timeout_minutes * 60 >= 60
        assert step.get("depends_on", []) == list(planned.depends_on)
        assert any(f"hilgate run {planned.key} " in line for line in step["command"])


def test_verdict_keeps_the_status_of_the_judge_and_posts_the_annotation(tmp_path):
    """The verdict's commands as Buildkite runs them, with stand-ins that record their calls."""
    for name, body in {"hilgate": "exit 6", "buildkite-agent": 'echo "$1" >> calls; [ "$1" != artifact ]'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "annotation.md").write_text("text")
    script = "\n".join(steps_of(pipeline_yaml(plan_of("README.md"), DECLARED))["verdict"]["command"][1:])
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, check=False, capture_output=True)
    assert done.returncode == 6
    assert (tmp_path / "calls").read_text().split() == ["artifact", "annotate"]


def test_misspelt_keys_are_refused_by_the_sdk_models():
    pipeline_yaml(plan_of("README.md"), DECLARED)
    for misspelt in ({"comand": "x"}, {"command": "x", "timeout_in_minuts": 3}):
        with pytest.raises(ValidationError):
            CommandStep(**misspelt)
    with pytest.raises(ValidationError):
        CommandStepRetry(automatic=[{"exit_statuss": 1}])


def one_step(**change):
    step = {"key": "a", "command": ["x"], "agents": {"queue": "q"}, "timeout_in_minutes": 1, **change}
    verdict = {
        "key": "verdict",
        "command": ["j"],
        "agents": {"queue": "q"},
        "timeout_in_minutes": 1,
        "depends_on": ["a"],
        "allow_dependency_failure": True,
    }
    return {"steps": [{key: value for key, value in step.items() if value is not None}, verdict]}


def test_a_sound_step_has_no_problems():
    assert lint(yaml.safe_dump(one_step())) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"key": None}, "has no key"),
        ({"key": "triton-3.6"}, "has no key that Buildkite takes"),
        ({"command": None}, "has no command"),
        ({"command": [" "]}, "has no command"),
        ({"agents": None}, "has no queue"),
        ({"timeout_in_minutes": None}, "has no timeout"),
        ({"soft_fail": True}, "has 'soft_fail'"),
        ({"if_changed": "x"}, "has 'if_changed'"),
        ({"skip": "later"}, "has 'skip'"),
        ({"depends_on": ["gone"]}, "depends on 'gone', which does not exist"),
        ({"depends_on": ["verdict"]}, "wait for each other: "),
        ({"label": "costs $5"}, "contains '$'"),
        ({"key": "verdict"}, "key 'verdict' is used twice"),
        ({"retry": {"automatic": [{"exit_status": 1}]}}, "which is not infrastructure"),
        ({"retry": {"automatic": [{"exit_status": "*"}]}}, "which is not infrastructure"),
        ({"retry": {"automatic": [{"exit_status": 1, "signal_reason": "agent_stop"}]}}, "which is not infrastructure"),
        ({"retry": {"automatic": [{"limit": 1}]}}, "which is not infrastructure"),
    ],
)
def test_unsound_step_is_found(change, expected):
    assert any(expected in problem for problem in lint(yaml.safe_dump(one_step(**change))))


def test_verdict_that_misses_a_step_is_found():
    pipeline = one_step()
    pipeline["steps"].insert(0, {**pipeline["steps"][0], "key": "b"})
    assert lint(yaml.safe_dump(pipeline)) == ["'verdict' does not wait for every step whatever becomes of it"]
    assert any("does not wait" in problem for problem in lint(yaml.safe_dump({"steps": one_step()["steps"][:1]})))


def test_more_steps_than_one_upload_may_hold():
    pipeline = {"steps": [{**one_step()["steps"][0], "key": f"s{number}"} for number in range(501)]}
    assert "501 steps, but one upload may hold 500" in lint(yaml.safe_dump(pipeline))


def test_gate_plan_is_no_pipeline():
    plan = plan_of("README.md")
    stray = plan.model_copy(update={"steps": (plan.steps[0].model_copy(update={"queue": None}),)})
    with pytest.raises(InvalidPipelineError, match="has no queue"):
        pipeline_yaml(stray, DECLARED)


def test_dollar_in_a_label_is_refused():
    plan = plan_of("README.md")
    priced = plan.model_copy(update={"steps": (plan.steps[0].model_copy(update={"label": "costs $HOME"}),)})
    with pytest.raises(InvalidPipelineError, match="may interpolate"):
        pipeline_yaml(priced, DECLARED)


def test_title_comes_from_the_area():
    renamed = replace(DECLARED, areas=tuple(area.model_copy(update={"title": "X"}) for area in DECLARED.areas))
    text = pipeline_yaml(plan_of("README.md"), renamed)
    assert [top["group"] for top in yaml.safe_load(text)["steps"] if "group" in top] == ["X"]


@pytest.mark.parametrize("command", ["run", "judge"])
def test_commands_of_the_steps_are_known_to_the_command_line(command):
    lines = [
        line
        for step in steps_of(pipeline_yaml(plan_of("pyproject.toml"), DECLARED)).values()
        for line in step["command"]
        if line.startswith(f"hilgate {command} ")
    ]
    options = {word for line in lines for word in line.split() if word.startswith("--")}
    assert options
    shown = subprocess.run(
        [sys.executable, "-m", "hilgate", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert shown.returncode == 0
    assert options <= set(shown.stdout.split())
