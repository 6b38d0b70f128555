# SPDX-License-Identifier: Apache-2.0
"""The first hour on a GPU that has not run this repository: `python3 benchmarks/first_hour.py`, in vLLM's ROCm image.

Runs the parts below one after the other and packs logs, reports and what the machine is into one file, which can be
read elsewhere. A part that fails, crashes, hangs or cannot start is reported, and the next part begins.

Exit status: 0 every part passed, 1 a part failed, 4 a part did not run or nothing could be written, 2 misuse, 130
interrupted (what there is was packed).
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 80
TAIL = 12
"""Lines of a part's log that the summary repeats."""
GRACE_S = 10
"""Between asking a part to end and killing it."""
RESERVE_S = 60
"""Seconds of the hour that looking at the machine and packing take."""
PASSED, FAILED, NOT_RUN = "passed", "failed", "did not run"
VARIABLES = (
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "HSA_NO_SCRATCH_RECLAIM",
    "TRITON_INTERPRET",
    "TRITON_HIP_USE_ASYNC_COPY",
    "PYTORCH_ROCM_ARCH",
    "VLLM_ROCM_USE_AITER",
    "GPU_ARCHS",
    "PAGEDKV_PACKING",
)
"""Environment variables that change what is measured. No others are packed: one might be a secret."""
TOOLS = {
    "rocm-smi": ("rocm-smi", "--showproductname", "--showdriverversion", "--showmeminfo", "vram"),
    "amd-smi": ("amd-smi", "version"),
    "rocminfo": ("rocminfo",),
    "nvidia-smi": ("nvidia-smi",),
    "kernel": ("uname", "-srm"),
    "processor": ("lscpu",),
    "disk": ("df", "-h", "."),
}
PROBE = """
import json, torch
gpu = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if gpu else None
print(json.dumps({
    "gpu": torch.cuda.get_device_name(0) if gpu else "",
    "arch": "" if not gpu else properties.gcnArchName if torch.version.hip
        else f"sm_{properties.major}{properties.minor}",
    "gpus": torch.cuda.device_count() if gpu else 0,
    "hip": getattr(torch.version, "hip", None) or "", "cuda": getattr(torch.version, "cuda", None) or "",
}))
"""


@dataclass(frozen=True)
class Part:
    """One command of the hour. In the command `{out}` is the part's folder in the pack."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    """The limits of all parts add up to less than the hour."""
    evidence: str = "output"
    """What a pass must have left: `output`, or a file in `{out}`: `junit.xml` or one whose name ends with `.jsonl`."""
    needs: tuple[str, ...] = ()
    """`gpu`, or a package that must be importable."""
    quick: tuple[str, ...] = ()
    """Arguments that `--quick` adds, for a fraction of the part."""


@dataclass
class Result:
    """What came of a part."""

    name: str
    outcome: str
    seconds: float
    what: str
    command: str
    tail: list[str]


TIMED = (
    "prefill 4 x 4k",
    "extend 512 on 16k",
    "decode bs64 8k",
    "mla 16 heads bs1 8k",
    "mla 16 heads bs32 8k",
    "mla 16 heads bs128 8k",
    "prefill 4 x 4k 8 / 1 heads",
    "prefill 4 x 4k d256",
    "prefill 1 x 16k",
    "scan 16 x 512 128 heads d64 n128",
)
"""Cases of `benchmarks.run`, ordered by what an answer is worth: docs/how-to/first-hour.md says what each decides."""

PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml={out}/junit.xml")
TESTS = ("torch", "triton", "pytest", "pytest_timeout", "hypothesis")


def _tests(name: str, limit_s: float, paths: tuple[str, ...], quick: str, *more: str) -> Part:
    return Part(name, (*PYTEST, *paths), limit_s, "junit.xml", (*TESTS, *more), ("-k", quick))


def _timing(index: int, case: str) -> Part:
    # A process for each case: a memory fault ends the process, and would end the other cases too.
    command = (PYTHON, "-m", "benchmarks.run", "--case", case, "--out", "{out}/times.jsonl")
    return Part(f"time-{index}", command, 60, "times.jsonl", ("gpu", "torch", "triton", "pydantic"))


PARTS = (
    Part("selfcheck", (PYTHON, "-m", "pagedkv.selfcheck"), 120, needs=("torch", "triton")),
    _tests("kernels-cache", 180, ("tests/kernels/cache",), "test_gather and float16"),
    _tests("kernels-attention", 420, ("tests/kernels/attention",), "test_merge"),
    _tests("kernels-fp8", 240, ("tests/kernels/fp8",), "test_formats"),
    _tests("kernels-mla", 240, ("tests/kernels/mla",), "test_schedule"),
    _tests("kernels-ssd", 180, ("tests/kernels/ssd",), "float16"),
    _tests("kernels-offsets", 120, ("tests/kernels/test_int64.py",), "merged"),
    _tests("vllm-kernels", 480, ("tests/vllm_kernels",), "test_gather and bs16 and h2", "vllm"),
    _tests("five-reports", 240, ("tests/operators",), "ROCM_AITER_MLA", "vllm"),
    _tests("family", 480, ("tests/families/test_families.py", "--family", "granite-4.0-h"), "decode", "vllm"),
    Part(
        "gate",
        (PYTHON, "-m", "hileval", "gate", "pocket-hybrid", "--out", "{out}"),
        240,
        "findings.jsonl",
        ("torch", "vllm", "lm_eval", "scipy"),
    ),
    *(_timing(index, case) for index, case in enumerate(TIMED, start=1)),
)


def clean(text: str) -> str:
    """Return text without what a terminal would obey: a log may hold anything, and is read on another machine."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def tail_of(log: Path) -> list[str]:
    """Return the last lines of a log that say something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"no log: {error.strerror}"]
    return [clean(line).rstrip() for line in text.splitlines() if line.strip()][-TAIL:]


def _junit(file: Path) -> tuple[str, str]:
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ET.parse(file).getroot().iter("testsuite"):  # noqa: S314  the part's own pytest wrote it
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    bad = counts["failures"] + counts["errors"]
    right = counts["tests"] - bad - counts["skipped"]
    words = f"{right} passed" + (f", {bad} failed" if bad else "")
    words += f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return (FAILED if bad else PASSED if right else NOT_RUN), words


def _lines(file: Path) -> tuple[str, str]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if rows and "ours_us" in rows[0]:
        timed = rows[0]
        ours, peer = (f"{timed[name]:,.0f} us" if timed[name] else "none" for name in ("ours_us", "peer_us"))
        words = f"{timed['case']}: {ours}, peer {peer}" + (f"; {timed['trouble']}" if timed["trouble"] else "")
        return (PASSED if timed["ours_us"] else FAILED), words
    bad = [check for check in rows if check["outcome"] != "pass"]
    words = f"{len(rows) - len(bad)} of {len(rows)} checks passed"
    words += f"; {bad[0]['id']}: {bad[0].get('message', '')}" if bad else ""
    return (PASSED if rows and not bad else NOT_RUN), words


def _evidence(part: Part, folder: Path) -> tuple[str, str]:
    """Return what the part left says: an outcome, and words for it."""
    if part.evidence == "output":
        tail = tail_of(folder / "log.txt")
        return (PASSED, tail[-1]) if tail else (NOT_RUN, "wrote nothing")
    file = folder / part.evidence
    if not file.exists():
        return NOT_RUN, f"wrote no {part.evidence}"
    try:
        return _junit(file) if file.suffix == ".xml" else _lines(file)
    except (ET.ParseError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return NOT_RUN, f"{part.evidence} cannot be read: {error}"


def judge(part: Part, status: int, folder: Path) -> tuple[str, str]:
    """Return a part's outcome and why: a pass needs status 0 and evidence, status 1 is a failure, a signal a crash."""
    outcome, words = _evidence(part, folder)
    if status < 0:
        with contextlib.suppress(ValueError):
            return FAILED, f"crashed: {signal.Signals(-status).name}"
        return FAILED, f"crashed: signal {-status}"
    if status == 1:
        return FAILED, words if outcome == FAILED else f"exit status 1; {words}"
    if status:
        return NOT_RUN, f"{words}; exit status {status}"
    return outcome, words


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with everything that it started. A process that a hung GPU holds cannot be killed: go on."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived the part, say an engine


class Hour:
    """One run: its folder, what the machine is, and what came of each part."""

    def __init__(self, folder: Path, minutes: float, *, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.deadline = time.monotonic() + minutes * 60 - min(RESERVE_S, minutes * 6)
        self.started = time.time()
        self.results: list[Result] = []
        self.environment: dict[str, Any] = {}

    def write(self, name: str, text: str) -> None:
        """Write a file of the pack."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def ask(self, *command: str, limit_s: float = 20) -> str:
        """Return what a command prints; where it cannot, a line that begins with `?`."""
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self.variables(), timeout=limit_s, capture_output=True, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"? {type(error).__name__}: {command[0]}"
        if done.returncode:
            return f"? exit status {done.returncode}: {done.stderr.decode(errors='replace').strip()[-300:]}"
        return done.stdout.decode(errors="replace").strip()

    def variables(self) -> dict[str, str]:
        """Return the environment of a part: ours is importable, and without a GPU kernels are interpreted."""
        ours = [self.folder / "plugin", *(ROOT / name for name in ("ci", "kernels", "evals", ""))]
        path = os.pathsep.join([*map(str, ours), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.environment and not self.environment["gpu"]:
            given.setdefault("TRITON_INTERPRET", "1")
        return given

    def look(self) -> None:
        """Note what the machine is: GPU, driver, versions, commit."""
        # What an interrupted installation leaves has no name.
        packages = {
            distribution.name: distribution.version
            for distribution in importlib.metadata.distributions()
            if distribution.name
        }
        if "pagedkv" not in packages:  # vLLM finds its plugins by their entry points
            declared = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text(encoding="utf-8"))["project"]
            name, target = next(iter(declared["entry-points"]["vllm.general_plugins"].items()))
            self.write("plugin/pagedkv-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pagedkv\nVersion: 0\n")
            self.write("plugin/pagedkv-0.dist-info/entry_points.txt", f"[vllm.general_plugins]\n{name} = {target}\n")
        answer = self.ask(PYTHON, "-c", PROBE, limit_s=60)
        found = {"gpu": "", "arch": "", "gpus": 0, "hip": "", "cuda": "", "torch": clean(answer)[-200:]}
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(answer.splitlines()[-1])
        git = ("git", "-c", "safe.directory=*")  # a container's user does not own the checkout
        self.environment = {
            **found,
            "python": sys.version.split()[0],
            "packages": dict(sorted(packages.items())),
            "commit": self.ask(*git, "rev-parse", "HEAD"),
            "changed": self.ask(*git, "status", "--porcelain").splitlines(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        }
        self.write("environment/environment.json", json.dumps(self.environment, indent=1) + "\n")
        for name, command in TOOLS.items():
            if shutil.which(command[0]):
                self.write(f"environment/{name}.txt", self.ask(*command) + "\n")

    def lacking(self, part: Part) -> str:
        """Return what keeps the part from running; empty where nothing does."""
        if "gpu" in part.needs and not self.environment["gpu"]:
            return "torch sees no GPU"
        missing = [name for name in part.needs if name != "gpu" and not importlib.util.find_spec(name)]
        if missing:
            return f"no {', '.join(missing)} beside this Python"
        return "" if self.deadline - time.monotonic() > 1 else "no time was left"

    def run(self, part: Part) -> None:
        """Run one part within its limit and note what came of it."""
        folder = self.folder / "parts" / part.name
        command = [word.replace("{out}", str(folder)) for word in (*part.command, *(part.quick if self.quick else ()))]
        shown = shlex.join(word.replace(str(folder), "OUT") for word in command)
        outcome, what, began = NOT_RUN, self.lacking(part), time.monotonic()
        if not what:
            try:
                outcome, what = self.execute(part, command, folder)
            except OSError as error:
                what = f"could not start: {error.strerror}: {error.filename}"
            except KeyboardInterrupt:
                self.keep(Result(part.name, NOT_RUN, time.monotonic() - began, "interrupted", shown, []))
                raise
        silent = outcome == PASSED or not (folder / "log.txt").exists()
        tail = [] if silent else tail_of(folder / "log.txt")
        self.keep(Result(part.name, outcome, time.monotonic() - began, clean(what), shown, tail))

    def execute(self, part: Part, command: list[str], folder: Path) -> tuple[str, str]:
        """Start the part in a session of its own, wait, and judge what it left."""
        folder.mkdir(parents=True)
        limit = min(part.limit_s, self.deadline - time.monotonic())
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.variables(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return NOT_RUN, f"ran past its {limit:.0f} s"
            finally:
                _end(process)
        return judge(part, status, folder)

    def keep(self, result: Result) -> None:
        """Note a result, show it, and write the summary, so that a lost machine leaves what was done."""
        self.results.append(result)
        print(row(result), flush=True)
        self.write("summary.md", summary(self))
        values = {"started": self.started, "quick": self.quick, "environment": self.environment}
        values["parts"] = [asdict(one) for one in self.results]
        self.write("summary.json", json.dumps(values, indent=1) + "\n")

    @property
    def status(self) -> int:
        """Exit status of what has been kept."""
        outcomes = {result.outcome for result in self.results}
        return 1 if FAILED in outcomes else 0 if outcomes == {PASSED} else 4


def row(result: Result) -> str:
    """Return one line of the table."""
    line = f"    {result.name:<18}{result.outcome:<12}{result.seconds:>5.0f} s  {result.what}"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def machine(found: dict[str, Any]) -> list[str]:
    """Return the lines of a summary that say what the machine is."""
    gpu = f"{found['gpu']} ({found['arch']}), {found['gpus']} of them" if found["gpu"] else ""
    lines = [f"    GPU      {gpu or 'none: kernels are interpreted'}"]
    lines += [f"    {name:<9}{found[name]}" for name in ("hip", "cuda", "python") if found[name]]
    for name in ("torch", "triton", "vllm", "aiter"):
        versions = [found["packages"].get(one) for one in (name, f"{name}-cpu", f"amd-{name}")]
        lines.append(f"    {name:<9}{next(filter(None, versions), 'missing')}")
    changed = f", {len(found['changed'])} files changed" if found["changed"] else ""
    return [*lines, f"    commit   {found['commit'][:12]}{changed}", ""]


def summary(hour: Hour) -> str:
    """Return the summary in Markdown of at most 80 columns, which a terminal shows as well."""
    counts = [
        f"{sum(one.outcome == outcome for one in hour.results)} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN)
    ]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(hour.started))
    lines = ["# The first hour" + (", quick" if hour.quick else ""), "", f"{', '.join(counts)}. Began {when}.", ""]
    if hour.environment:  # an interrupt may come before the machine is known
        lines += machine(hour.environment)
    lines += [*map(row, hour.results), ""]
    for result in hour.results:
        if result.outcome != PASSED and (result.tail or len(row(result)) == WIDTH):
            lines += [f"## {result.name}: {result.outcome}", "", *textwrap.wrap(result.what, WIDTH), ""]
            for line in result.tail:
                lines += textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="      ")[:4]
            lines += ["", *textwrap.wrap(f"Again: {result.command}", WIDTH, break_on_hyphens=False), ""]
    return "\n".join(lines)


def pack(folder: Path) -> Path:
    """Pack a folder into the file beside it, and remove the folder."""
    file = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder, "first-hour")
    shutil.rmtree(folder, ignore_errors=True)
    return file


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> int:
    """Read the command line, run the parts, pack, return the exit status."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, prog="first_hour.py", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a fraction of each part")
    parser.add_argument("--minutes", type=float, default=60, help="time for the whole (default: 60)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "first-hour", help="folder for the file")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= 24 * 60:
        parser.error("--minutes takes more than 0 and at most 1440")
    folder = given.out.resolve() / time.strftime("first-hour-%Y%m%d-%H%M%S", time.gmtime())
    hour = Hour(folder, given.minutes, quick=given.quick)
    for number in (signal.SIGTERM, signal.SIGHUP):  # `docker stop`, and a connection that is lost
        signal.signal(number, _interrupt)
    interrupted = False
    try:
        try:
            folder.mkdir(parents=True)
            hour.look()
            for part in parts:
                hour.run(part)
        except KeyboardInterrupt:
            interrupted = True
            for part in parts[len(hour.results) :]:
                hour.keep(Result(part.name, NOT_RUN, 0, "interrupted before it", shlex.join(part.command), []))
        hour.write("environment/dmesg.txt", hour.ask("dmesg")[-40_000:])
        print(f"\n{summary(hour)}\npacked: {pack(folder)}")
    except OSError as error:
        print(
            f"error: {error}\n  where: {folder}\n  to do: make room, or name another folder with --out", file=sys.stderr
        )
        return 4
    return 130 if interrupted else hour.status


if __name__ == "__main__":
    sys.exit(main())
