# SPDX-License-Identifier: Apache-2.0
"""Commands that look and decide but run no step: plan, doctor, explain-kernel, the first screen."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hilgate import __version__
from hilgate.cli import SUMMARY, Base, Everything, History, Json, Settings, declared, program, repository
from hilgate.errors import CannotRunHereError, Exit, HilgateError, MisuseError, NothingSelectedError
from hilgate.text import count

if TYPE_CHECKING:
    from hilgate.declare.load import Declarations
    from hilgate.plan.expand import Readiness
    from hilgate.plan.machine import Machine
    from hilgate.plan.make import EarlierBuilds


ProfileName = Annotated[
    Literal["gate", "pr", "nightly", "release"] | None,
    typer.Option(
        help="What to plan for (default: what `hilgate gate` would run). gate plans for this machine, the others "
        "for the agents. nightly and release plan every step."
    ),
]


@program.command()
def plan(
    ctx: typer.Context,
    select: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=declared("areas", "steps"),
            help="Areas or steps to plan (default: those that the change selects).",
        ),
    ] = None,
    base: Base = None,
    everything: Everything = False,
    profile: ProfileName = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            metavar="NAME",
            autocompletion=declared("models"),
            help="Plan the steps of this model; may be repeated.",
        ),
    ] = None,
    history: History = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the plan to this file (JSON).")] = None,
    omitted: Annotated[
        bool, typer.Option("--omitted", help="Also list the steps that would not run, with the reason of each.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which steps would run, where and why. Runs nothing.

    Of a single step it also shows all that is declared about it, and which files select it.
    """
    from hilgate.cli.choice import PlanChoice, choice_of
    from hilgate.plan.estimate import estimate, last_minutes
    from hilgate.plan.limits import within_limits
    from hilgate.plan.machine import detect
    from hilgate.plan.make import make_plan
    from hilgate.report import terminal

    root = repository(ctx)
    choice = PlanChoice(profile or "gate", base, "")
    if not select and not models and profile is None:
        choice = choice_of(ctx, root, base=base, everything=everything)
        terminal.say(terminal.stderr(), choice.why)
    names, served = tuple(select or ()), tuple(models or ())
    if len(names) == 1 and not as_json:
        _show_step(root, names[0], base)
    made = within_limits(
        make_plan,
        root,
        base=choice.base,
        profile=choice.profile,
        select=names,
        models=served,
        earlier=_earlier_builds(history) if history else None,  # never of a checkout: a change could bring it with it
        whole=choice.whole,
    )
    if write:
        made.save(write)
    if as_json:
        sys.stdout.write(made.model_dump_json(indent=1, ensure_ascii=True) + "\n")
    else:
        size = estimate(made, last_minutes(root), cores=detect().cores) if made.local else estimate(made)
        terminal.print_plan(terminal.stdout(), made, size, omitted=omitted)


def _earlier_builds(history: Path) -> EarlierBuilds:
    """What a history knows of earlier builds, looked up as a plan asks for it."""
    from hilgate.plan.make import EarlierBuilds
    from hilgate.report.history import images, launches, times

    return EarlierBuilds(
        images=partial(images, history),
        trouble=_trouble(history),
        launches=partial(launches, history),
        times=partial(times, history),
    )


def _trouble(history: Path) -> dict[str, tuple[int, str]]:
    """Infrastructure failures in a row, by queue; of a history that cannot be read nothing, and that is said."""
    from hilgate.report import terminal
    from hilgate.report.history import trouble

    try:
        return trouble(history)
    except NothingSelectedError:  # no build yet
        return {}
    except HilgateError as error:
        terminal.say(terminal.stderr(), f"planned without the history: {error.what} ({error.where})")
        return {}


def _show_step(root: Path, name: str, base: str | None) -> None:
    """Print all that is declared about a step, and whether the change since `base` selects it; of an area nothing."""
    from hilgate import git
    from hilgate.declare import imports
    from hilgate.declare.load import load
    from hilgate.plan.estimate import last_minutes
    from hilgate.plan.select import select
    from hilgate.report.terminal import print_step, stdout

    declarations = load(root)
    found = declarations.step(name)
    if found is None or name in {area.area for area in declarations.areas}:
        return
    rule = ""
    if base is not None:
        change = git.inspect(root, base)
        graph = imports.build(root, declarations.project.python_path)
        selection = select(declarations.areas, change.files, graph, change.appeared)
        rule = selection.reasons.get(found[1].key) or selection.omitted[found[1].key]
    print_step(declarations, *found, rule=rule, last=last_minutes(root))
    stdout().print()


@program.command()
def init(ctx: typer.Context) -> None:
    """Write the files that a repository needs to use hilgate.

    Files that exist are kept. docs/how-to/adopt.md of hilgate explains each file.
    """
    from hilgate.declare.init import init as write_all

    settings: Settings = ctx.obj
    for path, written in write_all((settings.root or Path.cwd()).resolve()).items():
        sys.stdout.write(f"{'wrote' if written else 'kept '}  {path}\n")
    install = "" if find_spec("pytest") else "pip install pytest, which the steps run; then "
    sys.stdout.write(f"next: {install}hilgate plan\n")


@program.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """Show what this machine has and lacks. Exit status 5 when something required is missing."""
    from hilgate.model.record import Outcome
    from hilgate.plan.expand import Diagnosis
    from hilgate.plan.prerequisites import ask
    from hilgate.report.terminal import print_machine, print_readiness

    declarations, machine, areas = _here(ctx)
    # A step whose devices only agents have is no fault of this machine.
    steps = [step for _, step in declarations.steps() if machine.device in step.devices]
    needed = sorted({name for step in steps for name in step.packages})
    diagnosis = Diagnosis(
        machine=machine,
        prerequisites=ask(repository(ctx), declarations.project),
        packages={name: machine.distributions.get(name, "") for name in needed},
        areas=tuple(areas),
    )
    if as_json:
        sys.stdout.write(diagnosis.model_dump_json(indent=1, ensure_ascii=True) + "\n")
    else:
        print_machine(diagnosis, declarations)
        print_readiness(areas, every_obstacle=True)
    if not all(diagnosis.packages.values()) or any(
        check.outcome is not Outcome.PASS for check in diagnosis.prerequisites
    ):
        raise typer.Exit(Exit.CANNOT_RUN_HERE)


def show_home(ctx: typer.Context) -> None:
    """The first screen: what this is, what to try, what this machine can run."""
    from hilgate.report.terminal import print_readiness, stdout

    _, machine, areas = _here(ctx)
    stdout().print(
        f"hilgate {__version__}\n{SUMMARY}\n\nTry:\n"
        "  hilgate plan          what would run on this machine, and why\n"
        "  hilgate run hygiene   one area, now; no GPU, account or network needed\n"
        "  hilgate gate          your change, else the quick steps; --all: everything\n\n"
        f"This machine: {_one_line(machine)}"
    )
    print_readiness(areas)
    stdout().print("\nMore: hilgate --help, hilgate doctor")


def show_version() -> None:
    """Version and machine, on one line each."""
    from hilgate.plan.machine import detect
    from hilgate.report.terminal import stdout

    stdout().print(f"hilgate {__version__}", _one_line(detect()), sep="\n")


def _here(ctx: typer.Context) -> tuple[Declarations, Machine, list[Readiness]]:
    from hilgate.declare.load import load
    from hilgate.git import no_checkout
    from hilgate.plan.expand import Target, readiness
    from hilgate.plan.machine import absent_tools, detect

    root = repository(ctx)
    declarations = load(root)
    machine = detect(package for _, step in declarations.steps() for package in step.packages)
    target = Target(machine, absent_tools(declarations), no_checkout(root))
    return declarations, machine, readiness(declarations, target)


def _one_line(machine: Machine) -> str:
    gpus = f"{machine.gpus} x {machine.name} ({machine.device})"
    what = gpus if machine.gpus else "no GPU (cpu: Triton's interpreter)"
    return f"{what}, {count(machine.cores, 'core')}, {machine.memory_gib:.0f} GiB"


# Options, --help among them, are those of the command that is started.
FOREIGN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@program.command(context_settings=FOREIGN)
def explain_kernel(ctx: typer.Context) -> None:
    """Show which kernel serves each attention layer of a model.

    --model config.json --arch gfx942; --help lists all options.
    """
    _ask_kernels(ctx, "pagedkv.routing", "explain")


@program.command(context_settings=FOREIGN)
def fit(ctx: typer.Context) -> None:
    """Show how a hybrid fits its GPUs in vLLM.

    MODEL --arch gfx1201, --gpu MI308X or --memory GIB; --help lists all options.
    """
    _ask_kernels(ctx, "pagedkv.fit")


def _ask_kernels(ctx: typer.Context, module: str, *words: str) -> None:
    """Run a command of pagedkv, of this repository or as installed, and end as it does."""
    path = [os.environ.get("PYTHONPATH", "")]
    try:
        kernels = repository(ctx) / "kernels"
    except MisuseError:  # outside a repository
        kernels = None
    if kernels and (kernels / "pagedkv").is_dir():
        path.insert(0, str(kernels))
    elif not find_spec("pagedkv"):
        raise CannotRunHereError("pagedkv is not here", where=module, remedy="pip install pagedkv, or use a checkout")
    done = subprocess.run(
        [sys.executable, "-m", module, *words, *ctx.args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode not in {Exit.PASS, Exit.FAIL, Exit.MISUSE, Exit.INVALID_DECLARATION}:
        raise RuntimeError(f"{module} ended with status {done.returncode}")
    raise typer.Exit(done.returncode)
