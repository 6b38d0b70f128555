"""The command line: `gate`, `baseline record`, `gates`.

`gate` leaves `findings.jsonl` (one check per line) and `samples.jsonl` (one answer per line) in the output folder and
exits with the status that the worst check has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console

from hileval.baseline import make_baseline
from hileval.declare import Gate, find_gate, load_gates
from hileval.gate import exit_status, judge
from hileval.records import Baseline, Run
from hileval.served import check_served
from hilgate.errors import Exit, HilgateError, MisuseError
from hilgate.model import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.engines import Engine

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
baseline_app = typer.Typer(no_args_is_help=True, help="Stored runs that later runs are paired with.")
app.add_typer(baseline_app, name="baseline")
console = Console()
stderr = Console(stderr=True)

COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.DID_NOT_RUN: "yellow"}
EngineName = Literal["vllm", "transformers"]
Limit = Annotated[int | None, typer.Option(help="Ask only the first N questions; too few are inconclusive.")]
Out = Annotated[Path, typer.Option(envvar="HILGATE_OUT", help="Folder of findings.jsonl and samples.jsonl.")]


@app.command("gates")
def list_gates() -> None:
    """List the declared gates."""
    for name, gate in load_gates().items():
        attention = f", attention by {gate.attention_backend}" if gate.attention_backend else ""
        limits = f"n={gate.questions} alpha={gate.alpha:g} margin={gate.margin:.1%} floor={gate.floor:.0%}"
        typer.echo(f"{name}: {gate.title}\n  {gate.engine}{attention}, {limits}")


@app.command("gate")
def run_gate(
    name: Annotated[str, typer.Argument(help="A gate of evals/gates.yaml.")],
    limit: Limit = None,
    engine: Annotated[EngineName | None, typer.Option(help="Another engine than declared: never a pass.")] = None,
    out: Out = Path("results/evals"),
) -> None:
    """Run a gate and judge it against its baseline."""
    gate = find_gate(name, load_gates())
    baseline = Baseline.read(gate.path(gate.baseline))
    used = engine or gate.engine
    try:
        run, served = measure(name, gate, used, limit)
        checks = judge(name, gate, run, baseline, served)
    except HilgateError as error:
        write_findings(out, [did_not_run(name, error)])
        raise
    write_findings(out, checks, run)
    show(checks, out)
    raise typer.Exit(exit_status(checks))


@baseline_app.command("record")
def record(
    name: Annotated[str, typer.Argument(help="A gate of evals/gates.yaml.")],
    reason: Annotated[str, typer.Option(help="Why: it is stored in the baseline and read in review.")],
    attention_backend: Annotated[
        Literal["vllm", "pagedkv"], typer.Option(help="Which attention to trust; vllm is the engine's own.")
    ] = "vllm",
) -> None:
    """Record the baseline of a gate: all its questions, on an attention that is trusted."""
    gate = find_gate(name, load_gates())
    if gate.engine == "vllm":
        gate = gate.model_copy(update={"attention_backend": attention_backend})
    run, served = measure(name, gate, gate.engine, None)
    if served is not None and served.outcome is not Outcome.PASS:
        raise MisuseError(f"not recorded: {served.message}", where=name)
    versions = _engine_version(gate.engine)
    backend = served.labels["backend"] if served else gate.engine
    baseline = make_baseline(name, run, floor=gate.floor, engine=versions, attention_backend=backend, reason=reason)
    path = gate.path(gate.baseline)
    baseline.write(path)
    typer.echo(f"{path}: {run.strict_correct}/{len(run.samples)} right on {versions}, {run.seconds:.0f} s")


def measure(name: str, gate: Gate, engine: EngineName, limit: int | None) -> tuple[Run, Check | None]:
    """Run a gate's questions and ask who served them.

    Raises:
        HilgateError: the declaration, the model, the engine or lm-eval stopped it; nothing was measured.
    """
    from hileval.engines import TransformersEngine, VllmEngine
    from hileval.harness import evaluate

    def start() -> Engine:
        model = gate.path(gate.model)
        if engine == "vllm":
            return VllmEngine(model, gate.attention_backend or "vllm", gate.engine_args)
        return TransformersEngine(model)

    run, used = evaluate(gate, start, limit)
    required = gate.attention_backend
    return run, None if required is None else check_served(name, required, used.attention_layers() or [])


def did_not_run(name: str, error: HilgateError) -> Check:
    """The finding of a gate that was stopped by an error: it says so instead of being absent."""
    message = "; ".join(str(error).splitlines())
    return Check(
        id=f"{name}/accuracy", outcome=Outcome.DID_NOT_RUN, message=message, labels={"error": type(error).__name__}
    )


def write_findings(out: Path, checks: Sequence[Check], run: Run | None = None) -> None:
    """Write findings.jsonl, and samples.jsonl where there is a run."""
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{check.model_dump_json()}\n" for check in checks)
    (out / "findings.jsonl").write_text(text, encoding="utf-8")
    samples = out / "samples.jsonl"
    if run is None:
        samples.unlink(missing_ok=True)
    else:
        samples.write_text("".join(f"{sample.model_dump_json()}\n" for sample in run.samples), encoding="utf-8")


def show(checks: Sequence[Check], out: Path) -> None:
    """Print one line per check."""
    for check in checks:
        colour = COLOURS[check.outcome]
        console.print(f"[{colour}]{check.outcome.value:<12}[/] {check.id}: ", end="", highlight=False)
        console.print(check.message, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{out}/findings.jsonl, {out}/samples.jsonl", highlight=False)


def _engine_version(engine: str) -> str:
    from hileval.baseline import environment

    return f"{engine} {environment().versions.get(engine, '?')}"


def run(command: typer.Typer) -> NoReturn:
    """Run a command line; every mistake is a few lines and an exit status, never a traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command()
    except HilgateError as error:
        stderr.print(f"[red]{type(error).__name__}[/]: ", end="", highlight=False)
        stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.PASS)
