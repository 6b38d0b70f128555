# SPDX-License-Identifier: Apache-2.0
"""Reuse a pass at a desk: what it rests on, the store in `results/evidence/`, and the hook that records what was read.

A step runs with an audit hook in every Python process, which notes the files that it opens, the folders that it lists
and the other programs that it starts. A pass is stored with that and the hash of every file of the tree, under a MAC
whose key lies in the user's state folder. It counts again where the same step would run in the same environment, and
of the files that changed since, the project's own selection sends none to this step and the pass read none.
Everything else runs. Agents never reuse.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import hashlib
import hmac
import json
import os
import platform
import secrets
import shlex
import stat
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field, ValidationError

from hilgate import git
from hilgate.declare import imports
from hilgate.declare.load import load
from hilgate.model import Check, Noun, Outcome, Reused, StepRecord
from hilgate.plan.machine import environment
from hilgate.plan.select import select
from hilgate.run.results import Attempt
from hilgate.run.watch import is_isolated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hilgate.model import Key, Plan, PlannedStep
    from hilgate.plan.machine import Machine
    from hilgate.plan.select import Selection

LONGEST: Final = dt.timedelta(days=7)
"""How long a pass counts: every test reads the clock a little."""

FOLDER: Final = "evidence"
"""Of the store, below `results/`."""

CACHES: Final = frozenset(
    {".codeobjects", ".launches", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__"}
)
"""Folders that tools fill for themselves; what is in them makes nothing pass."""

PICKED_UP: Final = frozenset(
    {"conftest.py", "__init__.py", "__main__.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini",
     "tox.ini", "setup.cfg", "pyproject.toml"}
)  # fmt: skip
"""Files that are looked for by name, without a listing or an opening that could be seen."""

OF_A_TERMINAL: Final = (
    "COLUMNS", "DBUS_", "DISPLAY", "HILGATE_FRESH", "HILGATE_GATE", "LINES", "LS_COLORS", "MAKE", "MFLAGS", "OLDPWD",
    "PS1", "PWD", "SHLVL", "SSH_", "TERM", "TMUX", "VIRTUAL_ENV", "WINDOWID", "XDG_SESSION",
)  # fmt: skip
"""Environment variables, or their beginnings, that tell of who typed the command and from where."""


_SITE = """{watch}

watch({folder!r}, {root!r})
# The next sitecustomize of the path, which this file stands before; never one before it, which would come back here.
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
_spec = PathFinder.find_spec("sitecustomize", sys.path[sys.path.index({folder!r}) + 1 :])
if _spec and _spec.loader:
    _spec.loader.exec_module(module_from_spec(_spec))
"""


class Seen(Noun):
    """What a step was seen to rest on (`run.watch`)."""

    reads: tuple[str, ...] = ()
    """Files below the root that it opened, or looked for in vain."""
    listed: tuple[str, ...] = ()
    """Folders below the root that it listed; '.' for the root."""
    searched: tuple[str, ...] = ()
    """Folders below the root in which modules were looked for."""
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """File outside the tree that it read -> its size and the time of its last change."""
    unseen: str = ""
    """A program that it started and whose reads are not known; empty for none."""


class Evidence(Noun):
    """A pass and what it rests on: a file of the store."""

    schema_version: Literal[1] = 1
    of: str
    """`identity` of the step."""
    variables: str
    """sha256 of its environment variables."""
    machine: str
    """sha256 of the machine, the Python and what is installed."""
    root: str
    commit: str
    tree: dict[str, str]
    """The files when it ran (`git.snapshot`)."""
    seen: Seen
    record: StepRecord
    checks: tuple[Check, ...]


def identity(step: PlannedStep, plan: Plan) -> str:
    """sha256 of what would run: the declared step, its device and settings."""
    told = {"step": step.step.model_dump(mode="json"), "device": step.device, "env": step.env, "image": step.image,
            "arguments": step.arguments, "path": plan.python_path, "profile": plan.profile}  # fmt: skip
    return _digest(told)


@dataclass(frozen=True)
class Here:
    """What evidence is held against: this machine, and the files as they are now."""

    root: str
    machine: str
    commit: str
    tree: Mapping[str, str]
    now: dt.datetime
    selection: Callable[[frozenset[str], frozenset[str]], Selection]
    """The project's selection for (changed files, those of them that are new)."""


def why_not(found: Evidence, key: Key, of: str, variables: str, here: Here) -> str:
    """Why a pass does not count now for the declared step `key`; empty when it does."""
    for what, then, now in (
        ("another command, device or setting", found.of, of),
        ("other environment variables", found.variables, variables),
        ("another machine, or other packages installed", found.machine, here.machine),
        ("another folder", found.root, here.root),
    ):
        if then != now:
            return what
    if not here.now - LONGEST <= found.record.started <= here.now:
        return f"it is not of the last {LONGEST.days} days"
    for name, stamp in found.seen.elsewhere.items():
        if stamp_of(name) != stamp:
            return f"{name} changed, which it read"
    return touched(found.seen, found.tree, found.commit, key, here)


def touched(seen: Seen, then: Mapping[str, str], commit: str, key: Key, here: Here) -> str:
    """Which change of the files since a pass concerns it; empty for none.

    `seen` is what the pass rests on, `then` the files and `commit` what was checked out when it ran.
    """
    return next(_touching(seen, then, commit, key, here), "")


def _touching(seen: Seen, then: Mapping[str, str], commit: str, key: Key, here: Here) -> Iterator[str]:
    now = here.tree
    changed = frozenset(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    moved = then.keys() ^ now.keys()
    if seen.unseen and (changed or commit != here.commit):
        yield f"nobody saw what {seen.unseen} reads, and {min(changed, default='the commit')} changed"
    if not changed:
        return
    selection = here.selection(changed, frozenset(now.keys() - then.keys()))
    if key not in selection.omitted:
        yield selection.reasons.get(key, "nothing says which files it rests on")
    yield from (f"{name} changed, which it read" for name in sorted(changed.intersection(seen.reads)))
    named = sorted(name for name in moved if PurePosixPath(name).name in PICKED_UP)
    yield from (f"{name} came or went, and is found by its name" for name in named)
    for folders, importable in ((seen.listed, False), (seen.searched, True)) if moved else ():
        before, after = _entries(then, importable=importable), _entries(now, importable=importable)
        changes = (folder for folder in folders if before.get(folder) != after.get(folder))
        yield from (f"{folder} holds other files, and it looked there" for folder in changes)


def _entries(tree: Iterable[str], *, importable: bool) -> dict[str, set[str]]:
    """Folder -> names in it; of files alone that can be imported, and the folders that lead to them."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in tree:
        path = PurePosixPath(name)
        if not importable or path.suffix in {".py", ".pyc", ".so", ".pth"}:
            for inner, outer in zip((path, *path.parents), path.parents, strict=False):
                found[str(outer)].add(inner.name)
    return found


def stamp_of(name: str) -> str:
    """Size and time of the last change of a file; `-` where there is none."""
    try:
        found = Path(name).lstat()
    except OSError:
        return "-"
    return f"{found.st_size}:{found.st_mtime_ns}"


class Store:
    """The passes that this clone has kept. Without a key it keeps and finds none.

    Attributes:
        notes: What a person should know: evidence that is damaged, passes that cannot be kept.
    """

    def __init__(self, root: Path, plan: Plan, here: Here, key: bytes = b"") -> None:
        self.notes: list[str] = []
        self._root, self._plan, self._here, self._key = root, plan, here, key
        self._folder = root / "results" / FOLDER
        self._watching = tempfile.TemporaryDirectory(prefix="hilgate-reads-", ignore_cleanup_errors=True)

    def path(self, step: PlannedStep) -> Path:
        """Where the pass of a step lies."""
        return self._folder / f"{step.key}-{identity(step, self._plan)[:12]}.json"

    def find(self, step: PlannedStep, env: Mapping[str, str]) -> Attempt | None:
        """The pass of a step that still counts where it would run in this environment; None where it must run."""
        try:
            text = self.path(step).read_bytes() if self._key else b""
        except OSError:
            text = b""
        if not text:
            return None
        found = parse(text, self._key)
        if found is None:
            why = "its evidence is not as hilgate wrote it here (changed, cut off or copied)"
            self.notes.append(f"{step.key} runs: {why}: {self.path(step)}")
            return None
        of = identity(step, self._plan)
        if not reusable(step) or why_not(found, step.step.key, of, variables_of(env), self._here):
            return None
        mark = Reused(of=of, commit=found.commit, tree=git.fingerprint_of(found.tree))
        return Attempt(found.record.model_copy(update={"reused": mark}), found.checks)

    def watched(self, step: PlannedStep) -> str:
        """A folder that stands first on the import path of a step, so that its processes note what they read."""
        folder = Path(self._watching.name, step.key)
        (folder / "lists").mkdir(parents=True, exist_ok=True)
        hook = Path(__file__).with_name("watch.py").read_text(encoding="utf-8")
        text = _SITE.format(watch=hook, folder=str(folder), root=self._here.root)
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
        (folder / "whole").touch()
        return str(folder)

    def seen(self, step: PlannedStep, started: dt.datetime) -> tuple[Seen, str]:
        """What a step that has ended was seen to rest on, and why its pass cannot be kept (empty: it can)."""
        notes = [note for path in Path(self._watching.name, step.key, "lists").glob("*")
                 for note in path.read_bytes().split(b"\0") if note]  # fmt: skip
        program, *words = shlex.split(step.step.command)
        if program != "python" or is_isolated(words):  # what it reads itself is not seen
            notes.append(b"p " + os.fsencode(program))
        seen, problem = collect(map(os.fsdecode, notes), self._here, started)
        return seen, problem or ("" if Path(self._watching.name, step.key, "whole").exists() else "a note was lost")

    def keep(self, step: PlannedStep, attempt: Attempt, env: Mapping[str, str]) -> None:
        """Store a pass, whole or not at all; `notes` say why not."""
        if not reusable(step) or not self._key:
            return
        before = self._here
        seen, problem = self.seen(step, attempt.record.started)
        found = Evidence(
            of=identity(step, self._plan),
            variables=variables_of(env),
            machine=before.machine,
            root=before.root,
            commit=before.commit,
            tree=dict(before.tree),
            seen=seen,
            record=attempt.record,
            checks=attempt.checks,
        )
        after = replace(before, tree=git.snapshot(self._root))
        if problem := problem or touched(seen, before.tree, before.commit, step.step.key, after):
            self.notes.append(f"the pass of {step.key} is not kept for reuse: {problem} (while it ran)")
            return
        path = self.path(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n", encoding="utf-8")  # no change of the repository
            with tempfile.TemporaryDirectory(dir=self._folder) as folder, Path(folder, path.name).open("wb") as file:
                file.write(packed(found, self._key))
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
        except OSError as error:
            self.notes.append(f"the pass of {step.key} is not kept for reuse: {error.strerror}: {self._folder}")

    def drop(self, step: PlannedStep) -> None:
        """Forget each pass of a step: it has just run, and did not pass."""
        for path in self._folder.glob(f"{step.key}-{'[0-9a-f]' * 12}.json"):
            with contextlib.suppress(OSError):
                path.unlink()


def reusable(step: PlannedStep) -> bool:
    """Whether a pass of it may ever stand for another: it is whole, and rests on nothing that no key can hold."""
    unsure = step.step.network or step.step.secrets or step.step.provides
    return step.as_declared and not unsure and step.step.reuse


def packed(found: Evidence, key: bytes) -> bytes:
    """A file of the store: the evidence as one line of JSON, and its MAC as another."""
    body = found.model_dump_json().encode()
    return body + b"\n" + hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b"\n"


def parse(text: bytes, key: bytes) -> Evidence | None:
    """What `packed` wrote with this key and this version; None for anything else."""
    body, _, mac = text.partition(b"\n")
    if not hmac.compare_digest(mac, hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b"\n"):
        return None
    try:
        found = Evidence.model_validate_json(body)
    except ValidationError:
        return None
    right = found.record.outcome is Outcome.PASS and found.record.checks == len(found.checks)
    return found if right else None


def collect(notes: Iterable[str], here: Here, started: dt.datetime) -> tuple[Seen, str]:
    """Sort what was noted; also, why a pass with these notes cannot be kept (empty: it can).

    A file outside the tree that came or changed after the step began is taken for its own work, and one that changed
    after it was read leaves nobody who knows what was read.

    `notes` are of all processes of a step, `here` is the tree as it was before the step began.
    """
    slack = 20_000_000  # the kernel stamps files with a clock that ticks up to 10 ms late
    began, tree_of = (int(moment.timestamp() * 1e9) - slack for moment in (started, here.now))
    found: dict[str, set[str]] = defaultdict(set)
    elsewhere: dict[str, str] = {}
    problem = ""
    for note in notes:
        kind, _, words = note.partition(" ")
        if kind in {"p", "n"}:
            found[kind].add(words)
            continue
        times, _, name = words.partition(" ") if kind == "r" else ("", "", words)
        # `run.watch` gives absolute names without dots; there are a hundred thousand of them in a gate.
        below = name[len(here.root) + 1 :] or "." if f"{name}/".startswith(f"{here.root}/") else ""
        below = below if below.isascii() else below.encode(errors="surrogateescape").decode(errors="backslashreplace")
        size, _, rest = times.partition(":")
        changed, _, ctime = rest.partition(":")
        cached = not CACHES.isdisjoint(name.split("/"))
        foreign = cached or name.startswith(f"{sys.prefix}/")
        if kind != "r":
            found[kind] |= set() if foreign else {below}
        elif below in here.tree or (below and times == "-" and not foreign):
            found["r"].add(below)
            if times != "-" and int(ctime) >= tree_of:
                problem = problem or f"{below} changed"
        elif times == "-" or int(ctime) >= began or cached:
            continue
        elif f"{size}:{changed}" == stamp_of(name):
            elsewhere[name.encode(errors="surrogateescape").decode(errors="backslashreplace")] = f"{size}:{changed}"
        else:
            problem = problem or f"{name} changed, which it had read"
    if found["n"]:
        problem = problem or f"it called {min(found['n'])}"
    if not (found["r"] or elsewhere or found["p"]):
        problem = "nobody saw what it reads"
    reads, listed, searched = (tuple(sorted(found[kind])) for kind in "rlm")
    unseen = ", ".join(sorted(found["p"]))
    return Seen(reads=reads, listed=listed, searched=searched, elsewhere=elsewhere, unseen=unseen), problem


def open_store(root: Path, plan: Plan, machine: Machine) -> Store | None:
    """The store of this clone for a plan; None on agents and outside a checkout."""
    if not plan.desk or os.environ.get("BUILDKITE") == "true":
        return None
    here = here_of(root, plan, machine)
    try:
        return Store(root, plan, here, secret(root)) if here.tree else None
    except (OSError, RuntimeError) as error:
        found = Store(root, plan, here)
        found.notes.append(f"passes are neither kept nor reused: {error}")
        return found


def here_of(root: Path, plan: Plan, machine: Machine) -> Here:
    """This machine and the files of a checkout, with the selection that its areas declare."""
    now = dt.datetime.now(dt.UTC)
    declarations = functools.cache(lambda: load(root))  # read for changes alone
    graph = functools.cache(lambda: imports.build(root, declarations().project.python_path))

    @functools.cache
    def selection(changed: frozenset[str], appeared: frozenset[str]) -> Selection:
        python = any(name.endswith(".py") for name in changed)
        return select(declarations().areas, changed, graph() if python else None, appeared)

    return Here(os.path.realpath(root), machine_digest(machine), plan.commit, git.snapshot(root), now, selection)


def secret(root: Path) -> bytes:
    """The key of this user on this machine, made when there is none; it never lies in the repository.

    Raises:
        OSError: It cannot be made or read, or is open to others.
        RuntimeError: Nobody knows where the user's home is.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "hilgate" / "evidence.key"
    if path.resolve().is_relative_to(root.resolve()):
        raise PermissionError(f"their key would lie in the repository: {path}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 600
            file.write(secrets.token_bytes(32))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    with path.open("rb") as file:
        found, key = os.fstat(file.fileno()), file.read()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or len(key) != 32:
        raise PermissionError(f"their key is not 32 bytes that this user alone can read; remove it: {path}")
    return key


def machine_digest(machine: Machine) -> str:
    """sha256 of what is no file of the tree: host, kernel, drivers, Python, installed packages, hilgate's runner."""
    drivers = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
    files = ("/etc/machine-id", *drivers, *Path(__file__).parent.glob("*.py"))
    told = {
        "machine": environment(machine).model_dump(mode="json", exclude={"cores"}),
        "platform": [platform.platform(), platform.version(), sys.version, sys.prefix],
        "files": {str(name): _content(name) for name in sorted(map(str, files))},
        "installed": sorted(_installed()),
    }
    return _digest(told)


def _installed() -> Iterator[str]:
    """Each distribution and each .pth file on the import path, with the time at which it came."""
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            for path in Path(folder).iterdir():
                if path.suffix in {".dist-info", ".egg-info", ".egg-link", ".pth"}:
                    yield f"{path} {stamp_of(str(path))}"


def _content(name: str) -> str:
    try:
        return Path(name).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def variables_of(env: Mapping[str, str]) -> str:
    """sha256 of the environment variables of a step, without those of a terminal and this Python's place in PATH."""
    own = str(Path(sys.prefix, "bin"))
    path = os.pathsep.join(part for part in env.get("PATH", "").split(os.pathsep) if part != own)
    kept = {name: value for name, value in env.items() if not name.startswith(OF_A_TERMINAL) and name != "_"}
    return _digest(kept | {"PATH": path})


def _digest(told: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
