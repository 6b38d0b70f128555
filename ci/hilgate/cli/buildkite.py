"""Commands about Buildkite: print what it should run, and ask it for a build."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hilgate.errors import MisuseError

if TYPE_CHECKING:
    from hilgate.cli.app import Settings

PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Of this plan instead.")]


def register(app: typer.Typer) -> None:
    """Add the commands about Buildkite."""
    app.command("pipeline")(pipeline)
    app.command("rerun")(rerun)


def pipeline(
    ctx: typer.Context,
    *,
    base: Annotated[
        str | None, typer.Option(metavar="REF", envvar="HILGATE_BASE", help="Of what differs from it; else everything.")
    ] = None,
    plan_file: PlanFile = None,
    recheck: Annotated[
        bool, typer.Option("--recheck", help="Print reruns of the checks that failed; nothing when none did.")
    ] = False,
    jobs: Annotated[Path | None, typer.Option(metavar="DIR", help="With --recheck: results, a folder per job.")] = None,
    required: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Print the posting verdict if the plan covers this one; else nothing."),
    ] = None,
) -> None:
    """Print Buildkite steps (YAML): those of a change or a plan, or those that a build uploads later."""
    from hilgate.buildkite.steps import pipeline_yaml
    from hilgate.declare.load import load
    from hilgate.plan.make import make_plan, read_plan

    settings: Settings = ctx.obj
    root = settings.repository()
    branch = os.environ.get("BUILDKITE_BRANCH", "")
    if plan_file is None:
        if recheck or required or jobs:
            raise MisuseError("--recheck, --jobs and --required are about a plan that was run", remedy="give --plan")
        plan = make_plan(root, base=base, profile="pr")
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))
        return
    if base or (recheck and required) or bool(jobs) is not recheck:
        raise MisuseError(
            "--base and --plan exclude each other, --recheck and --required too; --recheck needs --jobs",
            remedy="a plan already knows its base",
        )
    plan = read_plan(plan_file)
    if jobs:
        sys.stdout.write(_recheck(plan_file, jobs, branch))
    elif required:
        from hilgate.buildkite.api import shortfall
        from hilgate.buildkite.steps import required_yaml

        missing = shortfall(read_plan(required), plan)
        for sentence in missing:
            sys.stderr.write(f"not complete: {sentence}\n")
        sys.stdout.write("" if missing else required_yaml(load(root)))
    else:
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))


def _recheck(plan_file: Path, jobs: Path, branch: str) -> str:
    from hilgate.buildkite.steps import recheck_yaml
    from hilgate.plan.make import plan_digest, read_plan
    from hilgate.run import recheck as again
    from hilgate.run import results

    plan = read_plan(plan_file)
    recorded = results.read_all(jobs.parent, jobs, plan, plan_digest(plan))
    pending = again.pending(plan, recorded)
    for key, ids in pending.items():
        sys.stderr.write(f"{key}: {len(ids)} to run again on another node\n")
    return recheck_yaml(plan, pending, branch=branch)


def rerun(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models that steps run, or: all.")],
    *,
    pull_request: Annotated[int, typer.Option("--pr", min=1, metavar="N", help="The pull request.")],
    branch: Annotated[str, typer.Option(metavar="NAME", help="Only a build of this branch.")] = "",
    commit: Annotated[str, typer.Option(metavar="SHA", help="Only a build of this commit, in full.")] = "",
    profile: Annotated[Literal["pr", "nightly", "release"], typer.Option(help="Plan to take steps from.")] = "pr",
    organization: Annotated[
        str, typer.Option(metavar="SLUG", envvar=["HILGATE_ORGANIZATION", "BUILDKITE_ORGANIZATION_SLUG"])
    ] = "",
    pipeline_slug: Annotated[
        str, typer.Option("--pipeline", metavar="SLUG", envvar=["HILGATE_PIPELINE", "BUILDKITE_PIPELINE_SLUG"])
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests and send none.")] = False,
) -> None:
    """Build some models of a pull request again on Buildkite, with the images of its last build.

    The token comes from BUILDKITE_API_TOKEN. A part of the plan never changes rocm/required.
    """
    from uuid import uuid4

    from hilgate.buildkite import api
    from hilgate.declare.load import load

    settings: Settings = ctx.obj
    chosen = list(dict.fromkeys(models))
    api.require_models(chosen, api.known_models(load(settings.repository())))
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise MisuseError(f"--commit {commit!r} is not a full sha", remedy="Buildkite finds builds by all 40 digits")
    url = api.builds_url(organization, pipeline_slug, api=api.API)
    nonce = uuid4().hex
    if dry_run:
        pull = api.PullRequest(id=str(pull_request), base="(its base)", repository="(its repository)")
        unknown = api.Build(
            number=0, web_url="", state="", commit=commit or "(its commit)", branch=branch or "(its branch)",
            pull_request=pull,
        )  # fmt: skip
        body = api.request(unknown, chosen, profile=profile, nonce=nonce)
        body["message"] = f"Rerun of {', '.join(chosen)} after build (its number)"
        body["env"]["HILGATE_IMAGE_FROM_BUILD"] = "(its number)"
        sys.stdout.write(
            f"GET {url}\n  until a build of pull request {pull_request}\nPOST {url}\n{json.dumps(body, indent=1)}\n"
        )
        sys.stderr.write("nothing was sent\n")
        return
    client = api.Client(url, os.environ.get(api.TOKEN_VARIABLE, ""))
    last = client.find_pull_request(pull_request, branch=branch, commit=commit)
    images = api.images_of(last)
    sys.stderr.write(f"last build of pull request {pull_request}: {last.number} of {last.commit[:12]} ({last.state})\n")
    for image, digest in sorted(images.items()):
        sys.stderr.write(f"image {image}: {digest}\n")
    started = client.create(api.request(last, chosen, profile=profile, nonce=nonce), nonce)
    sys.stdout.write(f"build {started.number}: {started.web_url}\n")
    covers = "if it covers the whole plan" if api.ALL in chosen else "no, it is a part of the plan"
    sys.stderr.write(f"rocm/required: {covers}\n")
