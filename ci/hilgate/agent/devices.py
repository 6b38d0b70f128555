"""The render nodes that a job of this agent gets, from the driver's topology in sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hilgate.errors import CannotRunHereError, Exit, HilgateError

if TYPE_CHECKING:
    from collections.abc import Mapping

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: `drm_render_minor` is 0 for a node of processors."""

DEV = Path("/dev")
VARIABLE = "HILGATE_RENDER_NODES"
_NODE = re.compile(r"renderD[0-9]{1,4}")


class MissingGpuError(HilgateError):
    """The agent promises GPUs that are not there: another node may have them."""

    exit_status = Exit.SICK_NODE


@dataclass(frozen=True)
class Devices:
    """Device nodes of some GPUs, the groups that own them, and how many GPUs the machine has in all."""

    render_nodes: tuple[str, ...]
    groups: tuple[int, ...]
    on_host: int


NONE = Devices((), (), 0)


def of_job(gpus: int, env: Mapping[str, str], *, kfd: Path = KFD_NODES, dev: Path = DEV) -> Devices:
    """The nodes of `gpus` GPUs.

    `HILGATE_RENDER_NODES` of the agent names its own (`renderD128 renderD136`) where several agents share a machine;
    without it the agent has all of the machine's.

    Raises:
        MissingGpuError: Fewer GPUs than the step needs, or a device node that the driver lists is not there.
        CannotRunHereError: The variable is wrong, or the machine has more GPUs and nothing says which are this agent's.
    """
    if gpus == 0:
        return NONE
    listed = _listed(kfd)
    mine = env.get(VARIABLE, "").replace(",", " ").split()
    unknown = [node for node in mine if not _NODE.fullmatch(node) or node not in listed]
    if unknown or len(set(mine)) != len(mine):
        raise CannotRunHereError(
            f"{VARIABLE} names {', '.join(unknown) or 'a GPU twice'}; the driver lists {', '.join(listed) or 'no GPU'}",
            where="the agent's environment hook",
            remedy="name the render nodes of this agent's GPUs",
        )
    if not mine and len(listed) > gpus:
        raise CannotRunHereError(
            f"this machine has {len(listed)} GPUs and the step gets {gpus}: nothing says which are this agent's",
            where="the agent's environment hook",
            remedy=f"set {VARIABLE} for each agent of the machine",
        )
    chosen = (mine or listed)[:gpus]
    if len(chosen) < gpus:
        raise MissingGpuError(
            f"the step needs {gpus} GPUs and this agent has {len(chosen)}",
            where=str(kfd),
            remedy="see amd-smi list on this node",
        )
    paths = [dev / "kfd", *(dev / "dri" / node for node in chosen)]
    try:
        groups = {path.stat().st_gid for path in paths}
    except OSError as error:
        raise MissingGpuError(
            f"a GPU that the driver lists has no device node: {error.strerror}",
            where=str(error.filename),
            remedy="see the kernel's log on this node",
        ) from error
    return Devices(tuple(f"/dev/dri/{node}" for node in chosen), tuple(sorted(groups)), len(listed))


def _listed(kfd: Path) -> list[str]:
    """`renderD<minor>` of every GPU in the topology, in the driver's order, which is HIP's."""
    try:
        nodes = sorted((node for node in kfd.iterdir() if node.name.isdigit()), key=lambda node: int(node.name))
        texts = [(node / "properties").read_text(encoding="ascii") for node in nodes]
    except (OSError, UnicodeDecodeError):
        return []
    minors = [re.search(r"^drm_render_minor ([0-9]+)$", text, re.MULTILINE) for text in texts]
    return [f"renderD{minor[1]}" for minor in minors if minor and minor[1] != "0"]
