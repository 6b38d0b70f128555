# SPDX-License-Identifier: Apache-2.0
"""GPUs of this host: what amd-smi and the driver report, which processes hold them, and whether they compute correctly.

amd-smi is read strictly: whatever is not understood is a problem and never a zero. The commands and shapes are those of
amd-smi in ROCm 6.0 to 7.2 (amdsmi_cli/amdsmi_commands.py and amdsmi_logger.py):

* the top level is a list of GPUs, or from ROCm 7 on for `static` and `metric` an object with the list in `gpu_data`;
* a quantity is `{"value": 283, "unit": "MB"}`, where MB is bytes // 2**20; a count is a plain number;
* `"N/A"` stands for whatever the library could not read, in place of the quantity or of a whole section.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_host import clone, host
from hilgate.errors import DeclarationError
from hilgate.names import PROJECT_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SMI_SECONDS = 30.0
"""Limit of one call. An idle machine of 8 GPUs answers in under 3; one whose driver hangs never does."""

SMI_COMMANDS = {
    "list": ("list", "--json"),
    "static": ("static", "--asic", "--json"),
    "metric": ("metric", "--mem-usage", "--ecc", "--temperature", "--json"),
}

SENSORS = ("hotspot", "mem", "edge")
"""MI300 has no edge sensor and says N/A there; at least one must give a number."""

ARCH_SPELLINGS = {"gfx9010": "gfx90a"}
"""Some releases print the stepping as a decimal number (rocm-smi and amd-smi of ROCm 6.2 on MI250)."""

ALLOWED_HOLDERS = "HILGATE_ALLOWED_HOLDERS"
"""Variable of the agent: names of programs that always have the GPUs open and compute nothing (a metrics exporter)."""

RENDER_NODES = "HILGATE_RENDER_NODES"
"""Variable of the agent: its own GPUs (`renderD128 renderD136`) where several agents share a machine. All without
it."""

SELFCHECK = "HILGATE_SELFCHECK"
"""Variable of the agent: command that runs the project's selfcheck with the agent's GPUs, in a container of a ROCm
image where the host itself has no torch and Triton. Options are appended."""

SELFCHECK_SECONDS = 180.0
"""Import of torch, compilation for one arch and 8 GPUs in turn; a hung GPU never answers."""

ELEMENTS = 1 << 18
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
MULTIPLIER = 0x45D9F3B
ROUNDS = 3
WEIGHTS = 65521
SIDE = 32

_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_ARCH = re.compile(r"gfx[0-9]+[0-9a-f]{2}", re.IGNORECASE)
_MEBIBYTES = {"B": 2**-20, "KB": 2**-10, "MB": 1.0, "GB": 2.0**10}
_DEVICE = re.compile(r"/dev/(kfd|dri/renderD[0-9]+)(?: \(deleted\))?")


@dataclass(frozen=True)
class GpuStatus:
    """One GPU (one die of an MI250), as amd-smi describes it."""

    index: int
    bdf: str
    name: str
    arch: str
    vram_total_mib: int
    vram_used_mib: int
    ecc_uncorrectable: int
    temperature_c: float
    """The hottest of its sensors."""
    ecc_deferred: int = 0
    """Errors that ECC could not mend, in words that nothing has read yet."""
    compute_units: int = 0
    """0 where amd-smi does not say."""


@dataclass(frozen=True)
class SmiProblem:
    """A fact of a GPU that amd-smi does not give, and the PCI address of that GPU; empty where that is not known."""

    bdf: str
    text: str


def read_smi(*, seconds: float = SMI_SECONDS) -> tuple[list[GpuStatus], list[SmiProblem]]:
    """The GPUs that amd-smi describes fully, and a sentence for each fact that it does not give.

    Raises:
        SickNodeError: amd-smi is absent, hangs, fails, or prints something that is not understood.
    """
    answers = {}
    for what, words in SMI_COMMANDS.items():
        ran = host.run(("amd-smi", *words), seconds)
        if ran.failure:
            raise host.SickNodeError(
                ran.failure,
                where="amd-smi " + " ".join(words),
                remedy="install amd-smi (ROCm), run it by hand on this node, or see dmesg for a hung driver",
            )
        answers[what] = ran.out
    return parse_smi(answers)


def parse_smi(answers: Mapping[str, str]) -> tuple[list[GpuStatus], list[SmiProblem]]:
    """`read_smi` of what the commands `list`, `static` and `metric` printed.

    Raises:
        SickNodeError: One of the answers is no JSON of a known shape.
    """
    entries = {}
    for what, text in answers.items():
        try:
            entries[what] = _entries(text)
        except ValueError as error:
            raise host.SickNodeError(
                f"the answer of amd-smi is not understood: {error}: {text.strip()[:60]!r}",
                where=f"amd-smi {what} --json",
                remedy="compare it with agent_host.gpus; an unknown amd-smi counts as a sick node",
            ) from error
    _lend_sensors(entries)
    gpus: list[GpuStatus] = []
    problems: list[SmiProblem] = []
    for index in sorted(set().union(*entries.values())):
        bdf = _known_bdf(entries["list"].get(index, {}))
        missing = [what for what in SMI_COMMANDS if index not in entries[what]]
        if missing:
            text = f"GPU {index}: amd-smi {' and '.join(missing)} does not mention it"
            problems.append(SmiProblem(bdf, text))
            continue
        entry = entries["metric"][index] | entries["static"][index] | entries["list"][index]
        facts: dict[str, Any] = {}
        unread: list[str] = []
        for name, read in _FACTS.items():
            try:
                facts[name] = read(entry)
            except ValueError as error:
                unread.append(f"GPU {index}: {error}")
        problems += [SmiProblem(bdf, text) for text in dict.fromkeys(unread)]
        if not unread:
            gpus.append(GpuStatus(index, **facts))
    return gpus, problems


def _entries(text: str) -> dict[int, dict[str, Any]]:
    """GPU index -> its object; ValueError says what is wrong with the answer."""
    data = json.loads(text)
    if isinstance(data, dict) and "gpu_data" in data:
        data = data["gpu_data"]
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise ValueError("no list of GPUs")
    entries = {host.expect_number(entry.get("gpu"), "the index of a GPU"): entry for entry in data}
    if len(entries) != len(data):
        raise ValueError("two GPUs of the same index")
    return entries


def _lend_sensors(entries: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
    """Give each partition what amd-smi says of heat and ECC for the first partition of its GPU alone (function 0)."""
    metric_of = {_known_bdf(entry): entries["metric"].get(index, {}) for index, entry in entries["list"].items()}
    for index, entry in entries["list"].items():
        address, _, function = _known_bdf(entry).rpartition(".")
        if function in {"", "0"}:
            continue
        for section in ("ecc", "temperature"):
            lent = entries["metric"].get(index, {})
            of_first = metric_of.get(f"{address}.0", {}).get(section)
            if lent.get(section) == "N/A" and isinstance(of_first, dict):
                lent[section] = of_first


def _section(entry: dict[str, Any], name: str) -> dict[str, Any]:
    section = entry.get(name, "absent")
    if isinstance(section, dict) and section:
        return section
    raise ValueError(f"{name} is {section!r}")


def _bdf(entry: dict[str, Any]) -> str:
    return host.expect_text(entry.get("bdf", "absent"), "its PCI address", _BDF).lower()


def _known_bdf(entry: dict[str, Any]) -> str:
    """Its PCI address; empty where amd-smi does not say it."""
    try:
        return _bdf(entry)
    except ValueError:
        return ""


def _name(entry: dict[str, Any]) -> str:
    return str(_section(entry, "asic").get("market_name", ""))


def _ecc(entry: dict[str, Any]) -> int:
    count = _section(entry, "ecc").get("total_uncorrectable_count", "absent")
    return host.expect_number(count, "its count of uncorrectable ECC errors")


def _deferred(entry: dict[str, Any]) -> int:
    return _number_or_0(_section(entry, "ecc"), "total_deferred_count", "its count of deferred ECC errors")


def _compute_units(entry: dict[str, Any]) -> int:
    return _number_or_0(_section(entry, "asic"), "num_compute_units", "its number of compute units")


def _number_or_0(section: dict[str, Any], name: str, what: str) -> int:
    """A number of a section; 0 where amd-smi does not count it."""
    value = section.get(name, "N/A")
    return 0 if value == "N/A" else host.expect_number(value, what)


def _arch(entry: dict[str, Any]) -> str:
    named = _section(entry, "asic").get("target_graphics_version", "absent")
    arch = host.expect_text(named, "its gfx arch", _ARCH).lower()
    return ARCH_SPELLINGS.get(arch, arch)


def _mebibytes(entry: dict[str, Any], key: str) -> int:
    quantity = _section(entry, "mem_usage").get(key, "absent")
    if isinstance(quantity, dict):
        value: Any = quantity.get("value")
        unit = str(quantity.get("unit"))
        if _is_number(value) and value >= 0 and unit in _MEBIBYTES:
            return int(value * _MEBIBYTES[unit])
    raise ValueError(f"{key} is {quantity!r}")


def _total_vram(entry: dict[str, Any]) -> int:
    return _mebibytes(entry, "total_vram")


def _used_vram(entry: dict[str, Any]) -> int:
    return _mebibytes(entry, "used_vram")


def _temperature(entry: dict[str, Any]) -> float:
    sensors = _section(entry, "temperature")
    temperatures = []
    for name in SENSORS:
        quantity = sensors.get(name, "N/A")
        if isinstance(quantity, dict) and _is_number(quantity.get("value")) and quantity.get("unit") == "C":
            if quantity["value"] <= 0:  # what a sensor gives that cannot be read
                raise ValueError(f"its {name} temperature is {quantity['value']:g} C")
            temperatures.append(float(quantity["value"]))
        elif quantity != "N/A":
            raise ValueError(f"its {name} temperature is {quantity!r}")
    if not temperatures:
        raise ValueError(f"no sensor of {', '.join(SENSORS)} gives a temperature")
    return max(temperatures)


def _is_number(value: Any) -> bool:
    """Neither true nor false, NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**60


_FACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bdf": _bdf,
    "name": _name,
    "arch": _arch,
    "vram_total_mib": _total_vram,
    "vram_used_mib": _used_vram,
    "ecc_uncorrectable": _ecc,
    "temperature_c": _temperature,
    "ecc_deferred": _deferred,
    "compute_units": _compute_units,
}
"""Field of `GpuStatus` -> how it is read."""


@dataclass(frozen=True)
class RenderNode:
    """A GPU in the driver's topology: e.g. renderD128, its PCI address, and the driver's name for it in sysfs."""

    name: str
    bdf: str
    gpu_id: str


def topology(kfd: Path = host.KFD) -> list[RenderNode]:
    """The GPUs that the driver lists and this user may read, in the driver's order, which is HIP's.

    Raises:
        SickNodeError: One that this user may read cannot be read: which GPUs there are is not known.
    """
    found = []
    folder = kfd / "topology" / "nodes"
    try:
        names = sorted(int(node.name) for node in folder.iterdir() if node.name.isdigit()) if folder.is_dir() else []
        for number in names:
            try:
                text = (folder / str(number) / "properties").read_text(encoding="ascii")
                gpu_id = (folder / str(number) / "gpu_id").read_text(encoding="ascii").strip()
            except PermissionError:  # a GPU that the agent's device cgroup leaves to others
                continue
            facts = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
            minor, place, domain = (int(facts.get(key, 0)) for key in ("drm_render_minor", "location_id", "domain"))
            if minor:  # 0 for a node of processors
                # Bits 31:28 number the partitions of a GPU (kfd_topology.c), which amd-smi shows as functions of it.
                function = place >> 28 & 0xF or place & 7
                bdf = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{function}"
                found.append(RenderNode(f"renderD{minor}", bdf, gpu_id))
    except (OSError, ValueError) as error:
        raise host.SickNodeError(
            f"the driver's list of GPUs cannot be read: {error}", where=str(folder), remedy="see dmesg on this node"
        ) from error
    return found


def own_nodes(env: Mapping[str, str], kfd: Path = host.KFD) -> tuple[RenderNode, ...]:
    """The GPUs that are this agent's alone; empty where it has the whole machine.

    Raises:
        DeclarationError: The variable names a GPU that the driver does not list, or one twice.
        SickNodeError: The driver's list cannot be read.
    """
    mine = _names(env.get(RENDER_NODES, ""))
    listed = {node.name: node for node in topology(kfd)} if mine else {}
    unknown = [name for name in mine if name not in listed]
    if unknown or len(set(mine)) != len(mine):
        raise DeclarationError(
            f"{', '.join(unknown)} not among the driver's: {', '.join(listed) or 'none'}"
            if unknown
            else "it names a GPU twice",
            where=RENDER_NODES,
            remedy="name the render nodes of this agent's GPUs (ls /dev/dri) in its environment hook",
        )
    return tuple(listed[name] for name in mine)


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def shared_problems(env: Mapping[str, str], proc: Path = host.PROC) -> list[str]:
    """A sentence for each other agent of this machine that has a GPU of this one: both would find it in use."""
    mine, problems = set(_names(env.get(RENDER_NODES, ""))), []
    for process, text in host.of_other_agents(RENDER_NODES, env.get("BUILDKITE_AGENT_NAME", ""), proc).items():
        theirs = set(_names(text))
        if both := sorted(mine & theirs if mine else theirs):
            names = host.printable(", ".join(both))
            problems.append(f"{names} is another agent's too, by its {RENDER_NODES}: process {process}")
    return problems


def find_holders(
    own: tuple[RenderNode, ...] = (), *, allowed: str = "", proc: Path = host.PROC, kfd: Path = host.KFD
) -> tuple[list[str], list[str]]:
    """A sentence for each process that holds a GPU, and for what could not be seen.

    Args:
        own: GPUs of this agent alone; empty for any GPU.
        allowed: Names of programs to leave out, separated by spaces.
        proc: /proc.
        kfd: The driver's own list has processes of other users, and zombies that it cannot let go of.
    """
    running = host.processes(proc)
    opened = {pid: _open_devices(proc, pid) for pid in running}
    hidden = sum(devices is None for devices in opened.values())
    # Every program of ROCm has /dev/kfd open, so on a shared machine only the render nodes tell.
    ours = {f"/dev/dri/{node.name}" for node in own}
    held = {pid: devices & ours if own else devices for pid, devices in opened.items() if devices}
    problems = []
    try:
        for pid in _driver_processes(kfd, own):
            held.setdefault(pid, set()).add("/dev/kfd")
    except OSError:
        if hidden:
            problems.append(
                f"{hidden} processes of other users may hold a GPU: the driver does not list its own in {kfd}/proc"
            )
    names, spared = set(allowed.split()), host.untouchable(running)
    holders = []
    for pid, devices in sorted(held.items()):
        process = running.get(pid) or host.Process(pid, 0, 0, host.ZOMBIE, 0, "gone")
        if not devices or pid in spared or process.name in names:
            continue
        job, what = host.job_of(proc, pid), " and ".join(sorted(devices))
        of_job = f" of job {job}" if job else ""
        if process.state == host.ZOMBIE:
            parent = running.get(process.parent) or process.parent
            holders.append(f"zombie {pid} ({process.name}){of_job} keeps {what}; its parent is {parent}")
        else:
            holders.append(f"process {process}{of_job} holds {what}")
    return holders, problems


def _open_devices(proc: Path, pid: int) -> set[str] | None:
    """GPU device nodes that a process has open; None when this user may not look."""
    opened: set[str] = set()
    # A zombie whose other threads still run shows its files only below these.
    for folder in (proc / str(pid) / "fd", *(proc / str(pid) / "task").glob("*/fd")):
        try:
            entries = list(folder.iterdir())
        except PermissionError:
            return None
        except OSError:
            continue
        for entry in entries:
            try:
                target = str(entry.readlink())
            except OSError:
                continue
            if match := _DEVICE.fullmatch(target):
                opened.add(f"/dev/{match[1]}")
    return opened


def _driver_processes(kfd: Path, own: tuple[RenderNode, ...]) -> list[int]:
    """Processes that the driver keeps memory or queues for; OSError when it does not say."""
    entries = [entry for entry in (kfd / "proc").iterdir() if entry.name.isdigit()]
    return [int(entry.name) for entry in entries if not own or any(_uses(entry, node) for node in own)]


def _uses(entry: Path, node: RenderNode) -> bool:
    """Whether memory of this GPU is in use; a file that cannot be read counts as use, one that is absent does not."""
    try:
        return int((entry / f"vram_{node.gpu_id}").read_text(encoding="ascii")) > 0
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def selfcheck(env: Mapping[str, str]) -> str:
    """The command of the tiny kernel: the agent's, else the `selfcheck` that its own clone declares; empty for none."""
    return env.get(SELFCHECK) or _project(env).selfcheck


def _project(env: Mapping[str, str]) -> clone.Project:
    return clone.project(clone.read(clone.repository(env), PROJECT_FILE))


def selfcheck_problems(env: Mapping[str, str], gpus: int, *, elements: int = ELEMENTS) -> list[str]:
    """Run a tiny kernel on the agent's GPUs; a sentence for each that did not compute what it should.

    The seed is new each time, so no answer can be stored. `pagedkv.selfcheck` says what is computed and why a broken
    GPU gets it wrong; the checksums are computed again here, and the two share nothing but that description.
    """
    seed, command = secrets.randbits(31), selfcheck(env)
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"the tiny kernel: {command!r} is no command: {error}"]
    inside = dict(env)
    if not env.get(SELFCHECK):
        own, path = clone.repository(env), _project(env).python_path or (".",)
        inside["PYTHONPATH"] = os.pathsep.join(str(own / entry) for entry in path)
    ran = host.run([*words, f"--seed={seed}", f"--elements={elements}"], SELFCHECK_SECONDS, env=inside)
    if ran.failure:
        return [f"the tiny kernel: {ran.failure}"]
    try:
        answer: Any = json.loads([line for line in ran.out.splitlines() if line.strip()][-1])
        devices = [
            (int(d["index"]), str(d["name"]), int(d["words"], 16), int(d["product"], 16)) for d in answer["devices"]
        ]
    except (IndexError, KeyError, TypeError, ValueError):
        return [f"the tiny kernel printed nothing that is understood: {ran.last_line[:80]!r}"]
    expected = expected_checksums(seed, elements)
    problems = [] if len(devices) == gpus else [f"the tiny kernel ran on {len(devices)} GPUs of {gpus}"]
    for index, name, *sums in devices:
        for what, got, right in zip(("integers", "matrix product"), sums, expected, strict=True):
            if got != right:
                wrong = f"computed {got:016x} of its {what}, not {right:016x}"
                problems.append(f"the tiny kernel: GPU {index} ({host.printable(name)}) {wrong}")
    return problems


def expected_checksums(seed: int, elements: int) -> tuple[int, int]:
    """The checksums of the words and of the product; see `pagedkv.selfcheck`."""
    words = sum(_mixed(index ^ seed) * (index % WEIGHTS + 1) for index in range(elements))
    left, right = (
        [[_mixed(start + row * SIDE + column ^ seed) % 17 - 8 for column in range(SIDE)] for row in range(SIDE)]
        for start in (0, SIDE * SIDE)
    )
    columns = list(zip(*right, strict=True))
    product = 0
    for row in range(SIDE):
        for column in range(SIDE):
            entry = sum(a * b for a, b in zip(left[row], columns[column], strict=True))
            product += entry * (row * SIDE + column + 1)
    return words & MASK64, product & MASK64


def _mixed(word: int) -> int:
    for _ in range(ROUNDS):
        word = (word ^ word >> 16) * MULTIPLIER & MASK32
    return word ^ word >> 16
