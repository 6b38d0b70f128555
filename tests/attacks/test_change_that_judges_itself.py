# SPDX-License-Identifier: Apache-2.0
"""Who: a branch, or a fork that an agent has let through. What: files that Python imports by itself, a hilgate of its
own, a looser list of what is protected, `PYTHON*` variables: planner, judge or a job would run the change's code.

Or it declares that its own red step is only reported, or moves it to a queue of which all is.

What must happen: on agents `hilgate` is the merge base's, started isolated. Nothing of the change runs; the plan
lists its protected changes; an honest change is planned by the same command. What counts at the merge base counts.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.forks import AREA, Project, project

NAMES = ("sitecustomize", "usercustomize", "yaml", "json", "hilgate", "pydantic", "conftest")
MINE = "import sys; sys.stdout.write('merge base: ' + ' '.join(sys.argv[1:]) + chr(10))\n"


def trap(change: Project) -> Path:
    """Files that leave a mark when any of them is executed; returns the mark."""
    mark = change.ours.parent / "executed"
    for folder in ("", "ci/", "src/"):
        for name in NAMES:
            if f"{folder}{name}" != "ci/hilgate":  # the package below; a module beside it would be refused
                change.write(f"{folder}{name}.py", f"open({str(mark)!r}, 'w')\n")
    change.write("ci/hilgate/__init__.py", f"open({str(mark)!r}, 'w')\n")
    change.write("ci/hilgate/__main__.py", f"open({str(mark)!r}, 'w')\n")
    change.write("ci/agent_host/trusted.py", f"open({str(mark)!r}, 'w')\n")
    change.write("ci/evil.pth", f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    change.write("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p evil'\n")
    return mark


def test_nothing_of_the_change_runs_and_looser_limits_are_shown(change: Project) -> None:
    mark = trap(change)
    change.write("src/limits.toml", "floor = 0.01\n")
    change.write("ci/protected.yaml", "rules:\n  - paths: [nothing]\n")
    change.commit()
    everywhere = os.pathsep.join(str(change.theirs / folder) for folder in ("ci", "src", "."))
    variables = {"PYTHONPATH": everywhere, "PYTHONSTARTUP": "sitecustomize.py", "HILGATE_BASE": "HEAD"}
    done = change.hilgate("plan", "--profile", "pr", "--write", "results/plan.json", **variables)
    assert done.returncode == 0, done.stderr
    plan = json.loads((change.theirs / "results/plan.json").read_text())
    reported = {one["path"] for one in plan["protected_changes"]}
    assert {
        "src/limits.toml",
        "ci/protected.yaml",
        "conftest.py",
        "pyproject.toml",
        "ci/evil.pth",
        "usercustomize.py",
    } <= reported
    judged = change.hilgate("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    assert judged.returncode == 4, "nothing ran, which is no pass"
    assert not mark.exists()


@pytest.mark.parametrize("words", [["plan"], ["judge"], ["pipeline", "--plan", "p.json"], ["job", "one-cpu"]])
def test_the_code_is_that_of_the_merge_base(tmp_path: Path, words: list[str]) -> None:
    files = dict.fromkeys(("ci/hilgate/__main__.py", "ci/agent_host/__main__.py", "ci/agent_host/trusted.py"), MINE)
    change = project(tmp_path, **files, **{"ci/project.yaml": "python_path: [src, ci]\n"})
    mark = trap(change)
    change.write("ci/project.yaml", "python_path: [src]\n")
    change.commit()
    done = change.hilgate(*words)
    assert done.returncode == 0, done.stderr
    root, *asked = re.fullmatch(r"merge base: (?:--root (\S+) )?(.*)\n", done.stdout).groups()
    assert asked[0].startswith(" ".join(words))
    assert words[0] == "job" or (Path(root) / "src/limits.toml").read_text() == "floor = 0.95\n"
    assert not mark.exists()


def test_pipeline_and_approvers_are_those_of_the_merge_base(tmp_path: Path) -> None:
    files = {f".buildkite/{name}.yml": f"ours: {name}\n" for name in ("pipeline", "rerun", "approve")}
    change = project(tmp_path, **files)
    for name in files:
        change.write(name, "theirs\n")
    change.commit()
    for words, env, name in (
        ((), {}, "pipeline"),
        ((), {"HILGATE_MODELS": "a"}, "rerun"),
        (("approve",), {}, "approve"),
    ):
        assert change.hilgate("flow", *words, **env).stdout == f"ours: {name}\n"
    assert change.hilgate("flow", HILGATE_FLOW="../../etc/passwd").returncode == 2
    assert change.hilgate("flow", HILGATE_FLOW="release").returncode == 5, "the merge base has none"


QUEUES = """\
devices: {cpu: {}}
queues:
  cpus: {device: cpu, gpus: 0, memory_gib: 8%s}
  new: {device: cpu, gpus: 0, memory_gib: 99, report_only: true}
"""
STEADY = AREA.replace("minutes: 5", "minutes: 5, report_only: true")


def planned(change: Project, profile: str = "pr") -> dict[str, object]:
    change.commit()
    done = change.hilgate("plan", "--profile", profile, "--write", "results/plan.json")
    assert done.returncode == 0, done.stderr
    return json.loads((change.theirs / "results/plan.json").read_text())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ci/areas/a.yaml", STEADY),
        ("ci/areas/a.yaml", AREA.replace("minutes: 5", "minutes: 5, agents: {queues: {cpu: new}}")),
        ("ci/agents.yaml", QUEUES % ", report_only: true"),
    ],
    ids=["the step", "another queue", "its queue"],
)
def test_a_step_that_counts_on_the_base_is_not_report_only(tmp_path: Path, name: str, text: str) -> None:
    change = project(tmp_path, **{"ci/agents.yaml": QUEUES % ""})
    change.write(name, text)
    plan = planned(change)
    assert name in {one["path"] for one in plan["protected_changes"]}, "a person sees it"
    assert [one["report_only"] for one in plan["steps"]] == [False]
    judged = change.hilgate("judge", "--plan", "results/plan.json", "--jobs", "results/jobs", "--results", "results")
    assert judged.returncode == 4, "it did not run, and that counts"


def test_a_change_can_make_a_step_count_but_not_report_only(tmp_path: Path) -> None:
    change = project(tmp_path, **{"ci/areas/a.yaml": STEADY})
    change.write("src/limits.toml", "floor = 0.96\n")
    assert [one["report_only"] for one in planned(change)["steps"]] == [True]
    change.write("ci/areas/a.yaml", AREA)
    assert [one["report_only"] for one in planned(change)["steps"]] == [False]
