# SPDX-License-Identifier: Apache-2.0
"""A damaged or hostile declaration is one clear error on a host, never a traceback and never a guess."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_host import clone
from hilgate.errors import DeclarationError

CI = Path(clone.__file__).parents[1]
LEVELS = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 12))
BAD = {
    "aliases": ("b0: &b0 [x, x, x, x, x, x, x, x, x]\n" + LEVELS, "has an alias, [*]b0"),
    "a loop": ("a: &a [*a]\n", "has an alias, [*]a"),
    "depth": ("a: " + "[" * 20000 + "]" * 20000 + "\n", "more than 10 levels"),
    "size": ("# " + "x" * clone.MOST_CHARACTERS, "more than 256 KiB"),
    "cut off": ("queues: {amd-cpu: {device: cpu", "is not YAML"),
    "a tag that makes objects": ("queues: !!python/object/apply:os.system ['touch x']\n", "is not YAML"),
    "a date that is none": ("queues: 2026-13-45\n", "is not YAML"),
    "a control character": ("queues: \x07\n", "is not YAML"),
    "a key that is a list": ("? [a]\n: b\n", "is not YAML"),
    "a list": ("- a\n", "is not a mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "is not YAML"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", [clone.queues, clone.project], ids=["agents.yaml", "project.yaml"])
@pytest.mark.parametrize("bad", BAD)
def test_a_file_that_is_damaged_or_a_bomb_is_refused(bad, reader):
    text, expected = BAD[bad]
    with pytest.raises(DeclarationError, match=expected) as refused:
        reader(text)
    assert refused.value.where.startswith("ci/")
    assert refused.value.remedy


@pytest.mark.parametrize(
    "queue",
    [
        "amd-cpu",
        "amd-cpu: {device: cpu, gpus: 0}",
        "amd-cpu: {device: cpu, gpus: yes, memory_gib: 64}",
        "amd-cpu: {device: cpu, gpus: '0', memory_gib: 64}",
        "amd-cpu: {device: cpu, gpus: -1, memory_gib: 64}",
        "amd-cpu: {device: 7, gpus: 0, memory_gib: 64}",
        "amd-cpu: {device: cpu, gpus: 0, memory_gib: 64, image: [x]}",
        "7: {device: cpu, gpus: 0, memory_gib: 64}",
    ],
)
def test_a_queue_that_promises_nothing_readable_is_refused(queue):
    with pytest.raises(DeclarationError, match="queue"):
        clone.queues(f"queues:\n  {queue}\n")


@pytest.mark.parametrize("text", ["forks_may_change: src/", "python_path: [1]", "selfcheck: [a]", "selfcheck: 7"])
def test_a_project_whose_facts_have_another_type_is_refused(text):
    with pytest.raises(DeclarationError, match="is not text, or not a list of it"):
        clone.project(text)


def test_no_file_and_an_empty_one_declare_nothing(tmp_path):
    assert clone.project(clone.read(tmp_path, "ci/project.yaml")) == clone.Project() == clone.project("# nothing\n")
    assert clone.queues("") == {}


def test_a_host_without_yaml_says_so_and_still_cleans_up(tmp_path):
    # -S: a Python without its packages, as of a host where nothing was installed.
    host = [sys.executable, "-I", "-S", str(CI / "agent_host/__main__.py")]
    env = {"PATH": "/usr/bin:/bin", "HILGATE_STATE": str(tmp_path), "TMPDIR": str(tmp_path)}
    env |= {"BUILDKITE_AGENT_META_DATA_QUEUE": "amd-cpu", "BUILDKITE_JOB_ID": "job-of-nobody"}
    asked, cleaned = (
        subprocess.run([*host, *words], check=False, env=env, cwd=tmp_path, capture_output=True, text=True)
        for words in (("hooks", "preflight"), ("host", "cleanup"))
    )
    assert (asked.returncode, asked.stderr.splitlines()[0]) == (5, "error: this host's Python has no PyYAML")
    assert "python3-yaml" in asked.stderr
    assert (cleaned.returncode, cleaned.stderr) == (0, "")
