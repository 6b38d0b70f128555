# SPDX-License-Identifier: Apache-2.0
"""Commands about Buildkite: print what it should run, ask it for a build, end jobs that wait too long."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hilgate.cli import Base, declared, no_file, program, repository
from hilgate.errors import CannotRunHereError, Exit, HilgateError, MisuseError

if TYPE_CHECKING:
    from hilgate.declare.load import Declarations
    from hilgate.model.plan import Plan


PACKAGES = ("buildkite_sdk", "httpx", "jsonschema")
"""Packages of the extra `buildkite`, which planning, running and judging do without."""


def _require_packages() -> None:
    """Name what to install where a package of the extra is missing.

    Raises:
        CannotRunHereError: One is.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CannotRunHereError(
            f"{missing[0]} is not installed", where=sys.executable, remedy="pip install 'hilgate[buildkite]'"
        )


@program.command()
def pipeline(
    ctx: typer.Context,
    *,
    base: Base = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Print the steps of this plan instead of making a new one."),
    ] = None,
    recheck: Annotated[
        bool,
        typer.Option("--recheck", help="Print steps that run the failed checks again; print nothing when none failed."),
    ] = False,
    jobs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", callback=no_file, help="With --recheck: read results from this folder of CI jobs."),
    ] = None,
    approved: Annotated[
        bool,
        typer.Option(
            "--approved",
            help="Print all steps once more, to run with the approved files; print nothing where they did already.",
        ),
    ] = False,
    built: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=no_file,
            help="Print the steps in pods of images that jobs of this build have built, whose results are in DIR.",
        ),
    ] = None,
    required: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Print the step that posts the verdict, but only if --plan has every step of the plan in FILE.",
        ),
    ] = None,
) -> None:
    """Print the Buildkite steps (YAML) of a change or of a plan."""
    _require_packages()
    from hilgate.buildkite.steps import pipeline_yaml
    from hilgate.declare.load import load
    from hilgate.plan.limits import judged_within_limits, within_limits
    from hilgate.plan.make import make_plan, read_plan

    root = repository(ctx)
    branch = os.environ.get("BUILDKITE_BRANCH", "")
    if plan_file is None:
        if recheck or required or jobs or approved or built:
            what = "--recheck, --approved, --jobs, --built and --required are about a plan that was run"
            raise MisuseError(what, remedy="give --plan")
        plan = within_limits(make_plan, root, base=base, profile="pr")
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))
        return
    if base or recheck + approved + bool(built) + bool(required) > 1 or bool(jobs) is not recheck:
        raise MisuseError(
            "--base and --plan exclude each other, and so do the others; but --recheck needs --jobs",
            remedy="leave out --base, which the plan has, and name --recheck with --jobs, or --required",
        )
    plan = read_plan(plan_file)
    if jobs:
        sys.stdout.write(judged_within_limits(lambda: _recheck(plan, jobs, load(root), branch), jobs))
    elif built:
        sys.stdout.write(judged_within_limits(lambda: _pods(plan, built, load(root), branch), built))
    elif approved:
        from hilgate.buildkite.steps import approved_yaml
        from hilgate.declare.protected import files_to_restore

        sys.stdout.write(approved_yaml(plan, load(root), branch=branch) if files_to_restore(root, plan) else "")
    elif required:
        from hilgate.buildkite.api import shortfall
        from hilgate.buildkite.steps import required_yaml

        missing = shortfall(read_plan(required), plan)
        for sentence in missing:
            sys.stderr.write(f"not complete: {sentence}\n")
        sys.stdout.write("" if missing else required_yaml(load(root)))
    else:
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))


def _recheck(plan: Plan, jobs: Path, declarations: Declarations, branch: str) -> str:
    from hilgate.buildkite.steps import recheck_yaml
    from hilgate.judge.verdict import image_digests
    from hilgate.model.plan import plan_digest
    from hilgate.run import recheck, results

    recorded = results.read_all(jobs.parent, jobs, plan, plan_digest(plan))
    pending = recheck.pending(plan, recorded)
    for key, ids in pending.items():
        sys.stderr.write(f"{key}: {len(ids)} to run again on another node\n")
    plan = plan.model_copy(update={"digests": image_digests(plan, recorded)})  # a pod names its image by digest
    nodes = {key: attempts[-1].record.environment.host for key, attempts in recorded.attempts.items()}
    return recheck_yaml(plan, pending, declarations, nodes=nodes, branch=branch)


def _pods(plan: Plan, jobs: Path, declarations: Declarations, branch: str) -> str:
    from hilgate.buildkite.steps import pods_yaml
    from hilgate.judge.verdict import image_digests
    from hilgate.model.plan import plan_digest
    from hilgate.run import results

    recorded = results.read_all(jobs.parent, jobs, plan, plan_digest(plan))
    return pods_yaml(plan, image_digests(plan, recorded), declarations, branch=branch)


Organization = Annotated[
    str,
    typer.Option(
        metavar="SLUG",
        envvar=["HILGATE_ORGANIZATION", "BUILDKITE_ORGANIZATION_SLUG"],
        help="Organization, as Buildkite's addresses have it.",
    ),
]
PipelineSlug = Annotated[
    str,
    typer.Option(
        "--pipeline",
        metavar="SLUG",
        envvar=["HILGATE_PIPELINE", "BUILDKITE_PIPELINE_SLUG"],
        help="Pipeline, as Buildkite's addresses have it.",
    ),
]


@program.command("end-waiting")
def end_waiting(ctx: typer.Context, *, organization: Organization = "", pipeline_slug: PipelineSlug = "") -> None:
    """End jobs that no agent took within `wait_minutes` of their queue.

    The build then goes on, and its verdict says that these steps did not run. BUILDKITE_API_TOKEN needs the scope
    read_builds and access to GraphQL. Exit status 1 when a job was ended, 5 when one could not be.
    """
    _require_packages()
    from hilgate.buildkite import api
    from hilgate.declare.load import load

    queues = load(repository(ctx)).agents.queues
    url = api.builds_url(organization, pipeline_slug, api=api.API)
    client = api.Client(url, os.environ.get(api.TOKEN_VARIABLE, ""), graphql=api.GRAPHQL)
    unfinished = client.builds(**{"state[]": api.UNFINISHED, "exclude_jobs": "false"})
    waiting = api.overdue(unfinished, queues, dt.datetime.now(dt.UTC))
    failed: HilgateError | None = None
    for job, sentence in waiting:
        try:
            client.cancel_job(job)
            sys.stdout.write(f"ended: {sentence}\n")
        except HilgateError as error:  # the other jobs are still ended
            failed = failed or error
            sys.stdout.write(f"NOT ended: {sentence}\n")
    if failed:
        raise failed
    if not waiting:
        sys.stdout.write("no job waits too long\n")
    raise typer.Exit(Exit.FAIL if waiting else Exit.PASS)


@program.command()
def earlier(
    *,
    number: Annotated[
        int, typer.Option("--build", metavar="N", envvar="BUILDKITE_BUILD_NUMBER", help="Number of the build.")
    ],
    branch: Annotated[str, typer.Option(metavar="NAME", envvar="BUILDKITE_BRANCH", help="Its branch.")],
    organization: Organization = "",
    pipeline_slug: PipelineSlug = "",
) -> None:
    """Print which tries of a build's jobs were lost, and the builds of its branch before it (JSON).

    `judge` reads it as `earlier.json` in its results. BUILDKITE_API_TOKEN needs the scope read_builds.
    """
    _require_packages()
    from hilgate.buildkite import api

    url = api.builds_url(organization, pipeline_slug, api=api.API)
    found = api.earlier(api.Client(url, os.environ.get(api.TOKEN_VARIABLE, "")), number, branch)
    sys.stdout.write(found.model_dump_json(indent=1) + "\n")


@program.command()
def rerun(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", autocompletion=declared("models"), help="Models as the steps declare them, or `all`."
        ),
    ],
    *,
    pull_request: Annotated[int, typer.Option("--pr", min=1, metavar="N", help="Number of the pull request.")],
    branch: Annotated[str, typer.Option(metavar="NAME", help="Refuse a build of another branch.")] = "",
    commit: Annotated[str, typer.Option(metavar="SHA", help="Refuse a build of another commit (40 digits).")] = "",
    profile: Annotated[
        Literal["pr", "nightly", "release"], typer.Option(help="Take the steps from the plan of this profile.")
    ] = "pr",
    organization: Organization = "",
    pipeline_slug: PipelineSlug = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests and send nothing.")] = False,
) -> None:
    """Run the steps of some models of a pull request again.

    They run in the images of its last build. The token comes from BUILDKITE_API_TOKEN. Only a run of the whole plan
    changes the required status.
    """
    _require_packages()
    from hilgate.buildkite import api
    from hilgate.declare.load import load
    from hilgate.plan.select import by_model

    chosen = list(dict.fromkeys(models))
    declarations = load(repository(ctx))
    by_model(declarations, chosen, api.ALL)
    if api.ALL in chosen and len(chosen) > 1:
        raise MisuseError(f"{api.ALL!r} is every model already", remedy="leave out the others, or leave out 'all'")
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise MisuseError(
            f"--commit {commit!r} is not a full sha", remedy="give all 40 digits, by which Buildkite finds builds"
        )
    url = api.builds_url(organization, pipeline_slug, api=api.API)
    if dry_run:
        pull = api.PullRequest(id=str(pull_request), base="(its base)", repository="(its repository)")
        unknown: dict[str, Any] = {"number": "(its number)", "commit": commit or "(its commit)"}
        unknown |= {"branch": branch or "(its branch)", "pull_request": pull}
        body = json.dumps(api.request(api.RemoteBuild.model_construct(**unknown), chosen, profile=profile), indent=1)
        sys.stdout.write(f"GET {url}\n  until a build of pull request {pull_request}\nPOST {url}\n{body}\n")
        sys.stderr.write("nothing was sent\n")
        return
    client = api.Client(url, os.environ.get(api.TOKEN_VARIABLE, ""))
    last = client.find_pull_request(pull_request, branch=branch, commit=commit)
    images = api.images_of(last)
    sys.stderr.write(f"last build of pull request {pull_request}: {last.number} of {last.commit[:12]} ({last.state})\n")
    for image, digest in sorted(images.items()):
        sys.stderr.write(f"image {image}: {digest}\n")
    started = client.create(api.request(last, chosen, profile=profile))
    sys.stdout.write(f"build {started.number}: {started.web_url}\n")
    covers = "if it covers the whole plan" if api.ALL in chosen else "no, it is a part of the plan"
    sys.stderr.write(f"{declarations.project.status}: {covers}\n")
