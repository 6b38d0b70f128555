# SPDX-License-Identifier: Apache-2.0
"""Digest of what a local run happens in, so that `--resume` continues no run in another environment.

It covers the machine, the interpreter, the limits of the process, what can be imported, and the environment variables
except those of a terminal. The files under test are covered by the fingerprint of the tree (`hilgate.git`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hilgate import git
from hilgate.plan.machine import environment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hilgate.plan.machine import Machine

MAY_DIFFER: Final = frozenset(
    {
        "_",
        "COLORTERM",
        "COLUMNS",
        "DISPLAY",
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

IMPORTABLE: Final = frozenset({".py", ".so", ".pth", ".zip", ".egg"})
DRIVERS: Final = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


def surroundings(root: Path, machine: Machine) -> str:
    """Return sha256 of what a run on this machine happens in."""
    tree = frozenset(f"{os.path.realpath(root)}/{name}" for name in git.tracked_files(root))
    path = [Path(part) for part in sys.path[not sys.flags.safe_path :] if part]  # without the command's own folder
    parts = {
        "machine": machine_digest(machine),
        "installed": {str(folder): installed(folder, tree) for folder in path},
        "variables": variables_digest(os.environ),
    }
    return _digest(parts)


def machine_digest(machine: Machine) -> str:
    """Return sha256 of hardware, kernel, drivers, interpreter and the limits of this process."""
    python = Path(os.path.realpath(sys.executable))
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    flags = {line for line in _text("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features"))}
    umask = [line for line in _text("/proc/self/status").splitlines() if line.startswith("Umask")]
    parts = {
        "machine": environment(machine).model_dump(mode="json", exclude={"cores"}),
        "flags": sorted(flags),
        "platform": [platform.platform(), platform.version(), sys.version, sys.prefix, str(python), stamp_of(python)],
        "drivers": {name: _text(name) for name in DRIVERS},
        "limits": {name: list(limits[name]) for name in sorted(limits)},
        "cores": len(os.sched_getaffinity(0)),
        "umask": umask,
    }
    return _digest(parts)


def installed(folder: Path, tree: Collection[str] = ()) -> dict[str, str]:
    """Return a digest of each distribution and of each other importable file at the top of a folder.

    Left out are the files of `tree` (absolute paths), which the tree's fingerprint covers.
    """
    found: dict[str, str] = {}
    place = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in {".dist-info", ".egg-info"}:
                found[path.name] = distribution_digest(path)
            elif path.suffix in IMPORTABLE and f"{place}/{path.name}" not in tree and not path.is_dir():
                found[path.name] = stamp_of(path)
    return found


def distribution_digest(folder: Path) -> str:
    """Return sha256 of a distribution's RECORD, and of size and time of each file that it lists."""
    text, place = _text(f"{folder}/RECORD"), os.fsencode(folder.parent)  # names as bytes: any locale can open them
    names = [line.rsplit(",", 2)[0].strip('"') for line in text.splitlines()]
    stamps = "\n".join(stamp_of(place + b"/" + name.encode()) for name in names if not name.endswith(".pyc"))
    return hashlib.sha256(f"{text}\n{stamps}\n{'' if text else stamp_of(folder)}".encode()).hexdigest()


def stamp_of(path: Path | bytes) -> str:
    """Return size and time of the last change of a file; `-` where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - there are 100,000 of them, and a Path for each takes a second
    except OSError:
        return "-"
    return f"{found.st_size}:{found.st_mtime_ns}"


def variables_digest(env: Mapping[str, str]) -> str:
    """Return sha256 of the variables that count, without this Python's place in PATH."""
    own = str(Path(sys.prefix, "bin"))
    path = os.pathsep.join(part for part in env.get("PATH", "").split(os.pathsep) if part != own)
    kept = {
        name: value for name, value in env.items() if name not in MAY_DIFFER and not name.startswith(MAY_DIFFER_FROM)
    }
    return _digest(kept | {"PATH": path})


def _text(name: str) -> str:
    try:
        return Path(name).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _digest(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
