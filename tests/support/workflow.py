# SPDX-License-Identifier: Apache-2.0
"""`.github/workflows/rerun.yml` as GitHub runs it for a comment: its condition, then its steps, with stand-ins on PATH.

`gh` and `curl` write down their calls and answer from files; what they print is what the services document.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from support.nodes import ROOT
from support.rest import build

if TYPE_CHECKING:
    from pathlib import Path

REPOSITORY, NUMBER, TOKEN = "acme/rocm", 7, "bkua_starts"
HEAD = "c" * 40
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/rerun.yml").read_text())
JOB = WORKFLOW["jobs"]["rerun"]

STAND_IN = """#!{python} -I
import json, os, pathlib, sys
here, words = pathlib.Path({here!r}), sys.argv[1:]
given = "" if sys.stdin.isatty() else sys.stdin.read()
with (here / "calls").open("a") as file:
    file.write(json.dumps(["{name}", words, given, os.environ.get("GH_TOKEN", "")]) + "\\n")
answers = json.loads((here / "answers").read_text())
for part, answer in answers:
    if part in " ".join(["{name}", *words]):
        sys.stdout.write(answer) if answer is not None else sys.exit("HTTP 500")
        break
"""


@dataclass
class Called:
    """A call of `gh` or `curl`."""

    program: str
    words: list[str]
    given: str
    token: str


@dataclass
class Forge:
    """What GitHub and Buildkite would answer."""

    folder: Path
    head: str = HEAD
    repository: str | None = REPOSITORY
    """Where the branch of the pull request is; None for a fork that was deleted."""
    builds: list[dict[str, Any]] = field(default_factory=lambda: [build(41)])
    down: str = ""
    """A part of the call that fails."""

    def comment(self, body: str, *, association: str = "MEMBER", pull_request: bool = True) -> tuple[int, list[Called]]:
        """Exit status of the workflow for a comment and what it called; nothing where its condition is not met."""
        if not condition(body, association, pull_request=pull_request):
            return 0, []
        pull = {"head": {"sha": self.head, "repo": self.repository and {"full_name": self.repository}}}
        answers = [
            (self.down or "\0", None),
            ("/contents/.github/rerun.py?ref=", (ROOT / ".github/rerun.py").read_text()),
            (f"gh api repos/{REPOSITORY}/pulls/{NUMBER}", json.dumps(pull)),
            ("--json", json.dumps(build(42))),
            (f"builds?commit={self.head}", json.dumps(self.builds)),
        ]
        (self.folder / "answers").write_text(json.dumps(answers))
        calls = self.folder / "calls"
        calls.write_text("")
        for name in ("gh", "curl"):
            program = self.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(STAND_IN.format(python=sys.executable, here=str(self.folder), name=name))
            program.chmod(0o755)
        (step,) = JOB["steps"]
        values = {
            "github.token": "ghs_answers",
            "github.event.comment.body": body,
            "github.event.issue.number": str(NUMBER),
            "secrets.BUILDKITE_API_TOKEN": TOKEN,
            "vars.BUILDKITE_ORGANIZATION": "acme",
            "vars.BUILDKITE_PIPELINE": "rocm",
            "vars.BUILDKITE_FORKS_PIPELINE": "rocm-forks",
        }
        env = {name: values[text.removeprefix("${{ ").removesuffix(" }}")] for name, text in step["env"].items()}
        env |= {"GITHUB_REPOSITORY": REPOSITORY, "GITHUB_SHA": "d" * 40}
        env["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=work, env=env, check=False
        )
        return done.returncode, [Called(*json.loads(line)) for line in calls.read_text().splitlines()]


def condition(body: str, association: str, *, pull_request: bool) -> bool:
    """Whether the job's `if` holds for a comment: its words as Python's."""
    text = " ".join(JOB["if"].split())
    text = re.sub(r"fromJSON\('(.*?)'\)", r"\1", text).replace("&&", "and")
    event = SimpleNamespace(
        issue=SimpleNamespace(pull_request={"url": "x"} if pull_request else None),
        comment=SimpleNamespace(body=body, author_association=association),
    )
    words = {
        "github": SimpleNamespace(event=event),
        "startsWith": str.startswith,
        "contains": list.__contains__,
    }
    return bool(eval(text, {"__builtins__": {}, **words}))


def started(calls: list[Called]) -> dict[str, Any] | None:
    """The body with which a build was asked for."""
    bodies = [call.words[call.words.index("--json") + 1] for call in calls if "--json" in call.words]
    assert len(bodies) <= 1
    return json.loads(bodies[0]) if bodies else None


def answers(calls: list[Called]) -> list[str]:
    """Texts of the comments that were made."""
    return [call.given for call in calls if call.words[:2] == ["pr", "comment"]]
