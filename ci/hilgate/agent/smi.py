"""What amd-smi says of the GPUs, read strictly: whatever is not understood is a problem and never a zero.

The commands and shapes are those of amd-smi in ROCm 6.0 to 7.2 (amdsmi_cli/amdsmi_commands.py and amdsmi_logger.py):

* the top level is a list of GPUs, or from ROCm 7 on for `static` and `metric` an object with the list in `gpu_data`;
* a quantity is `{"value": 283, "unit": "MB"}`, where MB is bytes // 2**20; a count is a plain number;
* `"N/A"` stands for whatever the library could not read, in place of the quantity or of a whole section.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from hilgate.agent import bounded
from hilgate.errors import Exit, HilgateError

SECONDS = 30.0
"""For one call. An idle machine of 8 GPUs answers in under 3; one whose driver hangs never does."""

COMMANDS = {
    "list": ("list", "--json"),
    "static": ("static", "--asic", "--json"),
    "metric": ("metric", "--mem-usage", "--ecc", "--temperature", "--json"),
}

SENSORS = ("hotspot", "mem", "edge")
"""MI300 has no edge sensor and says N/A there; at least one must give a number."""

ARCH_SPELLINGS = {"gfx9010": "gfx90a"}
"""Some releases print the stepping as a decimal number (rocm-smi and amd-smi of ROCm 6.2 on MI250)."""

_BDF = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ARCH = re.compile(r"gfx[0-9]+[0-9a-f]{2}")
_MEBIBYTES = {"B": 2**-20, "KB": 2**-10, "MB": 1.0, "GB": 2.0**10}


class AmdSmiError(HilgateError):
    """amd-smi is absent, hangs, fails, or says something that is not understood."""

    exit_status = Exit.SICK_NODE


@dataclass(frozen=True)
class Gpu:
    """One GPU (one die of an MI250)."""

    index: int
    bdf: str
    name: str
    arch: str
    vram_total_mib: int
    vram_used_mib: int
    ecc_uncorrectable: int
    temperature_c: float
    """The hottest of its sensors."""


def read(*, seconds: float = SECONDS) -> tuple[list[Gpu], list[str]]:
    """The GPUs that amd-smi describes fully, and a sentence for each fact that it does not give.

    Raises:
        AmdSmiError: There is nothing to read at all.
    """
    texts = {what: _ask(words, seconds) for what, words in COMMANDS.items()}
    return understand(texts["list"], texts["static"], texts["metric"])


def understand(listed: str, static: str, metric: str) -> tuple[list[Gpu], list[str]]:
    """`read` without the commands.

    Raises:
        AmdSmiError: One of the answers is no JSON of a known shape.
    """
    entries, facts, metrics = (
        _entries(text, what) for what, text in (("list", listed), ("static", static), ("metric", metric))
    )
    gpus: list[Gpu] = []
    problems: list[str] = []
    for index in sorted(entries):
        missing = [what for what, known in (("static", facts), ("metric", metrics)) if index not in known]
        if missing:
            problems.append(f"GPU {index}: amd-smi {' and '.join(missing)} does not mention it")
            continue
        unread: list[str] = []
        gpu = _gpu(index, entries[index], facts[index], metrics[index], unread)
        problems += [f"GPU {index}: {problem}" for problem in unread]
        if gpu is not None:
            gpus.append(gpu)
    strangers = sorted((set(facts) | set(metrics)) - set(entries))
    problems += [f"GPU {index}: amd-smi list does not mention it" for index in strangers]
    return gpus, problems


def _ask(words: tuple[str, ...], seconds: float) -> str:
    command = "amd-smi " + " ".join(words)
    ran = bounded.run(("amd-smi", *words), seconds)
    if ran.problem:
        raise AmdSmiError(ran.problem, where=command, remedy="install amd-smi (ROCm), or see dmesg for a hung driver")
    if ran.status != 0:
        raise AmdSmiError(
            f"amd-smi ended with status {ran.status}: {ran.said() or 'no words'}",
            where=command,
            remedy="run it by hand on this node",
        )
    return ran.out


def _entries(text: str, what: str) -> dict[int, dict[str, Any]]:
    """GPU index -> its object."""
    where = f"amd-smi {what} --json"
    remedy = "compare it with hilgate.agent.smi; an unknown amd-smi counts as a sick node"
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise AmdSmiError(
            f"the answer of amd-smi is not JSON: {error}: {text.strip()[:60]!r}", where=where, remedy=remedy
        ) from error
    if isinstance(data, dict) and "gpu_data" in data:
        data = data["gpu_data"]
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise AmdSmiError("the answer of amd-smi is no list of GPUs", where=where, remedy=remedy)
    found: dict[int, dict[str, Any]] = {}
    for entry in data:
        index = entry.get("gpu")
        if not _is_count(index) or index in found:
            raise AmdSmiError(f"a GPU has the index {index!r}, or has it twice", where=where, remedy=remedy)
        found[index] = entry
    return found


def _gpu(
    index: int, listed: dict[str, Any], static: dict[str, Any], metric: dict[str, Any], problems: list[str]
) -> Gpu | None:
    before = len(problems)
    bdf = str(listed.get("bdf", "absent")).lower()
    if not _BDF.fullmatch(bdf):
        problems.append(f"its PCI address is {listed.get('bdf', 'absent')!r}")
    asic = _section(static, "asic", problems)
    named = str(asic.get("target_graphics_version", "absent")).lower()
    arch = ARCH_SPELLINGS.get(named, named)
    if asic and not _ARCH.fullmatch(arch):
        problems.append(f"its gfx arch is {asic.get('target_graphics_version', 'absent')!r}")
    memory = _section(metric, "mem_usage", problems)
    total, used = (_mebibytes(memory, key, problems) if memory else 0 for key in ("total_vram", "used_vram"))
    ecc = _section(metric, "ecc", problems)
    errors = ecc.get("total_uncorrectable_count", "absent")
    if ecc and not _is_count(errors):
        problems.append(f"its count of uncorrectable ECC errors is {errors!r}")
    temperature = _temperature(metric, problems)
    if len(problems) > before:
        return None
    return Gpu(index, bdf, str(asic.get("market_name", "")), arch, total, used, errors, temperature)


def _section(entry: dict[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    section = entry.get(name, "absent")
    if isinstance(section, dict) and section:
        return section
    problems.append(f"{name} is {section!r}")
    return {}


def _mebibytes(memory: dict[str, Any], key: str, problems: list[str]) -> int:
    quantity = memory.get(key, "absent")
    if isinstance(quantity, dict):
        value, unit = quantity.get("value"), quantity.get("unit")
        if isinstance(value, int | float) and _is_number(value) and value >= 0 and unit in _MEBIBYTES:
            return int(value * _MEBIBYTES[unit])
    problems.append(f"{key} is {quantity!r}")
    return 0


def _temperature(metric: dict[str, Any], problems: list[str]) -> float:
    sensors = _section(metric, "temperature", problems)
    found = []
    for name in SENSORS:
        quantity = sensors.get(name, "N/A")
        if isinstance(quantity, dict) and _is_number(quantity.get("value")) and quantity.get("unit") == "C":
            found.append(float(quantity["value"]))
        elif quantity != "N/A":
            problems.append(f"its {name} temperature is {quantity!r}")
    if sensors and not found:
        problems.append(f"no sensor of {', '.join(SENSORS)} gives a temperature")
    return max(found, default=0.0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
