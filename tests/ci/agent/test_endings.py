# SPDX-License-Identifier: Apache-2.0
"""Three fast endings without a verdict take an agent out; answers, slow endings and what a fork brings do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from agent_host import endings, facts
from agent_host.endings import FAST_SECONDS, Endings

if TYPE_CHECKING:
    from pathlib import Path

    from support.nodes import FakeNode

FORK = {
    "BUILDKITE_REPO": "https://github.com/rocm/hilgate",
    "BUILDKITE_PULL_REQUEST": "7",
    "BUILDKITE_PULL_REQUEST_REPO": "https://github.com/somebody/hilgate",
}
OURS = {"BUILDKITE_PULL_REQUEST": "false"}


def after(*statuses: str, seconds: float = 1.0, inside: bool = False, **more: str) -> Endings:
    """What an agent remembers of jobs whose command ended so."""
    known = Endings()
    for number, status in enumerate(statuses):
        known.begin(f"j{number}", 1000.0 * number)
        env = {**OURS, "BUILDKITE_JOB_ID": f"j{number}", "BUILDKITE_COMMAND_EXIT_STATUS": status, **more}
        known.end(env, 1000.0 * number + seconds, inside=inside)
    return known


@pytest.mark.parametrize("status", ["5", "70", "75", "126", "127", "130", "137", "143", "255", "-1"])
def test_three_in_a_row_are_a_black_hole_and_two_are_not(status: str) -> None:
    assert after(status, status).black_hole == ""
    why = after(status, status, status).black_hole
    assert why.startswith("3 jobs in a row ended within 120 s without a verdict: job j0: command ended with")
    assert why.count(f"command ended with {status}") == 3


@pytest.mark.parametrize("status", ["0", "1", "2", "3", "4", "6"])
def test_an_answer_is_none_and_starts_the_count_again(status: str) -> None:
    assert after(status, status, status).row == 0
    assert after("75", "75", status, "75", "75").black_hole == ""


def test_slow_cancelled_and_inner_endings_do_not_count() -> None:
    assert after("75", "75", "75", seconds=FAST_SECONDS + 1).row == 0
    assert after("-1", "-1", "-1", BUILDKITE_JOB_CANCELLED="true").jobs == {"cancelled": 3}
    assert after("75", "75", "75", inside=True).jobs == {"answered": 3}


def test_what_a_fork_brings_does_not_count_and_what_the_host_says_of_it_does() -> None:
    assert after("5", "5", "137", **FORK).jobs == {"of a fork": 3}
    assert after("75", "75", "75", **FORK).black_hole


def test_a_job_that_no_later_hook_has_seen_counts_when_the_next_one_begins() -> None:
    known = Endings()
    for number in range(4):
        known.begin(f"j{number}", 10.0 * number)
    assert known.black_hole.count("was killed, or ended before any hook could run") == 3
    known = Endings()
    for number in range(4):
        known.begin(f"j{number}", 1000.0 * number)
    assert known.black_hole == "", "hours later: the machine was off"


def test_an_agent_that_its_preflight_took_out_is_not_taken_out_twice() -> None:
    known = Endings()
    for number in range(3):
        known.begin(f"j{number}", 10.0 * number)
        known.reported = True
        hook = {**OURS, "BUILDKITE_JOB_ID": f"j{number}", "BUILDKITE_LAST_HOOK_EXIT_STATUS": "75"}
        known.end(hook, 10.0 * number + 1)
    assert (known.row, known.jobs) == (0, {"without a verdict": 3})


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
    assert endings.status_of(env) == found


def test_what_ran_inside_is_noted_for_its_own_job_alone(node: FakeNode) -> None:
    node.env |= {"BUILDKITE_COMMAND_EXIT_STATUS": "75"}
    endings.note_inside(node.env)
    for job, kind in ((node.env["BUILDKITE_JOB_ID"], "answered"), ("another", "without a verdict")):
        node.env["BUILDKITE_JOB_ID"] = job
        endings.save(node.env, Endings(job=job))
        endings.ended(node.env)
        assert endings.load(node.env).jobs == {kind: 1}


DAMAGE = [
    "",
    "{",
    "[]",
    "null",
    '{"job": 1}',
    json.dumps({**vars(Endings()), "why": [1]}),
    json.dumps({**vars(Endings()), "row": "3"}),
    json.dumps({**vars(Endings()), "jobs": {"a": "b"}}),
    json.dumps({**vars(Endings()), "jobs": ["a"]}),
    json.dumps({**vars(Endings()), "why": "a"}),
]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_note_is_an_empty_one_and_no_crash(text: str, node: FakeNode) -> None:
    endings.save(node.env, Endings(row=2, why=["a", "b"]))
    assert endings.load(node.env).row == 2
    endings.path(node.env).write_text(text)
    assert endings.load(node.env) == Endings()


def test_each_agent_of_a_machine_counts_for_itself(node: FakeNode) -> None:
    endings.save(node.env, Endings(row=2))
    assert endings.load({**node.env, "BUILDKITE_AGENT_NAME": "another"}).row == 0


def admit(node: FakeNode, **more: str) -> int:
    env = {name: value for name, value in node.env.items() if not name.startswith("BUILDKITE_")}
    job = {name: value for name, value in node.env.items() if name.startswith("BUILDKITE_")}
    (node.folder / "job.json").write_text(json.dumps(job | {"HILGATE_STATE": "/not/ours", "LD_PRELOAD": "x"}))
    facts_of_hook = {
        "BUILDKITE_JOB_ID": node.env["BUILDKITE_JOB_ID"],
        "BUILDKITE_ENV_JSON_FILE": str(node.folder / "job.json"),
    }
    return endings.admit({**env, **facts_of_hook, "HILGATE_MIN_ROOM_MIB": "0", **more}, node.temporary)


def test_an_agent_without_room_or_memory_of_its_jobs_takes_none(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admit(node) == 0
    assert endings.load(node.env).job == node.env["BUILDKITE_JOB_ID"]
    assert node.agent_calls() == []
    assert admit(node, HILGATE_MIN_ROOM_MIB="999999999") == 75
    (pause, reported) = node.agent_calls()
    assert "MiB free for the job's own files in" in pause
    assert reported.startswith("annotate --style warning")
    (node.folder / "a-file").touch()
    assert admit(node, HILGATE_STATE=str(node.folder / "a-file/state")) == 75
    assert "what this agent remembers cannot be written: Not a directory" in capsys.readouterr().out


def test_after_a_pause_one_more_such_ending_is_enough(node: FakeNode) -> None:
    endings.save(node.env, Endings(row=3, why=["a", "b", "c"]))
    assert admit(node) == 75
    assert "3 jobs in a row" in node.agent_calls()[0]
    assert "--timeout-in-minutes 60" in node.agent_calls()[0]
    assert endings.load(node.env).row == 2
    assert admit(node) == 0, "it was resumed: it may try one job"
    node.env["BUILDKITE_LAST_HOOK_EXIT_STATUS"] = "75"
    assert endings.ended(node.env) == 0
    assert "3 jobs in a row" in node.agent_calls()[2]


def test_the_text_file_is_prometheus_text_whatever_a_problem_says(tmp_path: Path) -> None:
    known = Endings(unfit=['GPU "2"\\ has\nfeed', "second"], jobs={"answered": 2}, retries=1, row=1)
    env = {"BUILDKITE_AGENT_NAME": "host-1", facts.FOLDER: str(tmp_path)}
    endings.write_agent(env, known, "amd-cpu")
    (path,) = tmp_path.iterdir()
    assert path.name == "hilgate-host-1.prom"
    lines = path.read_text().splitlines()
    assert 'hilgate_node_unfit_info{agent="host-1",queue="amd-cpu",why="GPU \\"2\\"\\\\ has\\\\nfeed"} 1' in lines
    assert 'hilgate_node_fit{agent="host-1",queue="amd-cpu"} 0' in lines
    assert all(line.startswith(("# HELP hilgate_", "# TYPE hilgate_", "hilgate_")) for line in lines)
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert path.stat().st_mode & 0o044 == 0o044, "the exporter is another user"


def test_a_text_file_that_cannot_be_written_costs_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    endings.write_agent({facts.FOLDER: str(tmp_path / "file"), "BUILDKITE_AGENT_NAME": "a"}, Endings(), "q")
    assert "cannot be written" in capsys.readouterr().err
    endings.write_agent({}, Endings(), "q")
