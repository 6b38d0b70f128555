"""Steps that a build uploads later: reruns of failing checks on other nodes, and the verdict of a complete rerun."""

import pytest
from support.pipelines import DECLARED, steps_of, toys

from hilgate.buildkite.steps import InvalidPipelineError, recheck_key, recheck_yaml, required_yaml


def test_recheck_goes_to_the_same_queue_under_another_key_and_folder():
    step = steps_of(recheck_yaml(toys(), {"models-gfx942": ("test_a[bf16]",)}))["models-gfx942-recheck"]
    assert step["agents"] == {"queue": "amd_mi300_1"}
    assert step["artifact_paths"] == ["results/jobs/models-gfx942.recheck/**/*"]
    assert step["command"][-1].split()[3:] == [
        "models-gfx942", "--recheck", "--plan", "results/plan.json", "--results", "results/jobs/models-gfx942.recheck",
    ]  # fmt: skip
    assert {"exit_status": 75, "limit": 3} in step["retry"]["automatic"]
    assert "secrets" in step
    assert "depends_on" not in step


def test_nothing_to_recheck_is_no_pipeline():
    assert recheck_yaml(toys(), {}) == ""
    assert recheck_yaml(toys(), {"models-gfx942": ()}) == ""


def test_recheck_of_a_fork_has_no_secrets():
    assert "HF_TOKEN" not in recheck_yaml(toys(fork=True), {"models-gfx942": ("a",)})


def test_recheck_of_an_unknown_step_is_refused():
    with pytest.raises(InvalidPipelineError, match="'gone' is not in the plan"):
        recheck_yaml(toys(), {"gone": ("a",)})


def test_long_keys_are_shortened_and_stay_distinct():
    long, longer = "k" * 95 + "-cpu", "k" * 96 + "-cpu"
    assert recheck_key("short-cpu") == "short-cpu-recheck"
    assert len({recheck_key(long), recheck_key(longer)}) == 2
    assert len(recheck_key(long)) == len(recheck_key(longer)) == 100


def test_verdict_of_a_complete_rerun_posts_the_required_context():
    (step,) = steps_of(required_yaml(DECLARED)).values()
    assert step["notify"] == [{"github_commit_status": {"context": "rocm/required"}}]
    assert step["agents"]["queue"] == "amd-cpu"
