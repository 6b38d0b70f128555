# SPDX-License-Identifier: Apache-2.0
"""Who: a job that can upload artifacts. What: records, health files or reruns of another job, which Buildkite gives to
whoever asks for the newest of that name; and links among its results, through which an agent would upload files of its
host.

What must happen: each folder is downloaded from its own step, so forged files do not arrive, however often they were
uploaded; a link is left behind, of a container and of a step on the host (tests/ci/agent/test_job.py, which also keeps
a step from writing what the hooks saw). Records of another step, plan, commit or image, in whatever file, are damage
(tests/ci/run/test_results.py). Honest results arrive. However long it takes to download them, the judge
has its time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from agent_host import collect, fetch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STORE = """#!{python}
import pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["artifact", "download"]
step = words[words.index("--step") + 1] if "--step" in words else None
folder, target = words[2].removesuffix("/**/*"), pathlib.Path(words[3])
uploads = [
    ("evil-cpu", "results/jobs/one-cpu/results.jsonl", "forged"),
    ("one-cpu", "results/jobs/one-cpu/results.jsonl", "honest"),
    ("one-cpu", "results/jobs/one-cpu/health-after.json", "honest"),
    *[("evil-cpu", "results/jobs/" + name, "forged") for name in (
        "one-cpu/results.jsonl", "one-cpu/results.jsonl", "one-cpu/health-after.json", "one-cpu/health-before.json",
        "one-cpu.recheck/results.jsonl", "two-cpu/results.jsonl", "image-rocm-cpu/results.jsonl",
        "four-cpu/results.jsonl")],
    ("three-cpu", "results/jobs/four-cpu/results.jsonl", "honest"),
    ("four-cpu", "results/jobs/four-cpu/results.jsonl", "forged"),
]
found = {name: text for key, name, text in uploads if name.startswith(folder + "/") and step in (None, key)}
if not found:
    sys.exit("fatal: Failed to download artifacts: No artifacts found for downloading")
for name, text in found.items():
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
"""


def test_results_come_from_their_own_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/buildkite-agent"
    program.write_text(STORE.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    steps = [{"step": {"key": key}, "device": "cpu"} for key in ("one", "two", "evil")]
    # Of two steps that share a job the first gives it its name, and no other job may speak for the second.
    steps += [{"step": {"key": key}, "device": "cpu", "job": "three-cpu"} for key in ("three", "four")]
    (tmp_path / "plan.json").write_text(json.dumps({"steps": steps}))
    assert fetch.fetch(tmp_path / "plan.json", tmp_path) == []
    found = {
        str(path.relative_to(tmp_path / "results/jobs")): path.read_text() for path in tmp_path.glob("results/jobs/*/*")
    }
    assert found == dict.fromkeys(
        ["one-cpu/results.jsonl", "one-cpu/health-after.json", "four-cpu/results.jsonl"], "honest"
    )


def test_jobs_whose_files_take_long_leave_the_judge_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/buildkite-agent"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(fetch, "ALL_SECONDS", 2.0)
    steps = [{"step": {"key": f"x{number}"}, "device": "cpu"} for number in range(20)]
    (tmp_path / "plan.json").write_text(json.dumps({"steps": steps}))
    began = time.monotonic()
    problems = fetch.fetch(tmp_path / "plan.json", tmp_path)
    assert time.monotonic() - began < 50
    assert len(problems) == 40
    assert problems[-1] == "results/jobs/x19-cpu.recheck: no time was left: all jobs together have 2 s"


def test_a_link_and_a_second_name_of_a_file_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/results.jsonl").write_text("honest")
    (tmp_path / "made/log.txt").symlink_to("/etc/passwd")
    (tmp_path / "made/more").symlink_to("/etc")
    (tmp_path / "secret").write_text("token")
    (tmp_path / "made/hard").hardlink_to(tmp_path / "secret")
    refused = collect.collect(tmp_path / "made", tmp_path / "uploaded")
    assert sorted(refused) == ["hard: a second name of another file", "log.txt: a link", "more: a link"]
    assert [path.name for path in (tmp_path / "uploaded").iterdir()] == ["results.jsonl"]
