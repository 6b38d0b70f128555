"""What a queue's name promises of its agents. The name is the agent's own tag, so no change can talk it down."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hilgate.errors import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping

QUEUE = "BUILDKITE_AGENT_META_DATA_QUEUE"
"""Set by the agent from its tags."""

GPUS = "HILGATE_EXPECTED_GPUS"
ARCH = "HILGATE_EXPECTED_ARCH"
"""What a step may say it counts on; never less than what its queue promises."""

CPU_QUEUES = frozenset({"amd-cpu"})
PRODUCTS = {"mi250": ("gfx90a", 64), "mi300": ("gfx942", 192), "mi325": ("gfx942", 256), "mi355": ("gfx950", 288)}
"""Product -> gfx arch and GiB of one GPU, as in ci/agents.yaml, which an agent's plain Python cannot read; a test holds
the two together. One GPU of an MI250 is one of its two dies, as amd-smi and HIP count."""

_QUEUE = re.compile(r"amd_(mi[0-9]+)_([1-8])")


@dataclass(frozen=True)
class Promise:
    """What the agents of a queue have; 0 GPUs on a cpu queue."""

    queue: str
    gpus: int
    arch: str
    memory_gib: int


def promised(env: Mapping[str, str]) -> Promise:
    """What this agent's queue promises.

    Raises:
        DeclarationError: There is no queue, nothing is known of it, or the step counts on something else than it has.
    """
    queue = env.get(QUEUE, "")
    if queue in CPU_QUEUES:
        promise = Promise(queue, 0, "", 0)
    else:
        match = _QUEUE.fullmatch(queue)
        if match is None or match[1] not in PRODUCTS:
            known = ", ".join([*sorted(CPU_QUEUES), *(f"amd_{product}_<GPUs>" for product in PRODUCTS)])
            raise DeclarationError(
                f"nothing is known of the queue {queue!r}; known are {known}",
                where=QUEUE,
                remedy="correct the agent's queue tag, or add the product to PRODUCTS in ci/hilgate/agent/fleet.py",
            )
        promise = Promise(queue, int(match[2]), *PRODUCTS[match[1]])
    for name, has in ((GPUS, str(promise.gpus)), (ARCH, promise.arch)):
        wanted = env.get(name, has)
        if wanted != has:
            raise DeclarationError(
                f"the step counts on {wanted!r} and the queue {queue} has {has!r}",
                where=name,
                remedy="send the step to a queue that has what it needs (ci/agents.yaml)",
            )
    return promise
