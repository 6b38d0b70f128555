"""Reruns of some models: what is asked of Buildkite, and when such a build may answer for the whole change. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hilgate.builds import IMAGES_KEY, NONCE_KEY, Build
from hilgate.errors import MisuseError
from hilgate.rest import RemoteError
from hilgate.suggest import suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilgate.declare import Declarations
    from hilgate.model import Plan, PlannedStep

ALL = "all"
"""Instead of models: the whole plan of the change."""

GATE = ("ci/hilgate/", ".buildkite/")
"""What decides; a change to it needs an approval, and only a full build asks for one."""


def known_models(declarations: Declarations) -> frozenset[str]:
    """Every model that some step runs."""
    return frozenset(model for _, step in declarations.steps() for model in step.models)


def require_models(models: Sequence[str], known: frozenset[str]) -> None:
    """Refuse names that no step has.

    Raises:
        MisuseError: With the names that were probably meant.
    """
    if ALL in models and len(set(models)) > 1:
        raise MisuseError(f"{ALL!r} is every model already", remedy="leave out the others, or leave out 'all'")
    for model in models:
        if model != ALL and model not in known:
            raise MisuseError(f"no step runs a model {model!r}", where="ci/areas", remedy=suggest(model, {*known, ALL}))


def images_of(build: Build) -> dict[str, str]:
    """Image -> digest, as the build's verdict left them; empty when it came to none.

    Raises:
        RemoteError: They are there and not readable.
    """
    text = build.meta_data.get(IMAGES_KEY)
    if text is None:
        return {}
    try:
        images = json.loads(text)
    except (TypeError, ValueError):
        images = None
    if not isinstance(images, dict) or not all(isinstance(digest, str) for digest in images.values()):
        raise RemoteError(f"the meta-data {IMAGES_KEY} cannot be read", where=build.web_url, remedy="use a newer build")
    return images


def request(build: Build, models: Sequence[str], *, profile: str, nonce: str) -> dict[str, Any]:
    """The body of "Create a build": these models of this build's commit.

    The pull request goes along whole: from its repository the agents see that it is a fork, and give it no secrets.

    Raises:
        RemoteError: Buildkite does not say which pull request of which repository the build is of.
    """
    pull = build.pull_request
    if pull is None or not (pull.id and pull.base and pull.repository):
        raise RemoteError(
            "Buildkite does not say which repository the pull request comes from",
            where=build.web_url,
            remedy="without it a fork could be given secrets; push again, and rerun that build",
        )
    return {
        "commit": build.commit,
        "branch": build.branch,
        "message": f"Rerun of {', '.join(models)} after build {build.number}",
        "pull_request_id": int(pull.id),
        "pull_request_base_branch": pull.base,
        "pull_request_repository": pull.repository,
        "env": {
            "HILGATE_FLOW": "rerun",
            "HILGATE_MODELS": " ".join(models),
            "HILGATE_PROFILE": profile,
            "HILGATE_IMAGE_FROM_BUILD": str(build.number),
        },
        "meta_data": {NONCE_KEY: nonce},
    }


def shortfall(required: Plan, plan: Plan) -> tuple[str, ...]:
    """Why a rerun does not answer for the whole change, a sentence each; empty when it does.

    Args:
        required: The `pr` plan of the change, made in the same build.
        plan: What the rerun ran.
    """
    found = [
        f"the {name} is another"
        for name in ("profile", "commit", "dirty", "base", "merge_base", "fork", "images", "changed_files")
        if getattr(required, name) != getattr(plan, name)
    ]
    if required.profile != "pr":
        found.append(f"a plan of profile {required.profile} is not what a merge needs")
    if plan.loosened or required.loosened or any(path.startswith(GATE) for path in required.changed_files):
        found.append("the change edits its own gate, which needs an approval")
    have = {step.key: _what(step) for step in plan.steps}
    found += [f"{step.key} is missing" for step in required.steps if step.key not in have]
    found += [f"{step.key} differs" for step in required.steps if have.get(step.key, _what(step)) != _what(step)]
    return tuple(found)


def _what(step: PlannedStep) -> PlannedStep:
    """A step without the reason for it."""
    return step.model_copy(update={"reason": ""})
