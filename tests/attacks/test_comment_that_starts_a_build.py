# SPDX-License-Identifier: Apache-2.0
"""Who: a stranger, or a member whose comment is wrong. What: `/hilgate run` in a comment on a pull request, with code
in it, with the commit of yesterday, or of somebody who has no part in the project.

What must happen: models run again for somebody of the project, at the head that the comment names; everything else
starts nothing, executes nothing, and, where a command was meant, is answered with the line to copy.

`.github/workflows/rerun.yml` is run as GitHub runs it: its condition, then its steps, with stand-ins for `gh` and
`curl` that write down their calls and answer from files; what they print is what the services document.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support.flow import BRANCH, Build, Machine
from support.nodes import ROOT
from support.rest import build

from hilgate.buildkite import api
from hilgate.buildkite.api import RemoteBuild

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


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def test_a_command_starts_what_hilgate_rerun_would_start(forge: Forge) -> None:
    status, calls = forge.comment(f"/hilgate run {HEAD} jamba step:units\r\n")
    assert status == 0
    names = ["jamba", "step:units"]
    assert started(calls) == api.request(RemoteBuild.model_validate(build(41)), names, profile="pr")
    (said,) = answers(calls)
    assert said == f"Build 42 of {HEAD} was started: {build(42)['web_url']}\n"
    (listed, asked) = [call for call in calls if call.program == "curl"]
    assert (
        listed.words[-1]
        == f"https://api.buildkite.com/v2/organizations/acme/pipelines/rocm/builds?commit={HEAD}&per_page=100"
    )
    assert asked.words[-1] == "https://api.buildkite.com/v2/organizations/acme/pipelines/rocm/builds"
    for call in (listed, asked):
        assert call.given == f"Authorization: Bearer {TOKEN}\n"
        assert TOKEN not in " ".join(call.words), "a list of processes shows arguments"


COPY = f"/hilgate run {HEAD} MODEL..."
WRONG = {
    "no commit": "/hilgate run jamba",
    "nothing": "/hilgate",
    "another word": f"/hilgate retry {HEAD}",
    "short commit": f"/hilgate run {HEAD[:12]} jamba",
    "capital commit": f"/hilgate run {HEAD.upper()} jamba",
    "commit of yesterday": f"/hilgate run {'a' * 40} jamba",
    "branch instead of a commit": "/hilgate run main jamba",
    "no model": f"/hilgate run {HEAD}",
    "two lines": f"/hilgate run {HEAD} jamba\n/hilgate run {HEAD} other",
    "line before": f"/hilgate\nrun {HEAD} jamba",
    "two spaces": f"/hilgate run {HEAD}  jamba",
    "tab": f"/hilgate run {HEAD}\tjamba",
    "too many": f"/hilgate run {HEAD} " + " ".join(f"m{number}" for number in range(11)),
    "too long": f"/hilgate run {HEAD} {'m' * 101}",
    "option": f"/hilgate run {HEAD} --profile",
    "substitution": f"/hilgate run {HEAD} $(touch stolen)",
    "backticks": f"/hilgate run {HEAD} `touch stolen`",
    "end of command": f"/hilgate run {HEAD} jamba; touch stolen",
    "pipe": f"/hilgate run {HEAD} jamba | touch stolen",
    "quote": f'/hilgate run {HEAD} "; touch stolen; "',
    "apostrophe": f"/hilgate run {HEAD} '; touch stolen; '",
    "template": "/hilgate run ${{ secrets.BUILDKITE_API_TOKEN }} jamba",
    "json": f'/hilgate run {HEAD} x","env":{{"A":"B"}},"y":"',
    "path": f"/hilgate run {HEAD} ../../etc/passwd",
    "glob": f"/hilgate run {HEAD} *",
    "variable": f"/hilgate run {HEAD} $BUILDKITE_API_TOKEN",
    "other digits": f"/hilgate run {HEAD} jamb\u0430 \uff11",
    "mention": f"/hilgate run {HEAD} @everyone",
    "escape": f"/hilgate run {HEAD} \x1b[31mjamba",
    "file": f"/hilgate run {HEAD} @/etc/passwd",
    "glued": f"/hilgaterun {HEAD} jamba",
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_starts_nothing_and_is_answered(forge: Forge, name: str) -> None:
    status, calls = forge.comment(WRONG[name])
    assert (status, started(calls)) == (0, None)
    assert [call.program for call in calls] == ["gh", "gh", "gh"], "Buildkite is not asked"
    (said,) = answers(calls)
    assert said.endswith(f"\n\n    {COPY}\n")
    assert said.replace(COPY, "") == said[: -len(COPY) - 1] + "\n", "nothing of the comment is repeated"
    assert not [*forge.folder.rglob("stolen")]


def test_a_push_after_the_comment_is_not_run_and_is_said(forge: Forge) -> None:
    seen, pushed = "a" * 40, "b" * 40
    theirs = replace(
        forge, head=pushed, repository="mallory/rocm", builds=[build(42, commit=pushed), build(41, commit=seen)]
    )
    status, calls = theirs.comment(f"/hilgate run {seen} jamba")
    assert (status, started(calls)) == (0, None)
    (said,) = answers(calls)
    assert "that commit is not the head, so something may have been pushed that you have not seen" in said
    assert f"/hilgate run {pushed} MODEL..." in said


@pytest.mark.parametrize(
    "association", ["NONE", "CONTRIBUTOR", "FIRST_TIMER", "FIRST_TIME_CONTRIBUTOR", "MANNEQUIN", ""]
)
def test_a_stranger_starts_nothing(forge: Forge, association: str) -> None:
    assert forge.comment(f"/hilgate run {HEAD} jamba", association=association) == (0, [])


@pytest.mark.parametrize("association", ["OWNER", "MEMBER", "COLLABORATOR"])
def test_somebody_of_the_project_does(forge: Forge, association: str) -> None:
    assert started(forge.comment(f"/hilgate run {HEAD} jamba", association=association)[1])


@pytest.mark.parametrize("body", ["hello", f"see /hilgate run {HEAD} jamba", f" /hilgate run {HEAD} jamba", ""])
def test_talk_is_not_answered(forge: Forge, body: str) -> None:
    assert forge.comment(body) == (0, [])


def test_a_comment_on_an_issue_starts_nothing(forge: Forge) -> None:
    assert forge.comment(f"/hilgate run {HEAD} jamba", pull_request=False) == (0, [])


@pytest.mark.parametrize("repository", ["mallory/rocm", None], ids=["fork", "deleted fork"])
def test_a_fork_runs_in_the_pipeline_of_forks(forge: Forge, repository: str | None) -> None:
    theirs = replace(forge, repository=repository)
    _, calls = theirs.comment(f"/hilgate run {HEAD} jamba")
    addresses = [call.words[-1] for call in calls if call.program == "curl"]
    assert len(addresses) == 2
    assert all("/pipelines/rocm-forks/builds" in address for address in addresses)


@pytest.mark.parametrize(
    "builds",
    [
        [],
        [build(41, pull="8")],
        [build(41, pull_request=None)],
        [build(41, commit="a" * 40)],
        [build(41, meta_data={api.RERUN_KEY: "40"})],
    ],
    ids=["none", "another pull request's", "a branch's", "another commit's", "a rerun"],
)
def test_a_head_that_was_never_built_is_said(forge: Forge, builds: list[dict[str, object]]) -> None:
    status, calls = replace(forge, builds=builds).comment(f"/hilgate run {HEAD} jamba")
    assert (status, started(calls)) == (0, None)
    assert answers(calls) == [f"Nothing was started: Buildkite has no build of {HEAD}. Start one first.\n"]


@pytest.mark.parametrize("lost", ["base", "repository"])
def test_a_build_that_might_be_a_forks_starts_nothing(forge: Forge, lost: str) -> None:
    pull = {**build(41)["pull_request"], lost: None}
    status, calls = replace(forge, builds=[build(41, pull_request=pull)]).comment(f"/hilgate run {HEAD} jamba")
    assert (status, started(calls)) == (1, None)
    assert "Nothing was started" in answers(calls)[0]


@pytest.mark.parametrize("down", ["--json", "builds?commit", f"pulls/{NUMBER}"])
def test_a_service_that_refuses_is_a_red_workflow_and_an_answer(forge: Forge, down: str) -> None:
    status, calls = replace(forge, down=down).comment(f"/hilgate run {HEAD} jamba")
    assert status == 1
    assert answers(calls) == ["Nothing was started: GitHub or Buildkite refused. The log of this workflow says more.\n"]


def test_without_the_script_nothing_runs(forge: Forge) -> None:
    status, calls = replace(forge, down="/contents/").comment(f"/hilgate run {HEAD} jamba")
    assert (status != 0, len(calls)) == (True, 1)


def test_the_workflow_has_few_permissions_and_no_foreign_action() -> None:
    assert WORKFLOW[True] == {"issue_comment": {"types": ["created"]}}, "a comment that is edited later does nothing"
    assert WORKFLOW["permissions"] == {}
    assert JOB["permissions"] == {"contents": "read", "pull-requests": "write"}
    (step,) = JOB["steps"]
    assert "uses" not in step
    assert "${{" not in step["run"], "what a comment says must not become part of the script"
    assert "ref=$GITHUB_SHA" in step["run"], "the script is that of the workflow's own commit, on the default branch"


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda path: path.name)
def test_no_workflow_runs_what_a_pull_request_brings(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert "pull_request_target" not in workflow[True]
    assert re.findall(r"uses: (?!\S+@[0-9a-f]{40}\b).*", path.read_text()) == []


@pytest.mark.parametrize(("names", "key", "posted"), [("step:image", "image-cpu", None), ("all", "one-cpu", 0)])
def test_what_a_comment_starts_is_planned_run_and_judged(
    host: Machine, main: Build, tmp_path: Path, names: str, key: str, posted: int | None
) -> None:
    """From the comment to the verdict; a part of the plan posts no status, and the whole plan does."""
    assert main.posted == 0, main.log()
    commit = host.change("1.9 / 2")
    known = build(41, commit=commit, branch="theirs", pull_request={"id": "7", "base": "main", "repository": "x"})
    _, calls = Forge(tmp_path, head=commit, builds=[known]).comment(f"/hilgate run {commit} {names}")
    body = started(calls)
    assert body is not None
    found = replace(host, settings={**host.settings, **body["env"]}).build(host.clone, body["commit"], **BRANCH)
    assert found.statuses[key] == found.statuses["verdict"] == 0, found.log()
    assert ("image-cpu" in found.statuses) is (key == "image-cpu")
    assert found.posted == posted, found.log()
    assert json.loads(found.artifact("verdict", "results/verdict.json"))["outcome"] == "pass"
