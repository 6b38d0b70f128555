# SPDX-License-Identifier: Apache-2.0
"""Ask what the machine must have before anything is installed or run; the standard library alone, in less than a second.

    python3 requirements/prerequisites.py [--json] [--folder FOLDER] [--gigabytes N]

`--json` prints one finding a line, as `hilgate doctor` reads them. The exit status is 0, or 5 where something is missing.
The README's install line is derived from this table, and so is the list of the CPU image (tests hold both against it).

Any Python 3 can read this file: an old one must get a sentence and not a syntax error.
"""

import ctypes
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile

OLDEST, NEWEST = (3, 11), (3, 13)
"""Versions of Python that the pins have wheels for."""

GIGABYTES = 6
"""Disk that an installation of the CPU builds takes; torch's CUDA build takes 3 more (`install.py` says so)."""

MEMORY_GIB = 4
"""Two engines at once, of 1.9 GiB each at their peak."""


class Prerequisite:
    """One thing that Debian and Fedora have a package for.

    `present` answers whether it is here; `why` says what needs it.
    """

    def __init__(self, name, present, debian, fedora, why):
        self.name, self.present, self.debian, self.fedora, self.why = name, present, debian, fedora, why


def program(*names):
    """Whether one of these programs is on the path."""
    return lambda: any(shutil.which(name) for name in names)


def library(name):
    """Whether the dynamic loader finds a shared library."""

    def present():
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    return present


def module(name):
    """Whether this Python can import a module; Debian packs some of the standard library apart."""

    def present():
        try:
            __import__(name)
        except ImportError:
            return False
        return True

    return present


def headers():
    """Whether Python.h of this Python is there."""
    return os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h"))


PREREQUISITES = (
    Prerequisite("git", program("git"), "git", "git", "the plan compares with the merge base"),
    Prerequisite("make", program("make"), "make", "make", "the README's commands are make's"),
    Prerequisite(
        "a C++ compiler (g++)",
        program("g++", "clang++"),
        "g++",
        "gcc-c++",
        "vLLM's torch.compile builds its CPU code with it",
    ),
    Prerequisite(
        "Python's venv and ensurepip", module("ensurepip"), "python3-venv", "python3", "the environment is made with it"
    ),
    Prerequisite(
        "Python's headers (Python.h)", headers, "python3-dev", "python3-devel", "vLLM's torch.compile includes them"
    ),
    Prerequisite(
        "libnuma.so.1",
        library("libnuma.so.1"),
        "libnuma1",
        "numactl-libs",
        "vLLM's CPU operators do not load without it",
    ),
)


class Finding:
    """A name, whether it is missing, and in one sentence why; `package` says which kind of remedy it has."""

    def __init__(self, name, message="", prerequisite=None):
        self.name, self.message, self.prerequisite = name, message, prerequisite


def ask(folder, gigabytes, cpu_build=True):
    """Everything that is asked, in order: a list of Finding, whose message is empty where nothing is missing."""
    return [
        Finding("Linux on x86-64", _platform()),
        Finding("Python {}.{} to {}.{}".format(*OLDEST, *NEWEST), python_problem(sys.version_info[:3])),
        *([Finding("AVX2", _avx2())] if cpu_build else []),
        *(
            Finding(one.name, "" if one.present() else "{} is missing: {}".format(one.name, one.why), one)
            for one in PREREQUISITES
            if cpu_build or one.name != "libnuma.so.1"
        ),
        Finding("{} GB of disk".format(gigabytes), _disk(folder, gigabytes)),
        Finding("{} GiB of memory".format(MEMORY_GIB), _memory()),
        Finding("a TMPDIR that runs programs", _temporary_folder()),
    ]


def python_problem(version):
    """Why this version of Python does not do; empty where it does."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return ""
    return "hilgate needs Python {}.{} to {}.{}, and {} is {}; name another: make gate PYTHON=python{}.{}".format(
        *OLDEST, *NEWEST, sys.executable, ".".join(map(str, version[:3])), *OLDEST
    )


def install_lines(missing):
    """The two lines that install what is missing: Debian's and Fedora's; none where no package helps."""
    packages = [one.prerequisite for one in missing if one.prerequisite]
    if not packages:
        return []
    return [
        "Debian, Ubuntu: sudo apt-get install " + " ".join(one.debian for one in packages),
        "Fedora:         sudo dnf install " + " ".join(dict.fromkeys(one.fedora for one in packages)),
    ]


def report(missing):
    """What is missing and what to do, as lines for a terminal."""
    lines = ["error: this machine lacks what hilgate needs; nothing was installed or run"]
    lines += ["  - " + one.message for one in missing]
    return lines + ["  " + line for line in install_lines(missing)]


def _platform():
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "hilgate needs Linux on x86-64, and this is {} on {}".format(platform.system(), platform.machine())
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 28):
        found = " ".join([name, version]).strip() or "another C library"
        return "the pinned wheels need glibc 2.28 or newer, and this system has {}".format(found)
    return ""


def _avx2():
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split(":")[1].split() for line in file if line.startswith("flags")), [])
    except OSError as error:
        return "the processor cannot be asked for AVX2: {}".format(error)
    return "" if "avx2" in flags else "the processor has no AVX2, which vLLM's CPU build needs"


def _disk(folder, gigabytes):
    while not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    free = shutil.disk_usage(folder).free / 1e9
    if free >= gigabytes:
        return ""
    return "{:.1f} GB of disk are free in {}, and {} are needed".format(free, folder, gigabytes)


def _memory():
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:  # of a container (cgroup v2)
        with open("/sys/fs/cgroup/memory.max") as file:
            limits += [int(word) for word in file.read().split() if word.isdigit()]
    except OSError:
        pass
    found = min(limits) / 2**30
    # A machine that is sold with 4 GiB reports a little less.
    return "" if found > 0.9 * MEMORY_GIB else "{:.1f} GiB of memory, and {} are needed".format(found, MEMORY_GIB)


def _temporary_folder():
    """Inductor loads libraries from there, and tests run scripts there; hardened hosts mount it noexec."""
    try:
        folder = tempfile.mkdtemp()
    except OSError as error:
        return "no temporary folder can be written ({}): set TMPDIR to one".format(error)
    try:
        script = os.path.join(folder, "script")
        with open(script, "w") as file:
            file.write("#!/bin/sh\n")
        os.chmod(script, stat.S_IRWXU)
        try:
            subprocess.check_call([script])
        except OSError:
            where = os.path.dirname(folder)
            return "{} cannot run programs (mounted noexec): set TMPDIR to a folder that can".format(where)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def main(words):
    """Print what is missing, or with --json every finding as a line; exit status 0 or 5."""
    options = dict(zip(words, words[1:]))
    found = ask(options.get("--folder", "."), float(options.get("--gigabytes", GIGABYTES)))
    missing = [one for one in found if one.message]
    if "--json" in words:
        for one in found:
            remedy = "; ".join(install_lines([one]))
            outcome = "fail" if one.message else "pass"
            message = one.message + (". " + remedy if remedy and one.message else "")
            print(json.dumps({"id": one.name, "outcome": outcome, "message": message}))
    elif missing:
        sys.stderr.write("\n".join(report(missing)) + "\n")
    return 5 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
