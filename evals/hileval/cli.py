"""The command line: `gate`, `gates`, `import`, `baseline ...`, `power`.

`gate` leaves `findings.jsonl` (one check per line) and `samples.jsonl` (one answer per line) in the output folder and
exits with the status that the worst check has.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from hileval import cli_baseline, cli_power
from hileval.baseline import Baseline
from hileval.conduct import conduct
from hileval.declare import EVALS, Gate, Occasion, find_gate, load_gates, occasion
from hileval.flips import flips, side_by_side
from hileval.foreign import as_yaml, read_foreign
from hileval.gate import exit_status, judge
from hileval.journal import Heading, Journal, code_fingerprint
from hileval.rule import shared
from hileval.served import served_by
from hileval.start import EngineName, starter
from hilgate.errors import Exit, HilgateError
from hilgate.model import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hileval.evaluation import Evaluation
    from hileval.rule import Rule

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(cli_baseline.app, name="baseline")
app.command("power")(cli_power.power)
console = Console()
stderr = Console(stderr=True)

COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.DID_NOT_RUN: "yellow"}
JOURNALS = Path("results/journals")
"""Where answers are kept until their gate has spoken."""
When = Annotated[
    Occasion | None, typer.Option("--when", help="Which of the gate's rules applies; by default what the plan is for.")
]
Limit = Annotated[int | None, typer.Option(help="Ask only the first N questions; too few are inconclusive.")]
Out = Annotated[Path, typer.Option(envvar="HILGATE_OUT", help="Folder of findings.jsonl and samples.jsonl.")]


@app.command("gates")
def list_gates() -> None:
    """List the declared gates."""
    for name, gate in load_gates().gates.items():
        attention = f", attention by {gate.attention_backend}" if gate.attention_backend else ""
        where = f" on {', '.join(gate.arch)}" if gate.arch else ""
        floor = "no floor" if gate.floor is None else f"floor {gate.floor:.0%}"
        typer.echo(f"{name}: {gate.title}\n  {gate.engine}{attention}{where}, {floor}")


@app.command("import")
def import_config(
    files: Annotated[list[Path], typer.Argument(help="Accuracy configurations of vLLM (either format).")],
    gpus: Annotated[int, typer.Option(min=1, help="Tensor-parallel size where a file does not say.")] = 1,
) -> None:
    """Print them as entries of gates.yaml."""
    for file in files:
        typer.echo(as_yaml(*read_foreign(file, gpus)), nl=False)


@app.command("gate")
def run_gate(
    name: Annotated[str, typer.Argument(help="A gate of evals/gates.yaml, or an accuracy configuration of vLLM.")],
    when: When = None,
    limit: Limit = None,
    of: Annotated[
        int, typer.Option(min=1, envvar="HILEVAL_GATES", help="How many gates decide together; they share alpha.")
    ] = 1,
    engine: Annotated[EngineName | None, typer.Option(help="Another engine than declared: never a pass.")] = None,
    out: Out = Path("results/evals"),
) -> None:
    """Run a gate and judge it against its baseline."""
    declared = load_gates()
    if name.endswith((".yaml", ".yml")):
        name, gate = read_foreign(Path(name))
    else:
        gate = find_gate(name, declared)
    rule = shared(declared.rule(gate, when or occasion(os.environ)), of)
    path = gate.path(gate.baseline)
    baseline = Baseline.read(path) if path.exists() or gate.weights == "repository" else None
    try:
        asked, served = measure(name, gate, rule, baseline, engine or gate.engine, limit)
        checks = judge(name, gate, rule, asked, baseline, served)
    except HilgateError as error:
        write_findings(out, [did_not_run(name, error)])
        raise
    write_findings(out, checks, asked)
    if baseline is not None:
        (out / "flips.md").write_text(side_by_side(flips(asked, baseline, gate.filter), 10**6), encoding="utf-8")
    show(checks, out)
    raise typer.Exit(exit_status(checks))


def measure(
    name: str, gate: Gate, rule: Rule, baseline: Baseline | None, engine: EngineName, limit: int | None
) -> tuple[Evaluation, Check | None]:
    """Ask a gate's questions and who served them.

    Raises:
        HilgateError: the declaration, the model, the engine or lm-eval stopped it; nothing was measured.
    """
    from hileval.document_questions import questions_of

    questions = questions_of(gate, starter(gate, engine))
    code = code_fingerprint(EVALS.parent / "kernels", EVALS / "hileval")
    heading = Heading(gate=name, identity=questions.identity, engine=engine, code=code)
    journal = Journal(questions, JOURNALS / f"{name}.jsonl", heading)
    if journal.resumed:
        stderr.print(f"{journal.resumed} answers of an interrupted run are kept", highlight=False)
    try:
        asked = conduct(gate, rule, baseline, journal, Lines(), limit)
        served = served_by(name, gate, questions.engine)
    finally:
        if questions.engine is not None:
            questions.engine.close()
    journal.finish()
    return asked, served


class Lines:
    """A line per batch on stderr: how far, how right, how long still."""

    def __init__(self) -> None:
        self._began, self._run = time.monotonic(), 0

    def asked(self, run: int, done: int, most: int, right: int) -> None:
        """See `conduct.Listener`."""
        if run != self._run:
            self._run, self._began = run, time.monotonic()
        spent = time.monotonic() - self._began
        left = f", at most {spent / done * (most - done):.0f} s more" if done < most else ""
        stderr.print(f"run {run + 1}: {done}/{most} asked, {right} right, {spent:.0f} s{left}", highlight=False)


def did_not_run(name: str, error: HilgateError) -> Check:
    """The finding of a gate that was stopped by an error: it says so instead of being absent."""
    message = "; ".join(str(error).splitlines())
    return Check(
        id=f"{name}/accuracy", outcome=Outcome.DID_NOT_RUN, message=message, labels={"error": type(error).__name__}
    )


def write_findings(out: Path, checks: Sequence[Check], asked: Evaluation | None = None) -> None:
    """Write findings.jsonl, and samples.jsonl where there are answers."""
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{check.model_dump_json()}\n" for check in checks)
    (out / "findings.jsonl").write_text(text, encoding="utf-8")
    samples = out / "samples.jsonl"
    if asked is None:
        samples.unlink(missing_ok=True)
    else:
        samples.write_text("".join(f"{sample.model_dump_json()}\n" for sample in asked.samples), encoding="utf-8")


def show(checks: Sequence[Check], out: Path) -> None:
    """Print one line per check."""
    for check in checks:
        colour = COLOURS[check.outcome]
        console.print(f"[{colour}]{check.outcome.value:<12}[/] {check.id}: ", end="", highlight=False)
        console.print(check.message, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{out}/findings.jsonl, {out}/samples.jsonl", highlight=False)


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
        stderr.print("interrupted; the answers so far are kept, and the same command goes on from them")
        sys.exit(Exit.INTERRUPTED)
    sys.exit(Exit.PASS)
