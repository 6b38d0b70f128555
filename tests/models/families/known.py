"""What vLLM 0.32 cannot do on a platform, as measured there: the error it gives. Pure.

Each entry is held against the run: an error that says something else is a failure, and so is an entry that has become
untrue. What a whole family cannot do is in `declared.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.families.family import Family

WRONG = "log-probabilities are (off|not finite)|were NaN or infinite"
"""It answers, and wrongly."""

MAMBA_1 = ("jamba", "mamba", "falcon-mamba")

NO_DRAFTS = "the stand-in of .* knows no draft tokens"
"""What the operators that stand in for missing ones say of drafts: of the delta rule, and of Mamba-1's update."""


def not_here(platform: str, family: Family, behaviour: str) -> str | None:
    """Why there is nothing to start; None where there is."""
    if platform == "cpu" and behaviour == "padded":
        return "vLLM's CPU platform captures no graphs, so no batch is padded"
    if family.attention == "cross" and behaviour == "prefix":
        return "vLLM caches no prefixes of encoder-decoders: CrossAttentionManager does not support caching"
    return None


@dataclass(frozen=True)
class Known:
    """One error of vLLM on one platform."""

    behaviour: str
    families: Callable[[Family], bool]
    error: str


NO_ENCODER = Known("spec", lambda family: family.attention == "cross", "max_seq_len: got 0")
"""vLLM says that the encoder has 0 tokens once there are drafts; on the CPU its own attention then answers NaN."""

ON_CPU = (
    # State updates on the CPU ignore which drafts were accepted. With vLLM's own attention they are as wrong:
    # Granite-4.0-H, drafts of 2, the first answer after the prompt off by 5.3 nats.
    Known("spec", lambda family: bool(family.states), f"{WRONG}|{NO_DRAFTS}"),
    NO_ENCODER,
    # With a prefix cache and no attention layer its block tables have one column, and Mamba-2 asks for the next.
    Known("prefix", lambda family: family.name == "mamba2", r"IndexError: index \d+ is out of bounds"),
)


ON_CUDA = (
    NO_ENCODER,
    # Mamba-1 goes on from the last draft, accepted or not: 1.5 nats off at the first draft that was thrown away.
    Known("spec", lambda family: family.name in MAMBA_1, WRONG),
    # Its scan takes states in float32 or in the dtype of the model.
    Known("state", lambda family: family.name in MAMBA_1, "RuntimeError: selective_scan_fwd"),
)
KNOWN = {"cpu": ON_CPU, "cuda": ON_CUDA, "rocm": ()}
"""ROCm: nothing has been measured there yet, so nothing is excused."""


def error(platform: str, family: Family, behaviour: str) -> str | None:
    """The error, as a regular expression, that vLLM is known to give; None where it is known to work."""
    if platform in family.cannot:
        return family.cannot[platform]
    for known in KNOWN[platform]:
        if known.behaviour == behaviour and known.families(family):
            return known.error
    return None
