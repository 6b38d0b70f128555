# SPDX-License-Identifier: Apache-2.0
"""Three fast endings without a verdict take an agent out; answers, slow endings and what a fork brings do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from agent_host import hooks, host, pause

if TYPE_CHECKING:
    from pathlib import Path

    from support.nodes import FakeNode

FORK = {
    "BUILDKITE_REPO": "https://github.com/rocm/hilgate",
    "BUILDKITE_PULL_REQUEST": "7",
    "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/somebody/hilgate",
}
OURS = {"BUILDKITE_PULL_REQUEST": "false"}


def after(folder: Path, *statuses: str, seconds: float = 1.0, inside: bool = False, **more: str) -> list[str]:
    """Why an agent must go out, after each of its jobs whose command ended so; empty where it may stay."""
    found = []
    for number, status in enumerate(statuses):
        job = {"HILGATE_STATE": str(folder), "BUILDKITE_JOB_ID": f"j{number}", **more}
        assert pause.begins(job, 1000.0 * number) == ""
        if inside:
            pause.note_inside(job)
        env = {**OURS, **job, "BUILDKITE_COMMAND_EXIT_STATUS": status}
        found.append(pause.ends(env, 1000.0 * number + seconds))
    return found


@pytest.mark.parametrize("status", ["5", "70", "75", "126", "127", "130", "137", "143", "255", "-1"])
def test_three_in_a_row_take_the_agent_out_and_two_do_not(tmp_path: Path, status: str) -> None:
    first, second, third = after(tmp_path, status, status, status)
    assert (first, second) == ("", "")
    assert third.startswith("3 jobs in a row ended within 120 s without a verdict: job j0: command ended with")
    assert third.count(f"command ended with {status}") == 3


@pytest.mark.parametrize("status", ["0", "1", "2", "3", "4", "6"])
def test_an_answer_starts_the_count_again(tmp_path: Path, status: str) -> None:
    assert not any(after(tmp_path, "75", "75", status, "75", "75"))


def test_slow_cancelled_and_inner_endings_do_not_count(tmp_path: Path) -> None:
    sick = ("75", "75", "75", "75")
    assert not any(after(tmp_path / "slow", *sick, seconds=pause.FAST_SECONDS + 1))
    assert not any(after(tmp_path / "cancelled", *sick, BUILDKITE_JOB_CANCELLED="true"))
    assert not any(after(tmp_path / "inside", *sick, inside=True)), "what a container says is the change's"


def test_of_a_fork_only_what_this_host_says_itself_counts(tmp_path: Path) -> None:
    assert not any(after(tmp_path / "fork", "5", "5", "137", "5", **FORK))
    assert after(tmp_path / "host", "75", "75", "75", **FORK)[2]


def test_a_note_of_another_job_speaks_for_none(tmp_path: Path) -> None:
    env = {"HILGATE_STATE": str(tmp_path), "BUILDKITE_JOB_ID": "of before"}
    pause.note_inside(env)
    assert after(tmp_path, "75", "75", "75")[2]
    assert pause.ends({**env, **OURS}, 0.0) == "", "nor is the end of a job noted that did not begin here"


@pytest.mark.parametrize(("apart", "counts"), [(10.0, True), (1000.0, False)])
def test_a_job_no_later_hook_saw_counts_when_the_next_begins(tmp_path: Path, apart: float, *, counts: bool) -> None:
    env = {"HILGATE_STATE": str(tmp_path)}
    found = [pause.begins({**env, "BUILDKITE_JOB_ID": f"j{number}"}, apart * number) for number in range(4)]
    assert found[:3] == ["", "", ""]
    assert (found[3].count("was killed, or ended before any hook could run") == 3) is counts


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"BUILDKITE_COMMAND_EXIT_STATUS": "0", "BUILDKITE_LAST_HOOK_EXIT_STATUS": "75"}, (0, "command")),
        ({"BUILDKITE_LAST_HOOK_EXIT_STATUS": "5"}, (5, "hook")),
        ({"BUILDKITE_LAST_HOOK_EXIT_STATUS": "0"}, (-1, "checkout")),
        ({"BUILDKITE_COMMAND_EXIT_STATUS": "what"}, (-1, "checkout")),
        ({}, (-1, "checkout")),
    ],
)
def test_what_ended_a_job(env: dict[str, str], found: tuple[int, str]) -> None:
    assert pause._ended_with(env) == found


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"abc"', "7", '["j", 1.0, "a"]', '[1, 1.0, ["a", "a"]]', '["j", "1", ["a", "a"]]']
)
def test_a_damaged_note_is_an_empty_one_and_no_crash(tmp_path: Path, text: str) -> None:
    assert not any(after(tmp_path, "75", "75"))
    host.state_file({"HILGATE_STATE": str(tmp_path)}, "endings").write_text(text)
    assert not any(after(tmp_path, "75", "75"))


def test_each_agent_of_a_machine_counts_for_itself(tmp_path: Path) -> None:
    for name in ("a-1", "a-2"):
        assert not any(after(tmp_path, "75", "75", BUILDKITE_AGENT_NAME=name))
    assert after(tmp_path, "75", BUILDKITE_AGENT_NAME="a-1") != [""]


def admit(node: FakeNode, **more: str) -> int:
    env = {name: value for name, value in node.env.items() if not name.startswith("BUILDKITE_")}
    job = {name: value for name, value in node.env.items() if name.startswith("BUILDKITE_")}
    (node.folder / "job.json").write_text(json.dumps(job | {"HILGATE_STATE": "/not/ours", "LD_PRELOAD": "x"}))
    facts_of_hook = {
        "BUILDKITE_JOB_ID": node.env["BUILDKITE_JOB_ID"],
        "BUILDKITE_ENV_JSON_FILE": str(node.folder / "job.json"),
    }
    return hooks.admit({**env, **facts_of_hook, "HILGATE_MIN_ROOM_MIB": "0", **more}, node.temporary)


def test_an_agent_without_room_or_memory_of_its_jobs_takes_none(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admit(node) == 0
    assert node.env["BUILDKITE_JOB_ID"] in host.state_file(node.env, "endings").read_text()
    assert node.agent_calls() == []
    assert admit(node, HILGATE_MIN_ROOM_MIB="999999999") == 75
    (paused, reported) = node.agent_calls()
    assert "MiB free for the job's own files in" in paused
    assert reported.startswith("annotate --style warning")
    (node.folder / "a-file").touch()
    assert admit(node, HILGATE_STATE=str(node.folder / "a-file/state")) == 75
    assert "what this agent remembers cannot be written: Not a directory" in capsys.readouterr().out


def test_after_a_pause_one_more_such_ending_is_enough(node: FakeNode) -> None:
    ended = {"BUILDKITE_LAST_HOOK_EXIT_STATUS": "75"}
    for number in range(3):
        assert node.agent_calls() == []
        node.env["BUILDKITE_JOB_ID"] = f"j{number}"
        assert (admit(node), hooks.ended(node.env | ended)) == (0, 0)
    paused, reported = node.agent_calls()
    assert paused.startswith("pause --note 3 jobs in a row ended within 120 s without a verdict: job j0: hook ended")
    assert paused.endswith("--timeout-in-minutes 60")
    assert reported.startswith("annotate")
    node.env["BUILDKITE_JOB_ID"] = "j3"
    assert admit(node) == 0, "it was resumed: it may try one job"
    hooks.ended(node.env | ended)
    assert node.agent_calls()[2].startswith("pause --note 3 jobs in a row")


def test_killed_jobs_take_the_agent_out_before_the_next_begins(node: FakeNode) -> None:
    """The job ends as on a full disk: the agent cannot write the script of a hook, and the job is a 1 in no time."""
    for number, status in enumerate([0, 0, 0, 75]):
        node.env["BUILDKITE_JOB_ID"] = f"j{number}"
        assert admit(node) == status
    assert "was killed, or ended before any hook could run" in node.agent_calls()[0]


def test_an_agent_out_by_preflight_is_not_taken_out_twice(node: FakeNode) -> None:
    node.program("amd-smi", "exit 1")
    for number in range(3):
        node.env["BUILDKITE_JOB_ID"] = f"j{number}"
        assert (admit(node), node.preflight()) == (0, 75)
        hooks.ended(node.env | {"BUILDKITE_LAST_HOOK_EXIT_STATUS": "75"})
    assert [call.split()[0] for call in node.agent_calls()] == ["pause", "annotate"] * 3
    assert not any("in a row" in call for call in node.agent_calls())
