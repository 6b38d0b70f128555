# SPDX-License-Identifier: Apache-2.0
"""Buildkite in simulated time: what is read from the pipeline's text, and what follows from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.simulate.buildkite import (
    LOST,
    NEVER,
    Build,
    Command,
    Host,
    JobEnd,
    JobState,
    Node,
    Retry,
    Upload,
    Wait,
    parse,
)

from hilgate.errors import DeclarationError

STEP = """
- key: {key}
  command: hilgate run {key} --plan results/plan.json --results results/jobs/{key}
  agents: {{queue: q}}
  timeout_in_minutes: 5
  artifact_paths: ["results/jobs/{key}/**/*"]
"""
RETRY = """
  retry:
    automatic:
    - {exit_status: -1, limit: 2}
    - {exit_status: 75, limit: 1}
    - {signal_reason: agent_stop, limit: 1}
"""


def steps(*parts):
    return parse("steps:" + "".join(parts))


def one(key="a"):
    return STEP.format(key=key)


def run(parsed, ends, hosts=2, skipped=()):
    """Run a pipeline whose attempts end as listed (key -> statuses or JobEnd, the last one repeated)."""
    done = []

    def perform(command, attempt, host, minute):
        done.append((command.key, attempt, host.name, minute))
        listed = ends.get(command.key, [0])
        end = listed[min(attempt, len(listed) - 1)]
        end = end if isinstance(end, JobEnd) else JobEnd(end, 1.0)
        build.uploads.append(Upload(command.key, attempt, command.folder, Path(f"{command.key}{attempt}"), minute))
        return end

    machines = {"q": [Host(f"h{number}") for number in range(hosts)]}
    build = Build([Node(step) for step in parsed], machines, perform, random.Random(1), frozenset(skipped))
    build.run()
    return build, done


def test_a_step_is_read_from_its_text():
    (command,) = steps(one(), RETRY, "  depends_on: [b, {step: c}]\n  soft_fail: true\n")
    assert command == Command(
        key="a",
        queue="q",
        depends_on=("b", "c"),
        allow_dependency_failure=False,
        timeout_minutes=5,
        retries=(Retry(-1, None, 2), Retry(75, None, 1), Retry(None, "agent_stop", 1)),
        soft_fail=True,
        runs="a",
        folder="a",
        uploads=True,
    )


@pytest.mark.parametrize(
    ("paths", "uploads"),
    [("results/jobs/a/**/*", True), ("results/jobs/**/*", True), ("results/jobs/b/**/*", False), ("logs/*", False)],
)
def test_only_what_artifact_paths_cover_is_uploaded(paths, uploads):
    (command,) = steps(one().replace("results/jobs/a/**/*", paths))
    assert command.uploads is uploads


def test_a_job_that_reruns_failing_tests_writes_a_folder_of_its_own():
    text = one().replace("hilgate run a", "hilgate job a --recheck")
    (command,) = steps(text.replace("--results results/jobs/a", "--results results/jobs/a.recheck"))
    assert command.runs == "a"
    assert command.rechecks


def test_a_step_of_an_unknown_kind_is_refused():
    with pytest.raises(DeclarationError, match="block"):
        parse("steps: [{block: are you sure}]")


@pytest.mark.parametrize("wait", ["- wait\n", "- wait: ~\n", "- {wait: ~, continue_on_failure: true}\n"])
def test_nothing_after_a_wait_starts_before_it(wait):
    build, done = run(steps(one("a"), one("b"), "\n", wait, one("c")), {"a": [JobEnd(0, 50.0)]})
    assert [entry[0] for entry in done][-1] == "c"
    assert done[-1][3] == 50.0
    assert build.state("c") is JobState.PASSED


def test_after_a_failure_only_a_wait_that_continues_lets_others_run():
    for wait, state in (("- wait\n", JobState.BROKEN), ("- {wait: ~, continue_on_failure: true}\n", JobState.PASSED)):
        build, _ = run(steps(one("a"), "\n", wait, one("c")), {"a": [1]})
        assert build.state("c") is state


def test_what_needs_a_failed_step_never_runs_unless_it_allows_that():
    build, _ = run(
        steps(one("a"), one("b"), "  depends_on: a\n", one("c"), "  depends_on: b\n  allow_dependency_failure: true\n"),
        {"a": [1]},
    )
    assert [build.state(key) for key in "abc"] == [JobState.FAILED, JobState.BROKEN, JobState.PASSED]


def test_a_skipped_step_satisfies_what_needs_it():
    build, done = run(steps(one("a"), one("b"), "  depends_on: a\n"), {}, skipped=["a"])
    assert build.state("a") is JobState.SKIPPED
    assert [entry[0] for entry in done] == ["b"]


@pytest.mark.parametrize(
    ("ends", "attempts", "state"),
    [
        ([LOST, 0], 2, JobState.PASSED),
        ([LOST, LOST, LOST, LOST], 3, JobState.FAILED),
        ([75, 0], 2, JobState.PASSED),
        ([75, 75], 2, JobState.FAILED),
        ([JobEnd(LOST, 1.0, signal_reason="agent_stop"), 0], 2, JobState.PASSED),
        ([1, 0], 1, JobState.FAILED),
        ([6, 0], 1, JobState.FAILED),
        ([JobEnd(LOST, 1.0, signal_reason="cancel", state=JobState.CANCELLED), 0], 1, JobState.CANCELLED),
    ],
)
def test_retries_are_those_of_the_text(ends, attempts, state):
    build, done = run(steps(one(), RETRY), {"a": ends})
    assert len(done) == attempts
    assert build.state("a") is state


def test_without_retry_rules_a_lost_agent_is_final():
    build, done = run(steps(one()), {"a": [LOST, 0]})
    assert len(done) == 1
    assert build.state("a") is JobState.FAILED


def test_artifacts_of_a_retried_attempt_and_later_ones_are_out_of_reach():
    build, _ = run(steps(one(), RETRY), {"a": [LOST, 0]})
    assert build.download(NEVER) == {"a": Path("a1")}
    assert build.download(0.0) == {}


def test_one_host_does_one_job_at_a_time():
    _, done = run(steps(one("a"), one("b")), {"a": [JobEnd(0, 5.0)], "b": [JobEnd(0, 5.0)]}, hosts=1)
    assert [entry[3] for entry in done] == [0.0, 5.0]


def test_a_queue_whose_agents_are_all_paused_ends_its_steps():
    build = Build([Node(step) for step in steps(one())], {"q": [Host("h", paused=True)]}, None, random.Random(1))
    build.run()
    assert build.state("a") is JobState.EXPIRED


def test_uploaded_steps_stand_right_after_the_step_that_uploads_them():
    uploaded = JobEnd(0, 1.0, inserted=steps(one("b")))
    _, done = run(steps(one("a"), "\n- wait\n", one("c")), {"a": [uploaded], "b": [JobEnd(0, 9.0)]})
    assert [(key, minute) for key, _, _, minute in done] == [("a", 0.0), ("b", 1.0), ("c", 10.0)]
    assert isinstance(steps("\n- wait\n")[0], Wait)
