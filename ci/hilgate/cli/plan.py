"""Commands that look and decide but run no step: plan, explain, doctor, replay, explain-kernel, the first screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hilgate import __version__
from hilgate.cli import SUMMARY, Base, History, Json, program, repository
from hilgate.errors import CannotRunHereError, Exit, MisuseError

if TYPE_CHECKING:
    from hilgate.checks.replay import Replay, Replayed
    from hilgate.declare.load import Declarations
    from hilgate.model import Check
    from hilgate.plan.machine import Machine


ProfileName = Annotated[
    Literal["gate", "pr", "nightly", "release"],
    typer.Option(help="gate: this machine; the others: the agents, nightly and release whatever changed."),
]


@program.command()
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
    from hilgate.plan.estimate import measured
    from hilgate.plan.make import make_plan
    from hilgate.report.terminal import show_plan

    root = repository(ctx)
    times = measured(root, history)
    made = make_plan(root, base=base, profile=profile, select=tuple(select or ()), models=tuple(models or ()))
    if write:
        made.save(write)
    if as_json:
        sys.stdout.write(made.model_dump_json(indent=1) + "\n")
    else:
        show_plan(made, times)


@program.command()
def explain(
    ctx: typer.Context,
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step, or a step on a device.")],
    base: Base = None,
    history: History = None,
    as_json: Json = False,
) -> None:
    """Everything about one step: files that select it, devices, queues, command, how to repeat it."""
    from hilgate import git
    from hilgate.declare import imports
    from hilgate.declare.load import load
    from hilgate.plan.estimate import measured
    from hilgate.plan.expand import explanation
    from hilgate.plan.select import select
    from hilgate.report.terminal import show_step
    from hilgate.text import suggest

    root = repository(ctx)
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
        change = git.inspect(root, base)
        selection = select(declarations.areas, change.files, imports.build(root), change.appeared)
        key = found[1].key
        rule = selection.reasons.get(key) or selection.omitted[key]
    if as_json:
        sys.stdout.write(explanation(declarations, *found, rule).model_dump_json(indent=1) + "\n")
    else:
        show_step(declarations, *found, rule=rule, history=measured(root, history))


@program.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """What this machine is and lacks, and which areas that rules out. Exit status 5 when some step cannot run here."""
    from hilgate.plan.expand import Diagnosis, Target, readiness
    from hilgate.plan.make import absent_tools
    from hilgate.report.terminal import show_machine, show_readiness

    declarations, machine = _here(ctx)
    areas = readiness(declarations, Target(machine, absent_tools(declarations)))
    if as_json:
        sys.stdout.write(Diagnosis(machine=machine, areas=tuple(areas)).model_dump_json(indent=1) + "\n")
    else:
        show_machine(machine, declarations)
        show_readiness(areas, every_obstacle=True)
    if any(area.answer != "yes" for area in areas):
        raise typer.Exit(Exit.CANNOT_RUN_HERE)


@program.command()
def schema(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A file or listing; without it, which there are.")] = "",
) -> None:
    """Print the JSON schema of what hilgate writes or reads, for other programs and for editors."""
    from pydantic import TypeAdapter

    from hilgate import model
    from hilgate.plan.expand import Diagnosis, Explanation
    from hilgate.release.bundle import Manifest
    from hilgate.report.tables import TableFile
    from hilgate.text import suggest

    written: dict[str, Any] = {
        "plan.json": model.Plan,
        "results.jsonl": model.Record,
        "verdict.json": model.Verdict,
        "health.json": model.Health,
        "table.json": TableFile,
        "manifest.json": Manifest,
        "doctor --json": Diagnosis,
        "explain --json": Explanation,
    }
    given: dict[str, Any] = {
        "findings.jsonl": model.Check,
        "area.yaml": model.Area,
        "agents.yaml": model.Agents,
        "quarantine.yaml": model.Quarantine,
        "project.yaml": model.Project,
    }
    if not name:
        sys.stdout.write("".join(f"{known}\n" for known in written | given))
        return
    if name not in written | given:
        raise MisuseError(f"there is no schema {name!r}", where="NAME", remedy=suggest(name, [*written, *given]))
    mode: Literal["serialization", "validation"] = "serialization" if name in written else "validation"
    found = TypeAdapter((written | given)[name]).json_schema(mode=mode)
    sys.stdout.write(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **found}, indent=1) + "\n")


def show_home(ctx: typer.Context) -> None:
    """The first screen: what this is, what to try, what this machine can run."""
    from hilgate.plan.expand import Target, readiness
    from hilgate.plan.make import absent_tools
    from hilgate.report.terminal import show_readiness, stdout

    out = stdout()
    out.print(f"[bold]hilgate[/] {__version__}", SUMMARY, sep="\n")
    out.print("\nTry:")
    for command, meaning in (
        ("hilgate plan", "what would run on this machine, and why"),
        ("hilgate run hygiene", "one area, now; no GPU, account or network needed"),
        ("hilgate gate", "everything this machine can run, and one verdict"),
    ):
        out.print(f"  [bold]{command:<22}[/]{meaning}")
    declarations, machine = _here(ctx)
    out.print(f"\nThis machine: {_one_line(machine)}")
    show_readiness(readiness(declarations, Target(machine, absent_tools(declarations))))
    out.print("\nMore: hilgate --help, hilgate doctor")


def show_version() -> None:
    """Version and machine, on one line each."""
    from hilgate.plan.machine import detect
    from hilgate.report.terminal import stdout

    stdout().print(f"hilgate {__version__}", _one_line(detect()), sep="\n")


def _here(ctx: typer.Context) -> tuple[Declarations, Machine]:
    from hilgate.declare.load import load
    from hilgate.plan.machine import detect

    declarations = load(repository(ctx))
    return declarations, detect(package for _, step in declarations.steps() for package in step.packages)


def _one_line(machine: Machine) -> str:
    what = (
        f"{machine.gpus} x {machine.name} ({machine.device})" if machine.gpus else "no GPU (cpu: Triton's interpreter)"
    )
    return f"{what}, {machine.cores} cores, {machine.memory_gib:.0f} GiB"


@program.command()
def replay(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One list of changed files per line [=> STEP...].")],
    profile: Annotated[Literal["pr", "nightly", "release"], typer.Option(help="Whose plans.")] = "pr",
    history: History = None,
    as_json: Json = False,
) -> None:
    """Measure the selection on changes that happened: GPU-minutes saved, steps missed. Exit status 1 when one is."""
    from hilgate.checks import reads
    from hilgate.checks import replay as checks
    from hilgate.declare import imports
    from hilgate.declare.load import load
    from hilgate.model import Check
    from hilgate.plan.estimate import measured

    root = repository(ctx)
    declarations = load(root)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MisuseError(f"cannot be read: {error}", where=str(file), remedy="name a text file") from error
    changes = checks.parse(text, str(file), [step.key for _, step in declarations.steps()])
    recorded = root / reads.READS_FILE
    seen = reads.read(recorded) if recorded.exists() else {}
    found = checks.replay(changes, declarations, imports.build(root), seen, measured(root, history), profile)
    if out := os.environ.get("HILGATE_OUT"):  # set when the replay is itself a step of a gate
        Check.write_all(Path(out), tuple(_check(line) for line in found.lines))
    if as_json:
        sys.stdout.write(json.dumps(_plain(found), indent=1) + "\n")
    else:
        _show(found)
    if found.missed:
        raise typer.Exit(Exit.FAIL)


def _check(line: Replayed) -> Check:
    from hilgate.model import Check, Outcome

    return Check(
        id=f"line {line.change.line}: {line.change.title}",
        outcome=Outcome.FAIL if line.missed else Outcome.PASS,
        message="; ".join(f"{step} was not selected, and {why}" for step, why in line.missed.items()),
        numbers={"steps": line.steps, "gpu_minutes": line.gpu_minutes},
    )


def _plain(found: Replay) -> dict[str, object]:
    return {
        "profile": found.profile,
        "run_all": {"steps": found.of, "gpu_minutes": found.run_all_minutes},
        "changes": len(found.lines),
        "gpu_minutes": found.gpu_minutes,
        "gpu_minutes_saved": found.run_all_gpu_minutes - found.gpu_minutes,
        "missed": found.missed,
        "lines": [
            {
                "line": line.change.line,
                "files": line.change.files,
                "broke": line.change.broke,
                "steps": line.steps,
                "gpu_minutes": line.gpu_minutes,
                "gpu_minutes_saved": found.run_all_minutes - line.gpu_minutes,
                "missed": [{"step": step, "why": why} for step, why in line.missed.items()],
            }
            for line in found.lines
        ],
    }


def _show(found: Replay) -> None:
    from rich.markup import escape
    from rich.table import Table

    from hilgate.report.terminal import stdout

    out = stdout()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("line", "steps", "GPU min", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("changed", overflow="fold", ratio=1)
    for line in found.lines:
        table.add_row(
            str(line.change.line),
            f"{line.steps}/{found.of}",
            f"{line.gpu_minutes:.1f}",
            f"{found.run_all_minutes - line.gpu_minutes:.1f}",
            escape(line.change.title),
        )
    out.print(table)
    for line in found.lines:
        for step, why in line.missed.items():
            out.print(f"[red]missed[/] line {line.change.line}: {escape(step)}, and {escape(why)}")
    saved = found.run_all_gpu_minutes - found.gpu_minutes
    share = f" ({saved / found.run_all_gpu_minutes:.0%})" if found.run_all_gpu_minutes else ""
    average = sum(line.steps for line in found.lines) / len(found.lines)
    out.print(
        f"\n{len(found.lines)} changes, on average {average:.1f} of {found.of} steps, {found.missed} steps missed\n"
        f"{found.gpu_minutes:.0f} GPU-minutes instead of {found.run_all_gpu_minutes:.0f}: {saved:.0f} saved{share}"
    )
    if not found.readers:
        out.print(
            "No reads are recorded: only steps that are known to break can be missed (python -m hilgate.checks.reads)"
        )


ROUTING = "pagedkv.routing"
_STATUSES = (Exit.PASS, Exit.FAIL, Exit.MISUSE, Exit.INVALID_DECLARATION)


# Options, --help among them, are those of the command that is started.
@program.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def explain_kernel(ctx: typer.Context) -> None:
    """Which kernel serves each attention layer of a model, and why: --model config.json --arch gfx942 (--help: all)."""
    kernels = repository(ctx) / "kernels"
    if not (kernels / ROUTING.replace(".", "/") / "__main__.py").is_file():
        raise CannotRunHereError(
            f"this repository has no {ROUTING}", where=str(kernels), remedy="take a commit that has it, or --root"
        )
    path = os.pathsep.join(filter(None, (str(kernels), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", ROUTING, "explain", *ctx.args],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode not in _STATUSES:
        raise RuntimeError(f"{ROUTING} ended with status {done.returncode}")
    raise typer.Exit(done.returncode)
