"""`health-before.json` and `health-after.json` as an agent's hooks leave them, and as they are when hooks fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hilgate.model import GpuHealth, Health
from hilgate.names import CPU

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from hilgate.model import PlannedStep

VRAM_MIB = 196_592
"""Of an MI300X as its driver reports it: 192 GiB less what the firmware keeps."""

IDLE_MIB = 285
RESET = "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!"
GARBAGE = ("", "{", '{"healthy": true}', "null", "[]", "\x00\x01")
"""What may lie where a health file should."""


def write(
    folder: Path,
    step: PlannedStep,
    host: str,
    moment: Literal["before", "after"],
    taken: dt.datetime,
    *,
    trouble: str = "",
    lost: int = 0,
) -> None:
    """Write a health file; `trouble` makes the node unfit and says why, `lost` is how many of its GPUs are gone."""
    gpus = range((step.gpus or 1) - lost) if step.device != CPU else ()
    record = Health(
        step=step.key,
        moment=moment,
        host=host,
        agent=f"{host}-1",
        taken=taken,
        seconds=4.0,
        healthy=not trouble,
        problems=(trouble,) if trouble else (),
        gpus=tuple(
            GpuHealth(
                index=index,
                bdf=f"0000:{5 + index:02x}:00.0",
                name="AMD Instinct",
                vram_total_mib=VRAM_MIB,
                vram_used_mib=IDLE_MIB,
                ecc_uncorrectable=0,
                temperature_c=41.0,
            )
            for index in gpus
        ),
        dmesg=(RESET,) if trouble and moment == "after" else (),
    )
    path(folder, moment).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def spoil(folder: Path, number: int) -> None:
    """Put something unreadable where a health file was."""
    moment: Literal["before", "after"] = "before" if number % 2 else "after"
    path(folder, moment).write_text(GARBAGE[number // 2 % len(GARBAGE)], encoding="utf-8")


def lose(folder: Path, number: int) -> None:
    """Lose a health file."""
    path(folder, "before" if number % 2 else "after").unlink(missing_ok=True)


def path(folder: Path, moment: Literal["before", "after"]) -> Path:
    """Where a health file lies."""
    return folder / f"health-{moment}.json"
