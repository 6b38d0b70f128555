# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers as GitHub's REST API documents for the rules of one repository."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from support.loopback import Asked, served
from support.nodes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILDKITE, MERGE_QUEUE = 4711, 4712
"""Ids of apps; which they are on GitHub is for whoever sets the rulesets up."""


def declared(name: str) -> dict[str, Any]:
    """A ruleset of this repository, with the ids filled in."""
    text = (ROOT / f"ci/agent/github/{name}.json").read_text()
    text = text.replace('"integration_id": 0', f'"integration_id": {BUILDKITE}')
    return json.loads(text.replace('"actor_id": 0', f'"actor_id": {MERGE_QUEUE}'))


class GitHub:
    """One repository, `acme/rocm`: its rulesets by number, and which of them hold for a branch."""

    address: str

    def __init__(self) -> None:
        self.rulesets = {1: copy.deepcopy(declared("main")), 2: copy.deepcopy(declared("queue"))}
        self.token = ""
        """Without it the repository is not there; who may bypass a ruleset is shown only to `admin`."""
        self.asked: list[str] = []

    def rules(self, branch: str) -> list[dict[str, Any]]:
        number = 1 if branch == "main" else 2 if branch.startswith("gh-readonly-queue/") else 0
        ruleset = self.rulesets.get(number, {"rules": [], "enforcement": "active"})
        known = {"ruleset_source_type": "Repository", "ruleset_source": "acme/rocm", "ruleset_id": number}
        return [{**rule, **known} for rule in ruleset["rules"]] if ruleset["enforcement"] == "active" else []

    def ruleset(self, number: int, token: str) -> dict[str, Any]:
        shown = {"id": number, "source_type": "Repository", "source": "acme/rocm", **self.rulesets[number]}
        return shown if token == "admin" else {name: value for name, value in shown.items() if name != "bypass_actors"}

    def answer(self, asked: Asked) -> tuple[int, object, dict[str, str]]:
        self.asked.append(asked.path)
        where, page = asked.path.removeprefix("/repos/acme/rocm/"), int(asked.query.get("page", ["1"])[0])
        if asked.token != self.token or where == asked.path:
            return 404, {"message": "Not Found"}, {}
        if where.startswith("rules/branches/"):
            rules = self.rules(unquote(where.removeprefix("rules/branches/")))
            return 200, rules[(page - 1) * 100 : page * 100], {}
        return 200, self.ruleset(int(where.removeprefix("rulesets/")), asked.token), {}


@contextmanager
def serving() -> Iterator[GitHub]:
    made = GitHub()
    with served(made.answer) as made.address:
        yield made
