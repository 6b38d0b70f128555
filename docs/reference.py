# SPDX-License-Identifier: Apache-2.0
"""Write the pages that are made from the code, before the site is built: `python docs/reference.py`.

Command line, YAML keys, exit statuses and attacks lie in `docs/reference/` and git ignores them; each raises
UndocumentedError for a command, an option, a key or an attack without a sentence of its own. With `--what-runs` it also
writes the table of docs/concepts/what-runs.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer.main

from hileval.gates.declare import DriftGate, Gate, GateStep
from hilgate.cli.app import program
from hilgate.declare import imports
from hilgate.declare.load import load
from hilgate.declare.protected import Protected, ProtectedList
from hilgate.errors import EXIT_MEANINGS, Exit, HilgateError, Parser, ending
from hilgate.git import Changes
from hilgate.images.contents import contents
from hilgate.model import StrictModel, declaration
from hilgate.plan.estimate import estimate
from hilgate.plan.make import ChangeFacts, assemble

if TYPE_CHECKING:
    import click
    from pydantic.fields import FieldInfo

FILES = {
    "ci/project.yaml": (declaration.Project, declaration.Image),
    "ci/agents.yaml": (declaration.Device, declaration.Queue, declaration.Pods),
    "ci/areas/*.yaml": (
        declaration.DeclaredArea,
        declaration.DeclaredStep,
        declaration.Evidence,
        declaration.Matrix,
        declaration.OnAgents,
    ),
    "ci/protected.yaml": (ProtectedList, Protected),
    "ci/quarantine.yaml": (declaration.Quarantined,),
    "evals/gates.yaml": (Gate, DriftGate, GateStep),
}
"""File -> the models of its parts, the outermost first."""

PLAIN = {str: "text", int: "integer", float: "number", bool: "true / false"}
"""Type -> its word."""

ROOT = Path(__file__).resolve().parents[1]
WHAT_RUNS = ROOT / "docs/concepts/what-runs.md"
CHANGES = {
    "a page": "docs/tutorial.md",
    "a test of one kernel": "tests/kernels/cache/test_gather.py",
    "the attention kernel": "kernels/pagedkv/attention/kernel.py",
    "the judge": "ci/hilgate/judge/verdict.py",
    "the pin of vLLM or aiter": "docker/pins.toml",
}
"""Kind of change -> the file that stands for it."""

NOTE = "This page is made from the code when the site is built.\n"
WITHOUT_A_TABLE = """# Which attention kernels fit

The site was built where the step `codeobjects-all` had left no table. Every nightly build has it as an artifact:

    buildkite-agent artifact download results/codeobjects-all/fit.md .
    make docs

and `hilgate run codeobjects-all` makes it on any machine, without a GPU.
"""


class UndocumentedError(HilgateError):
    """A public name that no sentence explains."""

    exit_status = Exit.FAIL


def pages() -> dict[str, str]:
    """Path of a page -> its text.

    Raises:
        UndocumentedError: A public name has no sentence.
    """
    return {
        "docs/reference/cli.md": command_line(),
        "docs/reference/yaml.md": yaml_keys(),
        "docs/reference/exit-status.md": exit_statuses(),
        "docs/reference/what-fits.md": what_fits(),
        "docs/reference/attacks.md": attacks(),
    }


def command_line() -> str:
    """Every command of `hilgate` with its arguments and options."""
    group = typer.main.get_command(program)
    assert isinstance(group, typer.main.TyperGroup)
    parts = ["# Command line", NOTE, "## hilgate", said(group.help, "hilgate"), options(group, "hilgate")]
    for name, command in group.commands.items():
        if not command.hidden:
            context = command.make_context(name, [], resilient_parsing=True)
            usage = " ".join(["hilgate", name, *command.collect_usage_pieces(context)])
            parts += [f"## hilgate {name}", f"    {usage}", said(command.help, name), options(command, name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def options(command: click.Command, name: str) -> str:
    """A table of what a command takes; empty where it takes nothing."""
    rows = []
    for parameter in command.params:
        hidden, names = getattr(parameter, "hidden", False), ", ".join([*parameter.opts, *parameter.secondary_opts])
        if hidden or "--install-completion" in names or "--show-completion" in names:
            continue
        if parameter.param_type_name == "argument":
            names = (parameter.name or "").upper()
        text = said(getattr(parameter, "help", ""), f"{name} {names}")
        known = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        variable = f" Environment: {', '.join(f'`{one}`' for one in known)}." if known else ""
        rows.append(f"| `{names}` | {cell(text)}{variable} |")
    return "\n".join(["| option | what it does |", "|---|---|", *rows]) if rows else ""


def yaml_keys() -> str:
    """Every key of every YAML file that people write."""
    parts = ["# YAML keys", NOTE, "A key that is unknown is refused, with the nearest one that is known."]
    for file, models in FILES.items():
        parts.append(f"## {file}")
        for one in models:
            # Of a file with one kind of entry the heading would say the same twice.
            parts += [f"### {one.__name__}" if len(models) > 1 else "", said(inspect.getdoc(one), one.__name__)]
            rows = []
            for key, field in one.model_fields.items():
                text = cell(said(field.description, f"{one.__name__}.{key}"))
                rows.append(f"| `{key}` | {kind(field)} | {default(field)} | {text} |")
            parts.append("\n".join(["| key | type | default | what it says |", "|---|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def kind(field: FieldInfo) -> str:
    """A type in the words of YAML."""

    def of(one: Any) -> str:
        origin, inside = typing.get_origin(one), typing.get_args(one)
        if origin is typing.Annotated:
            return of(inside[0])
        if origin is typing.Literal:
            return " / ".join(f"`{word}`" for word in inside)
        if origin in (tuple, list, frozenset):
            return f"list of {of(inside[0])}"
        if origin is dict:
            return f"{of(inside[0])} → {of(inside[1])}"
        if inside:
            return " / ".join(of(word) for word in inside if word is not type(None))
        return PLAIN.get(one) or getattr(one, "__name__", str(one))

    return cell(of(field.annotation))


def default(field: FieldInfo) -> str:
    """The default as YAML has it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return cell(", ".join(map(str, value)))
    return "see there" if isinstance(value, StrictModel) else cell(f"{value}")


def exit_statuses() -> str:
    """Every exit status of `hilgate` and of `hileval`."""
    lines = ["# Exit statuses", "", NOTE, "`make` turns every status but 0 into 2.", ""]
    lines += ["| status | name | meaning |", "|---|---|---|"]
    for status, meaning in EXIT_MEANINGS.items():
        lines.append(f"| {status.value} | `{status.name}` | {cell(said(meaning, status.name))} |")
    return "\n".join(lines) + "\n"


def attacks() -> str:
    """Every attack on hosts or the verdict, as its test says."""
    parts = ["# Attacks", NOTE, "Each is a test of `tests/attacks/`, which is red without the defence."]
    for path in sorted((ROOT / "tests/attacks").glob("test_*.py")):
        text = said(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path.name)
        if not all(word in text for word in ("Who: ", "What: ", "What must happen: ")):
            remedy = "begin its docstring with `Who: `, `What: ` and `What must happen: `"
            raise UndocumentedError(f"{path.name} does not say who, what and what must happen", remedy=remedy)
        parts += [f"## {path.stem.removeprefix('test_').replace('_', ' ')}", text]
    return "\n\n".join(parts) + "\n"


def what_fits() -> str:
    """The table that the step `codeobjects-all` wrote, and how to get it where none is here."""
    table = ROOT / "results/codeobjects-all/fit.md"
    if table.exists():
        wide = "---\nhide: [navigation, toc]\n---\n"
        return f"{wide}# Which attention kernels fit\n\n{table.read_text(encoding='utf-8')}"
    return WITHOUT_A_TABLE


class PlannedChange(NamedTuple):
    """What a pull request of one kind of change runs; times are in minutes, as declared."""

    change: str
    file: str
    steps: int
    jobs: int
    minutes: float
    longest_job: float
    gpu_minutes: float


def what_runs() -> list[PlannedChange]:
    """What each kind of change runs, planned by imports alone, with images that are built already."""
    declarations, images = load(ROOT), contents(ROOT)
    graph = imports.build(ROOT, declarations.project.python_path)
    facts = ChangeFacts(images=images, digests=dict.fromkeys(images, f"sha256:{'0' * 64}"))
    found = []
    for change, name in CHANGES.items():
        changes = Changes(commit="0" * 40, dirty=True, base="main", files=(name,))
        plan = assemble(declarations, changes, None, profile="pr", graph=graph, facts=facts)
        size, jobs = estimate(plan), plan.jobs()
        longest = max(sum(size.each[step.key] for step in steps) for steps in jobs.values())
        found.append(PlannedChange(change, name, len(plan.steps), len(jobs), size.minutes, longest, size.gpu_minutes))
    return found


def table_of_changes() -> str:
    """`what_runs` as a Markdown table."""
    rows = [
        f"| {change} | `{name}` | {steps} | {jobs} | {minutes:.0f} | {longest:.0f} | {gpu:.0f} |"
        for change, name, steps, jobs, minutes, longest, gpu in what_runs()
    ]
    head = "| change | for example | steps | jobs | minutes of all | longest job, minutes | GPU-minutes |"
    return "\n".join([head, "|---|---|---:|---:|---:|---:|---:|", *rows]) + "\n"


@ending
def main() -> int:
    """Write the pages, and with `--what-runs` the table of what runs."""
    parser = Parser(description="Write the pages that are made from the code.")
    parser.add_argument("--what-runs", action="store_true", help=f"also the table of {WHAT_RUNS.name}")
    given = parser.parse_args()
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
    if given.what_runs:
        page = WHAT_RUNS.read_text(encoding="utf-8")
        page = re.sub(r"^\|(?:.*\n\|)*.*\n", table_of_changes(), page, count=1, flags=re.MULTILINE)
        WHAT_RUNS.write_text(page, encoding="utf-8")
    return Exit.PASS


def said(text: str | None, name: str) -> str:
    """A text that is there.

    Raises:
        UndocumentedError: It is not.
    """
    if not (text or "").strip():
        raise UndocumentedError(f"{name} has no sentence", remedy="write a docstring or help=")
    return inspect.cleandoc(str(text)).replace("\b\n", "").replace("\f", "")


def cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


if __name__ == "__main__":
    sys.exit(main())
