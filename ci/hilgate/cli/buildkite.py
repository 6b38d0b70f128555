# SPDX-License-Identifier: Apache-2.0
"""Commands about Buildkite: print what it should run, and ask it for a build."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hilgate.cli import Base, History, JobsFolder, Results, declared, program, repository
from hilgate.errors import Exit, HilgateError, MisuseError, RecordsError

if TYPE_CHECKING:
    from hilgate.buildkite.commands import Allowed, AskedComment
    from hilgate.buildkite.github import Forge
    from hilgate.model.plan import Plan


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
        Path | None, typer.Option(metavar="DIR", help="With --recheck: read results from this folder of CI jobs.")
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
    from hilgate.buildkite.steps import pipeline_yaml
    from hilgate.declare.load import load
    from hilgate.plan.limits import within_limits
    from hilgate.plan.make import make_plan, read_plan

    root = repository(ctx)
    branch = os.environ.get("BUILDKITE_BRANCH", "")
    if plan_file is None:
        if recheck or required or jobs:
            raise MisuseError("--recheck, --jobs and --required are about a plan that was run", remedy="give --plan")
        plan = within_limits(make_plan, root, base=base, profile="pr")
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))
        return
    if base or (recheck and required) or bool(jobs) is not recheck:
        raise MisuseError(
            "--base and --plan exclude each other, --recheck and --required too; --recheck needs --jobs",
            remedy="leave out --base, which the plan has, and name --recheck with --jobs, or --required",
        )
    plan = read_plan(plan_file)
    if jobs:
        sys.stdout.write(_recheck(plan, jobs, branch))
    elif required:
        from hilgate.buildkite.api import shortfall
        from hilgate.buildkite.steps import required_yaml

        missing = shortfall(read_plan(required), plan)
        for sentence in missing:
            sys.stderr.write(f"not complete: {sentence}\n")
        sys.stdout.write("" if missing else required_yaml(load(root)))
    else:
        sys.stdout.write(pipeline_yaml(plan, load(root), branch=branch))


def _recheck(plan: Plan, jobs: Path, branch: str) -> str:
    from hilgate.buildkite.steps import recheck_yaml
    from hilgate.plan.make import plan_digest
    from hilgate.run import recheck, results

    pending = recheck.pending(plan, results.read_all(jobs.parent, jobs, plan, plan_digest(plan)))
    for key, ids in pending.items():
        sys.stderr.write(f"{key}: {len(ids)} to run again on another node\n")
    return recheck_yaml(plan, pending, branch=branch)


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
ForgeName = Annotated[
    str,
    typer.Option("--repository", metavar="OWNER/NAME", envvar="BUILDKITE_REPO", help="The repository on GitHub."),
]
Author = Annotated[
    str,
    typer.Option(
        metavar="LOGIN",
        envvar="HILGATE_GITHUB_LOGIN",
        help="GitHub user of the token; only comments of this user are ever changed.",
    ),
]


@program.command()
def watch(
    ctx: typer.Context,
    *,
    branch: Annotated[
        str,
        typer.Option(metavar="NAME", envvar="BUILDKITE_PIPELINE_DEFAULT_BRANCH", help="Name of the default branch."),
    ] = "main",
    organization: Organization = "",
    pipeline_slug: PipelineSlug = "",
    forge: ForgeName = "",
    heartbeat: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="HILGATE_HEARTBEAT_URL",
            help="Call this URL at the end; the service behind it raises an alarm when no call comes.",
        ),
    ] = "",
    end_late: Annotated[
        bool,
        typer.Option("--end-late", help="End jobs that wait longer than `wait_minutes` of their queue."),
    ] = False,
) -> None:
    """Name paused or lost nodes, red builds, long queues.

    Also names settings of GitHub that differ from ci/agent/github. Exit status 1 when there is anything to report.
    BUILDKITE_API_TOKEN needs the scopes read_agents and read_builds, for --end-late also the access to GraphQL.
    HILGATE_GITHUB_TOKEN needs the permission Metadata: read (a public repository needs none).
    """
    from hilgate.buildkite import api, github
    from hilgate.declare.load import load

    queues = load(repository(ctx)).agents.queues
    url = api.builds_url(organization, pipeline_slug, api=api.API)
    client = api.Client(url, os.environ.get(api.TOKEN_VARIABLE, ""), graphql=api.GRAPHQL)
    now = dt.datetime.now(dt.UTC)
    unfinished = list(client.builds(**{"state[]": api.UNFINISHED, "exclude_jobs": "false"}))
    since = (now - dt.timedelta(days=api.FINISHED_DAYS)).isoformat(timespec="seconds")
    ended = client.builds(branch=branch, state="finished", created_from=since)
    agents = client.agents()
    found = api.alarms(agents, unfinished, ended, queues, now)
    for job, sentence in api.overdue(unfinished, queues, now) if end_late else ():
        try:
            client.cancel_job(job)
            found.append(sentence)
        except HilgateError as error:
            found.append(f"a job that waits too long was not ended: {error.what} [paused]")
    if rulesets := github.load(repository(ctx)):
        asking = github.Forge(github.repository_url(forge), os.environ.get(github.TOKEN_VARIABLE, ""))
        settings = github.compare(rulesets, asking, branch)
        found += settings.differs
        sys.stderr.write("".join(f"not seen: {sentence}\n" for sentence in settings.unseen))
    else:
        sys.stderr.write(f"settings of the forge are not watched: there is no {github.FOLDER}\n")
    # The address hears that somebody has looked, whatever there was to see: this build reports what was seen.
    if heartbeat and (unheard := api.beat(heartbeat)):
        found.append(f"{unheard} [gate-down]")
    sys.stdout.write("".join(f"{sentence}\n" for sentence in found) or "nodes, main, the night and queues are well\n")
    if found:
        sys.stdout.write(f"what to do: {api.RUNBOOKS}, by the word in brackets\n")
    raise typer.Exit(Exit.FAIL if found else Exit.PASS)


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
    from hilgate.buildkite import api
    from hilgate.declare.load import load
    from hilgate.plan.make import by_model

    chosen = list(dict.fromkeys(models))
    declarations = load(repository(ctx))
    by_model(declarations, chosen, api.ALL)
    if api.ALL in chosen and len(chosen) > 1:
        raise MisuseError(f"{api.ALL!r} is every model already", remedy="leave out the others, or leave out 'all'")
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise MisuseError(f"--commit {commit!r} is not a full sha", remedy="Buildkite finds builds by all 40 digits")
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


@program.command()
def publish(
    ctx: typer.Context,
    *,
    pull_request: Annotated[int, typer.Option("--pr", min=1, metavar="N", help="Number of the pull request.")],
    author: Author,
    forge: ForgeName = "",
    jobs: JobsFolder = None,
    results: Results = None,
    history: History = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests and send nothing.")] = False,
) -> None:
    """Show a judged build on GitHub, as a check and one comment.

    The check annotates the lines of failures.

    HILGATE_GITHUB_TOKEN needs the permissions Checks and Pull requests: write. GitHub takes checks from apps alone:
    HILGATE_GITHUB_APP names the app, and the token is then its private key. Neither check nor comment decides a merge.
    """
    from hilgate.buildkite import app, github
    from hilgate.buildkite import publish as sending
    from hilgate.judge.verdict import read_verdict
    from hilgate.model import PLAN_FILE, VERDICT_FILE
    from hilgate.plan.make import plan_digest, read_plan
    from hilgate.report.check import check_of, comment_of
    from hilgate.report.merge_base import find
    from hilgate.report.view import ReportView
    from hilgate.run.results import read_all

    folder = results or repository(ctx) / "results"
    plan, verdict = read_plan(folder / PLAN_FILE), read_verdict(folder / VERDICT_FILE)
    if verdict.plan_digest != plan_digest(plan):
        raise RecordsError(
            "the verdict is of another plan than plan.json", where=str(folder), remedy="run `hilgate judge` again"
        )
    recorded = read_all(folder, jobs, plan, plan_digest(plan))
    facts = find(plan, history=history if history and history.is_dir() else None)
    view = ReportView(plan, recorded, verdict, facts)
    check, comment = check_of(view), comment_of(view)
    url = github.repository_url(forge)
    if dry_run:
        sys.stdout.write(f"POST {url}/check-runs\n{json.dumps(check, indent=1)}\n")
        sys.stdout.write(
            f"POST or PATCH {url}/issues/{pull_request}/comments\n{json.dumps({'body': comment}, indent=1)}\n"
        )
        sys.stderr.write("nothing was sent\n")
        return
    asking = app.connect(url, os.environ, dt.datetime.now(dt.UTC))
    for address in sending.publish(asking, pull_request, author, check, comment):
        sys.stdout.write(f"{address}\n")


@program.command()
def answer(
    ctx: typer.Context,
    comment: Annotated[
        int | None,
        typer.Argument(
            min=1, metavar="ID", help="Number of the comment on GitHub (default: what nobody answered yet)."
        ),
    ] = None,
    *,
    author: Author,
    forge: ForgeName = "",
    organization: Organization = "",
    pipeline_slug: PipelineSlug = "",
) -> None:
    """Do what comments on pull requests ask for.

    A comment is one line: /hilgate run STEP|MODEL ..., retry, cancel or explain. ci/agent/commands.json of
    the default branch says who may ask. Run it from a checkout of the default branch. Without ID it answers the
    comments of the last six hours; it then reports a refused comment on standard error and does not fail.
    """
    from hilgate.buildkite import app, commands, github

    asking = app.connect(github.repository_url(forge), os.environ, dt.datetime.now(dt.UTC))
    if comment is None:
        asked = commands.unanswered(asking, author, dt.datetime.now(dt.UTC))
    else:
        asked = [one for one in [commands.read(asking, comment)] if one.is_command]
    if not asked:
        sys.stdout.write("no command\n")
        return
    may, failed = commands.allowed(asking), None
    for one in asked:
        try:
            _answer(ctx, asking, one, may, author, (organization, pipeline_slug))
        except HilgateError as error:
            if comment is not None:
                raise
            sys.stderr.write(f"comment {one.id}: {error.what}\n")
            failed = failed or (None if isinstance(error, MisuseError) else error)
    if failed:
        raise failed


def _answer(
    ctx: typer.Context,
    asking: Forge,
    asked: AskedComment,
    may: Allowed,
    author: str,
    pipeline: tuple[str, str],
) -> None:
    """Do what one comment asks for, and answer it; who may not ask gets no answer on GitHub."""
    from hilgate.buildkite import api, commands
    from hilgate.buildkite.publish import ANSWER, write
    from hilgate.declare.load import load
    from hilgate.text import markdown

    commands.permit(asked, may, (), dt.datetime.now(dt.UTC))
    declarations = load(repository(ctx))
    names = ({step.key for _, step in declarations.steps()}, declarations.models())
    client = api.Client(api.builds_url(*pipeline, api=api.API), os.environ.get(api.TOKEN_VARIABLE, ""))
    refused: HilgateError | None = None
    try:
        said = commands.answer(client, asked, may, commands.parse(asked.body), names, dt.datetime.now(dt.UTC))
    except HilgateError as error:
        refused, said = error, f"{error.what}: {error.remedy}"
    address = write(
        asking, asked.pull_request, author, ANSWER, f"{markdown(said)}\n\n{commands.answered_mark(asked)}\n"
    )
    sys.stdout.write(f"{said}\n{address}\n")
    if refused:
        raise refused
