"""Commands that look and decide but run nothing: plan, explain, doctor, and the first screen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hilgate.cli.app import SUMMARY, Settings
from hilgate.errors import Exit

if TYPE_CHECKING:
    from hilgate.declare import Declarations
    from hilgate.hardware import Machine

Base = Annotated[
    str | None,
    typer.Option(
        metavar="REF", envvar="HILGATE_BASE", help="Plan what differs from the merge base with this; else everything."
    ),
]
History = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="HILGATE_HISTORY",
        file_okay=False,
        help="Times of earlier builds, by default results/history/.",
    ),
]
ProfileName = Annotated[
    Literal["gate", "pr", "nightly", "release"],
    typer.Option(help="gate: this machine; the others: the agents, nightly and release whatever changed."),
]
Json = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the planning commands."""
    app.command("plan")(plan)
    app.command("explain")(explain)
    app.command("doctor")(doctor)


def plan(
    ctx: typer.Context,
    select: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Areas or steps; else by change.")
    ] = None,
    base: Base = None,
    profile: ProfileName = "gate",
    models: Annotated[
        list[str] | None, typer.Option("--models", metavar="NAME", help="The steps of this model; may be repeated.")
    ] = None,
    history: History = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the plan (JSON) here.")] = None,
    as_json: Json = False,
) -> None:
    """Show what would run, where, and why; and what would not, and why not. Runs nothing."""
    from hilgate.cli.tables import show_plan
    from hilgate.durations import measured
    from hilgate.plan import make_plan, write_plan

    settings: Settings = ctx.obj
    root = settings.repository()
    times = measured(root, history)
    made = make_plan(root, base=base, profile=profile, select=tuple(select or ()), models=tuple(models or ()))
    if write:
        write_plan(made, write)
    if as_json:
        sys.stdout.write(made.model_dump_json(indent=1) + "\n")
    else:
        show_plan(settings.out(), made, times)


def explain(
    ctx: typer.Context,
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step, or a step on a device.")],
    base: Base = None,
    history: History = None,
) -> None:
    """Everything about one step: files that select it, devices, queues, command, how to repeat it."""
    from hilgate import changes, imports
    from hilgate.cli.tables import show_step
    from hilgate.declare import load
    from hilgate.durations import measured
    from hilgate.errors import MisuseError
    from hilgate.selection import select
    from hilgate.suggest import suggest

    settings: Settings = ctx.obj
    root = settings.repository()
    declarations = load(root)
    found = declarations.step(step)
    if found is None:
        raise MisuseError(
            f"no step is called {step!r}",
            where="ci/areas",
            remedy=suggest(step, [declared.key for _, declared in declarations.steps()]),
        )
    rule = ""
    if base is not None:
        change = changes.inspect(root, base)
        selection = select(declarations.areas, change.files, imports.build(root), change.appeared)
        key = found[1].key
        rule = selection.reasons.get(key) or selection.omitted[key]
    show_step(settings.out(), declarations, *found, rule=rule, history=measured(root, history))


def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """What this machine is and lacks, and which areas that rules out. Exit status 5 when some step cannot run here."""
    import json

    from hilgate.cli.tables import show_machine, show_readiness
    from hilgate.plan import absent_tools
    from hilgate.readiness import readiness

    settings: Settings = ctx.obj
    declarations, machine = _here(settings)
    areas = readiness(declarations, machine, absent_tools(declarations))
    if as_json:
        from dataclasses import asdict

        answer = {
            "machine": {**asdict(machine), "distributions": dict(machine.distributions)},
            "areas": [{**asdict(area), "answer": area.answer} for area in areas],
        }
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    else:
        out = settings.out()
        show_machine(out, machine, declarations)
        show_readiness(out, areas, every_obstacle=True)
    if any(area.answer != "yes" for area in areas):
        raise typer.Exit(Exit.CANNOT_RUN_HERE)


def show_home(settings: Settings) -> None:
    """The first screen: what this is, what to try, what this machine can run."""
    from hilgate.cli.tables import show_readiness
    from hilgate.plan import absent_tools
    from hilgate.readiness import readiness

    out = settings.out()
    out.print(f"[bold]hilgate[/] {_version()}", SUMMARY, sep="\n")
    out.print("\nTry:")
    for command, meaning in (
        ("hilgate plan", "what would run on this machine, and why"),
        ("hilgate run hygiene", "one area, now; no GPU, account or network needed"),
        ("hilgate gate", "everything this machine can run, and one verdict"),
    ):
        out.print(f"  [bold]{command:<22}[/]{meaning}")
    declarations, machine = _here(settings)
    out.print(f"\nThis machine: {_one_line(machine)}")
    show_readiness(out, readiness(declarations, machine, absent_tools(declarations)))
    out.print("\nMore: hilgate --help, hilgate doctor")


def show_version(settings: Settings) -> None:
    """Version and machine, on one line each."""
    from hilgate.hardware import detect

    machine = detect()
    out = settings.out()
    out.print(f"hilgate {_version()}", _one_line(machine), sep="\n")


def _here(settings: Settings) -> tuple[Declarations, Machine]:
    from hilgate.declare import load
    from hilgate.hardware import detect

    declarations = load(settings.repository())
    return declarations, detect(package for _, step in declarations.steps() for package in step.packages)


def _one_line(machine: Machine) -> str:
    what = (
        f"{machine.gpus} x {machine.name} ({machine.device})" if machine.gpus else "no GPU (cpu: Triton's interpreter)"
    )
    return f"{what}, {machine.cores} cores, {machine.memory_gib:.0f} GiB"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hilgate")
    except PackageNotFoundError:
        return "(not installed)"
