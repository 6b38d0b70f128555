# SPDX-License-Identifier: Apache-2.0
"""Reuse a pass locally: it counts while nothing that selects its step has changed, in the same environment.

The key of a pass is the content of the files that select the step (`plan.select.basis_of`, which the planner asks too),
the step with its command and settings, and the environment: each installed distribution, what else can be imported, the
interpreter, the machine, the limits and the variables. A step whose outcome rests on anything else (the clock, the
network, git's refs, files outside the tree or ignored in it) says `reuse: false`. A run that does not pass takes the
step's passes away, and a failure is remembered under its key: a later pass over it says so. Agents never reuse.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import resource
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import ValidationError

from hilgate import git
from hilgate.declare import imports
from hilgate.declare.load import load
from hilgate.model import StrictModel
from hilgate.model.record import Check, FailedBefore, Outcome, Reused, StepRecord
from hilgate.plan.machine import environment
from hilgate.plan.select import basis_of
from hilgate.run.outcome import crashed
from hilgate.run.results import Attempt

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Mapping, Sequence

    from hilgate.model.declaration import Step
    from hilgate.model.plan import Plan, PlannedStep
    from hilgate.plan.machine import Machine
    from hilgate.plan.select import Basis

FOLDER: Final = "evidence"
"""Of the store, below `results/`."""

MOST: Final = 200
"""Passes and failures that are kept, those that were used last."""

MAY_DIFFER: Final = frozenset(
    {
        "_",
        "COLORTERM",
        "COLUMNS",
        "DISPLAY",
        "HILGATE_FRESH",
        "HILGATE_GATE",
        "LINES",
        "LS_COLORS",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MAKEOVERRIDES",
        "MAKE_TERMERR",
        "MAKE_TERMOUT",
        "MFLAGS",
        "OLDPWD",
        "PS1",
        "PWD",
        "SHLVL",
        "TERM",
        "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION",
        "TMUX",
        "TMUX_PANE",
        "VIRTUAL_ENV",
        "VIRTUAL_ENV_PROMPT",
        "WINDOWID",
    }
)
"""Variables of whoever typed the command; every other one counts."""

MAY_DIFFER_FROM: Final = ("DBUS_", "SSH_", "XDG_SESSION_")
"""Beginnings of such variables."""

IMPORTABLE: Final = frozenset({".py", ".pyc", ".so", ".pth", ".zip", ".egg"})
DRIVERS: Final = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


class Kept(StrictModel):
    """A pass or a failure and what it holds for: a file of the store."""

    schema_version: Literal[2] = 2
    key: str
    """`key_of` the step, its files and its environment."""
    commit: str
    tree: str
    """Fingerprint of all files when it ran."""
    record: StepRecord
    checks: tuple[Check, ...]


def identity(step: PlannedStep, plan: Plan) -> str:
    """sha256 of what would run: the declared step, its device and settings."""
    parts = {
        "step": step.step.model_dump(mode="json"),
        "device": step.device,
        "env": step.env,
        "image": step.image,
        "arguments": step.arguments,
        "path": plan.python_path,
        "profile": plan.profile,
    }
    return _digest(parts)


def key_of(of: str, files: str, surroundings: str) -> str:
    """What a pass holds for: sha256 of the step's `identity`, of the files that select it, and of its environment."""
    return _digest({"step": of, "files": files, "environment": surroundings})


def files_digest(basis: Basis, tree: Mapping[str, str]) -> str:
    """sha256 of the content of the files that select a step, and of the names that do by coming or going."""
    contents = {name: tree[name] for name in basis.contents if name in tree}
    return _digest({"contents": contents, "names": sorted(basis.names)})


@dataclass(frozen=True)
class Here:
    """The files of a checkout as they are now, with what of them selects each step.

    Attributes:
        tree: File -> sha256 of its content (`git.snapshot`).
        machine: `machine_digest` of this machine.
    """

    root: Path
    commit: str
    machine: str
    tree: Mapping[str, str]

    def files(self, key: str) -> tuple[str, ...]:
        """The files that select a declared step."""
        return tuple(sorted(self._bases[key].contents))

    def digest(self, key: str) -> str:
        """`files_digest` of a declared step."""
        return files_digest(self._bases[key], self.tree)

    @functools.cached_property
    def _bases(self) -> Mapping[str, Basis]:
        declarations = load(self.root)
        graph = imports.build(self.root, declarations.project.python_path)
        return basis_of(declarations.areas, self.tree, graph)


class Store:
    """The passes and failures that this clone has kept.

    Attributes:
        notes: What a person should know: files that are damaged, passes that cannot be kept.
    """

    def __init__(self, plan: Plan, here: Here) -> None:
        self.notes: list[str] = []
        self._plan, self._here = plan, here
        self._folder = here.root / "results" / FOLDER
        self._folders: dict[Path, dict[str, str]] = {}

    def find(self, step: PlannedStep, env: Mapping[str, str]) -> Attempt | None:
        """The pass of a step that counts where it would run in this environment; None where it must run."""
        if not reusable(step) or self.failed_before(step, env):
            return None
        found = self._read(step, env, Outcome.PASS)
        if found is None:
            return None
        mark = Reused(of=identity(step, self._plan), commit=found.commit, tree=found.tree)
        return Attempt(found.record.model_copy(update={"reused": mark}), found.checks)

    def failed_before(self, step: PlannedStep, env: Mapping[str, str]) -> FailedBefore | None:
        """How a step failed over these files in this environment, in an earlier run; None where it has not."""
        found = self._read(step, env, Outcome.FAIL)
        if found is None:
            return None
        failed = (check.id for check in found.checks if check.outcome is Outcome.FAIL)
        return FailedBefore(when=found.record.started, checks=tuple(failed))

    def settle(self, step: PlannedStep, attempt: Attempt, env: Mapping[str, str]) -> None:
        """A step has run: keep its pass, or take its passes away and remember the failure; `notes` say why not."""
        if attempt.record.outcome is not Outcome.PASS:
            for path in self._folder.glob(f"{step.key}-*.{_NAMES[Outcome.PASS]}.json"):
                with contextlib.suppress(OSError):
                    path.unlink()
            if attempt.record.outcome is Outcome.FAIL or crashed(attempt.record):
                self._write(step, attempt, env, Outcome.FAIL)
        elif attempt.record.failed_before is None and reusable(step):
            if problem := self._changed(step, attempt.record.started):
                self.notes.append(f"the pass of {step.key} is not kept for reuse: {problem} (while it ran)")
            else:
                self._write(step, attempt, env, Outcome.PASS)

    def _changed(self, step: PlannedStep, started: dt.datetime) -> str:
        """Which of the files that select a step changed since it was started; empty for none."""
        before, key = self._here, step.step.key
        after = replace(before, tree=git.snapshot(before.root))
        if after.tree != before.tree and after.digest(key) != before.digest(key):
            names = [n for n in before.tree.keys() | after.tree.keys() if before.tree.get(n) != after.tree.get(n)]
            return f"{min(names)} changed"
        began, place = int(started.timestamp() * 1e9), os.fsencode(before.root) + b"/"
        touched = (name for name in before.files(key) if _changed_at(place + name.encode()) >= began)
        return next((f"{name} was written" for name in touched), "")

    def key(self, step: PlannedStep, env: Mapping[str, str]) -> str:
        """What a pass or a failure of a step in this environment holds for."""
        path = [Path(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
        return key_of(identity(step, self._plan), self._here.digest(step.step.key), self._environment(path, env))

    def surroundings(self) -> str:
        """sha256 of what the command itself runs in."""
        return self._environment((), os.environ)

    def _environment(self, path: Sequence[Path], env: Mapping[str, str]) -> str:
        """sha256 of the machine, what can be imported (from `path` first) and the variables."""
        installed = {str(folder): self._importable(folder) for folder in (*path, *own_path())}
        return _digest({"machine": self._here.machine, "installed": installed, "variables": variables_of(env)})

    def _importable(self, folder: Path) -> dict[str, str]:
        """`importable`, asked once for each folder."""
        if folder not in self._folders:
            place = os.path.relpath(folder, self._here.root)
            start = "" if place == "." else f"{place}/"
            ours = {name[len(start) :].partition("/")[0] for name in self._here.tree if name.startswith(start)}
            self._folders[folder] = importable(folder, ours)
        return self._folders[folder]

    def _path(self, step: PlannedStep, key: str, outcome: Outcome) -> Path:
        return self._folder / f"{step.key}-{key[:16]}.{_NAMES[outcome]}.json"

    def _read(self, step: PlannedStep, env: Mapping[str, str], outcome: Outcome) -> Kept | None:
        key = self.key(step, env)
        path = self._path(step, key, outcome)
        try:
            text = path.read_bytes()
            os.utime(path)  # so that what is used stays
        except OSError:
            return None
        found = parse(text, key)
        if found is None:
            self.notes.append(f"{step.key} runs: {path} is not as hilgate wrote it (changed or cut off); it is deleted")
            with contextlib.suppress(OSError):
                path.unlink()
        return found

    def _write(self, step: PlannedStep, attempt: Attempt, env: Mapping[str, str], outcome: Outcome) -> None:
        key = self.key(step, env)
        tree = git.fingerprint_of(self._here.tree)
        kept = Kept(key=key, commit=self._here.commit, tree=tree, record=attempt.record, checks=attempt.checks)
        path = self._path(step, key, outcome)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n", encoding="utf-8")  # no change of the repository
            with tempfile.TemporaryDirectory(dir=self._folder) as folder, Path(folder, path.name).open("wb") as file:
                file.write(packed(kept))
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            for old in sorted(self._folder.glob("*.json"), key=lambda one: one.stat().st_mtime)[:-MOST]:
                old.unlink(missing_ok=True)
        except OSError as error:
            what = "pass" if outcome is Outcome.PASS else "failure"
            self.notes.append(f"the {what} of {step.key} is not kept: {error.strerror}: {self._folder}")


_NAMES: Final = {Outcome.PASS: "pass", Outcome.FAIL: "fail"}


def reusable(step: PlannedStep) -> bool:
    """Whether a pass of it may ever stand for another: it is whole, and rests on nothing that no key can hold."""
    return step.as_declared and may_be_reused(step.step)


def may_be_reused(step: Step) -> bool:
    """Whether a declared step says that its outcome rests on its files and its environment alone."""
    return step.reuse and not (step.network or step.secrets or step.provides)


def packed(kept: Kept) -> bytes:
    """A file of the store: one line of JSON, and its sha256 as another. It guards against damage alone."""
    body = kept.model_dump_json().encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def parse(text: bytes, key: str) -> Kept | None:
    """What `packed` wrote for this key; None for anything else."""
    body, _, digest = text.partition(b"\n")
    if digest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        return None
    try:
        found = Kept.model_validate_json(body)
    except ValidationError:
        return None
    return found if found.key == key and found.record.checks == len(found.checks) else None


def open_store(root: Path, plan: Plan, machine: Machine) -> Store | None:
    """The store of this clone for a plan; None on agents and outside a checkout."""
    if not plan.local or os.environ.get("BUILDKITE") == "true":
        return None
    here = Here(root, plan.commit, machine_digest(machine), git.snapshot(root))
    return Store(plan, here) if here.tree else None


def machine_digest(machine: Machine) -> str:
    """sha256 of this machine and of the process: hardware, kernel, drivers, interpreter, limits, hilgate's runner."""
    python = Path(os.path.realpath(sys.executable))
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    parts = {
        "machine": environment(machine).model_dump(mode="json", exclude={"cores"}),
        "flags": sorted({one for one in _text("/proc/cpuinfo").splitlines() if one.startswith(("flags", "Features"))}),
        "platform": [platform.platform(), platform.version(), sys.version, sys.prefix, str(python), stamp_of(python)],
        "files": {name: _text(name) for name in (*DRIVERS, *sorted(map(str, Path(__file__).parent.glob("*.py"))))},
        "limits": {name: list(limits[name]) for name in sorted(limits)},
        "cores": len(os.sched_getaffinity(0)),
        "umask": next((line for line in _text("/proc/self/status").splitlines() if line.startswith("Umask")), ""),
    }
    return _digest(parts)


def own_path() -> list[Path]:
    """Where this interpreter imports from, without the folder that the command itself put first."""
    return [Path(part) for part in sys.path[not sys.flags.safe_path :] if part]


def importable(folder: Path, ours: Collection[str] = ()) -> dict[str, str]:
    """What can be imported from a folder, but for names that are of the tree: distributions, other names at its top.

    Of a distribution its RECORD counts, and size and time of each file that it lists; of another file its own.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name in ours:
                continue
            if path.suffix in {".dist-info", ".egg-info"}:
                found[path.name] = _distribution(path)
            elif path.suffix in IMPORTABLE and not path.is_dir():
                found[path.name] = stamp_of(path)
            elif path.name.isidentifier() and path.is_dir() and path.name != "__pycache__":
                found[path.name] = ""
    return found


def _distribution(folder: Path) -> str:
    """sha256 of a distribution: its RECORD, and size and time of each file that this lists."""
    text, place = _text(f"{folder}/RECORD"), os.fsencode(folder.parent)  # names as bytes: any locale can open them
    names = [line.rsplit(",", 2)[0].strip('"') for line in text.splitlines()]
    stamps = "\n".join(stamp_of(place + b"/" + name.encode()) for name in names if not name.endswith(".pyc"))
    return hashlib.sha256(f"{text}\n{stamps}\n{'' if text else stamp_of(folder)}".encode()).hexdigest()


def stamp_of(path: Path | bytes) -> str:
    """Size and time of the last change of a file; `-` where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - there are 100,000 of them, and a Path for each takes a second
    except OSError:
        return "-"
    return f"{found.st_size}:{found.st_mtime_ns}"


def _changed_at(path: bytes) -> int:
    """When a file or what is known of it changed last, in ns; no program can set that time."""
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def _text(name: str) -> str:
    try:
        return Path(name).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def variables_of(env: Mapping[str, str]) -> str:
    """sha256 of the environment variables of a step, without those of a terminal and this Python's place in PATH."""
    own = str(Path(sys.prefix, "bin"))
    path = os.pathsep.join(part for part in env.get("PATH", "").split(os.pathsep) if part != own)
    kept = {
        name: value for name, value in env.items() if name not in MAY_DIFFER and not name.startswith(MAY_DIFFER_FROM)
    }
    return _digest(kept | {"PATH": path})


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
