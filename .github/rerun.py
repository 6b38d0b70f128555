# SPDX-License-Identifier: Apache-2.0
"""Start the models that a comment on a pull request names: `/hilgate run SHA MODEL...`.

`.github/workflows/rerun.yml` runs this with a plain Python for comments of the project's own people. It asks GitHub for
the head of the pull request (`gh`), and Buildkite (`curl`) for what `hilgate rerun` asks for from a desk. The comment
names its commit, because a push between the look at a change and the comment would otherwise run something unseen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

COMMAND = re.compile(r"/hilgate run ([0-9a-f]{40})((?: (?:step:)?[a-z0-9][a-z0-9._-]{0,99}){1,10})")
"""The whole comment: a full commit, then names of models, of steps as `step:NAME`, or `all`."""
RERUN_KEY = "hilgate-rerun"
"""Meta-data of a build that is itself a rerun (`hilgate.buildkite.api`)."""
BUILDKITE = "https://api.buildkite.com/v2/organizations"
SECONDS = "30"


def run(*words: str, given: str = "") -> str:
    """Output of a program; `given` is its standard input."""
    return subprocess.run(words, input=given, check=True, stdout=subprocess.PIPE, text=True).stdout


def buildkite(url: str, *options: str) -> Any:
    """Answer of Buildkite's REST API. The token goes by standard input: a list of processes shows arguments."""
    header = f"Authorization: Bearer {os.environ['BUILDKITE_API_TOKEN']}\n"
    words = ("curl", "--silent", "--show-error", "--fail", "--max-time", SECONDS, "--header", "@-", *options, url)
    return json.loads(run(*words, given=header))


def request(build: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The body of "Create a build", as `hilgate rerun` sends it (a test compares): these names of a build's commit."""
    pull = build["pull_request"]
    if not (pull["base"] and pull["repository"]):
        raise ValueError("Buildkite does not say which repository the pull request comes from")
    return {
        "commit": build["commit"],
        "branch": build["branch"],
        "message": f"Rerun of {', '.join(names)} after build {build['number']}",
        "pull_request_id": int(pull["id"]),
        "pull_request_base_branch": pull["base"],
        "pull_request_repository": pull["repository"],
        "env": {
            "HILGATE_FLOW": "rerun",
            "HILGATE_MODELS": " ".join(names),
            "HILGATE_PROFILE": "pr",
            "HILGATE_IMAGE_FROM_BUILD": str(build["number"]),
        },
        "meta_data": {RERUN_KEY: str(build["number"])},
    }


def answered(comment: str, repository: str, number: int) -> str:
    """Do what a comment asks for; what to answer."""
    pull = json.loads(run("gh", "api", f"repos/{repository}/pulls/{number}"))
    head = pull["head"]["sha"]
    command = COMMAND.fullmatch(comment.strip())
    if command is None or command[1] != head:
        why = "a command is one line, with the commit that you have looked at and the models. For the present head of"
        if command:
            why = (
                "that commit is not the head, so something may have been pushed that you have not seen. For the head of"
            )
        return f"Nothing was started: {why} this pull request:\n\n    /hilgate run {head} MODEL..."
    fork = (pull["head"]["repo"] or {}).get("full_name") != repository
    pipeline = os.environ["FORKS_PIPELINE" if fork else "PIPELINE"]
    if not pipeline:
        return "Nothing was started: the pull request is a fork's, and no pipeline of forks is set up for comments."
    builds = f"{BUILDKITE}/{os.environ['ORGANIZATION']}/pipelines/{pipeline}/builds"
    for build in buildkite(f"{builds}?commit={head}&per_page=100"):
        of, marks = build["pull_request"] or {}, build["meta_data"] or {}
        if build["commit"] == head and of.get("id") == str(number) and RERUN_KEY not in marks:
            body = json.dumps(request(build, command[2].split()))
            started = buildkite(builds, "--json", body)
            return f"Build {started['number']} of {head} was started: {started['web_url']}"
    return f"Nothing was started: Buildkite has no build of {head}. Start one first."


def main() -> int:
    """Answer the comment of the environment; 1 where a service refuses, 2 without a comment."""
    missing = [name for name in ("GITHUB_REPOSITORY", "NUMBER", "COMMENT") if name not in os.environ]
    if missing:
        sys.stderr.write(f"error: {', '.join(missing)} not set: run it in .github/workflows/rerun.yml\n")
        return 2
    repository, number = os.environ["GITHUB_REPOSITORY"], int(os.environ["NUMBER"])
    status = 0
    try:
        text = answered(os.environ["COMMENT"], repository, number)
    except (subprocess.CalledProcessError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{error!r}\n")
        text, status = "Nothing was started: GitHub or Buildkite refused. The log of this workflow says more.", 1
    run("gh", "pr", "comment", str(number), "--repo", repository, "--body-file", "-", given=f"{text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
