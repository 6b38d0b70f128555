# SPDX-License-Identifier: Apache-2.0
"""update.sh and set-up.sh of a host, and the pages about hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.nodes import ROOT
from support.plans import git
from support.shown import not_printed


class Clone:
    """A host's clone of a repository, with programs that note what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.clone, self.bin, self.asked = (folder / name for name in ("ours", "clone", "bin", "asked"))
        (self.ours / "ci/agent").mkdir(parents=True)
        shutil.copy(ROOT / "ci/agent/update.sh", self.ours / "ci/agent")
        (self.ours / "requirements").mkdir()
        git(self.ours, "init", "-q", "-b", "main")
        self.first = self.commit("requirements/hilgate.txt", "1")
        subprocess.run(["git", "clone", "-q", str(self.ours), str(self.clone)], check=True)
        self.bin.mkdir()
        for name in ("make", "systemctl"):
            self.program(name, "exit 0")

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.asked}\n{body}\n')
        (self.bin / name).chmod(0o755)

    def commit(self, name: str, text: str) -> str:
        (self.ours / name).write_text(text)
        git(self.ours, "add", "-A")
        git(self.ours, "commit", "-qm", "more")
        return git(self.ours, "rev-parse", "HEAD")

    def update(self, *words: str) -> tuple[int, list[str], str]:
        """Status, what was asked of make and systemctl, and the commit that is there then."""
        self.asked.write_text("")
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run([self.clone / "ci/agent/update.sh", *words], env=env, capture_output=True, check=False)
        return done.returncode, self.asked.read_text().splitlines(), git(self.clone, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


RESTART = ["systemctl daemon-reload", "systemctl restart buildkite-agent@*"]


def test_a_host_without_an_environment_is_updated_and_goes_back(clone: Clone) -> None:
    second = clone.commit("requirements/hilgate.txt", "2")
    assert clone.update() == (0, RESTART, second)
    assert clone.update(clone.first) == (0, RESTART, clone.first)
    assert clone.update() == (0, RESTART, second)


def test_an_environment_is_remade_only_where_its_sources_changed(clone: Clone) -> None:
    (clone.clone / ".venv").mkdir()
    second = clone.commit("other", "2")
    assert clone.update() == (0, RESTART, second)
    third = clone.commit("requirements/hilgate.txt", "3")
    assert clone.update() == (0, [f"make -C {clone.clone} setup", *RESTART], third)


def test_a_host_keeps_its_environment_where_it_cannot_be_remade(clone: Clone) -> None:
    (clone.clone / ".venv").mkdir()
    clone.program("make", "exit 2")
    clone.commit("requirements/hilgate.txt", "2")
    assert clone.update() == (1, [f"make -C {clone.clone} setup"] * 2, clone.first)


PAGE = (ROOT / "docs/how-to/set-up-agents.md").read_text()
LAST = "systemctl enable --now hilgate-reap.timer buildkite-agent@{}"


def set_up(*answers: str) -> subprocess.CompletedProcess[str]:
    # A host has python3-yaml; of this machine only this Python has it for certain.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script, env = ROOT / "ci/agent/set-up.sh", os.environ | {"BUILDKITE_AGENT_TOKEN": "secret", "PATH": path}
    typed = "".join(f"{answer}\n" for answer in answers)
    return subprocess.run([script, "--dry-run"], input=typed, env=env, capture_output=True, text=True, check=False)


def test_the_page_shows_what_the_script_asks_and_does() -> None:
    block = PAGE.partition("```text\n")[2].partition("```")[0].replace("/opt/hilgate", str(ROOT))
    asked = [re.fullmatch(r"(.+ \[.*\]:) ?(.*)", line) for line in block.splitlines()]
    done = set_up(*(found[2] for found in asked if found))
    assert done.returncode == 0, done.stderr
    lines = zip(block.splitlines(), asked, strict=True)
    assert not_printed(tuple(found[1] if found else line for line, found in lines), done.stdout) == ""


@pytest.mark.parametrize(
    ("queue", "answers", "command"),
    [
        ("amd_mi355_1", ["", ""], LAST.format("amd_mi355_1")),
        ("amd-cpu", ["", ""], 'install -m 600 /dev/stdin /etc/buildkite-agent/token <<< "$TOKEN"'),
        ("amd-gate", ["", ""], f"make -C {ROOT} setup"),
        ("amd-image", [""], "install -d /etc/systemd/system/buildkite-agent@amd-image.service.d"),
        (
            "amd-release",
            ["", "/keys/release"],
            "echo 'HILGATE_RELEASE_KEY=/keys/release' >> /etc/buildkite-agent/host.env",
        ),
    ],
)
def test_each_kind_of_host_gets_what_it_needs(queue: str, answers: list[str], command: str) -> None:
    done = set_up("", queue, *answers)
    assert command in done.stdout, done.stderr
    assert "secret" not in done.stdout
    assert "&&" not in done.stdout, "bash -e goes on after a failure to the left of it"


@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        (("", "amd_mi999_1"), 3, "no queue amd_mi999_1"),
        (("/nowhere", "amd-cpu"), 5, "cannot read the queues of /nowhere"),
        (("", "amd-cpu", "a'; rm -r b"), 2, "a quote, backslash or dollar"),
        (("",), 2, "no answer to: queue"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(answers: tuple[str, ...], status: int, words: str) -> None:
    done = set_up(*answers)
    assert done.returncode == status
    assert words in done.stderr


def test_each_runbook_is_numbered_and_short() -> None:
    text = (ROOT / "docs/how-to/answer-an-alarm.md").read_text()
    for book in text.split("\n## ")[1:]:
        numbers = re.findall(r"^(\d+)\. ", book, re.MULTILINE)
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)], book[:40]
        assert 5 < len(numbers) <= 10, book[:40]
    assert text.count("\n## ") == 5
