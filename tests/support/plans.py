# SPDX-License-Identifier: Apache-2.0
"""Plans of `python -c` steps, for tests of everything that happens after planning."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import typer.main

from hilgate.cli.app import main
from hilgate.model.plan import Omission, Plan, PlannedStep, plan_digest
from hilgate.model.record import Environment
from hilgate.plan import limits
from hilgate.run import results, surroundings
from hilgate.run.runner import Options, Runner, new_build

if TYPE_CHECKING:
    from collections.abc import Callable

    from hilgate.run import process

ENVIRONMENT = Environment(
    host="local", device="a processor", cores=2, memory_gib=8.0, python="3.11.0", versions={"torch": "2.13.0"}
)
COMMIT = "c" * 40
PLACED = frozenset(PlannedStep.model_fields) - {"step"}
"""Fields of a planned step besides its declared one."""

IDENTITY = ["-c", "user.name=samples", "-c", "user.email=samples@example.invalid"]


def git(root: Path, *arguments: str) -> str:
    """What a git command prints, run with an identity of its own."""
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def writes_findings(*checks: dict[str, object], status: int = 0, then: str = "") -> str:
    """A command that writes these findings and exits."""
    lines = "".join(json.dumps(check) + "\n" for check in checks)
    code = f"import os, sys, pathlib; pathlib.Path(os.environ['HILGATE_OUT'], 'findings.jsonl').write_text({lines!r}); "
    return python(f"{code}{then or 'pass'}; sys.exit({status})")


def python(code: str) -> str:
    return f"python -c {shlex.quote(code)}"


def passing(name: str = "it works") -> dict[str, object]:
    return {"id": name, "outcome": "pass"}


def failing(name: str = "it breaks") -> dict[str, object]:
    return {"id": name, "outcome": "fail", "message": "max_abs_err 0.5 > 0.001\nsecond line"}


def skipped(name: str = "it waits") -> dict[str, object]:
    """A check that a cpu cannot run, for steps with MAY_LACK."""
    return {"id": name, "outcome": "did not run", "message": "needs gfx950", "labels": {"needs": "device:gfx950"}}


MAY_LACK = {"may_lack": {"device:gfx950": {"why": "who waits needs gfx950", "most": 1}}}


def undecided(name: str = "it depends") -> dict[str, object]:
    return {"id": name, "outcome": "inconclusive", "message": "n=50 cannot see 3 points"}


def step(name: str, command: str, **changes: object) -> PlannedStep:
    """A planned step; `changes` are fields of it or of its declared step, which is `name` unless there is a `key`."""
    placed: dict[str, object] = {
        "area": "samples",
        "device": "cpu",
        "queue": "amd-cpu",
        "reason": "samples/layout.py changed",
    }
    placed |= {field: value for field, value in changes.items() if field in PLACED}
    device = str(placed["device"])
    declared: dict[str, object] = {
        "key": str(changes.get("key", name)).removesuffix(f"-{device}"),
        "label": f"{name} samples",
        "command": command,
        "devices": (device,),
        "evidence": "findings",
        "timeout_minutes": 60 if "minutes" in changes else 1,
        "minutes": 1.0,
    }
    declared |= {field: value for field, value in changes.items() if field not in {*PLACED, "key"}}
    return PlannedStep.model_validate(placed | {"step": declared})


def changed(step: PlannedStep, **changes: object) -> PlannedStep:
    """The same step with other fields, of it or of its declared step; nothing is checked."""
    placed = {field: value for field, value in changes.items() if field in PLACED}
    return step.model_copy(update=placed).redeclared(**{k: v for k, v in changes.items() if k not in PLACED})


def plan(*steps: PlannedStep, **changes: object) -> Plan:
    values: dict[str, object] = {
        "created": dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC),
        "commit": COMMIT,
        "dirty": False,
        "base": "main",
        "profile": "gate",
        "changed_files": ("samples/layout.py",),
        "steps": steps,
        "omissions": (
            Omission(key="far-gfx950", area="samples", label="far", cause="not here", reason="needs gfx950"),
        ),
    }
    return Plan.model_validate(values | changes)


class Silent:
    """Progress that shows nothing and remembers the order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def started(self, step: PlannedStep, child: process.Child) -> None:  # noqa: ARG002
        self.events.append(("started", step.key))

    def finished(self, step: PlannedStep, attempt: results.Attempt, log: Path) -> None:  # noqa: ARG002
        self.events.append(("finished", step.key))

    def ended(self, meanwhile: str) -> None:
        self.events.append(("ended", meanwhile))

    def tick(self) -> None:
        pass


def runner(a_plan: Plan, folder: Path, **changes: Any) -> Runner:
    """A runner of a plan in a folder; `changes` are options of the run or arguments of the runner."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {each.name for each in dataclasses.fields(Options)} & changes.keys()
    options = Options(**({"cores": 2} | {name: changes.pop(name) for name in names}))
    build = new_build(a_plan, tree="t" * 64).model_copy(update={"environment": ENVIRONMENT})
    values = {"root": folder, "build": build, "progress": Silent(), "options": options}
    return Runner(a_plan, results_folder=folder, **(values | changes))


def results_of(a_plan: Plan, folder: Path, **changes: object) -> results.Recorded:
    """Run a plan, and read what it left."""
    runner(a_plan, folder, **changes).run()
    return results.read_all(folder, None, a_plan, plan_digest(a_plan), str(changes.get("job", "")))


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


AGENTS = """devices: {cpu: {}}
queues:
  amd-cpu: {device: cpu, gpus: 0, memory_gib: 16, tools: [no-such-tool]}
"""
"""Agents whose hosts have a program that no local machine has."""


def as_declared(step: dict[str, object]) -> dict[str, object]:
    """The keys of an area's file for the fields of a `Step`, which groups some of them otherwise."""
    fields = dict(step)
    agents = {name: fields.pop(name) for name in ("queues", "gpus", "network", "secrets", "provides") if name in fields}
    shown = {name: fields.pop(name) for name in ("columns", "matrix") if name in fields}
    requires = [*fields.pop("packages", ()), *(f"program:{tool}" for tool in fields.pop("tools", ()))]
    requires += [f"model:{model}" for model in fields.pop("models", ())]
    requires += ["checkout"] if fields.pop("checkout", False) else []
    grouped = {"agents": agents, "requires": requires, "evidence": {"kind": fields["evidence"]} | shown}
    return fields | {name: value for name, value in grouped.items() if value}


def write_repository(root: Path, commands: dict[str, str], **changes: object) -> Path:
    """A git checkout with one area of these commands (step key -> command), as the planner reads it."""
    sample = {"devices": ["cpu"], "evidence": "findings"}
    steps = [
        as_declared({"key": key, "label": f"{key} samples", "command": command} | sample | changes.get(key, {}))
        for key, command in commands.items()
    ]
    area = {
        "area": "samples",
        "title": "Samples",
        "why": "Samples work.",
        "paths": ["*"],
        "always": True,
        "steps": steps,
    }
    (root / "ci" / "areas").mkdir(parents=True, exist_ok=True)
    (root / "ci" / "agents.yaml").write_text(AGENTS)
    (root / "ci" / "areas" / "samples.yaml").write_text(json.dumps(area))
    (root / ".gitignore").write_text("results/\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "samples"]):
        git(root, *arguments)
    return root


_distribution = surroundings.distribution_digest


@functools.cache
def _of_this_environment(folder: Path) -> str:
    return _distribution(folder)


def _known_distribution(folder: Path) -> str:
    """What is installed here stays while tests run, and reading it takes longer than most of them."""
    return (_of_this_environment if folder.is_relative_to(sys.prefix) else _distribution)(folder)


_command = functools.cache(typer.main.get_command)
"""What typer makes of the program's functions: once for all commands of a session."""


def _unlimited(work: Callable[[], str], *_: object) -> str:
    """Stand-in for `limited`: plan and judge in this process."""
    return work()


def hilgate(root: Path, *arguments: str, limited: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a small repository, in this process: another one costs more than most tests.

    Planning forks, and a fork of this process lacks the threads that an import graph needs and an earlier test has
    started. So it is done here, unless it shall be `limited`; programs that are started (`support.flow`) always are.
    """
    out, errors = io.StringIO(), io.StringIO()
    status = None
    with (
        contextlib.chdir(root),
        mock.patch.dict(os.environ, environ(**env), clear=True),
        mock.patch.object(typer.main, "get_command", _command),
        contextlib.nullcontext() if limited else mock.patch.object(limits, "limited", _unlimited),
        mock.patch.object(surroundings, "distribution_digest", _known_distribution),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
    assert status is not None
    command = [sys.executable, "-m", "hilgate", *arguments]
    return subprocess.CompletedProcess(command, status, out.getvalue(), errors.getvalue())


def grows(*_: object, **__: object) -> None:
    """Work that takes memory without end."""
    everything = []
    while True:
        everything.append(bytearray(2**24))


def dies(*_: object, **__: object) -> None:
    """Work that kills its process."""
    os.kill(os.getpid(), signal.SIGSEGV)


def breaks(*_: object, **__: object) -> None:
    """Work with a bug."""
    raise ZeroDivisionError("of ours")


NOT_OURS = ("HILGATE", "BUILDKITE", "PYTEST")
"""Beginnings of the variables of an outer gate, agent and pytest."""


def environ(**env: str) -> dict[str, str]:
    """This process's environment with import paths that hold in another folder, and no trace of an outer gate."""
    path = os.pathsep.join(str(Path(part).resolve()) for part in sys.path if part)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
    return outer | {"PYTHONPATH": path, "COLUMNS": "80"} | env
