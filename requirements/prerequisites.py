# SPDX-License-Identifier: Apache-2.0
"""Ask what the machine must have before anything is installed or run; the standard library alone, in under a second.

    python3 requirements/prerequisites.py [--json] [--gigabytes N]

`--json` prints a check a line, as `hilgate doctor` reads them. The exit status is 0, or 5 where something is missing.
The README's install lines and the packages of the CPU image are held against this table by a test.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

GIGABYTES = 6
"""Disk that an installation of the CPU builds takes; torch's CUDA build takes 3 more (`install.py` says so)."""

MEMORY_GIB = 4
"""Two engines at once, of 1.9 GiB each at their peak."""


@dataclass(frozen=True)
class Prerequisite:
    """Something that Debian and Fedora have a package for."""

    name: str
    present: Callable[[], bool]
    debian: str
    fedora: str
    why: str
    """What needs it."""
    cpu_build: bool = False
    """Whether only vLLM's CPU build needs it."""


@dataclass(frozen=True)
class Requirement:
    """What was asked for, and in one sentence what is missing; empty where nothing is."""

    name: str
    message: str
    prerequisite: Prerequisite | None = None


def _program(*names: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) for name in names)


def _library(name: str) -> Callable[[], bool]:
    def present() -> bool:
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    return present


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


def _headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


PREREQUISITES = (
    Prerequisite("git", _program("git"), "git", "git", "the plan compares with the merge base"),
    Prerequisite("make", _program("make"), "make", "make", "the README's commands are make's"),
    Prerequisite(
        "a C++ compiler (g++)", _program("g++", "clang++"), "g++", "gcc-c++", "torch.compile, which vLLM uses, needs it"
    ),
    Prerequisite(
        "Python's headers (Python.h)",
        _headers,
        "python3-dev",
        "python3-devel",
        "torch.compile, which vLLM uses, needs them",
    ),
    Prerequisite(
        "Python's ensurepip", _module("ensurepip"), "python3-venv", "python3", "the environment is made with it"
    ),
    Prerequisite(
        "ssh-keygen", _program("ssh-keygen"), "openssh-client", "openssh-clients", "tests sign a release with it"
    ),
    Prerequisite(
        "libnuma.so.1",
        _library("libnuma.so.1"),
        "libnuma1",
        "numactl-libs",
        "vLLM's CPU operators do not load without it",
        cpu_build=True,
    ),
)


def ask(folder: Path, gigabytes: float, *, cpu_build: bool = True) -> list[Requirement]:
    """Everything that is asked, in order.

    Args:
        folder: Where the environment is, or will be.
        gigabytes: Disk that must be free there.
        cpu_build: Whether vLLM's CPU build is what will run.
    """
    return [
        Requirement("Linux on x86-64", _platform()),
        *([Requirement("AVX2", _avx2())] if cpu_build else []),
        *(
            Requirement(one.name, "" if one.present() else f"{one.name} is missing: {one.why}", one)
            for one in PREREQUISITES
            if cpu_build or not one.cpu_build
        ),
        Requirement(f"{gigabytes:g} GB of disk", _disk(folder, gigabytes)),
        Requirement(f"{MEMORY_GIB} GiB of memory", _memory()),
        Requirement("a TMPDIR that runs programs", _temporary_folder()),
        Requirement("a HOME that can be written", _home()),
        *([Requirement("a path without spaces", _path(folder))] if cpu_build else []),
    ]


def install_lines(missing: list[Requirement]) -> list[str]:
    """The commands that install what is missing: Debian's and Fedora's; none where no package helps."""
    packages = [one.prerequisite for one in missing if one.prerequisite]
    if not packages:
        return []
    return [
        f"Debian, Ubuntu: sudo apt-get install {' '.join(package.debian for package in packages)}",
        f"Fedora: sudo dnf install {' '.join(dict.fromkeys(one.fedora for one in packages))}",
    ]


def report(missing: list[Requirement]) -> str:
    """What is missing and what to do, for a terminal."""
    lines = [f"  - {one.message}" for one in missing] + [f"  to do: {line}" for line in install_lines(missing)]
    return "\n".join(["this machine lacks what hilgate needs; nothing was installed or run", *lines])


def _platform() -> str:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"hilgate needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 28):
        return (
            f"the pinned wheels need glibc 2.28 or newer, and this system has {name or 'another C library'} {version}"
        )
    return ""


def _avx2() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return f"the processor cannot be asked for AVX2: {error}"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return "" if "avx2" in flags else "the processor has no AVX2, which vLLM's CPU build needs"


def _disk(folder: Path, gigabytes: float) -> str:
    place = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    return "" if free >= gigabytes else f"{free:.1f} GB of disk are free in {place}, and {gigabytes:g} are needed"


def _memory() -> str:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    control_group = Path("/sys/fs/cgroup/memory.max")  # of a container
    if control_group.is_file():
        limits += [int(word) for word in control_group.read_text(encoding="ascii").split() if word.isdigit()]
    found = min(limits) / 2**30
    # A machine that is sold with 4 GiB reports a little less.
    return "" if found > 0.9 * MEMORY_GIB else f"{found:.1f} GiB of memory are here, and {MEMORY_GIB} are needed"


def _temporary_folder() -> str:
    """torch.compile loads libraries from there, and tests run scripts there; hardened hosts mount it noexec."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script"
            script.write_text("#!/bin/sh\n", encoding="ascii")
            script.chmod(0o700)
            try:
                subprocess.run([script], check=True)
            except OSError:
                where = Path(folder).parent
                return f"{where} cannot run programs (mounted noexec): set TMPDIR to a folder that can"
    except OSError as error:
        return f"no temporary folder can be written ({error.strerror}): set TMPDIR to one that can"
    return ""


def _home() -> str:
    """Data sets, vLLM and Triton keep caches there."""
    home = Path("~").expanduser()
    return "" if os.access(home, os.W_OK) else f"{home} cannot be written: set HOME to a folder that can"


def _path(folder: Path) -> str:
    if not re.search(r"[\s:]", str(folder.absolute())):
        return ""
    return (
        f"the environment would be {str(folder.absolute())!r}, and torch.compile cannot link below a path with a space "
        "or a colon: make gate VENV=FOLDER names another place"
    )


def main() -> int:
    """Print what is missing, or with --json every finding as a line; exit status 0 or 5."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description="Ask what this machine must have.")
    parser.add_argument("--json", action="store_true", help="a check a line, also of what is here")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="disk that must be free")
    given = parser.parse_args()
    found = ask(Path(sys.prefix), given.gigabytes)
    missing = [one for one in found if one.message]
    if given.json:
        for one in found:
            message = ". ".join(filter(None, [one.message, *(install_lines([one]) if one.message else [])]))
            line = {"id": one.name, "outcome": "fail" if message else "pass", "message": message}
            sys.stdout.write(json.dumps(line) + "\n")
    elif missing:
        sys.stderr.write(f"error: {report(missing)}\n")
    return 5 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
