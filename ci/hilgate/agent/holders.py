"""Who has a GPU open: programs that run, and zombies that the driver cannot let go of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.agent import paths, processes
from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ALLOWED = "HILGATE_ALLOWED_HOLDERS"
"""Of the agent: names of programs that always have the GPUs open and compute nothing (a metrics exporter)."""

RENDER_NODES = "HILGATE_RENDER_NODES"
"""Of the agent: its own GPUs (`renderD128 renderD136`) where several agents share a machine. All without it."""

_NODE = re.compile(r"/dev/(kfd|dri/renderD[0-9]+)(?: \(deleted\))?")


@dataclass(frozen=True)
class Card:
    """A GPU in the driver's topology."""

    render: str
    """e.g. renderD128"""
    bdf: str
    gpu_id: str
    """The driver's name for it in sysfs."""


@dataclass(frozen=True)
class Holder:
    """A process that has a GPU open."""

    process: processes.Process
    parent: str
    nodes: tuple[str, ...]
    job: str

    def __str__(self) -> str:
        what = " and ".join(self.nodes)
        job = f" of job {self.job}" if self.job else ""
        if self.process.state == processes.ZOMBIE:
            return f"zombie {self.process.pid} ({self.process.name}){job} keeps {what}; its parent is {self.parent}"
        return f"process {self.process}{job} holds {what}"


def own_cards(env: Mapping[str, str], kfd: Path = paths.KFD) -> tuple[Card, ...]:
    """The cards that are this agent's alone; empty where it has the whole machine.

    Raises:
        DeclarationError: The variable names a card that the driver does not list.
    """
    mine = env.get(RENDER_NODES, "").replace(",", " ").split()
    cards = {card.render: card for card in topology(kfd)} if mine else {}
    if unknown := [name for name in mine if name not in cards]:
        raise DeclarationError(
            f"{', '.join(unknown)} not among the driver's: {', '.join(cards) or 'none'}",
            where=RENDER_NODES,
            remedy="name the render nodes of this agent's GPUs (ls /dev/dri)",
        )
    return tuple(cards[name] for name in dict.fromkeys(mine))


def topology(kfd: Path = paths.KFD) -> list[Card]:
    """The GPUs that the driver lists and this user may read."""
    cards = []
    for node in sorted((kfd / "topology" / "nodes").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            facts = dict(line.split(None, 1) for line in (node / "properties").read_text().splitlines() if " " in line)
            minor, place, domain = (int(facts.get(key, 0)) for key in ("drm_render_minor", "location_id", "domain"))
            gpu_id = (node / "gpu_id").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if minor:
            bdf = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            cards.append(Card(f"renderD{minor}", bdf, gpu_id))
    return cards


def find(
    cards: tuple[Card, ...] = (), *, allowed: str = "", proc: Path = paths.PROC, kfd: Path = paths.KFD
) -> tuple[list[Holder], list[str]]:
    """The processes that hold a GPU, and what keeps this from being told.

    Args:
        cards: This agent's alone; empty for any GPU.
        allowed: Names of programs to leave out, separated by spaces.
        proc: Where processes are shown.
        kfd: Where the driver shows its own: it knows processes of other users, and zombies that have no open file left.
    """
    known = processes.snapshot(proc)
    held: dict[int, set[str]] = {}
    hidden = 0
    for pid in known:
        nodes = _open_nodes(proc, pid)
        if nodes is None:
            hidden += 1
        elif relevant := _relevant(nodes, cards):
            held[pid] = relevant
    driver = _of_driver(kfd, cards)
    for pid in driver or ():
        held.setdefault(pid, set()).add("/dev/kfd")
    problems = []
    if driver is None and hidden:
        problems.append(
            f"{hidden} processes of other users may hold a GPU: the driver does not list its own in {kfd}/proc"
        )
    names = set(allowed.split())
    own = processes.own_line(known)
    found = []
    for pid, nodes in sorted(held.items()):
        process = known.get(pid) or processes.Process(pid, 0, 0, processes.ZOMBIE, 0, "gone")
        if pid not in own and process.name not in names:
            parent = known.get(process.parent)
            job = processes.job_of(proc, pid)
            found.append(Holder(process, str(parent or process.parent), tuple(sorted(nodes)), job))
    return found, problems


def _open_nodes(proc: Path, pid: int) -> set[str] | None:
    """GPU device nodes that a process has open; None when it is not ours to look at."""
    found: set[str] = set()
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
            if match := _NODE.fullmatch(target):
                found.add(f"/dev/{match[1]}")
    return found


def _relevant(nodes: set[str], cards: tuple[Card, ...]) -> set[str]:
    """Every program of ROCm has /dev/kfd open, so on a shared machine only the render nodes tell."""
    if not cards:
        return nodes
    return nodes & {f"/dev/dri/{card.render}" for card in cards}


def _of_driver(kfd: Path, cards: tuple[Card, ...]) -> list[int] | None:
    """Processes that the driver keeps memory or queues for; None when it does not say."""
    try:
        entries = [entry for entry in (kfd / "proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    if cards:
        entries = [entry for entry in entries if any(_uses(entry, card) for card in cards)]
    return [int(entry.name) for entry in entries]


def _uses(entry: Path, card: Card) -> bool:
    """Whether memory of this card is in use; a file that cannot be read counts as use, one that is absent does not."""
    path = entry / f"vram_{card.gpu_id}"
    try:
        return int(path.read_text(encoding="ascii")) > 0
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
